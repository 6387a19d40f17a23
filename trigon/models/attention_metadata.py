"""Metadata of a packed row for attention: segments, masks, arguments of kernels.

The metadata of a row is built from its group spans, and for models whose images attend in both
directions from the places of its image tokens. It is made once for each forward and shared by all
layers. This module does not depend on networks, weights or rotary positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from trigon.models.families.family import ImageLayers
from trigon.models.kernels import Kernel, KeyLayout, Segments, TokenIndices, make_block_mask
from trigon.models.routing import RowRouting
from trigon.models.sequence_parallel import RowRanks
from trigon.models.transfer import to_device
from trigon.types import GroupSpan


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Segments of a row whose attention is computed in one call, because their lengths are equal.

    by_prompt: pairs (prompt, runs) of numbers of runs, counted over the row: the segments of these
        runs attend to the keys of that prompt as well; None: to their own keys only.
    mask: true where a query may attend to a key: [L, K], or [S, 1, L, K] if the segments differ.
        None: no mask but, in the decoder, a causal one.
    """

    by_prompt: tuple[tuple[int | None, tuple[int, ...]], ...]
    mask: Tensor | None = None

    @property
    def runs(self) -> tuple[int, ...]:
        """The runs in the order of the call."""
        return tuple(run for _, runs in self.by_prompt for run in runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive segments of equal length.

    prompt: the number of their prompt's run; None for a prompt. images: [count, L], which image
    each token is of, -1 if of none; None if no token is of an image.
    """

    number: int
    count: int
    prompt: int | None
    images: Tensor | None


RECURRENT_CHUNK = 64
"""Tokens of a chunk of linear attention, as in flash-linear-attention."""


def padded_length(length: int) -> int:
    """Return the length to which a segment is padded: a power of two, or whole chunks."""
    chunk = min(RECURRENT_CHUNK, max(8, 1 << (length - 1).bit_length()))
    return -(-length // chunk) * chunk


@dataclass(frozen=True, slots=True, eq=False)
class SegmentBatch:
    """Segments that are padded to one length.

    indices: [S] int64, which segments these are. sources: [S, L] int64, the token at each place;
    the number of all tokens for padding.
    """

    indices: Tensor
    sources: Tensor


class Segmentation:
    """Consecutive segments of tokens, each with a state of its own."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths, self._device = tuple(lengths), device
        self.tokens = sum(self._lengths)
        self.host_starts = torch.tensor([0, *accumulate(self._lengths)])

    @cached_property
    def starts(self) -> Tensor:
        """The first token of each segment, and the number of tokens: [S + 1] int64."""
        return to_device(self.host_starts, self._device)

    @cached_property
    def batches(self) -> tuple[SegmentBatch, ...]:
        """The segments by their padded lengths, which follow from the segment alone."""
        starts = self.host_starts.tolist()
        batches = []
        for padded, indices in self._by_length.items():
            sources = torch.full((len(indices), padded), self.tokens)
            for row, index in zip(sources, indices, strict=True):
                row[: self._lengths[index]] = torch.arange(starts[index], starts[index + 1])
            batches.append(SegmentBatch(self._copied(torch.tensor(indices)), self._copied(sources)))
        return tuple(batches)

    @cached_property
    def outputs(self) -> Tensor:
        """The place of each token in the concatenated tokens of the batches, [T] int64."""
        starts, places, offset = self.host_starts.tolist(), torch.empty(self.tokens, dtype=torch.int64), 0
        for padded, indices in self._by_length.items():
            for index in indices:
                places[starts[index] : starts[index + 1]] = offset + torch.arange(self._lengths[index])
                offset += padded
        return self._copied(places)

    @cached_property
    def finals(self) -> Tensor:
        """The place of each segment in the concatenated segments of the batches, [S] int64."""
        order = torch.tensor([index for indices in self._by_length.values() for index in indices])
        return self._copied(order.argsort())

    @cached_property
    def _by_length(self) -> dict[int, list[int]]:
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(self._lengths):
            by_length.setdefault(padded_length(length), []).append(index)
        return by_length

    def _copied(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self._device)


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """How the layers of linear attention read a row of T tokens.

    order: [T] int64, the tokens with all prompts first, then all completions. inverse: its inverse.
    prompts, completions: their segments, in that order. completion_counts: the number of
    completions of each prompt.
    extended: the row with the last tokens of its prompt before each completion, and before a prompt
    copies of token T, a row of zeros. places: [T] int64, the first of a convolution's inputs there,
    for the tokens in `order`.
    """

    order: Tensor
    inverse: Tensor
    prompts: Segmentation
    completions: Segmentation
    completion_counts: tuple[int, ...]
    extended: KeyLayout
    places: Tensor


class AttentionMetadata:
    """The group structure of a packed row, on the row's device.

    Masks and kernel arguments are built when the first layer asks for them, and then reused.

    Args:
        spans: the groups of the row, in order and without gaps.
        kernel: the kernel that the language model attends with.
        image_tokens: [T] bool on the CPU, which tokens of the row are placeholders of images; only
            read if image_layers is not "none".
        image_layers: the layers in which the tokens of an image attend in both directions.
        row_ranks: the ranks that hold a slice of the row each; None if this rank holds the row.
        routing: what the pass asks of the routers of MoE layers; None: what transformers does.
    """

    def __init__(
        self,
        spans: Sequence[GroupSpan],
        device: torch.device,
        kernel: Kernel,
        *,
        image_tokens: Tensor | None = None,
        image_layers: ImageLayers = "none",
        row_ranks: RowRanks | None = None,
        routing: RowRouting | None = None,
    ) -> None:
        self.kernel = kernel
        self.row_ranks = row_ranks
        self.routing = routing
        self._spans = tuple(spans)
        self._device = device
        self._image_layers = image_layers
        self._images = None
        if image_tokens is not None and image_layers != "none" and image_tokens.any():
            self._images = _number_images(self._spans, image_tokens)
        self._calls: dict[int | None, tuple[AttentionCall, ...]] = {}
        self._block_masks: dict[int | None, Any] = {}
        self._recurrences: dict[int, Recurrence] = {}

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return self._spans[-1].completions[-1][1]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Segments of equal length in row order, (length, count): a prompt, or completions."""
        found: list[tuple[int, int]] = []
        for span in self._spans:
            found.append((span.prompt[1] - span.prompt[0], 1))
            found += run_lengths([end - start for start, end in span.completions])
        return found

    def calls(self, window: int | None) -> tuple[AttentionCall, ...]:
        """Return the calls that compute the attention of all segments, without a mask of the row.

        window: a token attends to itself and the window - 1 tokens before it; None for full
        attention.
        """
        if window not in self._calls:
            self._calls[window] = tuple(self._make_calls(window))
        return self._calls[window]

    def _make_calls(self, window: int | None) -> Iterator[AttentionCall]:
        images, prompt_starts = self.images(window), {span.prompt[0] for span in self._spans}
        # By the tokens before a segment, its own tokens, and whether it needs a mask.
        by_shape: dict[tuple[int, int, bool], list[_Run]] = {}
        start, last_prompt = 0, (0, 0)
        for number, (length, count) in enumerate(self.runs):
            prompt, before = (None, 0) if start in prompt_starts else last_prompt
            own = None if images is None else images[start : start + length * count].view(count, length)
            if own is not None and (own < 0).all():
                own = None
            needs_mask = prompt is not None or own is not None or (window is not None and window < length)
            by_shape.setdefault((before, length, needs_mask), []).append(_Run(number, count, prompt, own))
            if prompt is None:
                last_prompt = (number, length)
            start += length * count
        # Prompts first, so that gradients are added in an order that depends on lengths alone.
        for (before, length, needs_mask), runs in sorted(by_shape.items(), key=lambda each: each[0][0] > 0):
            mask = _causal_mask(length, before, window, self._device) if needs_mask else None
            if mask is not None and any(run.images is not None for run in runs):
                masks = [
                    mask.expand(run.count, -1, -1)
                    if run.images is None
                    else torch.stack([_image_mask(each, before, window) for each in run.images])
                    for run in runs
                ]
                mask = torch.cat([to_device(each, self._device) for each in masks])[:, None]
            by_prompt: dict[int | None, list[int]] = {}
            for run in runs:
                by_prompt.setdefault(run.prompt, []).append(run.number)
            yield AttentionCall(tuple((prompt, tuple(numbers)) for prompt, numbers in by_prompt.items()), mask)

    def images(self, window: int | None) -> Tensor | None:
        """Return which image each token is of, for layers with this sliding window.

        Returns: [T] int64 on the CPU, -1 for a token that is not of an image; None if attention is
        causal in these layers, or if the row has no images.
        """
        return None if window is None and self._image_layers == "sliding" else self._images

    @cached_property
    def segments(self) -> tuple[Segments, KeyLayout]:
        """The arguments of a varlen kernel: one segment for each prompt and each completion.

        The keys of a completion's segment are the keys of its prompt, followed by its own.
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
        return segments, self._key_layout(sources, own, shared)

    def block_mask(self, window: int | None) -> Any:
        """Return torch's BlockMask of the row, for layers with this sliding window."""
        if window not in self._block_masks:
            images = self.images(window)
            on_device = None if images is None else to_device(images.to(torch.int32), self._device)
            self._block_masks[window] = make_block_mask(self._token_indices, window, images=on_device)
        return self._block_masks[window]

    def recurrence(self, history: int) -> Recurrence:
        """Return how layers of linear attention read the row.

        history: the tokens before each token that their convolution reads, at least 1.
        """
        if history not in self._recurrences:
            self._recurrences[history] = self._recurrence(history)
        return self._recurrences[history]

    def _recurrence(self, history: int) -> Recurrence:
        end, sources = 0, []
        own = torch.zeros(self.tokens + 1, dtype=torch.int64)
        shared: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by the number of copies of a prompt's last tokens
        for span in self._spans:
            last = torch.arange(*span.prompt)[-history:]
            zeros = torch.full((history,), self.tokens)
            before, copies = zeros, []
            for part in (span.prompt, *span.completions):
                tokens = torch.arange(*part)
                sources += [before, tokens]
                own[tokens] = end + history + torch.arange(len(tokens))
                copies.append(own[last] if part is span.prompt else end + history - len(last) + torch.arange(len(last)))
                end += history + len(tokens)
                before = torch.cat((zeros, last))[-history:]
            shared.setdefault(len(copies), []).append((last, torch.stack(copies)))
        order = torch.cat(
            [torch.arange(*span.prompt) for span in self._spans]
            + [torch.arange(*part) for span in self._spans for part in span.completions]
        )
        return Recurrence(
            order=to_device(order, self._device),
            inverse=to_device(order.argsort(), self._device),
            prompts=Segmentation([span.prompt[1] - span.prompt[0] for span in self._spans], self._device),
            completions=Segmentation(
                [part[1] - part[0] for span in self._spans for part in span.completions], self._device
            ),
            completion_counts=tuple(len(span.completions) for span in self._spans),
            extended=self._key_layout(sources, own, shared),
            places=to_device(own[order] - history, self._device),
        )

    def _key_layout(
        self, sources: list[Tensor], own: Tensor, shared: dict[int, list[tuple[Tensor, Tensor]]]
    ) -> KeyLayout:
        return KeyLayout(
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


def run_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the run-length encoding of lengths: (length, number of consecutive ones)."""
    return [(length, len([*equal])) for length, equal in groupby(lengths)]


def _causal_mask(length: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of `length` queries that follow `offset` other keys.

    Returns: [length, offset + length] bool.
    """
    mask = torch.ones(length, offset + length, dtype=torch.bool, device=device).tril(offset)
    return mask if window is None else mask.triu(offset - window + 1)


def _image_mask(images: Tensor, offset: int, window: int | None) -> Tensor:
    """Return the mask of queries that follow `offset` other keys, on the CPU.

    Causal, or within an image, and never further back than the window. As transformers composes it.

    Args: images: [L], which image each query is of, -1 if of none. Returns: [L, offset + L] bool.
    """
    mask = _causal_mask(len(images), offset, None, images.device)
    mask[:, offset:] |= (images[:, None] == images) & (images >= 0)
    return mask if window is None else mask.triu(offset - window + 1)


def _number_images(spans: Sequence[GroupSpan], image_tokens: Tensor) -> Tensor:
    """Return which image each token of a row is of: [T] int64, -1 for a token that is of none.

    An image is a run of consecutive placeholders within a prompt, or within a completion.
    """
    follows = image_tokens.roll(1)
    follows[[part[0] for span in spans for part in (span.prompt, *span.completions)]] = False
    numbers = (image_tokens & ~follows).cumsum(0) - 1
    return torch.where(image_tokens, numbers, -1)


def _max_length(starts: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(starts))
