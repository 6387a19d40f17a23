"""The memory of a run by arithmetic, before anything is loaded: phase by phase, on each rank.

    start          the rollout engine is started beside the trainer
    weight sync    it gets the trainer's weights
    sampling       it samples
    log-probs      the trainer, and then the reference, score completions
    update         a forward and backward, and the optimizer's step
    save           a checkpoint is copied to host memory

Each part has an expected size, with rows and sequences of maximum length, and a certain one: what
the run needs however short its data is. Only the latter makes a run impossible. No figure comes
from a device; models/activations.py says how the passes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from trigon.build.memory_table import GIB, Hardware, Part, PhaseMemory, RunMemory, exactly, phase_of
from trigon.build.models import open_trained_policy
from trigon.build.options import kl_is_full, make_lora_settings, needs_reference
from trigon.config.defaults import (
    PIXEL_CACHE_BYTES,
    resolve_auto_micro_batch,
    resolve_reference_dtype,
    resolve_weight_dtype,
)
from trigon.config.plan import context_length, num_workers, workers_per_copy
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
from trigon.models.load import Processors, family_of_folder, model_folder
from trigon.models.logprobs import rows_per_chunk
from trigon.models.memory import ModelSize, model_size
from trigon.training.optim import state_bytes, update_bytes

CONTEXT_BYTES = GIB
"""Expected memory of CUDA's context, NCCL's buffers and the libraries, on each device."""

GRAPH_BYTES = GIB
"""Expected memory of vLLM's CUDA graphs, which stays while the engine sleeps."""

WORKSPACE_BYTES = 4 * GIB
"""The part of vLLM's share that it may keep for activations, and not allocate while it is idle."""

PROCESS_BYTES = 2 * GIB
"""Expected host memory of one worker with its libraries, without tensors."""

CPU_CACHE_BYTES = GIB
"""The most that vLLM's KV cache takes on the CPU (rollout/vllm/arguments.py)."""

_ADAPTER_BYTES = 4
_SYNC_COPIES = 3  # of a tensor: gathered, converted, and as vLLM collects it for a layer


def size_of_model(config: Config) -> ModelSize:
    """Return the sizes of the policy of a configuration, from the config.json of its model."""
    actor = config.worker.actor
    # These kernels change no size, and may need a GPU. Adapters are counted, not added.
    plain = actor.model.model_copy(
        update={
            "use_liger_kernel": False,
            "compile_layers": False,
            "lora": actor.model.lora.model_copy(update={"rank": 0}),
        }
    )
    plain_config = config.model_copy(
        update={"worker": config.worker.model_copy(update={"actor": actor.model_copy(update={"model": plain})})}
    )
    assert plain.model_path is not None
    # Sizes depend on the family alone, not on the tokenizer and the processors.
    processors = Processors(None, None, None, family_of_folder(model_folder(plain.model_path)), None, (), ())
    policy = open_trained_policy(plain_config, processors, "sdpa", torch.device("meta"))
    return model_size(policy, make_lora_settings(config) if actor.model.lora.rank > 0 else None)


def count_memory(config: Config, size: ModelSize, hardware: Hardware) -> RunMemory:
    """Return the memory of a run. size: of the policy, with frozen parts and adapters.

    Where token budgets are measured on the device (trainer.auto_micro_batch), a pass has the
    longest sequence, which it has at least.
    """
    run = _Run(config, size, hardware)
    phases = run.on_device() if hardware.device == "cuda" else ()
    return RunMemory(hardware, (*phases, *run.on_host()), counts_passes=size.dimensions is not None)


def count_checkpoint_bytes(config: Config, size: ModelSize) -> int:
    """Return the size of one checkpoint on disk: what is trained, and the optimizer's states.

    size: as for count_memory. Side files of the model (tokenizer, configs) are not counted.
    """
    return _Run(config, size, Hardware("cpu", 0, 0)).checkpoint_bytes()


