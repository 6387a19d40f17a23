"""Qwen2, 2.5 and 2-MoE (one expert is shared by all tokens), Qwen2-VL and Qwen2.5-VL.

The vision tower of Qwen2.5-VL attends within windows in most layers.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import CountedNetwork, ModelFamily, VisionWidths, qwen_vision_family
from trigon.models.families.tiny import (
    EXPERTS,
    INITIAL_STD,
    ROPE,
    VISION,
    TinyModel,
    media_tokens,
    patch_sizes,
    text_options,
)


def _dense(tokenizer: Any) -> Any:
    return transformers.Qwen2Config(**text_options(tokenizer))


def _moe(tokenizer: Any) -> Any:
    return transformers.Qwen2MoeConfig(**text_options(tokenizer), **EXPERTS, shared_expert_intermediate_size=128)


# Published checkpoints keep the parameter names of the first release.
_NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))


def _text(tokenizer: Any) -> dict[str, Any]:
    return text_options(tokenizer) | {"rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}}


def _qwen2_vl(tokenizer: Any) -> Any:
    # In this family embed_dim is the width of the vision tower, and hidden_size its output's.
    vision = {
        "depth": 3,
        "embed_dim": 64,
        "hidden_size": VISION["out_hidden_size"],
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "initializer_range": INITIAL_STD,
    }
    return transformers.Qwen2VLConfig(text_config=_text(tokenizer), vision_config=vision, **media_tokens(tokenizer))


def _qwen2_vl_widths(vision: Any) -> VisionWidths:
    return VisionWidths(vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio), vision.hidden_size)


def _qwen2_5_vl(tokenizer: Any) -> Any:
    # Windows of 2 x 2 image tokens: a drawing of 3 x 3 has four, so windows differ from full
    # attention.
    vision = {**VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config=_text(tokenizer), vision_config=vision, **media_tokens(tokenizer))


def _processor_parts(tokenizer: Any) -> dict[str, Any]:
    sizes = patch_sizes(patch_size=14)
    return {
        "image_processor": transformers.Qwen2VLImageProcessor(**sizes),
        "tokenizer": tokenizer,
        "video_processor": transformers.Qwen2VLVideoProcessor(**sizes),
        "chat_template": tokenizer.chat_template,
    }


def _qwen2_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen2VLProcessor(**_processor_parts(tokenizer))


def _qwen2_5_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen2_5_VLProcessor(**_processor_parts(tokenizer))


FAMILIES = (
    ModelFamily(model_type="qwen2", tiny=TinyModel(_dense), counted=CountedNetwork()),
    ModelFamily(model_type="qwen2_moe", tiny=TinyModel(_moe), experts="separate", counted=CountedNetwork()),
    qwen_vision_family(
        model_type="qwen2_vl",
        tiny=TinyModel(_qwen2_vl, _qwen2_vl_processor),
        video="patches",
        checkpoint_prefixes=_NAMES,
        counted=CountedNetwork(),
        vision_widths=_qwen2_vl_widths,
    ),
    qwen_vision_family(
        model_type="qwen2_5_vl",
        tiny=TinyModel(_qwen2_5_vl, _qwen2_5_vl_processor),
        video="seconds",
        checkpoint_prefixes=_NAMES,
        counted=CountedNetwork(gates_vision_mlp=True),
    ),
)
