"""Separate environments for other trainers, which are never dependencies of the project."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".peers"

PACKAGES = {
    "trl": ("trl==1.16.0", "transformers==5.23.0", "pillow"),
    "ms-swift": ("ms-swift==4.6.0", "msgspec", "qwen-vl-utils", "pillow"),
}
"""The packages of each trainer, besides the torch and torchvision of this environment."""


# PyPI has the CUDA build of torchvision. Under a CPU build of torch it can be imported once the two
# operators that it extends are defined. Python runs this file at every start.
OPERATORS = """
import torch

if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def python_of(peer: str) -> Path:
    """Return the interpreter of a trainer's environment, created if needed, which takes minutes.

    Raises: RuntimeError with the end of pip's output if it cannot be created.
    """
    folder = FOLDER / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    import torch
    import torchvision

    print(f"installing {peer} into {folder} (once, a few minutes)", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    own = [f"torch=={torch.__version__}", f"torchvision=={torchvision.__version__}"]
    pins = folder / "pins.txt"
    pins.write_text("\n".join(own), encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins)]
    if "+cpu" in torch.__version__:
        command += ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    done = subprocess.run([*command, *own, *PACKAGES[peer]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{peer} could not be installed:\n{done.stderr[-2000:]}")
    if "+cpu" in torch.__version__ and "+cpu" not in torchvision.__version__:
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "sitecustomize.py").write_text(OPERATORS, encoding="utf-8")
    ready.touch()
    return python
