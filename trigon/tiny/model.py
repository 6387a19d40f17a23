"""Makes a tiny but genuine model folder: what a published checkpoint has, with random weights, in a second and offline.

Knows the Hugging Face file formats: configs with every mechanism of the real families (window and full attention,
merging, m-RoPE, deepstack), a byte-level BPE tokenizer trained here on a few built-in sentences, Qwen's special tokens
and chat layout, image and video processors, generation config. Refuses to know what the model is for: data, rewards and
training live elsewhere. The same arguments give the same bytes, whatever the machine drew at random before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, assert_never, get_args

import torch
from safetensors.torch import save_file

from trigon.errors import ModelError
from trigon.models.families import ModelFamily, family_named
from trigon.torchvision_stub import declare_operators

TinyModelType = Literal[
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "llava",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "gemma",
    "gemma3_text",
]

VOCAB_ENTRIES = 1024
MIN_IMAGE_TOKENS = 4
MAX_IMAGE_TOKENS = 64
TILE_SIZE, TILE_TOKENS = 56, 4
INITIAL_STD = 0.05
ROPE_THETA = 10_000.0

# transformers 5.19 writes Qwen3-VL's experts without transposing them, and CLIP's names without what began them before.
_PUBLISHED_OTHERWISE = ("qwen3_vl_moe", "llava")

# Qwen's order: they follow the ordinary entries, and the last ids of the vocabulary are theirs.
_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_CHAT_TEMPLATE = """\
{%- macro show(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou answer questions about pictures.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# What the tokenizer learns its merges from. Frequent words become whole tokens first, so the sentences are about what a
# tiny model is asked and says; the rest is there so that ordinary English is not spelt letter by letter.
_CORPUS = (
    (
        r"<think> </think> \boxed{0} \boxed{1} \boxed{2} \boxed{3} \boxed{4} \boxed{5} \boxed{6} \boxed{7} "
        r"\boxed{8} \boxed{9}"
    ),
    r"<think> I look at the drawing. </think> \boxed{12} <think> I see it in the picture. </think> \boxed{30}",
    r"First think between <think> and </think>, then give the final answer in \boxed{}. The answer is a number.",
    "system\nYou answer questions about pictures.",
    "user\nFirst come the picture and the question.",
    "assistant\nThen comes the answer. You are a helpful assistant.",
    "I look at the drawing and see that the answer is one, two, three, four, five, six, seven, eight, nine, ten.",
    "How many sides does the polygon in the drawing have? The polygon has three sides. How many corners can you see?",
    "At which mark of the ruler is the point P? The point lies on the line, between the first and the last mark.",
    "What is the measure of the angle in degrees? The angle between the two rays measures 30, 45, 60, 90, 120 degrees.",
    "Find the length of the side. Find x. Find the area of the shaded triangle, square, circle, rectangle or pentagon.",
    "What number does the dot stand on? Which segment of the figure is marked? Count the shapes in the image.",
    (
        "The question is about the picture, and the picture shows what the question does not say, so one has "
        "to look at it."
    ),
    "The radius of a circle is half of its diameter; a square has four equal sides and four right angles.",
    "If the sum of two angles is known, then the third angle of a triangle follows, for all three make a half turn.",
    "Reason step by step, check the result, and write down only what you are sure of. Put the result at the end.",
    "red green blue yellow black white left right top bottom above below inside outside near far small large",
    "We start from what is given, name what is wanted, and go from one to the other in steps that anyone can follow.",
    (
        "This is not the only way to do it, but it is short. Here is another: draw a line through the middle "
        "of the figure."
    ),
    "Please explain your answer in a few words. Let me think about it. Wait, that would be more than the whole.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, i))\n",
    "There were people who had been there before, and they could tell which of these things would work and which not.",
    (
        "Mathematics describes numbers, shapes, quantities and change; geometry, algebra, statistics and "
        "calculus are branches."
    ),
    (
        "Measure twice before cutting once. Estimate roughly, calculate carefully, compare, and round "
        "towards the nearest integer."
    ),
    (
        "Parallel lines never cross, perpendicular lines meet at ninety degrees, and a tangent touches its "
        "circle at a single point."
    ),
    (
        "Opposite edges of a parallelogram have equal lengths. A hexagon has six vertices, an octagon eight, "
        "a trapezoid only four."
    ),
    (
        "Colour, brightness, position, rotation, texture and size vary from image to image, so remembering "
        "pixels does not help."
    ),
    "Reinforcement learning rewards good samples and discourages bad ones until the policy improves during training.",
    "Yesterday morning several children walked along the river, picked flowers, watched birds and talked about school.",
    "Bread, butter, apples, cheese, coffee and fresh water were bought cheaply from the small market behind our house.",
    "Please write a short program which reads every file, counts its lines, sorts them by name and prints the totals.",
    (
        "import numpy as np\nclass Model:\n    def forward(self, x):\n        if x is None:\n            "
        "raise ValueError(x)\n"
    ),
)


def make_tiny(
    folder: Path,
    *,
    model_type: TinyModelType = "qwen2_5_vl",
    seed: int = 0,
    tie_word_embeddings: bool = False,
) -> Path:
    """Write a complete model folder with random weights (float32, under a million parameters), and return it.

    The folder is made if missing; files of the same names are overwritten. It loads with AutoConfig, AutoTokenizer,
    AutoProcessor and AutoModelForImageTextToText (AutoModelForCausalLM for the text families), and in vLLM.
    Raises: ModelError for another model_type.
    """
    if model_type not in get_args(TinyModelType):
        raise ModelError(f"No tiny {model_type!r} can be made. Choose one of: {', '.join(get_args(TinyModelType))}.")
    declare_operators()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    family = family_named(model_type)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(model_type)
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
    model.save_pretrained(folder)
    _save_as_published(folder, model, family)
    return folder


def _save_as_published(folder: Path, model: Any, family: ModelFamily) -> None:
    """Write the weights again if published checkpoints hold them otherwise than transformers 5 writes them."""
    if family.model_type in _PUBLISHED_OTHERWISE:
        tensors = {
            name: tensor.detach().contiguous()
            for here, parameter in model.named_parameters()
            for name, tensor in family.checkpoint_tensors(here, parameter)
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _chat_layout(model_type: TinyModelType) -> dict[str, Any]:
    """Return the tokenizer's arguments by which images get into a prompt.

    InternVL's template writes one placeholder for an image, and its processor the tokens around it; LLaVA has none.
    """
    if model_type not in ("internvl", "llava"):
        return {"chat_template": _CHAT_TEMPLATE}
    bare = _CHAT_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    if model_type == "llava":
        return {"chat_template": bare, "extra_special_tokens": {"image_token": "<|image_pad|>"}}
    return {
        "chat_template": bare,
        "extra_special_tokens": {
            "start_image_token": "<|vision_start|>",
            "end_image_token": "<|vision_end|>",
            "context_image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
    }


def _train_tokenizer(model_type: TinyModelType) -> Any:
    """Return a Qwen2 tokenizer of VOCAB_ENTRIES entries: 256 bytes, merges, special tokens last."""
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # The untrained tokenizer already has Qwen's normalizer, pre-tokenizer and decoder: learn merges under just those.
    learner = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_ENTRIES - len(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(_CORPUS, trainer)
    learned = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        model_max_length=4096,
        **_chat_layout(model_type),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.eos_token = "<|im_end|>"  # not before: the constructor would give it the first special id
    return tokenizer


def _save_processors(folder: Path, tokenizer: Any, model_type: TinyModelType) -> None:
    """Write the tokenizer and, for a vision family, the image and video processors that its AutoProcessor wants."""
    import transformers  # whose classes are imported one by one, as they are named

    match model_type:
        case "qwen2_vl" | "qwen2_5_vl":
            sizes = _processor_sizes(patch_size=14)
            kind = transformers.Qwen2VLProcessor if model_type == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
            processor = kind(
                image_processor=transformers.Qwen2VLImageProcessor(**sizes),
                tokenizer=tokenizer,
                video_processor=transformers.Qwen2VLVideoProcessor(**sizes),
                chat_template=_CHAT_TEMPLATE,
            )
        case "qwen3_vl" | "qwen3_vl_moe":
            sizes = _processor_sizes(patch_size=16)
            processor = transformers.Qwen3VLProcessor(
                image_processor=transformers.Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
                tokenizer=tokenizer,
                video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
                chat_template=_CHAT_TEMPLATE,
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
    """Return the arguments that an image and a video processor share; one image token covers 2 x 2 patches."""
    token_pixels = (2 * patch_size) ** 2
    return {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": MIN_IMAGE_TOKENS * token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels},
    }


def _model_config(tokenizer: Any, model_type: TinyModelType, tie_word_embeddings: bool) -> Any:
    """Return the family's own config at toy widths. Heads are 32 wide, the least that vLLM's CPU attention takes."""
    import transformers  # whose classes are imported one by one, as they are named

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
    # Two of four experts for a token: some get none of a short row.
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
            # This family calls the width of its tower embed_dim, and what comes out of it hidden_size.
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
            # Windows of 2 x 2 image tokens: a drawing of 3 x 3 falls into four, so windows differ from full attention.
            return transformers.Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": rope | {"mrope_section": [4, 6, 6]}},
                vision_config=vision | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
                **media,
                **tied,
            )
        case "qwen3_vl" | "qwen3_vl_moe":
            kind = transformers.Qwen3VLConfig if model_type == "qwen3_vl" else transformers.Qwen3VLMoeConfig
            # Six positions a side, one for each patch of a drawing of 96 x 96; others are interpolated.
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
            # What the last but one of the tower's layers says is shown to the language model.
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
            # The first of its two layers is dense, as a config may say of any.
            return transformers.Qwen3MoeConfig(
                **text, **tied, **experts, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0], rope_parameters=rope
            )
        case "llama":
            # As Llama 3.1 has it, which divides the slowest frequencies.
            stretched = {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
            return transformers.LlamaConfig(**text, **tied, rope_parameters=rope | stretched)
        case "mistral":
            # A window as its first release had; it cuts off most of a prompt.
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
