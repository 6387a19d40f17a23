"""Loads the policy and the reference, in this process or sharded over ranks, and makes their engines."""

from __future__ import annotations
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, assert_never
import torch
from trigon.checkpoint.store import CheckpointStore, Finish
from trigon.config.plan import Plan, context_length, workers_per_copy
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.features import VisionFeatureCache
from trigon.models.fused import require_liger
from trigon.models.kernels import Kernel, resolve_kernel
from trigon.models.load import Processors, copy_side_files, load_model, model_folder
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.report.reporter import Reporter
from trigon.rollout.protocol import RolloutEngine
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.local import LocalScorer, LocalTrainEngine, Sizes
from trigon.training.memory import memory_of
from trigon.training.optim import Schedule
from trigon.training.parallel import ProcessGroup, SingleProcess
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.training.trace import FOLDER, LocalTracer, Tracer
from trigon.build.options import DTYPES, kl_is_full, lora_settings, loss_terms, model_path, needs_reference, run_folder


def choose_device(config: Config) -> torch.device:
    """Return the device to train on. On the CPU, kernels are made deterministic: same seed, same numbers."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cuda, but torch sees no GPU here; set trainer.device=cpu, or install CUDA torch"
        )
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    set_determinism(device)
    return device


def set_determinism(device: torch.device) -> None:
    """Make kernels deterministic on the CPU: same seed, same numbers."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before writing it, and filling it costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines are opened: on a device, alone or as one of several ranks."""

    device: torch.device
    process_group: ProcessGroup

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.process_group.size == 1


def choose_kernel(config: Config, device: torch.device) -> Kernel:
    """Return by which kernel the run's models attend on this device.

    Raises: ModelError if it cannot run there, or liger-kernel is wanted and cannot; ConfigError if that is to be
    compiled besides.
    """
    actor = config.worker.actor
    if actor.model.use_liger_kernel:
        if actor.model.compile_layers:
            raise ConfigError(
                "worker.actor.model.use_liger_kernel and compile_layers change the same norms and MLPs; set one of them"
            )
        require_liger(device)
    return resolve_kernel(actor.model.attention_kernel, device=device, dtype=DTYPES[actor.fsdp.mp_param_dtype])


def open_policy(
    config: Config, processors: Processors, kernel: Kernel, dtype: torch.dtype, device: torch.device | str
) -> Policy:
    """Load the model's weights, or on "meta" none, and make them a policy."""
    model = config.worker.actor.model
    policy = Policy(
        load_model(
            model_path(config),
            dtype=dtype,
            device=device,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            attention_kernel=kernel,
        ),
        processors.family,
        temperature=config.worker.rollout.temperature,
        banned_token_ids=processors.banned_token_ids,
    )
    if model.use_liger_kernel:
        policy.use_liger_kernel()
    if model.compile_layers:
        policy.compile_layers()
    return policy


def open_trained_policy(config: Config, processors: Processors, kernel: Kernel, device: torch.device | str) -> Policy:
    """Load the policy as it is to be trained: what is frozen, what is adapted, what is computed again."""
    actor = config.worker.actor
    policy = open_policy(config, processors, kernel, DTYPES[actor.fsdp.torch_dtype or "fp32"], device)
    if actor.model.freeze_vision_tower:
        policy.freeze_vision_tower()
    if actor.model.lora.rank > 0:
        add_lora(policy.model, lora_settings(config), seed=config.worker.rollout.seed)
    if actor.model.enable_gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy


def open_placed(
    config: Config,
    make_policy: Callable[[torch.device], Policy],
    place: Place,
    *,
    full_shard: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> Policy:
    """Return a policy where it belongs: whole where there is one rank, with cpu_offload on the CPU; else sharded."""
    if place.is_alone:
        return make_policy(torch.device("cpu") if cpu_offload else place.device)
    from trigon.training.fsdp import Sharding, open_sharded

    sharding = Sharding(
        full_shard=full_shard,
        ranks_per_copy=workers_per_copy(config),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
    )
    return open_sharded(make_policy, place.process_group, sharding, place.device)


def open_models(
    config: Config, processors: Processors, plan: Plan, place: Place
) -> tuple[LocalTrainEngine, LogprobEngine | None]:
    """Return the policy's engine, and the reference's where the loop asks for its log-probabilities.

    With LoRA the reference is the policy without its adapters. Where whole distributions are compared, the policy's
    engine does so by itself, and the loop never sees the reference.
    """
    adapted = config.worker.actor.model.lora.rank > 0
    scorer = open_reference(config, processors, plan, place) if needs_reference(config) and not adapted else None
    trainer = open_trainer(config, processors, plan, place, scorer)
    if not needs_reference(config) or kl_is_full(config):
        return trainer, None
    return trainer, trainer.reference_without_adapters() if adapted else scorer


def open_trainer(
    config: Config, processors: Processors, plan: Plan, place: Place, reference: LocalScorer | None
) -> LocalTrainEngine:
    """Load the policy, sharded where there are several ranks, and make its optimizer."""
    actor = config.worker.actor
    compute_dtype = DTYPES[actor.fsdp.mp_param_dtype]
    policy = open_placed(
        config,
        partial(open_trained_policy, config, processors, choose_kernel(config, place.device)),
        place,
        full_shard=actor.fsdp.enable_full_shard,
        param_dtype=compute_dtype,
        reduce_dtype=DTYPES[actor.fsdp.mp_reduce_dtype],
        cpu_offload=actor.fsdp.enable_cpu_offload and place.device.type != "cpu",
    )
    # What is offloaded always need not be moved.
    moves = place.device.type != "cpu" and not actor.fsdp.enable_cpu_offload
    return LocalTrainEngine(
        policy,
        terms=loss_terms(config),
        strategy=actor.optim.strategy,
        schedule=Schedule(
            peak=actor.optim.lr,
            shape=actor.optim.lr_scheduler_type,
            warmup_updates=plan.warmup_updates,
            total_updates=plan.total_updates,
            min_ratio=actor.optim.min_lr_ratio or 0.0,
        ),
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        positions=positions_of(processors.family, processors.hf_config),
        update_max_tokens=plan.tokens_per_update_pass,
        score_max_tokens=plan.tokens_per_experience_pass,
        device=place.device,
        compute_dtype=compute_dtype if place.is_alone else None,
        offload_params=actor.offload.offload_params and moves,
        offload_optimizer=actor.offload.offload_optimizer and moves,
        process_group=place.process_group,
        reference=reference if kl_is_full(config) else None,
        features=feature_memory(config, shared=reference is not None) if policy.has_frozen_vision else None,
    )


def feature_memory(config: Config, *, shared: bool) -> VisionFeatureCache:
    """Return what remembers a frozen vision tower's features. shared: by policy and reference, who have one each."""
    max_bytes = int(config.worker.actor.model.vision_cache_gb * 2**30)
    return VisionFeatureCache(max_bytes // 2 if shared else max_bytes)


def open_reference(config: Config, processors: Processors, plan: Plan, place: Place) -> LocalScorer:
    """Load the reference policy."""
    ref = config.worker.ref
    dtype = DTYPES[ref.fsdp.torch_dtype or "bf16"]
    offload = (ref.fsdp.enable_cpu_offload or ref.offload.offload_params) and place.device.type != "cpu"
    policy = open_placed(
        config,
        partial(open_policy, config, processors, choose_kernel(config, place.device), dtype),
        place,
        full_shard=ref.fsdp.enable_full_shard,
        param_dtype=dtype,
        reduce_dtype=dtype,
        cpu_offload=offload,
    )
    return LocalScorer(
        policy,
        positions=positions_of(processors.family, processors.hf_config),
        max_tokens=plan.tokens_per_experience_pass,
        device=place.device,
        compute_dtype=dtype if place.is_alone else None,
        offload_params=offload and place.is_alone,
        process_group=place.process_group,
        # As the policy sees images, so that the two agree bit for bit where their weights do.
        features=(
            feature_memory(config, shared=True)
            if config.worker.actor.model.freeze_vision_tower and processors.family.has_vision
            else None
        ),
    )
