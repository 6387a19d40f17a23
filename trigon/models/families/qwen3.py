"""Qwen3, dense and MoE: queries and keys are normalized."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import EXPERTS, TinyModel, text_options


def _dense(tokenizer: Any) -> Any:
    return transformers.Qwen3Config(**text_options(tokenizer), head_dim=32)


def _moe(tokenizer: Any) -> Any:
    # The first of the two layers is dense; mlp_only_layers can name any.
    return transformers.Qwen3MoeConfig(
        **text_options(tokenizer), **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0]
    )


FAMILIES = (
    ModelFamily(model_type="qwen3", tiny=TinyModel(_dense)),
    ModelFamily(model_type="qwen3_moe", tiny=TinyModel(_moe), experts="separate"),
)
