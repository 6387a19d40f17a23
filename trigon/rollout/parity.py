"""The parity check: every replica of the rollout engine computes what the trainer computes.

At every step, both compute log-probabilities of the same tokens. In float32 they agree to about
1e-5; stale weights, a stale cache or different pixels give differences of 0.1 and more on every
token. Single tokens may differ that much for another reason: where two experts of an MoE model have
nearly the same score, rounding decides which of them is used. So a replica above the tolerance is
compared on several times as many tokens before the run stops.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trigon.errors import EngineError, NotFiniteError, ParityError
from trigon.metrics import Max, Mean, Metrics
from trigon.rollout.protocol import RolloutEngine, Work
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

PROBE_TOKENS = 64
"""Fewest tokens of a replica to compare, if there are as many."""
SAMPLED_PROBE_TOKENS = 16
"""Most tokens to sample where no completion of the step can be compared."""
FURTHER_PROBES = 4
"""How many times as many tokens are compared in addition if a replica exceeds the tolerance."""


class ScoringEngine(Protocol):
    """What computes the trainer's log-probabilities. A train engine satisfies it."""

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        """Return the log-probabilities of the sampled tokens of each completion."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Completions of one replica to compare.

    first: compared at every step. further: other completions, compared in addition if `first` of
    any replica exceeds the tolerance; empty if the replica sampled no more.
    """

    first: RolloutGroup
    further: tuple[RolloutGroup, ...]


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Compares log-probabilities of rollout engine and trainer.

    tolerance: largest mean |difference| of log-probabilities that is accepted.
    """

    tolerance: float

    def probe(
        self,
        groups: Sequence[RolloutGroup],
        rollout: RolloutEngine,
        sampling: SamplingParams,
        *,
        prompt: Prompt,
        version: int,
    ) -> list[Probe]:
        """Return completions of every replica to compare. The rollout engine must be awake.

        Without top-p and top-k these are the first completions that the replica sampled in this
        step: the completions of its first group, and after them further ones. If a completion was
        begun in an earlier step, only the tokens that were sampled in this step are compared. With
        top-p or top-k the log-probabilities belong to a truncated distribution, which the trainer
        does not compute, so each replica samples short completions without them. A replica that
        sampled none of the groups does the same.
        Args:
            groups: completions that ended in this step (ended_in_step); (): no completion of the
                step may be compared. The policy version does not show this: it stays the same while
                only a critic learns.
            prompt: the prompt for which short completions are sampled.
            version: the policy version of the engine's weights.
        """
        probes: dict[int, Probe] = {}  # by replica
        if sampling.top_p == 1.0 and sampling.top_k == -1:
            by_replica: dict[int, list[RolloutGroup]] = {}
            for group in groups:
                for replica, sampled in _ended_by(group, version).items():
                    by_replica.setdefault(replica, []).append(sampled)
            probes = {replica: _probe_of_groups(sampled) for replica, sampled in by_replica.items()}
        if len(probes) < rollout.num_replicas:
            for probe in _sample_probes(prompt, rollout, sampling):
                probes.setdefault(probe.first.rollouts[0].completion.replica, probe)
        return [probes[replica] for replica in sorted(probes)]

    def check(
        self, probes: Sequence[Probe], trainer: ScoringEngine, *, warn: Callable[[str], None] = warnings.warn
    ) -> Metrics:
        """Return metrics of the differences between the probes' and the trainer's log-probs.

        There are none without probes.

        If the mean of a replica exceeds the tolerance or is not finite, the further completions of
        all replicas are compared too, and the means over all of these tokens decide.

        Args: warn: called with a message if the first completions exceed the tolerance and all
        completions together do not.
        Raises: ParityError if all completions together exceed it; NotFiniteError if the trainer's
        log-probabilities are not finite, which is no fault of the weight sync.
        """
        if not probes:  # no weights were sent in the step
            return {}
        first = _differences([probe.first for probe in probes], trainer)
        failed = self._failed(first)
        if not failed:
            return _metrics(first)
        further = iter(_differences([group for probe in probes for group in probe.further], trainer))
        together = [
            torch.cat([tokens, *itertools.islice(further, len(probe.further))])
            for tokens, probe in zip(first, probes, strict=True)
        ]
        still_failed = self._failed(together)
        if still_failed:
            replica = still_failed[0]
            group = probes[replica].first
            replicas = ", ".join(map(str, still_failed))
            raise ParityError(
                f"rollout engine and trainer compute different log-probabilities for the same tokens of "
                f"{group.prompt.prompt_id} at policy version {group.rollouts[0].completion.policy_version}: mean "
                f"|difference| {_describe(first[replica], together[replica])}, accepted {self.tolerance:.3g}; so in "
                f"replica {replicas} of {len(probes)}, counted from 0. The weight sync is incomplete, or a cache is "
                "stale. If only rounding differs, raise worker.rollout.parity_tolerance"
            )
        worst = max(failed, key=lambda replica: float(first[replica].mean()))
        warn(
            f"parity: mean |difference| {_describe(first[worst], together[worst])} of replica {worst}, accepted "
            f"{self.tolerance:.3g}: single tokens differ, as where rounding changes which experts of an MoE model are "
            "used, and not the weights, so the run continues"
        )
        return {**_metrics(together), "parity/first_diff_mean": Max(float(first[worst].mean()))}

    def _failed(self, differences: Sequence[Tensor]) -> list[int]:
        """Return the replicas whose mean exceeds the tolerance or is not finite."""
        return [replica for replica, each in enumerate(differences) if not float(each.mean()) <= self.tolerance]


def ended_in_step(groups: Sequence[RolloutGroup], work: Sequence[Work]) -> list[RolloutGroup]:
    """Return the groups of a step without the completions that an earlier step has ended.

    work: the work with which the step began.
    """
    ended_before = {
        (each.prompt.prompt_id, sample)
        for each in work
        for sample, completion in enumerate(each.completions)
        if not completion.is_unfinished
    }
    ended = []
    for group in groups:
        name = group.prompt.prompt_id
        rollouts = tuple(each for i, each in enumerate(group.rollouts) if (name, i) not in ended_before)
        if rollouts:
            ended.append(replace(group, rollouts=rollouts))
    return ended


def _differences(groups: Sequence[RolloutGroup], trainer: ScoringEngine) -> list[Tensor]:
    """Return |engine - trainer| of the log-probabilities of each group, [tokens] float32.

    Only tokens with the same policy version as the last token of their completion are compared.
    """
    if not groups:
        return []
    differences = []
    for group, by_completion in zip(groups, trainer.logprobs(groups), strict=True):
        trained = torch.cat(by_completion)
        sampled = torch.cat([torch.tensor(rollout.completion.sampling_logprobs) for rollout in group.rollouts])
        _require_finite(group, trained=trained, sampled=sampled)
        differences.append((trained - sampled).abs()[_is_current(group)])
    return differences


def _is_current(group: RolloutGroup) -> Tensor:
    """Return [tokens] bool: whether a token has the last version of its completion."""
    return torch.cat(
        [
            torch.full((count,), version == rollout.completion.policy_version)
            for rollout in group.rollouts
            for version, count in rollout.completion.version_runs
        ]
    )


def _require_finite(group: RolloutGroup, *, trained: Tensor, sampled: Tensor) -> None:
    """Check that the log-probabilities of a group's tokens are finite.

    Raises: NotFiniteError if the trainer's are not, ParityError if only the engine's are not.
    """
    version = group.rollouts[0].completion.policy_version
    where = f"of {trained.numel()} tokens of {group.prompt.prompt_id} at policy version {version}"
    if num_trained := int((~trained.isfinite()).sum()):
        raise NotFiniteError(
            f"the trainer's log-probabilities {where} hold {num_trained} that are nan or infinite, with weights that "
            "are finite: the activations overflow"
        )
    if num_sampled := int((~sampled.isfinite()).sum()):
        raise ParityError(
            f"the rollout engine's log-probabilities {where} hold {num_sampled} that are nan or infinite, and the "
            "trainer's are finite: the activations overflow in worker.rollout.dtype. Set it to bf16 or fp32"
        )


def _metrics(differences: Sequence[Tensor]) -> Metrics:
    compared = torch.cat(list(differences))
    return {
        "parity/logprobs_diff_mean": Mean(float(compared.sum()), float(compared.numel())),
        "parity/logprobs_diff_max": Max(float(compared.max())),
    }


def _describe(first: Tensor, together: Tensor) -> str:
    """Return the means of the first tokens and of all, with the largest difference of each."""

    def text(tokens: Tensor) -> str:
        return f"{float(tokens.mean()):.3g} on {tokens.numel()} tokens (largest {float(tokens.max()):.3g})"

    return text(first) if len(together) == len(first) else f"{text(first)}, with further ones {text(together)}"


def _ended_by(group: RolloutGroup, version: int) -> dict[int, RolloutGroup]:
    """Return the completions of a group that these weights ended, by replica.

    Without those whose environment failed.
    """
    rollouts: dict[int, list[Rollout]] = {}
    for rollout in group.rollouts:
        if rollout.completion.policy_version == version and not rollout.completion.error:
            rollouts.setdefault(rollout.completion.replica, []).append(rollout)
    return {replica: replace(group, rollouts=tuple(each)) for replica, each in rollouts.items()}


def _probe_of_groups(groups: Sequence[RolloutGroup]) -> Probe:
    """Return the probe of the replica that sampled these groups."""
    prompt, rollouts = groups[0].prompt, groups[0].rollouts
    first = RolloutGroup(prompt, _first_rollouts(rollouts, PROBE_TOKENS))
    missing = FURTHER_PROBES * max(PROBE_TOKENS, _count_current(first.rollouts))
    further = []
    for group in (RolloutGroup(prompt, rollouts[len(first.rollouts) :]), *groups[1:]):
        if chosen := _first_rollouts(group.rollouts, missing):
            further.append(RolloutGroup(group.prompt, chosen))
            missing -= _count_current(chosen)
    return Probe(first, tuple(further))


def _sample_probes(prompt: Prompt, rollout: RolloutEngine, sampling: SamplingParams) -> list[Probe]:
    """Sample a probe of this prompt in every replica, without top-p and top-k."""
    max_tokens = min(SAMPLED_PROBE_TOKENS, sampling.max_tokens)
    untruncated = replace(sampling, n=1, top_p=1.0, top_k=-1, max_tokens=max_tokens, one_turn=True, with_baseline=False)
    prompts = [prompt] * rollout.num_replicas
    first = rollout.generate(prompts, untruncated)
    # In a call of their own, since a larger batch may change the last bits of the first ones. Their
    # first sample has the seed of those, and is left out.
    further = rollout.generate(prompts, replace(untruncated, n=1 + FURTHER_PROBES))
    if not all(first):
        raise EngineError(
            f"The rollout engine failed twice to sample {prompt.prompt_id} for the parity check. See the engine's log."
        )
    return [
        Probe(_unscored(prompt, completions), (_unscored(prompt, others[1:]),) if others[1:] else ())
        for completions, others in zip(first, further, strict=True)
    ]


def _unscored(prompt: Prompt, completions: Sequence[Completion]) -> RolloutGroup:
    return RolloutGroup(prompt, tuple(Rollout(completion, Score(0.0, {}, "ok", "")) for completion in completions))


def _count_current(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens that are compared: those of each completion's last version."""
    runs = [(rollout.completion.policy_version, run) for rollout in rollouts for run in rollout.completion.version_runs]
    return sum(count for last, (version, count) in runs if version == last)


def _first_rollouts(rollouts: Sequence[Rollout], num_tokens: int) -> tuple[Rollout, ...]:
    """Return the fewest first rollouts that have num_tokens tokens together, or all."""
    before = itertools.accumulate((_count_current([rollout]) for rollout in rollouts), initial=0)
    return tuple(rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < num_tokens)
