"""The worker process: a rank of the sharded trainer, a rollout engine, or both on the same device.

With both, weight syncs from the trainer to the rollout engine stay inside the process; otherwise
weights come from the workers that train (weight_transfer.py). Calls carry messages
(messages.py). Does not depend on how engines are built: the function that builds them is an
argument.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from trigon.data.media_processing import MediaProcessor
from trigon.distributed.cluster import set_environment
from trigon.distributed.messages import Message, pack, unpack
from trigon.distributed.preflight import NodeReport
from trigon.distributed.rendezvous import open_store
from trigon.distributed.weight_transfer import TransferAddress, TransferMember
from trigon.environments.pool import EnvironmentPool
from trigon.metrics import Metrics
from trigon.report.memory_growth import measure_worker
from trigon.rollout.protocol import Interruption, InterruptKind, RolloutEngine, require_local_weights
from trigon.rollout.restart import Restartable
from trigon.system.hangs import register_stacks
from trigon.system.machine import LOOPBACK, gpu_memory_metrics
from trigon.system.process_settings import let_segments_grow, return_freed_memory, set_gc_threshold
from trigon.system.processes import count_resident_bytes
from trigon.system.stopping import ignore_stop_signals
from trigon.system.trace import LocalTracer
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.device_memory import host_memory_for, memory_of
from trigon.training.fsdp import Rendezvous, TorchProcessGroup
from trigon.training.local import LocalTrainEngine
from trigon.training.protocol import GroupOutputs, LogprobEngine
from trigon.types import Completion, Prompt, RolloutGroup, SamplingParams, WeightsHandle

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The state of a worker.

    memory_bytes, max_memory_bytes: resident memory, current and peak. num_samples: completions
    finished so far in the requested generation. groups: its finished groups in the order in which
    they finished, less skip_groups: the index of the prompt and the message with its completions.
    """

    memory_bytes: int
    max_memory_bytes: int
    num_samples: int
    groups: tuple[tuple[int, Message], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WorkerEngines:
    """The engines of one worker.

    trainer, rollout: None in a worker that only samples, or only trains. reference: None if no loss
    term needs one. images: loads the pixels of prompts to be sampled; trainer and reference load
    from it themselves. None for a text model. replica_rank: this worker's index among the ranks
    that sample the same prompts together (tensor parallelism); only index 0 returns the
    completions. environments: the environments or tools of rollout, which then loads the pixels of
    prompts itself; None without them, and in the ranks of a replica other than index 0. critic:
    None except for the estimator gae.
    """

    trainer: LocalTrainEngine | None
    reference: LogprobEngine | None
    rollout: RolloutEngine | None
    images: MediaProcessor | None
    replica_rank: int
    environments: EnvironmentPool | None = None
    critic: LocalCriticEngine | None = None


@dataclass(slots=True)
class _Generation:
    """The progress of one call of Worker.generate. number: of the call; 0 for none."""

    number: int
    num_samples: int = 0
    groups: list[tuple[int, Message]] = field(default_factory=list)
    interruption: Interruption = field(default_factory=Interruption)


def _concurrent(group: str) -> Callable[[Method], Method]:
    """Mark a method that Ray runs beside the others, in the thread of this concurrency group."""
    decorator: Callable[[Method], Method] = ray.method(concurrency_group=group)
    return decorator


class Worker:
    """The Ray actor of one rank.

    Ray runs its methods one at a time, in one thread and in the order of the calls. Only heartbeat,
    and stage_state and write_state, have threads of their own.
    """

    def __init__(self, rank: int, role: str = "") -> None:
        self._rank = rank
        self._role = role
        self._generation = _Generation(0)
        self._thread = 0  # that runs all methods but the concurrent ones
        self._awake_contexts: list[ExitStack] = []
        self._write_state: Callable[[], None] | None = None
        self._listener: socket.socket | None = None
        self._process_group: TorchProcessGroup
        self._tracer: LocalTracer
        self._engines: WorkerEngines | None = None
        self._transfer: TransferMember
        # Sampling does not use the trainer: its state can be saved meanwhile.
        self._trainer_in_use = threading.Lock()
        set_gc_threshold()
        let_segments_grow()  # `ray start` on other machines does not set it
        faulthandler.enable()  # a crash then writes its stack to the log of this worker
        register_stacks()
        ignore_stop_signals()  # the driver, which saves first, ends this process

    def __repr__(self) -> str:  # the prefix of each line that this worker prints
        return f"{self._role} rank {self._rank}".lstrip()

    def host(self) -> tuple[str, int]:
        """Return the host name and the process id."""
        return socket.gethostname(), os.getpid()

    def listen(self, *, loopback: bool) -> tuple[str, int]:
        """Open the port of the ranks' store, and return its address. For rank 0.

        loopback: listen on the loopback address, for ranks on one node; else on this node's address
        within the cluster.
        """
        self._listener = socket.create_server((LOOPBACK if loopback else ray.util.get_node_ip_address(), 0))
        host, port = self._listener.getsockname()
        return host, port

    def prepare(self, environment: Mapping[str, str], *, loopback: bool) -> None:
        """Set environment variables. Runs in the thread that all other methods will use."""
        self._thread = threading.get_ident()
        set_environment(environment, address=None if loopback else ray.util.get_node_ip_address())

    def join(self, join_ranks: Callable[[Rendezvous], tuple[TorchProcessGroup, NodeReport]]) -> NodeReport:
        """Join the process group, and return the report about this node. Collective."""
        size, port = int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
        store = open_store(os.environ["MASTER_ADDR"], port, size=size, listener=self._listener)
        self._process_group, report = join_ranks(Rendezvous(self._rank, size, store))
        self._transfer = TransferMember(self._process_group.device)
        return report

    def open(self, open_engines: Callable[[TorchProcessGroup], WorkerEngines]) -> None:
        """Build the engines. Collective."""
        self._engines = open_engines(self._process_group)
        # vLLM collects garbage at each sleep and waking, which need not scan what is there now.
        gc.collect()
        gc.freeze()

    def tune_micro_batch(self, lengths: Lengths, known: Budgets | None, num_sharing: int) -> Budgets:
        """Find and set the number of tokens per pass. num_sharing: workers on this machine."""
        memory = memory_of(self._process_group.device, shared_by=num_sharing)
        engines = self._require_engines
        return tune_engines(
            self._trainer,
            engines.reference,
            memory,
            lengths,
            self._process_group,
            known=known,
            critic=engines.critic,
            host_bytes=host_memory_for(self._process_group.device, shared_by=num_sharing),
        )

    # -- rollout --

    def wake(self, version: int) -> None:
        """Wake the rollout engine and sync the trainer's weights to it. Collective."""
        with self._trainer_in_use:
            self._enter_awake(self._trainer.weights(), version)

    def start_step(self) -> None:
        """Allow the pixels of the last step to be dropped."""
        if self._require_engines.images is not None:
            self._require_engines.images.start_step()

    def sleep(self) -> None:
        """Undo the last wake()."""
        self._awake_contexts.pop().close()

    # -- the weight transfer between pools --

    def listen_for_transfer(self, loopback: bool) -> tuple[str, int]:
        """Begin a new transfer group, and return its address. For the first learner."""
        return self._transfer.listen(LOOPBACK if loopback else ray.util.get_node_ip_address())

    def join_transfer(self, rank: int, address: TransferAddress, timeout_seconds: float) -> None:
        """Connect to the other members of a transfer group. rank: 0 for the first learner."""
        self._transfer.join(address, rank, timeout_seconds=timeout_seconds)

    @_concurrent("heartbeat")
    def leave_transfer(self) -> None:
        """Leave the transfer group. Ends a broadcast that waits for a member that has died."""
        self._transfer.leave()

    def send_weights(self) -> int:
        """Send the weights to the samplers. Collective over the learners. Returns: bytes sent."""
        with self._trainer_in_use:
            weights = require_local_weights(self._trainer.weights())
            return self._transfer.send(weights.read, self._process_group)

    def receive_weights(self, version: int) -> None:
        """Wake the rollout engine with the weights that the learners send."""
        self._leave_awake()
        self._enter_awake(self._transfer.weights(), version)

    # -- sampling --

    def generate(self, message: Message, sampling: SamplingParams, generation: int) -> None:
        """Sample completions, which the heartbeats that request this generation number return.

        message: prompts, and when the call stops before all completions have ended (Until, or
        None); groups that are not finished then follow those that are. Among ranks that sample the
        same prompts together, only the first returns completions.
        """
        self._generation = progress = _Generation(generation)
        returns_completions = self._require_engines.replica_rank == 0

        def on_progress(num_finished: int | None) -> None:
            progress.num_samples += num_finished or 0

        def on_group(index: int, completions: Sequence[Completion]) -> None:
            progress.groups.append((index, pack(completions)))

        prompts, until = unpack(message)
        if until is not None:
            until = replace(until, interruption=progress.interruption)
        report_progress, report_group = (on_progress, on_group) if returns_completions else (None, None)
        rows = self._rollout.generate(
            self._with_pixels(prompts),
            sampling,
            until=until,
            on_progress=report_progress,
            on_group=report_group,
        )
        finished = {index for index, _ in progress.groups}
        for index, row in enumerate(rows if returns_completions else []):
            if index not in finished:  # unfinished, or [] where one failed while others were sampled
                on_group(index, row)

    @_concurrent("heartbeat")
    def interrupt(self, generation: int, kind: InterruptKind) -> None:
        """End a call of generate that stops early; nothing if it is not the one that runs."""
        if self._generation.number == generation:
            self._generation.interruption.ask(kind)

    def restart_rollout(self) -> None:
        """Start the rollout engine again, asleep. Collective, since vLLM's start is."""
        self._leave_awake()  # of ranks on which the last wake() did not fail
        rollout = self._rollout
        assert isinstance(rollout, Restartable), "the driver restarts no other engine"
        self._trainer.offload()
        rollout.restart()

    def pop_rollout_metrics(self) -> Metrics:
        """Return the counts and the memory of the rollout engine.

        Only the first rank of a replica returns counts, since all ranks count the same requests.
        """
        metrics = self._rollout.pop_metrics()
        if self._require_engines.replica_rank == 0:
            return metrics
        return {name: metric for name, metric in metrics.items() if name.startswith("perf/")}

    # -- training --

    def logprobs(self, groups: Message) -> Message:
        """Compute the policy's log-probabilities of this rank's groups."""
        return self._compute(self._trainer.logprobs, groups)

    def full_kl(self, groups: Message) -> Message:
        """Compute the full-vocabulary KL divergence from the reference for this rank's groups."""
        return self._compute(self._trainer.full_kl, groups)

    def reference_logprobs(self, groups: Message) -> Message:
        """Compute the reference's log-probabilities of this rank's groups."""
        assert self._require_engines.reference is not None
        return self._compute(self._require_engines.reference.logprobs, groups)

    def values(self, groups: Message) -> Message:
        """Compute the critic's values of this rank's groups."""
        return self._compute(self._critic.values, groups)

    def logprobs_and_values(self, groups: Message) -> Message:
        """Compute the log-probabilities and the values of each of this rank's groups, as a pair."""
        critic = self._critic
        assert isinstance(critic, LocalTrunkCritic), "this critic has a model of its own"
        return self._compute(lambda own: list(zip(*critic.logprobs_and_values(own), strict=True)), groups)

    def step(self, groups: Message, recorded: Mapping[int, Sequence[int]]) -> tuple[Metrics, Message]:
        """Make one optimizer update, with this rank's share of the groups. Collective.

        recorded: for each rank, indices among its groups.
        Returns: this rank's metrics (the metrics of an update are the metrics of all ranks,
        merged), and the outputs of the recorded groups.
        """
        outputs: GroupOutputs = dict.fromkeys(recorded.get(self._rank, ()))
        with self._trainer_in_use:
            metrics = self._trainer.step(unpack(groups), outputs)
        return {**metrics, **self._measure()}, pack(outputs)

    def critic_step(self, groups: Message) -> Metrics:
        """Make one update of the critic, as step does of the policy. Collective."""
        with self._trainer_in_use:
            metrics = self._critic.step(unpack(groups))
        return {**metrics, **self._measure()}

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
        critic = self._require_engines.critic
        with self._trainer_in_use:
            writes = [self._trainer.save_state(folder, model_only=model_only)]
            if critic is not None:
                writes.append(critic.save_state(folder.parent / "critic", model_only=model_only))

        def write() -> None:
            for each in writes:
                each()

        self._write_state = write

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
        self._trainer.load_state(folder)

    def load_critic(self, folder: Path) -> None:
        """Load this rank's part of the critic of a checkpoint."""
        self._critic.load_state(folder)

    @_concurrent("heartbeat")
    def close_environments(self) -> None:
        """End all episodes, so that environments are closed before this process is killed."""
        if self._engines is not None and self._engines.environments is not None:
            self._engines.environments.close()

    @_concurrent("heartbeat")
    def heartbeat(self, generation: int, skip_groups: int) -> Heartbeat:
        """Return the state of this worker. Runs beside other methods, and changes nothing.

        generation: the number of a call of generate whose progress is requested; 0 for none.
        skip_groups: how many of its finished groups the driver already has.
        """
        latest = self._generation
        # The driver may ask for a generation that has not begun; then it has no progress yet.
        progress = latest if latest.number == generation else _Generation(generation)
        return Heartbeat(
            memory_bytes=count_resident_bytes([os.getpid()]),
            max_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            num_samples=progress.num_samples,
            groups=tuple(progress.groups[skip_groups:]),
        )

    @_concurrent("heartbeat")
    def stack(self) -> str:
        """Return the Python stack of the method that is running, the innermost call last."""
        frame = sys._current_frames().get(self._thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    @property
    def _require_engines(self) -> WorkerEngines:
        assert self._engines is not None, "open() has not been called"
        return self._engines

    @property
    def _critic(self) -> LocalCriticEngine:
        critic = self._require_engines.critic
        assert critic is not None, "this run has no critic"
        return critic

    @property
    def _trainer(self) -> LocalTrainEngine:
        assert self._require_engines.trainer is not None, "this worker does not train"
        return self._require_engines.trainer

    @property
    def _rollout(self) -> RolloutEngine:
        assert self._require_engines.rollout is not None, "this worker does not sample"
        return self._require_engines.rollout

    def _enter_awake(self, weights: WeightsHandle, version: int) -> None:
        """Wake the rollout engine with these weights until the next sleep() or _leave_awake()."""
        self.start_step()
        context = ExitStack()
        context.enter_context(self._rollout.awake(weights, version=version))
        self._awake_contexts.append(context)

    def _leave_awake(self) -> None:
        """Undo all calls of _enter_awake."""
        while self._awake_contexts:
            self._awake_contexts.pop().close()

    def _measure(self) -> Metrics:
        """Return the memory of this worker, and the images processed since the last call."""
        images = self._require_engines.images
        return {**({} if images is None else images.pop_metrics()), **gpu_memory_metrics(), **measure_worker()}

    def _compute(self, compute: Callable[[Sequence[RolloutGroup]], list[Any]], groups: Message) -> Message:
        """Return the result of a function of groups, which has one item for each group."""
        with self._trainer_in_use:
            return pack(compute(unpack(groups)))

    def _with_pixels(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return prompts with their pixels.

        With episodes as they are: environments read the files, and the engine loads the pixels.
        """
        images = self._require_engines.images
        return prompts if images is None or self._require_engines.environments else images.process(prompts)


def ray_actor_class(worker_class: type[Worker]) -> Any:
    """Return the Ray actor class of a worker class."""
    return ray.remote(concurrency_groups={"heartbeat": 1, "saving": 1})(worker_class)
