"""Reward functions that are given as Python objects: pickled, so that reward workers can have them.

Functions of notebooks and scripts (`__main__`), lambdas and closures are pickled with their code,
and with the variables that they use. Functions of modules that can be imported are pickled as
their name, and imported again in the workers.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.code import function_digest
from trigon.rewards.contract import call_signature, detect_contract
from trigon.rewards.load import RewardSource, RewardTerm, check_reward_images, find_source, spec_name, unique_name
from trigon.system.user_code import pickle

RewardFunction = Callable[..., Any]
"""A reward function by one of the contracts of trigon.rewards.contract.

A function of a single argument whose name and annotation say nothing scores one completion.
"""

Reward = str | RewardFunction | Sequence[RewardFunction | str | tuple[RewardFunction | str, float] | Mapping[str, Any]]
"""`file.py:function` or a shipped name, a function, or several of them, with weights (default: 1).

One of several may also be a mapping {"function", "name", "weight", "kwargs"}, as in YAML.
"""


def reward_source(reward: Reward, *, kwargs: Mapping[str, Any]) -> RewardSource | tuple[RewardTerm, ...]:
    """Return what RewardPool takes for a reward that is text, a function, or several of them.

    kwargs: worker.reward.reward_function_kwargs.
    Raises: RewardError if a function cannot be pickled, naming the object that cannot, if it fits
    no contract, or if a weight is not a finite number.
    """
    if isinstance(reward, str):
        return find_source(reward)
    if callable(reward):
        return _pickled(reward, kwargs)
    if not isinstance(reward, Sequence) or not reward:
        raise RewardError(
            f"reward is {_short(reward)}; give a function, a list of (function, weight), or file.py:function"
        )
    terms: list[RewardTerm] = []
    for entry in reward:
        function, weight, term_kwargs, name = _read_entry(entry)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise RewardError(f"reward has {_short(weight)} as the weight of {name_of(function)!r}; it is a number")
        source = find_source(function) if isinstance(function, str) else _pickled(function, term_kwargs)
        name = unique_name(name or name_of(function), [term.name for term in terms])
        terms.append(RewardTerm(name, float(weight), source, term_kwargs))
    return tuple(terms)


def _read_entry(entry: object) -> tuple[RewardFunction | str, Any, Mapping[str, Any], str]:
    """Return function, weight, keyword arguments and name of one of several; "" without a name."""
    known: dict[str, Any] = {"function": None, "weight": 1, "kwargs": {}, "name": ""}
    if isinstance(entry, Mapping) and entry.keys() <= known.keys():
        function, weight, kwargs, name = (known | dict(entry)).values()
    else:
        function, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1)
        kwargs, name = {}, ""
    is_function = isinstance(function, str) or callable(function)
    if not is_function or not isinstance(kwargs, Mapping) or re.fullmatch(r"\w*", str(name)) is None:
        raise RewardError(
            f"reward has {_short(entry)}; each entry is a function, (function, weight), or a dict of function, weight, "
            "kwargs and name, a word. A function may be the text file.py:function"
        )
    return function, weight, kwargs, str(name)


def describe_reward(reward: Reward) -> str:
    """Return a reward as text for the configuration of the run. Its weights are not checked."""
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        return name_of(reward)
    entries = [_read_entry(each) for each in reward]
    return " + ".join(f"{weight} * {name or name_of(function)}" for function, weight, _, name in entries)


def name_of(function: RewardFunction | str) -> str:
    """Return the name of a reward function: letters, digits and _."""
    if isinstance(function, str):
        return spec_name(function)
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", name).strip("_") or "reward"


def _pickled(function: RewardFunction, kwargs: Mapping[str, Any]) -> RewardSource:
    name = name_of(function)
    # Only for the errors: the pickle is not there yet.
    where = f"reward function {name!r}"
    reward_type = _reward_type(function, kwargs, where=where)
    return RewardSource(
        file="",
        module="",
        function=name,
        pickled=pickle((function, reward_type), where=where, instead="reward='file.py:function'", error=RewardError),
        content=function_digest(function),
        reward_images=check_reward_images(_declared(function, "REWARD_IMAGES") or False, where=where),
    )


def _reward_type(function: RewardFunction, kwargs: Mapping[str, Any], *, where: str) -> str | None:
    """Return the name of a contract, or None for the legacy one, which the signature shows.

    REWARD_TYPE is that of the function or of its module.
    """
    declared = _declared(function, "REWARD_TYPE")
    if declared is None and _says_nothing(function, kwargs):
        return "sequential"
    contract = detect_contract(function, declared, kwargs, where=where)
    return None if contract == "legacy" else contract


def _declared(function: RewardFunction, name: str) -> object:
    """Return what a function, or its module, declares by a name; None if it does not."""
    while isinstance(function, functools.partial):
        function = function.func
    code = inspect.getattr_static(function, "__call__", None) if isinstance(function, type) else function
    return getattr(function, name, getattr(code, "__globals__", {}).get(name))


def _says_nothing(function: RewardFunction, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function has one required argument without a known name or an annotation."""
    try:
        parameters = call_signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in required if parameter.name not in kwargs]
    if len(required) != 1:
        return False
    [parameter] = required
    return parameter.annotation is parameter.empty and parameter.name not in ("reward_input", "reward_inputs")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
