"""Encoded files become the pixel values of PromptBuilder, once, with a bounded cache."""

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from support.builders import make_builder
from support.images import png
from trigon.data.media_processing import MediaProcessor
from trigon.data.packing import pack_rollouts
from trigon.data.vision import ImageProcessor
from trigon.errors import DataError
from trigon.metrics import Sum
from trigon.types import RolloutGroup

PIXEL_BYTES = 16 * 1176 * 4
"""The size of one image of `png()`: 16 patches of 1176 float32."""


def builder(processors, *, process_images):
    return make_builder(processors, max_prompt_length=1000, process_images=process_images)


@pytest.fixture
def make_prompt(processors):
    """Return a function that makes a prompt with these images as encoded files."""
    maker = builder(processors, process_images=False)

    def make_prompt(*images, name="train:0"):
        return maker.build({"problem": "<image>" * len(images) + "?", "answer": "1", "images": list(images)}, name)

    return make_prompt


@pytest.fixture
def open_processor(processors):
    opened = []

    def open_processor(*, max_bytes=10**8, num_workers=2, max_image_pixels=1_000_000):
        images = ImageProcessor(processors.image_processor, spatial_merge=2)
        media = MediaProcessor(images, max_image_pixels=max_image_pixels, num_workers=num_workers, max_bytes=max_bytes)
        opened.append(media)
        return media, images

    yield open_processor
    for media in opened:
        media.close()


def same_vision(one, other):
    assert torch.equal(one.pixel_values, other.pixel_values)
    assert torch.equal(one.grid_thw, other.grid_thw)
    assert one.hashes == other.hashes


def test_pixel_values_equal_those_of_the_builder(processors, open_processor):
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated, transparent = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(png(90, 60))).save(rotated, "JPEG", exif=exif)
    Image.fromarray(np.random.RandomState(1).randint(0, 255, (60, 80, 4), dtype=np.uint8)).save(transparent, "PNG")
    in_memory = Image.open(io.BytesIO(png(70, 71)))
    row = {
        "problem": "<image>" * 4 + "?",
        "answer": "1",
        "images": [rotated.getvalue(), transparent.getvalue(), {"bytes": png(300, 20), "path": None}, in_memory],
    }
    expected = builder(processors, process_images=True).build(row, "train:0")
    files = builder(processors, process_images=False).build(row, "train:0")
    media, images = open_processor()
    [prompt] = media.process([files])
    assert prompt.token_ids == expected.token_ids
    same_vision(prompt.vision, expected.vision)
    assert images.calls == 1


def test_other_fields_of_a_prompt_are_unchanged(make_prompt, open_processor):
    files = make_prompt(png(), name="train:17")
    media, _ = open_processor()
    [prompt] = media.process([files])
    for field in ("prompt_id", "token_ids", "text", "ground_truth", "row", "image_refs"):
        assert getattr(prompt, field) == getattr(files, field)


def test_prompts_without_files_are_returned_unchanged(make_prompt, open_processor):
    media, images = open_processor()
    [processed] = media.process([make_prompt(png())])
    mixed = [make_prompt(), processed, make_prompt(png(seed=1)), make_prompt()]
    result = media.process(mixed)
    assert [after is before for after, before in zip(result, mixed, strict=True)] == [True, True, False, True]
    assert images.calls == 2
    assert media.process([]) == []


def test_prompts_are_returned_in_their_order(make_prompt, open_processor):
    prompts = [make_prompt(png(seed=seed), name=f"train:{seed}") for seed in range(12)]
    media, _ = open_processor(num_workers=3)
    result = media.process(prompts)
    assert [prompt.prompt_id for prompt in result] == [prompt.prompt_id for prompt in prompts]
    assert len({prompt.vision.hashes for prompt in result}) == 12


def test_an_image_is_processed_once_for_all_passes_of_a_step(make_prompt, open_processor):
    media, images = open_processor()
    # Each pass of a step receives new objects with the same content.
    passes = [
        media.process([make_prompt(png(), name="train:0"), make_prompt(png(seed=1), name="train:1")]) for _ in range(3)
    ]
    assert images.calls == 2
    assert all(prompt.vision is passes[0][0].vision for prompt in (each[0] for each in passes))


def test_processed_images_are_counted_where_they_are_not_cached(make_prompt, open_processor):
    media, _ = open_processor()
    media.process([make_prompt(png(), png(seed=1)), make_prompt(png(seed=2)), make_prompt()])
    assert media.pop_metrics() == {"perf/images_processed": Sum(3.0)}
    media.process([make_prompt(png(seed=2)), make_prompt(png(seed=3))])
    assert media.pop_metrics() == {"perf/images_processed": Sum(1.0)}
    assert media.pop_metrics() == {"perf/images_processed": Sum(0.0)}


def test_a_repeated_image_in_one_call_is_processed_once_even_without_a_cache(make_prompt, open_processor):
    media, images = open_processor(max_bytes=0)
    same = [make_prompt(png(), name=f"train:{number}") for number in range(5)]
    first, *others = media.process(same)
    assert images.calls == 1
    assert all(prompt.vision is first.vision for prompt in others)
    media.process(same)
    assert images.calls == 2


def test_concurrent_calls_share_results(make_prompt, open_processor):
    media, images = open_processor(num_workers=4)
    prompts = [make_prompt(png(400, 400, seed), name=f"train:{seed}") for seed in range(4)]
    start = threading.Barrier(8)
    results = []

    def work(number):
        start.wait()
        results.append(media.process(prompts[number % 4 :] + prompts[: number % 4]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert images.calls == 4


@pytest.fixture
def small_cache(make_prompt, open_processor):
    """Return a processor whose cache holds two images, and a function that processes one.

    The function returns the number of images processed, 0 or 1.
    """
    media, images = open_processor(max_bytes=2 * PIXEL_BYTES)

    def calls(seed):
        before = images.calls
        media.process([make_prompt(png(seed=seed))])
        return images.calls - before

    return media, calls


def test_the_least_recently_used_result_of_an_earlier_step_is_dropped_first(small_cache):
    media, calls = small_cache
    assert [calls(seed) for seed in (1, 2, 1, 2)] == [1, 1, 0, 0]
    assert calls(1) == 0  # now 2 is the least recently used
    media.start_step()
    assert calls(3) == 1
    assert [calls(seed) for seed in (1, 3)] == [0, 0]
    assert calls(2) == 1


def test_passes_over_more_images_than_fit_have_those_that_fit(small_cache):
    """If the least recently used were dropped, each pass would process all three."""
    media, calls = small_cache
    for first in (1, 4, 7):
        media.start_step()
        assert [calls(seed) for seed in range(first, first + 3)] == [1, 1, 1]
        assert [calls(seed) for seed in range(first, first + 3)] == [0, 0, 1]
        assert [calls(seed) for seed in range(first, first + 3)] == [0, 0, 1]


def test_what_a_step_uses_again_is_kept_for_it(small_cache):
    media, calls = small_cache
    assert [calls(seed) for seed in (1, 2)] == [1, 1]
    media.start_step()
    assert calls(2) == 0
    assert [calls(seed) for seed in (3, 4)] == [1, 1]  # 3 replaces 1, and there is no room for 4
    assert [calls(seed) for seed in (2, 3, 4)] == [0, 0, 1]


def test_an_image_larger_than_the_cache_drops_no_other(make_prompt, open_processor):
    media, images = open_processor(max_bytes=2 * PIXEL_BYTES)
    media.process([make_prompt(png())])
    [large] = media.process([make_prompt(png(112, 112))])
    assert large.vision.pixel_values.nbytes == 4 * PIXEL_BYTES
    media.process([make_prompt(png())])
    assert images.calls == 2


def test_an_undecodable_file_is_an_error_for_each_prompt_and_not_cached(make_prompt, open_processor):
    truncated = png()[:-2000]
    media, images = open_processor()
    for name in ("train:7", "val:8"):
        with pytest.raises(DataError, match=rf"^{name}: image 1: .*replace or drop it") as caught:
            media.process([make_prompt(png(), name="train:6"), make_prompt(png(), truncated, name=name)])
        assert type(caught.value) is DataError  # not UnusableRow, since the step cannot skip it any more
    assert len(media.process([make_prompt(png())])) == 1
    assert images.calls == 1


def test_an_image_above_the_limit_is_an_error(make_prompt, open_processor):
    media, _ = open_processor(max_image_pixels=56 * 56 - 1)
    with pytest.raises(DataError, match=r"^train:0: image 0: .*more than max_image_pixels"):
        media.process([make_prompt(png())])


def test_packing_raises_an_error_for_prompts_with_files(make_prompt, open_processor):
    media, _ = open_processor()
    files = make_prompt(png(), name="train:3")
    with pytest.raises(AssertionError, match="train:3: its media are not processed yet"):
        pack_rollouts([RolloutGroup(files, ())], max_tokens=100, positions=lambda prompt: prompt.pixels().grid_thw)
    [prompt] = media.process([files])
    assert prompt.pixels() is prompt.vision
    assert make_prompt().pixels() is None
