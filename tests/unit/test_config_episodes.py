"""What is made of the options of environments and tools."""

import pytest

from support import chat_templates
from support.chat_templates import with_template
from support.models import processors_of
from trigon.assemble.episodes import check_chat_template
from trigon.config.schema import Config
from trigon.errors import ConfigError


def test_a_chat_template_that_changes_earlier_turns_is_refused_before_anything_runs(tiny_model):
    processors = with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)
    with pytest.raises(ConfigError, match=r"removes the thoughts .*; set worker\.rollout\.observation_role=tool"):
        check_chat_template(Config(worker={"rollout": {"environment": "games.py:Maze"}}), processors)
    other = Config(worker={"rollout": {"environment": "games.py:Maze", "observation_role": "tool"}})
    check_chat_template(other, processors)
    check_chat_template(Config(), processors)  # completions of one turn, after which no message follows
