"""The work of a step: completions, rows, tokens, floating-point operations, and bytes moved.

The counts are those that a run reports: rows are packed by the same function, and operations are
counted by trigon/models/sizes.py, which also gives actor/model_tflops of the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from trigon.assemble.memory import RunMemory
from trigon.assemble.options import needs_old_logprobs, needs_reference
from trigon.config.batch_sizes import resolve_group_size
from trigon.config.defaults import resolve_prompts_per_round, resolve_weight_dtype
from trigon.config.plan import Plan, has_workers, num_shares, num_workers, workers_per_copy
from trigon.config.schema import Config
from trigon.data.packing import row_lengths
from trigon.distributed.balance import partition_balanced
from trigon.models.dtypes import DTYPES
from trigon.models.sizes import ModelSize, forward_flops, update_flops
from trigon.tools.plan.lengths import Lengths

_NUMBER_BYTES = 4  # of a token id or a float between driver and workers


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a step. "Each GPU" is the rank that has most; on the CPU, a worker.

    prompts: that the step learns from. sampled_prompts: with those that online filtering rejects.
    completions: of a prompt. sampled, learned: completions of a step.
    updates: optimizer updates of a step. epochs: passes over the data of a step.
    prompts_per_update, sequences_per_update, sequences_per_gpu: size of one update.
    update_rows, score_rows: forward passes of each GPU in an update, whose gradients accumulate,
        and in one scoring of the step's completions.
    update_budget, score_budget: most tokens of a row.
    prompt_tokens: tokens of the step's prompts, each once. response_tokens: tokens of its
        completions that are sampled. observed_tokens: those that completions observe.
    sequence_tokens: tokens of its sequences, each with its prompt and without what it observes, as
        perf/total_num_tokens.
    row_tokens: tokens of all rows of all updates, observed ones included, as actor/packed_tokens.
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
    observed_tokens: float
    sequence_tokens: float
    row_tokens: float


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of a step, over all devices.

    prefill, decode: operations of sampling; observations belong to prefill.
    old, reference: operations of log-probabilities; 0 where they are not needed.
    update: forward and backward, as actor/model_tflops counts.
    computed: the same with what gradient checkpointing computes again, and without gradients that
        LoRA does not need.
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


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that one device moves in a step.

    weight_sync: weights gathered for the rollout engine.
    received: weights received by a worker that only samples.
    gathers: weights that FSDP gathers for passes.
    gradients: gradients reduced over the ranks.
    offload: weights, optimizer states and inputs of layers to and from host memory.
    driver: token ids and numbers between the driver and all workers, without images.
    """

    weight_sync: float
    received: float
    gathers: float
    gradients: float
    offload: float
    driver: float


def make_batches(
    config: Config, plan: Plan, lengths: Lengths, *, budgets: tuple[int, int], keep_rate: float
) -> Batches:
    """Return the batches of a step.

    Args:
        budgets: most tokens of a row, in an update and in a scoring.
        keep_rate: share of the groups that online filtering keeps; unused without it.
    """
    n, prompts = resolve_group_size(config), plan.prompts_per_step
    sampled_prompts = prompts
    if config.algorithm.online_filtering:
        per_round = resolve_prompts_per_round(config)
        sampled_prompts = ceil(prompts / keep_rate / per_round) * per_round
    update_rows, packed = _rows(config, lengths, plan.prompts_per_update, budgets[0])
    score_rows, _ = _rows(config, lengths, prompts, budgets[1])
    # A group that is split over rows has its prompt in each of them.
    repeated = packed / sum(group.tokens for group in lengths.groups(plan.prompts_per_update, n))
    mean_group = lengths.mean_prompt + n * lengths.completion_tokens
    observed_tokens = prompts * n * float(round(lengths.observed_tokens))
    response_tokens = prompts * n * float(lengths.completion_tokens) - observed_tokens
    return Batches(
        prompts=prompts,
        sampled_prompts=sampled_prompts,
        completions=n,
        sampled=sampled_prompts * n,
        learned=prompts * n,
        updates=plan.updates_per_step,
        epochs=plan.epochs_per_step,
        prompts_per_update=plan.prompts_per_update,
        sequences_per_update=plan.sequences_per_update,
        sequences_per_gpu=ceil(plan.sequences_per_update / num_shares(config)),
        update_rows=update_rows,
        score_rows=score_rows,
        update_budget=budgets[0],
        score_budget=budgets[1],
        prompt_tokens=prompts * lengths.mean_prompt,
        response_tokens=response_tokens,
        observed_tokens=observed_tokens,
        sequence_tokens=prompts * n * lengths.mean_prompt + response_tokens,
        row_tokens=prompts * mean_group * repeated * plan.epochs_per_step,
    )


def _rows(config: Config, lengths: Lengths, num_groups: int, budget: int) -> tuple[int, int]:
    """Return the rows of the rank that has most, and the tokens of all rows of all ranks."""
    shares, groups = num_shares(config), lengths.groups(num_groups, resolve_group_size(config))
    parts = partition_balanced([group.tokens for group in groups], shares) if shares > 1 else [range(len(groups))]
    packed = [
        row_lengths([(groups[index].prompt, groups[index].completions) for index in part], max_tokens=budget)
        for part in parts
    ]
    return max(map(len, packed)), sum(map(sum, packed))


