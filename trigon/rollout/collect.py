"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Knows the rollout protocol and the reward pool; no trainer, and no engine in particular. The answers of a prompt are
scored as soon as all of them are there, while the engine samples those of others.
"""

from __future__ import annotations

from collections.abc import Sequence

from trigon.errors import EngineError
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool
from trigon.rollout.protocol import RolloutEngine
from trigon.types import Completion, Phase, Prompt, Rollout, RolloutGroup, SamplingParams


def collect(
    prompts: Sequence[Prompt],
    rollout: RolloutEngine,
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    step: int,
    phase: Phase,
) -> list[RolloutGroup]:
    """Sample sampling.n completions for each prompt, score them, and return one group for each prompt, in order.

    A prompt for which the engine failed is left out. The engine must be awake. Announces the phases "gen", whose
    progress counts completions, and "reward", which is what is left to score when all are sampled.
    Raises: EngineError, RewardError as engine and pool do; EngineError if the engine failed for every prompt.
    """
    num_completions = len(prompts) * sampling.n
    with rewards.scoring(num_completions=num_completions) as scoring:

        def on_group(index: int, row: Sequence[Completion]) -> None:
            scoring.add(index * sampling.n, [_request(prompts[index], completion) for completion in row])

        with phase("gen", total=num_completions) as advance:
            completions = rollout.generate(prompts, sampling, step=step, on_progress=advance, on_group=on_group)
        asked = [(prompt, row) for prompt, row in zip(prompts, completions, strict=True) if row]
        if prompts and not asked:
            raise EngineError(f"The rollout engine failed to sample any of {len(prompts)} prompts, twice each.")
        with phase("reward"):
            scored = scoring.result()
    assert len(scored) == sum(len(row) for _, row in asked), "the engine returned other completions than it handed over"
    scores = iter(scored)
    return [
        RolloutGroup(prompt, tuple(Rollout(completion, next(scores)) for completion in row)) for prompt, row in asked
    ]


def _request(prompt: Prompt, completion: Completion) -> RewardRequest:
    return RewardRequest(
        response=completion.text,
        response_length=len(completion.token_ids),
        ground_truth=prompt.ground_truth,
        prompt=prompt.text,
        finish_reason=completion.finish_reason,
        row=prompt.row,
    )
