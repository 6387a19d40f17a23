"""The first layer of a vision tower that gets its image cut into patches already, as one matrix product.

Knows that such a convolution slides nowhere. Refuses to know what a patch shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trigon.models.families import Family


class PatchProjection(nn.Conv3d):
    """A convolution that is only ever given inputs as large as its kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [patches, D, 1, 1, 1] for [patches, C, T, H, W]: what the convolution would, up to rounding."""
        weight = self.weight.flatten(1)
        return torch.nn.functional.linear(input.flatten(1), weight, self.bias)[..., None, None, None]


def project_patches_by_product(model: Any, family: Family) -> None:
    """Let the vision tower project patches by a matrix product where it has a convolution for it.

    Forward and backward take a fifth of the time (CPU, float32, torch 2.13: 20 against 96 ms for 1,024 patches of 1,176
    values and width 256). Weights and their names stay.
    """
    tower = family.vision_tower(model)
    projection = getattr(getattr(tower, "patch_embed", None), "proj", None)
    # Given pixels one patch at a time, as all towers that take grid_thw are, nothing is left to slide over.
    if type(projection) is nn.Conv3d and projection.kernel_size == projection.stride:
        projection.__class__ = PatchProjection
