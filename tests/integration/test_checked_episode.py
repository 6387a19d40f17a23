"""The first episode of a run, which is begun and ended before models are loaded."""

import io
from contextlib import closing

import pytest
from PIL import Image

from trigon.assemble.episodes import try_episode
from trigon.config.schema import Config
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_environment
from trigon.errors import EpisodeError
from trigon.models.load import load_processors
from trigon.types import EncodedMedia, Prompt

pytestmark = pytest.mark.extended


class Sizes:
    def reset(self, row):
        assert row["images"][0].size == tuple(row["size"])
        return row["images"][0] if row.get("draws") else row.get("shows")

    def step(self, action):
        return None, True


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return load_processors(str(tiny_vlm))


def check(processors, row, max_tokens=64):
    file = io.BytesIO()
    Image.new("RGB", (8, 6)).save(file, "PNG")
    images = EncodedMedia((file.getvalue(),), ("0",))
    prompt = Prompt("train:0", (1,), images, "<image>", "4", row, ("figure.png",))
    settings = EnvironmentSettings(environment=find_environment(Sizes))
    with closing(EnvironmentPool(settings)) as pool:
        try_episode(Config(data={"max_response_length": max_tokens}), processors, pool, prompt)


def test_the_first_reset_gets_the_row_and_its_images(processors):
    check(processors, {"size": [8, 6]})


def test_a_first_reset_that_fails_names_the_row_and_the_error(processors):
    with pytest.raises(EpisodeError, match="fails at the reset for train:0: AssertionError"):
        check(processors, {"size": [1, 1]})


def test_a_first_observation_that_leaves_no_room_for_a_turn_names_the_option(processors):
    check(processors, {"size": [8, 6], "shows": "words " * 10})
    with pytest.raises(EpisodeError, match=r"cannot begin train:0: its first observation has \d+ tokens"):
        check(processors, {"size": [8, 6], "shows": "words " * 100})


def test_a_first_observation_that_the_model_cannot_see_says_why(tiny_model):
    with pytest.raises(EpisodeError, match="cannot begin train:0: an observation has 1 images, but a qwen2 model"):
        check(load_processors(str(tiny_model("qwen2"))), {"size": [8, 6], "draws": True})
