"""The memory of a run by arithmetic, before anything is loaded: phase by phase, on each rank.

    start          the rollout engine is started beside the trainer
    weight sync    it gets the trainer's weights
    sampling       it samples
    log-probs      the trainer, and then the reference, score completions
    update         a forward and backward, and the optimizer's step
    critic values, critic update    as the two before, of a critic
    save           a checkpoint is copied to host memory

With separate workers that learn and sample, each has the phases and parts of what it does.

Each part has an expected size, with rows and sequences of maximum length, and a certain one: what
the run needs however short its data is. Only the latter makes a run impossible. No figure comes
from a device; models/activation_memory.py says how the passes are counted. The refusal at the start
of a run, `trigon check`, `trigon plan` and docs/hardware.md all have these figures. How many tokens
a pass may have is measured on the device instead (training/budget.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

import torch

from trigon.assemble.models import check_policy, check_sequence_parallel
from trigon.assemble.options import PIXEL_CACHE_BYTES, model_path
from trigon.assemble.remedies import Changes, format_changes, list_changes
from trigon.config.names import DeviceType
from trigon.config.options import with_options
from trigon.config.plan import with_critic_as_actor
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.activation_memory import Pass, PassBytes
from trigon.models.dtypes import DTYPES
from trigon.models.families import family_of
from trigon.models.kernels import FLASH_DTYPES
from trigon.models.load import load_model
from trigon.models.logprobs import rows_per_chunk
from trigon.models.policy import Policy
from trigon.models.sizes import Dimensions, GroupLengths, ModelSize, model_size
from trigon.models.value import ValueModel
from trigon.system.machine import count_total_bytes
from trigon.system.terminal import format_bytes
from trigon.training.optim import state_bytes, update_bytes
from trigon.training.protocol import Sizes

GIB = 2**30

# -- expected bytes of what cannot be counted ------------------------------------------------------

CONTEXT_BYTES = GIB
"""Expected memory of CUDA's context, NCCL's buffers and the libraries, on each device."""

PROCESS_BYTES = 2 * GIB
"""Expected host memory of one worker with its libraries, without tensors."""

GRAPH_BYTES = GIB
"""Expected memory of vLLM's CUDA graphs, which stays while the engine sleeps."""

WORKSPACE_BYTES = 4 * GIB
"""The part of vLLM's share that it may keep for activations, and not allocate while it is idle."""

CPU_CACHE_BYTES = GIB
"""The most that vLLM's KV cache takes on the CPU (rollout/vllm/arguments.py)."""

BUCKET_BYTES = 256 * 2**20
"""What a weight sync sends at a time (distributed/weight_transfer.py)."""

_SYNC_COPIES = 3  # of a tensor: gathered, converted, and as vLLM collects it for a layer
_FLOAT32_BYTES = 4  # a weight of adapters and value heads

Pool = Literal["GPU", "host"]
"""GPU: memory of each rank. host: memory of a node, for all of its ranks together."""

Workers = Literal["all", "learners", "samplers"]
"""Whose phase it is: of all workers, or of one pool of them."""

Phase = Literal[
    "start",
    "weight sync",
    "sampling",
    "log-probs",
    "update",
    "optimizer step",
    "critic values",
    "critic update",
    "save",
]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The memory that a run finds.

    device_bytes: memory of each GPU; 0 on the CPU.
    host_bytes: memory of each node; None: not known, so that it is no limit.
    """

    device: DeviceType
    device_bytes: int
    host_bytes: int | None


_ANY_HARDWARE = Hardware("cpu", 0, None)
"""For sizes that do not depend on it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the memory of a phase, in bytes. certain: what it needs at least."""

    name: str
    expected: int
    certain: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of a phase in one pool of memory, of one or of all pools of workers."""

    phase: Phase
    pool: Pool
    parts: tuple[Part, ...]
    workers: Workers = "all"

    @property
    def where(self) -> str:
        """Whose memory it is, for people."""
        place = "each GPU" if self.pool == "GPU" else "host of each machine"
        return place if self.workers == "all" else f"{place} of the {self.workers}"

    @property
    def expected(self) -> int:
        """The bytes that the phase is expected to need."""
        return sum(part.expected for part in self.parts)

    @property
    def certain(self) -> int:
        """The bytes that the phase needs at least."""
        return sum(part.certain for part in self.parts)

    def needed(self, *, certain: bool) -> int:
        """Return the bytes that the phase needs at least; certain=False: is expected to need."""
        return self.certain if certain else self.expected


