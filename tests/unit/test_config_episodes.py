"""What is made of the options of environments and tools."""

from pathlib import Path

import pytest

from support import chat_templates
from support.chat_templates import with_template
from support.models import processors_of
from support.options import NEEDED
from trigon.assemble.episodes import check_chat_template
from trigon.config.load import load_config
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.rollout.vllm.arguments import VllmSettings


def rollout(*overrides):
    return [f"worker.rollout.{each}" for each in overrides]


@pytest.mark.parametrize(
    ("options", "roles", "limit_images"),
    [
        ([], ("user", "tool"), 2),
        (["environment=games:Maze"], ("user", "tool"), 0),
        (["tools=[crop,python,games:search]"], ("tool", "tool"), 0),
        (["tools=package.tools:search", "observation_role=user"], ("user", "user"), 0),
        (["environment=games:Maze", "tools=[crop]"], ("user", "tool"), 0),
        (["environment=games:Maze", "tools=[crop]", "observation_role=user"], ("user", "user"), 0),
    ],
)
def test_observations_have_the_role_of_what_sends_them_and_bring_any_number_of_images(options, roles, limit_images):
    config = load_config(None, (*NEEDED, *rollout("limit_images=2", *options))).config
    found = config.worker.rollout
    assert found.has_episodes is bool(options)
    assert (found.role_of_observations, found.role_of_tools) == roles
    assert VllmSettings(config, Path("model"), "cpu").limit_images == limit_images


def test_a_chat_template_that_changes_earlier_turns_is_refused_before_anything_runs(tiny_model):
    processors = with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)
    with pytest.raises(ConfigError, match=r"removes the thoughts .*; set worker\.rollout\.observation_role=tool"):
        check_chat_template(Config(worker={"rollout": {"environment": "games.py:Maze"}}), processors)
    other = Config(worker={"rollout": {"environment": "games.py:Maze", "observation_role": "tool"}})
    check_chat_template(other, processors)
    check_chat_template(Config(), processors)  # completions of one turn, after which no message follows
