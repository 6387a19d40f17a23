"""Ray as this project uses it: a cluster of our own on this machine or the user's, and one worker for each device.

Knows Ray's start, its resources and environment variables, and how to leave nothing behind. Refuses to know what the
workers do.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trigon.errors import ConfigError

_PLACEMENT_SECONDS = 120
_DEATH_SECONDS = 10
_SIOCGIFADDR = 0x8915  # Linux: which IPv4 address has this interface?


@dataclass(frozen=True, slots=True)
class Layout:
    """The workers that are wanted: so many on each of so many nodes, each with a device of this kind to itself.

    Ranks count along nodes: node 0 has the first workers_per_node of them.
    """

    nodes: int
    workers_per_node: int
    device: Literal["cpu", "cuda"]

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker where it was put. handle: of the Ray actor. pid: its process on that host."""

    rank: int
    host: str
    pid: int
    handle: Any


@contextmanager
def cluster(*, nodes: int, workers_per_node: int) -> Iterator[None]:
    """Be connected to Ray: to the cluster that RAY_ADDRESS names or, for several nodes, that runs on this machine, or
    else to one of our own on this machine alone.

    Ours listens on the loopback address, has no dashboard, and lets nobody in without its token. It ends with the
    context, and with this process.
    Raises: ConfigError if there is no cluster to connect to.
    """
    address = os.environ.get("RAY_ADDRESS") or ("auto" if nodes > 1 else "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would hide the GPUs from a task that asks for none, and warns that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run workers at the lowest priority, as if their work were less than what else goes on.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address == "local":
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if address == "local":
        _read_environment_again()
    own: dict[str, Any] = (
        {
            "num_cpus": workers_per_node,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
        if address == "local"
        else {}
    )
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=True, **own)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r}, or it does not take our token ({_first_line(error)}). Start one, "
            "`ray start --head` here and `ray start --address=...` on the other nodes, and run the same command on the "
            "head node, with the same RAY_AUTH_MODE and token; docs/multi-node.md tells how"
        ) from error
    try:
        signal.signal(signal.SIGTERM, ours)  # Ray puts its own there, which aborts
        yield
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Tell whether there is a GPU anywhere in the cluster."""
    return bool(ray.cluster_resources().get("GPU", 0))


@contextmanager
def workers(layout: Layout, actor_class: Any) -> Iterator[list[Placed]]:
    """Run layout.size actors, each in a process of its own, and end them with the context, whatever they are doing.

    actor_class: made by ray.remote, constructed with its rank; its prepare() is given what torch.distributed and vLLM
    read: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. To be entered inside cluster().
    Raises: ConfigError if the cluster is too small.
    """
    _check_resources(layout)
    each = {"CPU": 1.0} | ({"GPU": 1.0} if layout.device == "cuda" else {})
    bundle = {name: amount * layout.workers_per_node for name, amount in each.items()}
    group = placement_group([bundle] * layout.nodes, strategy="STRICT_SPREAD" if layout.nodes > 1 else "PACK")
    handles: list[Any] = []
    placed: list[Placed] = []
    try:
        if not group.wait(_PLACEMENT_SECONDS):
            raise ConfigError(
                f"Ray did not give {layout.nodes} x {bundle} within {_PLACEMENT_SECONDS} s: something else in the "
                "cluster holds them; see `ray status`"
            )
        for rank in range(layout.size):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group,
                placement_group_bundle_index=rank // layout.workers_per_node,
                placement_group_capture_child_tasks=True,
            )
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(layout.device == "cuda"),
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            handles.append(actor.remote(rank))
        hosts = ray.get([handle.host.remote() for handle in handles])
        master, port = ray.get(handles[0].free_address.remote())
        for rank, (handle, (host, pid)) in enumerate(zip(handles, hosts, strict=True)):
            placed.append(Placed(rank, host, pid, handle))
        ray.get(
            [
                handle.prepare.remote(
                    {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(layout.size),
                        # Ray shows each worker its own GPU and no other, so that every one of them is number 0.
                        "LOCAL_RANK": "0" if layout.device == "cuda" else str(rank % layout.workers_per_node),
                        "MASTER_ADDR": master,
                        "MASTER_PORT": str(port),
                    }
                )
                for rank, handle in enumerate(handles)
            ]
        )
        yield placed
    finally:
        for handle in handles:
            ray.kill(handle, no_restart=True)
        remove_placement_group(group)
        _wait_for_death([worker.pid for worker in placed if worker.host == socket.gethostname()])


def enter_environment(environment: Mapping[str, str], *, address: str) -> None:
    """Set environment variables of this process, whose node the others know by this address.

    Gloo would listen wherever the node's own name leads, which many systems say is 127.0.1.1; it is told the interface
    that has the address, unless somebody has named one.
    """
    os.environ.update(environment)
    interface = _interface_with(address)
    if interface is not None and not address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _check_resources(layout: Layout) -> None:
    """Raise ConfigError, with what was asked for and what is there, unless the cluster has enough of it."""
    wanted = {"CPU": layout.workers_per_node} | ({"GPU": layout.workers_per_node} if layout.device == "cuda" else {})
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node["Resources"].get(name, 0) >= n for name, n in wanted.items())]
    if len(fitting) >= layout.nodes:
        return
    asked = " and ".join(f"{number} {name}s" for name, number in wanted.items())
    found = "; ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has "
        + " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in wanted)
        for node in nodes
    )
    raise ConfigError(
        f"trainer.nnodes={layout.nodes} and trainer.n_gpus_per_node={layout.workers_per_node} ask for {layout.nodes} "
        f"node{'s' if layout.nodes > 1 else ''} with {asked}; {len(fitting)} of {len(nodes)} in the Ray cluster have "
        f"that: {found}. Lower them, or add nodes with `ray start --address=...`"
    )


def _read_environment_again() -> None:
    """Let Ray notice its token: it looks when it is imported, which somebody may have done before.

    Not public in 2.60: ray._raylet.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _interface_with(address: str) -> str | None:
    """Return the network interface that has this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def _wait_for_death(pids: Sequence[int]) -> None:
    """Wait until processes that were killed are gone, so that their memory and files are free for what comes next."""
    deadline = time.monotonic() + _DEATH_SECONDS
    while time.monotonic() < deadline and any(_is_alive(pid) for pid in pids):
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
