"""Proof, at every step, that the rollout engine holds the trainer's weights.

The same tokens are scored by both. In float32 they agree to about 1e-5; stale weights, a stale cache or other pixels
show up as 0.1 and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trigon.errors import EngineError, ParityError
from trigon.metrics import Max, Mean, Metrics
from trigon.rollout.protocol import RolloutEngine
from trigon.training.protocol import LogprobEngine
from trigon.types import Rollout, RolloutGroup, SamplingParams, Score

PROBE_TOKENS = 64
"""Tokens that are compared, or a few more: enough to tell stale weights by, and no work that shows."""
DRAWN_TOKENS = 16
"""Tokens that are drawn where none of the step's can be compared."""


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """tolerance: the largest mean |difference| of log-probabilities that still counts as rounding."""

    tolerance: float

    def probe(
        self, groups: Sequence[RolloutGroup], rollout: RolloutEngine, sampling: SamplingParams, *, step: int
    ) -> RolloutGroup:
        """Return completions to compare, drawn from the whole vocabulary; to be called inside rollout.awake().

        The first completions of this step's first group will do where top-p and top-k are off. Where they are on, their
        log-probabilities are those of the truncated distribution, which the trainer does not model; a short completion
        is then drawn without them, as where all groups are left from the step before.
        """
        fresh = [group for group in groups if group.rollouts[0].completion.policy_version == step - 1]
        if fresh and sampling.top_p == 1.0 and sampling.top_k == -1:
            return RolloutGroup(fresh[0].prompt, _first(fresh[0].rollouts, PROBE_TOKENS))
        plain = replace(sampling, n=1, top_p=1.0, top_k=-1, max_tokens=min(DRAWN_TOKENS, sampling.max_tokens))
        prompt = groups[0].prompt
        [completions] = rollout.generate([prompt], plain, step=step)
        if not completions:
            raise EngineError(f"The rollout engine failed twice to sample {prompt.prompt_id} for the parity check.")
        return RolloutGroup(prompt, (Rollout(completions[0], Score(0.0, {}, "ok", "")),))

    def check(self, probe: RolloutGroup, trainer: LogprobEngine) -> Metrics:
        """Score the probe with the trainer.

        Raises: ParityError beyond the tolerance, or if a difference is not finite.
        """
        [trainer_logprobs] = trainer.logprobs([probe])
        sampled = torch.cat([torch.tensor(rollout.completion.sampling_logprobs) for rollout in probe.rollouts])
        difference = (torch.cat(trainer_logprobs) - sampled).abs()
        mean = float(difference.mean())
        if not mean <= self.tolerance:
            version = probe.rollouts[0].completion.policy_version
            raise ParityError(
                f"rollout engine and trainer disagree about the same {difference.numel()} tokens of "
                f"{probe.prompt.prompt_id} at policy version {version}: mean |log-prob difference| {mean:.3g} (largest "
                f"{float(difference.max()):.3g}), tolerated {self.tolerance:.3g}. The weights did not arrive whole, or "
                "a cache is stale. If both sides are right and only rounding differs, raise "
                "worker.rollout.parity_tolerance"
            )
        return {
            "parity/logprobs_diff_mean": Mean(float(difference.sum()), float(difference.numel())),
            "parity/logprobs_diff_max": Max(float(difference.max())),
        }


def _first(rollouts: Sequence[Rollout], num_tokens: int) -> tuple[Rollout, ...]:
    """Return as many of the first rollouts as it takes for so many tokens, or all."""
    before = itertools.accumulate((len(rollout.completion.token_ids) for rollout in rollouts), initial=0)
    return tuple(rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < num_tokens)
