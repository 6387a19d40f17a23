"""PromptBuilders and datasets with default arguments for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trigon.config.schema import DataConfig
from trigon.data.dataset import open_prompts
from trigon.data.prompts import PromptBuilder
from trigon.data.stream import Prompts, mix
from trigon.models.load import Processors

DEFAULTS: dict[str, Any] = {
    "prompt_key": "problem",
    "max_prompt_length": 512,
    "max_image_pixels": 1_000_000,
    "max_bad_row_fraction": 0.0,
}


def make_builder(processors: Processors, **changes: Any) -> PromptBuilder:
    """Return a builder for the columns problem, answer, images and videos.

    changes: options of the section data, and arguments of PromptBuilder.
    """
    data = {name: value for name, value in changes.items() if name in DataConfig.model_fields}
    arguments = {name: value for name, value in changes.items() if name not in data}
    return PromptBuilder(processors, DataConfig(**(DEFAULTS | data)), **arguments)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write a file of JSON lines, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(specs: str | Sequence[str], builder: PromptBuilder, weights: Sequence[float] = ()) -> Prompts:
    """Return the prompts of one or several datasets."""
    each = [specs] if isinstance(specs, str) else specs
    return mix([open_prompts(spec, builder, num_workers=1) for spec in each], weights)
