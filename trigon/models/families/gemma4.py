"""Gemma 4, dense: text and images.

Sliding-window layers and full ones with heads of another width. The last layers can use the keys
and values of earlier ones, keys can be values, and each layer can have embeddings of its own. In
some of its models the tokens of an image attend to each other in both directions, in sliding-window
layers only.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers  # its classes are imported on first use

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import INITIAL_STD, ROPE, ROPE_THETA, TinyModel, text_options

_MAX_IMAGE_TOKENS = 70  # the least that its processor accepts


def _text(tokenizer: Any) -> Any:
    # Two layers with keys and values of their own, and two that use them.
    ropes = {
        "sliding_attention": dict(ROPE),
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 100 * ROPE_THETA,
        },
    }
    return transformers.Gemma4TextConfig(
        **text_options(tokenizer)
        | {
            "rope_parameters": ropes,
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "pad_token_id": 0,  # as in the published models; vLLM reads 0 where transformers reads this value
        },
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=len(tokenizer),
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=2.0,
    )


def _config(tokenizer: Any) -> Any:
    names = {
        **{"boi_token_id": "<|vision_start|>", "image_token_id": "<|image_pad|>", "eoi_token_id": "<|vision_end|>"},
        **{"boa_token_id": "<|quad_start|>", "audio_token_id": "<|vision_pad|>", "eoa_token_index": "<|quad_end|>"},
        "video_token_id": "<|video|>",
    }
    return transformers.Gemma4Config(
        text_config=_text(tokenizer).to_dict() | {"use_bidirectional_attention": "vision", "sliding_window": 3},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "pooling_kernel_size": 2,
            "patch_size": 8,
            "position_embedding_size": 160,
            "standardize": True,
            "use_clipped_linears": True,
            "initializer_range": INITIAL_STD,
            "default_output_length": _MAX_IMAGE_TOKENS,  # for vLLM alone
        },
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )


def _processor(tokenizer: Any) -> Any:
    sizes = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": _MAX_IMAGE_TOKENS}
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


@torch.no_grad()
def _initialize(model: Any) -> None:
    """Give weights and buffers values as in trained models.

    With the values of transformers attention scores grow with the width of heads, patches have no
    position, and some buffers have no effect.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        match name.split("."):
            case [*_, "q_norm", "weight"]:
                tensor.fill_(len(tensor) ** -0.5)
            case [*_, "position_embedding_table"]:
                tensor.normal_(std=INITIAL_STD)
            case [*_, "layer_scalar"]:
                tensor.fill_(0.8)
            case [*_, "std_bias" | "std_scale"]:
                tensor.copy_(torch.linspace(0.5, 1.5, len(tensor)))
            case [*_, "input_max" | "output_max"]:
                tensor.fill_(1.5)
            case [*_, "input_min" | "output_min"]:
                tensor.fill_(-1.5)
            case _:
                pass


FAMILIES = (
    ModelFamily(
        model_type="gemma4_text",
        tiny=TinyModel(_text, initialize=_initialize),
        windows=True,
        caps_logits=True,
    ),
    ModelFamily(
        model_type="gemma4",
        tiny=TinyModel(
            _config,
            _processor,
            special_tokens={
                **{"boi_token": "<|vision_start|>", "image_token": "<|image_pad|>", "eoi_token": "<|vision_end|>"},
                # Without these its processor takes no images either.
                **{"boa_token": "<|quad_start|>", "audio_token": "<|vision_pad|>", "eoa_token": "<|quad_end|>"},
            },
            added_tokens=("<|video|>",),
            image_text="<|image_pad|>",
            initialize=_initialize,
        ),
        language_path="model.language_model",
        vision_path="model.vision_tower",
        projector_path="model.embed_vision",
        vision_layers="encoder.layers",
        vision_input="pooled",
        tower_type="gemma4_vision",
        language_types=("gemma4_text",),
        image_wrap=("boi_token", "eoi_token"),
        image_layers="sliding",
        unused_parameters=("model.audio_tower.", "model.embed_audio."),
        windows=True,
        caps_logits=True,
    ),
)
