"""Finds and loads a reward function: `file.py:function`, a shipped verifier, or a pickled function.

find_source() only checks names and files, and may run anywhere. load_function() runs the user's
file, or unpickles what callables.py pickled, and is only called in reward workers. Does not depend
on the arguments of reward functions.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trigon.errors import RewardError
from trigon.names import SHIPPED_REWARDS
from trigon.suggestions import missing_package, nearest

if TYPE_CHECKING:  # reward workers need no options
    from trigon.config.schema import WeightedReward

_MODULE_NAME = "trigon_reward_function"


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The location of a reward function: in a file, in a shipped module, or pickled.

    file: an absolute path, or "". module: of a shipped function, or "". pickled: base64 of a
    pickled (function, REWARD_TYPE), made by callables.py, or ""; function is then its name.
    content: a digest of a pickled function (code.py), which unlike the pickle is the same in every
    process; else "". reward_images: REWARD_IMAGES of a pickled function.

    Example: RewardSource(file="/home/me/reward.py", module="", function="compute_score").
    """

    file: str
    module: str
    function: str
    pickled: str = field(default="", repr=False)
    content: str = field(default="", repr=False)
    reward_images: bool = False

    @property
    def where(self) -> str:
        """The description of the function in error messages."""
        if self.pickled:
            return f"reward function {self.function!r}, given in Python,"
        return f"reward function {self.function!r} of {self.file or self.module}"


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One of several reward functions whose weighted sum is the reward.

    name: begins the names of its parts. kwargs: keyword arguments, in which `env:NAME` stands for
    the value of an environment variable.
    """

    name: str
    weight: float
    source: RewardSource
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def find_source(spec: str) -> RewardSource:
    """Return the source of `file.py:function`, `file.py` (its function `main`), or a shipped name.

    Raises: RewardError, with the nearest known name, if there is no such file or shipped verifier.
    """
    if spec in SHIPPED_REWARDS:
        return RewardSource(file="", module=f"trigon.rewards.verifiers.{spec}", function="compute_score")
    path, _, function = spec.rpartition(":") if ":" in spec else (spec, "", "main")
    file = Path(path).expanduser().absolute()
    if not function.isidentifier():
        raise RewardError(
            f"worker.reward.reward_function={spec!r}: {function!r} is not a function name; use file.py:function"
        )
    if file.is_file():
        return RewardSource(file=str(file), module="", function=function)
    file_names = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
    nearest_file = nearest(file.name, file_names)
    nearest_shipped = nearest(path, SHIPPED_REWARDS)
    if nearest_file:
        hint = f"did you mean {file.parent / nearest_file}?"
    elif nearest_shipped:
        hint = f"did you mean the shipped {nearest_shipped!r}?"
    else:
        hint = f"use file.py:function, or one of the shipped {', '.join(SHIPPED_REWARDS)}"
    raise RewardError(f"worker.reward.reward_function={spec!r}: there is no file {file}; {hint}")


def find_reward(option: str | Sequence[WeightedReward]) -> RewardSource | tuple[RewardTerm, ...]:
    """Return the source of a reward function that an option names, or a term for each of several.

    Raises: RewardError as find_source.
    """
    if isinstance(option, str):
        return find_source(option)
    names: list[str] = []
    for entry in option:
        names.append(unique_name(entry.name or spec_name(entry.function), names))
    return tuple(
        RewardTerm(name, entry.weight, find_source(entry.function), entry.kwargs)
        for name, entry in zip(names, option, strict=True)
    )


def spec_name(spec: str) -> str:
    """Return the name of a function's text: that of the function, or the text as a name."""
    path, _, name = spec.rpartition(":")
    return name if path else re.sub(r"\W+", "_", spec)


def unique_name(name: str, others: Sequence[str]) -> str:
    """Return the name of a term, with a number if another one has it. "overall" is the sum's."""
    unique, number = name, 1
    while unique in ("overall", *others):
        number += 1
        unique = f"{name}_{number}"
    return unique


def load_function(source: RewardSource) -> tuple[Callable[..., object], object]:
    """Run the source's file, and return its function and its REWARD_TYPE, None if it has none.

    The file's folder is appended to sys.path: the file can import others beside it, but a math.py
    there does not replace the standard library's.
    Raises: RewardError if the file fails to run, or has no such function.
    """
    if source.pickled:
        return _unpickle(source)
    try:
        module = _run_file(source.file) if source.file else importlib.import_module(source.module)
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error))
        raise RewardError(f"{source.file or source.module} failed to load{missing_package(error)}:\n{trace}") from error
    known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if source.function not in vars(module):
        near = nearest(source.function, known)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known) or 'no functions'}"
        raise RewardError(f"there is no {source.where}; {hint}")
    function = vars(module)[source.function]
    if not callable(function):
        raise RewardError(f"{source.where} is a {type(function).__name__}, not a function")
    return function, getattr(module, "REWARD_TYPE", None)


def declares_images(source: RewardSource) -> bool:
    """Return REWARD_IMAGES of the source that was loaded last. Raises: RewardError for no bool."""
    module = sys.modules.get(_MODULE_NAME if source.file else source.module)
    return source.reward_images or check_reward_images(getattr(module, "REWARD_IMAGES", False), where=source.where)


def check_reward_images(declared: object, *, where: str) -> bool:
    """Return REWARD_IMAGES. Raises: RewardError if it is neither True nor False."""
    if not isinstance(declared, bool):
        raise RewardError(f"{where}: REWARD_IMAGES is {declared!r}; it must be True or False")
    return declared


def _unpickle(source: RewardSource) -> tuple[Callable[..., object], object]:
    import cloudpickle

    try:
        function, reward_type = cloudpickle.loads(base64.b64decode(source.pickled))
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error))
        raise RewardError(
            f"{source.where} cannot be loaded in a reward worker{missing_package(error)}:\n{trace}"
        ) from error
    return function, reward_type


def _run_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickle look up a class's module here
    sys.path.append(str(Path(file).parent))
    spec.loader.exec_module(module)
    return module
