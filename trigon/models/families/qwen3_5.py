"""Qwen3.5, dense and MoE: gated linear attention, and in some layers attention with an output gate.

Its vision tower and its processors are those of Qwen3-VL, without deepstack.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import qwen_vision_family
from trigon.models.families.qwen3_vl import processor
from trigon.models.families.tiny import (
    EXPERTS,
    LINEAR,
    ROPE,
    VISION,
    TinyModel,
    media_tokens,
    slow_decay,
    text_options,
)


def _config(kind: Any, tokenizer: Any, text: dict[str, Any]) -> Any:
    # Positions rotate half of a head; in the published models a quarter of 256.
    rope = {**ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    text = {**text, **LINEAR, "head_dim": 32, "rope_parameters": rope}
    vision = {**VISION, "hidden_size": 48, "patch_size": 16, "num_position_embeddings": 36}
    return kind(text_config=text, vision_config=vision, **media_tokens(tokenizer))


def _dense(tokenizer: Any) -> Any:
    return _config(transformers.Qwen3_5Config, tokenizer, text_options(tokenizer))


def _moe(tokenizer: Any) -> Any:
    text = {**text_options(tokenizer), **EXPERTS, "shared_expert_intermediate_size": 64}
    del text["intermediate_size"]  # no layer is dense
    return _config(transformers.Qwen3_5MoeConfig, tokenizer, text)


def _initialize(model: Any) -> None:
    slow_decay(model.model.language_model.layers)


FAMILIES = (
    qwen_vision_family(
        "qwen3_5",
        TinyModel(_dense, processor, initialize=_initialize),
        video="timestamps",
        linear_attention="linear_attn",
        unused_weights="mtp.",  # layers that predict more than one token
    ),
    # transformers 5.19 writes each expert by itself.
    qwen_vision_family(
        "qwen3_5_moe",
        TinyModel(_moe, processor, initialize=_initialize, saves_published_names=False),
        video="timestamps",
        experts="stacked",
        linear_attention="linear_attn",
        unused_weights="mtp.",
    ),
)