@dataclass(frozen=True, slots=True)
class EngineProblem:
    """Why vLLM cannot start, as text, and changes with which it does."""

    text: str
    remedies: tuple[Changes, ...]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of a run.

    phases: the memory of each phase, on the GPUs and in host memory.
    counts_passes: False for a family whose passes are not counted; their parts are then 0.
    problem: why vLLM cannot start with its share of a GPU; None if it can.
    """

    hardware: Hardware
    phases: tuple[PhaseMemory, ...]
    counts_passes: bool
    problem: EngineProblem | None

    def capacity(self, phase: PhaseMemory) -> int | None:
        """Return the size of the pool of a phase in bytes; None if it is not known."""
        return self.hardware.device_bytes if phase.pool == "GPU" else self.hardware.host_bytes

    def describe_capacity(self, phase: PhaseMemory) -> str:
        """Return the size of the pool of a phase as text."""
        capacity = self.capacity(phase)
        return "unknown" if capacity is None else format_bytes(capacity)

    def fraction(self, phase: PhaseMemory, *, certain: bool) -> float:
        """Return the fraction of its pool that a phase needs; 0 for a pool of unknown size.

        certain: what it needs at least; False: what it is expected to need.
        """
        capacity = self.capacity(phase)
        return 0.0 if capacity is None else phase.needed(certain=certain) / max(1, capacity)

    def worst(self, *, certain: bool) -> PhaseMemory:
        """Return the phase that exceeds its pool most, or comes nearest to its limit.

        certain: as in fraction. Among pools of unknown size, it is the phase that needs most.
        """
        return max(
            self.phases, key=lambda phase: (self.fraction(phase, certain=certain), phase.needed(certain=certain))
        )

    def fits(self, *, certain: bool) -> bool:
        """Return whether all phases fit into their pools, and vLLM into its share of a GPU."""
        return self.problem is None and all(self.fraction(phase, certain=certain) <= 1 for phase in self.phases)


# -- the sizes of the models -----------------------------------------------------------------------


def size_of_model(config: Config) -> ModelSize:
    """Return the sizes of policy and critic, from the config.json of their models.

    They are the same for every configuration of these models, whatever it trains of them.
    """
    size = _size_of(config, Policy, check=check_policy)
    if not config.has_critic or config.shares_trunk:
        return size
    return replace(size, critic=_size_of(with_critic_as_actor(config), ValueModel, check=check_sequence_parallel))


def _size_of(config: Config, model_class: type[Policy], *, check: Callable[[Config, Any], None]) -> ModelSize:
    options = config.worker.actor.model
    model = load_model(
        model_path(config),
        dtype=DTYPES[config.worker.actor.weight_dtype],
        device="meta",
        trust_remote_code=options.trust_remote_code,
        override_config=options.override_config,
    )
    policy = model_class(model, family_of(model.config), temperature=1.0, banned_token_ids=())
    if options.freeze_vision_tower:  # which then gets no adapters
        policy.freeze_vision_tower()
    check(config, model.config)
    return model_size(policy, options.lora)


# -- the arithmetic --------------------------------------------------------------------------------


def count_memory(config: Config, size: ModelSize, hardware: Hardware) -> RunMemory:
    """Return the memory of a run. size: the size of its models; see size_of_model.

    Where token budgets are measured on the device (trainer.auto_micro_batch), a pass has the
    longest sequence, which it has at least.
    """
    models = _trained_models(config, size, hardware)
    engine = _Engine(config, size, hardware)
    shared = engine if config.worker.hybrid_engine else None
    phases = [*(_phases_on_gpu(models, shared) if hardware.device == "cuda" else ()), *_phases_on_host(models, shared)]
    if shared is None:
        phases = _with_samplers(phases, engine, config, size, hardware)
    return RunMemory(
        hardware,
        tuple(phases),
        counts_passes=size.counts_passes,
        problem=engine.problem(),
    )


def count_checkpoint_bytes(config: Config, size: ModelSize) -> int:
    """Return the size of one checkpoint on disk: what is trained, and the optimizer's states.

    size: as for count_memory. Side files of the model (tokenizer, configs) are not counted.
    """
    return sum(model.checkpoint_bytes() for model in _trained_models(config, size, _ANY_HARDWARE))


def count_checkpoints(config: Config, *, total_steps: int) -> int:
    """Return how many checkpoints are on the disk at most, while the last one is written.

    trainer.save_limit are kept, the newest and the best among them, and the new one is written
    before an old one is removed.
    """
    trainer = config.trainer
    saved = -(-total_steps // trainer.save_freq) if trainer.save_freq > 0 else 1
    has_best = bool(config.data.val_files) and trainer.val_freq > 0
    return saved if trainer.save_limit <= 0 else min(saved, max(trainer.save_limit, 1 + has_best) + 1)


def count_staged_bytes(config: Config, size: ModelSize) -> int:
    """Return the host memory into which a save copies the state, on each machine that learns.

    size: as for count_memory.
    """
    return sum(model.copied().expected for model in _trained_models(config, size, _ANY_HARDWARE))


def count_sizes(config: Config, size: ModelSize) -> Sizes:
    """Return the sizes of the policy on each rank that learns. size: as for count_memory."""
    return _trained_models(config, size, _ANY_HARDWARE)[0].sizes


def _longest_row(config: Config, dimensions: Dimensions, max_tokens: int) -> list[GroupLengths]:
    """Return the row of a pass with this budget that takes most memory: prompts full of images.

    With sequence parallelism a rank's slice of it, and its share of the images.
    """
    data = config.data
    prompt, response = data.max_prompt_length, data.max_response_length
    completions = max(1, min(config.group_size, (max_tokens - prompt) // response))
    patches = 0 if dimensions.vision is None else prompt * dimensions.vision.merge**2
    # Each of the ranks that compute the row together has an equal part of it.
    ranks = config.worker.actor.ulysses_sequence_parallel_size
    group = GroupLengths(
        prompt=ceil(prompt / ranks),
        completions=(ceil(response / ranks),) * completions,
        grids=((1, 1, ceil(patches / ranks)),) if patches else (),
    )
    return [group] * max(1, max_tokens // (prompt + completions * response))


def _exactly(name: str, num_bytes: int) -> Part:
    return Part(name, num_bytes, num_bytes)


def _phase(phase: Phase, pool: Pool, *parts: Iterable[Part], workers: Workers = "all") -> PhaseMemory:
    """Return a phase without the parts that are empty."""
    return PhaseMemory(phase, pool, tuple(part for each in parts for part in each if part.expected), workers)


def _trained_models(config: Config, size: ModelSize, hardware: Hardware) -> list[_Trained]:
    """Return the policy, and the critic if it is a model of its own."""
    models = [_Trained(config, size, hardware, is_critic=False)]
    if config.has_critic and not config.shares_trunk:
        assert size.critic is not None, "size_of_model counts the critic"
        models.append(_Trained(with_critic_as_actor(config), size.critic, hardware, is_critic=True))
    return models


class _Trained:
    """Counts the memory of a model that is trained, on one rank: the policy, or a critic.

    The reference counts with the policy, whose log-probabilities it is compared with.
    """

    def __init__(self, config: Config, size: ModelSize, hardware: Hardware, *, is_critic: bool) -> None:
        actor, ref = config.worker.actor, config.worker.ref
        self.config, self.size, self._hardware = config, size, hardware
        self._prefix = "critic's " if is_critic else ""
        self.phase_names: tuple[Phase, Phase] = (
            ("critic values", "critic update") if is_critic else ("log-probs", "update")
        )
        self._full_kl = config.has_full_kl and not is_critic
        self._balances_experts = config.worker.actor.router_aux_loss_coef > 0 and not is_critic
        self.on_gpu = hardware.device == "cuda"
        self.trains = not config.trainer.val_only
        self.ranks = config.trainer.n_gpus_per_node
        self._shards = config.workers_per_copy
        # FSDP gathers weights in the format of the passes, with a copy for each worker too.
        self._is_sharded = config.num_workers > 1
        self._compute = DTYPES[actor.fsdp.mp_param_dtype]

        dtype, weights, adapters = DTYPES[actor.weight_dtype], size.all, size.all.adapters(actor.model)
        of_heads = adapters + (size.width + 1 if config.shares_trunk else 0)  # a value head on the trunk
        # Tensors with as many elements, and of the same dtypes, as this rank trains.
        trained = ((weights.trained(actor.model), dtype), (of_heads, torch.float32)) if self.trains else ()
        tensors = [torch.empty(number // self._shards, dtype=each, device="meta") for number, each in trained if number]
        self._weight_dtype = dtype
        self.sizes = Sizes(
            parameters=weights.weights + of_heads,
            trainable=sum(number for number, _ in trained),
            weight_bytes=ceil((weights.weights * dtype.itemsize + of_heads * _FLOAT32_BYTES) / self._shards),
            gradient_bytes=sum(tensor.nbytes for tensor in tensors),
            optimizer_bytes=sum(state_bytes(tensor, actor.optim.strategy) for tensor in tensors),
        )
        self._step_bytes = update_bytes(tensors, actor.optim.strategy)
        self._reference_bytes = 0
        if config.needs_reference and actor.model.lora.rank == 0 and not is_critic:
            self._reference_bytes = ceil(weights.weights * DTYPES[config.worker.ref.dtype].itemsize / self._shards)

        # FSDP's own offloading keeps everything in host memory, and moves units to the device.
        self._fsdp_offload = config.is_on_host(actor.fsdp) and self.on_gpu
        stays_on_host = not self.on_gpu or self._fsdp_offload
        self._weights_rest_in: Pool = "host" if stays_on_host or actor.offload.offload_params else "GPU"
        self._states_rest_in: Pool = "host" if stays_on_host or actor.offload.offload_optimizer else "GPU"
        offloads_reference = ref.fsdp.enable_cpu_offload or ref.offload.offload_params
        self._reference_rests_in: Pool = "host" if not self.on_gpu or offloads_reference else "GPU"

    def weights(self) -> Part:
        """Return the weights on the device, while the model works."""
        return _exactly(f"{self._prefix}weights", 0 if self._fsdp_offload else self.sizes.weight_bytes)

    def resting(self, pool: Pool, *, weights: bool = True, states: bool = True) -> list[Part]:
        """Return what is in a pool while others work: weights, reference and optimizer states."""
        parts = [
            (weights, self._weights_rest_in, f"{self._prefix}weights", self.sizes.weight_bytes),
            (True, self._reference_rests_in, "reference model", self._reference_bytes),
            (states, self._states_rest_in, f"{self._prefix}optimizer states", self.sizes.optimizer_bytes),
        ]
        return [_exactly(name, num_bytes) for counts, place, name, num_bytes in parts if counts and place == pool]

    def scoring(self) -> list[Part]:
        """Return the model and a pass without gradient on the GPU, of its reference too."""
        states = [] if self._states_rest_in == "host" else [self._states()]
        return [self.weights(), *states, self._reference(works=True), *self._pass_parts(updates=False)]

    def updating(self) -> list[Part]:
        """Return the model and a pass with gradient on the GPU."""
        return [*self._in_update(), *self._pass_parts(updates=True)]

    def stepping(self) -> list[Part]:
        """Return the model and the temporaries of an optimizer step on the GPU."""
        return [*self._in_update(), Part("temporaries of the optimizer", self._step_bytes, 0)]

    def _in_update(self) -> list[Part]:
        gradients = _exactly(f"{self._prefix}gradients", self.sizes.gradient_bytes)
        at_work = [] if self._fsdp_offload else [self.weights(), gradients, self._states()]
        return [*at_work, self._reference(works=self._full_kl)]

    def _reference(self, *, works: bool) -> Part:
        """Return the reference on the GPU. works: whether it makes passes in this phase.

        FSDP moves the shards of an offloaded one unit by unit.
        """
        is_there = self._reference_rests_in == "GPU" or (works and not self._is_sharded)
        return _exactly("reference model", self._reference_bytes if is_there else 0)

    def _states(self) -> Part:
        return _exactly(f"{self._prefix}optimizer states", self.sizes.optimizer_bytes)

    def on_host(self) -> list[Part]:
        """Return what an update needs in the host memory of a node beside what rests there."""
        counted = self._pass(updates=True) if self.trains else None
        # An engine returns what is cached of them before sampling, a save, and passes of others.
        parts = [Part("inputs of layers", 0 if counted is None else counted.host, 0)]
        if not self.on_gpu:
            parts = [
                _exactly(f"{self._prefix}gradients", self.sizes.gradient_bytes),
                *self._pass_parts(updates=True),
                *parts,
            ]
        return [_times(part, self.ranks) for part in parts]

    def copied(self) -> Part:
        """Return the copy that a save makes in the host memory of a node."""
        return Part(f"{self._prefix}copy of the checkpoint", self._staged() * self.ranks if self.trains else 0, 0)

    def reading(self) -> Part:
        """Return the model as it is read, in the host memory of a node.

        A process with a GPU of its own converts the weights on the CPU. With several, rank 0 maps
        the files, and sends each rank its part.
        """
        converts = self.config.num_workers == 1 and self.on_gpu
        return _exactly("model, as it is read", self.size.all.weights * self._weight_dtype.itemsize if converts else 0)

    def caches(self) -> Part:
        """Return the features of a frozen vision tower, and with workers the pixels of a step."""
        config, dimensions, cached = self.config, self.size.dimensions, 0
        if dimensions is not None and dimensions.vision is not None:
            trains_vision = self.size.trains_vision(config.worker.actor.model)
            cached += 0 if trains_vision else int(config.worker.actor.model.vision_cache_gb * GIB)
            cached += _pixel_cache_bytes(config, dimensions, config.num_workers) if config.has_workers else 0
        return Part("caches of images and features", cached * self.ranks, 0)

    def checkpoint_bytes(self) -> int:
        """Return what the ranks of one copy of the model write into a checkpoint together."""
        return self._staged() * self._shards

    def _staged(self) -> int:
        """Return what this rank writes into a checkpoint: weights or adapters, and the states."""
        has_adapters = self.config.worker.actor.model.lora.rank > 0
        weights = self.sizes.gradient_bytes if has_adapters else self.sizes.weight_bytes
        return weights + (0 if self.config.trainer.save_model_only else self.sizes.optimizer_bytes)

    def _pass_parts(self, *, updates: bool) -> list[Part]:
        """Return the parts of a pass; none is certain, since its rows depend on the data."""
        counted = self._pass(updates=updates)
        gathered = self._gathered(counted, updates=updates)
        if counted is None:
            return [gathered]
        return [
            Part("activations", counted.activations, 0),
            Part("logits", counted.logits, 0),
            Part("copies of weights", counted.copies, 0),
            Part("gradients of one layer", counted.gradients, 0),
            gathered,
        ]

    def _pass(self, *, updates: bool) -> PassBytes | None:
        """Return the memory of a pass; None for a family whose passes are not counted."""
        config, size, actor, dimensions = self.config, self.size, self.config.worker.actor, self.size.dimensions
        if dimensions is None or not size.counts_passes:
            return None
        micro = actor.micro_batch_size_per_device_for_update
        if not updates:
            micro = actor.micro_batch_size_per_device_for_experience
        longest = config.data.max_prompt_length + config.data.max_response_length
        measures_budgets = config.trainer.tunes_budgets_on(self._hardware.device)
        compute, kernel = self._compute.itemsize, actor.model.attention_kernel
        if kernel == "auto":  # as resolve_kernel chooses it on a recent GPU
            kernel = "varlen" if self.on_gpu and self._compute in FLASH_DTYPES else "sdpa"
        counted = Pass(
            model=dimensions,
            groups=_longest_row(config, dimensions, longest if measures_budgets else micro * longest),
            weight=compute if self._is_sharded else self._weight_dtype.itemsize,
            compute=compute,
            checkpointing=actor.model.enable_gradient_checkpointing,
            trains_weights=actor.model.lora.rank == 0,
            trains_vision=size.trains_vision(actor.model),
            kernel=kernel,
            chunk_rows=rows_per_chunk(dimensions.text.outputs, self._hardware.device),
            tied=size.head is None,
            on_cpu=not self.on_gpu,
            full_kl=self._full_kl,
            offloads=actor.model.enable_activation_offload and actor.model.enable_gradient_checkpointing,
            balances_experts=self._balances_experts,
        )
        return counted.update_bytes() if updates else counted.score_bytes()

    def _gathered(self, counted: PassBytes | None, *, updates: bool) -> Part:
        """Return what FSDP gathers from other ranks at the peak of a pass.

        The root, and either a layer and the next one, or the head. With gradients a unit has them
        in full as well, and once more in the format in which they are reduced.
        """
        if not self._is_sharded:
            return Part("layers gathered by FSDP", 0, 0)
        size, model, fsdp = self.size, self.config.worker.actor.model, self.config.worker.actor.fsdp
        compute = self._compute.itemsize
        root, *units = (unit.weights + unit.adapters(model) for unit in (size.root, *size.layers))
        layer = max(units, default=0)
        head = 0 if size.head is None else size.head.weights + size.head.adapters(model)
        layers = 2 * layer if fsdp.enable_full_shard else sum(units)
        expected = (root + layers) * compute
        if counted is not None and counted.logits:
            expected = (root + layers - layer + head) * compute
        elif updates:
            largest = max(unit.trained(model) + unit.adapters(model) for unit in size.units)
            expected += largest * (compute + DTYPES[fsdp.mp_reduce_dtype].itemsize)
        return Part("layers gathered by FSDP", expected, (root + layer) * compute)


class _Engine:
    """Counts the memory of the rollout engine on one worker."""

    def __init__(self, config: Config, size: ModelSize, hardware: Hardware) -> None:
        self._config, self._size, self._hardware = config, size, hardware
        self._rollout = rollout = config.worker.rollout
        self._is_vllm = rollout.name == "vllm"
        self._item_bytes = DTYPES[rollout.dtype].itemsize
        self._share = int(rollout.gpu_memory_utilization * hardware.device_bytes)  # vLLM's
        self._parallel = rollout.tensor_parallel_size if self._is_vllm else 1
        self.weights = self._weights(self._parallel)

    def graphs(self) -> Part:
        """Return CUDA graphs, which stay while the engine sleeps."""
        has_graphs = self._is_vllm and not self._rollout.enforce_eager
        return Part("CUDA graphs of vLLM", GRAPH_BYTES if has_graphs else 0, 0)

    def awake(self, *, starts: bool) -> list[Part]:
        """Return the engine on a GPU while it samples: vLLM takes a fixed share of the GPU.

        starts: vLLM refuses to start if its share is not free.
        """
        if not self._is_vllm:
            return [_exactly("rollout engine's weights", self.weights)]
        needed = self._needed(self._parallel)
        certain = max(self._share - (0 if starts else WORKSPACE_BYTES), needed) - self.weights
        return [
            _exactly("vLLM's weights", self.weights),
            Part("vLLM's KV cache and workspace", max(self._share, needed) - self.weights, certain),
        ]

    def on_host(self) -> list[Part]:
        """Return the engine in host memory, where there is no GPU."""
        if self._hardware.device == "cuda":
            return []
        cache = CPU_CACHE_BYTES if self._is_vllm else 0
        return [_exactly("rollout engine's weights", self.weights), Part("vLLM's KV cache", cache, 0)]

    def problem(self) -> EngineProblem | None:
        """Return why vLLM cannot start with its share of a GPU, or None if it can."""
        needed = self._needed(self._parallel)
        if self._hardware.device == "cpu" or not self._is_vllm or needed <= self._share:
            return None
        ranks = self._config.num_samplers
        sizes = [size for size in self._size.tensor_parallel_sizes if ranks % size == 0]
        fitting = [size for size in sizes if self._needed(size) <= self._share]
        remedies: list[Changes] = [{"worker.rollout.tensor_parallel_size": size} for size in fitting[:1]]
        enough = ceil(10 * needed / self._hardware.device_bytes) / 10
        if enough < 1:
            remedies.append({"worker.rollout.gpu_memory_utilization": enough})
        ways = " or ".join(map(format_changes, remedies))
        return EngineProblem(
            f"vLLM gets {format_bytes(self._share)} of each GPU (worker.rollout.gpu_memory_utilization="
            f"{self._rollout.gpu_memory_utilization}), and its weights with one sequence of maximum length need "
            f"{format_bytes(needed)}: {f'set {ways}' if ways else 'use larger GPUs, or more of them'}",
            tuple(remedies),
        )

    def _needed(self, parallel: int) -> int:
        """Return the weights, and the KV cache of one sequence of maximum length."""
        key_heads = self._size.key_heads
        cache = self._config.context_length * self._size.key_values * self._item_bytes
        return self._weights(parallel) + int(cache * max(key_heads // parallel, 1) / key_heads)

    def _weights(self, parallel: int) -> int:
        return ceil(self._size.all.weights * self._item_bytes / parallel)


def _times(part: Part, number: int) -> Part:
    return Part(part.name, part.expected * number, part.certain * number)


def _synced(config: Config, size: ModelSize) -> Part:
    """Return what a weight sync holds beside the weights of trainer and engine."""
    synced = size.largest * DTYPES[config.worker.rollout.dtype].itemsize
    return Part("largest tensor, gathered and converted", _SYNC_COPIES * synced, 0)


_CONTEXT = Part("CUDA context, NCCL", CONTEXT_BYTES, 0)


def _phases_on_gpu(models: Sequence[_Trained], engine: _Engine | None) -> list[PhaseMemory]:
    """Return the phases on the GPU of one rank. engine: None for a rank that only learns.

    While one model works the others rest: what they offload has left the device.
    """
    policy = models[0]
    context = [*([] if engine is None else [engine.graphs()]), _CONTEXT]

    def resting(*, but: _Trained | None = None, states: bool = True) -> list[Part]:
        return [part for model in models if model is not but for part in model.resting("GPU", states=states)]

    # The policy's weights are on the device, and nothing works.
    idle = [policy.weights(), *policy.resting("GPU", weights=False), *resting(but=policy)]
    starting = [] if engine is None else engine.awake(starts=True)
    in_engine = [] if engine is None else [_exactly("vLLM's weights", engine.weights)]
    phases = [
        # Optimizer states are made in the first update.
        _phase("start", "GPU", resting(states=False), starting, [_CONTEXT]),
        _phase("weight sync", "GPU", idle, in_engine, [_synced(policy.config, policy.size)], context),
    ]
    if engine is not None:
        phases.append(_phase("sampling", "GPU", resting(), engine.awake(starts=False), context))
    if not policy.trains:
        return phases
    for model in models:
        values, update = model.phase_names
        others = resting(but=model)
        phases.append(_phase(values, "GPU", model.scoring(), others, context))
        phases.append(_phase(update, "GPU", model.updating(), others, context))
    stepping = [*policy.stepping(), *resting(but=policy)]
    return [*phases, _phase("optimizer step", "GPU", stepping, context), _phase("save", "GPU", idle, context)]


def _phases_on_host(models: Sequence[_Trained], engine: _Engine | None) -> list[PhaseMemory]:
    """Return the phases in the host memory of a node, which all of its ranks share."""
    policy, ranks = models[0], models[0].ranks
    process = Part("processes", PROCESS_BYTES * ranks, 0)
    of_engine = [] if engine is None else [_times(part, ranks) for part in engine.on_host()]

    def resting(*, states: bool = True) -> list[Part]:
        return [_times(part, ranks) for model in models for part in model.resting("host", states=states)]

    kept = [] if policy.on_gpu else resting(states=False)
    phases = [_phase("start", "host", kept, [policy.reading(), process])]
    if policy.on_gpu and engine is not None:
        phases.append(_phase("sampling", "host", resting(), [policy.caches(), process]))
    for model in models:
        in_update = model.on_host()
        if not policy.on_gpu or engine is None or any(part.expected for part in in_update):
            update = model.phase_names[1]
            phases.append(_phase(update, "host", resting(), in_update, of_engine, [model.caches(), process]))
    copies = [model.copied() for model in models]
    return [*phases, _phase("save", "host", resting(), copies, of_engine, [policy.caches(), process])]


# -- separate workers ------------------------------------------------------------------------------


def _with_samplers(
    learners: Sequence[PhaseMemory], engine: _Engine, config: Config, size: ModelSize, hardware: Hardware
) -> list[PhaseMemory]:
    """Return the phases of both pools, given the phases of workers that only learn.

    A sampler has vLLM, whose weights and KV cache stay where they are between two batches, and no
    trainer. If each pool has one machine, they may be on the same one: their host memory is added.
    """
    rollout, samplers, dimensions = config.worker.rollout, config.num_samplers, size.dimensions
    on_host = [
        *engine.on_host(),
        Part("caches of images", _pixel_cache_bytes(config, dimensions, samplers), 0),
        Part("images of prompts being sampled", _streamed_pixel_bytes(config, dimensions, samplers), 0),
        Part("processes", PROCESS_BYTES, 0),
    ]
    sampling = _phase(
        "sampling", "host", [_times(part, rollout.n_gpus_per_node) for part in on_host], workers="samplers"
    )
    share_machine = config.trainer.nnodes == rollout.nnodes == 1
    added = Part("workers that sample", sampling.expected, sampling.certain)
    phases = []
    for phase in learners:
        if phase.pool == "GPU" or not share_machine:
            phases.append(replace(phase, workers="learners"))
        else:
            phases.append(replace(phase, parts=(*phase.parts, added)))
    if hardware.device == "cuda":
        awake, graphs = engine.awake(starts=False), engine.graphs()
        syncing = [_synced(config, size), Part("bucket of received tensors", BUCKET_BYTES, 0)]
        phases += [
            _phase("start", "GPU", engine.awake(starts=True), [_CONTEXT], workers="samplers"),
            _phase("weight sync", "GPU", awake, syncing, [graphs, _CONTEXT], workers="samplers"),
            _phase("sampling", "GPU", awake, [graphs, _CONTEXT], workers="samplers"),
        ]
    return phases if share_machine else [*phases, sampling]


def _pixel_cache_bytes(config: Config, dimensions: Dimensions | None, num_workers: int) -> int:
    """Return the most bytes of the pixels of a step that one of several workers keeps."""
    prompts = ceil(config.prompts_per_step / num_workers)
    return min(PIXEL_CACHE_BYTES, prompts * _pixel_bytes(config, dimensions))


def _streamed_pixel_bytes(config: Config, dimensions: Dimensions | None, num_workers: int) -> int:
    """Return the most bytes of pixels that one of several samplers holds beside its cache.

    With max_staleness above 1 a call has all groups that may be outstanding, with their pixels.
    0 otherwise.
    """
    ahead = config.algorithm.max_staleness
    if ahead <= 1:
        return 0
    outstanding = (1 + ahead) * (1 + config.worker.rollout.oversampling) * config.prompts_per_step
    return ceil(outstanding / num_workers) * _pixel_bytes(config, dimensions)


def _pixel_bytes(config: Config, dimensions: Dimensions | None) -> int:
    """Return the bytes of the pixels of the largest prompt."""
    if dimensions is None or dimensions.vision is None:
        return 0
    patches = config.data.max_prompt_length * dimensions.vision.merge**2
    return patches * dimensions.vision.values_per_patch * 4


# -- the refusal of a run that does not fit --------------------------------------------------------

TIGHT = 0.95
"""Fraction of a pool of memory above which a run that is expected to need as much is warned."""

_MOST_REMEDIES = 3


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the configuration.

    saved_bytes: what it saves in the phase that did not fit. fits: whether the run fits with it.
    """

    changes: Changes
    saved_bytes: int
    fits: bool

    def __str__(self) -> str:
        fits = ", and the run fits" if self.fits else ""
        return f"{format_changes(self.changes)}: {format_bytes(self.saved_bytes)} less{fits}"


