"""Workers on a Ray cluster that has GPUs by name only: placement, environment, and errors.

`ray start --num-gpus=4` accepts GPUs that are not there.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from support.clusters import start_workers
from trigon.assemble.pools import join_ranks, place_pools
from trigon.config.schema import Config
from trigon.distributed.cluster import Layout, has_gpus, open_cluster
from trigon.distributed.local_ray import reload_auth_token
from trigon.distributed.worker import Worker, ray_actor_class
from trigon.distributed.worker_group import WorkerGroup
from trigon.errors import ConfigError, WorkerError

pytestmark = pytest.mark.long

NUM_GPUS = 4


class TestWorker(Worker):
    """A worker that returns its environment."""

    __test__ = False

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class BrokenWorker(Worker):
    """A worker on a node without the package."""

    def __init__(self, rank: int) -> None:
        raise ModuleNotFoundError("No module named 'trigon'")


@pytest.fixture(scope="module")
def gpu_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a Ray node with four GPUs and four CPUs, and point this process to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("node") / "log"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "token")
        patched.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patched.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with log.open("w") as output:
            node = subprocess.Popen(
                [*command, f"--num-gpus={NUM_GPUS}", f"--num-cpus={NUM_GPUS}"],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            while "Ray runtime started" not in log.read_text():
                assert node.poll() is None, log.read_text()
                time.sleep(0.1)
            reload_auth_token()  # ray, imported above, has read another one
            yield
        finally:
            os.killpg(node.pid, signal.SIGTERM)
            node.wait(timeout=60)


@pytest.fixture(scope="module")
def worker_group(gpu_node: None) -> Iterator[WorkerGroup]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file
    with open_cluster(nodes=1, workers_per_node=2) as run_name:
        assert has_gpus()
        layout = Layout(nodes=1, workers_per_node=2, device="cuda")
        with start_workers(layout, ray_actor_class(TestWorker), run_name) as workers:
            yield WorkerGroup(workers, "cuda", deadline_seconds=60.0)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_each_worker_sees_one_gpu_of_its_own_as_its_first(worker_group):
    def variables(name: str) -> list[str | None]:
        return worker_group.call(TestWorker.variable, name, phase="environment").result()

    assert sorted(variables("CUDA_VISIBLE_DEVICES")) == ["0", "1"]
    assert variables("LOCAL_RANK") == ["0", "0"]
    assert variables("RANK") == ["0", "1"]
    assert variables("WORLD_SIZE") == ["2", "2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch could use the GPU")
def test_gpus_that_torch_cannot_use_are_an_error_that_says_what_to_do(worker_group, tmp_path):
    """Before, it was NCCL's own error, with a traceback."""
    join = partial(join_ranks, Config(), "cuda", tmp_path, place_pools(Config())[0])
    with pytest.raises(ConfigError) as caught:
        worker_group.call(Worker.join, join, phase="preflight").result()
    message = str(caught.value)
    assert message.startswith("rank ")
    assert "Ray has assigned GPU " in message
    assert f"but torch finds none. torch {torch.__version__} is built " in message
    assert message.endswith("or set trainer.device=cpu")


def test_a_worker_that_does_not_start_is_an_error_with_its_reason(worker_group):
    """As on a node where the package is missing. Before, it was an exception of Ray."""
    layout = Layout(nodes=1, workers_per_node=1, device="cuda")
    with (
        pytest.raises(WorkerError, match=r"(?s)did not start\. Every node needs .*No module named 'trigon'"),
        start_workers(layout, ray_actor_class(BrokenWorker), "trigon-test"),
    ):
        pass


def test_more_workers_than_gpus_are_an_error_that_names_both(worker_group):
    layout = Layout(nodes=1, workers_per_node=NUM_GPUS + 1, device="cuda")
    expected = r"with 5 CPUs and 5 GPUs; 0 of 1 .* has 4 CPUs and 4 GPUs"
    with pytest.raises(ConfigError, match=expected), start_workers(layout, ray_actor_class(TestWorker), "trigon-test"):
        pass
