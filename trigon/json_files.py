"""Writes JSON files atomically: after a crash, a file has its old or its new content."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(
    path: Path,
    content: Mapping[str, Any],
    *,
    indent: int = 2,
    ensure_ascii: bool = True,
    allow_nan: bool = True,
    sync: bool = False,
) -> None:
    """Write content to path as JSON that ends with a newline, by a temporary file and a rename.

    Args:
        indent: spaces per level.
        ensure_ascii: escape characters outside ASCII; False writes them as UTF-8.
        allow_nan: write NaN and infinity as the literals `NaN` and `Infinity`, which are not JSON.
        sync: flush the content to the disk before the rename. The caller flushes the folder.
    Raises: ValueError for NaN or infinity with allow_nan=False; OSError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent, ensure_ascii=ensure_ascii, allow_nan=allow_nan)
        file.write("\n")
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
