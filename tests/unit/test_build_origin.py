"""What a checkpoint records of a run, and what a resumed run is told, without loading anything."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trigon.assemble.origin import KEY, Origin
from trigon.checkpoint.store import Checkpoint
from trigon.config.options import with_options
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.data.dataset import DatasetContent, PromptSet
from trigon.data.stream import Prompts
from trigon.errors import CheckpointError
from trigon.rewards.callables import reward_terms

MODEL, TOKENIZER = "worker.actor.model.model_path", "worker.actor.model.tokenizer_path"
KWARGS = "worker.reward.reward_function_kwargs"
CONTENT = DatasetContent("val.jsonl", 3, "f" * 32)


def validation_of(content, unusable=None):
    """Return validation prompts of which only the content is read."""
    rows, unusable = range(4), unusable or {}
    usable = tuple(row for row in rows if row not in unusable)
    content = replace(content, skipped=" ".join(map(str, unusable)))
    return Prompts((PromptSet("val", len(rows), usable, unusable, {}, content, None, None),))


VALIDATION = validation_of(CONTENT)


def config(changes=None):
    """Return a configuration with these options; its model is on a hub that no test can reach."""
    own = {"trainer.max_steps": 10, "worker.reward.reward_function": "math", MODEL: "owner/model"}
    return with_options(Config(), own | (changes or {}))


def origin_of(each, checkpoint=None, *, validation=VALIDATION, reward=None, say=print):
    origin = Origin(each, checkpoint, say)
    origin.add_options(None if reward is None else reward_terms(reward, kwargs={}))
    origin.add_data(each, None, validation, make_plan(each, num_train_prompts=1024))
    return origin


def saved_by(each, *, change=lambda state: state, **given):
    """Return the checkpoint of a run with this configuration, after a round trip through JSON."""
    state = origin_of(each, **given).state()
    state = change(json.loads(json.dumps(state, allow_nan=False)))
    return Checkpoint(7, Path("/runs/x/global_step_7"), {KEY: state}, None)


def resumed(each, checkpoint, **given):
    """Return the record of a resumed run, and what was printed."""
    said = []
    return origin_of(each, checkpoint, say=said.append, **given), said


def said_by(*arguments, **options):
    return resumed(*arguments, **options)[1]


def refusal(*arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        resumed(*arguments, **options)
    return str(caught.value)


def test_the_same_run_has_no_changes():
    origin, said = resumed(config(), saved_by(config()))
    assert (origin.accepted, origin.notes, said) == ({}, [], [])
    assert origin.describe_start()["after_step"] == 7


def test_a_resumed_run_keeps_the_date_on_which_it_was_started():
    checkpoint = saved_by(config(), change=lambda state: {**state, "date": "2024-02-29T23:59:59"})
    for options in ({}, {"trainer.val_only": True}):
        assert resumed(config(options), checkpoint)[0].state()["date"] == "2024-02-29T23:59:59"


def test_scores_are_compared_if_the_data_and_the_reward_of_validations_are_the_same():
    def validated_by(options=None, validation=VALIDATION):
        return origin_of(config(options), validation=validation).validated_by()

    arguments = {KWARGS: {"url": "private"}}
    own = {"worker.reward.val_reward_function": "math"}
    assert validated_by() == validated_by({"worker.actor.optim.lr": 1e-5, "data.train_files": "other.jsonl"})
    assert validated_by(own) == validated_by(own | arguments)
    other_images = validation_of(replace(CONTENT, files="a" * 32))
    fewer_rows = validation_of(CONTENT, {2: "image_missing"})
    validations = [validated_by(validation=each) for each in (VALIDATION, other_images, fewer_rows)]
    assert len({*validations, validated_by(arguments)}) == 4


def test_a_value_that_is_long_is_cut_and_an_argument_of_the_reward_function_is_not_shown():
    checkpoint = saved_by(config({"data.system_prompt": "a" * 500, KWARGS: {"url": "private"}}))
    message = refusal(config({KWARGS: {"url": "secret"}}), checkpoint)
    assert f"was {'a' * 57}..., and is now null" in message
    assert "reward_function_kwargs has other content than before (url)\n" in message
    assert "private" not in json.dumps(checkpoint.progress)
    assert "secret" not in message


KEY_1, KEY_2 = "sk-abcDEF1234567890abcd", "sk-zyxWVU0987654321zyxw"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"judge": {"model": "small", "api_key": KEY_1}}, {"judge": {"model": "small", "api_key": KEY_2}}),
        ({"judges": [{"auth": {"token": "first"}}, 2]}, {"judges": [{"auth": {"token": "second"}}, 2]}),
        ({"judges": [["small", KEY_1]]}, {"judges": [["small", KEY_2]]}),
        ({"judge": {"key": KEY_1}}, {"judge": {"key": "env:JUDGE_KEY"}}),
        ({"url": "https://me:first1@judge/v1"}, {"url": "https://me:second2@judge/v1"}),
        ({"login": {"password": 1234}}, {"login": {"password": 5678}}),
    ],
)
def test_secrets_inside_arguments_of_the_reward_function_are_not_compared(before, now):
    assert said_by(config({KWARGS: now}), saved_by(config({KWARGS: before}))) == []


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"judge": {"model": "small", "api_key": KEY_1}}, {"judge": {"model": "large", "api_key": KEY_1}}),
        ({"judge": [{"api_key": KEY_1}]}, {"judge": [{"api_key": KEY_1}, {"api_key": KEY_1}]}),
        ({"judge": {"api_key": KEY_1}}, {"judge": {"access_key": KEY_1}}),
        ({"judge": {"answer_key": "final"}}, {"judge": {"answer_key": "boxed"}}),
        ({"judge": {"url": "env:FIRST"}}, {"judge": {"url": "env:SECOND"}}),
        ({"judge": "https://me:first1@judge/v1"}, {"judge": "https://me:first1@judge/v2"}),
    ],
)
def test_what_is_beside_a_secret_is_compared(before, now):
    message = refusal(config({KWARGS: now}), saved_by(config({KWARGS: before})))
    assert "reward_function_kwargs has other content than before (judge)\n" in message


def test_the_length_of_a_schedule_and_other_versions_and_workers_are_told():
    cosine = {"worker.actor.optim.lr_scheduler_type": "cosine"}

    def earlier(state):
        noted = {**state["noted"], "torch": "1.0", "workers": 8, "a library of old": "2"}
        del noted["Python"]  # which is not noted as a change
        return {**state, "noted": noted}

    checkpoint = saved_by(config(cosine), change=earlier)
    origin, said = resumed(config({**cosine, "trainer.max_steps": 20}), checkpoint)
    assert len(said) == len(origin.notes) == 3
    assert "steps of the learning rate's schedule was 10, and is now 20" in origin.notes
    assert "workers was 8, and is now 1" in origin.notes
    assert said_by(config({"trainer.max_steps": 20}), saved_by(config())) == []


def test_options_that_another_version_of_trigon_records_are_not_compared():
    def other(state):
        options = {name: value for name, value in state["options"].items() if name != "worker.rollout.seed"}
        return {**state, "options": {**options, "worker.rollout.later": 3}}

    assert said_by(config({"worker.rollout.seed": 2}), saved_by(config(), change=other)) == []


def test_other_validation_data_are_refused_and_none_are_not():
    other = validation_of(replace(CONTENT, fingerprint="e" * 32))
    assert "\n  data.val_files val.jsonl has other rows" in refusal(config(), saved_by(config()), validation=other)
    accepted = config({"trainer.accept_changes": ("data.val_files",)})
    assert len(said_by(accepted, saved_by(config()), validation=other)) == 1
    moved = validation_of(replace(CONTENT, spec="elsewhere/val.jsonl"))
    for before, now in ((VALIDATION, None), (None, other), (VALIDATION, moved)):
        assert said_by(config(), saved_by(config(), validation=before), validation=now) == []


@pytest.mark.faults
def test_validation_rows_that_can_no_longer_be_used_or_can_be_used_now_are_told_by_name():
    fewer = validation_of(CONTENT, {2: "image_missing"})
    [said] = said_by(config(), saved_by(config()), validation=fewer)
    assert all(fact in said for fact in ("val.jsonl", "no longer", "val:2 (image_missing)"))
    [said] = said_by(config(), saved_by(config(), validation=fewer), validation=VALIDATION)
    assert "val:2" in said


def test_the_refusal_gives_the_option_with_what_is_accepted_already():
    accepted = {"trainer.accept_changes": ("data.seed",)}
    message = refusal(config({**accepted, "data.seed": 2, "worker.rollout.n": 4}), saved_by(config()))
    assert "'trainer.accept_changes=[data.seed,worker.rollout.n]'" in message
    assert "\n  trainer.accept_changes=data.seed\n" in refusal(config({"data.seed": 2}), saved_by(config()))
    said = said_by(config({"trainer.accept_changes": ("all",), "data.seed": 2}), saved_by(config()))
    assert said == ["accepted from step 8 on: data.seed was 1, and is now 2"]


def test_a_run_that_only_validates_and_one_that_begins_are_not_compared():
    changed = {"data.seed": 2, "worker.rollout.n": 4}
    assert said_by(config({"trainer.val_only": True, **changed}), saved_by(config())) == []
    assert said_by(config(changed), None) == []


def test_another_option_of_the_critic_is_refused():
    gae, lr = {"algorithm.adv_estimator": "gae"}, "worker.critic.optim.lr"
    message = refusal(config(gae | {lr: 1e-4}), saved_by(config(gae | {lr: 1e-3})))
    assert f"\n  {lr} was 0.001, and is now 0.0001\n" in message


def test_a_function_given_in_python_is_compared_by_its_code():
    def reward(response, ground_truth):
        return len(response) % 7 / 7

    def other(response, ground_truth):
        return len(response) % 5 / 7

    assert said_by(config(), saved_by(config(), reward=reward), reward=reward) == []
    message = refusal(config(), saved_by(config(), reward=reward), reward=other)
    assert "worker.reward.reward_function has other content than before (code)" in message


def folder_of(path, vocabulary):
    """Return the name of a folder with files of a model, without weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text(vocabulary)
    return str(path)


