"""Starts a run's workers on Ray: one pool that learns and samples, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trigon.assemble.memory import Hardware
from trigon.assemble.models import set_determinism
from trigon.assemble.options import model_path
from trigon.config.options import with_options
from trigon.config.paths import local_path, read_template
from trigon.config.schema import Config
from trigon.data.images import ignore_pillow_warnings
from trigon.errors import WorkerError
from trigon.models.hub import uses_modelscope
from trigon.models.load import model_folder
from trigon.report.run import LOCK
from trigon.system.hangs import FILE as HANG_STACKS
from trigon.system.machine import count_usable_cpus

if TYPE_CHECKING:
    from trigon.distributed.cluster import ReservedWorkers, WorkerHandle
    from trigon.distributed.preflight import NodeReport
    from trigon.distributed.samplers import SamplerPool
    from trigon.distributed.worker_group import WorkerGroup
    from trigon.training.fsdp import Rendezvous, TorchProcessGroup

JOIN_PHASE = "preflight (connecting the ranks; see docs/distributed.md, network problems)"
"""The name of the first call in errors, where a rank that hangs is a problem of the network."""

COLLECTIVE_GRACE_SECONDS = 60
"""Seconds that a rank waits longer than the driver, whose error names the rank at fault."""

START_SECONDS = 300.0
"""Time limit for the processes that replace a lost sampler to start."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers with the same duties. keys: the options of their number, for messages."""

    nodes: int
    workers_per_node: int
    learns: bool
    samples: bool
    keys: tuple[str, str]


def place_pools(config: Config) -> tuple[Pool, ...]:
    """Return which workers learn and which sample. The first pool always learns.

    worker.hybrid_engine    pools
    true                    trainer.nnodes x n_gpus_per_node: learns and samples
    false                   trainer.nnodes x n_gpus_per_node: learns
                            worker.rollout.nnodes x n_gpus_per_node: samples
    """
    trainer, rollout, shared = config.trainer, config.worker.rollout, config.worker.hybrid_engine
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    learners = Pool(trainer.nnodes, trainer.n_gpus_per_node, learns=True, samples=shared, keys=keys)
    if shared:
        return (learners,)
    keys = ("worker.rollout.nnodes", "worker.rollout.n_gpus_per_node")
    return learners, Pool(rollout.nnodes, rollout.n_gpus_per_node, learns=False, samples=True, keys=keys)


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a run. samplers: None if the learners sample, too.

    loopback: all are on this machine, and listen on its loopback address only.
    """

    learners: WorkerGroup
    samplers: SamplerPool | None
    loopback: bool

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The kind of device that each worker has."""
        return self.learners.device

    def local_process_ids(self) -> list[int]:
        """Return the process ids of the workers on this machine."""
        samplers = [] if self.samplers is None else self.samplers.local_process_ids()
        return [*self.learners.local_process_ids(), *samplers]


