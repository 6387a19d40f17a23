"""Groups that are sampled, and work that is not, as JSON values for checkpoints.

Prompts are saved by their ids and built again from the dataset; completions and scores are saved in
full.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from trigon.data.stream import PromptStream
from trigon.errors import BadRow
from trigon.metrics import EffectiveShare, Max, Mean, Metric, Metrics, Min, Sum
from trigon.rollout.protocol import Work
from trigon.types import (
    Completion,
    EncodedMedia,
    Rollout,
    RolloutGroup,
    RoutedExperts,
    SamplingParams,
    Score,
    Turn,
    Vision,
)

_KINDS: Mapping[str, type[Metric]] = {kind.__name__: kind for kind in (Mean, Sum, Max, Min, EffectiveShare)}


def groups_state(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """Return scored groups as JSON values."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "draw": group.prompt.draw,
            "rollouts": [_rollout_state(rollout) for rollout in group.rollouts],
            **({} if group.baseline is None else {"baseline": _rollout_state(group.baseline)}),
        }
        for group in groups
    ]


def load_groups(
    state: Sequence[Mapping[str, Any]],
    prompts: PromptStream,
    sampling: SamplingParams,
    *,
    warn: Callable[[str], None],
) -> tuple[list[RolloutGroup], list[Work]]:
    """Return the groups that groups_state wrote, and work in place of groups of another form.

    Their form is the number of completions, and whether there is a greedy one. Groups whose row can
    no longer be used are dropped. All with a warning.
    Raises: as PromptStream.rebuild.
    """
    groups, work = [], []
    for saved in state:
        try:
            prompt = replace(prompts.rebuild(saved["prompt_id"]), draw=saved["draw"])
        except BadRow as problem:
            warn(f"its completions, kept from the saved run, are dropped: {problem}")
            continue
        if len(saved["rollouts"]) != sampling.n or ("baseline" in saved) != sampling.with_baseline:
            work.append(Work(prompt))
            continue
        baseline = _load_rollout(saved["baseline"]) if sampling.with_baseline else None
        groups.append(RolloutGroup(prompt, tuple(map(_load_rollout, saved["rollouts"])), baseline))
    if work:
        warn(
            f"{len(work)} groups that the saved run had sampled ahead are sampled again from the start, because "
            f"worker.rollout.n is now {sampling.n}, or algorithm.adv_estimator has changed"
        )
    return groups, work


def work_state(work: Sequence[Work]) -> list[dict[str, Any]]:
    """Return work as JSON values."""
    return [
        {
            "prompt_id": each.prompt.prompt_id,
            "draw": each.prompt.draw,
            "num_carried": each.num_carried,
            "completions": [completion_state(completion) for completion in each.completions],
        }
        for each in work
    ]


def load_work(
    state: Sequence[Mapping[str, Any]],
    prompts: PromptStream,
    sampling: SamplingParams,
    *,
    warn: Callable[[str], None],
) -> list[Work]:
    """Return the work that work_state wrote, with its prompts built again from the dataset.

    A group with another number of completions is sampled from the start, and so is a group with an
    unfinished completion of max_tokens or more. A group whose row can no longer be used is dropped.
    All with a warning. Raises: as PromptStream.rebuild.
    """
    num_completions, max_tokens = sampling.num_completions, sampling.max_tokens
    loaded = []
    for saved in state:
        completions = tuple(map(load_completion, saved["completions"]))
        if completions and len(completions) != num_completions:
            warn(
                f"{saved['prompt_id']}: its {len(completions)} unfinished completions are sampled again from the "
                f"start, because a group now has {num_completions} (worker.rollout.n)"
            )
            completions = ()
        longest = max((len(each.token_ids) for each in completions if each.is_unfinished), default=0)
        if longest >= max_tokens:
            warn(
                f"{saved['prompt_id']}: its unfinished completions are sampled again from the start, because one has "
                f"{longest} tokens, and data.max_response_length is now {max_tokens}"
            )
            completions = ()
        try:
            prompt = replace(prompts.rebuild(saved["prompt_id"]), draw=saved["draw"])
        except BadRow as problem:
            warn(f"its unfinished completions are dropped: {problem}")
            continue
        loaded.append(Work(prompt, completions, saved["num_carried"]))
    return loaded


def metrics_state(metrics: Metrics) -> dict[str, Any]:
    """Return metrics as JSON values, from which they can be merged with others."""
    return {name: [type(metric).__name__, *astuple(metric)] for name, metric in metrics.items()}


def load_metrics(state: Mapping[str, Sequence[Any]]) -> Metrics:
    """Return what metrics_state wrote."""
    return {name: _KINDS[kind](*fields) for name, (kind, *fields) in state.items()}


def _rollout_state(rollout: Rollout) -> dict[str, Any]:
    return {
        **completion_state(rollout.completion),
        "overall": rollout.score.overall,
        "parts": dict(rollout.score.parts),
        "outcome": rollout.score.outcome,
        "error": rollout.score.error,
    }


def _load_rollout(state: Mapping[str, Any]) -> Rollout:
    return Rollout(load_completion(state), Score(state["overall"], state["parts"], state["outcome"], state["error"]))


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
        **({} if completion.routed_experts is None else {"routed_experts": _experts_state(completion.routed_experts)}),
        **_episode_state(completion),
    }


def load_completion(state: Mapping[str, Any]) -> Completion:
    """Return the completion that completion_state wrote."""
    return Completion(
        token_ids=tuple(state["token_ids"]),
        sampling_logprobs=tuple(state["sampling_logprobs"]),
        finish_reason=state["finish_reason"],
        text=state["text"],
        policy_version=state["policy_version"],
        replica=state["replica"],
        turns=tuple(map(_load_turn, state.get("turns", ()))),
        vision=_load_observed(state.get("images", ())),
        error=state.get("episode_error", ""),
        policy_versions=tuple((version, count) for version, count in state.get("policy_versions", ())),
        routed_experts=_load_experts(state["routed_experts"]) if "routed_experts" in state else None,
    )


def _experts_state(experts: RoutedExperts) -> dict[str, Any]:
    parts = {"prompt": experts.prompt, "completion": experts.completion}
    return {
        name: {
            "shape": list(part.shape),
            "int16": base64.b64encode(part.contiguous().numpy().tobytes()).decode("ascii"),
        }
        for name, part in parts.items()
        if part is not None
    }


def _load_experts(state: Mapping[str, Any]) -> RoutedExperts:
    parts = {
        name: torch.frombuffer(bytearray(base64.b64decode(part["int16"])), dtype=torch.int16).view(part["shape"])
        for name, part in state.items()
    }
    return RoutedExperts(parts.get("prompt"), parts["completion"])


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
