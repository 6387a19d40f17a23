"""Connects to a Ray cluster and starts one worker process per device.

The cluster is the user's or a local one. Covers resources, environment variables and the cleanup of
all processes. Does not depend on what the workers do.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trigon.distributed.local_ray import check_loopback, make_base, prepare_local_cluster
from trigon.environments.pool import CLOSE_SECONDS
from trigon.errors import ConfigError, TrigonError, WorkerError, first_line
from trigon.metrics import Max, Metrics, Min
from trigon.system.installation import clone_folder
from trigon.system.machine import find_interface, loopback_variables
from trigon.system.process_settings import ARENAS_VARIABLE, NUM_ARENAS, set_variables
from trigon.system.processes import descendants
from trigon.system.stopping import termination_blocked
from trigon.system.temporary import private_folder

_PLACEMENT_SECONDS = 120
"""Time limit for Ray to reserve the resources of all workers."""

_EXIT_SECONDS = 60
"""Time limit for killed worker processes to disappear.

A process with hundreds of GiB in host memory that GPUs can read takes more than ten seconds.
"""

_KILL_SECONDS = 3.0
"""How long Ray has to end a worker, before this module kills it."""

_WORKER_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""The options that say how many workers there are."""

SEGMENTS_VARIABLE = "TRIGON_SHARED_MEMORY"
"""Environment variable of a worker: how the names of its shared memory segments begin."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of workers and the device that each of them has to itself.

    Ranks are numbered node by node: ranks 0 to workers_per_node - 1 are on node 0.
    """

    nodes: int
    workers_per_node: int
    device: Literal["cpu", "cuda"]

    @property
    def size(self) -> int:
        """The total number of workers."""
        return self.nodes * self.workers_per_node

    @property
    def node_resources(self) -> dict[str, int]:
        """What the workers of a node need, by Ray's names."""
        return dict.fromkeys(("CPU", "GPU") if self.device == "cuda" else ("CPU",), self.workers_per_node)


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """A running worker.

    pid: its process id on that host. actor: the handle of its Ray actor. is_local: whether it runs
    on the driver's machine, by the host names when it was started, which may change later.
    """

    rank: int
    host: str
    pid: int
    actor: Any
    is_local: bool


def starts_cluster(*, nodes: int) -> bool:
    """Return whether a run on this many nodes starts a Ray cluster, on this machine alone."""
    return nodes == 1 and os.environ.get("RAY_ADDRESS") in (None, "", "local")


@contextmanager
def open_cluster(*, nodes: int, workers_per_node: int) -> Iterator[str]:
    """Connect to a Ray cluster for the duration of the context.

    The cluster is the one at RAY_ADDRESS if that is set; for several nodes, the one that runs on
    this machine; otherwise a local one that is started here and ends with the context or with this
    process; see local_ray.py.
    Yields: a name for this run, which no other run on this machine has.
    Raises: ConfigError if there is no cluster to connect to, or no place for its temporary files;
    WorkerError if a local cluster does not start.
    """
    address = os.environ.get("RAY_ADDRESS") or ("auto" if nodes > 1 else "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray hides GPUs from tasks that request none, and warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray runs its workers at the lowest scheduling priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Workers have threads before any of their code runs, so glibc reads this as they start.
    os.environ.setdefault(ARENAS_VARIABLE, str(NUM_ARENAS))
    is_local = address == "local"
    no_options: dict[str, Any] = {}  # a cluster that runs already has its settings
    with (
        private_folder(make_base()) as folder,
        prepare_local_cluster(folder, workers_per_node) if is_local else nullcontext(no_options) as options,
    ):
        # For the files of the workers, which are killed at the end and remove none.
        variables = {"TMPDIR": str(folder / "tmp")} if is_local else {}
        try:
            # Ray's processes and the workers keep them blocked: only the driver acts on a signal
            # that all processes of a job get. Ray itself does the same with SIGINT.
            with set_variables(variables), termination_blocked(), _sigterm_handler_kept():
                ray.init(
                    address=address,
                    logging_level="ERROR",
                    log_to_driver=True,
                    job_config=_job_config(),
                    **options,
                )
        except Exception as error:
            known = (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError)
            if isinstance(error, TrigonError) or not (is_local or isinstance(error, known)):
                raise
            if is_local:  # also a plain Exception, which Ray raises after half a minute on busy CPUs
                raise WorkerError(
                    f"Ray did not start on this machine ({first_line(error)}). If its CPUs are busy with other work, "
                    "run the same command when they are less busy"
                ) from error
            raise ConfigError(
                f"there is no Ray cluster at {address!r}, or it rejects the token of this shell "
                f"({first_line(error)}). Start one with `ray start --head` here and `ray start --address=...` on the "
                "other nodes, and run the same command on the head node, with the same RAY_AUTH_MODE and token; see "
                "docs/distributed.md"
            ) from error
        try:
            if is_local:
                check_loopback()
            yield folder.name
        finally:
            if is_local:
                _kill_at_shutdown()
            ray.shutdown()


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Let Ray install no handler of SIGTERM in this process: its own aborts the process.

    Not to be undone afterwards: until then a signal that another thread gets would be Ray's. Not
    public in Ray 2.60; where it is another function, the handler is restored at the end.
    """
    utils: Any = ray._private.utils
    handler, install = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _kill_at_shutdown() -> None:
    """Let ray.shutdown() kill the processes of the local cluster, which do not end at SIGTERM.

    By default it sends SIGTERM to one after the other, and waits a second each before it kills it.
    Not public in Ray 2.60.
    """
    node: Any = ray._private.worker._global_node
    if node is not None:
        node.kill_all_processes = partial(_kill_processes, node, node.kill_all_processes)


def _kill_processes(node: Any, kill_all_processes: Callable[..., None], **options: bool) -> None:
    """Call a method of Ray's node without asking its processes to end first; end their children."""
    started = [info.process.pid for infos in node.all_processes.values() for info in infos]
    below = descendants(*started)
    kill_all_processes(**options | {"allow_graceful": False, "wait": True})
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _job_config() -> ray.job_config.JobConfig:
    """Return a configuration by which workers do not import from the working folder of the driver.

    By default Ray puts it first, and a folder named trigon in it would be imported instead of the
    package. Workers import from a clone if the driver does. Not public in Ray 2.60: both arguments;
    `_client_job` has no other effect in a job without a runtime environment.
    """
    root = clone_folder()
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=[str(root)] if root else [])