def test_another_tokenizer_than_the_models_own_is_refused_and_so_is_the_way_back(tmp_path):
    model = {MODEL: folder_of(tmp_path / "model", "a b c")}
    other = model | {TOKENIZER: folder_of(tmp_path / "other", "c b a")}
    of_model, of_other = saved_by(config(model)), saved_by(config(other))
    changed = re.compile(rf"\n  {TOKENIZER} was (\S+), and is now (\S+), with other content \(tokenizer\.json\)\n")
    assert changed.search(refusal(config(other), of_model)).groups() == ("null", other[TOKENIZER])
    assert changed.search(refusal(config(model), of_other)).groups() == (other[TOKENIZER], "null")
    assert said_by(config(model | {TOKENIZER: model[MODEL]}), of_model) == []
    [said] = said_by(config({**other, "trainer.accept_changes": (TOKENIZER,)}), of_model)
    assert said.startswith(f"accepted from step 8 on: {TOKENIZER} was null")
    folder_of(tmp_path / "model", "b c a")  # the model's own is named once
    assert TOKENIZER not in refusal(config(model), of_model)


@pytest.mark.faults
def test_the_code_of_an_environment_and_of_tools_is_compared(tmp_path):
    file = tmp_path / "games.py"
    file.write_text("class Maze:\n    size = 3\n")
    maze = config({"worker.rollout.environment": f"{file}:Maze"})
    checkpoint = saved_by(maze)
    assert said_by(maze, checkpoint) == []
    file.write_text("class Maze:\n    size = 3  # cells\n")  # a comment is no difference
    assert said_by(maze, checkpoint) == []
    file.write_text("class Maze:\n    size = 4\n")
    assert "worker.rollout.environment has other content than before (Maze)" in refusal(maze, checkpoint)
    assert f"worker.rollout.environment was {file}:Maze, and is now null" in refusal(config(), checkpoint)
    tools = config({"worker.rollout.tools": ["crop", f"{file}:search"]})
    message = refusal(config({"worker.rollout.tools": ["crop"]}), saved_by(tools))
    assert re.search(r"worker\.rollout\.tools was crop, .*, and is now crop, .*\(search\)", message)
