"""Loads the critic of a run, in one process or sharded, and makes its engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from trigon.assemble.models import DevicePlacement, choose_kernel, open_trained_policy, place_trained, placement_of
from trigon.assemble.remedies import find_remedies_in_pass
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ModelError
from trigon.models.features import VisionFeatureCache
from trigon.models.kernels import Kernel
from trigon.models.load import Processors, family_of_folder, load_hf_config, model_folder
from trigon.models.positions import positions_of
from trigon.models.value import ActorCritic, ValueModel
from trigon.training.checkpointing import check_lora_rank, is_head_alone, read_updates
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.local import LocalTrainEngine
from trigon.training.protocol import LoadPixels


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
    if not config.has_critic:
        return None
    critic, positions = config.critic, positions_of(processors.family, processors.hf_config)
    if config.shares_trunk:
        policy = trainer.policy
        assert isinstance(policy, ActorCritic), "open_trainer adds the head"
        remedies = find_remedies_in_pass(config)
        placement = placement_of(config, critic, place, model="critic", remedies=remedies)
        return LocalTrunkCritic(
            policy, config, plan.critic, placement, trainer=trainer, positions=positions, load_pixels=load_pixels
        )
    require_same_tokens(config, processors)
    kernel = choose_kernel(config, place.device, critic, processors=processors)
    make = partial(open_value_model, config, processors, kernel)
    model = place_trained(config, critic, make, place)
    assert isinstance(model, ValueModel)
    engine = LocalCriticEngine(
        model,
        config,
        plan.critic,
        placement_of(config, critic, place, model="critic", remedies=find_remedies_in_pass(config, model="critic")),
        positions=positions,
        features=shared_features(config, model, trainer),
        load_pixels=load_pixels,
        before_use=trainer.offload_weights,
    )
    engine.offload()
    return engine


def open_value_model(
    config: Config, processors: Processors, kernel: Kernel, device: torch.device, *, as_stored: bool = False
) -> ValueModel:
    """Load the critic as open_trained_policy loads a policy.

    Raises: ModelError.
    """
    try:
        model = open_trained_policy(
            config, config.critic, processors, kernel, device, as_stored=as_stored, model_class=ValueModel
        )
    except ModelError as error:
        raise ModelError(f"The critic (worker.critic.model): {error}") from error
    assert isinstance(model, ValueModel)
    model.train_head()
    return model


def check_trained_critic(config: Config, folder: Path) -> None:
    """Raise CheckpointError if the run cannot continue with the critic that a folder holds."""
    critic = config.worker.critic
    if config.shares_trunk != is_head_alone(folder):
        saved, other = "a head on the policy's trunk", "true"
        if config.shares_trunk:
            saved, other = "a model of its own", "false"
        raise CheckpointError(
            f"{folder} holds a critic that is {saved}, and worker.critic.share_trunk is "
            f"{str(config.shares_trunk).lower()}; set it to {other}, or start a new run with another "
            "trainer.experiment_name"
        )
    rank = 0 if config.shares_trunk else critic.model.lora.rank
    read_updates(folder, has_adapters=rank > 0, strategy=critic.optim.strategy, section="worker.critic")
    if rank > 0:
        check_lora_rank(folder, rank, section="worker.critic")


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
            f"it to a model of the same family, or leave it out to start from "
            f"{config.worker.actor.model.model_path}."
        )


def shared_features(config: Config, model: ValueModel, trainer: LocalTrainEngine) -> VisionFeatureCache | None:
    """Return the policy's cache of image features if the critic's tower computes the same ones."""
    own, critic = config.worker.actor, config.critic
    same = (
        own.model.model_path == critic.model.model_path
        and own.model.override_config == critic.model.override_config
        and own.fsdp.torch_dtype == critic.fsdp.torch_dtype
        and own.fsdp.mp_param_dtype == critic.fsdp.mp_param_dtype
        and own.model.lora.rank == critic.model.lora.rank  # on which the dtype of the weights depends
    )
    return trainer.features if same and model.has_frozen_vision else None
