"""The dimensions of a model, read from its Hugging Face config.

flops.py and activations.py count with them. Families whose networks are not described here are not
counted: for them dimensions_of returns None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TEXT = (
    *("llama", "mistral", "gemma", "gemma3_text"),
    *("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text"),
    *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"),
)

_NORMALIZES_QUERIES = ("gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Families that normalize the queries and keys of each head."""

# Whether the MLPs of a vision tower have three matrices (gated) instead of two.
_HAS_GATED_VISION_MLP = {
    "qwen2_vl": False,
    "qwen2_5_vl": True,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
    "qwen3_5": False,
}


@dataclass(frozen=True, slots=True)
class TextDimensions:
    """The dimensions of a decoder.

    layers, moe_layers: of all layers, and of those with experts instead of one MLP.
    width: of hidden states. heads, key_heads, head_dim: of attention.
    mlp: inner width of a dense MLP. expert_mlp: that of one expert. shared_mlp: that of the expert
    of all tokens; 0: there is none. experts, experts_per_token: of a layer, and used by a token.
    normalizes_queries: whether the queries and keys of each head are normalized.
    """

    layers: int
    moe_layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int
    expert_mlp: int
    shared_mlp: int
    experts: int
    experts_per_token: int
    vocabulary: int
    normalizes_queries: bool

    @property
    def attention_weights(self) -> int:
        """The weights of a layer's attention, in its four matrices."""
        return self.width * self.head_dim * 2 * (self.heads + self.key_heads)

    @property
    def largest_matrix(self) -> int:
        """The weights of the largest matrix, or stack of experts, of a layer."""
        experts = 2 * self.experts * self.expert_mlp if self.moe_layers else 0
        return self.width * max(self.heads * self.head_dim, self.mlp, experts)


@dataclass(frozen=True, slots=True)
class VisionDimensions:
    """The dimensions of a vision tower that takes patches.

    layers, width, heads: of its blocks. mlp: inner width of their MLPs. is_gated: whether these
    have three matrices. out: width of an image token. merge: patches along each side of an image
    token. mergers: 1, and one more for each layer whose features the decoder gets (deepstack).
    values_per_patch: over all channels and frames.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    is_gated: bool
    out: int
    merge: int
    mergers: int
    values_per_patch: int

    @property
    def block_weights(self) -> int:
        """The weights of one block, in its matrices."""
        return 4 * self.width**2 + (3 if self.is_gated else 2) * self.width * self.mlp


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model. vision: None without a vision tower."""

    text: TextDimensions
    vision: VisionDimensions | None


def dimensions_of(hf_config: Any) -> Dimensions | None:
    """Return the dimensions of a Hugging Face config; None for a family that is not counted."""
    text, vision = hf_config.get_text_config(), getattr(hf_config, "vision_config", None)
    if text.model_type not in _TEXT or (vision is not None and hf_config.model_type not in _HAS_GATED_VISION_MLP):
        return None
    return Dimensions(
        text=text_dimensions(text), vision=None if vision is None else vision_dimensions(hf_config.model_type, vision)
    )


def head_dim(text: Any) -> int:
    """Return the dimension of an attention head, from the config of a text model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def text_dimensions(text: Any) -> TextDimensions:
    """Return the dimensions of a decoder, from the config of a text model."""
    layers = int(text.num_hidden_layers)
    experts = int(getattr(text, "num_experts", None) or 0)
    moe_layers = 0
    if experts:
        moe_layers = sum(
            layer not in (text.mlp_only_layers or ()) and (layer + 1) % text.decoder_sparse_step == 0
            for layer in range(layers)
        )
    return TextDimensions(
        layers=layers,
        moe_layers=moe_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        key_heads=text.num_key_value_heads,
        head_dim=head_dim(text),
        mlp=text.intermediate_size,
        expert_mlp=text.moe_intermediate_size if experts else 0,
        shared_mlp=text.shared_expert_intermediate_size if text.model_type == "qwen2_moe" else 0,
        experts=experts,
        experts_per_token=text.num_experts_per_tok if experts else 0,
        vocabulary=text.vocab_size,
        normalizes_queries=text.model_type in _NORMALIZES_QUERIES,
    )


def vision_dimensions(model_type: str, vision: Any) -> VisionDimensions:
    """Return the dimensions of the vision tower of a model type that dimensions_of counts."""
    if model_type == "qwen2_vl":  # calls the width of its tower embed_dim, and its output width hidden_size
        width, mlp, out = vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio), vision.hidden_size
    else:
        width, mlp, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    return VisionDimensions(
        layers=vision.depth,
        width=width,
        heads=vision.num_heads,
        mlp=mlp,
        is_gated=_HAS_GATED_VISION_MLP[model_type],
        out=out,
        merge=vision.spatial_merge_size,
        mergers=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        values_per_patch=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )
