"""The worker process: a rank of the sharded trainer and a rollout engine on the same device.

Weight syncs from the trainer to the rollout engine stay inside the process; calls carry serialized
bytes (serialization.py). Does not depend on how engines are built: the function that builds them is
an argument.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from torch import Tensor

from trigon.data.media_processing import MediaProcessor
from trigon.distributed.cluster import set_environment
from trigon.distributed.preflight import NodeReport
from trigon.distributed.recent_files import RecentFiles
from trigon.distributed.rendezvous import listen_at, open_store
from trigon.distributed.serialization import (
    decode_prompts,
    decode_rollouts,
    decode_train,
    encode_completions,
    encode_logprobs,
    group_parts,
)
from trigon.metrics import Metrics
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import RestartableEngine
from trigon.system.garbage import return_freed_memory, set_gc_threshold
from trigon.system.gpu_memory import gpu_memory_metrics
from trigon.system.network import LOOPBACK
from trigon.system.signals import ignore_stop_signals
from trigon.system.stacks import register_stacks
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.fsdp import Rendezvous, TorchProcessGroup
from trigon.training.memory import memory_of
from trigon.training.protocol import LogprobEngine, Sizes, TunableEngine
from trigon.training.trace import LocalTracer
from trigon.types import Completion, Prompt, RolloutGroup, SamplingParams, TrainGroup
from trigon.watch.meter import measure_worker

Group = TypeVar("Group", RolloutGroup, TrainGroup)
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class WorkerEngines:
    """The engines of one worker.

    reference: None if no loss term needs one. images: loads the pixels of prompts to be sampled;
    trainer and reference load from it themselves. None for a text model. replica_rank: this
    worker's index among the ranks that sample the same prompts together (tensor parallelism); only
    index 0 returns the completions. has_episodes: completions have environments or tools.
    """

    trainer: TunableEngine
    reference: LogprobEngine | None
    rollout: RolloutEngine
    images: MediaProcessor | None
    replica_rank: int
    has_episodes: bool = False


class OpenWorkerEngines(Protocol):
    """Builds a worker's engines. Called in the worker, on all ranks at once."""

    def __call__(self, process_group: TorchProcessGroup) -> WorkerEngines: ...


