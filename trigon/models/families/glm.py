"""GLM-4, and GLM-4.1V, whose text model is GLM-4's: rotary positions on interleaved dimensions.

The vision tower of GLM-4.1V interpolates a square table of positions, and merges patches by a
convolution. Videos are not supported: their patches have the placeholder token of images.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily, qwen_vision_family
from trigon.models.families.tiny import ROPE, VISION, TinyModel, media_tokens, patch_sizes, text_options

# Half of a head's dimensions are rotated, as in the published models.
_ROPE = {**ROPE, "partial_rotary_factor": 0.5}


def _glm4(tokenizer: Any) -> Any:
    return transformers.Glm4Config(
        **text_options(tokenizer) | {"rope_parameters": _ROPE, "pad_token_id": 0}, head_dim=32, attention_bias=True
    )


def _glm4v(tokenizer: Any) -> Any:
    tokens = media_tokens(tokenizer)
    return transformers.Glm4vConfig(
        # The published configs have attention_bias, which transformers ignores and vLLM reads.
        text_config=text_options(tokenizer)
        | {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}, "attention_bias": True},
        # Six positions per side, which are interpolated for drawings of another number of patches.
        vision_config={**VISION, "patch_size": 14, "image_size": 84},
        image_token_id=tokens["image_token_id"],
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        image_start_token_id=tokens["vision_start_token_id"],
        image_end_token_id=tokens["vision_end_token_id"],
        video_start_token_id=tokenizer.convert_tokens_to_ids("<|begin_of_video|>"),
        video_end_token_id=tokenizer.convert_tokens_to_ids("<|end_of_video|>"),
    )


def _processor(tokenizer: Any) -> Any:
    sizes = patch_sizes(patch_size=14)
    # The limits count the pixels of both frames of a temporal patch.
    sizes["size"] = {edge: 2 * pixels for edge, pixels in sizes["size"].items()}
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=transformers.Glm4vVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


FAMILIES = (
    ModelFamily(model_type="glm4", tiny=TinyModel(_glm4)),
    qwen_vision_family(
        "glm4v",
        TinyModel(
            _glm4v,
            _processor,
            special_tokens={"image_token": "<|image_pad|>"},
            added_tokens=("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
        ),
        video="none",
        frames_per_image=2,
    ),
)
