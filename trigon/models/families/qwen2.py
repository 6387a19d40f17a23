"""Qwen2 and Qwen2.5, dense, and Qwen2-MoE, which has one expert that all tokens share."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import EXPERTS, TinyModel, text_options


def _dense(tokenizer: Any) -> Any:
    return transformers.Qwen2Config(**text_options(tokenizer))


def _moe(tokenizer: Any) -> Any:
    return transformers.Qwen2MoeConfig(**text_options(tokenizer), **EXPERTS, shared_expert_intermediate_size=128)


FAMILIES = (
    ModelFamily(model_type="qwen2", tiny=TinyModel(_dense)),
    ModelFamily(model_type="qwen2_moe", tiny=TinyModel(_moe), experts="separate"),
)
