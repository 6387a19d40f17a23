"""The table of families."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trigon.errors import ModelError
from trigon.models.families import family_named, family_of

VISION_CONFIG = SimpleNamespace(
    model_type="qwen2_5_vl",
    image_token_id=5,
    video_token_id=6,
    vision_start_token_id=7,
    vision_end_token_id=8,
    vision_config=SimpleNamespace(spatial_merge_size=2),
)


def test_an_unknown_model_type_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"'gpt2' are not supported.*llama, qwen2, qwen2_5_vl, qwen3, qwen3_vl"):
        family_of(SimpleNamespace(model_type="gpt2"))


def test_every_media_token_is_named() -> None:
    family = family_of(VISION_CONFIG)
    assert family.media_token_ids(VISION_CONFIG) == (5, 6, 7, 8)
    assert family.image_token_id(VISION_CONFIG) == 5
    assert family.spatial_merge(VISION_CONFIG) == 2


def test_a_text_family_has_no_media_tokens_and_takes_no_images() -> None:
    family = family_named("qwen2")
    assert family.media_token_ids(SimpleNamespace()) == ()
    with pytest.raises(ModelError, match="'qwen2' model has no vision tower"):
        family.image_token_id(SimpleNamespace())


@pytest.mark.parametrize(
    ("model_type", "here", "in_checkpoint"),
    [
        ("qwen2_5_vl", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "model.visual.merger.ln_q.weight", "visual.merger.ln_q.weight"),
        ("qwen2_5_vl", "lm_head.weight", "lm_head.weight"),
        ("qwen3_vl", "model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("llama", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_weights_have_their_published_names(model_type: str, here: str, in_checkpoint: str) -> None:
    assert family_named(model_type).checkpoint_name(here) == in_checkpoint
