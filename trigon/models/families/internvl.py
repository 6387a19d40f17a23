"""InternVL in the format of transformers: an image is one or several tiles and a thumbnail."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import llava_family, llava_prefixes
from trigon.models.families.tiny import INITIAL_STD, TILE_SIZE, TILE_VISION, TinyModel, media_tokens, text_options

_TILE_TOKENS = 4


def _config(tokenizer: Any) -> Any:
    return transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**text_options(tokenizer)).to_dict(),
        vision_config={**TILE_VISION, "initializer_range": INITIAL_STD},
        image_token_id=media_tokens(tokenizer)["image_token_id"],
        image_seq_length=_TILE_TOKENS,
    )


def _processor(tokenizer: Any) -> Any:
    tile = {"size": {"height": TILE_SIZE, "width": TILE_SIZE}}
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(**tile, max_patches=4),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(**tile),
        image_seq_length=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    llava_family(
        model_type="internvl",
        tiny=TinyModel(
            _config,
            _processor,
            special_tokens={
                "start_image_token": "<|vision_start|>",
                "end_image_token": "<|vision_end|>",
                "context_image_token": "<|image_pad|>",
                "video_token": "<|video_pad|>",
            },
            image_text="<|image_pad|>",
        ),
        tower_type="internvl_vision",
        checkpoint_prefixes=llava_prefixes("vision_tower."),
        vision_layers="encoder.layer",
        divides_vision_heads=False,  # each GPU computes the attention of the tower in full
        image_wrap=("start_image_token", "end_image_token"),
        language_types=("llama", "qwen2", "qwen3"),
    ),
)
