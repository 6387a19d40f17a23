"""What to change when a GPU runs out of memory while a model computes, in the order to try it.

The order is as in docs/multi-node.md (Out of memory). What the configuration has already is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator

from trigon.config.schema import Config, TrainedConfig


def find_remedies_of_policy(config: Config) -> tuple[str, ...]:
    """Return changes with which the policy's passes and updates need less memory of a GPU."""
    return tuple(_remedies(config, config.worker.actor, "worker.actor"))


def find_remedies_of_critic(config: Config) -> tuple[str, ...]:
    """Return changes with which the critic's passes and updates need less memory of a GPU."""
    return tuple(_remedies(config, config.critic, "worker.critic"))


def find_remedies_of_reference(config: Config) -> tuple[str, ...]:
    """Return changes with which the reference's passes need less memory of a GPU."""
    rows = _rows(config, config.worker.actor, "worker.actor", updates=False)
    return (*rows, *_lengths(config), "algorithm.disable_kl=true: there is no reference then")


def _remedies(config: Config, section: TrainedConfig, name: str) -> Iterator[str]:
    """Yield the changes for a model. name: of its section."""
    yield from _rows(config, section, name, updates=True)
    if not section.model.enable_gradient_checkpointing:
        yield f"{name}.model.enable_gradient_checkpointing=true"
    if config.workers_per_copy_of(section) < config.num_workers:
        yield f"{name}.fsdp.fsdp_size=-1: one copy of the model over all workers"
    if not section.fsdp.enable_full_shard and config.num_workers > 1:
        yield f"{name}.fsdp.enable_full_shard=true"
    if not section.model.enable_activation_offload:
        yield (
            f"{name}.model.enable_gradient_checkpointing=true {name}.model.enable_activation_offload=true: the inputs "
            "of the layers wait in host memory"
        )
    yield from _lengths(config)
    if section.model.lora.rank == 0:
        if section.weight_dtype == "fp32":
            yield f"{name}.fsdp.torch_dtype=bf16 {name}.optim.strategy=adamw_bf16: 12 bytes a weight instead of 16"
        yield f"{name}.model.lora.rank=64: only adapters are trained"
    yield "more workers (trainer.n_gpus_per_node, trainer.nnodes): each holds a smaller part"


def _rows(config: Config, section: TrainedConfig, name: str, *, updates: bool) -> Iterator[str]:
    if config.trainer.tunes_budgets_on("cuda"):
        return
    yield "trainer.auto_micro_batch=true: the largest rows that fit are measured"
    sizes = [("experience", section.micro_batch_size_per_device_for_experience)]
    if updates:
        sizes.insert(0, ("update", section.micro_batch_size_per_device_for_update))
    names = [f"{name}.micro_batch_size_per_device_for_{kind}=1" for kind, size in sizes if size > 1]
    if names:
        yield " ".join(names)


def _lengths(config: Config) -> Iterator[str]:
    data = config.data
    yield (
        f"a lower data.max_response_length (now {data.max_response_length:,}), data.max_prompt_length "
        f"({data.max_prompt_length:,}) or data.max_pixels"
    )
