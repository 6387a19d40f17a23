"""Turns prompts into scored groups: the sampling half of a training step, and all of a validation.

Knows the rollout protocol and the reward pool; no trainer, and no engine in particular. Answers are scored when all are
there. An engine that handed over each completion as it ends would let scoring start sooner, behind this same signature.
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
    progress counts completions, and "reward".
    Raises: EngineError, RewardError as engine and pool do; EngineError if the engine failed for every prompt.
    """
    with phase("gen", total=len(prompts) * sampling.n) as advance:
        completions = rollout.generate(prompts, sampling, step=step, on_progress=advance)
    asked = [(prompt, row) for prompt, row in zip(prompts, completions, strict=True) if row]
    if prompts and not asked:
        raise EngineError(f"The rollout engine failed to sample any of {len(prompts)} prompts, twice each.")
    with phase("reward"):
        scores = iter(rewards.score([_request(prompt, completion) for prompt, row in asked for completion in row]))
    return [
        RolloutGroup(prompt, tuple(Rollout(completion, next(scores)) for completion in row)) for prompt, row in asked
    ]


def _request(prompt: Prompt, completion: Completion) -> RewardRequest:
    return RewardRequest(
        response=completion.text,
        response_length=len(completion.token_ids),
        ground_truth=prompt.answer,
        prompt=prompt.text,
        finish_reason=completion.finish_reason,
        row=prompt.row,
    )
