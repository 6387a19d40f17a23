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


@pytest.mark.parametrize(
    ("token_ids", "grids", "expected"),
    [
        (
            [1] + [99] * 6 + [2, 3],
            [[1, 4, 6]],
            [[0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 1, 1, 2, 2, 2, 4, 5], [0, 1, 2, 3, 1, 2, 3, 4, 5]],
        ),
        ([99, 99, 99, 1], [[1, 6, 2]], [[0, 0, 0, 3], [0, 1, 2, 3], [0, 0, 0, 3]]),
        ([99, 99, 99, 1], [[1, 2, 4], [1, 2, 2]], [[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]]),
        ([1, 2, 3], None, [[0, 1, 2]] * 3),
    ],
    ids=["drawn in the module's docstring", "tall image", "adjacent images", "text"],
)
def test_positions_of_images_by_hand(
    token_ids: list[int], grids: list[list[int]] | None, expected: list[list[int]]
) -> None:
    assert positions_of(token_ids, grids) == expected


PATCHES = replace(VLM, video="patches")


@pytest.mark.parametrize(
    ("family", "token_ids", "grids", "seconds", "expected"),
    [
        (VLM, [1] + [98] * 6 + [2], [[3, 2, 4]], (1.0,), [[0, 1, 1, 3, 3, 5, 5, 6], [0, 1, 1, 1, 1, 1, 1, 6]]),
        (VLM, [98] * 4 + [1], [[4, 2, 2]], (0.75,), [[0, 1, 3, 4, 5]]),  # truncated after summing
        (VLM, [98, 98, 1, 98, 98], [[2, 2, 2]] * 2, (2.0, 0.5), [[0, 4, 5, 6, 7]]),
        (PATCHES, [98] * 3 + [1], [[3, 2, 2]], (9.0,), [[0, 1, 2, 3], [0, 0, 0, 3], [0, 0, 0, 3]]),
        # With timestamps in the text, each temporal patch has positions like an image.
        (
            family_named("qwen3_vl"),
            [1, 98, 98, 1, 98, 98, 1],
            [[2, 2, 4]],
            (9.0,),
            [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]],
        ),
    ],
    ids=["drawn in the module's docstring", "fractions", "two videos", "without seconds", "timestamps"],
)
def test_positions_of_videos_by_hand(family, token_ids, grids, seconds, expected) -> None:
    found = prompt_positions(
        torch.tensor(token_ids), torch.tensor(grids), family, CONFIG, temporal_patch_seconds=seconds
    )
    assert found[: len(expected)].tolist() == expected


def test_a_completion_continues_after_the_largest_position() -> None:
    text = family_named("llama")
    assert prompt_positions(torch.tensor([1, 2]), None, text, SimpleNamespace()).tolist() == [[0, 1]]
    with pytest.raises(ModelError, match="'llama' model has no vision tower"):
        prompt_positions(torch.tensor([1]), torch.tensor([[1, 2, 2]]), text, SimpleNamespace())
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
