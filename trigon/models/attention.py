"""Attention over groups that lie end to end in one row, and over a vision tower's windows: exact, no row-wide mask.

        keys      p p p | a a | b b b      A prompt attends to itself, causally; a completion to its whole prompt and,
        p p p     x                        causally, to itself. Where no kernel takes a row in one call, it is worked
                  x x                      off in pieces: all prompts that are equally long in one call, and all
                  x x x                    completions that are, and whose prompts are, in another. The only mask is
        a a       x x x | x                that of one such completion, [R, P + R].
                  x x x | x x
        b b b     x x x |     | x          Windows and images of a vision tower are independent of each other: one call
                  x x x |     | x x        for all, or one for all that are equally long.
                  x x x |     | x x x

A layer of a language model may have a sliding window as well: what lies further back is masked, [P, P] in a prompt.

Knows spans, lengths, and which kernel (kernels.py) works them off. Refuses to know models, positions and weights. Its
functions are registered with transformers; what they need reaches them by keyword argument, never through a global, so
that recomputation under gradient checkpointing sees the same plan. Which kernel a model attends by stands in one place,
the names of these functions in its configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trigon.models.families import Family
from trigon.models.kernels import (
    Kernel,
    Pieces,
    SharedKeys,
    TokenPlaces,
    flex,
    flex_mask,
    lay_out,
    pieces_attention,
    takes,
)
from trigon.types import GroupSpan

# Not "flash" in any of these: transformers would make masks for such an implementation.
GROUP_ATTENTION: dict[Kernel, str] = {
    "sdpa": "trigon_groups",
    "varlen": "trigon_groups_varlen",
    "flex": "trigon_groups_flex",
    "flash": "trigon_groups_fa",
}
# A vision tower hands over the boundaries of its windows only to an implementation whose name contains "flash";
# from any other it asks for one window at a time.
WINDOW_ATTENTION: dict[Kernel, str] = {
    "sdpa": "trigon_flash_windows",
    "varlen": "trigon_flash_windows_varlen",
    "flex": "trigon_flash_windows",
    "flash": "trigon_flash_windows_fa",
}

_Runs = tuple[tuple[int, int], ...]  # (length, how many pieces of this length follow each other), in row order


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """One group of a row: the length of its prompt, and those of its completions."""

    prompt_length: int
    completion_runs: _Runs


@dataclass(frozen=True, slots=True, eq=False)
class GroupMasks:
    """Where the tokens of a group may look, in layers of one window.

    completion: {R: [R, P + R] bool}, true where a completion of R tokens may look. prompt: [P, P] bool, the same for
    the prompt, where the window cuts off any of it; None where it is causal and no more.
    """

    completion: dict[int, Tensor]
    prompt: Tensor | None


class RowPlan:
    """What attention needs to know of a row, on its device; one for a forward, shared by its layers.

    What each kernel goes by is made when the first layer asks for it.
    """

    def __init__(self, spans: Sequence[GroupSpan], device: torch.device, kernel: Kernel) -> None:
        self.kernel = kernel
        self._spans = tuple(spans)
        self._device = device
        self._masks: dict[int | None, tuple[GroupMasks, ...]] = {}
        self._flex_masks: dict[int | None, Any] = {}

    @cached_property
    def groups(self) -> tuple[GroupPlan, ...]:
        """The row's groups, in order."""
        return tuple(
            GroupPlan(span.prompt[1] - span.prompt[0], _runs_of(end - start for start, end in span.completions))
            for span in self._spans
        )

    def masks(self, window: int | None) -> tuple[GroupMasks, ...]:
        """Return those of each group. A window of W lets a token look at itself and the W - 1 tokens before it."""
        if window not in self._masks:
            self._masks[window] = tuple(self._group_masks(group, window) for group in self.groups)
        return self._masks[window]

    def _group_masks(self, group: GroupPlan, window: int | None) -> GroupMasks:
        length, device = group.prompt_length, self._device
        return GroupMasks(
            completion={each: _causal_mask(each, length, window, device) for each, _ in group.completion_runs},
            prompt=None if window is None or window >= length else _causal_mask(length, 0, window, device),
        )

    @cached_property
    def pieces(self) -> tuple[Pieces, SharedKeys]:
        """Each prompt, and each completion behind the keys of its prompt: for a kernel that takes all in one call."""
        query_starts, key_starts = [0], [0]
        sources: list[Tensor] = []
        own = torch.empty(self._spans[-1].completions[-1][1], dtype=torch.int64)
        shared: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by how many copies there are
        for span in self._spans:
            prompt = torch.arange(*span.prompt)
            copies = []
            for part in (span.prompt, *span.completions):
                begin = key_starts[-1]
                tokens = torch.arange(*part)
                laid_out = prompt if part is span.prompt else torch.cat((prompt, tokens))
                own[tokens] = begin + torch.arange(len(laid_out) - len(tokens), len(laid_out))
                copies.append(begin + torch.arange(len(prompt)))
                sources.append(laid_out)
                query_starts.append(part[1])
                key_starts.append(begin + len(laid_out))
            shared.setdefault(len(copies), []).append((prompt, torch.stack(copies)))
        pieces = Pieces(
            query_starts=torch.tensor(query_starts, dtype=torch.int32, device=self._device),
            key_starts=torch.tensor(key_starts, dtype=torch.int32, device=self._device),
            longest_query=_longest(query_starts),
            longest_keys=_longest(key_starts),
        )
        keys = SharedKeys(
            sources=torch.cat(sources).to(self._device),
            own=own.to(self._device),
            shared=tuple(
                (
                    torch.cat([tokens for tokens, _ in same]).to(self._device),
                    torch.cat([copies for _, copies in same], 1).to(self._device),
                )
                for same in shared.values()
            ),
        )
        return pieces, keys

    def flex_mask(self, window: int | None) -> Any:
        """Return torch's BlockMask of the row, for layers of this window."""
        if window not in self._flex_masks:
            self._flex_masks[window] = flex_mask(self._places, window)
        return self._flex_masks[window]

    @cached_property
    def _places(self) -> TokenPlaces:
        groups, parts, places = [], [], []
        for number, span in enumerate(self._spans):
            before = span.prompt[1] - span.prompt[0]
            for part, (start, end) in enumerate((span.prompt, *span.completions)):
                groups.append(torch.full((end - start,), number))
                parts.append(torch.full((end - start,), part))
                places.append(torch.arange(end - start) + (before if part else 0))
        return TokenPlaces(*(torch.cat(each).to(torch.int32).to(self._device) for each in (groups, parts, places)))


