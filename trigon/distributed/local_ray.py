"""What Ray is started with on this machine alone: it listens on the loopback address only.

Also a token of its own, a private folder for its sessions and for what its processes write to the
temporary folder, and a process that ends what is left when the driver was killed. Does not start
Ray.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from trigon.errors import ConfigError, WorkerError
from trigon.system.process_settings import set_variables

_MAX_SOCKET_PATH = 107
"""Most bytes of the path of a Unix socket on Linux."""

_RAY_SOCKET = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest name of a Unix socket below Ray's folder."""


_WATCHER = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not sys.stdin.readline():
    for _ in range(20):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    is_of_ray = file.read(5) == b"ray::"
                files = os.scandir(f"/proc/{name}/fd") if is_of_ray else ()
                if any(os.readlink(file.path).startswith(sys.argv[1]) for file in files):
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.25)
"""


@contextmanager
def prepare_local_cluster(folder: Path, num_cpus: int) -> Iterator[dict[str, Any]]:
    """Set up a cluster on this machine, which starts and ends within this context.

    Yields: the arguments of ray.init. On exit, environment variables have their former values.
    folder: a private folder for the files of Ray; the workers' files are in its tmp/. See
    make_base.
    """
    allows_clusters = ray_constants.ENABLE_RAY_CLUSTER
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # By default Ray replaces 127.0.0.1 by the address of the first network interface. It does
        # not where it supports no clusters, as on macOS; and with a loopback address, all of its
        # servers listen there only.
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    }
    (folder / "tmp").mkdir()
    try:
        with _ending_with_driver(folder / "ray"), set_variables(variables):
            ray_constants.ENABLE_RAY_CLUSTER = False  # it was read when ray was imported
            reload_auth_token()
            yield {
                "num_cpus": num_cpus,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                # Not the folder itself: Ray lets all users into the one that it is given.
                "_temp_dir": str(folder / "ray"),
            }
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = allows_clusters
        reload_auth_token()


@contextmanager
def _ending_with_driver(folder: Path) -> Iterator[None]:
    """End Ray's processes within seconds when this process is killed within the context.

    Most end by themselves. Its two agents find that the node manager has ended, and then try for a
    minute to report that to a server that has ended as well (Ray 2.60, process_watcher.py). Agents
    and workers replace their command by a title, and are found by their title and open files.
    folder: the folder for the files of Ray.
    """
    if not Path("/proc/self/fd").exists():  # not Linux
        yield
        return
    command = [sys.executable, "-S", "-E", "-c", _WATCHER, f"{folder.resolve()}{os.sep}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            with suppress(BrokenPipeError):  # it was killed
                watcher.communicate(b"the cluster has ended\n")


def make_base() -> Path:
    """Return where to make the private folder of a cluster: RAY_TMPDIR, or the temporary folder.

    /tmp if the paths of Ray's sockets would be too long there. It is made if it is not there.
    Raises: ConfigError if no folder can be made in it.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()
    longest = len(os.fsencode(base)) + len(f"/trigon-{os.geteuid()}-00000000{_RAY_SOCKET}")
    base = base if longest <= _MAX_SOCKET_PATH else Path("/tmp")
    try:
        base.mkdir(parents=True, exist_ok=True)
        if not os.access(base, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write into {base}")
    except OSError as error:
        raise ConfigError(
            f"the temporary files of Ray cannot be kept in {base}: {error}. Set RAY_TMPDIR, or without it TMPDIR, to a "
            "folder on this machine that you can write into"
        ) from error
    return base


def check_loopback() -> None:
    """Raise WorkerError if the cluster that was started does not use the loopback address."""
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise WorkerError(
            f"Ray {ray.__version__} listens on {address}, which other machines reach, and not on the loopback address "
            "as requested. Install the version of Ray in constraints/, or report this version"
        )


def reload_auth_token() -> None:
    """Make Ray read its token from the environment again; importing ray has cached it.

    There is no public function for this in Ray 2.60; uses ray._raylet.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
