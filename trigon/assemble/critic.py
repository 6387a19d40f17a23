"""Loads the critic of a run, in one process or sharded, and makes its engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from trigon.assemble.models import DevicePlacement, choose_kernel, open_trained_policy, place_policy
from trigon.assemble.options import make_value_terms, model_path
from trigon.assemble.remedies import find_remedies_in_pass
from trigon.config.critic import as_critic, with_critic_as_actor
from trigon.config.plan import Plan, has_critic, keeps_weights_on_host, shares_trunk
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ModelError
from trigon.models.dtypes import DTYPES
from trigon.models.features import VisionFeatureCache
from trigon.models.kernels import Kernel
from trigon.models.load import Processors, family_of_folder, load_hf_config, model_folder
from trigon.models.positions import positions_of
from trigon.models.value import ActorCritic, ValueModel
from trigon.training.checkpointing import check_lora_rank, is_head_alone, read_updates
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.local import LocalTrainEngine
from trigon.training.optim import Schedule
from trigon.training.protocol import LoadPixels
from trigon.training.settings import Placement, TrainSettings


def open_critic(
    config: Config,
    processors: Processors,
    plan: Plan,
    place: DevicePlacement,
    trainer: LocalTrainEngine,
    *,
    load_pixels: LoadPixels = list,
) -> LocalCriticEngine | None:
    """Return the critic, off the device if it is offloaded; None for a run without one.

    With a shared trunk it is a head on the policy of the trainer, which the trainer updates too.
    trainer: the train engine of the same process, with which the critic shares image features where
    both have the same vision tower, and do not train it.
    """
    if not has_critic(config):
        return None
    if shares_trunk(config):
        return open_trunk_critic(config, processors, plan, place, trainer, load_pixels=load_pixels)
    changed, critic = with_critic_as_actor(config), config.worker.critic
    require_same_tokens(config, processors)
    compute_dtype = DTYPES[critic.fsdp.mp_param_dtype]
    model = place_policy(
        changed,
        partial(open_value_model, changed, processors, choose_kernel(changed, place.device)),
        place,
        full_shard=critic.fsdp.enable_full_shard,
        param_dtype=compute_dtype,
        reduce_dtype=DTYPES[critic.fsdp.mp_reduce_dtype],
        cpu_offload=keeps_weights_on_host(config, critic.fsdp) and place.device.type != "cpu",
    )
    assert isinstance(model, ValueModel)
    moves = place.device.type != "cpu" and not keeps_weights_on_host(config, critic.fsdp)
    engine = LocalCriticEngine(
        model,
        make_critic_settings(config, plan),
        Placement(
            device=place.device,
            compute_dtype=compute_dtype if place.is_alone else None,
            offload_params=critic.offload.offload_params and moves,
            offload_optimizer=critic.offload.offload_optimizer and moves,
            process_group=place.process_group,
            model="critic",
            remedies=find_remedies_in_pass(config, model="critic"),
        ),
        positions=positions_of(processors.family, processors.hf_config),
        features=shared_features(config, changed, model, trainer),
        load_pixels=load_pixels,
        before_use=trainer.offload_weights,
    )
    engine.offload()
    return engine


def open_trunk_critic(
    config: Config,
    processors: Processors,
    plan: Plan,
    place: DevicePlacement,
    trainer: LocalTrainEngine,
    *,
    load_pixels: LoadPixels,
) -> LocalTrunkCritic:
    """Return the critic that is a head on the trunk of the train engine's policy."""
    policy = trainer.policy
    assert isinstance(policy, ActorCritic), "open_trainer adds the head"
    compute_dtype = DTYPES[config.worker.actor.fsdp.mp_param_dtype]
    return LocalTrunkCritic(
        policy,
        make_critic_settings(config, plan),
        Placement(
            device=place.device,
            compute_dtype=compute_dtype if place.is_alone else None,
            process_group=place.process_group,
            model="critic",
            remedies=find_remedies_in_pass(config),
        ),
        trainer=trainer,
        positions=positions_of(processors.family, processors.hf_config),
        load_pixels=load_pixels,
    )


