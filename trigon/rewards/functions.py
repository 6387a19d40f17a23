"""Loads reward functions, and adapts all contracts to one: `async score(list) -> list`.

A reward function that is not async is adapted as well, to a coroutine that never waits: run_now()
runs it without an event loop, so that the function can start one of its own. A weighted sum of
several functions is one function of the same kind. Runs in reward workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trigon.errors import RewardError
from trigon.rewards.contract import (
    APPLIES,
    IMAGES,
    RewardContract,
    bind_kwargs,
    check_length,
    construct,
    detect_contract,
    is_async,
    is_class,
    media_arguments,
    read_scores,
)
from trigon.rewards.load import RewardSource, RewardTerm, load_function
from trigon.system.secrets import ARGUMENTS

RewardInput = Mapping[str, Any]

Unit = Literal["completion", "batch", "group"]
"""What a function scores in a call: one completion, several, or all completions of a prompt."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function with its arguments bound, or a sum of several.

    score: returns what the function returns for each completion of a list, in order; with the unit
    "completion", the list has one. is_async: whether calls may run at the same time, in an event
    loop. takes_images: whether reward inputs have images.
    """

    score: Callable[[Sequence[RewardInput]], Coroutine[Any, Any, Sequence[object]]]
    unit: Unit
    is_async: bool
    takes_images: bool


def load_setup(setup: Mapping[str, Any]) -> LoadedFunction:
    """Return the function of load.make_setup, or the sum of several. Raises: RewardError."""
    if setup["source"] is not None:
        return _load(RewardSource(**setup["source"]), setup["kwargs"])
    terms = [RewardTerm(**{**term, "source": RewardSource(**term["source"])}) for term in setup["terms"]]
    loaded = [(term, _load(term.source, term.kwargs, option=f"kwargs of {term.name!r}")) for term in terms]
    return weighted_sum(loaded, concurrency=setup["concurrency"])


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits. Raises: what it raises."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a function that is not async has waited")


def _load(source: RewardSource, kwargs: Mapping[str, Any], *, option: str = ARGUMENTS) -> LoadedFunction:
    """Return a function with its arguments bound. option: their name. Raises: RewardError."""
    loaded = load_function(source)
    function = loaded.function
    if is_class(function):  # once for each worker, so that it can load a model or open a connection
        function, kwargs = construct(function, kwargs, where=source.where, option=option), {}
    contract = detect_contract(function, loaded.reward_type, kwargs, where=source.where)
    images = media_arguments(function, contract, kwargs, where=source.where)
    bound = bind_kwargs(function, contract, kwargs, where=source.where, option=option)
    takes_images = IMAGES in images or loaded.takes_images
    return _adapt(bound, contract, images, is_async=is_async(function), takes_images=takes_images)


def _adapt(
    call: Callable[..., Any], contract: RewardContract, images: Sequence[str], *, is_async: bool, takes_images: bool
) -> LoadedFunction:
    """Return a function of any contract. images: arguments of the legacy contract for images."""
    unit: Unit = "completion" if contract in ("sequential", "legacy") else "batch" if contract == "batch" else "group"

    async def score(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        returned: Any
        if unit != "completion":
            returned = call(reward_inputs)
        elif contract == "sequential":
            returned = call(*reward_inputs)
        else:
            [one] = reward_inputs
            returned = call(one["response"], one["ground_truth"], **{name: one[name] for name in images})
        if is_async:
            returned = await returned
        return [returned] if unit == "completion" else check_length(returned, len(reward_inputs))

    return LoadedFunction(score, unit, is_async, takes_images)


def weighted_sum(terms: Sequence[tuple[RewardTerm, LoadedFunction]], *, concurrency: int) -> LoadedFunction:
    """Return a function that sums the rewards of all terms.

    It scores one completion at a time, unless one of the functions scores a batch or a group, and
    is async if one of them is: these then run at the same time. Its parts are "overall", the
    weighted sum; by the name of each term its reward, without the weight; and its other parts with
    that name before them: "accuracy", "accuracy/steps".
    A function that returns None for a completion does not apply to it: it has no part in the sum,
    and the weights of the others are scaled so that all of them together weigh as before (APPLIES).
    concurrency: calls of async functions at a time, where a list of completions is scored.
    """
    units = {function.unit for _, function in terms}
    unit: Unit = "group" if "group" in units else "batch" if "batch" in units else "completion"
    any_async = any(function.is_async for _, function in terms)
    limit: AbstractAsyncContextManager[Any] = nullcontext()
    if any_async and unit != "completion":
        import asyncio  # here, since other functions do not need it

        limit = asyncio.Semaphore(concurrency)

    async def score(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        if any_async:
            scores = await _gather([_scores(term, function, reward_inputs, limit) for term, function in terms])
        else:
            scores = [await _scores(term, function, reward_inputs, limit) for term, function in terms]
        names = [term for term, _ in terms]
        return [_sum(list(zip(names, each, strict=True))) for each in zip(*scores, strict=True)]

    return LoadedFunction(score, unit, any_async, any(function.takes_images for _, function in terms))


async def _scores(
    term: RewardTerm,
    function: LoadedFunction,
    reward_inputs: Sequence[RewardInput],
    limit: AbstractAsyncContextManager[Any],
) -> list[dict[str, float] | None]:
    """Return the scores of completions by one function, None where it does not apply.

    limit: entered for each call of an async function. Raises: RewardError that names the function.
    """
    lists = [[each] for each in reward_inputs] if function.unit == "completion" else [reward_inputs]

    async def call(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        async with limit:
            return await function.score(reward_inputs)

    if function.is_async:
        returned = await _gather([call(each) for each in lists])
    else:
        returned = [await function.score(each) for each in lists]
    try:
        return [None if value is None else read_scores(value) for values in returned for value in values]
    except RewardError as error:
        raise RewardError(f"{term.name} {error}") from error


def _sum(scores: Sequence[tuple[RewardTerm, Mapping[str, float] | None]]) -> dict[str, float]:
    """Return the weighted sum and its parts. Raises: RewardError if no function applies."""
    applied = [(term, each) for term, each in scores if each is not None]
    if not applied:
        names = " and ".join(term.name for term, _ in scores)
        raise RewardError(f"{names} returned None: no function applies to this completion; at least one must score it")
    weight = sum(abs(term.weight) for term, _ in applied)
    scale = sum(abs(term.weight) for term, _ in scores) / weight if weight and len(applied) < len(scores) else 1.0
    parts = {"overall": sum(term.weight * scale * each["overall"] for term, each in applied)}
    if len(applied) < len(scores):
        parts |= {f"{term.name}{APPLIES}": float(each is not None) for term, each in scores}
    for term, each in applied:
        parts[term.name] = each["overall"]
        parts |= {f"{term.name}/{part}": value for part, value in each.items() if part != "overall"}
    return parts


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of calls that run at the same time. Raises: the error of the first one."""
    import asyncio

    results = await asyncio.gather(*calls, return_exceptions=True)  # all of them, so that the error is always the same
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
