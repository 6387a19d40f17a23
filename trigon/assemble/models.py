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
from trigon.models.fused import compile_layers, require_liger, use_liger
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
    config: Config, device: torch.device, section: TrainedConfig | None = None, *, processors: Processors | None = None
) -> Kernel:
    """Return the attention kernel of a model of the run on this device.

    section: its section; None: the policy's. processors: the model's processors; None where they
    are not loaded yet.

    Raises: ModelError if it, or liger-kernel where configured, cannot run there.
    """
    actor = config.worker.actor
    if actor.model.use_liger_kernel:
        require_liger(device)
    dtype = DTYPES[(section or actor).fsdp.mp_param_dtype]
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
    models = _Models(config, processors, plan, place, list if images is None else images.process_groups)
    has_lora = config.worker.actor.model.lora.rank > 0
    scorer = models.reference() if config.needs_reference and not has_lora else None
    trainer = models.trainer(scorer)
    reference: LogprobEngine | None = None
    if config.needs_reference and not config.has_full_kl:
        reference = trainer.reference_without_adapters() if has_lora else scorer
    return trainer, reference, models.critic(trainer) if config.has_critic else None


class _Models:
    """Loads the models of a run on this rank, sharded over the ranks, and makes their engines."""

    def __init__(
        self, config: Config, processors: Processors, plan: Plan, place: DevicePlacement, load_pixels: LoadPixels
    ) -> None:
        self._config, self._processors, self._plan, self._place = config, processors, plan, place
        self._load_pixels = load_pixels

    def trainer(self, reference: LocalScorer | None) -> LocalTrainEngine:
        """Load the policy, and make its optimizer.

        With a shared trunk it has a value head, which critic makes an optimizer for.
        reference: the train engine uses it only for an exact KL over the whole vocabulary.
        """
        config, actor = self._config, self._config.worker.actor
        model_class = ActorCritic if config.shares_trunk else Policy
        policy = self._place_trained(actor, partial(self._load_trained, actor, model_class=model_class))
        policy.replays_routing = actor.replays_routing
        return LocalTrainEngine(
            policy,
            config,
            self._plan,
            self._placement(actor, model="policy", remedies=find_remedies_in_pass(config)),
            reference=reference if config.has_full_kl else None,
            features=self._feature_cache(shared=reference is not None) if policy.has_frozen_vision else None,
            load_pixels=self._load_pixels,
        )

    def reference(self) -> LocalScorer:
        """Load the reference policy."""
        config, place, ref, actor = self._config, self._place, self._config.worker.ref, self._config.worker.actor
        dtype = DTYPES[ref.dtype]
        offload = (ref.fsdp.enable_cpu_offload or ref.offload.offload_params) and place.device.type != "cpu"
        sharding = Sharding(
            full_shard=ref.fsdp.enable_full_shard,
            ranks_per_copy=config.workers_per_copy,
            param_dtype=dtype,
            reduce_dtype=dtype,
            cpu_offload=offload,
        )
        # As the policy computes features, so that equal weights give equal bits.
        caches = actor.model.freeze_vision_tower and self._processors.family.has_vision
        return LocalScorer(
            self._place_policy(partial(self._load, actor, dtype), sharding),
            Placement(
                device=place.device,
                compute_dtype=dtype if place.is_alone else None,
                offload_params=offload and place.is_alone,
                process_group=place.process_group,
                model="reference",
                remedies=find_remedies_in_pass(config, model="reference"),
            ),
            max_tokens=self._plan.tokens_per_experience_pass,
            features=self._feature_cache(shared=True) if caches else None,
            load_pixels=self._load_pixels,
        )

    def critic(self, trainer: LocalTrainEngine) -> LocalCriticEngine:
        """Return the critic, off the device if it is offloaded.

        With a shared trunk it is a head on the trainer's policy, which the trainer updates too.
        trainer: the train engine of the same process, with which the critic shares image features
        where both have the same vision tower, and do not train it.
        """
        config, critic = self._config, self._config.critic
        if config.shares_trunk:
            policy = trainer.policy
            assert isinstance(policy, ActorCritic), "trainer adds the head"
            return LocalTrunkCritic(
                policy,
                config,
                self._plan.critic,
                self._placement(critic, model="critic", remedies=find_remedies_in_pass(config)),
                trainer=trainer,
                load_pixels=self._load_pixels,
            )
        require_same_tokens(config, self._processors)
        model = self._place_trained(critic, self._load_critic)
        assert isinstance(model, ValueModel)
        engine = LocalCriticEngine(
            model,
            config,
            self._plan.critic,
            self._placement(critic, model="critic", remedies=find_remedies_in_pass(config, model="critic")),
            features=trainer.features if model.has_frozen_vision and _compute_same_features(config) else None,
            load_pixels=self._load_pixels,
            before_use=trainer.offload_weights,
        )
        engine.offload()
        return engine

    def _placement(self, section: TrainedConfig, *, model: str, remedies: tuple[str, ...]) -> Placement:
        """Return where a trained model and its optimizer states are.

        model, remedies: see Placement.
        """
        config, place = self._config, self._place
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

    def _feature_cache(self, *, shared: bool) -> VisionFeatureCache:
        """Return the cache of a frozen vision tower's features.

        shared: policy and reference have a cache each, of half the size.
        """
        max_bytes = int(self._config.worker.actor.model.vision_cache_gb * 2**30)
        return VisionFeatureCache(max_bytes // 2 if shared else max_bytes)

    # -- loading -----------------------------------------------------------------------------------

    def _load(
        self,
        section: TrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        as_stored: bool = False,
        model_class: type[Policy] = Policy,
    ) -> Policy:
        """Load the model of a section as a policy. On device "meta" no weights are loaded.

        as_stored: load it in the dtype of its files instead of dtype, if that is narrower. On the
            CPU the weights are then mapped from the files, and take no memory of their own.
        model_class: another one replaces the head, or adds one.
        """
        config, model, kernels = self._config, section.model, self._config.worker.actor.model
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
                attention_kernel=choose_kernel(config, self._place.device, section, processors=self._processors),
            ),
            self._processors.family,
            temperature=config.worker.rollout.temperature,
            banned_token_ids=self._processors.banned_token_ids,
        )
        if kernels.use_liger_kernel:
            use_liger(policy.model)
        if kernels.compile_layers:
            compile_layers(policy.layers())
        return policy

    def _load_trained(
        self,
        section: TrainedConfig,
        device: torch.device,
        *,
        as_stored: bool = False,
        model_class: type[Policy] = Policy,
    ) -> Policy:
        """Load a model with frozen parts, LoRA and checkpointing as its section has them."""
        model, dtype = section.model, DTYPES[section.weight_dtype]
        policy = self._load(section, dtype, device, as_stored=as_stored, model_class=model_class)
        if model.freeze_vision_tower:
            policy.freeze_vision_tower()
        if model.lora.rank > 0:
            add_lora(policy.model, model.lora, seed=self._config.worker.rollout.seed)
        if model.enable_gradient_checkpointing:
            policy.enable_gradient_checkpointing(offload=model.enable_activation_offload)
        return policy

    def _load_critic(self, device: torch.device, *, as_stored: bool = False) -> Policy:
        """Load a critic that is a model of its own. Raises: ModelError."""
        try:
            model = self._load_trained(self._config.critic, device, as_stored=as_stored, model_class=ValueModel)
        except ModelError as error:
            raise ModelError(f"The critic (worker.critic.model): {error}") from error
        assert isinstance(model, ValueModel)
        model.train_head()
        return model

    def _place_trained(self, section: TrainedConfig, make_policy: MakePolicy) -> Policy:
        """Return make_policy's model, sharded as its section has it if there are several ranks."""
        sharding = Sharding(
            full_shard=section.fsdp.enable_full_shard,
            ranks_per_copy=self._config.workers_per_copy_of(section),
            param_dtype=DTYPES[section.fsdp.mp_param_dtype],
            reduce_dtype=DTYPES[section.fsdp.mp_reduce_dtype],
            cpu_offload=self._config.is_on_host(section.fsdp) and self._place.device.type != "cpu",
        )
        return self._place_policy(make_policy, sharding)

    def _place_policy(self, make_policy: MakePolicy, sharding: Sharding) -> Policy:
        """Return make_policy's policy, sharded over the ranks if there are several."""
        place = self._place
        if place.is_alone:
            return make_policy(torch.device("cpu") if sharding.cpu_offload else place.device)
        from trigon.training.fsdp import open_sharded

        policy = open_sharded(make_policy, place.process_group, sharding, place.device)
        if place.row_ranks is not None:
            policy.use_row_ranks(place.row_ranks)
        return policy


# -- the critic ------------------------------------------------------------------------------------


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


def _compute_same_features(config: Config) -> bool:
    """Return whether the frozen vision towers of policy and critic compute the same features."""
    own, critic = config.worker.actor, config.critic
    return (
        own.model.model_path == critic.model.model_path
        and own.model.override_config == critic.model.override_config
        and own.fsdp.torch_dtype == critic.fsdp.torch_dtype
        and own.fsdp.mp_param_dtype == critic.fsdp.mp_param_dtype
        and own.model.lora.rank == critic.model.lora.rank  # on which the dtype of the weights depends
    )
