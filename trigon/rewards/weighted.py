"""The weighted sum of several reward functions, as one reward function.

Runs in reward workers. Does not depend on where the functions come from.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar, assert_never

from trigon.errors import RewardError
from trigon.rewards.contract import APPLIES, LoadedFunction, RewardContract, call_legacy, check_length, read_scores
from trigon.rewards.load import RewardTerm

LoadedTerm = tuple[RewardTerm, LoadedFunction]

RewardInput = Mapping[str, Any]

T = TypeVar("T")


def weighted_sum(terms: Sequence[LoadedTerm], *, concurrency: int) -> LoadedFunction:
    """Return a function that sums the rewards of all terms.

    It is sequential, unless one of the functions scores several completions at a time (then it is
    of the batch contract, or of the group contract if one of them is), and async if one of them is:
    these then run at the same time. Its parts are "overall", the weighted sum; by
    the name of each term its reward, without the weight; and its other parts with that name before
    them: "accuracy", "accuracy/steps".
    A function that returns None for a completion does not apply to it: it has no part in the sum,
    and the weights of the others are scaled so that all of them together weigh as before (APPLIES).
    concurrency: calls of async functions at a time, where a list of completions is scored.
    """
    contracts = {function.contract for _, function in terms}
    contract: RewardContract = "group" if "group" in contracts else "batch" if "batch" in contracts else "sequential"
    takes_list, takes_images = contract != "sequential", any(function.takes_images for _, function in terms)
    if not any(function.is_async for _, function in terms):

        def score_all(reward_inputs: list[RewardInput]) -> list[dict[str, float]]:
            return _sum_all(terms, [_scores(term, function, reward_inputs) for term, function in terms])

        return LoadedFunction(
            score_all if takes_list else _for_one(score_all), contract, is_async=False, takes_images=takes_images
        )
    import asyncio  # here, since other functions do not need it

    limit = asyncio.Semaphore(concurrency) if takes_list else nullcontext()

    async def score_all_async(reward_inputs: list[RewardInput]) -> list[dict[str, float]]:
        scores = await _gather([_scores_async(term, function, reward_inputs, limit) for term, function in terms])
        return _sum_all(terms, scores)

    async def score_one_async(reward_input: RewardInput) -> dict[str, float]:
        return (await score_all_async([reward_input]))[0]

    return LoadedFunction(
        score_all_async if takes_list else score_one_async, contract, is_async=True, takes_images=takes_images
    )


def _for_one(score_all: Callable[[list[RewardInput]], list[dict[str, float]]]) -> Callable[..., dict[str, float]]:
    return lambda reward_input: score_all([reward_input])[0]


def _sum_all(
    terms: Sequence[LoadedTerm], scores: Sequence[Sequence[Mapping[str, float] | None]]
) -> list[dict[str, float]]:
    """Return the sum for each completion. scores: of each term, for each completion."""
    return [
        _sum([(term, each) for (term, _), each in zip(terms, of_completion, strict=True)])
        for of_completion in zip(*scores, strict=True)
    ]


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


def _scores(
    term: RewardTerm, function: LoadedFunction, reward_inputs: list[RewardInput]
) -> list[dict[str, float] | None]:
    """Return the scores of completions by one function, None where it does not apply.

    Raises: RewardError that names it.
    """
    match function.contract:
        case "batch" | "group":
            return _read(term, check_length(function.call(reward_inputs), len(reward_inputs)))
        case "sequential":
            return _read(term, [function.call(reward_input) for reward_input in reward_inputs])
        case "legacy":
            return _read(term, [call_legacy(function, reward_input) for reward_input in reward_inputs])
        case _:
            assert_never(function.contract)


async def _scores_async(
    term: RewardTerm,
    function: LoadedFunction,
    reward_inputs: list[RewardInput],
    limit: AbstractAsyncContextManager[None],
) -> list[dict[str, float] | None]:
    """Return the same where some functions are async. limit: entered for each of their calls."""
    if not function.is_async:
        return _scores(term, function, reward_inputs)

    async def call(reward_input: RewardInput) -> object:
        async with limit:
            is_legacy = function.contract == "legacy"
            return await (call_legacy(function, reward_input) if is_legacy else function.call(reward_input))

    match function.contract:
        case "batch" | "group":
            async with limit:
                return _read(term, check_length(await function.call(reward_inputs), len(reward_inputs)))
        case "sequential" | "legacy":
            return _read(term, await _gather([call(reward_input) for reward_input in reward_inputs]))
        case _:
            assert_never(function.contract)


async def _gather(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of calls that run at the same time. Raises: the error of the first one."""
    import asyncio

    results = await asyncio.gather(*calls, return_exceptions=True)  # all of them, so that the error is always the same
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _read(term: RewardTerm, returned: Sequence[object]) -> list[dict[str, float] | None]:
    try:
        return [None if value is None else read_scores(value) for value in returned]
    except RewardError as error:
        raise RewardError(f"{term.name} {error}") from error
