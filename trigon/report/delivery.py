"""The interface of a logger, which loggers there are, and how a run's reports reach them.

A logger receives a run's metrics and samples besides the run folder. It is any object with the two
methods of Logger:

    class Prints:
        def log_metrics(self, step, metrics):
            print(step, metrics["reward/overall"])

        def log_samples(self, step, split, samples):
            for sample in samples:
                print(sample.row.response)

It may have two more: `open(run: LoggedRun) -> str | None`, called once before the others, and
`close() -> None`, called once after them. open returns where the results can be seen, such as a
URL, for the console. If the object has a `name`, messages use it.

open is called by the thread that starts the run. Each logger has a thread of its own, which makes
the other calls in order, so that no logger can stop or slow the run. A logger is given up, with one
warning, when a call raises, when one takes longer than CALL_SECONDS, and when MAX_PENDING reports
wait for it. Everything that it misses is in the run folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from PIL import Image

from trigon.config.names import LOGGERS
from trigon.errors import ConfigError
from trigon.report.rollouts import RolloutRow
from trigon.system.files import read_json_object, write_json
from trigon.system.installation import install_command
from trigon.types import RolloutGroup

BUILT_IN = ("console", "file")
"""Names of trainer.logger that need no library: the reporter writes to both."""

MAX_PENDING = 1000
"""Reports that may wait for a logger. A step has one, and one more where samples are shown."""

CALL_SECONDS = 300.0
"""How long a call may take while others wait for it."""

CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR = 60.0, 10.0
"""How long a run waits at its end for all loggers together."""

MAX_IMAGE_SIDE = 512

SampleSplit = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run that is logged.

    project, experiment: its names. config: the resolved configuration, nested, of JSON types,
    without secrets.
    folder: the run folder; a run that resumes in it continues its curves where the logger supports
    it.
    first_step: the first step that the run will report; what an earlier run reported from there on
    is superseded. 0: it starts from the beginning. None: it supersedes nothing.
    """

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path
    first_step: int | None

    def read_record(self, logger: str) -> dict[str, Any]:
        """Return what write_record wrote into this folder; {} if the run continues no curves.

        A run that starts from the beginning does not, nor does a run in a copy of a run folder
        whose original is still there, with curves of its own.
        """
        path = self._record(logger)
        if self.first_step == 0 or not path.exists():
            return {}
        content = read_json_object(path)
        original = Path(content.get("folder", self.folder)) / path.name
        try:
            is_copy = not path.samefile(original) and path.read_bytes() == original.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return content
        except OSError:  # another user's, whose curves this run does not continue either
            return {}
        return {} if is_copy else content

    def write_record(self, logger: str, content: Mapping[str, Any]) -> None:
        """Write what a logger needs to continue the curves of this run, into LOGGER.json."""
        write_json(self._record(logger), {**content, "folder": str(self.folder.resolve())})

    def _record(self, logger: str) -> Path:
        return self.folder / f"{logger}.json"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion to be shown.

    row: what rollouts/ has of it; its texts come from models and datasets and are not escaped.
    images: the images of the prompt, RGB, reduced to at most MAX_IMAGE_SIDE pixels in width and
    height.
    """

    row: RolloutRow
    images: tuple[Image.Image, ...]


class Logger(Protocol):
    """Receives metrics and samples. The module describes what it may have besides."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Steps ascend; 0 is the validation before training."""
        ...

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """Record some completions of a step, before its metrics."""
        ...


MakeSamples = Callable[[], Sequence[Sample]]


