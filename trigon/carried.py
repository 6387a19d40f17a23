"""What a step leaves to the next one: groups with unfinished completions, and their checkpoints.

With worker.rollout.oversampling a step samples more prompts than it learns from, and stops as soon
as enough groups are complete. batch.py decides what is carried.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from trigon.data.stream import PromptStream
from trigon.errors import BadRow
from trigon.metrics import Max, Mean, Metric, Metrics, Sum
from trigon.types import Completion, EncodedMedia, Prompt, RolloutGroup, Turn, Vision

OLDEST_AGE = 3
"""Tokens of this age and older are counted together in staleness/fraction_age_*."""


@dataclass(frozen=True, slots=True)
class Oversampling:
    """How many more prompts a step samples than it learns from, and how long it leaves the rest.

    share: of the groups that are needed.
    max_carried_steps: a step waits for groups that have been carried so often.
    """

    share: float
    max_carried_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class CarriedGroup:
    """A prompt whose completions have not all ended.

    completions: n, some of them unfinished; () to sample it from the start. num_steps: how many
    steps have carried it to the next.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    num_steps: int


def ended_in_step(groups: Sequence[RolloutGroup], carried: Sequence[CarriedGroup]) -> list[RolloutGroup]:
    """Return the groups of a step without the completions that an earlier step has ended.

    groups: without those kept from an earlier step. carried: what the step went on with.
    """
    ended_before = {
        (group.prompt.prompt_id, sample)
        for group in carried
        for sample, completion in enumerate(group.completions)
        if not completion.is_unfinished
    }
    ended = []
    for group in groups:
        name = group.prompt.prompt_id
        rollouts = tuple(each for i, each in enumerate(group.rollouts) if (name, i) not in ended_before)
        if rollouts:
            ended.append(replace(group, rollouts=rollouts))
    return ended


def describe_staleness(groups: Sequence[RolloutGroup], *, version: int) -> Metrics:
    """Return the ages of the sampled tokens: how many steps older their weights are than today's.

    version: of the weights that learn from the groups; they have age 0.
    """
    ages: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            for sampled_by, count in rollout.completion.version_runs:
                ages[version - sampled_by] += count
    total = float(ages.total())
    metrics: dict[str, Metric] = {
        "staleness/mean": Mean(float(sum(age * count for age, count in ages.items())), total),
        "staleness/max": Max(float(max(ages, default=0))),
    }
    for age in range(OLDEST_AGE):
        metrics[f"staleness/fraction_age_{age}"] = Mean(float(ages[age]), total)
    oldest = sum(count for age, count in ages.items() if age >= OLDEST_AGE)
    metrics[f"staleness/fraction_age_{OLDEST_AGE}_or_more"] = Mean(float(oldest), total)
    return metrics


def describe_carried(carried: Sequence[CarriedGroup]) -> Metrics:
    """Return how much a step leaves unfinished."""
    tokens = count_sampled(completion for group in carried for completion in group.completions)
    return {
        "rollout/carried_groups": Sum(float(len(carried))),
        "rollout/carried_tokens": Sum(float(tokens)),
    }


def count_sampled(completions: Iterable[Completion]) -> int:
    """Return the number of tokens that were sampled, of all completions."""
    return sum(completion.num_sampled for completion in completions)


def find_oldest_version(completions: Iterable[Completion], version: int) -> int:
    """Return the version of the oldest sampled token. version: what to return if there is none."""
    versions = [run for completion in completions for run, count in completion.version_runs if count]
    return min(versions, default=version)


def count_tokens_of_version(completions: Sequence[Completion], version: int) -> int:
    """Return the number of tokens that were sampled with the weights of this version."""
    return sum(
        count
        for completion in completions
        for token_version, count in completion.version_runs
        if token_version == version
    )


# -- checkpoints --


def carried_state(groups: Sequence[CarriedGroup]) -> list[dict[str, Any]]:
    """Return groups as JSON values: prompts by id, completions in full."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "num_steps": group.num_steps,
            "completions": [completion_state(completion) for completion in group.completions],
        }
        for group in groups
    ]


def load_carried(
    state: Sequence[dict[str, Any]], prompts: PromptStream, *, n: int, max_tokens: int, warn: Callable[[str], None]
) -> list[CarriedGroup]:
    """Return the groups that carried_state wrote, with their prompts built again from the dataset.

    n: completions per group; a group of another size is sampled from the start; so is one with an
    unfinished completion of max_tokens or more. A group whose row can no longer be used is dropped.
    All with a warning. Raises: as PromptStream.rebuild.
    """
    groups = []
    for group in state:
        completions = tuple(map(load_completion, group["completions"]))
        if completions and len(completions) != n:
            warn(
                f"{group['prompt_id']}: its {len(completions)} unfinished completions are sampled again from the "
                f"start, because worker.rollout.n is now {n}"
            )
            completions = ()
        longest = max((len(each.token_ids) for each in completions if each.is_unfinished), default=0)
        if longest >= max_tokens:
            warn(
                f"{group['prompt_id']}: its unfinished completions are sampled again from the start, because one has "
                f"{longest} tokens, and data.max_response_length is now {max_tokens}"
            )
            completions = ()
        try:
            prompt = prompts.rebuild(group["prompt_id"])
        except BadRow as problem:
            warn(f"its unfinished completions are dropped: {problem}")
            continue
        groups.append(CarriedGroup(prompt, completions, group["num_steps"]))
    return groups


def completion_state(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON values. Images that it observed must be files."""
    return {
        "token_ids": list(completion.token_ids),
        "sampling_logprobs": list(completion.sampling_logprobs),
        "finish_reason": completion.finish_reason,
        "text": completion.text,
        "policy_version": completion.policy_version,
        "replica": completion.replica,
        **({"policy_versions": list(completion.policy_versions)} if completion.policy_versions else {}),
        **_episode_state(completion),
    }


def load_completion(state: dict[str, Any]) -> Completion:
    """Return the completion that completion_state wrote."""
    return Completion(
        token_ids=tuple(state["token_ids"]),
        sampling_logprobs=tuple(state["sampling_logprobs"]),
        finish_reason=state["finish_reason"],
        text=state["text"],
        policy_version=state["policy_version"],
        replica=state.get("replica", 0),
        turns=tuple(map(_load_turn, state.get("turns", ()))),
        vision=_load_observed(state.get("images", ())),
        error=state.get("episode_error", ""),
        policy_versions=tuple((version, count) for version, count in state.get("policy_versions", ())),
    )


def _episode_state(completion: Completion) -> dict[str, Any]:
    """Return what a completion has beyond one turn; {} for one turn without an error."""
    if len(completion.turns) == 1 and completion.num_sampled == len(completion.token_ids) and not completion.error:
        return {}
    assert not isinstance(completion.vision, Vision), "pixels are not written; use EncodedMedia"
    files = () if completion.vision is None else completion.vision.encoded
    return {
        "turns": [astuple(turn) for turn in completion.turns],
        "images": [base64.b64encode(file).decode("ascii") for file in files],
        "episode_error": completion.error,
    }


def _load_turn(fields: Sequence[Any]) -> Turn:
    turn = Turn(*fields)
    return replace(turn, image_sizes=tuple((width, height) for width, height in turn.image_sizes))


def _load_observed(images: Sequence[str]) -> EncodedMedia | None:
    files = tuple(map(base64.b64decode, images))
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files)) if files else None
