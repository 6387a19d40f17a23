"""Finds and loads a reward function: `file.py:function`, a shipped verifier, or a pickled function.

find_reward() only checks names and files, and may run anywhere. encode_setup() makes what the
reward workers get: the functions and their arguments, in which `env:NAME` is then the value of an
environment variable. The run folder and trackers have the text `env:NAME`; every secret among the
values is known to trigon.system.secrets.scrub, since a reward function may print it or have it in
an error. load_function() runs the user's file, or unpickles what callables.py pickled, and is only
called in reward workers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.config.names import SHIPPED_REWARDS
from trigon.errors import RewardError
from trigon.system.frames import encode_frame
from trigon.system.secrets import ARGUMENTS, mask, masked_names, remember, secrets_in, variable_of
from trigon.system.terminal import nearest, nearest_file
from trigon.system.user_code import CodeSource, load_module, take, unpickle

if TYPE_CHECKING:  # reward workers need no options
    from trigon.config.schema import WeightedReward

_SHIPPED = "trigon.rewards.verifiers."


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """The reward function, or one of several whose weighted sum is the reward.

    name: begins the names of its parts; "" if it is the only one, whose scores are as it returns
    them. kwargs: keyword arguments, in which `env:NAME` stands for the value of an environment
    variable. source: one that is pickled is (function, contract, REWARD_IMAGES), see callables.py.
    """

    name: str
    weight: float
    source: CodeSource
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def find_source(spec: str) -> CodeSource:
    """Return the source of `file.py:function`, `file.py` (its function `main`), or a shipped name.

    Raises: RewardError, with the nearest known name, if there is no such file or shipped verifier.
    """
    if spec in SHIPPED_REWARDS:
        return CodeSource("reward function", "compute_score", module=f"{_SHIPPED}{spec}")
    path, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "main")
    where, file = f"worker.reward.reward_function={spec!r}", Path(path).expanduser().absolute()
    if not name.isidentifier():
        raise RewardError(f"{where}: {name!r} is not a function name; use file.py:function")
    if file.is_file():
        return CodeSource("reward function", name, file=str(file))
    if similar := nearest_file(file, "*.py"):
        hint = f"did you mean {file.parent / similar}?"
    elif shipped := nearest(path, SHIPPED_REWARDS):
        hint = f"did you mean the shipped {shipped!r}?"
    else:
        hint = f"use file.py:function, or one of the shipped {', '.join(SHIPPED_REWARDS)}"
    raise RewardError(f"{where}: there is no file {file}; {hint}")


def find_reward(option: str | Sequence[WeightedReward], kwargs: Mapping[str, Any]) -> tuple[RewardTerm, ...]:
    """Return the reward function that an option names, or each of several.

    kwargs: keyword arguments of a single function. Raises: RewardError as find_source.
    """
    if isinstance(option, str):
        return (RewardTerm("", 1.0, find_source(option), kwargs),)
    names: list[str] = []
    for entry in option:
        names.append(unique_name(entry.name or spec_name(entry.function), names))
    return tuple(
        RewardTerm(name, entry.weight, find_source(entry.function), entry.kwargs)
        for name, entry in zip(names, option, strict=True)
    )


def spec_name(spec: str) -> str:
    """Return the name of a function's text: the function's name, or the text as a name."""
    path, _, name = spec.rpartition(":")
    return name if path else re.sub(r"\W+", "_", spec)


def unique_name(name: str, others: Sequence[str]) -> str:
    """Return the name of a term, with a number if another one has it. "overall" is the sum's."""
    unique, number = name, 1
    while unique in ("overall", *others):
        number += 1
        unique = f"{name}_{number}"
    return unique


def describe_terms(terms: Sequence[RewardTerm]) -> tuple[str, str]:
    """Return a reward in messages, short and in full: "reward.py", "reward function 'f' of ..."."""
    if terms[0].name:
        names = ", ".join(repr(term.name) for term in terms)
        return " + ".join(term.name for term in terms), f"the sum of the reward functions {names}"
    [source] = [term.source for term in terms]
    name = Path(source.file).name if source.file else source.name if source.pickled else source.module
    return name.removeprefix(_SHIPPED), source.where