def windows_of(text_config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer of a language model: None for full attention, else its length."""
    window = getattr(text_config, "sliding_window", None) or None
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(text_config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def use_group_attention(model: Any, family: Family, kernel: Kernel = "sdpa") -> None:
    """Make a transformers model attend within groups by a kernel: its language model by spans, its vision tower by
    windows, unless that sees tiles, which are a batch.

    The model then works only with the keyword argument that Policy passes, and has no padded path.
    """
    from transformers import AttentionInterface

    for name in GROUP_ATTENTION.values():
        AttentionInterface.register(name, _group_attention)
    for by, name in WINDOW_ATTENTION.items():
        AttentionInterface.register(name, partial(_window_attention, kernel="sdpa" if by == "flex" else by))
    family.language_model(model).set_attn_implementation(GROUP_ATTENTION[kernel])
    tower = family.vision_tower(model)
    if tower is not None and not family.tiles:
        # transformers 5.16 to 5.19 answer set_attn_implementation("...flash...") by looking for a downloadable kernel
        # of that name, registered or not; the config's own setter does not.
        tower.config._attn_implementation = WINDOW_ATTENTION[kernel]


def kernel_of(language_config: Any) -> Kernel:
    """Return by which kernel a language model attends, as use_group_attention has written into its config."""
    name = language_config._attn_implementation
    for kernel, known in GROUP_ATTENTION.items():
        if name == known:
            return kernel
    raise RuntimeError(f"A model with {name!r} attention cannot score groups. Call use_group_attention first.")


def group_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, *, scale: float, window: int | None = None
) -> Tensor:
    """Attend within each group of a row, by the plan's kernel, or by sdpa where that does not take such heads.

    Args: query: [1, H, T, D]; key, value: [1, K, T, D], where K divides H; window: of the layer.
    Returns: [1, T, H, D].
    """
    dtype = _dtype_of(query)
    kernel = plan.kernel if takes(plan.kernel, dtype, query.shape[-1], window) else "sdpa"
    match kernel:
        case "sdpa":
            return _group_by_group(query, key, value, plan, scale=scale, window=window)
        case "flex":
            query, key, value = (part.to(dtype) for part in (query, key, value))
            return flex(query, key, value, plan.flex_mask(window), scale=scale).transpose(1, 2)
        case "varlen" | "flash":
            pieces, keys = plan.pieces
            query, key, value = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
            output = pieces_attention(
                query,
                lay_out(key, keys),
                lay_out(value, keys),
                pieces,
                kernel=kernel,
                scale=scale,
                causal=True,
                window=window,
            )
            return output[None]
        case _:
            assert_never(kernel)


def _group_by_group(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, *, scale: float, window: int | None
) -> Tensor:
    if query.is_cuda:  # the kernel that takes masks there does not take fewer key heads than query heads
        heads_per_key = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    # One split each, since the gradient of many slices would be as many tensors of the whole row.
    lengths = [part for group in plan.groups for part in (group.prompt_length, _total(group.completion_runs))]
    queries, keys, values = (torch.split(states, lengths, 2) for states in (query, key, value))
    masks = plan.masks(window)
    # Pieces that are alike, of one group or of several, are attended to in one call.
    prompts: dict[int, list[int]] = {}  # prompt length: its groups
    completions: dict[tuple[int, int], list[int]] = {}  # (prompt length, completion length): likewise
    by_length = [
        [_by_length(states[2 * index + 1], group.completion_runs) for index, group in enumerate(plan.groups)]
        for states in (queries, keys, values)
    ]
    for index, group in enumerate(plan.groups):
        prompts.setdefault(group.prompt_length, []).append(index)
        for length in by_length[0][index]:
            completions.setdefault((group.prompt_length, length), []).append(index)
    prompt_outputs: dict[int, Tensor] = {}
    for same in prompts.values():
        batch = [_joined([states[2 * index] for index in same]) for states in (queries, keys, values)]
        mask = masks[same[0]].prompt
        output = _attend(*batch, scale=scale, mask=mask, causal=mask is None)
        prompt_outputs.update(zip(same, torch.split(output, 1), strict=True))
    completion_outputs: list[dict[int, Tensor]] = [{} for _ in plan.groups]
    for (_, length), same in completions.items():
        batches = [by_length[0][index][length] for index in same]
        laid_out = [
            _joined([_behind(states[2 * index], own[index][length]) for index in same])
            for states, own in ((keys, by_length[1]), (values, by_length[2]))
        ]
        output = _attend(_joined(batches), *laid_out, scale=scale, mask=masks[same[0]].completion[length])
        for index, part in zip(same, torch.split(output, [len(batch) for batch in batches]), strict=True):
            completion_outputs[index][length] = part
    outputs: list[Tensor] = []
    for index, group in enumerate(plan.groups):
        outputs.append(prompt_outputs[index].transpose(1, 2))
        outputs.extend(_in_row_order(completion_outputs[index], group.completion_runs))
    return torch.cat(outputs, 1)


def _behind(prompt: Tensor, own: Tensor) -> Tensor:
    """Lay a prompt's keys or values before those of each completion: [1, K, P, D], [c, K, R, D] -> [c, K, P + R, D]."""
    return torch.cat((prompt.expand(len(own), -1, -1, -1), own), 2)


def _joined(batches: list[Tensor]) -> Tensor:
    return torch.cat(batches) if len(batches) > 1 else batches[0]


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    *,
    scale: float,
    kernel: Literal["sdpa", "varlen", "flash"] = "sdpa",
    longest: int | None = None,
) -> Tensor:
    """Attend within each window, not causally: by this kernel, or by sdpa where it does not take such heads.

    Args: query, key, value: [1, H, S, D]; starts: [windows + 1] int32, where each window begins, and S; longest: tokens
    of the longest window, or None. Returns: [1, S, H, D].
    """
    dtype = _dtype_of(query)
    if kernel == "sdpa" or not takes(kernel, dtype, query.shape[-1], None):
        return _length_by_length(query, key, value, starts.diff().tolist(), scale=scale)
    if longest is None:
        longest = int(starts.diff().max())
    pieces = Pieces(query_starts=starts, key_starts=starts, longest_query=longest, longest_keys=longest)
    query, key, value = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    return pieces_attention(query, key, value, pieces, kernel=kernel, scale=scale, causal=False)[None]


