"""Finds and loads a reward function: `file.py:function`, a shipped verifier, or a pickled function.

find_source() only checks names and files, and may run anywhere. make_setup() is what the reward
workers are told of the function and its arguments. load_function() runs the user's file, or
unpickles what callables.py pickled, and is only called in reward workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.config.names import SHIPPED_REWARDS
from trigon.errors import RewardError
from trigon.rewards.arguments import resolve_arguments
from trigon.system.frames import encode_frame
from trigon.system.secrets import ARGUMENTS, mask
from trigon.system.terminal import nearest, nearest_file
from trigon.system.user_code import load_module, take, unpickle

if TYPE_CHECKING:  # reward workers need no options
    from trigon.config.schema import WeightedReward


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
    similar = nearest_file(file, "*.py")
    nearest_shipped = nearest(path, SHIPPED_REWARDS)
    if similar:
        hint = f"did you mean {file.parent / similar}?"
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


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """What the reward workers are told, and what messages and the confinement need of it.

    frame: for functions.load_setup. name, where: the reward in messages, short and in full. files:
    of the functions that have one.
    """

    frame: bytes
    name: str
    where: str
    files: tuple[str, ...]


def make_setup(
    reward: str | RewardSource | Sequence[RewardTerm],
    kwargs: Mapping[str, Any],
    *,
    timeout_seconds: float,
    concurrency: int,
) -> RewardSetup:
    """Return the setup of a reward. Args: as of RewardPool.

    Raises: RewardError if there is no such file, if a variable of `env:NAME` in kwargs is not set,
    or if JSON cannot represent kwargs.
    """
    source = find_source(reward) if isinstance(reward, str) else reward
    setup: dict[str, Any] = {"timeout_seconds": timeout_seconds, "concurrency": concurrency}
    given: Mapping[str, Any]
    if isinstance(source, RewardSource):
        sources, given, where = [source], dict(kwargs), source.where
        name = Path(source.file).name if source.file else source.function if source.pickled else source.module
        name = name.rpartition("trigon.rewards.verifiers.")[2]  # a shipped one
        setup |= {"source": asdict(source), "kwargs": resolve_arguments(kwargs)}
    else:
        if kwargs:
            raise RewardError(
                "worker.reward.reward_function_kwargs are arguments of a single reward function, and there are "
                f"{len(source)}; give each its own"
            )
        sources, given = [term.source for term in source], {term.name: dict(term.kwargs) for term in source}
        name = " + ".join(term.name for term in source)
        where = f"the sum of the reward functions {', '.join(repr(term.name) for term in source)}"
        terms = [{**asdict(term), "kwargs": resolve_arguments(term.kwargs, term.name)} for term in source]
        setup |= {"source": None, "terms": terms}
    try:
        frame = encode_frame(setup)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{ARGUMENTS}={mask(ARGUMENTS, given)!r} cannot be sent to another process: {error}; use only text, "
            "numbers, lists and dicts"
        ) from error
    return RewardSetup(frame, name, where, tuple(each.file for each in sources if each.file))


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function and what its file declares.

    reward_type: REWARD_TYPE; None if it has none. takes_images: REWARD_IMAGES.
    """

    function: Callable[..., object]
    reward_type: object
    takes_images: bool


def load_function(source: RewardSource) -> LoadedReward:
    """Run the source's file, and return its function with what the file declares.

    Raises: RewardError if the file fails to run, has no such function, or declares REWARD_IMAGES as
    something else than a bool.
    """
    if source.pickled:
        function, reward_type = unpickle(source.pickled, where=source.where, error=RewardError)
        return LoadedReward(function, reward_type, source.reward_images)
    module = load_module(source.file, source.module, error=RewardError)
    function = take(module, source.function, where=source.where, wanted="function", error=RewardError)
    declared = check_reward_images(getattr(module, "REWARD_IMAGES", False), where=source.where)
    return LoadedReward(function, getattr(module, "REWARD_TYPE", None), declared)


def check_reward_images(declared: object, *, where: str) -> bool:
    """Return REWARD_IMAGES. Raises: RewardError if it is neither True nor False."""
    if not isinstance(declared, bool):
        raise RewardError(f"{where}: REWARD_IMAGES is {declared!r}; it must be True or False")
    return declared
