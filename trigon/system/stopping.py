"""How a run stops and continues: signals, the time until it is killed, the command that resumes it.

systemd, Kubernetes and batch systems send SIGTERM to every process of a job at once, and kill it
after a while: Kubernetes and Slurm after 30 s. Only the driver acts on it: the others must live
until it has saved. SIGINT is left to Ctrl-C. By the times that steps, updates and saves took, the
step is finished or left, so that in either case a checkpoint is complete by then. Until a step's
first update begins, the state of the step before is in memory, and leaving the step loses nothing
else. Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TERMINATION = (signal.SIGTERM, signal.SIGHUP)
"""What a system sends to end a job: before it kills it, and when its terminal is closed."""


class Terminated(KeyboardInterrupt):
    """The run ends at once because of SIGTERM or SIGHUP, as KeyboardInterrupt does after Ctrl-C."""


@contextmanager
def termination_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGHUP in this thread; processes started within keep them blocked.

    A mask is inherited by programs, by their threads and by what they start, and no handler that a
    program installs undoes it. SIGKILL still ends them. A signal that arrives here meanwhile is
    delivered when the context ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_stop_signals() -> None:
    """Do nothing at SIGTERM, SIGHUP and SIGINT in this process, and unblock them.

    What this process starts gets the default actions: a reward function may end its own programs by
    SIGTERM. Handlers, unlike masks and ignored signals, are not inherited by programs, and forked
    processes reset them; the signals are blocked meanwhile, so that none gets lost.
    """
    for number in (*TERMINATION, signal.SIGINT):
        signal.signal(number, _disregard)
        signal.siginterrupt(number, False)  # interrupted system calls are restarted, in C libraries as well
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)
    _unblock()


def ignore_stop_signals() -> None:
    """Ignore SIGTERM, SIGHUP and SIGINT in this process, for all of its threads.

    For a worker, in which a library starts threads that have nothing blocked, and whose methods do
    not run in the main thread, the only one in which Python's signal() may be called.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in (*TERMINATION, signal.SIGINT):
        set_handler(number, int(signal.SIG_IGN))


