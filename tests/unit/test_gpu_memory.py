"""The memory of GPUs in a step's metrics: of the processes that use one."""

import gc
from types import SimpleNamespace

import pytest
import torch

from trigon.assemble.parts import check_environment
from trigon.config.schema import Config
from trigon.distributed.messages import pack
from trigon.distributed.worker import Worker, WorkerEngines
from trigon.errors import ConfigError
from trigon.metrics import Max, Min, merge
from trigon.system.machine import gpu_memory_metrics
from trigon.training.parallel import SingleProcess

GIB = 2**30


@pytest.fixture(autouse=True)
def _signals_of_this_process(monkeypatch):
    """The processes that later tests start would inherit ignored signals."""
    monkeypatch.setattr("trigon.distributed.worker.ignore_stop_signals", lambda: None)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of this process, and one that it does not use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 44 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 12 * GIB)
    return lambda *, in_use: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)


def test_a_worker_reports_the_memory_of_its_gpu(gpu):
    gpu(in_use=True)
    worker = Worker(0)
    trainer = SimpleNamespace(step=lambda groups, outputs: {"actor/loss": Max(1.0)})
    worker._engines = WorkerEngines(trainer, None, None, None, replica_rank=0)
    metrics, _ = worker.step(pack([]), {})
    largest = merge(metrics, {"perf/max_memory_allocated_gb": Max(41.0)})
    assert {name: metric for name, metric in largest.items() if "perf/memory" not in name} == {
        "actor/loss": Max(1.0),
        "perf/gpu_memory_allocated_gb": Max(10.0),
        "perf/gpu_memory_free_gb": Min(32.0),
        "perf/max_memory_allocated_gb": Max(41.0),
        "perf/max_memory_reserved_gb": Max(44.0),
    }
    gpu(in_use=False)  # the driver of several workers
    assert gpu_memory_metrics() == {}


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_run_in_one_process_needs_the_memory_that_vllm_will_take(gpu, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (47 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    kernels = []
    monkeypatch.setattr("trigon.assemble.parts.choose_kernel", lambda config, device: kernels.append(device.type))
    config = Config.model_validate({"worker": {"rollout": {"name": name}}, "trainer": {"logger": ["console"]}})
    if name == "transformers":
        check_environment(config)
        assert kernels == ["cuda"]
        return
    with pytest.raises(ConfigError, match=r"47\.0 GiB of 80\.0 GiB free, and vLLM is to take 60%"):
        check_environment(config)
    assert kernels == []


@pytest.mark.extended
def test_a_worker_leaves_what_its_engines_made_out_of_collections():
    """vLLM collects garbage at each sleep and waking, which takes seconds with all of it."""
    worker = Worker(0)
    worker._process_group = SingleProcess()
    engines = WorkerEngines(None, None, None, None, replica_rank=0)
    gc.unfreeze()
    try:
        assert worker.open(lambda _: engines) is None
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
