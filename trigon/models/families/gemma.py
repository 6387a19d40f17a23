"""Gemma; Gemma 3, whose layers are sliding-window or full, and which takes images.

In every layer of Gemma 3 the tokens of an image attend to each other in both directions. Its vision
tower takes square tiles; an image is one tile.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import CountedNetwork, ModelFamily, llava_family
from trigon.models.families.tiny import INITIAL_STD, ROPE, ROPE_THETA, TILE_SIZE, TILE_VISION, TinyModel, text_options

_IMAGE_TOKENS = 4  # of 4 x 4 patches, 2 x 2 of which are averaged


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


def _gemma3(tokenizer: Any) -> Any:
    # No cap, which transformers does not apply in a model with images. A window that is shorter
    # than an image.
    text = _gemma3_text(tokenizer).to_dict() | {"final_logit_softcapping": None, "sliding_window": 3}
    begin, pad, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**TILE_VISION, "vision_use_head": False},
        mm_tokens_per_image=_IMAGE_TOKENS,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=pad,
    )


def _gemma3_processor(tokenizer: Any) -> Any:
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": TILE_SIZE, "width": TILE_SIZE}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=_IMAGE_TOKENS,
    )


def _project(model: Any) -> None:
    """Fill the projection, which transformers leaves at zero, so that images have features."""
    projector = model.model.multi_modal_projector
    projector.mm_input_projection_weight.data.normal_(std=INITIAL_STD)


FAMILIES = (
    ModelFamily(model_type="gemma", tiny=TinyModel(_gemma), counted=CountedNetwork(counts_passes=False)),
    ModelFamily(
        model_type="gemma3_text",
        tiny=TinyModel(_gemma3_text),
        windows=True,
        caps_logits=True,
        counted=CountedNetwork(normalizes_queries=True, counts_passes=False),
    ),
    llava_family(
        model_type="gemma3",
        # transformers 5.19 writes the names of SigLIP's weights without their former prefix.
        tiny=TinyModel(
            _gemma3,
            _gemma3_processor,
            special_tokens={
                "boi_token": "<|vision_start|>",
                "image_token": "<|image_pad|>",
                "eoi_token": "<|vision_end|>",
            },
            saves_published_names=False,
            initialize=_project,
        ),
        tower_type="siglip_vision_model",
        image_text=("{boi_token}", "\n\n{boi_token}{image_token}{eoi_token}\n\n"),
        image_layers="all",
        language_types=("gemma3_text",),
        windows=True,
    ),
)
