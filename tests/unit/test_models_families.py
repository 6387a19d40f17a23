"""The table of model families."""

from __future__ import annotations

import re

import pytest
import torch

from trigon.errors import ModelError
from trigon.models.families import family_named


@pytest.mark.parametrize(
    ("unknown", "with_vision", "nearest"),
    [
        ("gpt2", False, None),  # nothing is suggested for a series without a supported type
        ("gpt_oss", False, None),
        ("qwen2_audio", False, "qwen2_moe"),
        ("llama4", False, "llama"),
        ("internvl_chat", False, "internvl"),
        ("mixtral", False, "mistral"),
        *((name, True, r"qwen\w+") for name in ("qwen3_omni", "qwen3_omni_moe", "qwen4_exp", "qwen2_5_omni")),
    ],
)
def test_the_error_of_an_unknown_type_lists_the_supported_ones_and_names_the_nearest(
    unknown: str, with_vision: bool, nearest: str | None
) -> None:
    hint = "" if nearest is None else rf" The nearest supported type is '({nearest})'\."
    listed = r" Supported types: .*llama, .*qwen3_vl.*docs/model-families\.md"
    with pytest.raises(ModelError) as caught:
        family_named(unknown, with_vision=with_vision)
    found = re.match(rf"Models of type '{unknown}' are not supported\.{hint}{listed}", str(caught.value))
    assert found is not None
    if with_vision:
        assert family_named(found[1]).has_vision


@pytest.mark.parametrize(
    ("model_type", "in_memory", "in_checkpoint"),
    [
        ("qwen2_5_vl", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "model.visual.merger.ln_q.weight", "visual.merger.ln_q.weight"),
        ("qwen2_5_vl", "lm_head.weight", "lm_head.weight"),
        ("qwen3_vl", "model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("qwen2_vl", "model.visual.blocks.0.mlp.fc1.bias", "visual.blocks.0.mlp.fc1.bias"),
        ("llama", "model.norm.weight", "model.norm.weight"),
        (
            "gemma3",
            "model.vision_tower.encoder.layers.0.mlp.fc1.bias",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias",
        ),
        ("gemma3", "model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("llava_onevision", "model.image_newline", "image_newline"),
    ],
)
def test_checkpoint_names_are_those_of_published_checkpoints(
    model_type: str, in_memory: str, in_checkpoint: str
) -> None:
    assert family_named(model_type).checkpoint_name(in_memory) == in_checkpoint


def test_the_placeholders_of_an_image_are_runs_between_texts() -> None:
    rows, tiles = (family_named(each).image_layout for each in ("mistral3", "idefics3"))
    assert rows is not None
    assert tiles is not None
    assert rows(3, 2, 1) == (3, "[IMG_BREAK]", 3, "[IMG_END]")
    around, whole = "<fake_token_around_image>", "<global-img>"
    assert list(tiles(4, 0, 0)) == [f"{around}{whole}", 4, around]
    assert list(tiles(4, 2, 1)) == [
        f"{around}<row_1_col_1>",
        4,
        f"\n{around}<row_2_col_1>",
        4,
        f"\n\n{around}{whole}",
        4,
        around,
    ]


def test_stacked_experts_become_one_tensor_for_each_expert_and_projection() -> None:
    family = family_named("qwen3_moe")
    stack = torch.arange(12.0).view(2, 2, 3)  # two experts, each a gate and an up of one row
    parts = dict(family.checkpoint_tensors("model.layers.1.mlp.experts.gate_up_proj", stack))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "model.layers.1.mlp.experts.0.gate_proj.weight": [[0.0, 1.0, 2.0]],
        "model.layers.1.mlp.experts.0.up_proj.weight": [[3.0, 4.0, 5.0]],
        "model.layers.1.mlp.experts.1.gate_proj.weight": [[6.0, 7.0, 8.0]],
        "model.layers.1.mlp.experts.1.up_proj.weight": [[9.0, 10.0, 11.0]],
    }
    assert list(dict(family.checkpoint_tensors("model.layers.1.mlp.experts.down_proj", stack))) == [
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "model.layers.1.mlp.experts.1.down_proj.weight",
    ]
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    [(_, written)] = family_named("qwen3_vl_moe").checkpoint_tensors(name, stack)  # which is transposed
    assert written.tolist() == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [[6.0, 9.0], [7.0, 10.0], [8.0, 11.0]]]
    [(written_name, written)] = family_named("qwen3_5_moe").checkpoint_tensors(name, stack)  # as it is
    assert (written_name, written.tolist()) == (name, stack.tolist())
