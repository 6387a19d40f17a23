"""Gemma 4, which averages patches: prompts, pixels and checkpoints equal those of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_families import SAMPLING, TEMPERATURE, changed_policy, make_prompts, max_difference, open_engine

from support.builders import prompt_and_inputs
from support.images import noise
from support.models import changed_copy
from support.oracle import make_group, make_prompt, pack_groups
from trigon.data.vision import PooledProcessor, image_processor_of
from trigon.errors import ModelError
from trigon.models.families import family_named
from trigon.models.load import copy_side_files, load_hf_config, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.tiles import pad_patches, patch_positions
from trigon.types import LocalWeights, Vision

pytestmark = pytest.mark.extended

# Square, wide, high, larger and smaller than its tokens, and the longest sides that it takes.
SIZES = [(96, 96), (300, 60), (60, 200), (17, 90), (500, 400), (1, 1), (3000, 20), (20, 3000)]

TinyModel = Callable[..., Path]


@pytest.fixture
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("gemma4")


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        ("How many?", []),
        ("<image>What is it?", [(96, 96)]),
        ("Look:\n<image>\nand <image>. Alike?", [(300, 60), (17, 90)]),
    ],
)
def test_prompts_equal_those_of_the_hugging_face_processor(
    folder: Path, problem: str, sizes: list[tuple[int, int]]
) -> None:
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    prompt, expected = prompt_and_inputs(folder, load_processors(str(folder)), problem, images)
    if not images:
        assert prompt.vision is None
        return
    assert isinstance(prompt.vision, Vision)
    positions = expected["image_position_ids"]
    kept = (positions >= 0).all(-1)
    assert torch.equal(prompt.vision.pixel_values, expected["pixel_values"][kept])
    own = patch_positions(prompt.vision.grid_thw)
    assert torch.equal(own[(own >= 0).all(-1)], positions[kept])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_number_of_tokens_and_the_grid_follow_from_the_size_of_the_image(
    folder: Path, size: tuple[int, int]
) -> None:
    processor = image_processor_of(load_processors(str(folder)))
    assert isinstance(processor, PooledProcessor)
    vision = processor.process([noise(*size)])
    assert tuple(vision.grid_thw[0].tolist()) == processor.grid(*size)
    assert processor.tokens_of(vision) == (processor.image_tokens(*size),)
    assert 0 < processor.image_tokens(*size) <= 70


def test_patches_of_images_of_unlike_size_are_padded() -> None:
    grid_thw = torch.tensor([[1, 2, 3], [1, 1, 2]])
    assert patch_positions(grid_thw).tolist() == [
        [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]],
        [[0, 0], [1, 0], *[[-1, -1]] * 4],
    ]
    padded = pad_patches(torch.arange(8.0)[:, None], grid_thw)
    assert padded[..., 0].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 0, 0, 0]]


def test_an_image_processor_that_averages_other_squares_than_the_model_raises(folder: Path, tmp_path: Path) -> None:
    copied = changed_copy(
        folder,
        tmp_path,
        lambda config: config["image_processor"].update(pooling_kernel_size=3),
        file="processor_config.json",
    )
    with pytest.raises(ModelError, match=r"pooling_kernel_size = \(8, 3\), the model \(8, 2\)"):
        image_processor_of(load_processors(str(copied)))


def test_an_moe_model_raises(folder: Path, tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    copied = changed_copy(folder, tmp_path, lambda config: config["text_config"].update(experts))
    with pytest.raises(ModelError, match="enable_moe_block"):
        load_model(str(copied), dtype=torch.float32, device="meta")


def test_text_that_attends_to_later_tokens_raises(folder: Path, tmp_path: Path) -> None:
    changed = {"use_bidirectional_attention": "all"}
    copied = changed_copy(folder, tmp_path, lambda config: config["text_config"].update(changed))
    with pytest.raises(ModelError, match="attends to later tokens"):
        load_model(str(copied), dtype=torch.float32, device="meta")


def test_the_buffers_of_a_checkpoint_are_sent_and_saved(folder: Path) -> None:
    policy = changed_policy(folder)
    stored = load_file(folder / "model.safetensors")
    buffers = {name for name in stored if name.endswith(("layer_scalar", "std_bias", "std_scale", "_min", "_max"))}
    assert len(buffers) > 4
    for tensors in (dict(policy.named_weights()), dict(policy.saved_tensors())):
        assert tensors.keys() == stored.keys()
        for name in buffers:
            assert torch.equal(tensors[name], stored[name])


def test_published_keys_of_layers_that_use_those_of_earlier_ones_are_not_expected(folder: Path) -> None:
    """transformers ignores them too: the tiny model's last two of four layers."""
    config, family = load_processors(str(folder)).hf_config, family_named("gemma4")
    name = "model.language_model.layers.{}.self_attn.k_proj.weight"
    assert [family.is_unused(name.format(layer), config) for layer in range(4)] == [False, False, True, True]
    assert not family.is_unused("model.vision_tower.encoder.layers.3.self_attn.k_proj.linear.weight", config)
    assert not family.is_unused("model.language_model.layers.3.self_attn.q_proj.weight", config)


def test_an_audio_tower_is_frozen_and_sent_with_the_other_weights(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Gemma4AudioConfig

    copied = tmp_path / "model"
    copy_side_files(folder, copied)
    config = load_hf_config(folder)
    config.audio_config = Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[4, 4],
        output_proj_dims=32,
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(copied)
    processors = load_processors(str(copied))
    policy = changed_policy(copied)
    of_audio = [
        weight for name, weight in policy.model.named_parameters() if name.startswith(("model.audio_", "model.embed_a"))
    ]
    assert len(of_audio) > 5
    assert not any(weight.requires_grad for weight in of_audio)
    assert dict(policy.named_weights()).keys() == load_file(copied / "model.safetensors").keys()
    [row] = pack_groups(processors, [make_group(make_prompt(processors, [(4, 6)], seed=1), [3, 4], seed=2)])
    policy(row.packed).logprobs.sum().backward()
    assert all(weight.grad is None for weight in of_audio)


@pytest.mark.vllm
def test_vllm_samples_with_the_changed_weights_where_images_attend_causally(folder: Path, tmp_path: Path) -> None:
    """As in the small models of Gemma 4; in the others vLLM needs a GPU."""
    copied = changed_copy(
        folder, tmp_path, lambda config: config["text_config"].update(use_bidirectional_attention=None)
    )
    processors = load_processors(str(copied))
    prompts, after = make_prompts(processors), changed_policy(copied)
    model = load_model(str(copied), dtype=torch.float32, device="cpu")
    before = Policy(model, processors.family, temperature=TEMPERATURE, banned_token_ids=processors.banned_token_ids)
    engine = open_engine("vllm", copied, processors)
    try:
        for version, policy in enumerate((before, after, before)):
            with engine.awake(LocalWeights(policy.named_weights), version=version):
                completions = engine.generate(prompts, SAMPLING)
            assert max_difference(policy, processors, prompts, completions) <= 1e-4
    finally:
        engine.close()
    assert max_difference(after, processors, prompts, completions) > 0.1


def test_published_keys_of_layers_that_use_those_of_earlier_ones_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    weights = load_file(copied / "model.safetensors")
    name = "model.language_model.layers.{}.self_attn.k_proj.weight"
    weights[name.format(2)] = weights[name.format(0)].clone()
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    load_model(str(copied), dtype=torch.float32, device="cpu")
