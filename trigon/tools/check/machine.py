"""The machine of a run, and the checks of it: GPUs, memory, disk, connections, loggers, folder."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from trigon.assemble import memory as arithmetic
from trigon.assemble.memory import Hardware, count_checkpoint_bytes, count_checkpoints
from trigon.assemble.models import choose_device_type, choose_kernel
from trigon.assemble.origin import Origin
from trigon.assemble.run import choose_checkpoint
from trigon.checkpoint.store import CheckpointStore
from trigon.config.checks import find_device_warnings
from trigon.config.schema import Config
from trigon.errors import ConfigError, ModelError, RewardError
from trigon.report import delivery
from trigon.report.run import RunRecord
from trigon.system.machine import count_total_bytes, count_usable_cpus
from trigon.system.terminal import format_bytes
from trigon.tools.check.model import Model
from trigon.tools.check.run import Result, Skipped


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, with its memory."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which a run is to start.

    gpus: the GPUs that torch finds. host_bytes: its memory; None if it cannot be read.
    free_disk_bytes: free space on the disk of the run folder. has_cluster: workers may start on
    other machines of a running Ray cluster, whose GPUs are not known here.
    """

    gpus: tuple[Gpu, ...]
    num_cpus: int
    host_bytes: int | None
    free_disk_bytes: int
    has_cluster: bool = False