def find_hardware(device: torch.device) -> Hardware:
    """Return the memory of this process's device and machine."""
    if device.type == "cuda":
        return Hardware("cuda", int(torch.cuda.mem_get_info(device)[1]), count_total_bytes())
    return Hardware("cpu", 0, count_total_bytes())


def check_memory(
    config: Config, size: ModelSize, hardware: Hardware, *, warn: Callable[[str], None]
) -> RunMemory | None:
    """Raise ConfigError if the run certainly does not fit, and warn if it probably does not.

    size: as for count_memory. warn: called with a message.
    Returns: the memory of the run; None if trainer.check_memory is false.
    """
    if not config.trainer.check_memory:
        return None
    memory = count_memory(config, size, hardware)
    anyway = "trainer.check_memory=false starts the run all the same."
    worst = memory.worst(certain=True)
    if memory.fraction(worst, certain=True) > 1:
        remedies = find_remedies(config, size, memory, worst)
        lines = [
            f"this run needs at least {format_bytes(worst.certain)} during {worst.phase}, and there are "
            f"{memory.describe_capacity(worst)} ({worst.where}):",
            *(f"  {format_bytes(part.certain):>10}  {part.name}" for part in worst.parts if part.certain),
            "What helps most:" if remedies else "No single change of the configuration helps.",
            *(f"  {remedy}" for remedy in remedies),
            anyway,
        ]
        raise ConfigError("\n".join(lines))
    if memory.problem is not None:
        raise ConfigError(f"{memory.problem.text}\n{anyway}")
    if not memory.counts_passes:
        warn(
            "the activations of this model's family are not counted: only weights, optimizer states and the rollout "
            "engine were compared with the memory that is there"
        )
        return memory
    likely = memory.worst(certain=False)
    if memory.fraction(likely, certain=False) > TIGHT:
        warn(
            f"memory is tight: {likely.phase} is expected to need {format_bytes(likely.expected)} of "
            f"{memory.describe_capacity(likely)} ({likely.where}) where prompts and completions have "
            "their maximum length"
        )
    return memory


