"""The drawings of examples/look_closer: detail is lost at data.max_pixels, and crop shows it."""

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from trigon.environments.tools import crop
from trigon.models.load import load_processors

FOLDER = Path(__file__).parents[2] / "examples" / "look_closer"


def load(name):
    """Return a module of the example."""
    spec = importlib.util.spec_from_file_location(f"look_closer_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


drawings, reward = load("drawings"), load("reward")


@pytest.fixture(scope="module")
def pixels(tiny_model):
    """Return a function that gives what the example's model sees of an image."""
    processor = load_processors(
        str(tiny_model("qwen3_vl")), min_pixels=drawings.MAX_PIXELS, max_pixels=drawings.MAX_PIXELS
    ).image_processor
    return lambda image: processor(images=[image], return_tensors="np")["pixel_values"]


def drawn(seed, pattern, *, red=None):
    """Return the picture of a seed with a pattern in all frames, or in the red one."""
    drawing = drawings.draw(random.Random(seed), 0)
    for region, (left, top) in enumerate(drawings.REGIONS):
        if red is None or region == drawing.red:
            place = left * drawings.SIDE // 1000, top * drawings.SIDE // 1000
            drawing.image.paste(drawings._lines(pattern), place)
    return drawing.image


@pytest.mark.parametrize("seed", range(2))
def test_at_max_pixels_the_model_sees_the_same_bits_whatever_the_patterns_are(pixels, seed):
    plain = drawn(seed, "plain")
    assert np.ptp(pixels(plain)) > 0.5  # the frames are there
    for pattern in drawings.PATTERNS:
        image = drawn(seed, pattern)
        assert pattern == "plain" or np.ptp(np.asarray(image, dtype=int) - np.asarray(plain, dtype=int)) > 100
        np.testing.assert_array_equal(pixels(image), pixels(plain))


@pytest.mark.parametrize("region", [0, 3])
def test_what_crop_returns_of_a_region_shows_its_pattern(pixels, region):
    seen = {}
    for seed in range(24):
        drawing = drawings.draw(random.Random(seed), seed)
        left, top = drawings.REGIONS[region]
        box = [left, top, left + drawings.EXTENT, top + drawings.EXTENT]
        seen.setdefault(drawing.patterns[region], pixels(crop(box, [drawing.image])))
    assert set(seen) == set(drawings.PATTERNS)
    for pattern, values in seen.items():
        others = [np.abs(values - other).max() for name, other in seen.items() if name != pattern]
        assert min(others) > 0.5, pattern  # of -1 to 1


@pytest.mark.parametrize(("texts", "accuracy"), [(["rows"], 1.0), (["call", "rows"], 1.0), (["rows", "plain"], 0.0)])
def test_the_reward_is_the_last_word_of_the_completion(texts, accuracy):
    score = reward.compute_score({"response": "\n".join(texts), "ground_truth": "rows"})
    assert score == {"overall": accuracy, "accuracy": accuracy}
