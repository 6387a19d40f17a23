"""From `file.py:function` to a reward function.

Knows where functions are found, and what to say when they are not. Refuses to know what they are called with. find()
only looks at names and files and may run anywhere; load() runs the user's file and belongs in a worker process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from trigon.errors import RewardError
from trigon.names import SHIPPED_REWARDS
from trigon.suggestions import nearest

_MODULE_NAME = "trigon_reward_function"


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Where a reward function lives: an absolute file, or a shipped module; and its name there.

    Example: RewardSource(file="/home/me/grade.py", module="", function="compute_score").
    """

    file: str
    module: str
    function: str

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"reward function {self.function!r} of {self.file or self.module}"


def find(spec: str) -> RewardSource:
    """Return the source that spec names: `file.py:function`, `file.py` (whose function is `main`), or a shipped name.

    Raises: RewardError if there is no such file or shipped verifier; it names the nearest one.
    """
    if spec in SHIPPED_REWARDS:
        return RewardSource(file="", module=f"trigon.rewards.verifiers.{spec}", function="compute_score")
    path, _, function = spec.rpartition(":") if ":" in spec else (spec, "", "main")
    file = Path(path).expanduser().absolute()
    if not function.isidentifier():
        raise RewardError(f"worker.reward.reward_function={spec!r}: {function!r} names no function; write file.py:name")
    if file.is_file():
        return RewardSource(file=str(file), module="", function=function)
    beside = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
    near = nearest(file.name, beside)
    near_shipped = nearest(path, SHIPPED_REWARDS)
    if near:
        hint = f"did you mean {file.parent / near}?"
    elif near_shipped:
        hint = f"did you mean the shipped {near_shipped!r}?"
    else:
        hint = f"give file.py:function, or one of the shipped {', '.join(SHIPPED_REWARDS)}"
    raise RewardError(f"worker.reward.reward_function={spec!r}: there is no file {file}; {hint}")


def load(source: RewardSource) -> tuple[Callable[..., object], object]:
    """Run the source's file and return (its function, the value of its REWARD_TYPE or None).

    The file's folder is searched last for imports: its neighbours are found, but a file named math.py hides nothing.
    Raises: RewardError if the file fails to run, or has no such function.
    """
    try:
        module = _run_file(source.file) if source.file else importlib.import_module(source.module)
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error))
        raise RewardError(f"{source.file or source.module} failed while it was loaded:\n{trace}") from error
    known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if source.function not in vars(module):
        near = nearest(source.function, known)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known) or 'no function at all'}"
        raise RewardError(f"there is no {source.where}; {hint}")
    function = vars(module)[source.function]
    if not callable(function):
        raise RewardError(f"{source.where} is a {type(function).__name__}, not a function")
    return function, getattr(module, "REWARD_TYPE", None)


def _run_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickle look a class's module up here
    sys.path.append(str(Path(file).parent))
    spec.loader.exec_module(module)
    return module
