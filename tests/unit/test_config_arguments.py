"""Options as Python values: the same keys, types, checks and errors as in a YAML file."""

from pathlib import Path

import numpy as np
import pytest

from trigon.config.load import load_config
from trigon.config.options import value_of
from trigon.errors import ConfigError

REQUIRED = {
    "worker.actor.model.model_path": "owner/model",
    "worker.reward.reward_function": "math",
    "data.train_files": "owner/data",
    "trainer.val_before_train": False,
    "worker.rollout.n": 4,
}


def load(*arguments, **options):
    return load_config(None, [REQUIRED, *arguments], **options)


def test_nested_and_dotted_names_mean_the_same():
    nested = load({"worker": {"rollout": {"temperature": 0.5}, "actor.optim": {"lr": 1e-5}}}).config
    dotted = load({"worker.rollout.temperature": 0.5, "worker.actor.optim.lr": 1e-5}).config
    assert nested == dotted
    assert (nested.worker.rollout.temperature, nested.worker.actor.optim.lr) == (0.5, 1e-5)


def test_python_values_and_texts_replace_each_other_in_their_order():
    given = (
        {"data.seed": 2, "data": {"val_files": ["a/b"]}},
        "data.seed=3",
        {"trainer.max_steps": 1},
        "data.val_files=c/d",
    )
    config = load(*given).config
    assert (config.data.seed, config.data.val_files, config.trainer.max_steps) == (3, ("c/d",), 1)
    assert load(*given, {"data.seed": 4}).config.data.seed == 4


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("data.train_files", [Path("owner/a"), "owner/b"], ("owner/a", "owner/b")),
        ("data.system_prompt", "yes: {no}, 'it' is # 1e-6", "yes: {no}, 'it' is # 1e-6"),
        ("data.system_prompt", "null", "null"),
        ("data.system_prompt", None, None),
        ("worker.actor.optim.lr", np.float32(0.5), 0.5),
        ("trainer.max_steps", np.int64(7), 7),
        ("worker.actor.optim.betas", (0.5, 0.25), (0.5, 0.25)),
    ],
)
def test_python_values_have_their_types(name, value, expected):
    assert value_of(load({name: value}).config, name) == expected


def test_free_mappings_keep_the_types_of_their_values():
    given = {"names": ["a", None], "deep": {"on": True, "rate": 1e-7, "1": "2"}}
    assert load({"worker.reward.reward_function_kwargs": given}).config.worker.reward.reward_function_kwargs == given


def test_all_problems_are_in_one_error_without_lines():
    wrong = {"trainer": {"max_steps": 0, "max_stesp": 3}, "trainer.save_freq": 2}
    wrong["trainer"]["save_freq"] = 3
    with pytest.raises(ConfigError) as caught:
        load(wrong)
    text = str(caught.value)
    assert "trainer.max_steps is 0 (arguments), but must be an integer, at least 1" in text
    assert "trainer.max_stesp (arguments) is unknown; did you mean trainer.max_steps?" in text
    assert "trainer.save_freq is given twice (arguments)" in text
    assert "line" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": {"max_steps": object()}}, r"^trainer.max_steps is a builtins.object, which no option takes"),
        ({"data.train_files": [b"x"]}, r"^data.train_files\[0\] is a builtins.bytes, which no option takes"),
        ({"trainer": {1: 2}}, r"^trainer has the key 1, a int; names of options are text"),
        ({"worker.rollout.n": np.zeros(3)}, r"^worker.rollout.n is a numpy.ndarray, which no option takes"),
    ],
)
def test_values_that_yaml_does_not_have_are_an_error(values, message):
    with pytest.raises(ConfigError, match=message):
        load(values)


def test_a_mapping_that_contains_itself_is_an_error():
    endless = {}
    endless["x"] = endless
    with pytest.raises(ConfigError, match="has more than 32 levels"):
        load({"worker.reward.reward_function_kwargs": endless})


def test_names_of_python_objects_need_the_objects():
    names = {"data.train_files": "python:train", "worker.reward.reward_function": "python:score"}
    assert load(names, python_objects=["python:train", "python:score"]).config.data.train_files == ("python:train",)
    with pytest.raises(ConfigError) as caught:
        load(names)
    assert "data.train_files is python:train, which a program gave to trigon.train as a Python object" in str(
        caught.value
    )
    assert "worker.reward.reward_function is python:score, which a program gave" in str(caught.value)
