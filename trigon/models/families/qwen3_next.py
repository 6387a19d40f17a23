"""Qwen3-Next: MoE, with the gated linear attention and the gated attention of Qwen3.5.

Its projections of linear attention are fused into two, in which the parts of each key head are
consecutive. It has no vision tower.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import EXPERTS, LINEAR, ROPE, TinyModel, slow_decay, text_options


def _config(tokenizer: Any) -> Any:
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


def _initialize(model: Any) -> None:
    slow_decay(model.model.layers)


FAMILIES = (
    ModelFamily(
        model_type="qwen3_next",
        tiny=TinyModel(_config, initialize=_initialize),
        experts="separate",
        linear_attention="linear_attn",
        unused_weights="mtp.",  # layers that predict more than one token
    ),
)