class _Run:
    """Counts the parts of a run's memory, for one rank."""

    def __init__(self, config: Config, size: ModelSize, hardware: Hardware) -> None:
        self._config = config
        self._size = size
        self._hardware = hardware
        self._measures_budgets = resolve_auto_micro_batch(config, hardware.device)
        actor = config.worker.actor
        self._on_gpu = hardware.device == "cuda"
        self._trains = not config.trainer.val_only
        self._shards = workers_per_copy(config)
        self._ranks = config.trainer.n_gpus_per_node
        self._weight_dtype = DTYPES[resolve_weight_dtype(config)]
        self._compute_dtype = DTYPES[actor.fsdp.mp_param_dtype]
        # FSDP's own offloading keeps everything in host memory, and moves units to the device.
        self._fsdp_offload = actor.fsdp.enable_cpu_offload and self._on_gpu
        moves = self._on_gpu and not self._fsdp_offload
        self._offload_params = actor.offload.offload_params and moves
        self._offload_optimizer = actor.offload.offload_optimizer and moves and self._trains
        ref = config.worker.ref
        self._has_reference = needs_reference(config) and not size.has_adapters
        self._offload_reference = self._on_gpu and (ref.fsdp.enable_cpu_offload or ref.offload.offload_params)

    # -- what lives on after a phase ------------------------------------------------------------

    def _weights(self) -> int:
        """The policy's weights, as this rank stores them."""
        all_ = self._size.all
        stored = (all_.frozen + all_.trained) * self._weight_dtype.itemsize + all_.adapters * _ADAPTER_BYTES
        return ceil(stored / self._shards)

    def _trained(self) -> Sequence[torch.Tensor]:
        """Tensors with as many elements, and of the same dtypes, as this rank trains."""
        all_ = self._size.all
        shapes = ((all_.trained, self._weight_dtype), (all_.adapters, torch.float32))
        return [torch.empty(number // self._shards, dtype=dtype, device="meta") for number, dtype in shapes if number]

    def _gradients(self) -> int:
        return sum(part.nbytes for part in self._trained()) if self._trains else 0

    def _states(self) -> int:
        strategy = self._config.worker.actor.optim.strategy
        return sum(state_bytes(part, strategy) for part in self._trained()) if self._trains else 0

    def _reference(self) -> int:
        if not self._has_reference:
            return 0
        all_, dtype = self._size.all, DTYPES[resolve_reference_dtype(self._config)]
        return ceil((all_.frozen + all_.trained) * dtype.itemsize / self._shards)

    def _engine_weights(self) -> int:
        """The rollout engine's weights on one rank."""
        all_, rollout = self._size.all, self._config.worker.rollout
        parallel = rollout.tensor_parallel_size if rollout.name == "vllm" else 1
        return ceil((all_.frozen + all_.trained) * DTYPES[rollout.dtype].itemsize / parallel)

    def _cache_of_context(self) -> int:
        """The KV cache of one sequence of maximum length, which vLLM needs at least."""
        rollout = self._config.worker.rollout
        share = max(self._size.key_heads // rollout.tensor_parallel_size, 1) / self._size.key_heads
        return int(context_length(self._config) * self._size.key_values * DTYPES[rollout.dtype].itemsize * share)

    # -- the GPU of a rank ----------------------------------------------------------------------

    def on_device(self) -> Sequence[PhaseMemory]:
        """Return the phases on the GPU of one rank."""
        context = Part("CUDA context, NCCL", CONTEXT_BYTES, 0)
        graphs = Part("CUDA graphs of vLLM", GRAPH_BYTES if self._has_graphs() else 0, 0)
        weights = exactly("weights", 0 if self._fsdp_offload else self._weights())
        at_rest = exactly("weights", 0 if self._offload_params or self._fsdp_offload else self._weights())
        states = exactly("optimizer states", 0 if self._fsdp_offload else self._states())
        states_at_rest = exactly("optimizer states", 0 if self._offload_optimizer else states.certain)
        gradients = exactly("gradients", 0 if self._fsdp_offload else self._gradients())
        reference = exactly("reference model", 0 if self._offload_reference else self._reference())
        awake = exactly("reference model", self._reference())
        synced = self._size.largest * DTYPES[self._config.worker.rollout.dtype].itemsize
        moved = Part("largest tensor, gathered and converted", _SYNC_COPIES * synced, 0)
        phases: list[PhaseMemory] = [
            phase_of("start", "GPU", [at_rest, reference, *self._engine(starts=True), context]),
            phase_of(
                "weight sync",
                "GPU",
                [
                    weights,
                    reference,
                    states_at_rest,
                    exactly("vLLM's weights", self._engine_weights()),
                    moved,
                    graphs,
                    context,
                ],
            ),
            phase_of(
                "sampling", "GPU", [at_rest, reference, states_at_rest, *self._engine(starts=False), graphs, context]
            ),
        ]
        if not self._trains:
            return phases
        score, update = self._score_pass(), self._update_pass()
        scoring = [*self._pass_parts(score), self._gathered(score, updates=False), graphs, context]
        updating = [*self._pass_parts(update), self._gathered(update, updates=True), graphs, context]
        in_update = awake if kl_is_full(self._config) else reference
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

    def _has_graphs(self) -> bool:
        rollout = self._config.worker.rollout
        return rollout.name == "vllm" and not rollout.enforce_eager

    def _engine(self, *, starts: bool) -> list[Part]:
        """The rollout engine while it samples: vLLM takes a fixed share of the GPU.

        starts: vLLM refuses to start if its share is not free.
        """
        rollout, weights = self._config.worker.rollout, self._engine_weights()
        if rollout.name != "vllm":
            return [exactly("rollout engine's weights", weights)]
        share = int(rollout.gpu_memory_utilization * self._hardware.device_bytes)
        needed = weights + self._cache_of_context()
        certain = max(share - (0 if starts else WORKSPACE_BYTES), needed) - weights
        return [
            exactly("vLLM's weights", weights),
            Part("vLLM's KV cache and workspace", max(share, needed) - weights, certain),
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
                full_kl=kl_is_full(config),
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
        parameters, rollout = self._size.all.frozen + self._size.all.trained, self._config.worker.rollout
        process = self._of_ranks("processes", PROCESS_BYTES, 0)
        caches = self._of_ranks("caches of images and features", self._cache_bytes(), 0)
        # A process with a GPU of its own converts the weights on the CPU. With several, rank 0 maps
        # the files, and sends each rank its part.
        full = parameters * self._weight_dtype.itemsize if num_workers(self._config) == 1 and self._on_gpu else 0
        reading = exactly("model, as it is read", full)
        kept = self._kept_on_host()
        copy = self._of_ranks("copy of the checkpoint", self._staged() if self._trains else 0, 0)
        if self._on_gpu:
            return [
                phase_of("start", "host", [reading, process]),
                phase_of("sampling", "host", [*kept, caches, process]),
                phase_of("save", "host", [*kept, copy, caches, process]),
            ]
        engine = self._of_ranks("rollout engine's weights", self._engine_weights(), self._engine_weights())
        cache = self._of_ranks("vLLM's KV cache", CPU_CACHE_BYTES if rollout.name == "vllm" else 0, 0)
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
                    self._of_ranks(gathered.name, gathered.expected, gathered.certain),
                    engine,
                    cache,
                    caches,
                    process,
                ],
            ),
            phase_of("save", "host", [*kept, copy, engine, cache, caches, process]),
        ]

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
        if num_workers(config) == 1:
            return features
        patches = config.data.max_prompt_length * dimensions.vision.merge**2
        prompts = ceil(config.data.rollout_batch_size / num_workers(config))
        return features + min(PIXEL_CACHE_BYTES, prompts * patches * dimensions.vision.values_per_patch * 4)

    def _of_ranks(self, name: str, expected: int, certain: int) -> Part:
        """The same on all ranks of a node."""
        return Part(name, expected * self._ranks, certain * self._ranks)


def longest_row(config: Config, dimensions: Dimensions, max_tokens: int) -> RowLengths:
    """Return the row of a pass with this budget that takes most memory: prompts full of images."""
    data = config.data
    prompt, response = data.max_prompt_length, data.max_response_length
    completions = max(1, min(config.worker.rollout.n, (max_tokens - prompt) // response))
    group = prompt + completions * response
    patches = 0 if dimensions.vision is None else prompt * dimensions.vision.merge**2
    return RowLengths(
        groups=max(1, max_tokens // group),
        prompt=prompt,
        completions=completions,
        response=response,
        patches=patches,
        image_patches=patches,
    )
