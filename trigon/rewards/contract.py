"""What a reward function is given and what it may answer.

Knows the three contracts, how one is told from another, and what a proper reply is. Refuses to know about files,
processes and time limits.

    batch        REWARD_TYPE = "batch"         function(answers: list[dict], **kwargs) -> list[dict]
    sequential   REWARD_TYPE = "sequential"    function(answer: dict, **kwargs) -> dict
    legacy       told by its signature         function(predict_str, ground_truth, **kwargs) -> float | dict

An answer is a plain dict with the fields of RewardRequest; a reply is {"overall": reward, any other name: number}.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from trigon.errors import RewardError
from trigon.suggestions import nearest
from trigon.types import FinishReason

RewardContract = Literal["batch", "sequential", "legacy"]

MAX_PARTS = 100
"""Most numbers that one answer's reply may hold: each becomes a metric."""

MAX_NAME_CHARACTERS = 200
"""Longest name of such a number."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One answer to be scored.

    response: the decoded answer. response_length: its tokens. ground_truth: the row's answer, as the dataset holds it.
    prompt: the question as a person reads it. finish_reason: whether the answer ended by itself or was cut.
    row: the other columns of the dataset's row, less its images.
    """

    response: str
    response_length: int
    ground_truth: Any
    prompt: str
    finish_reason: FinishReason
    row: Mapping[str, Any]


def encode(request: RewardRequest) -> tuple[str, tuple[str, ...]]:
    """Return the request as one line of JSON, and the columns of its row that JSON cannot carry and that are left out.

    Numpy scalars and arrays travel as numbers and lists, dates as ISO strings, tuples as lists.
    Raises: RewardError if the ground truth itself cannot be carried.
    """
    answer = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    answer["row"] = dict(request.row)
    if (text := _json(answer)) is not None:
        return text, ()
    left_out = tuple(column for column, value in request.row.items() if _json(value) is None)
    answer["row"] = {column: value for column, value in request.row.items() if column not in left_out}
    if (text := _json(answer)) is None:
        raise RewardError(
            f"the ground truth {_shown(request.ground_truth)} (a {type(request.ground_truth).__name__}) cannot be "
            "handed to the reward function; keep it as text, numbers, lists or dicts in the dataset"
        )
    return text, left_out


def contract_of(
    function: Callable[..., object], reward_type: object, kwargs: Mapping[str, Any], *, where: str
) -> RewardContract:
    """Return the contract that a function keeps: by its module's REWARD_TYPE, or where that is None by its signature.

    A signature says legacy by the names (predict_str, ground_truth), sequential by the name reward_input or a dict
    annotation, and batch by the name reward_inputs, a list annotation, or by having no other argument to fill.
    Raises: RewardError if REWARD_TYPE is unknown, the function is async, or the signature fits no contract.
    """
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{where} is async; make it a plain function that calls asyncio.run inside")
    if reward_type == "batch" or reward_type == "sequential":
        return reward_type
    if reward_type is not None:
        raise RewardError(f'{where}: REWARD_TYPE is {reward_type!r}; it must be "batch" or "sequential"')
    parameters = [p for p in _signature(function, where=where).parameters.values() if p.kind in _POSITIONAL]
    names = [parameter.name for parameter in parameters]
    if names[:2] == ["predict_str", "ground_truth"]:
        return "legacy"
    if names[:1] == ["reward_input"] or _is_annotated(parameters[:1], "dict", "mapping"):
        return "sequential"
    if names[:1] == ["reward_inputs"] or _is_annotated(parameters[:1], "list", "sequence"):
        return "batch"
    to_fill = [p for p in parameters if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if len(to_fill) == 1:
        return "batch"
    raise RewardError(
        f"{where} takes ({', '.join(names)}), which fits no contract: give it one argument for the answers and set "
        'REWARD_TYPE = "batch" or "sequential" in its file, or name its two arguments (predict_str, ground_truth)'
    )


def bind(
    function: Callable[..., object], contract: RewardContract, kwargs: Mapping[str, Any], *, where: str
) -> Callable[..., object]:
    """Return the function with its further arguments bound.

    Raises: RewardError if it does not take one of kwargs, or needs one that is not given.
    """
    signature = _signature(function, where=where)
    parameters = signature.parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    further = named[2 if contract == "legacy" else 1 :]
    for key in kwargs:
        if key not in further and not open_ended:
            raise RewardError(
                f"{where} does not take {key!r} of worker.reward.reward_function_kwargs{_nearest(key, further)}; "
                f"it takes {', '.join(further) or 'none'}"
            )
    answers = (None, None) if contract == "legacy" else (None,)
    try:
        signature.bind(*answers, **kwargs)
    except TypeError as error:
        raise RewardError(
            f"{where} cannot be called by the {contract} contract: {error}; "
            f"give its further arguments in worker.reward.reward_function_kwargs"
        ) from error
    return functools.partial(function, **kwargs)


def parts_of(reply: object) -> dict[str, float]:
    """Return the numbers of one answer's reply, as floats.

    Raises: RewardError, in one line, unless it is a dict of finite numbers with "overall" among them.
    """
    if not isinstance(reply, Mapping):
        raise RewardError(f"returned {_shown(reply)} where a dict with 'overall' is due")
    if "overall" not in reply:
        raise RewardError(f"returned a dict without 'overall': {_shown(reply)}")
    if len(reply) > MAX_PARTS:
        raise RewardError(f"returned {len(reply)} numbers for one answer; {MAX_PARTS} are the most")
    parts = {}
    for name, value in reply.items():
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
            raise RewardError(f"returned {_shown(name)} as the name of a number; names are text, and not too long")
        parts[name] = _finite(name, value)
    return parts


def _finite(name: str, value: object) -> float:
    """Return value as a float. Numpy and torch scalars count as numbers, and so do True and False."""
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, int | float):
        raise RewardError(f"returned {_shown(value)} under {name!r} where a number is due")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"returned {_shown(value)} under {name!r} where a finite number is due")
    return number


def _signature(function: Callable[..., object], *, where: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} shows no signature ({error}); wrap it in a plain function") from error


def _is_annotated(parameters: list[inspect.Parameter], *type_names: str) -> bool:
    """Say whether the first parameter is annotated with one of these types: as a type, a generic, or text."""
    if not parameters:
        return False
    annotation = parameters[0].annotation
    origin = getattr(annotation, "__origin__", annotation)
    text = annotation if isinstance(annotation, str) else getattr(origin, "__name__", "")
    return text.rpartition("typing.")[2].lower().startswith(type_names)


def _nearest(name: str, known: list[str]) -> str:
    match = nearest(name, known)
    return f" (did you mean {match!r}?)" if match else ""


def _json(value: object) -> str | None:
    """Return value as one line of JSON, or None if JSON cannot carry it."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError):
        return None


def _plain(value: object) -> object:
    """Return what JSON can carry in place of a value that it cannot."""
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return value.tolist()
    raise TypeError(f"JSON cannot carry a {type(value).__name__}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
