"""The package's exceptions, by what the user has to fix.

    TrigonError
    |-- ConfigError        the configuration: an unknown key, a value out of bounds, a conflict
    |-- DataError          the dataset: a missing file or column, too many bad rows
    |   |-- BadRow         one row: an unreadable image, a wrong number of markers; skipped, counted
    |   `-- ObservationError  what an environment shows: an unreadable image; ends the episode
    |-- ModelError         the model: an unsupported family, missing or misshapen weights
    |-- RewardError        the reward function: it cannot be loaded, or fails too often
    |-- EpisodeError       the environment or a tool: it cannot be loaded, or its processes fail
    |-- EngineError        an engine violated its protocol
    |   |-- RolloutError   the rollout engine failed while it loaded weights or sampled
    |   |   `-- LostSamplersError  all workers that sample were lost
    |   |-- ParityError    rollout engine and trainer have different weights
    |   |-- DeviceMemoryError  a GPU ran out of memory while a model computed
    |   |-- TransferError  weights could not be sent to another worker
    |   `-- WorkerError    a worker died, hung, or raised an unexpected error
    |       `-- LostWorkerError  it died, or did not answer in time
    |-- NotFiniteError     training has diverged: weights, gradients or log-probabilities are nan
    |-- CheckpointError    a checkpoint is damaged, incomplete, or of another run
    |   |-- DiskError      it could not be written: the disk is full, read-only, gone, ...
    |   `-- PeerError      another rank could not write or read its part
    |-- PushError          the Hugging Face Hub cannot be reached, or refuses a model
    `-- WatchError         a watcher stopped the run: training fails, or memory runs out

Every message says what was wrong, gives the value, and says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]


class TrigonError(Exception):
    """Base class of the errors below. The command line prints their message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: up to the last frame of the user's."""
        from IPython.core.getipython import get_ipython

        shown: Any = get_ipython()
        ours_left_out = _without_our_frames(self.__traceback__)
        lines: list[str] = shown.InteractiveTB.structured_traceback(type(self), self, ours_left_out, tb_offset=1)
        return lines


class ConfigError(TrigonError):
    """The configuration is invalid."""


class DataError(TrigonError):
    """The dataset cannot be used."""


class BadRow(DataError):
    """One row cannot be used. It is skipped and counted; too many of them raise DataError."""


class ObservationError(DataError):
    """An observation of an environment cannot be shown to the model. Its episode has failed."""


class ModelError(TrigonError):
    """The model cannot be used."""


class RewardError(TrigonError):
    """The reward function cannot be used."""


class EpisodeError(TrigonError):
    """The environment or a tool of episodes cannot be used."""


class EngineError(TrigonError):
    """An engine violated its protocol."""


class RolloutError(EngineError):
    """The rollout engine failed while it loaded weights or sampled. A new one may work."""


class LostSamplersError(RolloutError):
    """All workers that sample were lost, and with them the weights with which they sampled."""


class ParityError(EngineError):
    """Rollout engine and trainer give different log-probabilities: the weight sync failed."""


class WorkerError(EngineError):
    """A worker died, hung, or raised an unexpected error. All other workers were stopped."""


class LostWorkerError(WorkerError):
    """A worker died, or did not answer in time. Another one in its place may work."""


class DeviceMemoryError(EngineError):
    """A GPU ran out of memory in a pass or an update of a model."""


class TransferError(EngineError):
    """Weights could not be sent to a worker, since one of those that receive them has failed."""


class NotFiniteError(TrigonError):
    """Training has diverged: weights, gradients or log-probabilities are nan or infinite."""


class CheckpointError(TrigonError):
    """A checkpoint cannot be used."""


class DiskError(CheckpointError):
    """A checkpoint or an export could not be written. What was there before is intact."""


class PeerError(CheckpointError):
    """Another rank could not write or read its part; it raises the error that is the cause."""


class WatchError(TrigonError):
    """A watcher (trainer.watch) stopped the run."""


class PushError(TrigonError):
    """A model cannot be pushed to the Hugging Face Hub."""


def raises_at_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function of the public interface, whose TrigonErrors end in its caller's frame.

    Their messages say everything: frames of this package, and the errors that they were made from,
    would only hide them. pytest leaves out frames with __tracebackhide__, IPython asks the error
    for its traceback, and in a script there is a hook for uncaught errors. Others keep theirs.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except TrigonError as error:
            if not isinstance(sys.excepthook, _WithoutOurFrames):
                sys.excepthook = _WithoutOurFrames(sys.excepthook)
            raise error.with_traceback(None) from None

    return call


class _WithoutOurFrames:
    """The hook for uncaught errors: shows TrigonErrors up to the last frame of the user's."""

    def __init__(self, shown_by: Callable[..., object]) -> None:
        self._shown_by = shown_by

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_ours = isinstance(error, TrigonError)
        self._shown_by(kind, error, _without_our_frames(traceback) if is_ours else traceback)


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that ends in the last frame which is not of this package."""
    last, frame = None, traceback
    while frame is not None:
        name = str(frame.tb_frame.f_globals.get("__name__", ""))
        last, frame = (last, frame.tb_next) if name.partition(".")[0] == _PACKAGE else (frame, frame.tb_next)
    if last is not None:
        last.tb_next = None
    return traceback


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
