"""Starts a run in this process, for the command line and for Python: signals, environment, result.

Imports heavy libraries only when a run is started.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.config.load import LoadedConfig
from trigon.config.paths import expand_path
from trigon.errors import CheckpointError
from trigon.report.run import RunTables, load_run
from trigon.system.hangs import HangWatch
from trigon.system.process_settings import ARENAS_VARIABLE, keep_compiled_code, let_segments_grow, limit_arenas
from trigon.system.processes import running_below
from trigon.system.stopping import TERMINATION, Grace, Terminated

if TYPE_CHECKING:
    import pandas

    from trigon.assemble.preflight import RunObjects
    from trigon.report.delivery import Logger

REPEAT_SECONDS = 1.0
"""A second SIGTERM or SIGHUP that comes sooner belongs to the first one.

timeout(1) sends its signal to the process and to its group, and the end of a terminal is signalled
by the kernel and by the shell.
"""

AT_ONCE_SECONDS = 30.0
"""How long a run that ends at once may take for its processes, and a save that is being written."""

_STDOUT, _STDERR = 1, 2  # file descriptors


class StopSignals:
    """Turns signals into a request to stop, or ends the run at once.

    Within deferred(), the steps of a run, the first signal is a request; otherwise, and at a second
    signal, SIGTERM and SIGHUP raise Terminated, and SIGINT (Ctrl-C) KeyboardInterrupt.
    owns_process: whether this process exists for the run, so that it may be killed after a second
    Ctrl-C if it does not end; False in the kernel of a notebook, where Ctrl-C interrupts a cell.
    received: the first signal, or None before it. grace: decides what is finished after a request.
    """

    def __init__(self, grace: Grace | None = None, *, owns_process: bool = True) -> None:
        self.received: signal.Signals | None = None
        self.grace = Grace() if grace is None else grace
        self._received_at = 0.0
        self._owns_process = owns_process
        self._is_deferring = False
        self._ends_at_once = False
        self._watch = HangWatch()

    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self.received is not None

    def use_hang_watch(self, watch: HangWatch) -> None:
        """Let a watchdog kill what has not ended AT_ONCE_SECONDS after a second signal.

        After a second Ctrl-C only if the process is the run's.
        """
        self._watch = watch

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM and SIGHUP within the context. A signal that is ignored stays ignored.

        In another thread than the main one, in which Python allows no handlers, nothing is handled.
        """
        with self._handlers(TERMINATION):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal, SIGINT too, be a request within the context."""
        with self._handlers((signal.SIGINT,)):
            self._is_deferring = True
            try:
                yield
            finally:
                self._is_deferring = False

    @contextmanager
    def _handlers(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in numbers}
        handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def _receive(self, number: int, frame: object) -> None:
        terminates, now = number in TERMINATION, time.monotonic()
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            if self._is_deferring:
                self._announce()
                return
        elif terminates and self.received in TERMINATION and now - self._received_at < REPEAT_SECONDS:
            return
        if self._ends_at_once:
            return  # an error here would interrupt the end of the run's processes
        self._ends_at_once = True
        if terminates or self._owns_process:
            self._watch.end_within(AT_ONCE_SECONDS, status=128 + number)
        raise Terminated(signal.Signals(number).name) if terminates else KeyboardInterrupt

    def _announce(self) -> None:
        assert self.received is not None
        if self.received is signal.SIGINT:
            action = self.grace.request(limited=False)
            text = f"\nCtrl-C: {action}; press Ctrl-C again to stop at once\n"
        else:
            text = f"{self.received.name}: {self.grace.request(limited=True)}\n"
        # Not print, which raises if the signal arrives during another print.
        os.write(_STDERR, text.encode())


def leave_closed_terminal() -> None:
    """Write to nowhere what goes to a terminal that was closed, where each write is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (_STDOUT, _STDERR):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended, and where its results are.

    folder: the run folder. step: the last step that was made, here or before a resume. stopped: the
    run was stopped by on_step, Ctrl-C or SIGTERM; the same call continues it. checkpoint: the
    folder of that step's checkpoint; None before the first step. model_folder: the exported Hugging
    Face model; None without export_to, and after a signal.
    """

    folder: Path
    step: int
    stopped: bool
    checkpoint: Path | None
    model_folder: Path | None

    @property
    def run(self) -> RunTables:
        """The run as load_run returns it: configuration, metrics and rollouts."""
        return load_run(self.folder)

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics, a row for each step; steps before a resume are included."""
        return self.run.metrics()

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints in the run folder, by step."""
        from trigon.checkpoint.store import find_checkpoints

        return find_checkpoints(self.folder)

    def export(self, folder: str | Path | None = None, *, dtype: str | None = None) -> Path:
        """Write the last checkpoint as a Hugging Face model, and return its folder.

        An earlier export in the folder is replaced.
        folder: None: huggingface_model in the checkpoint. dtype: bf16, fp16 or fp32; None: the
        dtype of the checkpoint.
        Raises: CheckpointError if the run has no checkpoint, if its folder has been removed, and as
        trigon.checkpoint.export.export_checkpoint.
        """
        from trigon.checkpoint.export import export_checkpoint

        output = None if folder is None else expand_path(str(folder))
        return export_checkpoint(self._last_checkpoint(), output, dtype=dtype)

    def load_model(self) -> Any:
        """Return the trained model as a transformers model, on the CPU.

        It is loaded from model_folder, or else from huggingface_model in the checkpoint, which is
        exported first if it has not been. It has the dtype of the folder: the checkpoint's, unless
        export() was called with another one. The tokenizer or processor is in the same folder, such
        as AutoProcessor.from_pretrained(result.checkpoint / "huggingface_model").
        Raises: CheckpointError as export.
        """
        from trigon.checkpoint.store import EXPORTED, exported_step
        from trigon.models.load import ATTENTION, auto_class, family_of_folder, without_progress_bars

        folder = self.model_folder
        if folder is None:
            folder = self._last_checkpoint() / EXPORTED
            if exported_step(folder) != self.step:
                folder = self.export()
        with without_progress_bars():
            return auto_class(family_of_folder(folder)).from_pretrained(
                folder, dtype="auto", attn_implementation=ATTENTION
            )

    def _last_checkpoint(self) -> Path:
        if self.checkpoint is None:
            raise CheckpointError(f"the run in {self.folder} has no checkpoint: it has made no step")
        return self.checkpoint


def share_heaps() -> None:
    """Limit the heaps of this process's threads (limit_arenas), unless the user has."""
    if ARENAS_VARIABLE not in os.environ:
        limit_arenas()


