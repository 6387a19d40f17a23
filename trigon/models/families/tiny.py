"""The parts that the tiny models of the families have in common.

A tiny model has random weights, less than a million of them, and every mechanism of the real models
of its family. transformers is imported when a tiny model is made, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MIN_IMAGE_TOKENS = 4
MAX_IMAGE_TOKENS = 64
TILE_SIZE = 56
TILE_PATCH_SIZE = 14
INITIAL_STD = 0.05
ROPE_THETA = 10_000.0
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": ROPE_THETA}

LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
"""Layers of linear attention and of attention, the first with two value heads for each key head."""

EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
"""Two of four experts for each token, so that some experts get no token of a short row."""

VISION: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": INITIAL_STD,
}
"""The config of a vision tower that takes patches."""

TILE_VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE_SIZE,
    "patch_size": TILE_PATCH_SIZE,
}
"""The config of a vision tower that takes tiles."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """How the tiny model of a family is made.

    config: returns the Hugging Face config, given the tokenizer.
    processor: returns the processor, given the tokenizer; None for a text family.
    special_tokens: names that the tokenizer gives to its special tokens.
    added_tokens: further special tokens, which its processor or vLLM looks for.
    image_text: what the chat template writes for an image; further tokens around it, if any, are
        added by the processor.
    saves_published_names: False if `save_pretrained` of transformers (5.19) writes other names or
        shapes than the published checkpoints have; the weights are then written again.
    initialize: changes the initial weights of the model; None leaves the initial weights of
    transformers.
    """

    config: Callable[[Any], Any]
    processor: Callable[[Any], Any] | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    added_tokens: tuple[str, ...] = ()
    image_text: str = "<|vision_start|><|image_pad|><|vision_end|>"
    saves_published_names: bool = True
    initialize: Callable[[Any], None] | None = None


def slow_decay(layers: Iterable[Any]) -> None:
    """Make the states of linear attention decay slowly.

    With the initial values of transformers they last a token or two. layers: the decoder's layers.
    """
    for layer in layers:
        if hasattr(layer, "linear_attn"):
            heads = layer.linear_attn.num_v_heads
            layer.linear_attn.A_log.data = torch.linspace(-4.0, -1.0, heads)
            layer.linear_attn.dt_bias.data = torch.linspace(1.0, -1.0, heads)


def text_options(tokenizer: Any) -> dict[str, Any]:
    """Return the common arguments of the configs of decoders.

    The heads have 32 dimensions, the minimum of vLLM's attention on the CPU.
    """
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": INITIAL_STD,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "rope_parameters": dict(ROPE),
    }


def media_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the arguments of a config that name the tokens of images and videos."""
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }


def patch_sizes(*, patch_size: int) -> dict[str, Any]:
    """Return the common arguments of image and video processors that make patches.

    One image token covers 2 x 2 patches.
    """
    token_pixels = (2 * patch_size) ** 2
    return {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": MIN_IMAGE_TOKENS * token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels},
    }
