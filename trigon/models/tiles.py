"""Conversion between patches and what other vision towers take: tiles, images, padded patches.

tile   1 2 | 5 6      A tile of 4 x 4 pixels is four patches of 2 x 2, row by row:
       3 4 | 7 8      [1 2 3 4], [5 6 7 8], [9 10 11 12], [13 14 15 16].
       ---------
       9 10|13 14     A Vision holds patches for every model, so that packing, transport and
      11 12|15 16     counting handle one representation of images.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def to_patches(tiles: Tensor, patch_size: int) -> Tensor:
    """Split tiles into patches.

    Args: tiles: [n, channels, rows * patch_size, columns * patch_size].
    Returns: [n * rows * columns, channels * patch_size * patch_size], the patches of a tile row by
    row.
    """
    count, channels, height, width = tiles.shape
    rows, columns = height // patch_size, width // patch_size
    split = tiles.reshape(count, channels, rows, patch_size, columns, patch_size)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(count * rows * columns, channels * patch_size**2)


def to_tiles(patches: Tensor, grid_thw: Tensor, patch_size: int) -> Tensor:
    """Undo to_patches for the tiles of several images.

    Args: grid_thw: [images, 3], (tiles, rows, columns) in patches, with the same rows and columns
    for all.
    Returns: [all tiles, channels, rows * patch_size, columns * patch_size].
    """
    rows, columns = grid_thw[0, 1:].tolist()
    channels = patches.shape[1] // patch_size**2
    split = patches.reshape(-1, rows, columns, channels, patch_size, patch_size)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * patch_size, columns * patch_size)


def to_images(patches: Tensor, grid_thw: Tensor, patch_size: int) -> list[Tensor]:
    """Undo to_patches for images of any size, each of which is one tile.

    Args: grid_thw: [images, 3], (1, rows, columns) in patches.
    Returns: [channels, rows * patch_size, columns * patch_size] for each image.
    """
    parts = torch.split(patches, grid_thw.prod(dim=1).tolist())
    return [to_tiles(part, grid[None], patch_size)[0] for part, grid in zip(parts, grid_thw, strict=True)]


def to_padded_images(patches: Tensor, grid_thw: Tensor, patch_size: int) -> Tensor:
    """Return the same, padded with zeros at the right and below to the size of the largest.

    Returns: [images, channels, most rows * patch_size, most columns * patch_size].
    """
    images = to_images(patches, grid_thw, patch_size)
    height, width = (grid_thw[:, 1:].amax(dim=0) * patch_size).tolist()
    padded = images[0].new_zeros(len(images), len(images[0]), height, width)
    for row, image in zip(padded, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return padded


def patch_positions(grid_thw: Tensor) -> Tensor:
    """Return the position of each patch, row by row: [images, most patches, 2] int64 on the CPU.

    Args: grid_thw: [images, 3], (1, rows, columns) in patches, on the CPU.
    """
    positions = [
        torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1).view(-1, 2)
        for _, rows, columns in grid_thw.tolist()
    ]
    return pad_sequence(positions, batch_first=True, padding_value=-1)


def pad_patches(patches: Tensor, grid_thw: Tensor) -> Tensor:
    """Return the patches of each image: [images, most patches, values]; 0 for padding.

    Args: patches: [all patches, values], on any device. grid_thw: as in patch_positions.
    """
    return pad_sequence(list(torch.split(patches, grid_thw.prod(1).tolist())), batch_first=True)
