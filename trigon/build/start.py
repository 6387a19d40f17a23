"""Starts a run in this process, for the command line and for Python: signals and environment.

Imports heavy libraries only when a run is started.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.config.load import LoadedConfig
from trigon.variables import keep_compiled_code

if TYPE_CHECKING:
    from trigon.build.objects import RunObjects, RunOutcome
    from trigon.report.loggers.protocol import Logger

_STDERR = 2  # file descriptor


class StopSignals:
    """Turns signals into a request to stop after the current step; a second signal acts at once.

    received: the signal that made the request; None: no request.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handlers: dict[int, Any] = {}  # by signal: what was in effect before

    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self.received is not None

    @contextmanager
    def handled(self, number: signal.Signals) -> Iterator[None]:
        """Handle a signal within the context, unless this process was started to ignore it.

        In another thread than the main one, in which Python allows no handlers, nothing is handled.
        """
        before = signal.getsignal(number)
        if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._handlers[number] = before
        signal.signal(number, self._receive)
        try:
            yield
        finally:
            del self._handlers[number]
            signal.signal(number, before)

    def _receive(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number)
        for each, before in self._handlers.items():
            signal.signal(each, before)
        if self.received is signal.SIGINT:
            text = "\nCtrl-C: finishing and saving the current step; press Ctrl-C again to stop at once\n"
        else:
            text = f"{self.received.name}: finishing and saving the current step\n"
        # Not print, which raises if the signal arrives during another print.
        os.write(_STDERR, text.encode())


def quiet_torch(loaded: LoadedConfig) -> None:
    """Do not let torch's C++ code log notes on a CPU, if it is not imported yet.

    vLLM's notes on which NUMA node its memory is.
    """
    if loaded.config.trainer.device == "cpu":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read as torch is imported


def start_run(
    loaded: LoadedConfig,
    *,
    stop: StopSignals,
    export_to: Path | None = None,
    loggers: Sequence[Logger] = (),
    objects: RunObjects | None = None,
) -> RunOutcome:
    """Train with a configuration, until the last step or until stop has received a signal.

    SIGTERM is handled all the time, and Ctrl-C (SIGINT) during the steps.
    Args: export_to, loggers, objects: as for run_training. Raises: as run_training, and
    KeyboardInterrupt.
    """
    from trigon.report.loggers.registry import check_logger_objects

    check_logger_objects(loggers)
    quiet_torch(loaded)
    keep_compiled_code()
    from trigon.build.objects import NO_OBJECTS
    from trigon.build.run import run_training
    from trigon.data.images import ignore_pillow_warnings
    from trigon.report.loggers.protocol import LoggerEnvironment

    ignore_pillow_warnings()
    logger_environment = LoggerEnvironment(
        tensorboard_dir=read_path("TENSORBOARD_DIR"),
        swanlab_dir=read_path("SWANLAB_DIR"),
        swanlab_mode=os.environ.get("SWANLAB_MODE"),
        swanlab_api_key=os.environ.get("SWANLAB_API_KEY"),
    )
    with stop.handled(signal.SIGTERM):
        return run_training(
            loaded.config,
            warnings=loaded.warnings,
            logger_environment=logger_environment,
            loggers=loggers,
            should_stop=stop.requested,
            defer_interrupts=lambda: stop.handled(signal.SIGINT),
            export_to=export_to,
            objects=NO_OBJECTS if objects is None else objects,
        )


def read_path(variable: str) -> Path | None:
    """Return the path in an environment variable, or None if it is unset or empty."""
    return Path(os.environ[variable]) if os.environ.get(variable) else None
