"""Attention over groups that lie end to end in one row, and over a vision tower's windows: exact, no row-wide mask.

        keys      p p p | a a | b b b      A prompt attends to itself, causally; a completion to its whole prompt and,
        p p p     x                        causally, to itself. A row is worked off piece by piece: every prompt in one
                  x x                      call, and all completions of a prompt that are equally long in another. The
                  x x x                    only mask is that of one such completion, [R, P + R].
        a a       x x x | x
                  x x x | x x              Windows and images of a vision tower are independent of each other, so all
        b b b     x x x |     | x          that are equally long take one call instead of one each.
                  x x x |     | x x
                  x x x |     | x x x

A layer of a language model may have a sliding window as well: what lies further back is masked, [P, P] in a prompt.

Knows spans and lengths. Refuses to know models, positions and weights. Its functions are registered with
transformers; what they need reaches them by keyword argument, never through a global, so that recomputation under
gradient checkpointing sees the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trigon.models.families import Family
from trigon.types import GroupSpan

GROUP_ATTENTION = "trigon_groups"
# A vision tower hands over the boundaries of its windows only to an implementation whose name contains "flash";
# from any other it asks for one window at a time.
WINDOW_ATTENTION = "trigon_flash_windows"

_Runs = tuple[tuple[int, int], ...]  # (length, how many pieces of this length follow each other), in row order


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """One group of a row: the length of its prompt, those of its completions, and masks for layers with each window.

    A window of W lets a token look at itself and the W - 1 tokens before it; None is full attention.
    masks: {(window, R): [R, P + R] bool}, true where a completion of R tokens may look.
    prompt_masks: {window: [P, P] bool}, the same for the prompt, where the window cuts off any of it.
    """

    prompt_length: int
    completion_runs: _Runs
    masks: dict[tuple[int | None, int], Tensor]
    prompt_masks: dict[int, Tensor]


def plan_attention(
    spans: Sequence[GroupSpan], device: torch.device, windows: Sequence[int | None] = (None,)
) -> tuple[GroupPlan, ...]:
    """Return what group attention needs to know of a row; made once for a forward and shared by its layers.

    windows: those of the layers, in any order.
    """
    plans = []
    for span in spans:
        prompt_length = span.prompt[1] - span.prompt[0]
        runs = _runs_of(end - start for start, end in span.completions)
        masks = {
            (window, length): _causal_mask(length, prompt_length, window, device)
            for window in set(windows)
            for length, _ in runs
        }
        prompt_masks = {
            window: _causal_mask(prompt_length, 0, window, device)
            for window in set(windows)
            if window is not None and window < prompt_length
        }
        plans.append(GroupPlan(prompt_length, runs, masks, prompt_masks))
    return tuple(plans)


def windows_of(text_config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer of a language model: None for full attention, else its length."""
    window = getattr(text_config, "sliding_window", None) or None
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(text_config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def use_group_attention(model: Any, family: Family) -> None:
    """Make a transformers model attend within groups: its language model by spans, its vision tower by windows,
    unless that sees tiles, which are a batch.

    The model then works only with the keyword argument that Policy passes, and has no padded path.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(GROUP_ATTENTION, _group_attention)
    AttentionInterface.register(WINDOW_ATTENTION, _window_attention)
    family.language_model(model).set_attn_implementation(GROUP_ATTENTION)
    tower = family.vision_tower(model)
    if tower is not None and not family.tiles:
        # transformers 5.16 to 5.19 answer set_attn_implementation("...flash...") by looking for a downloadable kernel
        # of that name, registered or not; the config's own setter does not.
        tower.config._attn_implementation = WINDOW_ATTENTION


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Sequence[GroupPlan],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend within each group of a row.

    Args: query: [1, H, T, D]; key, value: [1, K, T, D], where K divides H; window: one of those that were planned for.
    Returns: [1, T, H, D].
    """
    if query.is_cuda:  # the kernel that takes masks there does not take fewer key heads than query heads
        heads_per_key = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    # One split each, since the gradient of many slices would be as many tensors of the whole row.
    lengths = [part for group in plan for part in (group.prompt_length, _total(group.completion_runs))]
    queries, keys, values = (torch.split(states, lengths, 2) for states in (query, key, value))
    outputs: list[Tensor] = []
    for index, group in enumerate(plan):
        prompt, rest = 2 * index, 2 * index + 1
        prompt_key, prompt_value = keys[prompt], values[prompt]
        prompt_mask = None if window is None else group.prompt_masks.get(window)
        prompt_output = _attend(
            queries[prompt], prompt_key, prompt_value, scale=scale, mask=prompt_mask, causal=prompt_mask is None
        )
        outputs.append(prompt_output.transpose(1, 2))
        own_keys = _by_length(keys[rest], group.completion_runs)
        own_values = _by_length(values[rest], group.completion_runs)
        attended = {
            length: _attend(
                batch,
                torch.cat((prompt_key.expand(len(batch), -1, -1, -1), own_keys[length]), 2),
                torch.cat((prompt_value.expand(len(batch), -1, -1, -1), own_values[length]), 2),
                scale=scale,
                mask=group.masks[window, length],
            )
            for length, batch in _by_length(queries[rest], group.completion_runs).items()
        }
        outputs.extend(_in_row_order(attended, group.completion_runs))
    return torch.cat(outputs, 1)


def window_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    """Attend within each window, not causally.

    Args: query, key, value: [1, H, S, D]; lengths: of the windows, in order, S in all. Returns: [1, S, H, D].
    """
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
    group_plan: Sequence[GroupPlan] | None = None,
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
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert dropout == 0.0
    return window_attention(query, key, value, cu_seq_lens_q.diff().tolist(), scale=scaling), None
