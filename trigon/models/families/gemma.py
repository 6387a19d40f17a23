"""Gemma, and the language model of Gemma 3, whose layers are sliding-window or full."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import ROPE, ROPE_THETA, TinyModel, text_options


def _gemma(tokenizer: Any) -> Any:
    return transformers.GemmaConfig(**text_options(tokenizer), head_dim=32)


def _gemma3_text(tokenizer: Any) -> Any:
    ropes = {"sliding_attention": dict(ROPE), "full_attention": {**ROPE, "rope_theta": 100 * ROPE_THETA}}
    return transformers.Gemma3TextConfig(
        **text_options(tokenizer) | {"rope_parameters": ropes},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=2.0,
    )


FAMILIES = (
    ModelFamily(model_type="gemma", tiny=TinyModel(_gemma)),
    ModelFamily(model_type="gemma3_text", tiny=TinyModel(_gemma3_text), windows=True, caps_logits=True),
)
