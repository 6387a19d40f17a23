"""Loads policy, reference and critic, in one process or sharded, and makes their engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trigon.assemble.remedies import find_remedies_in_pass
from trigon.config.names import DeviceType
from trigon.config.plan import Plan
from trigon.config.schema import Config, TrainedConfig
from trigon.data.media_processing import MediaProcessor
from trigon.errors import CheckpointError, ConfigError, ModelError
from trigon.models.dtypes import DTYPES
from trigon.models.families import family_of
from trigon.models.features import VisionFeatureCache
from trigon.models.fused import require_liger
from trigon.models.kernels import Kernel, resolve_kernel
from trigon.models.load import Processors, family_of_folder, load_hf_config, load_model, model_folder
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.models.sequence_parallel import RowRanks, require_divisible_heads
from trigon.models.sizes import require_tensor_parallel
from trigon.models.value import ActorCritic, ValueModel
from trigon.models.weight_files import stored_dtype
from trigon.rollout.vllm.arguments import require_implementation
from trigon.training.checkpointing import is_head_alone, read_updates
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.device_memory import Placement
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import ProcessGroup, Sharding
from trigon.training.protocol import LoadPixels, LogprobEngine
from trigon.training.scorer import LocalScorer

if TYPE_CHECKING:
    from trigon.training.fsdp import MakePolicy


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The device of a process, and the process group of which it is a rank.

    row_ranks: the ranks with which it computes rows together; None: none.
    """

    device: torch.device
    process_group: ProcessGroup
    row_ranks: RowRanks | None = None

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only rank."""
        return self.process_group.size == 1

    @property
    def device_type(self) -> DeviceType:
        """The kind of the device, on which some defaults depend."""
        return device_type(self.device)


def choose_device(config: Config) -> torch.device:
    """Return the device to train on, and make its kernels deterministic as set_determinism does.

    Raises: ConfigError if trainer.device is cuda and torch finds no GPU.
    """
    device = torch.device(choose_device_type(config, has_gpu=torch.cuda.is_available()))
    set_determinism(device)
    return device


def choose_device_type(config: Config, *, has_gpu: bool) -> DeviceType:
    """Return the kind of the device to train on.

    has_gpu: torch finds a GPU. Raises: ConfigError if trainer.device is cuda and there is none.
    """
    requested = config.trainer.device
    if requested == "cuda" and not has_gpu:
        raise ConfigError(
            "trainer.device is cuda, but torch finds no GPU; set trainer.device=cpu, or install CUDA torch"
        )
    if requested == "auto":
        return "cuda" if has_gpu else "cpu"
    return requested


def device_type(device: torch.device) -> DeviceType:
    """Return the kind of a device, on which some defaults depend."""
    return "cuda" if device.type == "cuda" else "cpu"


def set_determinism(device: torch.device) -> None:
    """Make kernels on the CPU deterministic: the same seed gives the same numbers."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # No code here reads uninitialized memory, and filling it costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_kernel(
    config: Config, device: torch.device, model: TrainedConfig | None = None, *, processors: Processors | None = None
) -> Kernel:
    """Return the attention kernel of a model of the run on this device.

    model: None for the policy. processors: the model's processors; None where they are not
    loaded yet.

    Raises: ModelError if it, or liger-kernel where configured, cannot run there.
    """
    actor = config.worker.actor
    if actor.model.use_liger_kernel:
        require_liger(device)
    dtype = DTYPES[(model or actor).fsdp.mp_param_dtype]
    needs_mask = processors is not None and processors.family.image_layers_of(processors.hf_config) != "none"
    return resolve_kernel(actor.model.attention_kernel, device=device, dtype=dtype, needs_mask=needs_mask)


def check_sequence_parallel(config: Config, hf_config: Any) -> None:
    """Raise ConfigError if the workers of a row cannot divide the attention of this model."""
    size = config.worker.actor.ulysses_sequence_parallel_size
    if size > 1:
        require_divisible_heads(
            hf_config.get_text_config(), size, model_type=hf_config.model_type, num_workers=config.num_workers
        )


def check_policy(config: Config, hf_config: Any) -> None:
    """Raise ConfigError for an option that does not fit the policy.

    If vLLM is to sample and does not implement it; if it cannot be divided over workers that learn,
    or that sample; and for an option of MoE models if it is none.
    """
    if config.worker.rollout.name == "vllm":
        require_implementation(family_of(hf_config))
    check_sequence_parallel(config, hf_config)
    actor = config.worker.actor
    values = (
        ("router_aux_loss_coef", actor.router_aux_loss_coef, 0.0),
        ("router_replay", actor.router_replay, "disabled"),
    )
    for name, value, off in values:
        if value != off and family_of(hf_config).experts == "none":
            raise ConfigError(
                f"worker.actor.{name} is {value}, but a {hf_config.model_type} model has no experts; set it to {off}, "
                "or use an MoE model"
            )
    size = config.worker.rollout.tensor_parallel_size
    if size > 1:
        require_tensor_parallel(hf_config, size, num_workers=config.num_samplers)