class JoinRanks(Protocol):
    """Joins the process group and inspects the node. Called in the worker, on all ranks at once."""

    def __call__(self, rendezvous: Rendezvous) -> tuple[TorchProcessGroup, NodeReport]: ...


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """What a heartbeat should include besides memory use.

    with_stack: the Python stack of the method that is running. generation: the number of a call of
    Worker.generate whose progress is requested; 0 for none. skip_groups: how many of its finished
    groups the driver already has.
    """

    with_stack: bool = False
    generation: int = 0
    skip_groups: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The state of a worker.

    memory_bytes, max_memory_bytes: resident memory, current and peak. stack: the innermost call
    last; "" unless requested. num_samples: completions finished so far in the requested generation.
    groups: its finished groups in the order in which they finished, less skip_groups: the index of
    the prompt and the encoded completions.
    """

    memory_bytes: int
    max_memory_bytes: int
    stack: str
    num_samples: int
    groups: tuple[tuple[int, bytes], ...]


@dataclass(slots=True)
class _Generation:
    """The progress of one call of Worker.generate. number: as in HeartbeatRequest; 0 for none."""

    number: int
    num_samples: int = 0
    groups: list[tuple[int, bytes]] = field(default_factory=list)


def _concurrent(group: str) -> Callable[[Method], Method]:
    """Mark a method that Ray runs beside the others, in the thread of this concurrency group."""
    decorator: Callable[[Method], Method] = ray.method(concurrency_group=group)
    return decorator


class Worker:
    """The Ray actor of one rank.

    Ray runs its methods one at a time, in one thread and in the order of the calls. Only heartbeat,
    and stage_state and write_state, have threads of their own.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._generation = _Generation(0)
        self._thread: int | None = None
        self._awake_contexts: list[ExitStack] = []
        self._write_state: Callable[[], None] | None = None
        self._environment: Mapping[str, str] = {}
        self._listener: socket.socket | None = None
        self._process_group: TorchProcessGroup
        self._tracer: LocalTracer
        self._engines: WorkerEngines | None = None
        self._files = RecentFiles(keeps_content=True)
        # Sampling does not use the trainer: its state can be saved meanwhile.
        self._trainer_in_use = threading.Lock()
        set_gc_threshold()
        faulthandler.enable()  # a crash then writes its stack to the log of this worker
        register_stacks()
        ignore_stop_signals()  # the driver, which saves first, ends this process

    def __repr__(self) -> str:  # the prefix of each line that this worker prints
        return f"rank {self._rank}"

    def host(self) -> tuple[str, int]:
        """Return the host name and the process id."""
        return socket.gethostname(), os.getpid()

    def listen(self, *, loopback: bool) -> tuple[str, int]:
        """Open the port of the ranks' store, and return its address. For rank 0.

        loopback: listen on the loopback address, for ranks on one node; else on this node's address
        within the cluster.
        """
        self._listener = listen_at(LOOPBACK if loopback else ray.util.get_node_ip_address())
        host, port = self._listener.getsockname()
        return host, port

    def prepare(self, environment: Mapping[str, str], *, loopback: bool) -> None:
        """Set environment variables. Runs in the thread that all other methods will use."""
        self._thread = threading.get_ident()
        set_environment(environment, address=None if loopback else ray.util.get_node_ip_address())
        self._environment = environment

    def join(self, join_ranks: JoinRanks) -> NodeReport:
        """Join the process group, and return the report about this node."""
        size = int(self._environment["WORLD_SIZE"])
        store = open_store(
            self._environment["MASTER_ADDR"],
            int(self._environment["MASTER_PORT"]),
            size=size,
            listener=self._listener,
        )
        self._process_group, report = join_ranks(Rendezvous(self._rank, size, store))
        return report

    def open(self, open_worker_engines: OpenWorkerEngines) -> Sizes:
        """Build the engines, and return the sizes of the trainer's model."""
        self._engines = open_worker_engines(self._process_group)
        return self._engines.trainer.sizes()

    def tune_micro_batch(self, lengths: Lengths, known: Budgets | None, num_sharing: int) -> Budgets:
        """Find and set the number of tokens per pass. num_sharing: workers on this machine."""
        engines = self._require_engines
        memory = memory_of(self._process_group.device, shared_by=num_sharing)
        return tune_engines(engines.trainer, engines.reference, memory, lengths, self._process_group, known=known)

    # -- rollout --

    def wake(self, version: int) -> None:
        """Wake the rollout engine and sync the trainer's weights to it. Collective."""
        if self._require_engines.images is not None:
            self._require_engines.images.start_step()
        context = ExitStack()
        with self._trainer_in_use:
            context.enter_context(
                self._require_engines.rollout.awake(self._require_engines.trainer.weights(), version=version)
            )
        self._awake_contexts.append(context)

    def sleep(self) -> None:
        """Undo the last wake()."""
        self._awake_contexts.pop().close()

    def generate(self, prompts: bytes, sampling: SamplingParams, step: int, generation: int) -> None:
        """Sample completions, which the heartbeats that request this generation number return.

        Of the ranks that sample the same prompts together, only the first returns completions.
        """
        self._generation = progress = _Generation(generation)
        returns_completions = self._require_engines.replica_rank == 0

        def on_progress(num_finished: int | None) -> None:
            progress.num_samples += num_finished or 0

        def on_group(index: int, completions: Sequence[Completion]) -> None:
            progress.groups.append((index, encode_completions([completions])))

        self._require_engines.rollout.generate(
            self._load_pixels(decode_prompts(prompts, self._files)),
            sampling,
            step=step,
            on_progress=on_progress if returns_completions else None,
            on_group=on_group if returns_completions else None,
        )

    def restart_rollout(self) -> None:
        """Start the rollout engine anew, asleep. Collective: vLLM's start is."""
        while self._awake_contexts:  # of ranks on which the last wake() did not fail
            self._awake_contexts.pop().close()
        rollout = self._require_engines.rollout
        assert isinstance(rollout, RestartableEngine), "the driver restarts no other engine"
        self._require_engines.trainer.offload()
        rollout.restart()

    def pop_rollout_metrics(self) -> Metrics:
        """Return the counts and the memory of the rollout engine.

        Memory alone for all but the first rank of a replica: they count the same requests.
        """
        metrics = self._require_engines.rollout.pop_metrics()
        if self._require_engines.replica_rank == 0:
            return metrics
        return {name: metric for name, metric in metrics.items() if name.startswith("perf/")}

    # -- training --

    def logprobs(self, groups: bytes) -> bytes:
        """Compute the policy's log-probabilities of this rank's groups."""
        return self._compute(self._require_engines.trainer.logprobs, groups)

    def token_logprobs(self, groups: bytes) -> bytes:
        """Compute the policy's log-probabilities and entropies of this rank's groups.

        Returns: encoded, for each group the log-probabilities of its completions, then the
        entropies.
        """
        trainer = self._require_engines.trainer

        def compute(rollouts: Sequence[RolloutGroup]) -> list[list[Tensor]]:
            scored = trainer.token_logprobs(rollouts)
            return [[*(each.logprobs for each in group), *(each.entropy for each in group)] for group in scored]

        return self._compute(compute, groups)

    def full_kl(self, groups: bytes) -> bytes:
        """Compute the full-vocabulary KL divergence from the reference for this rank's groups."""
        return self._compute(self._require_engines.trainer.full_kl, groups)

    def reference_logprobs(self, groups: bytes) -> bytes:
        """Compute the reference's log-probabilities of this rank's groups."""
        assert self._require_engines.reference is not None
        return self._compute(self._require_engines.reference.logprobs, groups)

    def step(self, groups: bytes) -> Metrics:
        """Make one optimizer update, with this rank's share of the groups. Collective.

        Returns: this rank's metrics; those of all ranks, merged, are the metrics of the update.
        """
        engines = self._require_engines
        with self._trainer_in_use:
            metrics = engines.trainer.step(self._keep_files(decode_train(groups, self._files)))
        images = {} if engines.images is None else engines.images.pop_metrics()
        return {**metrics, **images, **gpu_memory_metrics(), **measure_worker()}

    # -- traces --

    def start_trace(self, folder: Path) -> None:
        """Start to trace this worker."""
        self._tracer = LocalTracer(folder, rank=self._rank)
        self._tracer.start()

    def finish_trace(self, step: int) -> None:
        """End the trace and write it."""
        self._tracer.finish(step)

    # -- state --

    @_concurrent("saving")
    def stage_state(self, folder: Path, model_only: bool) -> None:
        """Copy the state for a checkpoint to host memory; write_state() writes it.

        Runs beside generate(), which a run that is asked to stop does not wait for, and after any
        other method.
        """
        with self._trainer_in_use:
            self._write_state = self._require_engines.trainer.save_state(folder, model_only=model_only)

    @_concurrent("saving")
    def write_state(self) -> None:
        """Write the staged state. Runs beside other methods."""
        assert self._write_state is not None, "stage_state() has not been called"
        write, self._write_state = self._write_state, None
        write()
        del write
        return_freed_memory()

    def load_state(self, folder: Path) -> None:
        """Load this rank's part of a checkpoint, which any number of ranks may have written."""
        self._require_engines.trainer.load_state(folder)

    @_concurrent("heartbeat")
    def heartbeat(self, request: HeartbeatRequest) -> Heartbeat:
        """Return the state of this worker. Runs beside other methods, and changes nothing."""
        latest = self._generation
        # The driver may ask for a generation that has not begun; then it has no progress yet.
        generation = latest if latest.number == request.generation else _Generation(request.generation)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        frame = sys._current_frames().get(self._thread) if request.with_stack and self._thread is not None else None
        return Heartbeat(
            memory_bytes=pages * resource.getpagesize(),
            max_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            stack="" if frame is None else "".join(traceback.format_stack(frame)),
            num_samples=generation.num_samples,
            groups=tuple(generation.groups[request.skip_groups :]),
        )

    @property
    def _require_engines(self) -> WorkerEngines:
        assert self._engines is not None, "open() has not been called"
        return self._engines

    def _compute(self, compute: Callable[[Sequence[RolloutGroup]], list[list[Tensor]]], groups: bytes) -> bytes:
        """Return the encoded result of a function of groups: a tensor for each completion."""
        with self._trainer_in_use:
            return encode_logprobs(compute(self._keep_files(decode_rollouts(groups, self._files))))

    def _load_pixels(self, prompts: list[Prompt]) -> list[Prompt]:
        """Keep the files of a message's prompts, and return the prompts with their pixels.

        With episodes as they are: environments get the files, and the engine loads the pixels.
        """
        self._files.add(prompts)
        images = self._require_engines.images
        return prompts if images is None or self._require_engines.has_episodes else images.process(prompts)

    def _keep_files(self, groups: list[Group]) -> list[Group]:
        """Keep the files of a message's groups, and return the groups."""
        self._files.add(group_parts(groups))
        return groups


def ray_actor_class(worker_class: type[Worker]) -> Any:
    """Return the Ray actor class of a worker class."""
    return ray.remote(concurrency_groups={"heartbeat": 1, "saving": 1})(worker_class)
