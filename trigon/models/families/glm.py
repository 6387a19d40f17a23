"""GLM-4, and GLM-4.1V, whose text model is GLM-4's: rotary positions on interleaved dimensions.

The vision tower of GLM-4.1V interpolates a square table of positions, and merges patches by a
convolution. Videos are not supported: their patches have the placeholder token of images. With
images GLM-4.6V is GLM-4.1V under other names.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily, VisionWidths, qwen_vision_family
from trigon.models.families.tiny import ROPE, VISION, TinyModel, media_tokens, patch_sizes, text_options

# Half of a head's dimensions are rotated, as in the published models.
_ROPE = {**ROPE, "partial_rotary_factor": 0.5}


def _glm4(tokenizer: Any) -> Any:
    return transformers.Glm4Config(
        **text_options(tokenizer) | {"rope_parameters": _ROPE, "pad_token_id": 0}, head_dim=32, attention_bias=True
    )


def _vision(kind: Any, tokenizer: Any) -> Any:
    tokens = media_tokens(tokenizer)
    return kind(
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


def _glm4v(tokenizer: Any) -> Any:
    return _vision(transformers.Glm4vConfig, tokenizer)


def _glm46v(tokenizer: Any) -> Any:
    return _vision(transformers.Glm46VConfig, tokenizer)


def _processor(kind: Any, images: Any, videos: Any, tokenizer: Any) -> Any:
    sizes = patch_sizes(patch_size=14)
    # The limits count the pixels of both frames of a temporal patch.
    sizes["size"] = {edge: 2 * pixels for edge, pixels in sizes["size"].items()}
    return kind(
        image_processor=images(**sizes),
        tokenizer=tokenizer,
        video_processor=videos(**sizes),
        chat_template=tokenizer.chat_template,
    )


def _glm4v_processor(tokenizer: Any) -> Any:
    kinds = transformers.Glm4vProcessor, transformers.Glm4vImageProcessor, transformers.Glm4vVideoProcessor
    return _processor(*kinds, tokenizer)


def _glm46v_processor(tokenizer: Any) -> Any:
    kinds = transformers.Glm46VProcessor, transformers.Glm46VImageProcessor, transformers.Glm46VVideoProcessor
    return _processor(*kinds, tokenizer)


def _widths(vision: Any) -> VisionWidths:
    # The config's intermediate_size is the inner width of the merger.
    return VisionWidths(vision.hidden_size, vision.out_hidden_size, vision.out_hidden_size)


def _family(model_type: str, config: Any, processor: Any, *, in_vllm: bool) -> ModelFamily:
    return qwen_vision_family(
        model_type=model_type,
        tiny=TinyModel(
            config,
            processor,
            special_tokens={"image_token": "<|image_pad|>"},
            added_tokens=("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
        ),
        video="none",
        frames_per_image=2,
        vision_widths=_widths,
        in_vllm=in_vllm,
    )


FAMILIES = (
    ModelFamily(model_type="glm4", tiny=TinyModel(_glm4)),
    _family("glm4v", _glm4v, _glm4v_processor, in_vllm=True),
    _family("glm46v", _glm46v, _glm46v_processor, in_vllm=False),
)
