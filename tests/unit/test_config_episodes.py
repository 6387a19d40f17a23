"""What is made of the options of environments and tools."""

import pytest

from support import chat_templates
from support.chat_templates import with_template
from support.models import processors_of
from trigon.assemble.episodes import check_chat_template, engine_limit_images, make_episode_options
from trigon.config.load import load_config
from trigon.config.schema import Config
from trigon.errors import ConfigError

NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)


def rollout(*overrides):
    return [f"worker.rollout.{each}" for each in overrides]


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "games.py"
    file.write_text("class Maze: ...\ndef search(): ...\n")
    return file


def test_completions_have_one_turn_by_default():
    assert make_episode_options(Config()) is None
    assert engine_limit_images(Config(worker={"rollout": {"limit_images": 2}})) == 2


def test_an_environment_and_its_defaults(code):
    config = load_config(None, (*NEEDED, *rollout(f"environment={code}:Maze", "limit_images=2"))).config
    options = make_episode_options(config)
    assert options.opens
    assert (options.observation_role, options.max_turns, options.max_turn_tokens) == ("user", 8, None)
    assert (options.timeout_seconds, options.max_episodes) == (60.0, 256)
    assert engine_limit_images(config) == 0


def test_tools_are_named_by_file_module_or_built_in_name(code):
    for given in ("crop", f"[crop,python,{code}:search]", "package.tools:search"):
        config = load_config(None, (*NEEDED, *rollout(f"tools={given}"))).config
        options = make_episode_options(config)
        assert not options.opens
        assert options.observation_role == "tool"
    assert options.tools == ("package.tools:search",)
    user = Config(worker={"rollout": {"tools": ("crop",), "observation_role": "user"}})
    assert make_episode_options(user).observation_role == "user"


def test_tools_beside_an_environment_have_messages_of_their_own_role(code):
    config = load_config(None, (*NEEDED, *rollout(f"environment={code}:Maze", "tools=[crop]"))).config
    options = make_episode_options(config)
    assert options.opens
    assert (options.environment, options.tools) == (f"{code}:Maze", ("crop",))
    assert (options.observation_role, options.tool_role) == ("user", "tool")
    config = load_config(
        None, (*NEEDED, *rollout(f"environment={code}:Maze", "tools=[crop]", "observation_role=user"))
    ).config
    assert make_episode_options(config).tool_role == "user"


def test_a_chat_template_that_changes_earlier_turns_is_refused_before_anything_runs(tiny_model):
    processors = with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)
    with pytest.raises(ConfigError, match=r"removes the thoughts .*; set worker\.rollout\.observation_role=tool"):
        check_chat_template(Config(worker={"rollout": {"environment": "games.py:Maze"}}), processors)
    other = Config(worker={"rollout": {"environment": "games.py:Maze", "observation_role": "tool"}})
    check_chat_template(other, processors)
    check_chat_template(Config(), processors)  # completions of one turn, after which no message follows
