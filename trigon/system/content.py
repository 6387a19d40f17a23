"""Digests of files by content, at a cost that hardly grows with their size.

A file of up to FULL_BYTES is read entirely. Of a larger one its size and evenly spaced blocks are
read: another file or other weights are noticed that way; a few bytes changed within it may not be.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

FULL_BYTES = 16 * 2**20
"""Files up to this size are read entirely."""

_NUM_BLOCKS = 256
"""Blocks that are read of a larger file, the first and the last one among them."""

_BLOCK_BYTES = 4096


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