@contextmanager
def open_worker_pools(
    config: Config, folder: Path, check_hardware: Callable[[Hardware], object], warn: Callable[[str], object]
) -> Iterator[Workers]:
    """Start the workers here or on a Ray cluster, check their nodes, and end them on exit.

    check_hardware: called with the smallest device and the smallest node, if their memory is known.
    warn: called with a warning if Ray requires no token, and when a lost sampler is replaced.
    Raises: ConfigError if the cluster is too small, or a node lacks a file or package.
    """
    from trigon.distributed.cluster import Layout, check_total, has_gpus, open_cluster, reserve, starts_cluster
    from trigon.distributed.preflight import check_node_reports, find_token_warning
    from trigon.distributed.samplers import SamplerPool

    trainer, (learning, *others) = config.trainer, place_pools(config)
    pools = (learning, *others)
    nodes = max(pool.nodes for pool in pools)
    is_local = starts_cluster(nodes=nodes)
    num_local = sum(pool.workers_per_node for pool in pools)
    with ExitStack() as stack:
        run_name = stack.enter_context(open_cluster(nodes=nodes, workers_per_node=num_local))
        device: Literal["cpu", "cuda"] = (
            ("cuda" if has_gpus() else "cpu") if trainer.device == "auto" else trainer.device
        )
        layouts = [Layout(pool.nodes, pool.workers_per_node, device) for pool in pools]
        if others:  # otherwise the last of them would wait for what the first has
            check_total(layouts, [pool.keys for pool in pools])
        reserved = [
            stack.enter_context(reserve(layout, keys=pool.keys)) for layout, pool in zip(layouts, pools, strict=True)
        ]
        loopback = is_local if others else nodes == 1
        starts = [
            _PoolStart(config, folder, pool, device, run_name, loopback, place)
            for pool, place in zip(pools, reserved, strict=True)
        ]
        if others:
            num_replicas = starts[1].size
            with ThreadPoolExecutor(1 + num_replicas, thread_name_prefix="start") as threads:
                futures = [threads.submit(starts[0].start_all)]
                futures += [threads.submit(starts[1].start_checked, replica) for replica in range(num_replicas)]
            started = [future.result() for future in futures]
        else:
            started = [starts[0].start_all()]
        reports = [report for _, of_group in started for report in of_group]
        check_node_reports(reports)
        if (warning := find_token_warning(reports)) is not None:
            warn(warning)
        check_hardware(smallest_hardware(device, reports))
        samplers = None
        if others:
            groups = [group for group, _ in started[1:]]
            samplers = SamplerPool(starts[1], groups, warn=warn, same_command=config.trainer.same_command)
            stack.callback(_close, started[0][0], samplers)
        yield Workers(started[0][0], samplers, loopback)


def _close(learners: WorkerGroup, samplers: SamplerPool) -> None:
    """End the calls of both pools that wait, since the run ends."""
    learners.is_closed = True  # ends its calls that wait beside calls of samplers
    samplers.close()


@dataclass(slots=True, eq=False)
class _PoolStart:
    """Starts the workers of a pool: all of them as one group, or the workers of one replica."""

    config: Config
    folder: Path
    pool: Pool
    device: Literal["cpu", "cuda"]
    run_name: str
    loopback: bool
    reserved: ReservedWorkers
    num_started: int = 0
    joining: dict[int, WorkerGroup] = field(default_factory=dict)  # by id(); threads add and remove theirs

    @property
    def replica_size(self) -> int:
        """The number of workers in a replica."""
        return self.config.worker.rollout.tensor_parallel_size

    @property
    def size(self) -> int:
        """The number of replicas in the pool."""
        return self.pool.nodes * self.pool.workers_per_node // self.replica_size

    def start_all(self) -> tuple[WorkerGroup, Sequence[NodeReport]]:
        """Start all workers as one group."""
        places = range(self.pool.nodes * self.pool.workers_per_node)
        return self._join(self._start_in(places, self.run_name, "", None), "")

    def start_checked(self, replica: int) -> tuple[WorkerGroup, Sequence[NodeReport]]:
        """Start the workers of a replica, and return the reports on their nodes."""
        self.num_started += 1
        first, role = replica * self.replica_size, f"sampler {replica}"
        name = f"{self.run_name}-{replica}-{self.num_started}"  # of memory that its ranks share
        places = range(first, first + self.replica_size)
        workers = self._start_in(places, name, role, START_SECONDS)
        try:
            return self._join(workers, role)
        except BaseException:
            self.reserved.end(workers)  # so that others can be started in their places
            raise

    def start(self, replica: int) -> WorkerGroup:
        """See StartReplica."""
        from trigon.distributed.preflight import check_node_reports

        group, reports = self.start_checked(replica)
        try:
            check_node_reports(reports)
        except BaseException:
            self.end(group)
            raise
        return group

    def end(self, group: WorkerGroup) -> None:
        """See StartReplica."""
        self.reserved.end(group.workers)

    def give_up(self) -> None:
        """See StartReplica."""
        self.reserved.give_up()
        for group in list(self.joining.values()):
            group.is_closed = True

    def _start_in(self, places: range, name: str, role: str, seconds: float | None) -> list[WorkerHandle]:
        from trigon.distributed.worker import Worker, ray_actor_class

        return self.reserved.start(
            places, ray_actor_class(Worker), name, loopback=self.loopback, role=role, seconds=seconds
        )

    def _join(self, workers: list[WorkerHandle], role: str) -> tuple[WorkerGroup, Sequence[NodeReport]]:
        from trigon.distributed.cluster import GIVEN_UP
        from trigon.distributed.rendezvous import JOIN_SECONDS
        from trigon.distributed.worker import Worker
        from trigon.distributed.worker_group import WorkerGroup

        config = self.config
        group = WorkerGroup(
            workers,
            self.device,
            deadline_seconds=config.trainer.worker_timeout_seconds,
            stacks_file=self.folder / HANG_STACKS,
            same_command=config.trainer.same_command,
            role=role,
        )
        join = partial(join_ranks, config_for_workers(config), self.device, self.folder.absolute(), self.pool)
        self.joining[id(group)] = group
        try:
            if self.reserved.is_given_up:
                raise WorkerError(GIVEN_UP)
            call = group.call(Worker.join, join, phase=JOIN_PHASE, max_deadline_seconds=JOIN_SECONDS)
            return group, call.result()
        finally:
            del self.joining[id(group)]


