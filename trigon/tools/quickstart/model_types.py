"""The model families that have a tiny model: all that are supported."""

from __future__ import annotations

from typing import Literal

TinyModelType = Literal[
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "llava",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "gemma",
    "gemma3_text",
]
