"""Where the ranks' store, Ray's files and the sockets of gloo and NCCL are."""

from __future__ import annotations

import os
import socket
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from support.sockets import listeners, outside_address
from trigon.distributed.cluster import open_cluster, set_environment
from trigon.distributed.local_ray import make_base
from trigon.distributed.rendezvous import open_store
from trigon.errors import ConfigError
from trigon.system.machine import LOOPBACK, find_interface, loopback_variables
from trigon.system.process_settings import keep_compiled_code, let_segments_grow

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.extended
@pytest.mark.faults
def test_the_store_is_reached_at_its_own_address_only():
    listener = socket.create_server((LOOPBACK, 0))
    address, port = listener.getsockname()
    with ThreadPool(1) as threads:
        other = threads.apply_async(open_store, (address, port), {"size": 2, "listener": None})
        store = open_store(address, port, size=2, listener=listener)
        other.get(timeout=60).set("key", "of rank 1")
    assert store.get("key") == b"of rank 1"
    assert {each.address for each in listeners([os.getpid()]) if each.port == port} == {LOOPBACK}
    outside = outside_address()
    if outside is None:
        pytest.skip("this machine has no network, from which the store could be reached")
    with pytest.raises(DistNetworkError):
        open_store(outside, port, listener=None, seconds=1.0)


def test_ranks_of_one_machine_listen_on_the_loopback_interface_and_others_on_that_of_the_cluster(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "eth7")
    set_environment({"RANK": "0"}, address=None)
    assert {name: os.environ[name] for name in VARIABLES} == loopback_variables()
    assert os.environ["GLOO_SOCKET_IFNAME"] == find_interface(LOOPBACK)
    assert find_interface("203.0.113.7") is None
    address = outside_address()
    if address is None:
        pytest.skip("this machine has no network")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # which the user has set
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    set_environment({"RANK": "0"}, address=address)
    assert [os.environ[name] for name in VARIABLES] == [find_interface(address), "ib0"]


@pytest.mark.faults
def test_ray_has_its_files_in_a_temporary_folder_with_a_short_path_that_is_made(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # tmp_path is too long for Ray's sockets
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert make_base() == Path(short)
        monkeypatch.setenv("RAY_TMPDIR", f"{short}/a/b")
        assert make_base() == Path(short, "a", "b")
        assert Path(short, "a", "b").is_dir()
        monkeypatch.setenv("RAY_TMPDIR", f"{short}/" + 40 * "x")
        assert make_base() == Path("/tmp")
        file = Path(short, "f")
        file.touch()
        for folder in (file, file / "a", Path("/proc/self/a")):
            monkeypatch.setenv("RAY_TMPDIR", str(folder))
            message = rf"Ray cannot be kept in {folder}: .* Set RAY_TMPDIR"
            with pytest.raises(ConfigError, match=message), open_cluster(nodes=1, workers_per_node=1):
                pass


def test_compiled_code_is_kept_in_the_users_cache_which_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored afterwards")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    folder = tmp_path / "trigon" / "torchinductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"
    # Where there is no room for it, torch chooses.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_segments_of_gpu_memory_grow_unless_the_user_has_set_the_allocator(monkeypatch, own):
    environment = dict(own)
    monkeypatch.setattr(os, "environ", environment)
    let_segments_grow()
    assert environment == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
