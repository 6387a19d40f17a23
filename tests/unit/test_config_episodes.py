"""Options of environments and tools: their checks, their warnings, and what is made of them."""

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


def problem(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(None, (*NEEDED, *rollout(*overrides)))
    return str(caught.value)


def warnings(*overrides):
    return load_config(None, (*NEEDED, *rollout(*overrides))).warnings


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "games.py"
    file.write_text("class Maze: ...\ndef search(): ...\n")
    return file


@pytest.mark.parametrize("option", ["environment=python:Maze", "tools=[crop,python:search]"])
def test_what_a_program_gave_is_an_error_that_says_so(option):
    name = option.partition("=")[0]
    assert f"worker.rollout.{name} is python:" in problem(option)
    assert "which a program gave to trigon.train as a Python object" in problem(option)


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("environment=Maze", "worker.rollout.environment: 'Maze' is not file.py:Class or module:Class"),
        ("environment=a.py:not-a-name", "'a.py:not-a-name' is not file.py:Class"),
        ("environment=no/such.py:Maze", "there is no no/such.py (looked for /"),
        ("tools=corp", "'corp' is not file.py:function or module:function, or one of the built-in crop, python; did"),
        ("tools=[a.b:search,crop,c.d:crop]", "has 2 functions of the name 'crop'"),
        ("tools=[crop,crop]", "has 2 functions of the name 'crop'"),
        ("max_turns=0", "max_turns"),
        ("environment_timeout_seconds=0", "environment_timeout_seconds"),
        ("tool_format=xml", "tool_format"),
        ("observation_role=system", "observation_role"),
    ],
)
def test_what_cannot_be_found_or_used_is_named(given, expected):
    assert expected in problem(given)


def test_a_mistyped_file_is_named_with_its_nearest(code):
    assert f"did you mean {code}?" in problem(f"environment={code.parent}/game.py:Maze")


def test_the_reward_of_an_environment_needs_one(code):
    option = "worker.reward.reward_function=environment"
    with pytest.raises(ConfigError, match=r"set worker\.rollout\.environment, or choose another reward function"):
        load_config(None, (*NEEDED, option))
    given = load_config(None, (*NEEDED, option, *rollout(f"environment={code}:Maze")))
    assert given.config.worker.reward.reward_function == "environment"
    in_list = "worker.reward.val_reward_function=[{function: math}, {function: environment}]"
    with pytest.raises(ConfigError, match=r"worker\.reward\.val_reward_function=environment is the sum"):
        load_config(None, (*NEEDED, in_list))


def test_turns_need_ends(code):
    assert "worker.rollout.ignore_eos is true, so that no turn ends" in problem("tools=crop", "ignore_eos=true")


def test_options_without_effect_are_told(code):
    assert warnings("tools=crop", "max_turns=3", "max_turn_tokens=9", "tool_format=hermes") == ()
    assert warnings("max_turns=3", "observation_role=tool") == (
        "worker.rollout.observation_role has no effect without worker.rollout.environment or worker.rollout.tools",
        "worker.rollout.max_turns has no effect without worker.rollout.environment or worker.rollout.tools",
    )
    assert warnings("tools=crop", "environment_kwargs={size: 3}") == (
        "worker.rollout.environment_kwargs has no effect without worker.rollout.environment",
    )
    [cache] = warnings("tools=crop", "enable_prefix_caching=false")
    assert "each turn computes all tokens before it again" in cache
    [single] = warnings(f"environment={code}:Maze", "max_turns=1")
    assert "no observation follows" in single


@pytest.mark.faults
def test_secrets_of_an_environment_are_told_where_others_can_read_them(code):
    [exposed] = warnings(f"environment={code}:Maze", "environment_kwargs={api_key: sk-abcDEF1234567890abcd}")
    assert "worker.rollout.environment_kwargs has a secret on the command line" in exposed
    assert "env:NAME" in exposed


def test_a_chat_template_that_changes_earlier_turns_is_refused_before_anything_runs(tiny_model):
    processors = with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)
    with pytest.raises(ConfigError, match=r"removes the thoughts .*; set worker\.rollout\.observation_role=tool"):
        check_chat_template(Config(worker={"rollout": {"environment": "games.py:Maze"}}), processors)
    other = Config(worker={"rollout": {"environment": "games.py:Maze", "observation_role": "tool"}})
    check_chat_template(other, processors)
    check_chat_template(Config(), processors)  # completions of one turn, after which no message follows
