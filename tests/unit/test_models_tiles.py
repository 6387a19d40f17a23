"""Conversion of tiles to patches and back."""

from __future__ import annotations

import torch

from trigon.models.tiles import to_patches, to_tiles


def test_the_tile_drawn_in_the_module_docstring() -> None:
    tile = torch.tensor([[1, 2, 5, 6], [3, 4, 7, 8], [9, 10, 13, 14], [11, 12, 15, 16]]).view(1, 1, 4, 4)
    patches = to_patches(tile, 2)
    assert patches.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert torch.equal(to_tiles(patches, torch.tensor([[1, 2, 2]]), 2), tile)


def test_the_values_of_a_patch_are_ordered_by_channel() -> None:
    tile = torch.arange(12).view(1, 3, 2, 2)
    assert to_patches(tile, 2).tolist() == [list(range(12))]
    assert to_patches(tile, 1).tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_tiles_of_several_images_are_restored_in_order() -> None:
    tiles = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    patches = to_patches(tiles, 4)
    assert patches.shape == (45, 48)
    assert torch.equal(to_tiles(patches, torch.tensor([[2, 3, 3], [3, 3, 3]]), 4), tiles)
    assert torch.equal(to_tiles(patches[18:], torch.tensor([[3, 3, 3]]), 4), tiles[2:])