class Deliveries:
    """All loggers of a run, each with its thread.

    warn: called with a message when a logger is given up, from any thread.
    """

    def __init__(self, loggers: Sequence[Logger], *, warn: Callable[[str], None]) -> None:
        self._deliveries = [_Delivery(logger, warn) for logger in loggers]

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        for delivery in self._deliveries:
            delivery.submit("log_metrics", lambda: (step, dict(metrics)))

    def samples(self, step: int, split: SampleSplit, make_samples: MakeSamples) -> None:
        """Pass samples to all loggers. make_samples: called once, in the thread of a logger."""
        lock = threading.Lock()
        made: list[Sequence[Sample]] = []

        def arguments() -> tuple[object, ...]:
            with lock:
                if not made:
                    made.append(make_samples())
            return step, split, made[0]

        for delivery in self._deliveries:
            delivery.submit("log_samples", arguments)

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Make the calls that wait and close all loggers, for at most n seconds."""
        deadline = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.submit_close()
        for delivery in self._deliveries:
            delivery.join(max(deadline - time.monotonic(), 0.0), limit=seconds)
        self._deliveries.clear()


class _Delivery:
    """The thread of one logger."""

    def __init__(self, logger: Logger, warn: Callable[[str], None]) -> None:
        self._logger = logger
        self._name = name_of(logger)
        self._is_alive = True
        self._warn = warn
        # The name of a method, and what makes its arguments; None: the end.
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], tuple[object, ...]]] | None] = queue.SimpleQueue()
        self._call_started: float | None = None
        self._lock = threading.Lock()
        # A daemon: a call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._make_calls, name=f"logger-{self._name}", daemon=True)
        self._thread.start()

    def submit(self, method: str, arguments: Callable[[], tuple[object, ...]]) -> None:
        """Add a call to those that wait, unless the logger has been given up."""
        started = self._call_started
        if started is not None and time.monotonic() - started > CALL_SECONDS:
            self._give_up(f"has not returned from a call for {CALL_SECONDS:g} s")
        if self._calls.qsize() >= MAX_PENDING:
            self._give_up(f"is {MAX_PENDING} reports behind")
        if self._is_alive:
            self._calls.put((method, arguments))

    def submit_close(self) -> None:
        """Add the last call, after which the thread ends."""
        if hasattr(self._logger, "close"):
            self.submit("close", tuple)
        self._calls.put(None)

    def join(self, seconds: float, *, limit: float) -> None:
        """Wait for the thread. limit: the time that all loggers had, for the warning."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(f"has not finished {limit:g} s after the end of the run")

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_alive:
                continue
            method, arguments = call
            self._call_started = time.monotonic()
            try:
                # Looked up here: a method that is missing is the logger's failure.
                getattr(self._logger, method)(*arguments())
            # SystemExit too: it would end this thread, which is the logger's own, without a word.
            except BaseException as error:  # noqa: BLE001  (see the module docstring)
                self._give_up(f"failed: {type(error).__name__}: {error}")
            self._call_started = None

    def _give_up(self, reason: str) -> None:
        with self._lock:
            was_alive, self._is_alive = self._is_alive, False
        if was_alive:
            self._warn(
                f"the logger {self._name} {reason}. It is no longer used; the run continues, and all metrics and "
                "rollouts are in its folder"
            )


