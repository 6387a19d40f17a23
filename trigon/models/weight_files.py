"""The safetensors files of a model: what is in them, their dtype, and writing them for other users.

safetensors (0.7) creates its files for their owner only (mode 0600), whatever the umask is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of all tensors in a model folder; None if they differ or are not floats.

    Only headers are read. None as well for a folder without safetensors files.
    """
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
    return _DTYPES.get(names.pop()) if len(names) == 1 else None


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the buffers that a model stores beside its parameters, by their names."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over what a model stores: its parameters, then stored_buffers."""
    yield from model.named_parameters()
    yield from stored_buffers(model)


def save_weights(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write contiguous tensors as a safetensors file that PyTorch libraries accept."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    set_default_mode([file])


def set_default_mode(files: list[Path]) -> None:
    """Give files of one folder the mode of new files there, 0666 without the bits of the umask."""
    if not files:
        return
    # The umask can only be read by changing it, for all threads at once; a new file shows it.
    folder = Path(mkdtemp(dir=files[0].parent, prefix=".mode_"))
    new_file = folder / "file"
    new_file.touch()
    mode = new_file.stat().st_mode & 0o777
    new_file.unlink()
    folder.rmdir()
    for file in files:
        os.chmod(file, mode)
