"""Files become pixels: the same as anywhere else, once, and not for ever."""

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from support.builders import make_builder
from trigon.data.packing import pack_rollouts
from trigon.data.processed import ProcessedImages
from trigon.data.vision import ImageProcessor
from trigon.errors import DataError
from trigon.models.load import load_processors
from trigon.types import RolloutGroup

PIXEL_BYTES = 16 * 1176 * 4
"""What one picture of `png()` takes: 16 patches of 1176 float32."""


def png(width=56, height=56, seed=0):
    stream = io.BytesIO()
    noise = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return load_processors(str(tiny_vlm))


def builder(processors, *, process_images):
    return make_builder(processors, max_prompt_length=1000, process_images=process_images)


@pytest.fixture
def ask(processors):
    """Return a function that makes a prompt with these images, as files."""
    maker = builder(processors, process_images=False)

    def ask(*images, name="train:0"):
        return maker.build({"problem": "<image>" * len(images) + "?", "answer": "1", "images": list(images)}, name)

    return ask


@pytest.fixture
def open_processed(processors):
    opened = []

    def open_processed(*, max_bytes=10**8, num_workers=2, max_image_pixels=1_000_000):
        counted = ImageProcessor(processors.image_processor, spatial_merge=2)
        processed = ProcessedImages(
            counted, max_image_pixels=max_image_pixels, num_workers=num_workers, max_bytes=max_bytes
        )
        opened.append(processed)
        return processed, counted

    yield open_processed
    for processed in opened:
        processed.close()


def same_vision(one, other):
    assert torch.equal(one.pixel_values, other.pixel_values)
    assert torch.equal(one.grid_thw, other.grid_thw)
    assert one.hashes == other.hashes


def test_pixels_are_those_that_the_builder_makes(processors, open_processed):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, clear = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(png(90, 60))).save(turned, "JPEG", exif=exif)
    Image.fromarray(np.random.RandomState(1).randint(0, 255, (60, 80, 4), dtype=np.uint8)).save(clear, "PNG")
    in_memory = Image.open(io.BytesIO(png(70, 71)))
    row = {
        "problem": "<image>" * 4 + "?",
        "answer": "1",
        "images": [turned.getvalue(), clear.getvalue(), {"bytes": png(300, 20), "path": None}, in_memory],
    }
    whole = builder(processors, process_images=True).build(row, "train:0")
    files = builder(processors, process_images=False).build(row, "train:0")
    processed, counted = open_processed()
    [prompt] = processed.of([files])
    assert prompt.token_ids == whole.token_ids
    same_vision(prompt.vision, whole.vision)
    assert counted.calls == 1


def test_everything_else_of_a_prompt_stays(ask, open_processed):
    files = ask(png(), name="train:17")
    processed, _ = open_processed()
    [prompt] = processed.of([files])
    for field in ("prompt_id", "token_ids", "text", "ground_truth", "row", "image_refs"):
        assert getattr(prompt, field) == getattr(files, field)


def test_what_has_no_files_comes_back_as_it_is(ask, open_processed):
    processed, counted = open_processed()
    [pictured] = processed.of([ask(png())])
    mixed = [ask(), pictured, ask(png(seed=1)), ask()]
    result = processed.of(mixed)
    assert [now is before for now, before in zip(result, mixed, strict=True)] == [True, True, False, True]
    assert counted.calls == 2
    assert processed.of([]) == []


def test_prompts_come_back_in_their_order(ask, open_processed):
    prompts = [ask(png(seed=seed), name=f"train:{seed}") for seed in range(12)]
    processed, _ = open_processed(num_workers=3)
    result = processed.of(prompts)
    assert [prompt.prompt_id for prompt in result] == [prompt.prompt_id for prompt in prompts]
    assert len({prompt.vision.hashes for prompt in result}) == 12


def test_an_image_is_processed_once_for_all_that_a_step_does(ask, open_processed):
    processed, counted = open_processed()
    # As they arrive with each pass: other objects with the same content.
    passes = [processed.of([ask(png(), name="train:0"), ask(png(seed=1), name="train:1")]) for _ in range(3)]
    assert counted.calls == 2
    assert all(prompt.vision is passes[0][0].vision for prompt in (each[0] for each in passes))


def test_an_image_twice_in_one_call_is_processed_once_even_if_nothing_is_remembered(ask, open_processed):
    processed, counted = open_processed(max_bytes=0)
    same = [ask(png(), name=f"train:{number}") for number in range(5)]
    first, *others = processed.of(same)
    assert counted.calls == 1
    assert all(prompt.vision is first.vision for prompt in others)
    processed.of(same)
    assert counted.calls == 2


def test_threads_that_ask_at_once_share_the_work(ask, open_processed):
    processed, counted = open_processed(num_workers=4)
    prompts = [ask(png(400, 400, seed), name=f"train:{seed}") for seed in range(4)]
    start = threading.Barrier(8)
    results = []

    def work(number):
        start.wait()
        results.append(processed.of(prompts[number % 4 :] + prompts[: number % 4]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert counted.calls == 4


def test_what_was_used_longest_ago_is_forgotten_first(ask, open_processed):
    processed, counted = open_processed(max_bytes=2 * PIXEL_BYTES)

    def calls(seed):
        before = counted.calls
        processed.of([ask(png(seed=seed))])
        return counted.calls - before

    assert [calls(seed) for seed in (1, 2, 1, 2)] == [1, 1, 0, 0]
    assert calls(1) == 0  # used again, so that 2 is now the older one
    assert calls(3) == 1
    assert [calls(seed) for seed in (1, 3)] == [0, 0]
    assert calls(2) == 1


def test_an_image_too_large_to_remember_displaces_no_other(ask, open_processed):
    processed, counted = open_processed(max_bytes=2 * PIXEL_BYTES)
    processed.of([ask(png())])
    [large] = processed.of([ask(png(112, 112))])
    assert large.vision.pixel_values.nbytes == 4 * PIXEL_BYTES
    processed.of([ask(png())])
    assert counted.calls == 2


def test_a_file_that_cannot_be_decoded_is_told_of_each_prompt_and_not_remembered(ask, open_processed):
    cut = png()[:-2000]
    processed, counted = open_processed()
    for name in ("train:7", "val:8"):
        with pytest.raises(DataError, match=rf"^{name}: image 1: .*replace or drop it") as caught:
            processed.of([ask(png(), name="train:6"), ask(png(), cut, name=name)])
        assert type(caught.value) is DataError  # not one more row to set aside: the step has begun
    assert len(processed.of([ask(png())])) == 1
    assert counted.calls == 1


def test_an_image_above_the_limit_is_refused(ask, open_processed):
    processed, _ = open_processed(max_image_pixels=56 * 56 - 1)
    with pytest.raises(DataError, match=r"^train:0: image 0: .*more than max_image_pixels"):
        processed.of([ask(png())])


def test_who_needs_pixels_refuses_files(ask, open_processed):
    processed, _ = open_processed()
    files = ask(png(), name="train:3")
    with pytest.raises(AssertionError, match="train:3: its media are files, not processed yet"):
        pack_rollouts([RolloutGroup(files, ())], max_tokens=100, positions=lambda prompt: prompt.pixels().grid_thw)
    [prompt] = processed.of([files])
    assert prompt.pixels() is prompt.vision
    assert ask().pixels() is None
