"""Reinforcement learning for vision-language models: sample completions, score them, update.

Everything in __all__ can be relied on, and is documented in docs/python.md. Names are imported when
they are first used, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trigon.api import TrainResult, train
    from trigon.errors import TrigonError
    from trigon.records.tables import RunTables, load_run
    from trigon.types import RolloutGroup

__version__ = "0.1.0"

__all__ = ["RolloutGroup", "RunTables", "TrainResult", "TrigonError", "__version__", "load_run", "train"]

_MODULES = {
    "RolloutGroup": "trigon.types",
    "RunTables": "trigon.records.tables",
    "TrainResult": "trigon.api",
    "TrigonError": "trigon.errors",
    "load_run": "trigon.records.tables",
    "train": "trigon.api",
}
"""Public name -> the module that has it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'trigon' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
