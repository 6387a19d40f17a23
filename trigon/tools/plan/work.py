"""The work of a step: completions, rows, tokens, and floating-point operations of each phase.

The counts are those that a run reports: rows are packed by the same function, and operations are
counted by trigon/models/flops.py, which also gives actor/model_tflops of the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from trigon.assemble.options import needs_old_logprobs
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.packing import row_lengths
from trigon.distributed.balance import partition_balanced
from trigon.models.flops import Counting, Flops, GroupLengths, forward_flops, update_flops
from trigon.models.memory import ModelSize
from trigon.tools.plan.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Trainer:
    """How a trainer computes, as far as its work depends on it.

    counting: how often prompts and images are computed, see trigon/models/flops.py.
    reduces_every_pass: gradients are reduced over the ranks after each pass; False: once an update.
    always_scores: log-probabilities before the update are computed even if no term needs them.
    """

    name: str
    counting: Counting
    reduces_every_pass: bool
    always_scores: bool


TRIGON = Trainer("Trigon", "shared", reduces_every_pass=False, always_scores=False)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The batches of a step. Per GPU: of the rank that has most; on the CPU, of a worker.

    prompts: that the step learns from. sampled_prompts: with those that online filtering rejects.
    completions: of a prompt. sampled, learned: completions of a step.
    updates: optimizer updates of a step. epochs: passes over the data of a step.
    prompts_per_update, sequences_per_update, sequences_per_gpu: of one update.
    update_rows, score_rows: forward passes of a GPU, in an update (so many micro-batches are
    accumulated), and in one scoring of the step's completions.
    update_budget, score_budget: most tokens of a row.
    prompt_tokens: of the step's prompts, each once. response_tokens: of its completions, those that
    are sampled. observed_tokens: those that they observe.
    sequence_tokens: of its sequences, each with its prompt and without what it observes:
    perf/total_num_tokens.
    row_tokens: of all rows of all updates, observed tokens included: actor/packed_tokens.
    learned_groups_share: of the groups, those with a gradient.
    """

    prompts: int
    sampled_prompts: int
    completions: int
    sampled: int
    learned: int
    updates: int
    epochs: int
    prompts_per_update: int
    sequences_per_update: int
    sequences_per_gpu: int
    update_rows: int
    score_rows: int
    update_budget: int
    score_budget: int
    prompt_tokens: float
    response_tokens: float
    sequence_tokens: float
    row_tokens: float
    learned_groups_share: float
    observed_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of a step, over all devices; None for a family without counts.

    prefill, decode: of sampling; observations belong to prefill. old, reference:
    log-probabilities; 0 where they are not needed.
    update: forward and backward, as actor/model_tflops counts. computed: the same with what
    gradient checkpointing computes again, and without gradients that LoRA does not need.
    """

    prefill: float
    decode: float
    old: float
    reference: float
    update: float
    computed: float

    @property
    def total(self) -> float:
        """The sum over the phases."""
        return self.prefill + self.decode + self.old + self.reference + self.update


def make_ledger(
    config: Config,
    plan: Plan,
    lengths: Lengths,
    *,
    budgets: tuple[int, int],
    keep_rate: float,
    learned_share: float = 1.0,
    trainer: Trainer = TRIGON,
) -> Ledger:
    """Return the batches of a step.

    Args:
        budgets: most tokens of a row, in an update and in a scoring.
        keep_rate: share of the groups that online filtering keeps; unused without it.
        learned_share: share of the groups that have a gradient; see learns_without_advantage.
    """
    n = config.group_size
    sampled_prompts = plan.prompts_per_step
    if config.algorithm.online_filtering:
        per_round = config.prompts_per_round
        sampled_prompts = ceil(plan.prompts_per_step / keep_rate / per_round) * per_round
    share = 1.0 if config.learns_without_advantage else learned_share
    prompts = plan.prompts_per_step
    mean_group = lengths.mean_prompt + n * (max(1, round(lengths.response_tokens)) + round(lengths.observed_tokens))
    update_groups = max(1, round(plan.prompts_per_update * share))
    update_rows, update_tokens = _rows(config, lengths, update_groups, budgets[0], trainer)
    score_rows, _ = _rows(config, lengths, prompts, budgets[1], trainer)
    # A group that is split over rows has its prompt in each of them.
    repeated = update_tokens / sum(_cost(group) for group in lengths.groups(update_groups, n))
    response_tokens = prompts * n * float(max(1, round(lengths.response_tokens)))
    return Ledger(
        prompts=prompts,
        sampled_prompts=sampled_prompts,
        completions=n,
        sampled=sampled_prompts * n,
        learned=prompts * n,
        updates=plan.updates_per_step,
        epochs=plan.epochs_per_step,
        prompts_per_update=plan.prompts_per_update,
        sequences_per_update=plan.sequences_per_update,
        sequences_per_gpu=ceil(plan.sequences_per_update / config.num_shares),
        update_rows=update_rows,
        score_rows=score_rows,
        update_budget=budgets[0],
        score_budget=budgets[1],
        prompt_tokens=prompts * lengths.mean_prompt,
        response_tokens=response_tokens,
        sequence_tokens=prompts * n * lengths.mean_prompt + response_tokens,
        row_tokens=prompts * share * mean_group * repeated * plan.epochs_per_step,
        learned_groups_share=share,
        observed_tokens=prompts * n * float(round(lengths.observed_tokens)),
    )


def _cost(group: GroupLengths) -> int:
    return group.prompt + sum(group.completions)


def _rows(config: Config, lengths: Lengths, num_groups: int, budget: int, trainer: Trainer) -> tuple[int, int]:
    """Return the rows of the rank that has most, and the tokens of all rows of all ranks."""
    shares = config.num_shares
    if trainer.counting == "shared":
        groups = lengths.groups(num_groups, config.group_size)
    else:
        groups = [each for each in lengths.groups(num_groups, 1) for _ in range(config.group_size)]
    most = tokens = 0
    parts = partition_balanced([_cost(group) for group in groups], shares) if shares > 1 else [range(len(groups))]
    for part in parts:
        rows = row_lengths([(groups[index].prompt, groups[index].completions) for index in part], max_tokens=budget)
        most, tokens = max(most, len(rows)), tokens + sum(rows)
    return most, tokens


def count_flops(
    config: Config,
    plan: Plan,
    hf_config: Any,
    size: ModelSize,
    lengths: Lengths,
    ledger: Ledger,
    *,
    trainer: Trainer = TRIGON,
) -> StepFlops | None:
    """Return the operations of a step; None for a family that is not counted.

    Exact for the mean step of an epoch in which all measured prompts are drawn equally often.
    """
    measured = len(lengths.prompts)
    groups = lengths.groups(measured, ledger.completions)
    forward = forward_flops(hf_config, groups, trainer.counting)
    update = update_flops(hf_config, groups, trainer.counting, trains_vision=size.trains_vision)
    sampled = forward_flops(hf_config, groups, "shared")
    prompts = forward_flops(hf_config, lengths.groups(measured, 0), "shared")
    unobserving = replace(lengths, observed_tokens=0.0, observed_grids=())
    turns = forward_flops(hf_config, unobserving.groups(measured, ledger.completions), "shared")
    if forward is None or update is None or sampled is None or prompts is None or turns is None:
        return None
    learned = ledger.prompts / measured
    repeats = 1 if config.worker.rollout.enable_prefix_caching else ledger.completions
    drawn = ledger.sampled_prompts / measured
    scores_old = needs_old_logprobs(config, plan) or trainer.always_scores
    updates = learned * ledger.epochs * ledger.learned_groups_share
    return StepFlops(
        prefill=(prompts.total * repeats + sampled.total - turns.total) * drawn,
        decode=(turns.total - prompts.total) * drawn,
        old=forward.total * learned if scores_old else 0.0,
        reference=forward.total * learned if config.needs_reference else 0.0,
        update=update * updates,
        computed=_computed(config, size, forward, update) * updates,
    )


def _computed(config: Config, size: ModelSize, forward: Flops, update: int) -> int:
    """Return what an update computes: more than update_flops, or with LoRA less."""
    backward = update - forward.total
    tower = forward.vision + forward.patch_embedding
    if size.has_adapters:  # gradients of the inputs, and of nearly no weights
        backward //= 2
    again = forward.total - (0 if size.trains_vision else tower)
    return forward.total + backward + (again if config.worker.actor.model.enable_gradient_checkpointing else 0)
