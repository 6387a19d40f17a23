"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

Where an index has no CPU build of torchvision, its CUDA build is installed instead. It cannot load its own operators
under CPU torch and then fails to import, because it describes two of them to the compiler. Declaring them first is
enough: image processors and vLLM use nothing of torchvision that needs them. torchaudio and torchcodec, which vLLM
brings along, fail in the same place, and nothing here hears or decodes video: they are hidden, so that transformers
takes them for not installed. Registered as a vLLM plugin as well, for processes that vLLM starts. Knows torch; imports
nothing of ours.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_library: Any = None  # the declarations live as long as this object does


def declare_operators() -> None:
    """Declare torchvision's compiled operators if its own extension cannot.

    Safe to call twice, and before or after it is imported.
    """
    global _library
    import torch

    package = importlib.util.find_spec("torchvision")
    if _library is not None or torch.version.cuda is not None or package is None or package.origin is None:
        return
    for extension in Path(package.origin).parent.glob("_C*.so"):
        try:  # a CPU build declares its operators by itself
            torch.ops.load_library(extension)  # type: ignore[no-untyped-call]
            return
        except OSError:  # a CUDA build wants libraries that a CPU build of torch does not bring
            continue
    for package_of_sound in ("torchaudio", "torchcodec"):
        sys.modules.setdefault(package_of_sound, None)  # type: ignore[arg-type]  # None: "not there", says importlib
    _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
