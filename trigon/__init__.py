"""Reinforcement learning for vision-language models: sample completions, score them, update.

Everything in __all__ can be relied on, and is documented in docs/python.md. Names are imported when
they are first used, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trigon.api import train
    from trigon.assemble.start import TrainResult
    from trigon.errors import TrigonError
    from trigon.report.run import RunTables, load_run
    from trigon.tools.eval.evaluate import evaluate
    from trigon.tools.eval.results import Evaluation
    from trigon.tools.eval.score import ScoreResult, score
    from trigon.tools.plan.call import plan
    from trigon.tools.plan.plan import RunPlan
    from trigon.types import RolloutGroup

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "RolloutGroup",
    "RunPlan",
    "RunTables",
    "ScoreResult",
    "TrainResult",
    "TrigonError",
    "__version__",
    "evaluate",
    "load_run",
    "plan",
    "score",
    "train",
]

_MODULES = {
    "Evaluation": "trigon.tools.eval.results",
    "RolloutGroup": "trigon.types",
    "RunPlan": "trigon.tools.plan.plan",
    "RunTables": "trigon.report.run",
    "ScoreResult": "trigon.tools.eval.score",
    "TrainResult": "trigon.assemble.start",
    "TrigonError": "trigon.errors",
    "evaluate": "trigon.tools.eval.evaluate",
    "load_run": "trigon.report.run",
    "plan": "trigon.tools.plan.call",
    "score": "trigon.tools.eval.score",
    "train": "trigon.api",
}
"""Public name -> the module that has it."""


def _quiet_notebook() -> None:
    """Leave out what libraries say where ipywidgets is missing, which nothing here uses.

    tqdm warns, and Ray logs a line, as they are imported.
    """
    import logging
    import warnings

    warnings.filterwarnings("ignore", "IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)


if "ipykernel" in sys.modules:
    _quiet_notebook()


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'trigon' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
