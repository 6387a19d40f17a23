"""What can go wrong, by whose hands it can be mended.

    TrigonError
    |-- ConfigError        the wishes: an unknown key, a value out of bounds, numbers that do not fit together
    |-- DataError          the dataset: a missing file or column, too many bad rows
    |   `-- BadRow         one row: an unreadable image, markers that do not match; set aside and counted
    |-- ModelError         the model: an unsupported family, missing or misshapen weights
    |-- RewardError        the reward function: cannot be loaded, or fails for too many answers
    |-- EngineError        an engine broke its contract
    |   |-- ParityError    the rollout engine does not hold the trainer's weights
    |   `-- WorkerError    a worker of several died, hung or raised what nobody expected
    `-- CheckpointError    a checkpoint that is damaged, incomplete, or of another run

Every message says what was wrong, the value, and what to do. This module imports nothing of ours.
"""

from __future__ import annotations


class TrigonError(Exception):
    """Any error that this package raises on purpose. The command line prints its message without a traceback."""


class ConfigError(TrigonError):
    """The configuration cannot be honoured."""


class DataError(TrigonError):
    """The dataset cannot be used."""


class BadRow(DataError):
    """One row cannot be used. It is set aside and counted; too many of them raise DataError."""


class ModelError(TrigonError):
    """The model cannot be used."""


class RewardError(TrigonError):
    """The reward function cannot be used."""


class EngineError(TrigonError):
    """An engine broke its contract."""


class ParityError(EngineError):
    """Rollout engine and trainer disagree about the same tokens: the weights did not arrive."""


class WorkerError(EngineError):
    """A worker of several died, hung, or raised what nobody expected; all others were stopped."""


class CheckpointError(TrigonError):
    """A checkpoint cannot be used."""
