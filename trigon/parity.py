"""The parity check: every replica of the rollout engine computes what the trainer computes.

At every step, both compute log-probabilities of the same tokens. In float32 they agree to about
1e-5; stale weights, a stale cache or different pixels give differences of 0.1 and more.
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
"""Fewest tokens of a replica to compare, if there are as many."""
SAMPLED_PROBE_TOKENS = 16
"""Most tokens to sample where no completion of the step can be compared."""


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Compares log-probabilities of rollout engine and trainer.

    tolerance: largest mean |difference| of log-probabilities that is accepted.
    """

    tolerance: float

    def probe(
        self, groups: Sequence[RolloutGroup], rollout: RolloutEngine, sampling: SamplingParams, *, step: int
    ) -> list[RolloutGroup]:
        """Return completions of every replica to compare. The rollout engine must be awake.

        Without top-p and top-k these are the first completions of the first group that the replica
        sampled in this step. With either, log-probabilities are those of a truncated distribution,
        which the trainer does not compute, so each replica samples one short completion without
        them; likewise if a replica sampled none of the groups in this step.
        """
        probes: dict[int, RolloutGroup] = {}  # by replica
        if sampling.top_p == 1.0 and sampling.top_k == -1:
            for group in groups:
                completion = group.rollouts[0].completion
                if completion.policy_version == step - 1 and completion.replica not in probes:
                    probes[completion.replica] = RolloutGroup(
                        group.prompt, _first_rollouts(group.rollouts, PROBE_TOKENS)
                    )
        if len(probes) < rollout.num_replicas:
            max_tokens = min(SAMPLED_PROBE_TOKENS, sampling.max_tokens)
            untruncated = replace(sampling, n=1, top_p=1.0, top_k=-1, max_tokens=max_tokens)
            prompt = groups[0].prompt
            for completions in rollout.generate([prompt] * rollout.num_replicas, untruncated, step=step):
                if not completions:
                    raise EngineError(
                        f"The rollout engine failed twice to sample {prompt.prompt_id} for the parity check. See the "
                        "engine's log."
                    )
                probe = RolloutGroup(prompt, (Rollout(completions[0], Score(0.0, {}, "ok", "")),))
                probes.setdefault(completions[0].replica, probe)
        return [probes[replica] for replica in sorted(probes)]

    def check(self, probes: Sequence[RolloutGroup], trainer: LogprobEngine) -> Metrics:
        """Return metrics of the differences between the probes' and the trainer's log-probs.

        Raises: ParityError if the mean of a replica exceeds the tolerance or is not finite.
        """
        differences = [
            (torch.cat(trainer_logprobs) - _sampling_logprobs(probe)).abs()
            for probe, trainer_logprobs in zip(probes, trainer.logprobs(probes), strict=True)
        ]
        failed = [
            (probe, difference)
            for probe, difference in zip(probes, differences, strict=True)
            if not float(difference.mean()) <= self.tolerance
        ]
        if failed:
            probe, difference = failed[0]
            completion = probe.rollouts[0].completion
            replicas = ", ".join(str(other.rollouts[0].completion.replica) for other, _ in failed)
            raise ParityError(
                f"rollout engine and trainer compute different log-probabilities for the same {difference.numel()} "
                f"tokens of {probe.prompt.prompt_id} at policy version {completion.policy_version}: mean |difference| "
                f"{float(difference.mean()):.3g} (largest {float(difference.max()):.3g}), accepted "
                f"{self.tolerance:.3g}; so in replica {replicas} of {len(probes)}, counted from 0. The weight sync is "
                "incomplete, or a cache is stale. If only rounding differs, raise worker.rollout.parity_tolerance"
            )
        compared = torch.cat(differences)
        return {
            "parity/logprobs_diff_mean": Mean(float(compared.sum()), float(compared.numel())),
            "parity/logprobs_diff_max": Max(float(compared.max())),
        }


def _sampling_logprobs(probe: RolloutGroup) -> torch.Tensor:
    return torch.cat([torch.tensor(rollout.completion.sampling_logprobs) for rollout in probe.rollouts])


def _first_rollouts(rollouts: Sequence[Rollout], num_tokens: int) -> tuple[Rollout, ...]:
    """Return the fewest first rollouts that have num_tokens tokens together, or all."""
    before = itertools.accumulate((len(rollout.completion.token_ids) for rollout in rollouts), initial=0)
    return tuple(rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < num_tokens)
