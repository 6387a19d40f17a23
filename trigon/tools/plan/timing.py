"""The time of each phase of a step, from its work, the hardware, and stated efficiencies.

    passes      max(operations / rate, bytes that FSDP gathers / rate) + what each pass costs anyway
    decoding    steps of max(bytes read / rate, operations / rate) + what each step costs anyway

Workers that learn and sample in turns take the sum of the phases, and so do separate ones with
algorithm.max_staleness=0. With a larger one both work at a time: a step takes as long as the phases
of the slower pool, and the weight sync.

Nothing here was measured on a GPU. A run of the same machine replaces the efficiencies by what it
measured, see calibration.py. Not counted before that: rewards, waiting for data, and the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil

from trigon.config.names import DeviceType
from trigon.config.schema import Config
from trigon.models.dimensions import Dimensions
from trigon.models.dtypes import DTYPES
from trigon.models.memory import ModelSize
from trigon.tools.plan.hardware import Cluster
from trigon.tools.plan.lengths import Lengths
from trigon.tools.plan.work import TRIGON, Ledger, StepFlops, Trainer

PHASES = ("data", "weights", "gen", "reward", "parity", "old", "ref", "update_actor", "other")
"""The phases of a step, by the names of timing_s/ in the metrics, in their order."""

SAMPLING = ("data", "gen", "reward", "parity")
"""The phases during which workers that sample are busy. All others but the weight sync are of those
that learn.
"""

NOT_COUNTED = ("data", "reward", "parity", "other")
"""Those that depend on the host and on user code; 0 unless a run calibrates the plan."""


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What share of a specification figure a run gets, and what a pass costs whatever its size.

    passes: of the peak, in forward and backward passes. prefill: of the peak, while sampling.
    memory: of the memory's bandwidth. link: of the link between devices, and to host memory.
    layer_seconds: of one layer's forward, on the host: kernels are launched one by one.
    decode_seconds: of one decoding step, beyond reading and computing.
    """

    passes: float
    prefill: float
    memory: float
    link: float
    layer_seconds: float
    decode_seconds: float


EFFICIENCIES: Mapping[DeviceType, Efficiencies] = {
    "cuda": Efficiencies(passes=0.35, prefill=0.5, memory=0.6, link=0.7, layer_seconds=0.5e-3, decode_seconds=3e-3),
    "cpu": Efficiencies(passes=0.5, prefill=0.5, memory=0.5, link=0.5, layer_seconds=0.5e-3, decode_seconds=5e-3),
}

_REDUCE_LATENCY = 15e-6  # of an all-reduce within a node
_TAIL_SHARE = 0.125  # of the sequences of a batch, those that still run when most have ended


NODE_GPUS = 8
"""The most GPUs of a machine that are assumed to be linked to each other."""


