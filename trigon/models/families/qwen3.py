"""Qwen3 and Qwen3-VL, dense and MoE: queries and keys are normalized.

The vision features of Qwen3-VL are also added in the first decoder layers.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import CountedNetwork, ModelFamily, qwen_vision_family
from trigon.models.families.tiny import EXPERTS, ROPE, VISION, TinyModel, media_tokens, patch_sizes, text_options


def _dense(tokenizer: Any) -> Any:
    return transformers.Qwen3Config(**text_options(tokenizer), head_dim=32)


def _moe(tokenizer: Any) -> Any:
    # The first of the two layers is dense; mlp_only_layers can name any.
    return transformers.Qwen3MoeConfig(
        **text_options(tokenizer), **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0]
    )


def _vl_config(kind: Any, tokenizer: Any, **text_changes: Any) -> Any:
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


def _vl_dense(tokenizer: Any) -> Any:
    return _vl_config(transformers.Qwen3VLConfig, tokenizer)


def _vl_moe(tokenizer: Any) -> Any:
    return _vl_config(transformers.Qwen3VLMoeConfig, tokenizer, **EXPERTS, norm_topk_prob=True)


def processor(tokenizer: Any) -> Any:
    """Return the processor of a tiny model, which Qwen3.5 has too."""
    sizes = patch_sizes(patch_size=16)
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


_COUNTED = CountedNetwork(normalizes_queries=True)

FAMILIES = (
    ModelFamily(model_type="qwen3", tiny=TinyModel(_dense), counted=_COUNTED),
    ModelFamily(
        model_type="qwen3_moe",
        tiny=TinyModel(_moe),
        experts="separate",
        counted=_COUNTED,
    ),
    qwen_vision_family(
        model_type="qwen3_vl",
        tiny=TinyModel(_vl_dense, processor),
        video="timestamps",
        deepstack=True,
        counted=_COUNTED,
    ),
    # transformers 5.19 writes the stacks of experts without transposing them.
    qwen_vision_family(
        model_type="qwen3_vl_moe",
        tiny=TinyModel(_vl_moe, processor, saves_published_names=False),
        video="timestamps",
        deepstack=True,
        experts="transposed",
        counted=_COUNTED,
    ),
)
