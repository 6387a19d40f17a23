"""The parity check: that the rollout engine holds the trainer's weights, at every step.

Both compute log-probabilities of the same tokens. In float32 they agree to about 1e-5; stale
weights, a stale cache or different pixels give differences of 0.1 and more.
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
"""Fewest tokens to compare, if there are as many: detects stale weights at little cost."""
SAMPLED_PROBE_TOKENS = 16
"""Most tokens to sample for the comparison where no completion of the step can be compared."""


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Compares log-probabilities of rollout engine and trainer.

    tolerance: largest mean |difference| of log-probabilities that is accepted.
    """

    tolerance: float

    def probe(
        self, groups: Sequence[RolloutGroup], rollout: RolloutEngine, sampling: SamplingParams, *, step: int
    ) -> RolloutGroup:
        """Return completions to compare. The rollout engine must be awake.

        Without top-p and top-k these are the first completions of the first group that was sampled
        in this step. With either, log-probabilities are those of a truncated distribution, which
        the trainer does not compute, so one short completion is sampled without them; likewise if
        all groups were sampled in earlier steps.
        """
        fresh = [group for group in groups if group.rollouts[0].completion.policy_version == step - 1]
        if fresh and sampling.top_p == 1.0 and sampling.top_k == -1:
            return RolloutGroup(fresh[0].prompt, _first_rollouts(fresh[0].rollouts, PROBE_TOKENS))
        max_tokens = min(SAMPLED_PROBE_TOKENS, sampling.max_tokens)
        untruncated = replace(sampling, n=1, top_p=1.0, top_k=-1, max_tokens=max_tokens)
        prompt = groups[0].prompt
        [completions] = rollout.generate([prompt], untruncated, step=step)
        if not completions:
            raise EngineError(
                f"The rollout engine failed twice to sample {prompt.prompt_id} for the parity check. See the engine's "
                "log."
            )
        return RolloutGroup(prompt, (Rollout(completions[0], Score(0.0, {}, "ok", "")),))

    def check(self, probe: RolloutGroup, trainer: LogprobEngine) -> Metrics:
        """Return metrics of the differences between the probe's and the trainer's log-probs.

        Raises: ParityError if their mean exceeds the tolerance or is not finite.
        """
        [trainer_logprobs] = trainer.logprobs([probe])
        sampled = torch.cat([torch.tensor(rollout.completion.sampling_logprobs) for rollout in probe.rollouts])
        difference = (torch.cat(trainer_logprobs) - sampled).abs()
        mean = float(difference.mean())
        if not mean <= self.tolerance:
            version = probe.rollouts[0].completion.policy_version
            raise ParityError(
                f"rollout engine and trainer compute different log-probabilities for the same {difference.numel()} "
                f"tokens of {probe.prompt.prompt_id} at policy version {version}: mean |difference| {mean:.3g} "
                f"(largest {float(difference.max()):.3g}), accepted {self.tolerance:.3g}. The weight sync is "
                "incomplete, or a cache is stale. If only rounding differs, raise worker.rollout.parity_tolerance"
            )
        return {
            "parity/logprobs_diff_mean": Mean(float(difference.sum()), float(difference.numel())),
            "parity/logprobs_diff_max": Max(float(difference.max())),
        }


def _first_rollouts(rollouts: Sequence[Rollout], num_tokens: int) -> tuple[Rollout, ...]:
    """Return the fewest first rollouts that have num_tokens tokens together, or all."""
    before = itertools.accumulate((len(rollout.completion.token_ids) for rollout in rollouts), initial=0)
    return tuple(rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < num_tokens)