def open_models(
    config: Config, processors: Processors, plan: Plan, place: DevicePlacement, images: MediaProcessor | None = None
) -> tuple[LocalTrainEngine, LogprobEngine | None, LocalCriticEngine | None]:
    """Return the train engine, the reference if the loop needs its log-probs, and the critic.

    images: processes the media of groups that are encoded files; None: there are none.
    With LoRA the reference is the policy without its adapters. For an exact KL over the whole
    vocabulary the train engine holds the reference itself, and the second value is None.
    """
    has_lora = config.worker.actor.model.lora.rank > 0
    load_pixels = list if images is None else images.process_groups
    scorer = None
    if config.needs_reference and not has_lora:
        scorer = open_reference(config, processors, plan, place, load_pixels=load_pixels)
    trainer = open_trainer(config, processors, plan, place, scorer, load_pixels=load_pixels)
    reference: LogprobEngine | None = None
    if config.needs_reference and not config.has_full_kl:
        reference = trainer.reference_without_adapters() if has_lora else scorer
    return trainer, reference, open_critic(config, processors, plan, place, trainer, load_pixels=load_pixels)


def open_trainer(
    config: Config,
    processors: Processors,
    plan: Plan,
    place: DevicePlacement,
    reference: LocalScorer | None,
    *,
    load_pixels: LoadPixels,
) -> LocalTrainEngine:
    """Load the policy, sharded if there are several ranks, and make its optimizer.

    With a shared trunk it has a value head, which open_critic makes an optimizer for.
    reference: the train engine uses it only for an exact KL over the whole vocabulary.
    """
    actor = config.worker.actor
    policy = place_trained(
        config,
        actor,
        partial(
            open_trained_policy,
            config,
            actor,
            processors,
            choose_kernel(config, place.device, processors=processors),
            model_class=ActorCritic if config.shares_trunk else Policy,
        ),
        place,
    )
    if actor.replays_routing:
        policy.replay_routing()
    return LocalTrainEngine(
        policy,
        config,
        plan,
        placement_of(config, actor, place, model="policy", remedies=find_remedies_in_pass(config)),
        reference=reference if config.has_full_kl else None,
        features=feature_memory(config, shared=reference is not None) if policy.has_frozen_vision else None,
        load_pixels=load_pixels,
    )


def placement_of(
    config: Config, section: TrainedConfig, place: DevicePlacement, *, model: str, remedies: tuple[str, ...]
) -> Placement:
    """Return where a trained model and its optimizer states are. model, remedies: see Placement."""
    # With FSDP's CPU offload, weights and states are in host memory already.
    moves = place.device.type != "cpu" and not config.is_on_host(section.fsdp)
    return Placement(
        device=place.device,
        compute_dtype=DTYPES[section.fsdp.mp_param_dtype] if place.is_alone else None,
        offload_params=section.offload.offload_params and moves,
        offload_optimizer=section.offload.offload_optimizer and moves and not config.trainer.val_only,
        process_group=place.process_group,
        model=model,
        remedies=remedies,
    )


def open_reference(
    config: Config, processors: Processors, plan: Plan, place: DevicePlacement, *, load_pixels: LoadPixels
) -> LocalScorer:
    """Load the reference policy."""
    ref, actor = config.worker.ref, config.worker.actor
    dtype = DTYPES[ref.dtype]
    offload = (ref.fsdp.enable_cpu_offload or ref.offload.offload_params) and place.device.type != "cpu"
    kernel = choose_kernel(config, place.device, processors=processors)
    policy = place_policy(
        partial(open_policy, config, actor, processors, kernel, dtype),
        place,
        Sharding(
            full_shard=ref.fsdp.enable_full_shard,
            ranks_per_copy=config.workers_per_copy,
            param_dtype=dtype,
            reduce_dtype=dtype,
            cpu_offload=offload,
        ),
    )
    return LocalScorer(
        policy,
        Placement(
            device=place.device,
            compute_dtype=dtype if place.is_alone else None,
            offload_params=offload and place.is_alone,
            process_group=place.process_group,
            model="reference",
            remedies=find_remedies_in_pass(config, model="reference"),
        ),
        max_tokens=plan.tokens_per_experience_pass,
        # As the policy computes features, so that equal weights give equal bits.
        features=(
            feature_memory(config, shared=True)
            if actor.model.freeze_vision_tower and processors.family.has_vision
            else None
        ),
        load_pixels=load_pixels,
    )


