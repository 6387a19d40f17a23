"""The patch projection by a matrix product equals the convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trigon.models.families import family_of
from trigon.models.load import load_model
from trigon.models.patches import PatchProjection, use_patch_projection


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


def test_a_convolution_with_overlapping_inputs_is_not_replaced(tiny_model):
    model = load_model(str(tiny_model("qwen2_5_vl")), dtype=torch.float32, device="cpu")
    family = family_of(model.config)
    tower = family.vision_tower(model)
    tower.patch_embed.proj = nn.Conv3d(3, 64, (2, 14, 14), stride=1)
    use_patch_projection(model, family)
    assert type(tower.patch_embed.proj) is nn.Conv3d
