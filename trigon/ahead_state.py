"""A batch that was sampled ahead as JSON, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import torch

from trigon.batch import Batch, load_surplus, surplus_state
from trigon.data.stream import PromptStream
from trigon.metrics import EffectiveShare, Max, Mean, Metric, Metrics, Min, Sum

_KINDS: Mapping[str, type[Metric]] = {kind.__name__: kind for kind in (Mean, Sum, Max, Min, EffectiveShare)}


def batch_state(batch: Batch, prompts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch as JSON values. prompts: the state of the prompt stream after it."""
    baselines = None if batch.baselines is None else batch.baselines.tolist()
    return {
        "groups": surplus_state(batch.groups),
        "metrics": {name: [type(metric).__name__, *astuple(metric)] for name, metric in batch.metrics.items()},
        "num_sampled_tokens": batch.num_sampled_tokens,
        "baselines": None if baselines is None else [None if value != value else value for value in baselines],
        "prompts": prompts,
    }


def load_batch(
    state: Mapping[str, Any],
    prompts: PromptStream,
    *,
    num_groups: int,
    n: int,
    with_baselines: bool,
    warn: Callable[[str], None],
) -> Batch | None:
    """Return the batch that batch_state wrote; None if it is of another form, or a group is lost.

    num_groups: of a batch. n: completions per group. with_baselines: see Batch.
    Raises: as PromptStream.rebuild.
    """
    if len(state["groups"]) != num_groups or (state["baselines"] is not None) != with_baselines:
        return None
    groups = load_surplus(state["groups"], prompts, n=n, warn=warn)
    if len(groups) < len(state["groups"]):
        return None
    baselines = state["baselines"]
    return Batch(
        groups=groups,
        surplus=[],
        metrics=_load_metrics(state["metrics"]),
        num_sampled_tokens=state["num_sampled_tokens"],
        baselines=None
        if baselines is None
        else torch.tensor([torch.nan if value is None else value for value in baselines]),
    )


def _load_metrics(state: Mapping[str, list[Any]]) -> Metrics:
    return {name: _KINDS[kind](*fields) for name, (kind, *fields) in state.items()}
