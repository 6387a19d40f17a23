"""Mistral Small 3.1 and 3.2: images of any size, each row of whose tokens ends with a token."""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import llava_family, llava_prefixes
from trigon.models.families.tiny import INITIAL_STD, TILE_PATCH_SIZE, TILE_VISION, TinyModel, media_tokens, text_options

_LONGEST_EDGE = 16 * TILE_PATCH_SIZE
_ROW_END, _IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


def _layout(run_tokens: int, rows: int, columns: int) -> tuple[str | int, ...]:
    assert columns == 1, "each row of tokens is one run"
    return (*(run_tokens, _ROW_END) * (rows - 1), run_tokens, _IMAGE_END)


def _config(tokenizer: Any) -> Any:
    # vLLM's projector has the epsilon of the published models, whatever the config says.
    text = text_options(tokenizer) | {"head_dim": 64, "sliding_window": None, "rms_norm_eps": 1e-5}
    return transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**text).to_dict(),
        vision_config={
            **TILE_VISION,
            "model_type": "pixtral",
            "image_size": _LONGEST_EDGE,
            "hidden_act": "silu",
            "initializer_range": INITIAL_STD,
        },
        image_token_index=media_tokens(tokenizer)["image_token_id"],
        vision_feature_layer=-1,
        spatial_merge_size=2,
        projector_hidden_act="gelu",
        multimodal_projector_bias=False,
    )


def _processor(tokenizer: Any) -> Any:
    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={"longest_edge": _LONGEST_EDGE}, patch_size={"height": TILE_PATCH_SIZE, "width": TILE_PATCH_SIZE}
        ),
        tokenizer=tokenizer,
        patch_size=TILE_PATCH_SIZE,
        spatial_merge_size=2,
        image_token="<|image_pad|>",
        image_break_token=_ROW_END,
        image_end_token=_IMAGE_END,
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    llava_family(
        model_type="mistral3",
        tiny=TinyModel(
            _config,
            _processor,
            special_tokens={"image_token": "<|image_pad|>"},
            added_tokens=(_ROW_END, _IMAGE_END),
            image_text="<|image_pad|>",
        ),
        checkpoint_prefixes=llava_prefixes("vision_tower."),
        vision_input="images",
        tower_type="pixtral",
        language_types=("mistral",),
        vision_layers="transformer.layers",
        image_layout=_layout,
    ),
)
