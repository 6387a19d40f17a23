"""Encoded files become the pixel values of PromptBuilder, once, with a bounded cache."""

import copy
import io
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from support.builders import make_builder
from support.images import noise, png
from support.models import processors_of
from trigon.data.media_processing import MediaProcessor
from trigon.data.vision import image_processor_of
from trigon.errors import DataError, ModelError
from trigon.models.load import load_processors

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
        images, limits = image_processor_of(processors), {"max_image_pixels": max_image_pixels, "max_bytes": max_bytes}
        opened.append(MediaProcessor(images, num_workers=num_workers, **limits))
        return opened[-1]

    yield open_processor
    for media in opened:
        media.close()


def num_processed(media):
    """Return how many images were processed since the last call."""
    return media.pop_metrics()["perf/images_processed"].value


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
    media = open_processor()
    [prompt] = media.process([files])
    assert prompt.token_ids == expected.token_ids
    assert torch.equal(prompt.vision.pixel_values, expected.vision.pixel_values)
    assert torch.equal(prompt.vision.grid_thw, expected.vision.grid_thw)
    assert prompt.vision.hashes == expected.vision.hashes
    assert num_processed(media) == 4


def test_an_image_is_processed_once_for_all_passes_of_a_step(make_prompt, open_processor):
    media = open_processor()
    # Each pass of a step receives new objects with the same content.
    passes = [
        media.process([make_prompt(png(), name="train:0"), make_prompt(png(seed=1), name="train:1")]) for _ in range(3)
    ]
    assert all(prompt.vision is passes[0][0].vision for prompt in (each[0] for each in passes))
    assert num_processed(media) == 2
    media.process([make_prompt(png(), png(seed=1)), make_prompt(png(seed=1)), make_prompt()])
    assert [num_processed(media), num_processed(media)] == [2, 0]
    uncached = open_processor(max_bytes=0)
    for _ in range(2):
        first, *others = uncached.process([make_prompt(png(), name=f"train:{number}") for number in range(5)])
        assert all(prompt.vision is first.vision for prompt in others)
        assert num_processed(uncached) == 1


def test_concurrent_calls_share_results(make_prompt, open_processor):
    media = open_processor(num_workers=4)
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
    assert num_processed(media) == 4


def test_what_an_earlier_step_used_least_recently_is_dropped_and_what_this_step_uses_is_kept(
    make_prompt, open_processor
):
    def calls(seed):
        """Process an image, and return 1, or 0 if it was cached."""
        media.process([make_prompt(png(seed=seed))])
        return num_processed(media)

    media = open_processor(max_bytes=2 * PIXEL_BYTES)
    assert [calls(seed) for seed in (1, 2, 1, 2)] == [1, 1, 0, 0]
    assert calls(1) == 0  # now 2 is the least recently used
    media.start_step()
    assert calls(3) == 1
    assert [calls(seed) for seed in (1, 3)] == [0, 0]
    assert calls(2) == 1
    media = open_processor(max_bytes=2 * PIXEL_BYTES)
    assert [calls(seed) for seed in (1, 2)] == [1, 1]
    media.start_step()
    assert calls(2) == 0
    assert [calls(seed) for seed in (3, 4)] == [1, 1]  # 3 replaces 1, and there is no room for 4
    assert [calls(seed) for seed in (2, 3, 4)] == [0, 0, 1]
    # Passes over more images than fit have those that fit; otherwise each would process all.
    media.start_step()
    assert [calls(seed) for seed in (5, 6, 7) * 3] == [1, 1, 1, 0, 0, 1, 0, 0, 1]


def test_an_undecodable_file_is_an_error_for_each_prompt_and_not_cached(make_prompt, open_processor):
    truncated = png()[:-2000]
    media = open_processor()
    for name in ("train:7", "val:8"):
        with pytest.raises(DataError, match=rf"^{name}: image 1: .*replace or drop it") as caught:
            media.process([make_prompt(png(), name="train:6"), make_prompt(png(), truncated, name=name)])
        assert type(caught.value) is DataError  # not UnusableRow, since the step cannot skip it any more
    assert len(media.process([make_prompt(png())])) == 1
    assert num_processed(media) == 1
    strict = open_processor(max_image_pixels=56 * 56 - 1)
    with pytest.raises(DataError, match=r"^train:0: image 0: .*max_image_pixels"):
        strict.process([make_prompt(png())])


