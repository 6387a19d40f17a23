"""Loads what many tests need of the shared tiny models once in a process; copies with changes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy


def processors_of(folder: Path) -> Processors:
    """Return the tokenizer and the processors of a model that no test changes.

    The config is the caller's own; all else is shared, and must not be changed either.
    """
    loaded = _load(str(folder))
    return replace(loaded, hf_config=copy.deepcopy(loaded.hf_config))


def policy_of(folder: Path, *, dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> Policy:
    """Return a policy with the weights of a model, on the CPU."""
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=dtype, device="cpu")
    return Policy(model, processors.family, temperature=temperature, banned_token_ids=processors.banned_token_ids)


def changed_copy(
    folder: Path, parent: Path, change: Callable[[dict[str, Any]], object], *, file: str = "config.json"
) -> Path:
    """Return a copy of a model's folder in parent, of which change has changed a JSON file."""
    copied = Path(shutil.copytree(folder, parent / "model"))
    content = json.loads((copied / file).read_text())
    change(content)
    (copied / file).write_text(json.dumps(content))
    return copied


@cache
def _load(folder: str) -> Processors:
    return load_processors(folder)
