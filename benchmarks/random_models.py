"""Random models with the shapes of published ones, and random groups, without a download.

Qwen2.5-VL in the sizes of 3B and 7B, and a tiny one. Shared by tests/gpu and gpu.py.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trigon.models.sizes import GroupLengths
from trigon.system.torchvision_stub import declare_operators
from trigon.tools.quickstart.model import make_tiny
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score, Vision

COMPLETIONS = 5
_SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

# From the published config.json of Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct.
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
MODELS: dict[str, dict[str, Any]] = {
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "mrope_section": [16, 24, 24],
        "vision": TOWER,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "mrope_section": [16, 24, 24],
        "vision": TOWER,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "mrope_section": [4, 6, 6],
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "fullatt_block_indexes": [1],
        },
    },
}


def make_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Qwen2.5-VL with random weights, whose last token ids are those of images."""
    return _random_weights(model_config(shape), device, dtype)


def model_config(shape: dict[str, Any]) -> Any:
    """Return the config of make_model."""
    first = shape["vocab_size"] - len(_SPECIAL)
    return _model_config(shape, {name: first + index for index, name in enumerate(_SPECIAL)})


def write_model(
    folder: Path, shape: dict[str, Any], device: torch.device, dtype: torch.dtype, *, max_layers: int | None = None
) -> Path:
    """Write a Qwen2.5-VL with random weights as a model folder, unless it exists, and return it.

    Tokenizer and processors are those of the quickstart, whose vocabulary is a part of the model's.
    max_layers: of the language model; None: as many as the shape has.
    """
    if folder.is_dir():
        return folder
    from transformers import AutoConfig

    temporary = folder.with_name(f".making_{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    make_tiny(temporary, model_type="qwen2_5_vl")
    tiny = AutoConfig.from_pretrained(temporary)
    if max_layers is not None:
        shape = {**shape, "num_hidden_layers": min(max_layers, shape["num_hidden_layers"])}
    config = _model_config(shape, {name: getattr(tiny, name) for name in _SPECIAL})
    model = _random_weights(config, device, dtype)
    for file in temporary.glob("*.safetensors"):
        file.unlink()
    generation_config = (temporary / "generation_config.json").read_bytes()
    model.save_pretrained(temporary)
    (temporary / "generation_config.json").write_bytes(generation_config)
    temporary.rename(folder)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM measures what is free
    return folder


def _model_config(shape: dict[str, Any], special_token_ids: dict[str, int]) -> Any:
    declare_operators()
    from transformers import Qwen2_5_VLConfig

    numbers = {**shape}
    vision, mrope_section = numbers.pop("vision"), numbers.pop("mrope_section")
    tied = numbers.pop("tie_word_embeddings")
    return Qwen2_5_VLConfig(
        text_config={
            **numbers,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope_section},
        },
        vision_config={**vision, "out_hidden_size": shape["hidden_size"], "window_size": 112, "patch_size": 14},
        tie_word_embeddings=tied,
        **special_token_ids,
    )


def _random_weights(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def make_groups(config: Any, count: int, scale: float, seed: int) -> list[RolloutGroup]:
    """Return random groups with the lengths of Geometry3K times scale.

    Images have 262144 pixels or slightly more, as with data.min_pixels, and different shapes: about
    340 tokens each. Text has 110 +- 30 tokens, completions 275 +- 110.
    """
    generator = torch.Generator().manual_seed(seed)
    num_text_tokens = min(config.image_token_id, config.vision_start_token_id)

    def text(length: int) -> list[int]:
        return torch.randint(0, num_text_tokens, (length,), generator=generator).tolist()

    def random_length(mean: float, std: float, minimum: int) -> int:
        return max(minimum, round(scale * (mean + std * float(torch.randn((), generator=generator)))))

    groups = []
    for number in range(count):
        ratio = 0.6 + 1.0 * float(torch.rand((), generator=generator))
        tokens = 340 * scale
        height, width = (max(1, round((tokens * side) ** 0.5)) for side in (ratio, 1 / ratio))
        grid = torch.tensor([[1, 2 * height, 2 * width]])
        image = [config.vision_start_token_id, *[config.image_token_id] * (height * width), config.vision_end_token_id]
        prompt = Prompt(
            prompt_id=f"bench:{number}",
            token_ids=(*text(10), *image, *text(random_length(100, 30, 5))),
            vision=Vision(
                pixel_values=torch.randn(4 * height * width, 3 * 2 * 14 * 14, generator=generator),
                grid_thw=grid,
                hashes=(str(number),),
            ),
            text="",
            ground_truth=None,
            row={},
            image_refs=("",),
        )
        completions = tuple(tuple(text(random_length(275, 110, 3))) for _ in range(COMPLETIONS))
        groups.append(RolloutGroup(prompt, tuple(map(make_rollout, completions))))
    return groups


def make_rollout(token_ids: tuple[int, ...]) -> Rollout:
    """Return a completion of these tokens, without a score."""
    completion = Completion(token_ids, (0.0,) * len(token_ids), "stop", "", 0)
    return Rollout(completion, Score(0.0, {}, "ok", ""))


def lengths_of(groups: Sequence[RolloutGroup]) -> list[GroupLengths]:
    """Return the lengths of groups, for trigon.models.sizes."""
    return [GroupLengths.of(group.prompt, [one.completion for one in group.rollouts]) for group in groups]
