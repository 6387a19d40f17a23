"""The weighted sum of several reward functions, as one reward function.

Runs in reward workers. Does not depend on where the functions come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from trigon.errors import RewardError
from trigon.rewards.contract import RewardContract, call_legacy, check_length, read_scores
from trigon.rewards.load import RewardTerm

LoadedTerm = tuple[RewardTerm, Callable[..., object], RewardContract]

RewardInput = Mapping[str, Any]


def weighted_sum(terms: Sequence[LoadedTerm]) -> tuple[Callable[..., object], RewardContract]:
    """Return a function that sums the rewards of all terms, and its contract.

    It is sequential, unless one of the functions scores several completions at a time. Its parts
    are "overall", the weighted sum; by the name of each term its reward, without the weight; and
    its other parts with that name before them: "accuracy", "accuracy/steps".
    """

    def score_one(reward_input: RewardInput) -> dict[str, float]:
        return _sum(
            [(term, _scores(term, function, contract, [reward_input])[0]) for term, function, contract in terms]
        )

    def score_all(reward_inputs: list[RewardInput]) -> list[dict[str, float]]:
        by_term = [_scores(term, function, contract, reward_inputs) for term, function, contract in terms]
        return [
            _sum([(term, scores[index]) for (term, *_), scores in zip(terms, by_term, strict=True)])
            for index in range(len(reward_inputs))
        ]

    if any(contract == "batch" for _, _, contract in terms):
        return score_all, "batch"
    return score_one, "sequential"


def _sum(scores: Sequence[tuple[RewardTerm, Mapping[str, float]]]) -> dict[str, float]:
    parts = {"overall": sum(term.weight * each["overall"] for term, each in scores)}
    for term, each in scores:
        parts[term.name] = each["overall"]
        parts |= {f"{term.name}/{part}": value for part, value in each.items() if part != "overall"}
    return parts


def _scores(
    term: RewardTerm, function: Callable[..., object], contract: RewardContract, reward_inputs: list[RewardInput]
) -> list[dict[str, float]]:
    """Return the scores of completions by one function. Raises: RewardError that names it."""
    returned: Sequence[object]
    match contract:
        case "batch":
            returned = check_length(function(reward_inputs), len(reward_inputs))
        case "sequential":
            returned = [function(reward_input) for reward_input in reward_inputs]
        case "legacy":
            returned = [call_legacy(function, reward_input) for reward_input in reward_inputs]
        case _:
            assert_never(contract)
    try:
        return [read_scores(value) for value in returned]
    except RewardError as error:
        raise RewardError(f"{term.name} {error}") from error