def _length_by_length(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    runs = _runs_of(lengths)
    keys, values = _by_length(key, runs), _by_length(value, runs)
    attended = {
        length: _attend(batch, keys[length], values[length], scale=scale)
        for length, batch in _by_length(query, runs).items()
    }
    return torch.cat(_in_row_order(attended, runs), 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _causal_mask(length: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, offset + length] bool: where tokens that follow `offset` others may look."""
    mask = torch.ones(length, offset + length, dtype=torch.bool, device=device).tril(offset)
    return mask if window is None else mask.triu(offset - window + 1)


def _dtype_of(states: Tensor) -> torch.dtype:
    """Return what attention computes in: what autocast asks for, since not every kernel is known to it."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _longest(starts: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(starts))


def _runs_of(lengths: Any) -> _Runs:
    return tuple((length, len(list(equal))) for length, equal in groupby(lengths))


def _total(runs: _Runs) -> int:
    return sum(length * count for length, count in runs)


def _by_length(states: Tensor, runs: _Runs) -> dict[int, Tensor]:
    """Cut [1, H, S, D] into its pieces and stack equally long ones: {length L: [pieces, H, L, D]}."""
    batches: dict[int, list[Tensor]] = {}
    parts = torch.split(states, [length * count for length, count in runs], 2)
    for (length, count), run in zip(runs, parts, strict=True):
        batches.setdefault(length, []).append(run[0].view(run.shape[1], count, length, -1).transpose(0, 1))
    return {length: torch.cat(batch) if len(batch) > 1 else batch[0] for length, batch in batches.items()}


def _in_row_order(batches: dict[int, Tensor], runs: _Runs) -> list[Tensor]:
    """Undo _by_length: return the runs, [1, pieces * L, H, D] each, as they follow each other in the row."""
    counts: dict[int, list[int]] = {}
    for length, count in runs:
        counts.setdefault(length, []).append(count)
    waiting = {length: iter(torch.split(batch, counts[length])) for length, batch in batches.items()}
    return [next(waiting[length]).transpose(1, 2).flatten(0, 1)[None] for length, _ in runs]


def _group_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    group_plan: RowPlan | None = None,
    **_unused: Any,  # what transformers passes besides, all of it without effect here
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert dropout == 0.0
    if group_plan is None:
        raise RuntimeError(
            "A model with group attention was called directly. Call its Policy, or set_attn_implementation('sdpa')."
        )
    # From the config, as transformers makes its masks: not every family passes its window on.
    layer: Any = module
    window = windows_of(layer.config)[layer.layer_idx]
    return group_attention(query, key, value, group_plan, scale=scaling, window=window), None


def _window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    kernel: Literal["sdpa", "varlen", "flash"],
    dropout: float = 0.0,
    max_length_q: int | Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert dropout == 0.0
    longest = None if kernel == "sdpa" or max_length_q is None else int(max_length_q)  # a tensor before 5.18
    output = window_attention(query, key, value, cu_seq_lens_q, scale=scaling, kernel=kernel, longest=longest)
    return output, None
