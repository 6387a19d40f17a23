"""What to change when a GPU runs out of memory while a model computes, in the order to try it.

The order is that of docs/multi-node.md (Out of memory). What the configuration has already is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator

from trigon.config.critic import as_critic, with_critic_as_actor
from trigon.config.defaults import resolve_auto_micro_batch, resolve_weight_dtype
from trigon.config.plan import num_workers, workers_per_copy
from trigon.config.schema import Config


def find_remedies_of_policy(config: Config) -> tuple[str, ...]:
    """Return changes with which the policy's passes and updates need less memory of a GPU."""
    return tuple(_remedies(config))


def find_remedies_of_critic(config: Config) -> tuple[str, ...]:
    """Return changes with which the critic's passes and updates need less memory of a GPU."""
    return tuple(as_critic(text) for text in _remedies(with_critic_as_actor(config)))


def find_remedies_of_reference(config: Config) -> tuple[str, ...]:
    """Return changes with which the reference's passes need less memory of a GPU."""
    return (*_rows(config, updates=False), *_lengths(config), "algorithm.disable_kl=true: there is no reference then")


def _remedies(config: Config) -> Iterator[str]:
    actor = config.worker.actor
    yield from _rows(config, updates=True)
    if not actor.model.enable_gradient_checkpointing:
        yield "worker.actor.model.enable_gradient_checkpointing=true"
    if workers_per_copy(config) < num_workers(config):
        yield "worker.actor.fsdp.fsdp_size=-1: one copy of the model over all workers"
    if not actor.fsdp.enable_full_shard and num_workers(config) > 1:
        yield "worker.actor.fsdp.enable_full_shard=true"
    if not actor.model.enable_activation_offload:
        yield (
            "worker.actor.model.enable_gradient_checkpointing=true worker.actor.model.enable_activation_offload=true: "
            "the inputs of the layers wait in host memory"
        )
    yield from _lengths(config)
    if actor.model.lora.rank == 0:
        if resolve_weight_dtype(config) == "fp32":
            yield (
                "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16: 12 bytes a weight "
                "instead of 16"
            )
        yield "worker.actor.model.lora.rank=64: only adapters are trained"
    yield "more workers (trainer.n_gpus_per_node, trainer.nnodes): each holds a smaller part"


def _rows(config: Config, *, updates: bool) -> Iterator[str]:
    if resolve_auto_micro_batch(config, "cuda"):
        return
    yield "trainer.auto_micro_batch=true: the largest rows that fit are measured"
    actor = config.worker.actor
    sizes = [("experience", actor.micro_batch_size_per_device_for_experience)]
    if updates:
        sizes.insert(0, ("update", actor.micro_batch_size_per_device_for_update))
    names = [f"worker.actor.micro_batch_size_per_device_for_{name}=1" for name, size in sizes if size > 1]
    if names:
        yield " ".join(names)


def _lengths(config: Config) -> Iterator[str]:
    data = config.data
    yield (
        f"a lower data.max_response_length (now {data.max_response_length:,}), data.max_prompt_length "
        f"({data.max_prompt_length:,}) or data.max_pixels"
    )