def count_flops(
    config: Config, plan: Plan, hf_config: Any, size: ModelSize, lengths: Lengths, batches: Batches
) -> StepFlops | None:
    """Return the operations of a step; None for a family that is not counted.

    Exact for the mean step of an epoch in which all measured prompts are drawn equally often.
    """
    measured = len(lengths.prompts)
    groups = lengths.groups(measured, batches.completions)
    unobserving = replace(lengths, observed_tokens=0.0, observed_grids=()).groups(measured, batches.completions)
    forward = forward_flops(hf_config, groups, "shared")
    update = update_flops(hf_config, groups, "shared", trains_vision=size.trains_vision)
    prompts = forward_flops(hf_config, lengths.groups(measured, 0), "shared")
    turns = forward_flops(hf_config, unobserving, "shared")
    if forward is None or update is None or prompts is None or turns is None:
        return None
    # What an update computes: with LoRA gradients of the inputs, and of nearly no weights.
    computed = forward.total + (update - forward.total) // (2 if size.has_adapters else 1)
    if config.worker.actor.model.enable_gradient_checkpointing:
        computed += forward.total - (0 if size.trains_vision else forward.vision + forward.patch_embedding)
    learned, drawn = batches.prompts / measured, batches.sampled_prompts / measured
    repeats = 1 if config.worker.rollout.enable_prefix_caching else batches.completions
    return StepFlops(
        prefill=(prompts.total * repeats + forward.total - turns.total) * drawn,
        decode=(turns.total - prompts.total) * drawn,
        old=forward.total * learned if needs_old_logprobs(config, plan) else 0.0,
        reference=forward.total * learned if needs_reference(config) else 0.0,
        update=update * learned * batches.epochs,
        computed=computed * learned * batches.epochs,
    )


def count_moved_bytes(
    config: Config, plan: Plan, size: ModelSize, memory: RunMemory, lengths: Lengths, batches: Batches
) -> MovedBytes:
    """Return what one device moves in a step."""
    actor, shards, scorings = config.worker.actor, workers_per_copy(config), _num_scorings(config, plan)
    compute = DTYPES[actor.fsdp.mp_param_dtype].itemsize
    synced = size.parameters * DTYPES[config.worker.rollout.dtype].itemsize
    others = (shards - 1) / shards
    passes = batches.updates * batches.update_rows * (2 if actor.fsdp.enable_full_shard else 1)
    reduced = (size.all.trained + size.all.adapters) * DTYPES[actor.fsdp.mp_reduce_dtype].itemsize
    copies = num_workers(config) // shards
    # What is offloaded is on the device during an update, and in host memory at its end.
    parts = {part.name: part.expected for phase in memory.phases if phase.phase == "update" for part in phase.parts}
    offloaded = 0.0
    if memory.hardware.device == "cuda":
        offloaded += actor.offload.offload_params * parts.get("weights", 0)
        offloaded += actor.offload.offload_optimizer * parts.get("optimizer states", 0)
        if actor.model.enable_activation_offload:
            state = DTYPES[resolve_weight_dtype(config)].itemsize if shards == 1 else compute
            offloaded += _layer_inputs(size, lengths, batches) * state / num_workers(config)
    return MovedBytes(
        weight_sync=synced * others,
        received=0.0 if config.worker.hybrid_engine else synced,
        gathers=(passes + batches.score_rows * scorings) * size.parameters * compute * others,
        # With several copies of the model, each shard is also summed over the copies.
        gradients=batches.updates * reduced * (others + (2 / shards if copies > 1 else 0)),
        offload=2 * offloaded,
        driver=_driver_bytes(batches, scorings) if has_workers(config) else 0.0,
    )


def _layer_inputs(size: ModelSize, lengths: Lengths, batches: Batches) -> float:
    """Return the values in the inputs of all layers of all updates of a step."""
    if size.dimensions is None:
        return 0.0
    text, vision = size.dimensions.text, size.dimensions.vision
    values = batches.row_tokens * text.layers * text.width
    if vision is not None and size.trains_vision:
        patches = sum(time * rows * columns for prompt in lengths.prompts for time, rows, columns in prompt.grids)
        shown = batches.prompts * batches.epochs * patches / len(lengths.prompts)
        values += shown * vision.layers * vision.width
    return values


def _num_scorings(config: Config, plan: Plan) -> int:
    return needs_old_logprobs(config, plan) + needs_reference(config)


def _driver_bytes(batches: Batches, scorings: int) -> float:
    """Return the bytes of token ids and numbers between the driver and the workers.

    Prompts go out for sampling, prompts and completions for each kind of pass; completions come
    back with a log-probability for each token, scorings with one.
    """
    response = batches.response_tokens
    ids = batches.prompt_tokens + response + batches.observed_tokens
    sampling = batches.sampled_prompts / batches.prompts * (ids + response)
    # The loss also has a mask, an advantage and the log-probabilities of a token.
    update = batches.epochs * (ids + (3 + scorings) * response)
    return _NUMBER_BYTES * (sampling + scorings * (ids + response) + update)
