"""Digests of files by content, at a cost that hardly grows with their size.

A file of up to FULL_BYTES is read entirely. Of a larger one its size and evenly spaced blocks are
read; of safetensors files the names, dtypes and shapes of all tensors, and blocks of each. Another
file or other weights are noticed that way; a few bytes changed within a large file may not be.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FULL_BYTES = 16 * 2**20
"""Files up to this size are read entirely."""

_NUM_BLOCKS = 256
"""Blocks that are read of a larger file, the first and the last one among them."""

_BLOCK_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, whose own limit it is
_MAX_THREADS = 8


def text_digest(text: str) -> str:
    """Return a digest of a text: 32 hexadecimal digits, as of every function here."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """Return a digest of a file, of its size and blocks if it is large. Raises: OSError."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= FULL_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        digest = hashlib.sha256(b"%d bytes" % num_bytes)
        for number in range(_NUM_BLOCKS):
            offset = (num_bytes - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
        return digest.hexdigest()[:32]


def weights_digest(files: Sequence[Path]) -> str:
    """Return a digest of all tensors in safetensors files, however they are divided over the files.

    Of each tensor the first, middle and last 4 KiB are read. A file that is not in this format is
    taken as one tensor. Raises: OSError.
    """
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="digest") as pool:
        tensors = [tensor for found in pool.map(_tensor_digests, files) for tensor in found]
    digest = hashlib.sha256()
    for line in sorted(tensors):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:32]


def _tensor_digests(path: Path) -> list[str]:
    """Return a line for each tensor of a file: its name, dtype, shape and the digest of blocks."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        num_header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = _read_header(os.pread(descriptor, min(num_header_bytes, _MAX_HEADER_BYTES), 8))
        if header is None:
            return [file_digest(path)]  # such as a .bin file; what is damaged is an error as it is loaded
        return [
            f"{name} {entry['dtype']} {entry['shape']} "
            f"{_blocks_digest(descriptor, 8 + num_header_bytes, *entry['data_offsets'])}"
            for name, entry in header.items()
        ]


def _read_header(text: bytes) -> dict[str, dict[str, Any]] | None:
    """Return the tensors of a safetensors header by name, or None if it is no such header."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        is_valid = all(
            entry.keys() >= {"dtype", "shape"} and all(isinstance(each, int) for each in entry["data_offsets"])
            for entry in header.values()
        ) and all(len(entry["data_offsets"]) == 2 for entry in header.values())
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return header if is_valid else None


def _blocks_digest(descriptor: int, start: int, first: int, last: int) -> str:
    """Return a digest of three blocks of the bytes [first, last) after start."""
    num_bytes = max(last - first, 0)
    digest = hashlib.sha256()
    if num_bytes <= 3 * _BLOCK_BYTES:
        digest.update(os.pread(descriptor, num_bytes, start + first))
    else:
        for offset in (0, (num_bytes - _BLOCK_BYTES) // 2, num_bytes - _BLOCK_BYTES):
            digest.update(os.pread(descriptor, _BLOCK_BYTES, start + first + offset))
    return digest.hexdigest()[:32]
