"""Loads what many tests need of the shared tiny models once in a process."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

from trigon.models.load import Processors, load_processors


def processors_of(folder: Path) -> Processors:
    """Return the tokenizer and the processors of a model that no test changes.

    The config is the caller's own; all else is shared, and must not be changed either.
    """
    loaded = _load(str(folder))
    return replace(loaded, hf_config=copy.deepcopy(loaded.hf_config))


@cache
def _load(folder: str) -> Processors:
    return load_processors(folder)
