"""examples/reward_function/reward_model.py: tiny sequence classifiers as reward functions."""

import contextlib
import shutil
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from trigon.assemble.preflight import open_rewards
from trigon.config.schema import Config
from trigon.rewards.contract import RewardRequest
from trigon.system.confinement import mechanisms

FILE = Path(__file__).parents[2] / "examples" / "reward_function" / "reward_model.py"
PROMPT = "What is 2 + 2?"
RESPONSES = ["four", "It is four, since two and two are four.", "5", "", "four\n" * 40, "4."]


def load_example():
    spec = spec_from_file_location("example_reward_model", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RewardModel = load_example().RewardModel


@pytest.fixture(scope="module")
def make_classifier(tiny_model, tmp_path_factory):
    """Return a function that writes a tiny classifier with random weights, once for each kind."""

    @cache
    def make(*labels, pad_token=True):
        source, folder = tiny_model("qwen2"), tmp_path_factory.mktemp("classifier")
        config = AutoConfig.from_pretrained(source)
        if labels:
            config.id2label = dict(enumerate(labels))
        else:
            config.num_labels = 1
        tokenizer = AutoTokenizer.from_pretrained(source)
        config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>") if pad_token else None
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight, std=0.1)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def score(folder, *responses, **kwargs):
    returned = RewardModel(str(folder), **kwargs)([{"prompt": PROMPT, "response": each} for each in responses])
    assert all(scores.keys() == {"overall"} for scores in returned)
    return [scores["overall"] for scores in returned]


def expected_logits(folder, response):
    """Return the logits of one conversation alone, without padding, by transformers itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    token_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=token_ids).logits[0]


@pytest.mark.parametrize(("batch_size", "pad_token"), [(1, True), (4, True), (4, False)])
def test_batches_have_the_rewards_of_each_conversation_alone(make_classifier, batch_size, pad_token):
    folder = make_classifier(pad_token=pad_token)
    rewards = score(folder, *RESPONSES, batch_size=batch_size)
    assert rewards == pytest.approx([expected_logits(folder, each).item() for each in RESPONSES], abs=1e-5)
    assert len({round(reward, 4) for reward in rewards}) == len(RESPONSES)


def test_a_label_has_its_probability_as_the_reward(make_classifier):
    folder = make_classifier("harmful", "unsure", "helpful")
    rewards = score(folder, *RESPONSES, label="helpful")
    assert rewards == pytest.approx(
        [expected_logits(folder, each).softmax(-1)[2].item() for each in RESPONSES], abs=1e-5
    )
    assert max(rewards) - min(rewards) > 0.01


def test_a_chat_template_may_be_given(make_classifier):
    folder = make_classifier()
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    rewards = score(folder, "four", chat_template=template)
    assert rewards != pytest.approx(score(folder, "four"), abs=1e-3)


@pytest.mark.extended
def test_a_reward_worker_loads_it_and_a_completion_that_is_too_long_fails_alone(make_classifier):
    reward = {
        "reward_function": f"{FILE}:RewardModel",
        "reward_function_kwargs": {"model": str(make_classifier()), "device": "cpu", "batch_size": 2, "max_length": 60},
        "timeout_seconds": 60,
        "max_failed_fraction": 1,
    }
    if sys.platform == "linux" and mechanisms.find_landlock_version():
        reward |= {"confinement": "strict", "readable": [str(make_classifier())]}
    fields = {"response_length": 3, "ground_truth": "4", "finish_reason": "stop", "row": {}}
    requests = [RewardRequest(response=each, prompt=PROMPT, **fields) for each in ("four", "four " * 200, "4.")]
    with contextlib.closing(open_rewards(Config(worker={"reward": reward}))) as pool:
        scores = pool.score(requests)
    assert [each.outcome for each in scores] == ["ok", "failed", "ok"]
    assert "tokens of the reward model, which reads 60; lower data.max_prompt_length" in scores[1].error
    assert [scores[0].overall, scores[2].overall] == pytest.approx(score(make_classifier(), "four", "4."), abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "kwargs", "message"),
    [
        (("bad", "better"), {"label": "good"}, "label='good'; the labels of this classifier are bad, better"),
        (("bad", "better"), {}, "label=None; the labels of this classifier are bad, better"),
        ((), {"label": "good"}, "label='good'; the labels of this classifier are LABEL_0"),
    ],
)
def test_a_label_that_is_not_there_is_an_error_with_the_names(make_classifier, labels, kwargs, message):
    with pytest.raises(ValueError, match=message):
        RewardModel(str(make_classifier(*labels)), **kwargs)


def test_a_model_without_a_chat_template_is_an_error(make_classifier, tmp_path):
    folder = shutil.copytree(make_classifier(), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template; set chat_template"):
        RewardModel(str(folder))


def test_a_language_model_is_not_given_a_head_with_random_weights(tiny_model):
    with pytest.raises(ValueError, match=r"has no weights for score\.weight; is it a sequence classifier"):
        RewardModel(str(tiny_model("qwen2")))
