"""Online filtering: groups whose completions are all right, or all wrong, are not learned from.

DAPO's dynamic sampling (arXiv:2503.14476, section 3.2). The buffer samples further prompts in their
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from trigon.config.schema import AlgorithmConfig
from trigon.errors import RewardError
from trigon.metrics import Metrics, mean_of
from trigon.system.terminal import did_you_mean
from trigon.types import RolloutGroup

GroupClass = Literal["kept", "low", "high", "unscored"]
"""low, high: the mean is at or beyond that bound. unscored: no completion was scored."""


def label_groups(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> tuple[list[GroupClass], Metrics]:
    """Return the class of each group, and the fraction of each class.

    Raises: RewardError if a score has no number of filter_key.
    """
    values = torch.tensor(
        [[rollout.score.parts.get(algorithm.filter_key, torch.nan) for rollout in group.rollouts] for group in groups],
        dtype=torch.float64,  # so that a bound of 0.1 equals the 0.1 that a reward function returns
    )
    valid = torch.tensor([[rollout.score.outcome == "ok" for rollout in group.rollouts] for group in groups])
    if bool((valid & values.isnan()).any()):
        raise RewardError(_unknown_key(groups, algorithm.filter_key))
    labels = classify_groups(values, valid, low=algorithm.filter_low, high=algorithm.filter_high)
    classes: tuple[GroupClass, ...] = get_args(GroupClass)
    return labels, {f"filter/{name}_fraction": mean_of(float(label == name) for label in labels) for name in classes}


def classify_groups(values: Tensor, valid: Tensor, *, low: float, high: float) -> list[GroupClass]:
    """Return "kept" for each group whose mean value is strictly between two bounds.

    Dynamic sampling: DAPO, section 3.2 (arXiv:2503.14476). Means are computed in float64.
    Args: values: [G, N] float; valid: [G, N] bool, which values count.
    Returns: one class for each of the G groups.
    """
    counts, values = valid.sum(dim=1), values.double()
    means = torch.where(valid, values, 0.0).sum(dim=1) / counts.clamp(min=1)
    # The rounded mean of equal numbers can differ from that number, which may be the bound.
    lowest = torch.where(valid, values, torch.inf).amin(dim=1)
    highest = torch.where(valid, values, -torch.inf).amax(dim=1)
    means = torch.where(counts > 0, means.maximum(lowest).minimum(highest), means)
    return [
        "unscored" if not count else "low" if mean <= low else "high" if mean >= high else "kept"
        for mean, count in zip(means.tolist(), counts.tolist(), strict=True)
    ]


def _unknown_key(groups: Sequence[RolloutGroup], key: str) -> str:
    scored = [r.score.parts for group in groups for r in group.rollouts if r.score.outcome == "ok"]
    names = sorted(next(parts for parts in scored if key not in parts))
    hint = did_you_mean(key, names)
    found = ", ".join(names)
    return f"algorithm.filter_key={key}: the reward function returned no number of that name, only {found}{hint}"
