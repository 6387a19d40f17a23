"""The loggers of trainer.logger by name, and how they are opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from trigon.errors import ConfigError
from trigon.report.loggers.delivery import name_of
from trigon.report.loggers.mlflow import MLflowLogger
from trigon.report.loggers.protocol import LoggedRun, Logger, LoggerEnvironment
from trigon.report.loggers.swanlab import SwanLabLogger
from trigon.report.loggers.tensorboard import TensorBoardLogger
from trigon.report.loggers.trackio import TrackioLogger
from trigon.report.loggers.wandb import WandbLogger
from trigon.system.installation import install_command

BUILT_IN = ("console", "file")
"""Names of trainer.logger that need no library: the reporter writes to both."""

# By name, which is also that of the package. None of these modules imports it before it is opened.
_LOGGERS: dict[str, Callable[[LoggerEnvironment], Logger]] = {
    "mlflow": MLflowLogger,
    "swanlab": SwanLabLogger,
    "tensorboard": TensorBoardLogger,
    "trackio": TrackioLogger,
    "wandb": WandbLogger,
}

_METHODS = ("log_metrics", "log_samples")
"""Methods that every logger has."""

# What to do if a logger does not open.
_HINTS = {
    "mlflow": "Set MLFLOW_TRACKING_URI to a tracking server, or leave it out for a store in the run folder",
    "swanlab": "Run `swanlab login`, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline",
    "tensorboard": "Set TENSORBOARD_DIR to a writable folder",
    "trackio": "Set TRACKIO_DIR to a writable folder",
    "wandb": "Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline",
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger is unknown or not installed. Imports none of them."""
    for name in names:
        if name in BUILT_IN:
            continue
        if name not in _LOGGERS:
            raise ConfigError(f"trainer.logger names {name!r}; it takes {', '.join((*BUILT_IN, *_LOGGERS))}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger names {name}, which is not installed: run {install_command(name)}, or remove it"
            )


def check_logger_objects(loggers: Sequence[object]) -> None:
    """Raise ConfigError if an object that a user passes as a logger cannot be one."""
    for logger in loggers:
        if isinstance(logger, type):
            raise ConfigError(
                f"loggers contains the class {logger.__name__} instead of an object: pass {logger.__name__}(...)"
            )
        missing = [method for method in _METHODS if not callable(getattr(logger, method, None))]
        if missing:
            raise ConfigError(
                f"loggers contains an object of type {type(logger).__name__} without {' and '.join(missing)}: a "
                "logger is an object with the methods log_metrics(step, metrics) and log_samples(step, split, samples)"
            )


def make_loggers(names: Sequence[str], environment: LoggerEnvironment) -> list[Logger]:
    """Return the loggers of trainer.logger, to be opened; "console" and "file" are skipped.

    Raises: ConfigError if one is unknown or not installed.
    """
    check_loggers(names)
    return [_LOGGERS[name](environment) for name in names if name not in BUILT_IN]


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
            hint = f"{_HINTS[name]}, or remove it" if name in _HINTS else "Correct its method open, or remove it"
            raise ConfigError(
                f"trainer.logger names {name}, which failed to open: {type(error).__name__}: {error}. {hint}"
            ) from error
        if place:
            places.append(f"{name}: {place}")
    return places