def watch_signals(*numbers: signal.Signals) -> int:
    """Let these signals make a descriptor readable, and return it; they do nothing else.

    They get a function rather than SIG_IGN, which programs that this process starts would inherit.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, _disregard)
    return reader


def _disregard(number: int, frame: object) -> None:
    """Do nothing."""


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION)


def _reset() -> None:
    for number in (*TERMINATION, signal.SIGINT):
        if signal.getsignal(number) is _disregard:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


@dataclass(frozen=True, slots=True)
class SameCommand:
    """The command of a run, with the option that it needs to continue from a checkpoint.

    folder: run folder. finds_last: without an option the command resumes from the last checkpoint
    there. saves_weights_only: no checkpoint of the run can be resumed.
    Each method returns a clause of "the same command", or that "with
    trainer.load_checkpoint_path=...", and what it does ("resumes after step 5"). With
    saves_weights_only it returns what can be done with weights.
    """

    folder: Path = Path()
    finds_last: bool = True
    saves_weights_only: bool = False

    def from_last(self, does: str) -> str:
        """Return how to continue from the last checkpoint in the run folder, whichever it is."""
        return self.from_checkpoint(self.folder / "global_step_...", does)

    def from_step(self, step: int, does: str) -> str:
        """Return how to continue after this step, the last one that has a checkpoint."""
        return self.from_checkpoint(self.folder / f"global_step_{step}", does)

    def from_checkpoint(self, checkpoint: Path, does: str) -> str:
        """Return how to continue from the last checkpoint, whose folder this is."""
        if self.saves_weights_only:
            return WEIGHTS_ONLY
        option = "" if self.finds_last else f" with trainer.load_checkpoint_path={shlex.quote(str(checkpoint))}"
        return f"the same command{option} {does}"


WEIGHTS_ONLY = (
    "checkpoints of trainer.save_model_only=true cannot be resumed; to train on from one, export it, and start a new "
    "run with the export as worker.actor.model.model_path"
)

SAME_COMMAND = SameCommand()
"""Of a run whose command finds its last checkpoint."""


MEASURED = 5
"""Latest steps, updates or validations whose longest is taken for the duration of the next."""


class StepLeft(Exception):
    """A step, or a validation, is not finished: a stop was requested, and it takes too long."""


class Grace:
    """The time that a run has from a request to stop until it has saved.

    seconds: that time; None: as long as the step needs. same_command: resumes the run.
    clock: seconds, for tests.
    started_step: the step after which the run started. saved_step: the last step with a
    checkpoint; at first started_step. save_seconds: how long a complete save took; None: not known
    yet. score: the validation reward of the last complete step; None if it was not validated.
    """

    def __init__(
        self,
        seconds: float | None = None,
        same_command: SameCommand = SAME_COMMAND,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._same_command = same_command
        self._clock = clock
        self._requested_at: float | None = None
        self._step = 0
        self._step_started = 0.0
        self._validation_started = 0.0
        self._stage: Literal["sampling", "updating", "made"] = "sampling"
        self._measured: dict[str, deque[float]] = {}
        self.started_step = 0
        self.saved_step = 0
        self.save_seconds: float | None = None
        self.score: float | None = None

    def request(self, *, limited: bool) -> str:
        """Start the time, and return what the run will do. Called by a handler of signals.

        limited: False if the process is not killed after a while, as with Ctrl-C.
        """
        if not limited or self._seconds is None:
            return "finishing and saving the current step"
        self._requested_at = self._clock()
        if self._stage == "made":
            return f"saving step {self._step}"
        if self._stage == "updating":
            return (
                f"finishing the update of step {self._step} and saving; should the process be killed before that, "
                f"{self._resumption()}"
            )
        needed = self._needed_by_step()
        limit = f"trainer.grace_seconds={self._seconds:g}"
        if needed is None:
            return f"stopping, since how long step {self._step} takes is not known yet ({limit})"
        if needed > self._seconds:
            return (
                f"stopping before the end of step {self._step}, since it and a save take about {needed:.0f} s more "
                f"({limit}), and saving the step before it"
            )
        return f"finishing and saving the current step, in about {needed:.0f} s ({limit})"

    def begin_step(self, step: int) -> None:
        """Start measuring a step."""
        self._step, self._step_started, self._stage = step, self._clock(), "sampling"

    def check_step(self) -> None:
        """Raise StepLeft if a stop was requested, and the step cannot be made and saved in time.

        To be called until the step's first update begins.
        """
        if self._requested_at is None:
            return
        needed = self._needed_by_step()
        if needed is None or needed > self._seconds_left():
            raise StepLeft

    def check_waiting(self) -> None:
        """Raise StepLeft if a stop was requested, and a save takes all the time that is left."""
        if self._requested_at is not None and self._needed_by_save() > self._seconds_left():
            raise StepLeft

    def note_saved(self, step: int, seconds: float | None) -> None:
        """Note which step was saved last in this run, and how long a save took.

        To be called whenever a save may have been completed, also in the background. The last
        checkpoint may belong to an earlier run.
        Args: as published_step and save_seconds of CheckpointStore.
        """
        self.saved_step = max(self.saved_step, step)
        self.save_seconds = seconds

    @contextmanager
    def update(self) -> Iterator[None]:
        """Measure the updates of the step, which from here on is not left any more."""
        started, self._stage = self._clock(), "updating"
        yield
        ended, self._stage = self._clock(), "made"
        self._measure("update", ended - started)
        self._measure("step", ended - self._step_started)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Measure a validation, unless it is left."""
        self._validation_started = self._clock()
        yield
        self._measure("validation", self._clock() - self._validation_started)

    def check_validation(self) -> None:
        """Raise StepLeft if a stop was requested, and the validation cannot end in time."""
        if self._requested_at is None:
            return
        needed = self._longest("validation")
        elapsed = self._clock() - self._validation_started
        if needed is None or max(needed - elapsed, 0.0) + self._needed_by_save() > self._seconds_left():
            raise StepLeft

    def _needed_by_step(self) -> float | None:
        """Return the seconds until the step is made and saved; None if no step was measured."""
        step, update = self._longest("step"), self._longest("update")
        if step is None or update is None:
            return None
        return max(self._step_started + step - self._clock(), update) + self._needed_by_save()

    def _needed_by_save(self) -> float:
        """Return the seconds of a save: half of the time if none was measured."""
        assert self._seconds is not None
        return self._seconds / 2 if self.save_seconds is None else self.save_seconds

    def _seconds_left(self) -> float:
        assert self._requested_at is not None
        assert self._seconds is not None
        return self._requested_at + self._seconds - self._clock()

    def _measure(self, name: str, seconds: float) -> None:
        self._measured.setdefault(name, deque(maxlen=MEASURED)).append(seconds)

    def _longest(self, name: str) -> float | None:
        return max(self._measured[name]) if name in self._measured else None

    def _resumption(self) -> str:
        if self.saved_step == 0:
            return "the same command starts from the beginning"
        resumes = f"resumes after step {self.saved_step}"
        if self.saved_step > self.started_step:
            return self._same_command.from_step(self.saved_step, resumes)
        # Where this run started, the command that started it starts again.
        return f"the same command {resumes}"
