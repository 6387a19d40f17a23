"""Two tensors for each completion in a message that has tensors for each group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def join_pairs(first: Sequence[Sequence[Tensor]], second: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return for each group the first tensors of its completions, then the second ones."""
    return [[*of_first, *of_second] for of_first, of_second in zip(first, second, strict=True)]


def split_pairs(joined: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return what join_pairs joined."""
    return (
        [[*group[: len(group) // 2]] for group in joined],
        [[*group[len(group) // 2 :]] for group in joined],
    )
