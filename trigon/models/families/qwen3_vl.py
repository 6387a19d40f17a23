"""Qwen3-VL, dense and MoE: its vision features are also added in the first decoder layers."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import qwen_vision_family
from trigon.models.families.tiny import EXPERTS, ROPE, VISION, TinyModel, media_tokens, patch_sizes, text_options


def _config(kind: Any, tokenizer: Any, **text_changes: Any) -> Any:
    rope = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    # Six positions per side, one per patch of a drawing of 96 x 96; other sizes are interpolated.
    vision = {
        **VISION,
        "hidden_size": 48,
        "patch_size": 16,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    }
    return kind(
        text_config=text_options(tokenizer) | text_changes | {"head_dim": 32, "rope_parameters": rope},
        vision_config=vision,
        **media_tokens(tokenizer),
    )


def _dense(tokenizer: Any) -> Any:
    return _config(transformers.Qwen3VLConfig, tokenizer)


def _moe(tokenizer: Any) -> Any:
    return _config(transformers.Qwen3VLMoeConfig, tokenizer, **EXPERTS, norm_topk_prob=True)


def processor(tokenizer: Any) -> Any:
    """Return the processor of a tiny model, which is that of Qwen3.5 too."""
    sizes = patch_sizes(patch_size=16)
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    qwen_vision_family("qwen3_vl", TinyModel(_dense, processor), video="timestamps", deepstack=True),
    # transformers 5.19 writes the stacks of experts without transposing them.
    qwen_vision_family(
        "qwen3_vl_moe",
        TinyModel(_moe, processor, saves_published_names=False),
        video="timestamps",
        deepstack=True,
        experts="transposed",
    ),
)
