"""The padded Hugging Face forward: every completion on its own, behind its own copy of the prompt and its images.

What the packed forward must equal. Uses nothing of ours but the types: transformers lays out positions, masks, images
and logits, and autograd goes through all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trigon.torchvision_stub import declare_operators
from trigon.types import Prompt


def load_hugging_face(folder: Path, dtype: torch.dtype):
    """Return the plain model of a folder, with transformers' own attention."""
    declare_operators()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_vision = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def padded_logprobs(
    model,
    prompt: Prompt,
    completions: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    banned_token_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy), [sum of R] each, of the completions' tokens one after another.

    The batch is padded on the right to [N, T], and its logits are a whole [N, R, V].
    """
    longest = max(len(completion) for completion in completions)
    start = len(prompt.token_ids)
    token_ids = torch.zeros(len(completions), start + longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(token_ids)
    for row, completion in enumerate(completions):
        sequence = torch.tensor(prompt.token_ids + completion)
        token_ids[row, : len(sequence)] = sequence
        attention_mask[row, : len(sequence)] = 1
    images = {}
    if prompt.vision is not None:
        images = {
            "pixel_values": prompt.vision.pixel_values.repeat(len(completions), 1),
            "image_grid_thw": prompt.vision.grid_thw.repeat(len(completions), 1),
            "mm_token_type_ids": (token_ids == model.config.image_token_id).int(),
        }
    logits = model(
        input_ids=token_ids,
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(start - 1, start + longest - 1),
        **images,
    ).logits
    logits = logits / temperature
    logits = logits.masked_fill(torch.isin(torch.arange(logits.shape[-1]), torch.tensor(list(banned_token_ids))), -1e30)
    table = logits.log_softmax(-1)
    rows = [
        (
            table[row, range(len(completion)), list(completion)],
            -(table[row] * table[row].exp()).sum(-1)[: len(completion)],
        )
        for row, completion in enumerate(completions)
    ]
    return torch.cat([logprobs for logprobs, _ in rows]), torch.cat([entropy for _, entropy in rows])
