"""The input of vision towers: patches projected by a matrix product, and tiles kept as patches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trigon.models.load import load_model
from trigon.models.tiles import to_images, to_padded_images, to_patches, to_tiles
from trigon.models.vision_encoder import PatchProjection


@pytest.mark.parametrize("bias", [False, True])
def test_the_projection_equals_the_convolution_in_values_and_gradients(bias):
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=bias).double()
    projection = copy.deepcopy(convolution)
    projection.__class__ = PatchProjection
    pixels = torch.randn(5, 3, 2, 4, 4, dtype=torch.float64)
    expected, output = convolution(pixels), projection(pixels)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)
    for result in (expected, output):
        result.square().sum().backward()
    for parameter, expected_parameter in zip(projection.parameters(), convolution.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)


@pytest.mark.parametrize(
    ("model_type", "replaced"), [("qwen2_vl", 1), ("qwen2_5_vl", 1), ("qwen3_vl", 1), ("llava", 0)]
)
def test_a_loaded_model_uses_it_with_unchanged_weight_names(tiny_model, model_type, replaced):
    model = load_model(str(tiny_model(model_type)), dtype=torch.float32, device="cpu")
    found = [name for name, module in model.named_modules() if isinstance(module, PatchProjection)]
    assert len(found) == replaced
    assert all(f"{name}.weight" in dict(model.named_parameters()) for name in found)


def test_the_tile_drawn_in_the_module_docstring() -> None:
    tile = torch.tensor([[1, 2, 5, 6], [3, 4, 7, 8], [9, 10, 13, 14], [11, 12, 15, 16]]).view(1, 1, 4, 4)
    patches = to_patches(tile, 2)
    assert patches.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert torch.equal(to_tiles(patches, torch.tensor([[1, 2, 2]]), 2), tile)
    channels = torch.arange(12).view(1, 3, 2, 2)
    assert to_patches(channels, 1).tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_images_of_several_sizes_are_restored_and_padded() -> None:
    images = [torch.randn(3, 8, 4), torch.randn(3, 4, 12)]
    patches = torch.cat([to_patches(image[None], 4) for image in images])
    grid_thw = torch.tensor([[1, 2, 1], [1, 1, 3]])
    restored, padded = to_images(patches, grid_thw, 4), to_padded_images(patches, grid_thw, 4)
    assert padded.shape == (2, 3, 8, 12)
    for image, found, row in zip(images, restored, padded, strict=True):
        assert torch.equal(found, image)
        assert torch.equal(row[:, : image.shape[1], : image.shape[2]], image)
        assert row.count_nonzero() == image.count_nonzero()


def test_tiles_of_several_images_are_restored_in_order() -> None:
    tiles = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    patches = to_patches(tiles, 4)
    assert patches.shape == (45, 48)
    assert torch.equal(to_tiles(patches, torch.tensor([[2, 3, 3], [3, 3, 3]]), 4), tiles)
    assert torch.equal(to_tiles(patches[18:], torch.tensor([[3, 3, 3]]), 4), tiles[2:])
