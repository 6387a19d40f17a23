"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

Where a package index has no CPU build of torchvision, pip installs its CUDA build. That build
cannot load its compiled operators under CPU torch, and its import fails, because it registers fake
implementations of two of them. Declaring the two operators first is enough: image processors and
vLLM call neither. torchaudio and torchcodec, which vLLM depends on, fail in the same place; nothing
here decodes audio with them, so they are hidden and transformers treats them as not installed.

scripts/setup.sh copies this file into the environment and calls declare_on_import() from a .pth
file, so that every process of the environment is covered: vLLM inspects model classes in a process
that imports torchvision before it loads any plugin. In other environments Trigon calls
declare_operators() itself, and vLLM's plugin hook does in the processes that vLLM starts. Imports
nothing of this package, and torch only when it is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_library: Any = None  # the declarations live as long as this object does


def declare_operators() -> None:
    """Declare torchvision's compiled operators if its own extension cannot be loaded.

    May be called more than once, before or after torchvision is imported.
    """
    global _library
    import torch

    package = importlib.util.find_spec("torchvision")
    if _library is not None or torch.version.cuda is not None or package is None or package.origin is None:
        return
    for extension in Path(package.origin).parent.glob("_C*.so"):
        try:  # a CPU build declares its operators itself
            torch.ops.load_library(extension)  # type: ignore[no-untyped-call]
            return
        except OSError:  # a CUDA build needs libraries that a CPU build of torch does not bring
            continue
    for audio_package in ("torchaudio", "torchcodec"):
        sys.modules.setdefault(audio_package, None)  # type: ignore[arg-type]  # importlib reads None as "not installed"
    if hasattr(torch.ops.torchvision, "nms"):  # declared by another copy of this module
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators at the first import of torchvision; finds no module itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()


def declare_on_import() -> None:
    """Call declare_operators() when this process first imports torchvision.

    Until then nothing is imported.
    """
    sys.meta_path.insert(0, _BeforeTorchvision())
