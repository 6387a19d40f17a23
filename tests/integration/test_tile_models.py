"""Models that take tiles or whole images: prompts and pixels equal their own processors'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_model_families import (
    SAMPLING,
    changed_policy,
    make_groups,
    make_prompts,
    max_difference,
    open_engine,
    oracle_logprobs,
)

from support.builders import prompt_and_inputs
from support.images import noise
from support.models import changed_copy
from support.oracle import concatenated, load_hugging_face, packed_logprobs
from trigon.data.vision import image_processor_of
from trigon.errors import ModelError
from trigon.models.families import family_named
from trigon.models.load import auto_class, load_model, load_processors
from trigon.models.policy import Policy
from trigon.types import LocalWeights, Vision

pytestmark = pytest.mark.extended

TYPES = ["internvl", "llava", "llava_onevision", "gemma3", "mistral3", "idefics3", "smolvlm"]
# One tile; several, wide and high, with a thumbnail; small and odd sizes.
SIZES = [(56, 56), (300, 60), (60, 200), (120, 110), (1, 1), (17, 90), (500, 400)]

TinyModel = Callable[..., Path]


@pytest.fixture(params=TYPES)
def folder(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(request.param)


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        ("How many?", []),
        ("<image>What is it?", [(56, 56)]),
        ("Look: <image>\nand <image>. Alike?", [(300, 60), (17, 90)]),
        ("Look:\n<image>\n\nand\n\n<image>\n", [(300, 60), (17, 90)]),  # line ends become one token
        ("<image><image><image>", [(1, 1), (500, 400), (60, 200)]),
    ],
)
def test_prompts_equal_those_of_the_hugging_face_processor(
    folder: Path, problem: str, sizes: list[tuple[int, int]]
) -> None:
    processors = load_processors(str(folder), min_pixels=100, max_pixels=200)  # tiles do not use these limits
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    prompt, expected = prompt_and_inputs(folder, processors, problem, images)
    if not images:
        assert prompt.vision is None
        return
    assert isinstance(prompt.vision, Vision)
    tiles = expected["pixel_values"].flatten(0, -4)
    tiles = tiles[tiles.flatten(1).any(1)]  # LLaVA-OneVision adds tiles of zeros to images with fewer
    is_whole = processors.family.vision_input == "images"
    tile_sizes = expected["image_sizes"] if is_whole else torch.tensor([(56, 56)] * len(tiles))
    assert prompt.vision.original_sizes == (() if processors.family.tile_assembly is None else tuple(sizes))
    patches = [
        tile[:, row : row + 14, column : column + 14].reshape(-1)
        for tile, (height, width) in zip(tiles, tile_sizes.tolist(), strict=True)
        for row in range(0, height, 14)
        for column in range(0, width, 14)
    ]
    assert torch.equal(prompt.vision.pixel_values, torch.stack(patches))
    assert int(prompt.vision.grid_thw[:, 0].sum()) == len(tiles)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_number_of_tokens_follows_from_the_size_of_the_image(folder: Path, size: tuple[int, int]) -> None:
    processor = image_processor_of(load_processors(str(folder)))
    assert processor is not None
    vision = processor.process([noise(*size)])
    assert processor.tokens_of(vision) == (processor.image_tokens(*size),)


def test_hashes_depend_on_the_content_only(folder: Path) -> None:
    processor = image_processor_of(load_processors(str(folder)))
    assert processor is not None
    first, again, other = processor.process([noise(60, 200), noise(60, 200), noise(60, 200, seed=1)]).hashes
    assert first == again != other


def test_freezing_the_vision_tower_freezes_its_projector(folder: Path) -> None:
    processors = load_processors(str(folder))
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    policy.freeze_vision_tower()
    frozen = {name for name, weight in policy.model.named_parameters() if not weight.requires_grad}
    assert frozen == {
        name
        for name, _ in policy.model.named_parameters()
        if not name.startswith(("model.language_model.", "model.text_model.", "lm_head."))
    }


@pytest.mark.vllm
@pytest.mark.parametrize(("model_type", "inside"), [("internvl", "qwen3"), ("internvl", "llama"), ("llava", "qwen2")])
def test_another_supported_language_model_gives_the_same_log_probabilities_in_all_engines(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, inside: str
) -> None:
    folder = Path(shutil.copytree(tiny_model(model_type), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    text = json.loads((tiny_model(inside) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
    family = family_named(model_type)
    weights = {
        name: tensor.detach().contiguous()
        for parameter_name, parameter in random_model(folder).named_parameters()
        for name, tensor in family.checkpoint_tensors(parameter_name, parameter)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    processors = load_processors(str(folder))
    policy = changed_policy(folder)
    oracle = load_hugging_face(folder, torch.float32)
    oracle.load_state_dict(policy.model.state_dict())
    groups, prompts = make_groups(processors), make_prompts(processors)
    with torch.no_grad():
        expected = oracle_logprobs(oracle, processors, groups)
        torch.testing.assert_close(
            concatenated(packed_logprobs(policy, processors, groups)), expected, atol=1e-5, rtol=0
        )
    engine = open_engine("vllm", folder, processors)
    try:
        with engine.awake(LocalWeights(policy.named_weights), version=1):
            completions = engine.generate(prompts, SAMPLING)
    finally:
        engine.close()
    assert max_difference(policy, processors, prompts, completions) <= 1e-4


def random_model(folder: Path) -> Any:
    """Return a model of the folder's config with random weights, under transformers' names."""
    processors = load_processors(str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto_class(processors.family).from_config(processors.hf_config, dtype=torch.float32)


def load_error(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Return the message of the error that loading a model with a changed config raises."""
    copied = changed_copy(folder, tmp_path, change)
    with pytest.raises(ModelError) as error:
        load_model(str(copied), dtype=torch.float32, device="meta")
    return str(error.value)