# The image processor: token counts from sizes, hashes of the content


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def processor(tiny_model, request):
    return image_processor_of(processors_of(tiny_model(request.param)))


SIZES = [(1, 1), (3, 3), (1, 3), (3, 100), (13, 14), (28, 28), (42, 42), (70, 71), (199, 1), (640, 480), (2000, 2000)]
LARGE = [(16, 3200), (690, 15420), (15420, 690), (4000, 3000)]
SMALL = 16 * 32 * 32
OTHERS = ("internvl", "llava", "llava_onevision", "gemma3", "gemma4", "mistral3", "idefics3")
RESIZED = [
    *(("qwen2_5_vl", None), ("qwen2_5_vl", SMALL), ("qwen3_vl", None), ("qwen3_vl", SMALL)),
    *(("glm4v", None), ("glm4v", SMALL)),
]


@pytest.mark.extended(but=["qwen2_5_vl-16384"])
@pytest.mark.parametrize(("model_type", "max_pixels"), [*RESIZED, *((each, None) for each in OTHERS)])
def test_the_processed_size_and_the_grid_follow_from_the_size(tiny_model, model_type, max_pixels):
    """As rewards get it, and as prompts are planned by."""
    processors = load_processors(str(tiny_model(model_type)), max_pixels=max_pixels)
    processor = image_processor_of(processors)
    patch = processors.family.patch_size(processors.hf_config)
    for width, height in SIZES + LARGE:
        vision = processor.process([noise(width, height)])
        [grid] = vision.grid_thw.tolist()
        assert (processor.grid(width, height), processor.image_tokens(width, height)) == (
            tuple(grid),
            *processor.tokens_of(vision),
        ), (width, height)
        columns, rows = processor.processed_size(width, height)
        if processors.family.tile_assembly is not None:  # within one of the shapes, in its proportions
            scale = min(columns / width, rows / height)
            assert max(columns - scale * width, rows - scale * height) <= 1
            assert (columns % 56 == 0 or rows % 56 == 0, max(columns, rows) <= 224) == (True, True)
        elif processors.family.tiles:
            side = grid[1] * patch
            num_tiles = (columns // side) * (rows // side)
            assert (columns % side, rows % side, num_tiles + (num_tiles > 1)) == (0, 0, grid[0])  # with a small one
        else:
            assert (columns, rows) == (grid[2] * patch, grid[1] * patch)
            assert max_pixels is None or columns * rows <= max_pixels or min(columns, rows) == 2 * patch


def test_hashes_depend_on_the_content(processor):
    first, second, again = processor.process([noise(60, 60), noise(60, 60, seed=1), noise(60, 60)]).hashes
    assert first == again
    assert first != second
    assert len(first) == 64
    grey = [Image.new("RGB", size, (9, 9, 9)) for size in ((64, 128), (128, 64))]
    wide, tall = processor.process(grey).hashes
    assert wide != tall  # equal pixels in another shape


def test_other_images_of_a_call_do_not_change_an_image(processor):
    alone = processor.process([noise(90, 60)])
    together = processor.process([noise(56, 56), noise(90, 60), noise(90, 60, seed=2)])
    _, second, _ = together.pixel_values.split(together.grid_thw.prod(dim=1).tolist())
    assert torch.equal(second, alone.pixel_values)
    assert together.hashes[1] == alone.hashes[0]


def test_a_processor_of_another_model_is_an_error(tiny_vlm):
    processors = processors_of(tiny_vlm)
    config = copy.deepcopy(processors.hf_config)
    config.vision_config.spatial_merge_size = 3
    with pytest.raises(ModelError, match=r"merge_size = \(14, 2\), the model \(14, 3\)"):
        image_processor_of(replace(processors, hf_config=config))
