"""Qwen3.5: in most layers gated linear attention, in the others attention with an output gate.

Its vision tower and its processors are those of Qwen3-VL, without deepstack.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers  # its classes are imported on first use

from trigon.models.families.family import qwen_vision_family
from trigon.models.families.qwen3_vl import processor
from trigon.models.families.tiny import ROPE, VISION, TinyModel, media_tokens, text_options


def _config(tokenizer: Any) -> Any:
    # Layers of both kinds, with twice as many value heads as key heads. Positions rotate half of a
    # head; in the published models a quarter of 256.
    text = text_options(tokenizer) | {
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {
            **ROPE,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    }
    vision = {**VISION, "hidden_size": 48, "patch_size": 16, "num_position_embeddings": 36}
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **media_tokens(tokenizer))


def _remember(model: Any) -> None:
    """Make states decay slowly: with transformers' initial values they last a token or two."""
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            heads = layer.linear_attn.num_v_heads
            layer.linear_attn.A_log.data = torch.linspace(-4.0, -1.0, heads)
            layer.linear_attn.dt_bias.data = torch.linspace(1.0, -1.0, heads)


FAMILIES = (
    qwen_vision_family(
        "qwen3_5",
        TinyModel(_config, processor, initialize=_remember),
        video="timestamps",
        linear_attention="linear_attn",
        unused_weights="mtp.",  # layers that predict more than one token
    ),
)
