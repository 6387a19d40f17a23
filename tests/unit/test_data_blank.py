"""Prompts with blank images have the same tokens, and pixels of one colour."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from support.builders import make_builder
from support.videos import make_video
from trigon.data.blank import GREY, encoded_blank_image, encoded_blank_video, open_blank_image, open_blank_video
from trigon.data.dataset import open_prompts
from trigon.data.images import open_image
from trigon.data.mixture import mix, with_blank_media
from trigon.data.videos import FrameSampling
from trigon.errors import DataError

WHERE = {"where": "val:0/images/0", "max_pixels": 10**6}


@pytest.fixture
def image_file(tmp_path):
    """Return the file of an image of 84 x 56 pixels that is stored rotated."""
    image = Image.new("RGB", (56, 84), (200, 0, 0))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    return tmp_path / "a.jpg"


def test_a_blank_image_has_the_size_of_the_image_upright(image_file):
    blank = open_blank_image(image_file.name, image_dir=image_file.parent, **WHERE)
    assert blank.size == open_image(image_file.name, image_dir=image_file.parent, **WHERE).size == (84, 56)
    assert blank.getextrema() == ((GREY, GREY),) * 3


def test_a_blank_file_is_decoded_to_the_blank_image(image_file):
    encoded = encoded_blank_image(image_file.name, image_dir=image_file.parent, **WHERE)
    decoded = open_image(encoded, image_dir=None, **WHERE)
    blank = open_blank_image(image_file.name, image_dir=image_file.parent, **WHERE)
    assert decoded.tobytes() == blank.tobytes()


@pytest.mark.parametrize("process_images", [True, False])
def test_blank_prompts_differ_in_their_pixels_only(processors, image_file, own_datasets_cache, process_images):
    rows = [{"images": ["a.jpg"], "problem": "<image>How many?", "answer": "3"}, {"problem": "Why?", "answer": "4"}]
    file = image_file.parent / "val.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder = make_builder(processors, process_images=process_images)
    prompts = open_prompts(str(file), builder, filter_overlong_prompts=False, max_bad_row_fraction=0.0, num_workers=1)
    for several in (prompts, mix([prompts, prompts], ())):
        blank = with_blank_media(several)
        assert len(blank) == len(several)
        for index in range(len(several)):
            shown, hidden = several[index], blank[index]
            assert hidden.token_ids == shown.token_ids
            assert (hidden.prompt_id, hidden.text, hidden.row) == (shown.prompt_id, shown.text, shown.row)
        assert several[1].vision is blank[1].vision is None
        shown, hidden = several[0].vision, blank[0].vision
        assert shown.hashes != hidden.hashes
        if process_images:
            assert hidden.grid_thw.equal(shown.grid_thw)
            patches = hidden.pixel_values.unflatten(1, (3, -1))
            assert patches.amax((0, 2)).equal(patches.amin((0, 2))), "one colour"
            assert not hidden.pixel_values.equal(shown.pixel_values)
        [encoded] = blank.image_files(0)
        assert Image.open(io.BytesIO(encoded)).convert("RGB").getextrema() == ((GREY, GREY),) * 3


def test_only_the_first_rows_are_read_with_a_limit(processors, tmp_path, own_datasets_cache):
    file = tmp_path / "val.jsonl"
    file.write_text("".join(json.dumps({"problem": "Why?", "answer": str(n)}) + "\n" for n in range(9)))
    for limit, number in ((4, 4), (100, 9)):
        prompts = open_prompts(
            str(file),
            make_builder(processors),
            filter_overlong_prompts=False,
            max_bad_row_fraction=0.0,
            num_workers=1,
            max_rows=limit,
        )
        assert len(prompts) == prompts.num_rows == number
        assert prompts[3].ground_truth == "3"


def test_blank_videos_have_the_same_frames_in_number_and_size():
    video = make_video()
    arguments = {"image_dir": None, "sampling": FrameSampling(fps=5.0, max_frames=8), **WHERE}
    layout, frames = open_blank_video(video, **arguments)
    blank = list(frames)
    assert len(blank) >= 2
    assert {frame.shape for frame in blank} == {blank[0].shape}
    assert all(np.all(frame == GREY) for frame in blank)
    assert len(layout.seconds) == len(blank)
    with pytest.raises(DataError, match="n_gpus_per_node=1"):
        encoded_blank_video(video, **arguments)