def start_run(
    loaded: LoadedConfig,
    *,
    stop: StopSignals,
    export_to: Path | None = None,
    loggers: Sequence[Logger] = (),
    objects: RunObjects | None = None,
) -> TrainResult:
    """Train with a configuration, until the last step or until stop has received a signal.

    SIGTERM and SIGHUP are handled all the time, and Ctrl-C (SIGINT) during the steps.
    Args: export_to, loggers, objects: as for run_training. Raises: as run_training, and
    KeyboardInterrupt.
    """
    from trigon.report.delivery import check_logger_objects

    check_logger_objects(loggers)
    others = running_below()  # processes that were started before, such as by the cells of a notebook
    share_heaps()
    keep_compiled_code()
    let_segments_grow()
    from trigon.assemble.preflight import NO_OBJECTS, open_early

    objects = NO_OBJECTS if objects is None else objects
    trainer = loaded.config.trainer
    stop.grace = Grace(trainer.grace_seconds, trainer.same_command)
    with stop.handled(), ExitStack() as stack:
        opened = open_early(loaded.config, objects, stack)
        from trigon.assemble.run import run_training
        from trigon.data.images import ignore_pillow_warnings

        ignore_pillow_warnings()
        return run_training(loaded, opened, objects, stop=stop, export_to=export_to, loggers=loggers, others=others)