def has_gpus() -> bool:
    """Return whether any node of the cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0))


def object_store_metrics() -> Metrics:
    """Return what Ray's object stores hold, and what is free in them, on all nodes, in GiB.

    {} if Ray does not answer: a measurement is no reason to end a run, and where Ray has failed the
    next call of a worker says so.
    """
    name = "object_store_memory"
    try:
        total = ray.cluster_resources().get(name, 0.0)
        free = ray.available_resources().get(name, 0.0)  # absent where nothing is free
    except (RayError, RuntimeError, ConnectionError):  # RuntimeError: from Ray's C++ core
        return {}
    return {
        "perf/object_store_used_gb": Max((total - free) / 2**30),
        "perf/object_store_free_gb": Min(free / 2**30),
    }


GIVEN_UP = "sampling was given up, since the run ends"


@dataclass(slots=True, eq=False)
class ReservedWorkers:
    """The resources of a layout's workers, in which workers are started and replaced.

    group: a placement group of Ray, which has a bundle for each node. is_given_up: whether
    give_up() was called; no workers are started any more.
    """

    layout: Layout
    group: Any
    is_given_up: bool = False
    _actors: list[Any] = field(default_factory=list)
    _workers: list[WorkerHandle] = field(default_factory=list)

    def start(
        self,
        places: Sequence[int],
        actor_class: Any,
        name: str,
        *,
        loopback: bool,
        role: str = "",
        seconds: float | None = None,
    ) -> list[WorkerHandle]:
        """Start a worker in each of these places of the layout, as ranks of one process group.

        name: begins the names of their shared memory. role: what they are in messages.
        seconds: time limit; None: as long as it takes.
        Raises: WorkerError if a process does not start.
        """
        layout, actors = self.layout, []
        for rank, place in enumerate(places):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self.group,
                placement_group_bundle_index=place // layout.workers_per_node,
                placement_group_capture_child_tasks=True,
            )
            options = actor_class.options(
                num_cpus=1,
                num_gpus=int(layout.device == "cuda"),
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            actors.append(options.remote(rank, role) if role else options.remote(rank))
        self._actors += actors
        if self.is_given_up:  # before it could see these
            self.give_up()
            raise WorkerError(GIVEN_UP)
        try:
            workers = self._prepare(actors, name, loopback=loopback, seconds=seconds)
        except RayError as error:
            for actor in actors:  # so that others can be started in their places
                ray.kill(actor, no_restart=True)
            if isinstance(error, GetTimeoutError):
                raise WorkerError(f"{role or 'a worker'}: its process did not start within {seconds:g} s") from error
            raise WorkerError(
                "a worker process did not start. Every node needs the same installation, in the environment in which "
                f"`ray start` ran there; see docs/distributed.md. The error:\n{error}"
            ) from error
        self._workers += workers
        return workers

    def _prepare(
        self, actors: Sequence[Any], name: str, *, loopback: bool, seconds: float | None
    ) -> list[WorkerHandle]:
        """Wait until actors have started, and give them their environment variables."""
        layout = self.layout
        hosts = ray.get([actor.host.remote() for actor in actors], timeout=seconds)
        master, port = ray.get(actors[0].listen.remote(loopback=loopback), timeout=seconds)
        workers = [
            WorkerHandle(rank, host, pid, actor, is_local=host == socket.gethostname())
            for rank, (actor, (host, pid)) in enumerate(zip(actors, hosts, strict=True))
        ]
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(actors)),
                # Ray makes one GPU visible to each worker: its local index is 0.
                "LOCAL_RANK": "0" if layout.device == "cuda" else str(rank % layout.workers_per_node),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(port),
                SEGMENTS_VARIABLE: name,
            }
            for rank in range(len(actors))
        ]
        prepared = [
            actor.prepare.remote(environment, loopback=loopback)
            for actor, environment in zip(actors, environments, strict=True)
        ]
        ray.get(prepared, timeout=seconds)
        return workers

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        """Kill workers, so that others can be started in their places."""
        try:
            _close_environments(workers)
        finally:
            for worker in workers:
                ray.kill(worker.actor, no_restart=True)
        _wait_for_exit([worker.pid for worker in workers if worker.is_local])

    def give_up(self) -> None:
        """Kill the workers that are just starting; start() raises WorkerError, now and later."""
        self.is_given_up = True
        started = [worker.actor for worker in self._workers]
        for actor in [actor for actor in self._actors if actor not in started]:
            ray.kill(actor, no_restart=True)

    def end_all(self) -> None:
        """Kill all workers, and give the resources back."""
        try:
            _close_environments(self._workers)
        finally:
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            remove_placement_group(self.group)
        _wait_for_exit([worker.pid for worker in self._workers if worker.is_local])


@contextmanager
def reserve(layout: Layout, *, keys: tuple[str, str] = _WORKER_KEYS) -> Iterator[ReservedWorkers]:
    """Reserve the resources of the workers of a layout; kill the workers when the context ends.

    keys: the options of the layout, for messages.
    Raises: ConfigError if the cluster is too small or its resources are in use.
    """
    _check_resources(layout, keys)
    bundle = layout.node_resources
    group = placement_group([bundle] * layout.nodes, strategy="STRICT_SPREAD" if layout.nodes > 1 else "PACK")
    reserved = ReservedWorkers(layout, group)
    try:
        if not group.wait(_PLACEMENT_SECONDS):
            raise ConfigError(
                f"Ray did not allocate {layout.nodes} x {bundle} ({keys[0]}, {keys[1]}) within "
                f"{_PLACEMENT_SECONDS} s: other jobs of the cluster use these resources; see `ray status`"
            )
        yield reserved
    finally:
        reserved.end_all()


def set_environment(environment: Mapping[str, str], *, address: str | None) -> None:
    """Set environment variables of this process, and the network interface that it listens on.

    address: this node's IPv4 address in the cluster, for whose interface GLOO_SOCKET_IFNAME is set
    unless it is set already: by default gloo listens on the address that the host name resolves to,
    on many systems 127.0.1.1. None: all ranks are on this node, and listen on the loopback
    interface.
    """
    os.environ.update(environment)
    if address is None:
        os.environ.update(loopback_variables())
        return
    interface = find_interface(address)
    if interface is not None and not address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def check_total(layouts: Sequence[Layout], keys: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if the cluster is too small for all of these layouts at the same time.

    keys: the options of each layout, for messages.
    """
    needed = sum(layout.size for layout in layouts)
    available = {name: ray.cluster_resources().get(name, 0.0) for name in layouts[0].node_resources}
    if min(available.values()) >= needed:
        return
    options = " and ".join(
        f"{of_nodes}={layout.nodes} x {of_workers}={layout.workers_per_node}"
        for layout, (of_nodes, of_workers) in zip(layouts, keys, strict=True)
    )
    raise ConfigError(
        f"{options} ask for {needed} workers at the same time, each with a {' and a '.join(available)} of its own; the "
        f"Ray cluster has {' and '.join(f'{number:g} {name}s' for name, number in available.items())}. Lower them, or "
        "add nodes with `ray start --address=...`"
    )


