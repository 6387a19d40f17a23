"""What to change when memory is short, as changes of options, in the order to try them.

One list serves the refusal at the start of a run and `trigon plan`, which compute what each change
saves (memory.py), and the error of a GPU that runs out of memory while a model computes. The order
is the one in docs/distributed.md (Out of memory). What a configuration has already is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from trigon.config.checks import find_contradictions
from trigon.config.names import DeviceType
from trigon.config.options import format_value
from trigon.config.plan import with_critic_as_actor
from trigon.config.schema import Config

Changes = Mapping[str, Any]
"""Options by name, with new values."""

Model = Literal["actor", "critic"]


def find_remedies_in_pass(
    config: Config, *, model: Literal["actor", "critic", "reference"] = "actor"
) -> tuple[str, ...]:
    """Return changes with which the passes of a model need less memory of a GPU, as text."""
    if model == "reference":
        changes: list[list[Changes]] = [
            *_rows(config, "actor", updates=False),
            _lengths(config),
            [{"algorithm.disable_kl": True}],
        ]
    else:
        changes = [*_of_passes(config, model, "cuda"), *_of_workers(config, "cuda")]
    return tuple(format_changes(alternatives[0]) for alternatives in changes)


def list_changes(config: Config, device: DeviceType, tensor_parallel_sizes: Sequence[int]) -> Iterator[list[Changes]]:
    """Yield changes that can save memory, each as its alternatives, the mildest first.

    Some save nothing in a given run.
    tensor_parallel_sizes: numbers of GPUs that can hold one copy of the rollout engine's model.
    """
    rollout = config.worker.rollout
    yield from _of_passes(config, "actor", device)
    yield [{"worker.actor.model.freeze_vision_tower": True}]
    yield from _offloads("actor")
    if config.num_workers > 1:  # it is FSDP that moves the weights
        yield [{"worker.actor.fsdp.enable_cpu_offload": True}]
    if config.has_critic and not config.shares_trunk:
        if not find_contradictions(config):
            yield [{"worker.critic.share_trunk": True}]
        yield from _of_passes(config, "critic", device)
        yield from _offloads("critic")
    yield [{"worker.ref.fsdp.enable_cpu_offload": True}, {"algorithm.disable_kl": True}]
    yield from _of_workers(config, device)
    larger = [each for each in tensor_parallel_sizes if each > rollout.tensor_parallel_size]
    yield [{"worker.rollout.tensor_parallel_size": each} for each in larger if config.num_samplers % each == 0]
    lower = [tenth / 10 for tenth in range(9, 0, -1) if tenth / 10 < rollout.gpu_memory_utilization]
    yield [{"worker.rollout.gpu_memory_utilization": share} for share in lower]


def format_changes(changes: Changes) -> str:
    """Return changes as they are written on a command line."""
    return " ".join(f"{name}={format_value(value)}" for name, value in changes.items())


def _of_passes(config: Config, name: Model, device: DeviceType) -> Iterator[list[Changes]]:
    """Yield changes of a trained model that make its passes, its weights or its states smaller."""
    section, as_actor = f"worker.{name}", config if name == "actor" else with_critic_as_actor(config)
    trained, dtype = as_actor.worker.actor, as_actor.worker.actor.weight_dtype
    yield from _rows(config, name, updates=True)
    checkpointing = {f"{section}.model.enable_gradient_checkpointing": True}
    if not trained.model.enable_gradient_checkpointing:
        yield [checkpointing]
    if as_actor.workers_per_copy < config.num_workers:
        yield [{f"{section}.fsdp.fsdp_size": -1}]
    if not trained.fsdp.enable_full_shard and config.num_workers > 1:
        yield [{f"{section}.fsdp.enable_full_shard": True}]
    if not trained.model.enable_activation_offload and device == "cuda":
        yield [{**checkpointing, f"{section}.model.enable_activation_offload": True}]
    yield _lengths(config)
    bf16 = {f"{section}.fsdp.torch_dtype": "bf16"}
    if config.num_workers == 1 and trained.fsdp.mp_param_dtype == "fp32":  # which is not wider than the weights
        bf16 |= {f"{section}.fsdp.mp_param_dtype": "bf16"}
    if trained.model.lora.rank > 0:
        if dtype == "fp32":
            yield [bf16]
        return
    if dtype == "fp32" or trained.optim.strategy != "adamw_bf16":
        yield [{**bf16, f"{section}.optim.strategy": "adamw_bf16"}]
    # The frozen weights of LoRA have the format of the forward pass by default.
    yield [{f"{section}.model.lora.rank": 64, **({} if trained.fsdp.torch_dtype is None else bf16)}]


def _rows(config: Config, name: Model, *, updates: bool) -> Iterator[list[Changes]]:
    """Yield changes with which rows are shorter, where they are not measured to fit."""
    if config.trainer.tunes_budgets_on("cuda"):
        return
    yield [{"trainer.auto_micro_batch": True}]
    trained = (config if name == "actor" else with_critic_as_actor(config)).worker.actor
    sizes = {"experience": trained.micro_batch_size_per_device_for_experience}
    if updates:
        sizes = {"update": trained.micro_batch_size_per_device_for_update, **sizes}
    shorter = {f"worker.{name}.micro_batch_size_per_device_for_{each}": 1 for each, size in sizes.items() if size > 1}
    if shorter:
        yield [shorter]


def _lengths(config: Config) -> list[Changes]:
    data = config.data
    return [
        {"data.max_response_length": max(1, data.max_response_length // 2)},
        {"data.max_prompt_length": max(1, data.max_prompt_length // 2)},
    ]


def _offloads(name: Model) -> Iterator[list[Changes]]:
    params = {f"worker.{name}.offload.offload_params": True}
    optimizer = {f"worker.{name}.offload.offload_optimizer": True}
    yield [params, optimizer, {**params, **optimizer}]


def _of_workers(config: Config, device: DeviceType) -> Iterator[list[Changes]]:
    """Yield numbers of workers: on one machine they share its host memory, but have GPUs each."""
    gpus, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    if device == "cuda" and 2 * gpus <= 8:
        yield [{"trainer.n_gpus_per_node": gpus * factor} for factor in (2, 4, 8) if gpus * factor <= 8]
    elif device == "cuda" or config.num_workers > 1:
        yield [{"trainer.nnodes": nodes * factor} for factor in (2, 4, 8)]
