"""Makes tiny model folders with random weights and all files of a published checkpoint.

Their configurations have every mechanism of the real families (window and full attention, patch
merging, m-RoPE, deepstack, MoE). With them come a tokenizer, image and video processors and a
generation config. The same arguments give the same bytes, independent of the global random state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never, get_args

import torch

from trigon.errors import ModelError
from trigon.models.families import ModelFamily, family_named
from trigon.models.load import without_progress_bars
from trigon.models.weight_files import save_weights, set_default_mode
from trigon.system.torchvision_stub import declare_operators
from trigon.tools.quickstart.model_types import TinyModelType
from trigon.tools.quickstart.tokenizer import CHAT_TEMPLATE, train_tokenizer

MIN_IMAGE_TOKENS = 4
MAX_IMAGE_TOKENS = 64
TILE_SIZE, TILE_TOKENS = 56, 4
INITIAL_STD = 0.05
ROPE_THETA = 10_000.0

# transformers 5.19 writes Qwen3-VL's MoE weights not transposed, and CLIP's names without their
# former prefix.
_SAVED_DIFFERENTLY = ("qwen3_vl_moe", "llava")


def make_tiny(
    folder: Path,
    *,
    model_type: TinyModelType = "qwen2_5_vl",
    seed: int = 0,
    tie_word_embeddings: bool = False,
) -> Path:
    """Write a model folder with random float32 weights, and return it.

    The model has less than a million parameters. The folder is created if missing; existing files
    are overwritten. It loads with AutoConfig, AutoTokenizer, AutoProcessor and
    AutoModelForImageTextToText (AutoModelForCausalLM for the text families), and in vLLM.
    Raises: ModelError for an unknown model_type.
    """
    if model_type not in get_args(TinyModelType):
        raise ModelError(f"there is no tiny {model_type!r}; choose one of {', '.join(get_args(TinyModelType))}")
    declare_operators()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    family = family_named(model_type)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(model_type)
    _save_processors(folder, tokenizer, model_type)

    config = _model_config(tokenizer, model_type, tie_word_embeddings)
    auto_class = AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    set_default_mode(list(folder.glob("*.safetensors")))
    _save_as_published(folder, model, family)
    return folder


def _save_as_published(folder: Path, model: Any, family: ModelFamily) -> None:
    """Write the weights again if published checkpoints differ from transformers 5."""
    if family.model_type in _SAVED_DIFFERENTLY:
        tensors = {
            name: tensor.detach().contiguous()
            for parameter_name, parameter in model.named_parameters()
            for name, tensor in family.checkpoint_tensors(parameter_name, parameter)
        }
        save_weights(tensors, folder / "model.safetensors")


def _save_processors(folder: Path, tokenizer: Any, model_type: TinyModelType) -> None:
    """Write the tokenizer and, for a vision family, the image and video processors."""
    import transformers  # its classes are imported on first use

    match model_type:
        case "qwen2_vl" | "qwen2_5_vl":
            sizes = _processor_sizes(patch_size=14)
            kind = transformers.Qwen2VLProcessor if model_type == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
            processor = kind(
                image_processor=transformers.Qwen2VLImageProcessor(**sizes),
                tokenizer=tokenizer,
                video_processor=transformers.Qwen2VLVideoProcessor(**sizes),
                chat_template=CHAT_TEMPLATE,
            )
        case "qwen3_vl" | "qwen3_vl_moe":
            sizes = _processor_sizes(patch_size=16)
            processor = transformers.Qwen3VLProcessor(
                image_processor=transformers.Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
                tokenizer=tokenizer,
                video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
                chat_template=CHAT_TEMPLATE,
            )
        case "internvl":
            tile = {"size": {"height": TILE_SIZE, "width": TILE_SIZE}}
            processor = transformers.InternVLProcessor(
                image_processor=transformers.GotOcr2ImageProcessor(**tile, max_patches=4),
                tokenizer=tokenizer,
                video_processor=transformers.InternVLVideoProcessor(**tile),
                image_seq_length=TILE_TOKENS,
                chat_template=tokenizer.chat_template,
            )
        case "llava":
            processor = transformers.LlavaProcessor(
                image_processor=transformers.CLIPImageProcessor(
                    size={"shortest_edge": TILE_SIZE}, crop_size={"height": TILE_SIZE, "width": TILE_SIZE}
                ),
                tokenizer=tokenizer,
                patch_size=14,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
                image_token="<|image_pad|>",
                chat_template=tokenizer.chat_template,
            )
        case "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" | "llama" | "mistral" | "gemma" | "gemma3_text":
            processor = tokenizer
        case _:
            assert_never(model_type)
    processor.save_pretrained(folder)


def _processor_sizes(*, patch_size: int) -> dict[str, Any]:
    """Return the common arguments of image and video processors.

    One image token covers 2 x 2 patches.
    """
    token_pixels = (2 * patch_size) ** 2
    return {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": MIN_IMAGE_TOKENS * token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels},
    }


def _model_config(tokenizer: Any, model_type: TinyModelType, tie_word_embeddings: bool) -> Any:
    """Return a small config of the family.

    The heads have 32 dimensions, the minimum of vLLM's CPU attention.
    """
    import transformers  # its classes are imported on first use

    text: dict[str, Any] = {
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
    }
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "initializer_range": INITIAL_STD,
    }
    # Two of four experts per token, so that some experts get no token of a short row.
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    tied = {"tie_word_embeddings": tie_word_embeddings}
    media = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    match model_type:
        case "qwen2_vl":
            # In this family embed_dim is the width of the vision tower, and hidden_size that of its
            # output.
            return transformers.Qwen2VLConfig(
                text_config=text | {"rope_parameters": rope | {"mrope_section": [4, 6, 6]}},
                vision_config={
                    "depth": 3,
                    "embed_dim": 64,
                    "hidden_size": text["hidden_size"],
                    "mlp_ratio": 2,
                    "num_heads": 2,
                    "patch_size": 14,
                    "temporal_patch_size": 2,
                    "spatial_merge_size": 2,
                    "initializer_range": INITIAL_STD,
                },
                **media,
                **tied,
            )
        case "qwen2_5_vl":
            # Windows of 2 x 2 image tokens: a drawing of 3 x 3 has four, so windows differ from
            # full attention.
            return transformers.Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": rope | {"mrope_section": [4, 6, 6]}},
                vision_config=vision | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
                **media,
                **tied,
            )
        case "qwen3_vl" | "qwen3_vl_moe":
            kind = transformers.Qwen3VLConfig if model_type == "qwen3_vl" else transformers.Qwen3VLMoeConfig
            # Six positions per side, one per patch of a drawing of 96 x 96; other sizes are
            # interpolated.
            return kind(
                text_config=text
                | (experts | {"norm_topk_prob": True} if model_type == "qwen3_vl_moe" else {})
                | {"head_dim": 32, "rope_parameters": rope | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
                vision_config=vision
                | {
                    "hidden_size": 48,
                    "patch_size": 16,
                    "num_position_embeddings": 36,
                    "deepstack_visual_indexes": [0, 1],
                },
                **media,
                **tied,
            )
        case "internvl":
            return transformers.InternVLConfig(
                text_config=transformers.Qwen2Config(**text, rope_parameters=rope).to_dict(),
                vision_config={
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": TILE_SIZE,
                    "patch_size": 14,
                    "initializer_range": INITIAL_STD,
                },
                image_token_id=media["image_token_id"],
                image_seq_length=TILE_TOKENS,
                **tied,
            )
        case "llava":
            # The language model gets the output of the last but one layer of the vision tower.
            return transformers.LlavaConfig(
                text_config=transformers.LlamaConfig(**text, rope_parameters=rope).to_dict(),
                vision_config={
                    "model_type": "clip_vision_model",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "image_size": TILE_SIZE,
                    "patch_size": 14,
                    "projection_dim": 64,
                },
                image_token_index=media["image_token_id"],
                image_seq_length=(TILE_SIZE // 14) ** 2,
                vision_feature_layer=-2,
                vision_feature_select_strategy="default",
                **tied,
            )
        case "qwen2":
            return transformers.Qwen2Config(**text, **tied, rope_parameters=rope)
        case "qwen2_moe":
            return transformers.Qwen2MoeConfig(
                **text, **tied, **experts, shared_expert_intermediate_size=128, rope_parameters=rope
            )
        case "qwen3":
            return transformers.Qwen3Config(**text, **tied, head_dim=32, rope_parameters=rope)
        case "qwen3_moe":
            # The first of the two layers is dense; mlp_only_layers can name any.
            return transformers.Qwen3MoeConfig(
                **text, **tied, **experts, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0], rope_parameters=rope
            )
        case "llama":
            # The scaling of Llama 3.1, which divides the lowest frequencies.
            llama3_scaling = {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
            return transformers.LlamaConfig(**text, **tied, rope_parameters=rope | llama3_scaling)
        case "mistral":
            # A sliding window as in the first release, shorter than most prompts.
            return transformers.MistralConfig(**text, **tied, head_dim=32, sliding_window=8, rope_parameters=rope)
        case "gemma":
            return transformers.GemmaConfig(**text, **tied, head_dim=32, rope_parameters=rope)
        case "gemma3_text":
            ropes = {"sliding_attention": rope, "full_attention": rope | {"rope_theta": 100 * ROPE_THETA}}
            layers = ["sliding_attention", "full_attention"]
            return transformers.Gemma3TextConfig(
                **text,
                **tied,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=8,
                layer_types=layers,
                rope_parameters=ropes,
            )
        case _:
            assert_never(model_type)
