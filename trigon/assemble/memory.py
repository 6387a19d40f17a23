"""The memory of a run by arithmetic, before anything is loaded: phase by phase, on each rank.

    start          the rollout engine is started beside the trainer
    weight sync    it gets the trainer's weights
    sampling       it samples
    log-probs      the trainer, and then the reference, score completions
    update         a forward and backward, and the optimizer's step
    critic values, critic update    as the two before, of a critic
    save           a checkpoint is copied to host memory

With separate workers that learn and sample each has the phases and parts of what it does.

Each part has an expected size, with rows and sequences of maximum length, and a certain one: what
the run needs however short its data is. Only the latter makes a run impossible. No figure comes
from a device; models/activations.py says how the passes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from trigon.assemble.memory_critic import add_critic
from trigon.assemble.memory_engine import EngineMemory
from trigon.assemble.memory_pools import add_samplers, pixel_cache_bytes
from trigon.assemble.memory_table import GIB, Hardware, Part, PhaseMemory, Pool, RunMemory, exactly, phase_of
from trigon.config.plan import with_critic_as_actor
from trigon.config.schema import Config
from trigon.models import activations
from trigon.models.activations import (
    PassBytes,
    PassFormat,
    PassOptions,
    RowLengths,
)
from trigon.models.dimensions import Dimensions
from trigon.models.dtypes import DTYPES
from trigon.models.kernels import FLASH_DTYPES, Kernel
from trigon.models.logprobs import rows_per_chunk
from trigon.models.memory import ModelSize
from trigon.training.optim import state_bytes, update_bytes

CONTEXT_BYTES = GIB
"""Expected memory of CUDA's context, NCCL's buffers and the libraries, on each device."""

PROCESS_BYTES = 2 * GIB
"""Expected host memory of one worker with its libraries, without tensors."""

_FLOAT32_BYTES = 4  # of adapters and value heads


def count_memory(config: Config, size: ModelSize, hardware: Hardware) -> RunMemory:
    """Return the memory of a run. size: of the policy, with frozen parts and adapters.

    Where token budgets are measured on the device (trainer.auto_micro_batch), a pass has the
    longest sequence, which it has at least.
    """
    run = _Run(config, size, hardware)
    phases = [*(run.on_device() if hardware.device == "cuda" else ()), *run.on_host()]
    if size.critic is not None:
        critic = _Run(with_critic_as_actor(config), size.critic, hardware, is_critic=True)
        phases = add_critic(phases, run, critic)
    if not config.worker.hybrid_engine:
        phases = add_samplers(phases, config, size, hardware, context_bytes=CONTEXT_BYTES, process_bytes=PROCESS_BYTES)
    return RunMemory(
        hardware,
        tuple(phases),
        counts_passes=size.dimensions is not None,
        tensor_parallel_sizes=size.tensor_parallel_sizes,
    )


def count_checkpoint_bytes(config: Config, size: ModelSize) -> int:
    """Return the size of one checkpoint on disk: what is trained, and the optimizer's states.

    size: as for count_memory. Side files of the model (tokenizer, configs) are not counted.
    """
    nothing = Hardware("cpu", 0, 0)
    policy = _Run(config, size, nothing).checkpoint_bytes()
    if size.critic is None:
        return policy
    return policy + _Run(with_critic_as_actor(config), size.critic, nothing).checkpoint_bytes()


class _Run:
    """Counts the parts of a run's memory, for one rank."""

    def __init__(self, config: Config, size: ModelSize, hardware: Hardware, *, is_critic: bool = False) -> None:
        """Count for a policy with its reference, or for a critic."""
        self._full_kl = config.has_full_kl and not is_critic
        self._config = config
        self._size = size
        self._hardware = hardware
        self._samples = config.worker.hybrid_engine
        self._engine = EngineMemory(config, size, hardware, samples=self._samples)
        self._measures_budgets = config.trainer.tunes_budgets_on(hardware.device)
        actor = config.worker.actor
        self._on_gpu = hardware.device == "cuda"
        self._trains = not config.trainer.val_only
        self._shards = config.workers_per_copy
        self._ranks = config.trainer.n_gpus_per_node
        self._weight_dtype = DTYPES[config.worker.actor.weight_dtype]
        self._compute_dtype = DTYPES[actor.fsdp.mp_param_dtype]
        # FSDP's own offloading keeps everything in host memory, and moves units to the device.
        self._fsdp_offload = config.is_on_host(actor.fsdp) and self._on_gpu
        moves = self._on_gpu and not self._fsdp_offload
        self._offload_params = actor.offload.offload_params and moves
        self._offload_optimizer = actor.offload.offload_optimizer and moves and self._trains
        ref = config.worker.ref
        self._has_reference = config.needs_reference and not size.has_adapters and not is_critic
        self._offload_reference = self._on_gpu and (ref.fsdp.enable_cpu_offload or ref.offload.offload_params)

    # -- what lives on after a phase ------------------------------------------------------------

    def _weights(self) -> int:
        """The policy's weights, as this rank stores them."""
        all_ = self._size.all
        stored = (all_.frozen + all_.trained) * self._weight_dtype.itemsize
        stored += (all_.adapters + self._size.value_head) * _FLOAT32_BYTES
        return ceil(stored / self._shards)

    def _trained(self) -> Sequence[torch.Tensor]:
        """Tensors with as many elements, and of the same dtypes, as this rank trains."""
        all_ = self._size.all
        shapes = ((all_.trained, self._weight_dtype), (all_.adapters + self._size.value_head, torch.float32))
        return [torch.empty(number // self._shards, dtype=dtype, device="meta") for number, dtype in shapes if number]

    def _gradients(self) -> int:
        return sum(part.nbytes for part in self._trained()) if self._trains else 0

    def _states(self) -> int:
        strategy = self._config.worker.actor.optim.strategy
        return sum(state_bytes(part, strategy) for part in self._trained()) if self._trains else 0

    def _reference(self) -> int:
        if not self._has_reference:
            return 0
        all_, dtype = self._size.all, DTYPES[self._config.worker.ref.dtype]
        return ceil((all_.frozen + all_.trained) * dtype.itemsize / self._shards)

    # -- the GPU of a rank ----------------------------------------------------------------------

    def on_device(self) -> Sequence[PhaseMemory]:
        """Return the phases on the GPU of one rank."""
        context = Part("CUDA context, NCCL", CONTEXT_BYTES, 0)
        graphs = self._engine.graphs()
        weights = exactly("weights", 0 if self._fsdp_offload else self._weights())
        at_rest = exactly("weights", 0 if self._offload_params or self._fsdp_offload else self._weights())
        states = exactly("optimizer states", 0 if self._fsdp_offload else self._states())
        states_at_rest = exactly("optimizer states", 0 if self._offload_optimizer else states.certain)
        gradients = exactly("gradients", 0 if self._fsdp_offload else self._gradients())
        reference = exactly("reference model", 0 if self._offload_reference else self._reference())
        awake = exactly("reference model", self._reference())
        phases: list[PhaseMemory] = [
            phase_of("start", "GPU", [at_rest, reference, *self._engine.awake(starts=True), context]),
            phase_of(
                "weight sync",
                "GPU",
                [
                    weights,
                    reference,
                    states_at_rest,
                    exactly("vLLM's weights", self._engine.weights),
                    self._engine.synced(),
                    graphs,
                    context,
                ],
            ),
        ]
        if self._samples:
            sampling = [at_rest, reference, states_at_rest, *self._engine.awake(starts=False), graphs, context]
            phases.append(phase_of("sampling", "GPU", sampling))
        if not self._trains:
            return phases
        score, update = self._score_pass(), self._update_pass()
        scoring = [*self._pass_parts(score), self._gathered(score, updates=False), graphs, context]
        updating = [*self._pass_parts(update), self._gathered(update, updates=True), graphs, context]
        in_update = awake if self._full_kl else reference
        # FSDP moves the shards of an offloaded reference unit by unit.
        in_scoring = reference if self._offload_reference and self._shards > 1 else awake
        step = Part("temporaries of the optimizer", self._step_temporaries(), 0)
        return [
            *phases,
            phase_of("log-probs", "GPU", [weights, states_at_rest, in_scoring, *scoring]),
            phase_of("update", "GPU", [weights, gradients, states, in_update, *updating]),
            phase_of("optimizer step", "GPU", [weights, gradients, states, in_update, step, graphs, context]),
            phase_of("save", "GPU", [weights, states_at_rest, reference, graphs, context]),
        ]

    def _step_temporaries(self) -> int:
        return update_bytes(self._trained(), self._config.worker.actor.optim.strategy)

    def _gathered(self, counted: PassBytes | None, *, updates: bool) -> Part:
        """What FSDP gathers from other ranks at the peak of a pass.

        The root, and either a layer and the next one, or the head. With gradients a unit has them
        in full as well, and once more in the format in which they are reduced.
        """
        if self._shards == 1 and not self._fsdp_offload:
            return Part("gathered layers", 0, 0)
        size, fsdp = self._size, self._config.worker.actor.fsdp
        compute = self._compute_dtype.itemsize
        layer = max((unit.total for unit in size.layers), default=0)
        head = 0 if size.head is None else size.head.total
        layers = 2 * layer if fsdp.enable_full_shard else sum(unit.total for unit in size.layers)
        expected = (size.root.total + layers) * compute
        if counted is not None and counted.logits:
            expected = (size.root.total + layers - layer + head) * compute
        elif updates:
            units = [unit for unit in (*size.layers, size.head, size.embedding, size.root) if unit is not None]
            largest = max(unit.trained + unit.adapters for unit in units)
            expected += largest * (compute + DTYPES[fsdp.mp_reduce_dtype].itemsize)
        return Part("layers gathered by FSDP", expected, (size.root.total + layer) * compute)

    # -- passes -----------------------------------------------------------------------------------

    def _update_pass(self) -> PassBytes | None:
        micro = self._config.worker.actor.micro_batch_size_per_device_for_update
        dimensions = self._size.dimensions
        return (
            None
            if dimensions is None
            else activations.update_bytes(dimensions, *self._pass_arguments(dimensions, micro))
        )

    def _score_pass(self) -> PassBytes | None:
        micro = self._config.worker.actor.micro_batch_size_per_device_for_experience
        dimensions = self._size.dimensions
        return (
            None
            if dimensions is None
            else activations.score_bytes(dimensions, *self._pass_arguments(dimensions, micro))
        )

    def _pass_arguments(self, dimensions: Dimensions, micro: int) -> tuple[RowLengths, PassFormat, PassOptions]:
        config, size = self._config, self._size
        compute = self._compute_dtype.itemsize
        model, data = config.worker.actor.model, config.data
        longest = data.max_prompt_length + data.max_response_length
        return (
            longest_row(config, dimensions, longest if self._measures_budgets else micro * longest),
            PassFormat(weight=self._weight_dtype.itemsize if self._shards == 1 else compute, compute=compute),
            PassOptions(
                checkpointing=model.enable_gradient_checkpointing,
                trains_weights=not size.has_adapters,
                trains_vision=size.trains_vision,
                kernel=self._kernel(),
                chunk_rows=rows_per_chunk(dimensions.text.vocabulary, self._hardware.device),
                tied=size.tied,
                on_cpu=not self._on_gpu,
                full_kl=self._full_kl,
                offloads=model.enable_activation_offload and model.enable_gradient_checkpointing,
            ),
        )

    def _kernel(self) -> Kernel:
        """The attention kernel, as resolve_kernel chooses it on a recent GPU."""
        kernel = self._config.worker.actor.model.attention_kernel
        if kernel != "auto":
            return kernel
        return "varlen" if self._on_gpu and self._compute_dtype in FLASH_DTYPES else "sdpa"

    def _pass_parts(self, counted: PassBytes | None) -> list[Part]:
        """The parts of a pass. How long its rows are depends on the data, so none is certain."""
        if counted is None:
            return []
        return [
            Part(name, bytes_, 0)
            for name, bytes_ in (
                ("activations", counted.activations),
                ("logits", counted.logits),
                ("copies of weights", counted.copies),
                ("gradients of one layer", counted.gradients),
            )
        ]

    # -- host memory of a node ------------------------------------------------------------------

    def on_host(self) -> Sequence[PhaseMemory]:
        """Return the phases in the host memory of a node, which all of its ranks share."""
        parameters = self._size.all.frozen + self._size.all.trained
        process = self._of_ranks("processes", PROCESS_BYTES, 0)
        caches = self._of_ranks("caches of images and features", self._cache_bytes(), 0)
        # A process with a GPU of its own converts the weights on the CPU. With several, rank 0 maps
        # the files, and sends each rank its part.
        full = parameters * self._weight_dtype.itemsize if self._config.num_workers == 1 and self._on_gpu else 0
        reading = exactly("model, as it is read", full)
        kept = self._kept_on_host()
        copy = self.copied()
        inputs = self._inputs_on_host()
        if self._on_gpu:
            return [
                phase_of("start", "host", [reading, process]),
                *([phase_of("sampling", "host", [*kept, caches, process])] if self._samples else []),
                *(
                    [phase_of("update", "host", [*kept, inputs, caches, process])]
                    if inputs.expected or not self._samples
                    else []
                ),
                phase_of("save", "host", [*kept, copy, caches, process]),
            ]
        engine = self._of_ranks("rollout engine's weights", self._engine.weights, self._engine.weights)
        cache = self._of_ranks("vLLM's KV cache", self._engine.cpu_cache, 0)
        passes = [
            self._of_ranks(part.name, part.expected, part.certain) for part in self._pass_parts(self._update_pass())
        ]
        gathered = self._gathered(self._update_pass(), updates=True)
        return [
            phase_of("start", "host", [*kept[:2], reading, process]),
            phase_of(
                "update",
                "host",
                [
                    *kept,
                    self._of_ranks("gradients", self._gradients(), self._gradients()),
                    *passes,
                    inputs,
                    self._of_ranks(gathered.name, gathered.expected, gathered.certain),
                    engine,
                    cache,
                    caches,
                    process,
                ],
            ),
            phase_of("save", "host", [*kept, copy, engine, cache, caches, process]),
        ]

    def _inputs_on_host(self) -> Part:
        """The inputs of layers that a pass keeps in host memory.

        An engine returns what is cached of them before sampling, a save, and passes of others.
        """
        counted = self._update_pass() if self._trains else None
        return self._of_ranks("inputs of layers", 0 if counted is None else counted.host, 0)

    def resting(self, pool: Pool) -> list[Part]:
        """See Counted."""
        if pool == "host":
            return self._kept_on_host()
        moved = self._offload_params or self._fsdp_offload
        return [
            exactly("weights", 0 if moved else self._weights()),
            exactly("reference model", 0 if self._offload_reference else self._reference()),
            exactly("optimizer states", 0 if self._offload_optimizer or self._fsdp_offload else self._states()),
        ]

    def copied(self) -> Part:
        """See Counted."""
        return self._of_ranks("copy of the checkpoint", self._staged() if self._trains else 0, 0)

    def checkpoint_bytes(self) -> int:
        """The parts of a checkpoint that the ranks of one copy of the policy write together."""
        return self._staged() * self._shards

    def _staged(self) -> int:
        """What this rank writes into a checkpoint."""
        weights = self._weights() if not self._size.has_adapters else self._gradients()
        return weights + (0 if self._config.trainer.save_model_only else self._states())

    def _kept_on_host(self) -> list[Part]:
        """Weights, reference and optimizer states that are in host memory while others work."""
        on_cpu = not self._on_gpu
        weights = self._weights() if on_cpu or self._offload_params or self._fsdp_offload else 0
        reference = self._reference() if on_cpu or self._offload_reference else 0
        states = self._states() if on_cpu or self._offload_optimizer or self._fsdp_offload else 0
        return [
            self._of_ranks("weights", weights, weights),
            self._of_ranks("reference model", reference, reference),
            self._of_ranks("optimizer states", states, states),
        ]

    def _cache_bytes(self) -> int:
        """The features of a frozen vision tower, and with several workers the pixels of a step."""
        dimensions, config = self._size.dimensions, self._config
        if dimensions is None or dimensions.vision is None:
            return 0
        features = 0 if self._size.trains_vision else int(config.worker.actor.model.vision_cache_gb * GIB)
        if not config.has_workers:
            return features
        return features + pixel_cache_bytes(config, dimensions, config.num_workers)

    def _of_ranks(self, name: str, expected: int, certain: int) -> Part:
        """The same on all ranks of a node."""
        return Part(name, expected * self._ranks, certain * self._ranks)


def longest_row(config: Config, dimensions: Dimensions, max_tokens: int) -> RowLengths:
    """Return the row of a pass with this budget that takes most memory: prompts full of images.

    With sequence parallelism a rank's slice of it, and its share of the images.
    """
    data = config.data
    prompt, response = data.max_prompt_length, data.max_response_length
    completions = max(1, min(config.group_size, (max_tokens - prompt) // response))
    group = prompt + completions * response
    patches = 0 if dimensions.vision is None else prompt * dimensions.vision.merge**2
    # Of each length, the part of one rank of those that compute the row together.
    ranks = config.worker.actor.ulysses_sequence_parallel_size
    return RowLengths(
        groups=max(1, max_tokens // group),
        prompt=ceil(prompt / ranks),
        completions=completions,
        response=ceil(response / ranks),
        patches=ceil(patches / ranks),
        image_patches=ceil(patches / ranks),
    )