def inspect_machine(config: Config, *, has_cluster: bool = False) -> Machine:
    """Return this machine. has_cluster: see Machine."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return Machine(
        gpus=tuple(gpus),
        num_cpus=count_usable_cpus(),
        host_bytes=count_total_bytes(),
        free_disk_bytes=shutil.disk_usage(run_folder_of(config)).free,
        has_cluster=has_cluster or config.trainer.nnodes > 1,
    )


def check_devices(result: Result, config: Config, machine: Machine) -> None:
    """Report GPUs that are missing, idle or in use by others, and kernels that cannot run here."""
    wanted = config.workers_per_machine
    device = choose_device_type(config, has_gpu=bool(machine.gpus) or machine.has_cluster)
    if not machine.has_cluster:
        _count_devices(result, config, machine, device)
    if device == "cpu" or torch.cuda.is_available():
        try:
            choose_kernel(config, torch.device(device))
        except (ConfigError, ModelError) as error:
            result.fail("devices.kernel", str(error))
    for text in find_device_warnings(config, device):
        result.warn("configuration.warning", text)
    there = f"{len(machine.gpus)} GPUs and {machine.num_cpus} usable CPUs here"
    result.summary = f"{wanted} worker{'s' * (wanted > 1)} on {device}; {there}"


def _count_devices(result: Result, config: Config, machine: Machine, device: str) -> None:
    wanted, option = config.workers_per_machine, "trainer.n_gpus_per_node"
    if not config.worker.hybrid_engine:
        option += " + worker.rollout.n_gpus_per_node"
    if device == "cpu":
        if wanted > machine.num_cpus:
            message = f"{option}={wanted} starts {wanted} workers, and {machine.num_cpus} CPUs are usable"
            result.warn("devices.idle", message, f"set {option}={machine.num_cpus} or lower")
        if machine.gpus and config.trainer.device == "cpu":
            message = f"trainer.device=cpu leaves {len(machine.gpus)} GPUs ({machine.gpus[0].name}) idle"
            result.warn("devices.idle", message, "leave trainer.device out")
        return
    there = len(machine.gpus)
    if wanted > there:
        message = f"{option}={wanted}, and torch finds {there} GPUs"
        result.fail("devices.missing", message, f"set {option}={there}, or free more GPUs")
    elif wanted < there:
        message = f"{option}={wanted} leaves {there - wanted} of {there} GPUs idle"
        advice = f"set {option}={there}, or hide the others with CUDA_VISIBLE_DEVICES"
        result.warn("devices.idle", message, advice)
    rollout = config.worker.rollout
    for index, gpu in enumerate(machine.gpus[:wanted]):
        if rollout.name == "vllm" and gpu.free_bytes < rollout.gpu_memory_utilization * gpu.total_bytes:
            message = (
                f"GPU {index} ({gpu.name}) has {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free, "
                f"and vLLM is to take {rollout.gpu_memory_utilization:.0%} of all: another process uses it"
            )
            advice = "end that process, which nvidia-smi shows, or lower worker.rollout.gpu_memory_utilization"
            result.fail("devices.used", message, advice)


def check_network(result: Result, config: Config) -> None:
    """Report whether processes of this machine can connect to each other."""
    workers = config.num_devices
    if workers == 1:
        raise Skipped("one worker, in one process, to which no other connects")
    try:
        with ExitStack() as stack:
            for _ in range(2 * workers):
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        message = f"{workers} workers connect to each other over the loopback interface, which fails: {error}"
        result.fail("network.loopback", message, "allow connections to 127.0.0.1")
        return
    between = "; those between machines are tested when the run starts" if config.trainer.nnodes > 1 else ""
    result.summary = f"{2 * workers} free ports on 127.0.0.1 accept connections{between}"


def check_loggers(result: Result, config: Config) -> None:
    """Report loggers that are not installed."""
    delivery.check_loggers(config.trainer.logger)
    result.summary = ", ".join(config.trainer.logger)


def check_run_folder(result: Result, config: Config) -> int:
    """Report a folder that cannot be written, and a checkpoint from which the run cannot resume.

    Options, code and a local model are compared with those of the checkpoint; the data are not.
    Returns: the step after which the run resumes; 0: it starts from the beginning.
    Raises: CheckpointError.
    """
    folder, there = config.trainer.run_folder, run_folder_of(config)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "is not writable" if there.is_dir() else "is a file"
        advice = "set trainer.save_checkpoint_path to another folder, or change its permissions"
        result.fail("folder.unusable", f"the run folder {folder} cannot be written: {there} {problem}", advice)
        return 0
    if RunRecord(folder).is_running():
        advice = "wait for it, or set another trainer.experiment_name or trainer.save_checkpoint_path"
        result.warn("folder.used", f"another run writes to {folder} now, or its disk has no locks", advice)
    warnings: list[str] = []
    checkpoint = choose_checkpoint(config, CheckpointStore(folder, keep=-1, warn=warnings.append))
    for text in warnings:
        result.warn("checkpoint.damaged", text)
    if checkpoint is None:
        result.summary = f"{folder}: the run starts from the beginning"
        return 0
    result.summary = f"the run resumes after step {checkpoint.step}, from {checkpoint.folder}"
    try:
        Origin(config, checkpoint, lambda _: None).add_options(None)
    except (ConfigError, ModelError, RewardError):  # what the checks of these parts report
        result.summary += ", with which it cannot be compared"
    return checkpoint.step


def check_memory(result: Result, model: Model, machine: Machine) -> None:
    """Report whether the run fits into the memory that is there, by the arithmetic of its start."""
    config = model.config
    if not config.trainer.check_memory:
        raise Skipped("trainer.check_memory is false")
    if machine.has_cluster and not machine.gpus:
        raise Skipped("the memory of the machines of the run is not known here")
    uses_gpu = bool(machine.gpus) and config.trainer.device != "cpu"
    gpu_bytes = min((gpu.total_bytes for gpu in machine.gpus), default=0) if uses_gpu else 0
    hardware = Hardware("cuda" if uses_gpu else "cpu", gpu_bytes, machine.host_bytes)
    warnings: list[str] = []
    memory = arithmetic.check_memory(config, model.require_size(), hardware, warn=warnings.append)
    assert memory is not None
    most = memory.worst(certain=False)
    result.summary = f"at most {format_bytes(most.expected)} of {memory.describe_capacity(most)}, during {most.phase}"
    if not memory.counts_passes:  # the warning is about what is not counted, not about this machine
        result.summary += f"; {warnings[0]}"
        return
    for text in warnings:
        result.warn("memory.tight", text)


def check_disk(result: Result, model: Model, machine: Machine, *, total_steps: int | None) -> None:
    """Report whether the disk has space for the checkpoints that will be kept.

    total_steps: None if they are not known.
    """
    config, free = model.config, machine.free_disk_bytes
    if config.trainer.val_only:
        raise Skipped("trainer.val_only writes no checkpoint")
    each = count_checkpoint_bytes(config, model.require_size())
    folder = run_folder_of(config)
    there = f"the disk of {folder} has {format_bytes(free)} free"
    advice = "make room, set trainer.save_checkpoint_path to another disk, or keep fewer (trainer.save_limit)"
    if free < each:
        result.fail("disk.full", f"a checkpoint needs {format_bytes(each)}, and {there}", advice)
        return
    if total_steps is None:
        result.summary = f"a checkpoint needs {format_bytes(each)}, {format_bytes(free)} are free in {folder}"
        return
    kept = count_checkpoints(config, total_steps=total_steps)
    text = f"{kept} checkpoints of {format_bytes(each)} are on the disk, while the last one is written"
    if kept == 1:
        text = f"one checkpoint of {format_bytes(each)} is kept"
    result.summary = f"{text}; {format_bytes(free)} are free in {folder}"
    if free < kept * each:
        result.warn("disk.checkpoints", f"{text}: {format_bytes(kept * each)}, and {there}", advice)


def run_folder_of(config: Config) -> Path:
    """Return the run folder, or the lowest of its parents that exists."""
    folder = config.trainer.run_folder.absolute()
    return next(each for each in (folder, *folder.parents) if os.path.exists(each))  # False below one that is closed
