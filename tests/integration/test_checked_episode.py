"""The first episode of a run, which is begun and ended before models are loaded."""

import io
from contextlib import closing

import pytest
from PIL import Image

from trigon.build.episodes import EpisodeOptions, EpisodeParts, check_episodes
from trigon.environments.pool import EnvironmentPool
from trigon.environments.settings import EnvironmentSettings, find_environment
from trigon.errors import EpisodeError
from trigon.types import EncodedMedia, Prompt


class Sizes:
    def reset(self, row):
        assert row["images"][0].size == tuple(row["size"])

    def step(self, action):
        return None, True


OPTIONS = EpisodeOptions(
    environment="python:Sizes",
    environment_kwargs={},
    tools=(),
    tool_format="auto",
    observation_role="user",
    max_turns=8,
    max_turn_tokens=None,
    timeout_seconds=60.0,
    max_episodes=256,
)


def check(row):
    file = io.BytesIO()
    Image.new("RGB", (8, 6)).save(file, "PNG")
    images = EncodedMedia((file.getvalue(),), ("0",))
    prompt = Prompt("train:0", (1,), images, "<image>", "4", row, ("figure.png",))
    settings = EnvironmentSettings(environment=find_environment(Sizes))
    with closing(EnvironmentPool(settings)) as pool:
        check_episodes(EpisodeParts(OPTIONS, settings, ()), pool, [prompt])


def test_the_first_reset_gets_the_row_and_its_images():
    check({"size": [8, 6]})


def test_a_first_reset_that_fails_names_the_row_and_the_error():
    with pytest.raises(EpisodeError, match="fails at the reset for train:0: AssertionError"):
        check({"size": [1, 1]})