def open_trained_policy(
    config: Config,
    section: TrainedConfig,
    processors: Processors,
    kernel: Kernel,
    device: torch.device,
    *,
    as_stored: bool = False,
    model_class: type[Policy] = Policy,
) -> Policy:
    """Load a model with frozen parts, LoRA and gradient checkpointing as its section has them.

    as_stored, model_class: see open_policy.
    """
    dtype, model = DTYPES[section.weight_dtype], section.model
    policy = open_policy(
        config, section, processors, kernel, dtype, device, as_stored=as_stored, model_class=model_class
    )
    if model.freeze_vision_tower:
        policy.freeze_vision_tower()
    if model.lora.rank > 0:
        add_lora(policy.model, model.lora, seed=config.worker.rollout.seed)
    if model.enable_gradient_checkpointing:
        policy.enable_gradient_checkpointing(offload=model.enable_activation_offload)
    return policy


def open_policy(
    config: Config,
    section: TrainedConfig,
    processors: Processors,
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_stored: bool = False,
    model_class: type[Policy] = Policy,
) -> Policy:
    """Load the model of a section as a policy. On device "meta" no weights are loaded.

    as_stored: load it in the dtype of its files instead of dtype, if that is narrower. On the CPU
        the weights are then mapped from the files, and take no memory of their own.
    model_class: another one replaces the head, or adds one.
    """
    model, kernels = section.model, config.worker.actor.model
    assert model.model_path is not None, "checks.py refuses a configuration without a model"
    if as_stored:
        stored = stored_dtype(model_folder(model.model_path))
        dtype = stored if stored is not None and stored.itemsize < dtype.itemsize else dtype
    policy = model_class(
        load_model(
            model.model_path,
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
    if kernels.use_liger_kernel:
        policy.use_liger_kernel()
    if kernels.compile_layers:
        policy.compile_layers()
    return policy


def place_trained(config: Config, section: TrainedConfig, make_policy: MakePolicy, place: DevicePlacement) -> Policy:
    """Return make_policy's model, sharded as its section has it if there are several ranks."""
    return place_policy(
        make_policy,
        place,
        Sharding(
            full_shard=section.fsdp.enable_full_shard,
            ranks_per_copy=config.workers_per_copy_of(section),
            param_dtype=DTYPES[section.fsdp.mp_param_dtype],
            reduce_dtype=DTYPES[section.fsdp.mp_reduce_dtype],
            cpu_offload=config.is_on_host(section.fsdp) and place.device.type != "cpu",
        ),
    )


def place_policy(make_policy: MakePolicy, place: DevicePlacement, sharding: Sharding) -> Policy:
    """Return make_policy's policy, sharded over the ranks if there are several."""
    if place.is_alone:
        return make_policy(torch.device("cpu") if sharding.cpu_offload else place.device)
    from trigon.training.fsdp import open_sharded

    policy = open_sharded(make_policy, place.process_group, sharding, place.device)
    if place.row_ranks is not None:
        policy.use_row_ranks(place.row_ranks)
    return policy


def feature_memory(config: Config, *, shared: bool) -> VisionFeatureCache:
    """Return the cache of a frozen vision tower's features.

    shared: policy and reference have a cache each, of half the size.
    """
    max_bytes = int(config.worker.actor.model.vision_cache_gb * 2**30)
    return VisionFeatureCache(max_bytes // 2 if shared else max_bytes)


# -- the critic ------------------------------------------------------------------------------------


def open_critic(
    config: Config,
    processors: Processors,
    plan: Plan,
    place: DevicePlacement,
    trainer: LocalTrainEngine,
    *,
    load_pixels: LoadPixels,
) -> LocalCriticEngine | None:
    """Return the critic, off the device if it is offloaded; None for a run without one.

    With a shared trunk it is a head on the policy of the trainer, which the trainer updates too.
    trainer: the train engine of the same process, with which the critic shares image features where
    both have the same vision tower, and do not train it.
    """
    if not config.has_critic:
        return None
    critic = config.critic
    if config.shares_trunk:
        policy = trainer.policy
        assert isinstance(policy, ActorCritic), "open_trainer adds the head"
        remedies = find_remedies_in_pass(config)
        placement = placement_of(config, critic, place, model="critic", remedies=remedies)
        return LocalTrunkCritic(policy, config, plan.critic, placement, trainer=trainer, load_pixels=load_pixels)
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
    read_updates(folder, lora_rank=rank, strategy=critic.optim.strategy, section="worker.critic")


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