@pytest.mark.parametrize("inside", ["qwen3_moe", "gemma", "gpt2"])
def test_an_unsupported_language_model_raises(folder: Path, tmp_path: Path, inside: str) -> None:
    message = load_error(folder, tmp_path, lambda config: config.update(text_config={"model_type": inside}))
    assert f"'{inside}'" in message


def test_an_unsupported_vision_tower_raises(tiny_model: TinyModel, tmp_path: Path) -> None:
    siglip = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    message = load_error(tiny_model("llava"), tmp_path, lambda config: config.update(vision_config=siglip))
    assert "is a 'siglip_vision_model'; only 'clip_vision_model' is supported" in message


@pytest.mark.parametrize("model_type", ["internvl", "llava"])  # Gemma 3 takes the last layer
@pytest.mark.parametrize(
    "change", [{"vision_feature_layer": [-2, -1]}, {"vision_feature_select_strategy": "full"}], ids=str
)
def test_an_unsupported_selection_of_vision_features_raises(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, change: dict[str, Any]
) -> None:
    message = load_error(tiny_model(model_type), tmp_path, lambda config: config.update(change))
    assert "vision_feature_select_strategy = " in message


def test_another_limit_of_features_raises(tiny_model: TinyModel, tmp_path: Path) -> None:
    change = {"vision_aspect_ratio": "anyres_max_4"}
    message = load_error(tiny_model("llava_onevision"), tmp_path, lambda config: config.update(change))
    assert "vision_aspect_ratio = 'anyres_max_4'" in message


def test_an_image_processor_with_other_shapes_raises(tiny_model: TinyModel) -> None:
    processors = load_processors(str(tiny_model("llava_onevision")))
    processors.image_processor.image_grid_pinpoints = [[56, 56], [112, 56]]
    with pytest.raises(ModelError, match="image_grid_pinpoints"):
        image_processor_of(processors)


def test_capped_logits_in_a_model_whose_head_does_not_cap_them_raise(tiny_model: TinyModel, tmp_path: Path) -> None:
    message = load_error(
        tiny_model("gemma3"), tmp_path, lambda config: config["text_config"].update(final_logit_softcapping=30.0)
    )
    assert "final_logit_softcapping = 30.0" in message


def test_an_image_processor_that_cuts_images_with_text_between_them_raises(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(tiny_model("gemma3"), tmp_path / "model"))
    path = copied / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["do_pan_and_scan"] = True
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="do_pan_and_scan"):
        image_processor_of(load_processors(str(copied)))


def test_dropout_in_the_vision_tower_raises(folder: Path, tmp_path: Path) -> None:
    message = load_error(folder, tmp_path, lambda config: config["vision_config"].update(attention_dropout=0.1))
    assert "attention_dropout = 0.1" in message


@pytest.mark.parametrize("model_type", ["internvl", "llava", "idefics3"])
def test_a_tile_size_other_than_the_models_raises(tiny_model: TinyModel, tmp_path: Path, model_type: str) -> None:
    copied = Path(shutil.copytree(tiny_model(model_type), tmp_path / "model"))
    path = copied / "processor_config.json"
    config = json.loads(path.read_text())
    section = config["image_processor"]
    if "max_image_size" in section:
        section["max_image_size"] = {"longest_edge": 28}
    else:
        section["size"] = section["crop_size"] = {"height": 28, "width": 28}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="makes tiles of 28 x 28 pixels, the model takes 56 x 56"):
        image_processor_of(load_processors(str(copied)))


def test_tiles_that_would_be_taken_for_padding_raise(tiny_model: TinyModel) -> None:
    processors = load_processors(str(tiny_model("idefics3")))
    processors.image_processor.image_mean = [0.2, 0.4, 0.0]
    with pytest.raises(ModelError, match="take for padding"):
        image_processor_of(processors)