def encode_setup(terms: Sequence[RewardTerm], *, timeout_seconds: float, concurrency: int) -> bytes:
    """Return the first frame for a reward worker. Args: as in RewardPool.

    Raises: RewardError as resolve_arguments, or if JSON cannot represent kwargs.
    """
    resolved = [{**asdict(term), "kwargs": resolve_arguments(term.kwargs, term.name)} for term in terms]
    try:
        return encode_frame({"terms": resolved, "timeout_seconds": timeout_seconds, "concurrency": concurrency})
    except (TypeError, ValueError) as error:
        given = {term.name: dict(term.kwargs) for term in terms}
        raise RewardError(
            f"{ARGUMENTS}={mask(ARGUMENTS, given.get('', given))!r} cannot be sent to another process: {error}; use "
            "only text, numbers, lists and dicts"
        ) from error


def decode_terms(setup: Mapping[str, Any]) -> list[RewardTerm]:
    """Return the functions of what encode_setup made, in a reward worker."""
    return [RewardTerm(**{**term, "source": CodeSource(**term["source"])}) for term in setup["terms"]]


def resolve_arguments(kwargs: Mapping[str, Any], term: str = "", *, option: str = ARGUMENTS) -> dict[str, Any]:
    """Return the keyword arguments with the value of its variable in place of each `env:NAME`.

    term: the function that they belong to, of several, for errors. option: the option that has
    them: of a reward function, or of an environment.
    Raises: RewardError if a variable is not set, if a dict has a key that is not text, which JSON
    would make it, or if a secret is missing, since a run wrote the file that the arguments are
    from.
    """
    place = f"kwargs of the reward function {term!r}: " if term else f"{option}."
    for name in masked_names(option, kwargs):
        name = f"{place}{name.removeprefix(f'{option}.')}"
        raise RewardError(f"{name} is a secret that the run folder does not have; give it again, or write env:NAME")
    remember(secrets_in(option, kwargs))
    return {key: _resolve(f"{place}{key}", value) for key, value in kwargs.items()}


def _resolve(name: str, value: Any) -> Any:
    match value:
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise RewardError(
                        f"{name} has the key {key!r}, which is not text, and would reach the code as text; write "
                        f"{str(key)!r}, and let the code look for that"
                    )
            return {key: _resolve(f"{name}.{key}", item) for key, item in value.items()}
        case list() | tuple():
            return [_resolve(f"{name}[{number}]", item) for number, item in enumerate(value)]
        case str() if (variable := variable_of(value)) is not None:
            return _read(name, variable)
        case _:
            return value


def _read(name: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise RewardError(
            f"{name} is env:{variable}, but the environment variable {variable} is not set, or empty; export it before "
            "the run is started"
        )
    remember([value])
    return value


def load_function(source: CodeSource) -> tuple[Callable[..., object], Any, bool]:
    """Run the source's file, and return its function, with its REWARD_TYPE and REWARD_IMAGES.

    The type is None if the file has none; the type of a pickled function is its contract.
    Raises: RewardError if the file fails to run, has no such function, or declares REWARD_IMAGES as
    something else than a bool.
    """
    if source.pickled:
        function, contract, takes_images = unpickle(source.pickled, where=source.where, error=RewardError)
        return function, contract, takes_images
    module = load_module(source.file, source.module, error=RewardError)
    function = take(module, source.name, where=source.where, wanted="function", error=RewardError)
    takes_images = check_reward_images(getattr(module, "REWARD_IMAGES", False), where=source.where)
    return function, getattr(module, "REWARD_TYPE", None), takes_images


def check_reward_images(declared: object, *, where: str) -> bool:
    """Return REWARD_IMAGES. Raises: RewardError if it is neither True nor False."""
    if not isinstance(declared, bool):
        raise RewardError(f"{where}: REWARD_IMAGES is {declared!r}; it must be True or False")
    return declared
