"""Llama 3, and Mistral, whose attention has a sliding window."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import CountedNetwork, ModelFamily
from trigon.models.families.tiny import ROPE, TinyModel, text_options


def _llama(tokenizer: Any) -> Any:
    # The scaling of Llama 3.1, which divides the lowest frequencies.
    rope = {
        **ROPE,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return transformers.LlamaConfig(**text_options(tokenizer) | {"rope_parameters": rope})


def _mistral(tokenizer: Any) -> Any:
    # A sliding window as in the first release, shorter than most prompts.
    return transformers.MistralConfig(**text_options(tokenizer), head_dim=32, sliding_window=8)


FAMILIES = (
    ModelFamily(model_type="llama", tiny=TinyModel(_llama), counted=CountedNetwork()),
    ModelFamily(model_type="mistral", tiny=TinyModel(_mistral), windows=True, counted=CountedNetwork()),
)
