"""Patches projected by a matrix product are those of the convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trigon.models.families import family_of
from trigon.models.load import load_model
from trigon.models.patches import PatchProjection, project_patches_by_product


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_convolution(bias):
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=bias).double()
    ours = copy.deepcopy(plain)
    ours.__class__ = PatchProjection
    pixels = torch.randn(5, 3, 2, 4, 4, dtype=torch.float64)
    wanted, given = plain(pixels), ours(pixels)
    assert given.shape == wanted.shape
    torch.testing.assert_close(given, wanted)
    for result in (wanted, given):
        result.square().sum().backward()
    for ours_, plain_ in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, plain_.grad)


@pytest.mark.parametrize(
    ("model_type", "replaced"), [("qwen2_vl", 1), ("qwen2_5_vl", 1), ("qwen3_vl", 1), ("llava", 0)]
)
def test_a_loaded_model_has_it_under_the_same_names(tiny_model, model_type, replaced):
    model = load_model(str(tiny_model(model_type)), dtype=torch.float32, device="cpu")
    found = [name for name, module in model.named_modules() if isinstance(module, PatchProjection)]
    assert len(found) == replaced
    assert all(f"{name}.weight" in dict(model.named_parameters()) for name in found)


def test_a_convolution_that_slides_is_left_alone(tiny_model):
    model = load_model(str(tiny_model("qwen2_5_vl")), dtype=torch.float32, device="cpu")
    family = family_of(model.config)
    tower = family.vision_tower(model)
    tower.patch_embed.proj = nn.Conv3d(3, 64, (2, 14, 14), stride=1)
    project_patches_by_product(model, family)
    assert type(tower.patch_embed.proj) is nn.Conv3d
