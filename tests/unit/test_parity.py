"""The probe of every step: agreement passes, stale weights stop the run, and what is compared is comparable."""

import math
from dataclasses import replace

import pytest
import torch

from trigon.errors import ParityError
from trigon.metrics import Max, Mean
from trigon.models.load import load_processors
from trigon.parity import DRAWN_TOKENS, ParityCheck
from trigon.rollout.fake import FakeEngine
from trigon.training.fake import FakeTrainEngine
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

PLAIN = SamplingParams(n=2, temperature=0.7, top_p=1.0, top_k=-1, max_tokens=40, ignore_eos=False, seed=7)


class Says:
    """A trainer that says these log-probabilities, whatever it is asked."""

    def __init__(self, *logprobs):
        self.logprobs_of_each = [torch.tensor(tokens) for tokens in logprobs]

    def logprobs(self, groups):
        assert len(groups) == 1
        return [self.logprobs_of_each]


def sampled(*logprobs):
    prompt = Prompt("train:17", (1, 2), None, "", "", {}, ())
    score = Score(0.0, {}, "ok", "")
    return RolloutGroup(
        prompt,
        tuple(Rollout(Completion((5,) * len(tokens), tuple(tokens), "stop", "", 3), score) for tokens in logprobs),
    )


def test_agreement_within_the_tolerance_passes_and_is_told_in_numbers():
    metrics = ParityCheck(0.25).check(sampled([-1.0, -2.0], [-3.0, -4.0]), Says([-1.0, -2.5], [-3.0, -4.25]))
    assert metrics == {
        "parity/logprobs_diff_mean": Mean(0.75, 4.0),
        "parity/logprobs_diff_max": Max(0.5),
    }


def test_the_tolerance_itself_still_passes():
    ParityCheck(0.5).check(sampled([-1.0, -2.0]), Says([-1.5, -2.5]))


def test_stale_weights_stop_the_run_with_the_numbers():
    with pytest.raises(ParityError) as caught:
        ParityCheck(0.1).check(sampled([-1.0, -2.0], [-3.0]), Says([-1.0, -2.5], [-3.25]))
    for part in ("3 tokens", "train:17", "policy version 3", "0.25", "0.5", "0.1", "worker.rollout.parity_tolerance"):
        assert part in str(caught.value)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [0.1, 1e9])
def test_what_is_not_finite_never_passes(wrong, tolerance):
    with pytest.raises(ParityError):
        ParityCheck(tolerance).check(sampled([-1.0, -2.0]), Says([-1.0, wrong]))
    with pytest.raises(ParityError):
        ParityCheck(tolerance).check(sampled([-1.0, wrong]), Says([-1.0, -2.0]))


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_processors(str(tiny_model("qwen2"))).tokenizer


class Asked(FakeEngine):
    """A fake engine that remembers how it was asked to sample."""

    asked = ()

    def generate(self, prompts, sampling, *, step, on_progress=None, on_group=None):
        self.asked = (*self.asked, ([prompt.prompt_id for prompt in prompts], sampling, step))
        return super().generate(prompts, sampling, step=step, on_progress=on_progress, on_group=on_group)


@pytest.fixture
def engine(tokenizer):
    return Asked(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda p, v, s: "one two " * 40)


@pytest.mark.parametrize(
    ("lengths", "compared"), [([1, 1], 2), ([64, 5], 1), ([63, 5, 5], 2), ([30, 30, 30, 30], 3), ([200, 200], 1)]
)
def test_where_nothing_is_cut_the_first_completions_of_the_first_group_are_the_probe(engine, lengths, compared):
    groups = [sampled(*([-1.0] * length for length in lengths)), sampled([-3.0], [-4.0])]
    probe = ParityCheck(0.1).probe(groups, engine, PLAIN, step=4)
    assert probe.prompt is groups[0].prompt
    assert probe.rollouts == groups[0].rollouts[:compared]
    assert engine.asked == ()


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
@pytest.mark.parametrize(("max_tokens", "length"), [(40, DRAWN_TOKENS), (5, 5)])
def test_where_sampling_is_cut_a_short_probe_is_drawn_from_the_whole_vocabulary(engine, cut, max_tokens, length):
    sampling = replace(PLAIN, max_tokens=max_tokens, **cut)
    with engine.awake(iter(()), version=6):
        probe = ParityCheck(0.1).probe([sampled([-9.0], [-9.0])], engine, sampling, step=7)
    [(asked, used, step)] = engine.asked
    assert (asked, step) == (["train:17"], 7)
    assert used == replace(PLAIN, n=1, max_tokens=length)
    [rollout] = probe.rollouts
    assert len(rollout.completion.token_ids) == length
    assert rollout.completion.policy_version == 6
    assert ParityCheck(1e-6).check(probe, FakeTrainEngine())["parity/logprobs_diff_max"] == Max(0.0)
