"""Separate environments for other trainers, which are never dependencies of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from trigon.system import torchvision_stub

FOLDER = Path(__file__).parent / ".peers"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"

PACKAGES = {
    "trl": ("trl==1.16.0", "transformers==5.23.0", "pillow"),
    "ms-swift": ("ms-swift==4.6.0", "msgspec", "qwen-vl-utils", "pillow"),
}
"""The packages of each trainer, besides the torch and torchvision of this environment."""


def python_of(peer: str) -> Path:
    """Return the interpreter of a trainer's environment, created if needed, which takes minutes.

    Raises: RuntimeError with the end of pip's output if it cannot be created.
    """
    folder = FOLDER / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    print(f"installing {peer} into {folder} (once, a few minutes)", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    own = own_torch()
    pins = folder / "pins.txt"
    pins.write_text("\n".join(own), encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins)]
    done = subprocess.run(
        [*pip, *torch_source(pip, own[0]), *own, *PACKAGES[peer]], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{peer} could not be installed:\n{done.stderr[-2000:]}")
    [packages] = folder.glob("lib/python*/site-packages")
    shutil.copy(torchvision_stub.__file__, packages / "_trigon_torchvision.py")  # as scripts/setup.sh does
    (packages / "trigon_torchvision.pth").write_text(
        "import _trigon_torchvision; _trigon_torchvision.declare_on_import()\n", encoding="utf-8"
    )
    ready.touch()
    return python


def own_torch() -> list[str]:
    """Return the requirements of the torch and torchvision of this environment.

    They have the versions that a package index knows. `torchvision.__version__` may differ from
    it: PyPI's torchvision 0.28.0 says 0.28.0+cu130.
    """
    return [f"{package}=={version(package)}" for package in ("torch", "torchvision")]


def torch_source(pip: list[str], torch: str) -> list[str]:
    """Return pip's options for the source of a CPU build of torch, as scripts/setup.sh chooses it.

    It is TORCH_INDEX if that is set, then pip's configured sources if they have the build, and
    otherwise PyTorch's own index. pip: its command up to the requirements. torch: the requirement.
    """
    if index := os.environ.get("TORCH_INDEX"):
        return ["--extra-index-url", index]
    if "+cpu" not in torch:
        return []
    probe = subprocess.run([*pip, "--dry-run", "--no-deps", torch], capture_output=True, check=False)
    return ["--extra-index-url", PYTORCH_INDEX] if probe.returncode else []