def smallest_hardware(device: Literal["cpu", "cuda"], reports: Sequence[NodeReport]) -> Hardware:
    """Return the smallest device and the smallest known node of all ranks."""
    host_bytes = [report.host_bytes for report in reports if report.host_bytes is not None]
    return Hardware(device, min(report.device_bytes for report in reports), min(host_bytes, default=None))


def config_for_workers(config: Config) -> Config:
    """Return the configuration for processes on other nodes, with other working folders.

    Model paths become absolute, and a chat template that is a file of the driver is replaced by its
    text. The arguments of the reward function, which may be secrets, stay with the driver.
    """
    model, data = config.worker.actor.model, config.data

    def absolute(path: str | None) -> str | None:
        if path and uses_modelscope():  # a setting of this process alone
            return str(model_folder(path).absolute())
        local = local_path(path) if path else None
        return path if local is None else str(local.absolute())

    changes: dict[str, Any] = {
        "data.override_chat_template": read_template(data.override_chat_template),
        "worker.actor.model.model_path": absolute(model.model_path),
        "worker.actor.model.tokenizer_path": absolute(model.tokenizer_path),
        "worker.critic.model.model_path": absolute(config.worker.critic.model.model_path),
        "worker.reward.reward_function": None,
        "worker.reward.reward_function_kwargs": {},
        "worker.reward.val_reward_function": None,
    }
    return with_options(config, changes)


def join_ranks(
    config: Config, device: str, folder: Path, pool: Pool, rendezvous: Rendezvous
) -> tuple[TorchProcessGroup, NodeReport]:
    """Join the process group, and return it with a report on the node. Runs first in each worker.

    folder: the run folder, which all nodes must share. pool: the pool of this worker.
    Raises: ConfigError if device is "cuda" and torch cannot use the GPU.
    """
    from trigon.distributed.preflight import inspect_node, require_gpu
    from trigon.training.fsdp import TorchProcessGroup

    rollout = config.worker.rollout
    hosts_vllm = rollout.name == "vllm" and pool.samples
    require_gpu(device, free_fraction=rollout.gpu_memory_utilization if hosts_vllm else 0.0)
    ignore_pillow_warnings()
    set_determinism(torch.device(device))
    torch.set_num_threads(max(1, count_usable_cpus() // config.workers_per_machine))
    process_group = TorchProcessGroup.joined(
        torch.device(device), rendezvous, timeout_seconds=collective_timeout_seconds(config)
    )
    critic = config.critic_model_path if pool.learns else None
    models = (model_path(config), *(() if critic is None else (critic,)))
    return process_group, inspect_node(process_group, model_paths=models, run_folder=folder, marker=LOCK)


def collective_timeout_seconds(config: Config) -> float:
    """Return how long a rank waits for the other ranks in a collective call.

    It exceeds every deadline of the driver: loading and saving may take longer than other calls.
    """
    from trigon.distributed.worker_group import DISK_SECONDS

    return max(config.trainer.worker_timeout_seconds, DISK_SECONDS) + COLLECTIVE_GRACE_SECONDS
