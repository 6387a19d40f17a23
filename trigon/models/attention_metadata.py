"""Metadata of a packed row for attention: group lengths, masks, and arguments of the kernels.

The metadata of a row is built from its group spans alone. It is made once for each forward and
shared by all layers. This module does not depend on models, weights or rotary positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from trigon.models.kernels import Kernel, KeyLayout, Segments, TokenIndices, make_block_mask
from trigon.models.sequence_parallel import RowRanks
from trigon.models.transfer import to_device
from trigon.types import GroupSpan

RunLengths = tuple[tuple[int, int], ...]
"""Run-length encoding of segment lengths: (length, number of consecutive segments), in row order.
"""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """The prompt length of one group of a row, and the lengths of its completions."""

    prompt_length: int
    completion_runs: RunLengths


@dataclass(frozen=True, slots=True, eq=False)
class GroupMasks:
    """Attention masks of one group, for layers with one sliding window. True: may be attended to.

    completion: {R: [R, P + R] bool}, the mask of a completion of R tokens.
    prompt: [P, P] bool if the window is shorter than the prompt; None for a plain causal mask.
    """

    completion: dict[int, Tensor]
    prompt: Tensor | None


class AttentionMetadata:
    """The group structure of a packed row, on the row's device.

    Masks and kernel arguments are built when the first layer asks for them, and then reused.

    Args:
        spans: the groups of the row, in order and without gaps.
        kernel: the kernel that the language model attends with.
        row_ranks: the ranks that hold a slice of the row each; None if this rank holds the row.
    """

    def __init__(
        self, spans: Sequence[GroupSpan], device: torch.device, kernel: Kernel, *, row_ranks: RowRanks | None = None
    ) -> None:
        self.kernel = kernel
        self.row_ranks = row_ranks
        self._spans = tuple(spans)
        self._device = device
        self._masks: dict[int | None, tuple[GroupMasks, ...]] = {}
        self._block_masks: dict[int | None, Any] = {}

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return self._spans[-1].completions[-1][1]

    @cached_property
    def groups(self) -> tuple[GroupLayout, ...]:
        """The layout of each group, in row order."""
        return tuple(
            GroupLayout(span.prompt[1] - span.prompt[0], run_lengths(end - start for start, end in span.completions))
            for span in self._spans
        )

    def masks(self, window: int | None) -> tuple[GroupMasks, ...]:
        """Return the masks of each group, for layers with this sliding window.

        window: a token attends to itself and the window - 1 tokens before it; None for full
        attention.
        """
        if window not in self._masks:
            self._masks[window] = tuple(self._group_masks(group, window) for group in self.groups)
        return self._masks[window]

    def _group_masks(self, group: GroupLayout, window: int | None) -> GroupMasks:
        length, device = group.prompt_length, self._device
        return GroupMasks(
            completion={each: _causal_mask(each, length, window, device) for each, _ in group.completion_runs},
            prompt=None if window is None or window >= length else _causal_mask(length, 0, window, device),
        )

    @cached_property
    def segments(self) -> tuple[Segments, KeyLayout]:
        """The arguments of a varlen kernel: one segment for each prompt and each completion.

        The keys of a completion's segment are those of its prompt, followed by its own.
        """
        query_starts, key_starts = [0], [0]
        sources: list[Tensor] = []
        own = torch.empty(self.tokens, dtype=torch.int64)
        shared: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by the number of copies of each prompt key
        for span in self._spans:
            prompt = torch.arange(*span.prompt)
            copies = []
            for part in (span.prompt, *span.completions):
                begin = key_starts[-1]
                tokens = torch.arange(*part)
                keys = prompt if part is span.prompt else torch.cat((prompt, tokens))
                own[tokens] = begin + torch.arange(len(keys) - len(tokens), len(keys))
                copies.append(begin + torch.arange(len(prompt)))
                sources.append(keys)
                query_starts.append(part[1])
                key_starts.append(begin + len(keys))
            shared.setdefault(len(copies), []).append((prompt, torch.stack(copies)))
        segments = Segments(
            query_starts=to_device(torch.tensor(query_starts, dtype=torch.int32), self._device),
            key_starts=to_device(torch.tensor(key_starts, dtype=torch.int32), self._device),
            max_queries=_max_length(query_starts),
            max_keys=_max_length(key_starts),
        )
        layout = KeyLayout(
            sources=to_device(torch.cat(sources), self._device),
            own=to_device(own, self._device),
            shared=tuple(
                (
                    to_device(torch.cat([tokens for tokens, _ in equal]), self._device),
                    to_device(torch.cat([copies for _, copies in equal], 1), self._device),
                )
                for equal in shared.values()
            ),
        )
        return segments, layout

    def block_mask(self, window: int | None) -> Any:
        """Return torch's BlockMask of the row, for layers with this sliding window."""
        if window not in self._block_masks:
            self._block_masks[window] = make_block_mask(self._token_indices, window)
        return self._block_masks[window]

    @cached_property
    def _token_indices(self) -> TokenIndices:
        groups, segments, positions = [], [], []
        for group, span in enumerate(self._spans):
            prompt_length = span.prompt[1] - span.prompt[0]
            for segment, (start, end) in enumerate((span.prompt, *span.completions)):
                groups.append(torch.full((end - start,), group))
                segments.append(torch.full((end - start,), segment))
                positions.append(torch.arange(end - start) + (prompt_length if segment else 0))
        return TokenIndices(
            *(to_device(torch.cat(each).to(torch.int32), self._device) for each in (groups, segments, positions))
        )


def run_lengths(lengths: Iterable[int]) -> RunLengths:
    """Return the run-length encoding of a sequence of lengths."""
    return tuple((length, len(list(equal))) for length, equal in groupby(lengths))


def _causal_mask(length: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of `length` queries that follow `offset` other keys.

    Returns: [length, offset + length] bool.
    """
    mask = torch.ones(length, offset + length, dtype=torch.bool, device=device).tril(offset)
    return mask if window is None else mask.triu(offset - window + 1)


def _max_length(starts: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(starts))
