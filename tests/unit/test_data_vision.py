"""The image processor: counted calls, token counts from sizes, hashes of the content."""

import numpy as np
import pytest
import torch
from PIL import Image

from support.models import processors_of
from trigon.data.vision import ImageProcessor, image_processor_of
from trigon.errors import ModelError
from trigon.models.load import load_processors


def noise(width, height, seed=0):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def processor(tiny_model, request):
    return ImageProcessor(processors_of(tiny_model(request.param)).image_processor, spatial_merge=2)


def test_two_images_become_one_vision(tiny_vlm):
    processor = ImageProcessor(processors_of(tiny_vlm).image_processor, spatial_merge=2)
    vision = processor.process([noise(56, 56), noise(84, 56)])
    assert vision.grid_thw.tolist() == [[1, 4, 4], [1, 4, 6]]
    assert vision.pixel_values.shape == (40, 1176)
    assert vision.pixel_values.dtype == torch.float32
    assert vision.grid_thw.dtype == torch.int64
    assert processor.tokens_of(vision) == (4, 6)
    assert processor.calls == 1


SIZES = [(1, 1), (3, 3), (1, 3), (3, 100), (13, 14), (28, 28), (42, 42), (70, 71), (199, 1), (640, 480), (2000, 2000)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_number_of_tokens_follows_from_the_size(processor, width, height):
    vision = processor.process([noise(width, height)])
    assert processor.tokens_of(vision) == (processor.image_tokens(width, height),)


LARGE = [(16, 3200), (690, 15420), (15420, 690), (4000, 3000)]


SMALL = 16 * 32 * 32
RESIZED = [("qwen2_5_vl", None), ("qwen2_5_vl", SMALL), ("qwen3_vl", SMALL)]


@pytest.mark.parametrize(("model_type", "max_pixels"), [*RESIZED, ("internvl", None), ("llava", None)])
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
        if model_type in ("internvl", "llava"):
            side = grid[1] * patch
            num_tiles = (columns // side) * (rows // side)
            assert (columns % side, rows % side, num_tiles + (num_tiles > 1)) == (0, 0, grid[0])  # with a small one
        else:
            assert (columns, rows) == (grid[2] * patch, grid[1] * patch)


def test_counting_tokens_is_not_a_call(processor):
    processor.image_tokens(100, 100)
    assert processor.calls == 0


def test_hashes_depend_on_the_content(processor):
    first, second, again = processor.process([noise(60, 60), noise(60, 60, seed=1), noise(60, 60)]).hashes
    assert first == again
    assert first != second
    assert len(first) == 64
    assert processor.process([noise(60, 60)]).hashes == (first,)


def test_equal_pixels_in_another_shape_have_another_hash(processor):
    grey = [Image.new("RGB", size, (9, 9, 9)) for size in ((64, 128), (128, 64))]
    wide, tall = processor.process(grey).hashes
    assert wide != tall


def test_other_images_of_a_call_do_not_change_an_image(processor):
    alone = processor.process([noise(90, 60)])
    together = processor.process([noise(56, 56), noise(90, 60), noise(90, 60, seed=2)])
    _, second, _ = together.pixel_values.split(together.grid_thw.prod(dim=1).tolist())
    assert torch.equal(second, alone.pixel_values)
    assert together.hashes[1] == alone.hashes[0]


def test_a_processor_of_another_model_is_an_error(tiny_vlm):
    with pytest.raises(ModelError, match="merges 2 x 2 patches, the model 3 x 3"):
        ImageProcessor(processors_of(tiny_vlm).image_processor, spatial_merge=3)