def may_share_node(config: Config) -> bool:
    """Return whether separate pools of workers are assumed to be GPUs of one machine."""
    one_machine = config.trainer.nnodes == config.worker.rollout.nnodes == 1
    return one_machine and config.num_workers + config.num_samplers <= NODE_GPUS


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of the phases of a step, by name.

    calibrated: factors came from a run. steps_ahead: for which is sampled at most, during a step.
    """

    phases: Mapping[str, float]
    calibrated: bool
    steps_ahead: int = 0

    @property
    def overlaps(self) -> bool:
        """Whether one pool samples while the other learns."""
        return self.steps_ahead > 0

    @property
    def total(self) -> float:
        """The seconds of a step, without validation and checkpoints."""
        if self.overlaps:
            return self.phases["weights"] + max(self.sampling, self.learning)
        return sum(self.phases.values())

    @property
    def sampling(self) -> float:
        """The seconds of a step in which those that only sample are busy, without weight syncs."""
        return sum(self.phases[name] for name in SAMPLING)

    @property
    def learning(self) -> float:
        """The seconds of a step in which those that only learn are busy, without weight syncs."""
        return sum(seconds for name, seconds in self.phases.items() if name not in (*SAMPLING, "weights"))


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one device moves in a step.

    weight_sync: gathered for the rollout engine. sent: received by a worker that only samples.
    gathers: weights that FSDP gathers for passes. gradients: reduced over the ranks. offload: to
    and from host memory.
    """

    weight_sync: float
    gathers: float
    gradients: float
    offload: float
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What one rollout engine takes.

    max_sequences: that it decodes at a time. decode_step: seconds in which each of so many
    sequences gets one token. prompt_seconds: to prefill the mean prompt. token_seconds: to prefill
    one token of a completion.
    """

    max_sequences: int
    decode_step: Callable[[int], float]
    prompt_seconds: float
    token_seconds: float


class Timing:
    """The time and the bytes of a step."""

    def __init__(
        self,
        config: Config,
        size: ModelSize,
        dimensions: Dimensions | None,
        lengths: Lengths,
        ledger: Ledger,
        flops: StepFlops,
        cluster: Cluster,
        device: DeviceType,
        *,
        trainer: Trainer = TRIGON,
    ) -> None:
        self._config, self._size, self._dimensions = config, size, dimensions
        self._lengths, self._ledger = lengths, ledger
        self._flops = self.flops = flops
        self._cluster, self._device, self._trainer = cluster, device, trainer
        self._rates = EFFICIENCIES[device]
        self._devices, self._samplers = config.num_workers, config.num_samplers
        self._shards = config.workers_per_copy
        self._parameters = size.all.frozen + size.all.trained
        self._compute_bytes = DTYPES[config.worker.actor.fsdp.mp_param_dtype].itemsize
        self._peak = cluster.accelerator.flops
        self._memory_rate = cluster.accelerator.memory_rate * self._rates.memory
        self._host_rate = cluster.accelerator.host_rate * self._rates.link

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase; 0 for those that are not counted."""
        ledger, flops = self._ledger, self._flops
        fsdp = self._config.worker.actor.fsdp
        forwards = 4 if self._config.worker.actor.model.enable_gradient_checkpointing else 3
        gathers_per_pass = 2 if fsdp.enable_full_shard else 1
        moved = self.bytes()
        update = self._passes(
            flops.computed,
            passes=ledger.updates * ledger.update_rows,
            forwards=forwards,
            sent=self._gathered(gathers_per_pass * ledger.updates * ledger.update_rows) + moved.gradients,
            copied=self._offloaded_inputs(),
        )
        score_sent = self._gathered(ledger.score_rows)
        score = {
            name: self._passes(work, passes=ledger.score_rows, forwards=1, sent=score_sent) if work else 0.0
            for name, work in (("old", flops.old), ("ref", flops.reference))
        }
        reference = self._parameters * DTYPES[self._config.worker.ref.dtype].itemsize / self._shards
        if score["ref"] and not self._size.has_adapters and self._reference_is_offloaded():
            score["ref"] += 2 * reference / self._host_rate
        return {
            **dict.fromkeys(NOT_COUNTED, 0.0),
            "weights": self._sync_seconds(moved),
            "gen": self._sampling_seconds(ledger.sampled_prompts * ledger.completions, flops.prefill, flops.decode),
            "old": score["old"],
            "ref": score["ref"],
            "update_actor": update + ledger.updates * self._optimizer_seconds() + self._offload() / self._host_rate,
        }

    def validation_seconds(self, num_prompts: int) -> float:
        """Return the seconds of a validation of so many prompts."""
        rollout = self._config.worker.rollout
        sequences = num_prompts * (rollout.val_override_config.n or self._config.group_size)
        share = sequences / self._ledger.sampled
        return self._sampling_seconds(
            sequences, self._flops.prefill * num_prompts / self._ledger.sampled_prompts, self._flops.decode * share
        )

    def engine(self) -> EngineTimes:
        """Return what one rollout engine takes, for the completions of the step."""
        ledger, parallel = self._ledger, self._parallel()
        rate = self._peak * self._rates.prefill * parallel
        work = self._decode_operations(ledger.sampled_prompts * ledger.completions, self._flops.decode)
        return EngineTimes(
            max_sequences=self._most_sequences(parallel),
            decode_step=partial(self._decode_step, parallel=parallel, operations=work / parallel),
            prompt_seconds=self._flops.prefill / ledger.sampled_prompts / rate,
            token_seconds=work / rate,
        )

    def bytes(self) -> StepBytes:
        """Return what one device moves in a step."""
        ledger, fsdp = self._ledger, self._config.worker.actor.fsdp
        rollout = self._config.worker.rollout
        others = (self._shards - 1) / self._shards
        passes = ledger.updates * ledger.update_rows * (2 if fsdp.enable_full_shard else 1)
        scores = ledger.score_rows * ((self._flops.old > 0) + (self._flops.reference > 0))
        all_ = self._size.all
        trained = all_.trained + all_.adapters
        reductions = ledger.updates * (ledger.update_rows if self._trainer.reduces_every_pass else 1)
        reduced = trained * DTYPES[fsdp.mp_reduce_dtype].itemsize
        replicas = self._devices // self._shards
        return StepBytes(
            weight_sync=self._parameters * DTYPES[rollout.dtype].itemsize * others,
            gathers=self._gathered(passes + scores),
            # With several copies of the model, each shard is also summed over the copies.
            gradients=reductions * reduced * (others + (2 / self._shards if replicas > 1 else 0)),
            offload=self._offload() + 2 * self._offloaded_inputs(),
            sent=0.0 if self._config.worker.hybrid_engine else self._parameters * DTYPES[rollout.dtype].itemsize,
        )

    def _gathered(self, passes: float) -> float:
        return passes * self._parameters * self._compute_bytes * (self._shards - 1) / self._shards

    def _offload(self) -> float:
        """The bytes of weights and states that are moved to host memory and back."""
        actor = self._config.worker.actor
        if self._device == "cpu":
            return 0.0
        weights = self._parameters * DTYPES[self._config.worker.actor.weight_dtype].itemsize / self._shards
        states = 2 * weights * self._size.all.trained / max(1, self._parameters)
        return 2 * (weights * actor.offload.offload_params + states * actor.offload.offload_optimizer)

    def _offloaded_inputs(self) -> float:
        """The bytes of inputs of layers that one device copies to host memory, and then back."""
        model, dimensions = self._config.worker.actor.model, self._dimensions
        if not model.enable_activation_offload or dimensions is None or self._device == "cpu":
            return 0.0
        text, vision, ledger = dimensions.text, dimensions.vision, self._ledger
        values = ledger.row_tokens * text.layers * text.width
        if vision is not None and self._size.trains_vision:
            prompts = ledger.prompts * ledger.epochs * ledger.learned_groups_share
            values += prompts * self._lengths.mean_image_patches * vision.layers * vision.width
        weight = DTYPES[self._config.worker.actor.weight_dtype].itemsize
        return values / self._devices * (weight if self._shards == 1 else self._compute_bytes)

    def _reference_is_offloaded(self) -> bool:
        ref = self._config.worker.ref
        return self._device == "cuda" and (ref.fsdp.enable_cpu_offload or ref.offload.offload_params)

    def _link_rate(self) -> float:
        """Bytes per second that a rank gathers from the others of its copy of the model.

        Rings go through all network ports of a node at once.
        """
        rate = self._cluster.accelerator.link_rate
        if self._shards > self._cluster.gpus_per_node:
            rate = min(rate, self._cluster.network_rate * self._cluster.gpus_per_node)
        return rate * self._rates.link

    def _passes(self, operations: float, *, passes: float, forwards: int, sent: float, copied: float = 0.0) -> float:
        """Return the seconds of passes. copied: bytes to host memory in forwards, then back."""
        computing = operations / self._devices / (self._peak * self._rates.passes)
        layers = self._num_layers()
        if copied:
            copying, forward = copied / self._host_rate, computing / forwards
            computing = max(forward, copying) + max(computing - forward, copying)
        return max(computing, sent / self._link_rate()) + passes * forwards * layers * self._rates.layer_seconds

    def _num_layers(self) -> int:
        return len(self._size.layers)

    def _optimizer_seconds(self) -> float:
        """One optimizer step: it reads and writes weights, gradients and both moments."""
        all_ = self._size.all
        trained = all_.trained + all_.adapters
        return 8 * 4 * trained / self._shards / self._memory_rate

    def _sync_seconds(self, moved: StepBytes) -> float:
        rollout = self._config.worker.rollout
        loaded = self._parameters * DTYPES[rollout.dtype].itemsize
        gathering = moved.weight_sync / self._link_rate()
        # The next tensors are gathered while others are sent.
        return max(gathering, moved.sent / self._sending_rate()) + 3 * loaded / self._memory_rate

    def _sending_rate(self) -> float:
        """Bytes per second that samplers receive: one learner broadcasts to all of them."""
        accelerator = self._cluster.accelerator
        rate = accelerator.link_rate if may_share_node(self._config) else self._cluster.network_rate
        return rate * self._rates.link

    def _sampling_seconds(self, sequences: int, prefill: float, decode: float) -> float:
        """Return the seconds in which all engines together sample so many completions.

        prefill, decode: operations. Each engine holds as many sequences at a time as its KV cache
        takes; at the end the longest completions run nearly alone.
        """
        lengths, rates, parallel = self._lengths, self._rates, self._parallel()
        engines = max(1, self._samplers // parallel)
        each = ceil(sequences / engines)
        response = max(1.0, lengths.response_tokens)
        at_once = min(each, self._most_sequences(parallel))
        work = self._decode_operations(sequences, decode) / parallel  # on one device
        if lengths.longest_response == response:  # all have one length
            seconds = ceil(each / at_once) * response * self._decode_step(at_once, parallel, work)
        else:
            seconds = each * response / at_once * self._decode_step(at_once, parallel, work)
            tail = max(1, round(at_once * _TAIL_SHARE))
            seconds += (lengths.longest_response - response) * self._decode_step(tail, parallel, work)
        return prefill / engines / parallel / (self._peak * rates.prefill) + seconds

    def _parallel(self) -> int:
        rollout = self._config.worker.rollout
        return rollout.tensor_parallel_size if rollout.name == "vllm" else 1

    def _decode_operations(self, sequences: int, decode: float) -> float:
        """Return the operations of one token, of those of so many completions."""
        return decode / max(1.0, sequences * max(1.0, self._lengths.response_tokens))

    def _most_sequences(self, parallel: int) -> int:
        """Return how many sequences of mean length an engine holds at a time."""
        rollout, lengths = self._config.worker.rollout, self._lengths
        limit = self._config.worker.rollout.max_num_seqs_on(self._device)
        if self._device == "cpu" or rollout.name != "vllm":
            return limit
        itemsize = DTYPES[rollout.dtype].itemsize
        free = rollout.gpu_memory_utilization * self._cluster.accelerator.memory_bytes
        free -= self._parameters * itemsize / parallel + 4 * 2**30
        shared = self._config.group_size if rollout.enable_prefix_caching else 1
        tokens = lengths.mean_prompt / shared + lengths.completion_tokens / 2
        return max(1, min(limit, int(free / (tokens * self._key_values(parallel) * itemsize))))

    def _key_values(self, parallel: int) -> float:
        """Return the keys and values of a token on one device."""
        return self._size.key_values / min(parallel, self._size.key_heads)

    def _decode_step(self, sequences: int, parallel: int, operations: float) -> float:
        """Return the seconds in which one token of each of these sequences is decoded."""
        itemsize = DTYPES[self._config.worker.rollout.dtype].itemsize
        tokens = self._lengths.mean_prompt + self._lengths.completion_tokens / 2
        weights = self._weights_read(sequences) * itemsize / parallel
        read = weights + sequences * tokens * self._key_values(parallel) * itemsize
        seconds = max(read / self._memory_rate, sequences * operations / (self._peak * self._rates.prefill))
        if parallel > 1 and self._dimensions is not None:
            text = self._dimensions.text
            sent = 2 * sequences * text.width * itemsize / (self._cluster.accelerator.link_rate * self._rates.link)
            seconds += 2 * text.layers * (_REDUCE_LATENCY + sent)
        return seconds + self._rates.decode_seconds

    def _weights_read(self, sequences: int) -> float:
        """Return the weights that a decoding step reads: of experts, those that get a token."""
        text = None if self._dimensions is None else self._dimensions.text
        if text is None or not text.experts:
            return float(self._parameters)
        experts = text.moe_layers * text.experts * 3 * text.width * text.expert_mlp
        used = min(1.0, sequences * text.experts_per_token / text.experts)
        return self._parameters - experts * (1 - used)