def make_critic_settings(config: Config, plan: Plan) -> TrainSettings:
    """Return the loss, the optimizer and the budgets of the critic."""
    critic = config.worker.critic
    return TrainSettings(
        terms=make_value_terms(config),
        strategy=critic.optim.strategy,
        schedule=Schedule(
            peak=critic.optim.lr,
            shape=critic.optim.lr_scheduler_type,
            warmup_updates=plan.critic.warmup_updates,
            total_updates=plan.critic.total_updates,
            min_ratio=critic.optim.min_lr_ratio or 0.0,
        ),
        betas=critic.optim.betas,
        weight_decay=critic.optim.weight_decay,
        max_grad_norm=critic.max_grad_norm,
        update_max_tokens=plan.critic.tokens_per_update_pass,
        score_max_tokens=plan.critic.tokens_per_experience_pass,
    )


def open_value_model(
    config: Config, processors: Processors, kernel: Kernel, device: torch.device, *, as_stored: bool = False
) -> ValueModel:
    """Load a value model as open_trained_policy loads a policy. config: of with_critic_as_actor.

    Raises: ModelError.
    """
    try:
        model = open_trained_policy(config, processors, kernel, device, as_stored=as_stored, model_class=ValueModel)
    except ModelError as error:
        raise ModelError(f"The critic: {as_critic(str(error))}") from error
    assert isinstance(model, ValueModel)
    model.train_head()
    return model


def check_trained_critic(config: Config, folder: Path) -> None:
    """Raise CheckpointError if the run cannot go on with a critic. folder: of a checkpoint's."""
    critic = config.worker.critic
    shares = shares_trunk(config)
    if shares != is_head_alone(folder):
        saved = "a head on the policy's trunk" if not shares else "a model of its own"
        raise CheckpointError(
            f"{folder} holds a critic that is {saved}, and worker.critic.share_trunk is {str(shares).lower()}; set it "
            f"to {str(not shares).lower()}, or start a new run with another trainer.experiment_name"
        )
    rank = 0 if shares else critic.model.lora.rank
    try:
        read_updates(folder, has_adapters=rank > 0, strategy=critic.optim.strategy)
        if rank > 0:
            check_lora_rank(folder, rank)
    except CheckpointError as error:
        raise CheckpointError(as_critic(str(error))) from error


def require_same_tokens(config: Config, processors: Processors) -> None:
    """Raise ModelError unless the critic's model takes the tokens and pixels of the policy's."""
    path = config.worker.critic.model.model_path
    if path is None:
        return
    folder = model_folder(path)
    family = family_of_folder(folder)
    own = load_hf_config(folder, trust_remote_code=config.worker.critic.model.trust_remote_code)
    given = processors.hf_config

    def what_is_read(hf_config: Any) -> dict[str, object]:
        described: dict[str, object] = {"tokens in the vocabulary": hf_config.get_text_config().vocab_size}
        if family.has_vision:
            described["placeholder tokens"] = family.media_token_ids(hf_config)
            described["values of a patch"] = family.values_per_patch(hf_config)
            described["patches merged into a token"] = family.spatial_merge(hf_config)
        return described

    differences = (
        [f"it is a {family.model_type} model, and the policy a {processors.family.model_type} model"]
        if family.model_type != processors.family.model_type
        else [
            f"its {name} are {value}, and the policy's {what_is_read(given)[name]}"
            for name, value in what_is_read(own).items()
            if value != what_is_read(given)[name]
        ]
    )
    if differences:
        raise ModelError(
            f"worker.critic.model.model_path={path} cannot read what the policy reads: {'; '.join(differences)}. Set "
            f"it to a model of the same family, or leave it out to start from {model_path(config)}."
        )


def shared_features(
    config: Config, changed: Config, model: ValueModel, trainer: LocalTrainEngine
) -> VisionFeatureCache | None:
    """Return the policy's cache of image features if the critic's tower computes the same ones."""
    own, critic = config.worker.actor, changed.worker.actor
    same = (
        own.model.model_path == critic.model.model_path
        and own.model.override_config == critic.model.override_config
        and own.fsdp.torch_dtype == critic.fsdp.torch_dtype
        and own.fsdp.mp_param_dtype == critic.fsdp.mp_param_dtype
        and own.model.lora.rank == critic.model.lora.rank  # on which the dtype of the weights depends
    )
    return trainer.features if same and model.has_frozen_vision else None
