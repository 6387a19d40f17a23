from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trigon.errors import ConfigError
from trigon.models.sequence_parallel import RowRanks, deal_images, require_divisible_heads, slice_of
from trigon.types import GroupSpan, PackedGroups, Vision

ROW = PackedGroups(
    token_ids=torch.arange(10, 17),
    position_ids=torch.arange(7)[None],
    spans=(GroupSpan(prompt=(0, 5), completions=((5, 7),)),),
)


def ranks(rank: int, size: int = 2) -> RowRanks:
    return RowRanks(rank, size, None)


def image(*grids: tuple[int, int, int], hashes: tuple[str, ...] = ()) -> Vision:
    patches = sum(time * height * width for time, height, width in grids)
    return Vision(torch.arange(float(patches))[:, None], torch.tensor(grids), hashes)


def test_slices_of_a_row_are_equally_long_and_the_last_is_padded_with_zeros():
    slices = [slice_of(ROW, ranks(rank)) for rank in range(2)]
    assert [each.token_ids.tolist() for each in slices] == [[10, 11, 12, 13], [14, 15, 16, 0]]
    assert [each.position_ids.tolist() for each in slices] == [[[0, 1, 2, 3]], [[4, 5, 6, 0]]]
    assert [each.start for each in slices] == [0, 4]
    assert slices[1].held(torch.tensor([5, 3, 4])).tolist() == [0, 2]
    assert [slice_of(ROW, ranks(rank, 8)).token_ids.tolist() for rank in (6, 7)] == [[16], [0]]
    assert slice_of(ROW, None).token_ids is ROW.token_ids


@pytest.mark.parametrize(
    ("heads", "allowed", "refused", "fact"),
    [
        ({"num_attention_heads": 12}, 4, 8, "has 12 attention heads.*1 or 2 or 4$"),
        ({"num_attention_heads": 8, "linear_num_key_heads": 2}, 2, 4, "has 2 key heads of linear attention.*1 or 2$"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_with_the_numbers_of_the_model(heads, allowed, refused, fact):
    config = SimpleNamespace(**heads)
    require_divisible_heads(config, allowed, model_type="qwen3_5", num_workers=8)
    with pytest.raises(ConfigError, match=fact):
        require_divisible_heads(config, refused, model_type="qwen3_5", num_workers=8)


def test_images_are_dealt_out_by_their_patches_and_features_go_where_their_tokens_are():
    # 16, 4 and 8 patches: features 0 to 3, 4, and 5 to 6.
    visions = (image((1, 4, 4), (1, 2, 2)), image((1, 2, 4)))
    places = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    first, second = (
        deal_images(visions, places, slice_of(ROW, ranks(r)), ranks(r), counts=(4, 1, 2), by_hash=False) for r in (0, 1)
    )
    assert [each.grid_thw.tolist() for each in first.own] == [[[1, 4, 4]]]
    assert [each.grid_thw.tolist() for each in second.own] == [[[1, 2, 2]], [[1, 2, 4]]]
    assert second.own[0].pixel_values.flatten().tolist() == [16.0, 17.0, 18.0, 19.0]
    assert (first.send_counts, first.receive_counts, first.places.tolist()) == ((4, 0), (4, 0), [0, 1, 2, 3])
    assert (second.send_counts, second.receive_counts, second.places.tolist()) == ((0, 3), (0, 3), [0, 1, 2])


def test_with_a_cache_an_image_has_the_same_owner_in_every_row():
    def owner(*visions: Vision) -> int:
        places = torch.arange(len(visions))
        row = PackedGroups(torch.zeros(8, dtype=torch.int64), torch.zeros(1, 8), ROW.spans)
        dealt = [
            deal_images(visions, places, slice_of(row, ranks(r)), ranks(r), counts=[1] * len(visions), by_hash=True)
            for r in (0, 1)
        ]
        return [any(part.hashes == ("a",) for part in each.own) for each in dealt].index(True)

    one, other = image((1, 2, 2), hashes=("a",)), image((1, 2, 2), hashes=("b",))
    assert owner(one) == owner(one, other) == owner(other, one) == owner(other, other, one)
