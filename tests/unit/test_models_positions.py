"""Position ids, by hand and compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.models import processors_of
from support.oracle import load_hugging_face, make_prompt
from trigon.errors import ModelError
from trigon.models.families import family_named
from trigon.models.positions import completion_positions, prompt_positions

VLM = family_named("qwen2_5_vl")
CONFIG = SimpleNamespace(
    image_token_id=99, video_token_id=98, vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
)


def positions_of(token_ids: list[int], grids: list[list[int]] | None) -> list[list[int]]:
    grid_thw = None if grids is None else torch.tensor(grids)
    return prompt_positions(torch.tensor(token_ids), grid_thw, VLM, CONFIG).tolist()


def test_the_image_drawn_in_the_module_docstring() -> None:
    assert positions_of([1] + [99] * 6 + [2, 3], [[1, 4, 6]]) == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


def test_text_after_a_tall_image_continues_after_its_height() -> None:
    assert positions_of([99, 99, 99, 1], [[1, 6, 2]]) == [[0, 0, 0, 3], [0, 1, 2, 3], [0, 0, 0, 3]]


def test_two_images_may_be_adjacent() -> None:
    assert positions_of([99, 99, 99, 1], [[1, 2, 4], [1, 2, 2]]) == [[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]]


def test_without_images_all_three_positions_count_tokens() -> None:
    assert positions_of([1, 2, 3], None) == [[0, 1, 2]] * 3


def test_the_video_drawn_in_the_module_docstring() -> None:
    token_ids = torch.tensor([1] + [98] * 6 + [2])
    positions = prompt_positions(token_ids, torch.tensor([[3, 2, 4]]), VLM, CONFIG, temporal_patch_seconds=(1.0,))
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 5, 5, 6],
        [0, 1, 1, 1, 1, 1, 1, 6],
        [0, 1, 2, 1, 2, 1, 2, 6],
    ]


def test_fractional_positions_are_truncated_after_summing() -> None:
    token_ids, grid_thw = torch.tensor([98] * 4 + [1]), torch.tensor([[4, 2, 2]])
    positions = prompt_positions(token_ids, grid_thw, VLM, CONFIG, temporal_patch_seconds=(0.75,))
    assert positions[0].tolist() == [0, 1, 3, 4, 5]


def test_a_family_without_seconds_counts_temporal_patches() -> None:
    token_ids, grid_thw = torch.tensor([98] * 3 + [1]), torch.tensor([[3, 2, 2]])
    family = replace(VLM, video="patches")
    positions = prompt_positions(token_ids, grid_thw, family, CONFIG, temporal_patch_seconds=(9.0,))
    assert positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 3], [0, 0, 0, 3]]


def test_each_video_has_its_own_seconds_per_temporal_patch() -> None:
    token_ids, grid_thw = torch.tensor([98, 98, 1, 98, 98]), torch.tensor([[2, 2, 2], [2, 2, 2]])
    positions = prompt_positions(token_ids, grid_thw, VLM, CONFIG, temporal_patch_seconds=(2.0, 0.5))
    assert positions[0].tolist() == [0, 4, 5, 6, 7]


def test_with_timestamps_in_the_text_each_temporal_patch_has_positions_like_an_image() -> None:
    token_ids = torch.tensor([1, 98, 98, 1, 98, 98, 1])
    positions = prompt_positions(
        token_ids, torch.tensor([[2, 2, 4]]), family_named("qwen3_vl"), CONFIG, temporal_patch_seconds=(9.0,)
    )
    assert positions.tolist() == [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]]


def test_a_text_model_has_one_position_per_token() -> None:
    assert prompt_positions(torch.tensor([1, 2]), None, family_named("llama"), SimpleNamespace()).tolist() == [[0, 1]]


def test_a_completion_continues_after_the_largest_position() -> None:
    prompt = torch.tensor([[0, 0, 0], [0, 1, 2], [0, 0, 0]])
    assert completion_positions(prompt, 2).tolist() == [[3, 4]] * 3


@pytest.mark.parametrize(
    ("token_ids", "grids", "message"),
    [
        ([1, 99, 2], [[1, 4, 4]], "has 1 placeholder tokens, but its 1 images need 4"),
        ([1, 99, 2], None, "has 1 placeholder tokens, but its 0 images need 0"),
        ([99, 99, 1, 99, 99], [[1, 4, 4]], "4 placeholder tokens of an image or video are not consecutive"),
    ],
)
def test_placeholders_that_do_not_match_the_images_are_an_error(
    token_ids: list[int], grids: list[list[int]] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        positions_of(token_ids, grids)


def test_images_for_a_text_model_are_an_error() -> None:
    with pytest.raises(ModelError, match="'llama' model has no vision tower"):
        prompt_positions(torch.tensor([1]), torch.tensor([[1, 2, 2]]), family_named("llama"), SimpleNamespace())


@pytest.mark.parametrize("grids", [[(6, 10)], [(4, 4), (10, 2), (2, 6)], []], ids=["one image", "three", "none"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_positions_equal_those_of_transformers(
    tiny_model: Callable[..., Path], model_type: str, grids: list[tuple[int, int]]
) -> None:
    folder = tiny_model(model_type)
    processors = processors_of(folder)
    prompt = make_prompt(processors, grids, seed=0)
    token_ids = torch.tensor(prompt.token_ids)
    grid_thw = None if prompt.vision is None else prompt.vision.grid_thw
    expected, shift = load_hugging_face(folder, torch.float32).model.get_rope_index(
        token_ids[None],
        mm_token_type_ids=(token_ids == processors.hf_config.image_token_id).int()[None],
        image_grid_thw=grid_thw,
    )
    positions = prompt_positions(token_ids, grid_thw, processors.family, processors.hf_config)
    assert torch.equal(positions, expected[:, 0])
    assert completion_positions(positions, 1)[0, 0] == len(token_ids) + shift[0, 0]
