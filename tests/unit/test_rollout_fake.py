"""The engine without a model keeps the contract of the real ones."""

import pytest
import torch

from trigon.errors import EngineError
from trigon.models.load import load_processors
from trigon.rollout.fake import FakeEngine
from trigon.rollout.seeds import sample_seed
from trigon.types import Prompt, SamplingParams

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)


def prompt(name="train:0"):
    return Prompt(name, token_ids=(1, 2, 3), vision=None, text="How many?", ground_truth="3", row={}, image_refs=())


def weights():
    yield "updates", torch.zeros(1)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_processors(str(tiny_model("qwen2"))).tokenizer


def engine(tokenizer, complete=lambda prompt, version, seed: f"{prompt.ground_truth} {version}"):
    return FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)


def test_it_says_what_the_function_says_and_stops(tokenizer):
    fake = engine(tokenizer)
    with fake.awake(weights(), version=4):
        [[completion, _]] = fake.generate([prompt()], SAMPLING, step=5)
    assert completion.text == "3 4"
    assert completion.token_ids == (*tokenizer.encode("3 4"), tokenizer.eos_token_id)
    assert completion.sampling_logprobs == (-1.0,) * len(completion.token_ids)
    assert completion.finish_reason == "stop"
    assert completion.policy_version == 4


def test_a_long_answer_is_cut(tokenizer):
    fake = engine(tokenizer, complete=lambda prompt, version, seed: "one two three " * 20)
    with fake.awake(weights(), version=0):
        [[completion, _]] = fake.generate([prompt()], SAMPLING, step=0)
    assert len(completion.token_ids) == 20
    assert completion.finish_reason == "length"


def test_each_sample_is_told_its_own_seed(tokenizer):
    fake = engine(tokenizer, complete=lambda prompt, version, seed: str(seed))
    with fake.awake(weights(), version=0):
        [first, second] = fake.generate([prompt("a"), prompt("b")], SAMPLING, step=3)
    assert first[1].text == str(sample_seed(7, step=3, prompt_id="a", sample=1))[: len(first[1].text)]
    assert len({completion.token_ids for completion in first + second}) == 4


def test_greedy_decoding_has_no_log_probability(tokenizer):
    greedy = SamplingParams(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)
    fake = engine(tokenizer)
    with fake.awake(weights(), version=0):
        [[completion]] = fake.generate([prompt()], greedy, step=0)
    assert set(completion.sampling_logprobs) == {0.0}


def test_weights_are_read_once_for_each_version(tokenizer):
    fake = engine(tokenizer)
    handed = []

    def counted():
        handed.append("updates")
        yield "updates", torch.zeros(1)

    for version in (0, 0, 1):
        with fake.awake(counted(), version=version):
            pass
    assert len(handed) == 2


def test_progress_counts_completions(tokenizer):
    heard = []
    fake = engine(tokenizer)
    with fake.awake(weights(), version=0):
        fake.generate([prompt("a"), prompt("b"), prompt("c")], SAMPLING, step=0, on_progress=heard.append)
    assert heard == [2, 2, 2]


def test_each_group_is_handed_over_before_the_next_is_sampled(tokenizer):
    events = []

    def answer(prompt, version, seed):
        events.append(prompt.prompt_id)
        return "3"

    fake = engine(tokenizer, answer)
    with fake.awake(weights(), version=0):
        rows = fake.generate(
            [prompt("a"), prompt("b")], SAMPLING, step=0, on_group=lambda index, row: events.append((index, row))
        )
    assert events == ["a", "a", (0, rows[0]), "b", "b", (1, rows[1])]


def test_a_sleeping_engine_refuses(tokenizer):
    fake = engine(tokenizer)
    with pytest.raises(EngineError, match="sleeps"):
        fake.generate([prompt()], SAMPLING, step=0)
    with fake.awake(weights(), version=0):
        pass
    with pytest.raises(EngineError, match="sleeps"):
        fake.generate([prompt()], SAMPLING, step=0)
