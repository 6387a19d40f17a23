"""Qwen3.5, dense and MoE, and Qwen3-Next: gated linear attention.

Some layers have attention with an output gate instead. The vision tower and processors of Qwen3.5
are Qwen3-VL's, without deepstack. Qwen3-Next is MoE and has no vision tower. Its projections
of linear attention are fused into two, in which the parts of each key head are consecutive.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import CountedNetwork, ModelFamily, qwen_vision_family
from trigon.models.families.qwen3 import processor
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


def _next(tokenizer: Any) -> Any:
    # Three layers, so that one is dense, and linear attention stands before both kinds of MLP.
    # Positions rotate half of a head; in the published models a quarter of 256.
    options = {
        **text_options(tokenizer),
        **LINEAR,
        **EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    return transformers.Qwen3NextConfig(**options)


def _initialize_next(model: Any) -> None:
    slow_decay(model.model.layers)


_COUNTED = CountedNetwork(normalizes_queries=True)

FAMILIES = (
    qwen_vision_family(
        model_type="qwen3_5",
        tiny=TinyModel(_dense, processor, initialize=_initialize),
        video="timestamps",
        linear_attention="linear_attn",
        unused_weights="mtp.",  # layers that predict more than one token
        counted=_COUNTED,
    ),
    # transformers 5.19 writes each expert by itself.
    qwen_vision_family(
        model_type="qwen3_5_moe",
        tiny=TinyModel(_moe, processor, initialize=_initialize, saves_published_names=False),
        video="timestamps",
        experts="stacked",
        linear_attention="linear_attn",
        unused_weights="mtp.",
        counted=_COUNTED,
    ),
    ModelFamily(
        model_type="qwen3_next",
        tiny=TinyModel(_next, initialize=_initialize_next),
        experts="separate",
        linear_attention="linear_attn",
        unused_weights="mtp.",  # layers that predict more than one token
        counted=_COUNTED,
    ),
)