def name_of(logger: Logger) -> str:
    """Return the name of a logger in messages: its attribute `name`, or its type's."""
    return str(getattr(logger, "name", type(logger).__name__))


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger is unknown or not installed. Imports no library."""
    for name in names:
        if name in BUILT_IN:
            continue
        if name not in LOGGERS:
            raise ConfigError(f"trainer.logger names {name!r}; it takes {', '.join((*BUILT_IN, *LOGGERS))}")
        library = getattr(importlib.import_module(f"trigon.report.loggers.{name}").LOGGER, "library", name)
        if library is not None and importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"trainer.logger names {name}, which is not installed: run {install_command(name)}, or remove it"
            )


def check_logger_objects(loggers: Sequence[Any]) -> None:
    """Raise ConfigError if an object that a user passes as a logger cannot be one."""
    for logger in loggers:
        if isinstance(logger, type):
            raise ConfigError(
                f"loggers contains the class {logger.__name__} instead of an object: pass {logger.__name__}(...)"
            )
        missing = [name for name in ("log_metrics", "log_samples") if not callable(getattr(logger, name, None))]
        if missing:
            raise ConfigError(
                f"loggers contains an object of type {type(logger).__name__} without {' and '.join(missing)}: a "
                "logger is an object with the methods log_metrics(step, metrics) and log_samples(step, split, samples)"
            )
        check_call(logger.log_metrics, "log_metrics(step, metrics)", of=f" of the logger {name_of(logger)}")
        check_call(logger.log_samples, "log_samples(step, split, samples)", of=f" of the logger {name_of(logger)}")


def check_call(function: object, call: str, *, of: str = "") -> None:
    """Raise ConfigError for what cannot be called as in `call`, such as "on_step(step, metrics)".

    of: whose function it is, for the error. What has no readable signature passes.
    """
    name, _, arguments = call.removesuffix(")").partition("(")
    if not callable(function):
        raise ConfigError(f"{name}{of} is {function!r}; give a function that is called as {call}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise ConfigError(f"{name}{of} takes {signature}, but is called as {call}") from error


def make_loggers(names: Sequence[str]) -> list[Logger]:
    """Return the loggers of trainer.logger, to be opened; "console" and "file" are skipped.

    A name that is given twice is one logger.
    Raises: ConfigError if one is unknown or not installed.
    """
    check_loggers(names)
    opened = [name for name in dict.fromkeys(names) if name not in BUILT_IN]
    return [importlib.import_module(f"trigon.report.loggers.{name}").LOGGER() for name in opened]


def open_loggers(loggers: Sequence[Logger], run: LoggedRun) -> list[str]:
    """Open loggers in order. Returns: for those that say so, where their results can be seen.

    Raises: ConfigError if one fails to open (no account, no network); the others are closed.
    """
    places = []
    for index, logger in enumerate(loggers):
        name = name_of(logger)
        try:
            place = logger.open(run) if hasattr(logger, "open") else None
        except Exception as error:
            for opened in loggers[:index]:
                if hasattr(opened, "close"):
                    opened.close()
            remedy = getattr(logger, "remedy", "Correct its method open")
            raise ConfigError(
                f"trainer.logger names {name}, which failed to open: {type(error).__name__}: {error}. {remedy}, or "
                "remove it"
            ) from error
        if place:
            places.append(f"{name}: {place}")
    return places


Asked = Literal["stop", "save"]
"""What a hook may return. stop: save this step, and end the run. save: save this step."""

OnStep = Callable[[int, Mapping[str, float]], object]
OnRollouts = Callable[[Sequence[RolloutGroup]], object]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the user. An error in one ends the run.

    on_rollouts: called with the groups of a step, scored, before the update.
    on_step: called with a step and its metrics, all numbers of its line in metrics.jsonl, when the
    step's checkpoint, if one is due, is saved; with step 0 after a validation before training.
    Raises: ConfigError, as it is made, if one cannot be called so.
    """

    on_step: OnStep | None = None
    on_rollouts: OnRollouts | None = None

    def __post_init__(self) -> None:
        if self.on_step is not None:
            check_call(self.on_step, "on_step(step, metrics)")
        if self.on_rollouts is not None:
            check_call(self.on_rollouts, "on_rollouts(groups)")

    def step(self, step: int, metrics: Mapping[str, float]) -> Asked | None:
        """Call on_step, if there is one, and return what it asks for.

        Raises: ValueError if it returns another text; what is no text is ignored.
        """
        asked = None if self.on_step is None else self.on_step(step, metrics)
        if isinstance(asked, str) and asked not in ("stop", "save"):
            raise ValueError(f"on_step returned {asked!r}; it may return 'stop', 'save' or None")
        return cast(Asked, asked) if isinstance(asked, str) else None

    def rollouts(self, groups: Sequence[RolloutGroup]) -> None:
        """Call on_rollouts, if there is one."""
        if self.on_rollouts is not None:
            self.on_rollouts(groups)