def find_remedies(
    config: Config, size: ModelSize, memory: RunMemory, worst: PhaseMemory, *, certain: bool = True
) -> list[Remedy]:
    """Return the changes that save most in a phase, those with which the run fits first.

    size, memory: size of the run's models, and memory of the run. certain: compare what the run
    needs at least; False: what it is expected to need.
    """

    def remedy_of(changes: Changes) -> Remedy:
        changed = count_memory(with_options(config, changes), size, memory.hardware)
        place = (worst.phase, worst.pool, worst.workers)
        same = (each for each in changed.phases if (each.phase, each.pool, each.workers) == place)
        saved = worst.needed(certain=certain) - sum(each.needed(certain=certain) for each in same)
        return Remedy(changes, saved, fits=changed.fits(certain=certain))

    remedies = []
    for alternatives in list_changes(config, memory.hardware.device, size.tensor_parallel_sizes):
        saving = [each for each in map(remedy_of, alternatives) if each.saved_bytes > 0]
        if saving:  # the mildest with which the run fits, or else the one that saves most
            remedies.append(
                next((each for each in saving if each.fits), max(saving, key=lambda each: each.saved_bytes))
            )
    return sorted(remedies, key=lambda remedy: (not remedy.fits, -remedy.saved_bytes))[:_MOST_REMEDIES]
