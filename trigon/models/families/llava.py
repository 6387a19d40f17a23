"""LLaVA 1.5: an image is one tile, cropped at its centre, without tokens around it."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import llava_family
from trigon.models.families.tiny import TILE_PATCH_SIZE, TILE_SIZE, TILE_VISION, TinyModel, media_tokens, text_options


def _config(tokenizer: Any) -> Any:
    # The language model gets the output of the last but one layer of the vision tower.
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text_options(tokenizer)).to_dict(),
        vision_config={
            **TILE_VISION,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "projection_dim": 64,
        },
        image_token_index=media_tokens(tokenizer)["image_token_id"],
        image_seq_length=(TILE_SIZE // TILE_PATCH_SIZE) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _processor(tokenizer: Any) -> Any:
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": TILE_SIZE}, crop_size={"height": TILE_SIZE, "width": TILE_SIZE}
        ),
        tokenizer=tokenizer,
        patch_size=TILE_PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    llava_family(
        model_type="llava",
        # transformers 5.19 writes the names of CLIP's weights without their former prefix.
        tiny=TinyModel(
            _config,
            _processor,
            special_tokens={"image_token": "<|image_pad|>"},
            image_text="<|image_pad|>",
            saves_published_names=False,
        ),
        tower_type="clip_vision_model",
        language_types=("llama", "qwen2", "qwen3"),
    ),
)