def _check_resources(layout: Layout, keys: tuple[str, str]) -> None:
    """Raise ConfigError if too few nodes have the resources of workers_per_node workers."""
    required = layout.node_resources
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node["Resources"].get(name, 0) >= n for name, n in required.items())]
    if len(fitting) >= layout.nodes:
        return
    required_text = " and ".join(f"{number} {name}s" for name, number in required.items())
    available_text = "; ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has "
        + " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in required)
        for node in nodes
    )
    raise ConfigError(
        f"{keys[0]}={layout.nodes} and {keys[1]}={layout.workers_per_node} ask for {layout.nodes} "
        f"node{'s' if layout.nodes > 1 else ''} with {required_text}; {len(fitting)} of {len(nodes)} in the Ray "
        f"cluster have that: {available_text}. Lower them, or add nodes with `ray start --address=...`"
    )


def _close_environments(workers: Sequence[WorkerHandle]) -> None:
    """Let the environments of workers be closed, which would be killed with them."""
    closing = [worker.actor.close_environments.remote() for worker in workers]
    if closing:  # one that has died has none; one that hangs is not waited for
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS + 1.0)


def _wait_for_exit(pids: Sequence[int]) -> None:
    """Wait until killed processes have exited, so that their memory and files are free again.

    Ray asks a process to exit, which one that is stopped or hangs cannot do: it is killed here.
    """
    started = time.monotonic()
    alive = [pid for pid in pids if _is_alive(pid)]
    while alive and time.monotonic() < started + _EXIT_SECONDS:
        time.sleep(0.05)
        alive = [pid for pid in alive if _is_alive(pid)]
        if time.monotonic() > started + _KILL_SECONDS:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
