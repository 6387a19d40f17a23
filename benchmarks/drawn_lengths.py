"""Completions of given lengths from a model with random weights: a plugin of vLLM that lowers the
token limit of each request to a length drawn by its seed, so that runs that differ in their
workers sample the same lengths.

`environment` gives the variables with which a run, and the workers that it starts, load it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

from simulation import LongTail

VARIABLE = "TRIGON_BENCHMARK_LENGTHS"


def environment(folder: Path, lengths: LongTail) -> dict[str, str]:
    """Return variables for a process, and write the description of the plugin into a new folder."""
    described = folder / "drawn_lengths-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: drawn_lengths\nVersion: 1.0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndrawn_lengths = drawn_lengths:install\n", encoding="utf-8"
    )
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        VARIABLE: json.dumps(dataclasses.asdict(lengths)),
    }


def install() -> None:
    """Draw the lengths of all requests of this process. vLLM calls it before it makes an engine."""
    from trigon.rollout.vllm import turns

    lengths = LongTail(**json.loads(os.environ[VARIABLE]))
    make = turns.vllm_sampling_params
    if getattr(make, "draws_lengths", False):  # vLLM may load its plugins more than once
        return

    def limited(*arguments: Any, max_tokens: int, seed: int, **options: Any) -> Any:
        drawn = lengths.draw(random.Random(seed))
        return make(*arguments, max_tokens=min(max_tokens, drawn), seed=seed, **options)

    limited.draws_lengths = True
    turns.vllm_sampling_params = limited
