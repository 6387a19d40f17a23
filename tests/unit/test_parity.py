"""The parity check: agreement passes, stale weights raise."""

import math
from dataclasses import replace

import pytest
import torch

from support.rollout import NO_WEIGHTS
from trigon.errors import NotFiniteError, ParityError
from trigon.metrics import Max, Mean
from trigon.rollout.fake import FakeEngine
from trigon.rollout.parity import SAMPLED_PROBE_TOKENS, ParityCheck, Probe
from trigon.training.fake import FakeTrainEngine
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

UNTRUNCATED = SamplingParams(n=2, temperature=0.7, top_p=1.0, top_k=-1, max_tokens=40, ignore_eos=False, seed=7)


class FixedTrainer:
    """A trainer that returns the given log-probabilities for a group, and others in later calls."""

    def __init__(self, *logprobs, later=()):
        self.calls = [[[torch.tensor(tokens) for tokens in logprobs]]]
        self.calls += [[[torch.tensor(tokens) for tokens in group] for group in call] for call in later]

    def logprobs(self, groups):
        logprobs = self.calls.pop(0)
        assert len(groups) == len(logprobs)
        return logprobs


def sampled(*logprobs):
    prompt = Prompt("train:17", (1, 2), None, "", "", {}, ())
    score = Score(0.0, {}, "ok", "")
    return RolloutGroup(
        prompt,
        tuple(Rollout(Completion((5,) * len(tokens), tuple(tokens), "stop", "", 3), score) for tokens in logprobs),
    )


def probe_of(*logprobs, further=()):
    return Probe(sampled(*logprobs), tuple(sampled(*group) for group in further))


def test_differences_up_to_the_tolerance_pass_and_are_metrics():
    trainer = FixedTrainer([-1.0, -2.5], [-3.0, -4.25])
    further = [[[-5.0] * 4]]  # is not scored without a miss
    metrics = ParityCheck(0.1875).check([probe_of([-1.0, -2.0], [-3.0, -4.0], further=further)], trainer)
    assert metrics == {
        "parity/logprobs_diff_mean": Mean(0.75, 4.0),
        "parity/logprobs_diff_max": Max(0.5),
    }


def test_a_difference_above_the_tolerance_raises_with_the_numbers():
    with pytest.raises(ParityError) as caught:
        ParityCheck(0.1).check([probe_of([-1.0, -2.0], [-3.0])], FixedTrainer([-1.0, -2.5], [-3.25]))
    for part in ("3 tokens", "train:17", "policy version 3", "0.25", "0.5", "0.1", "worker.rollout.parity_tolerance"):
        assert part in str(caught.value)


@pytest.mark.faults
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [0.1, 1e9])
def test_a_difference_that_is_not_finite_never_passes(wrong, tolerance):
    with pytest.raises(
        NotFiniteError, match=r"trainer's log-probabilities of 2 tokens of train:17 .* hold 1"
    ) as caught:
        ParityCheck(tolerance).check([probe_of([-1.0, -2.0])], FixedTrainer([-1.0, wrong]))
    assert "cache" not in str(caught.value)
    with pytest.raises(ParityError, match=r"rollout engine's log-probabilities .*worker\.rollout\.dtype"):
        ParityCheck(tolerance).check([probe_of([-1.0, wrong])], FixedTrainer([-1.0, -2.0]))
    trainer = FixedTrainer([-1.0, wrong], later=[[[[-5.0] * 4]]])
    with pytest.raises(NotFiniteError):  # further tokens do not excuse it
        ParityCheck(tolerance).check([probe_of([-1.0, -2.0], further=[[[-5.0] * 4]])], trainer)


def test_a_replica_above_the_tolerance_passes_if_it_agrees_on_further_tokens():
    """As in an MoE model where one token takes another expert: 0.5 on 2 tokens, 0.1 on 10."""
    trainer = FixedTrainer([-1.0, -3.0], later=[[[[-5.0] * 4], [[-6.0] * 3, [-7.0]]]])
    probe = probe_of([-1.0, -2.0], further=[[[-5.0] * 4], [[-6.0] * 3, [-7.0]]])
    messages = []
    metrics = ParityCheck(0.25).check([probe], trainer, warn=messages.append)
    assert metrics == {
        "parity/logprobs_diff_mean": Mean(1.0, 10.0),
        "parity/logprobs_diff_max": Max(1.0),
        "parity/first_diff_mean": Max(0.5),
    }
    [message] = messages
    assert "0.5 on 2 tokens (largest 1), with further ones 0.1 on 10 tokens (largest 1)" in message
    trainer = FixedTrainer([-1.0, -3.0], later=[[[[-5.5] * 4]]])
    with pytest.raises(ParityError, match=r"0\.5 on 2 tokens .*, with further ones 0\.5 on 6 tokens"):
        ParityCheck(0.25).check([probe_of([-1.0, -2.0], further=[[[-5.0] * 4]])], trainer)


def test_each_replica_is_judged_by_its_own_tokens():
    probes = [sampled_by(replica, -1.2 if replica == 1 else -1.0) for replica in range(2)]
    agreeing = [sampled_by(replica, -1.0) for replica in range(2)]
    several = [
        Probe(probes[0], (agreeing[0],)),
        Probe(probes[1], (agreeing[1], agreeing[1], agreeing[1])),
    ]
    metrics = ParityCheck(0.1).check(several, FakeTrainEngine(), warn=lambda text: None)
    assert metrics["parity/logprobs_diff_mean"].value == pytest.approx(0.2 / 6)
    swapped = [Probe(probes[0], (agreeing[0],) * 3), Probe(probes[1], ())]
    for order in (swapped, swapped[::-1]):
        number = order.index(swapped[1])
        with pytest.raises(ParityError, match=rf"tokens of train:1 .* in replica {number} of 2"):
            ParityCheck(0.1).check(order, FakeTrainEngine())


def begun_in_another_step(*logprobs, begun):
    """Return a group whose completions have `begun` tokens of version 1, and the others of 3."""
    group = sampled(*logprobs)
    rollouts = tuple(
        replace(each, completion=replace(each.completion, policy_versions=((1, begun), (3, tokens - begun))))
        for each, tokens in zip(group.rollouts, map(len, logprobs), strict=True)
    )
    return replace(group, rollouts=rollouts)


def test_only_tokens_of_the_current_weights_are_compared():
    older_differ = begun_in_another_step([-9.0, -1.0, -2.0], begun=1)
    metrics = ParityCheck(0.25).check([Probe(older_differ, ())], FixedTrainer([-1.0, -1.25, -2.0]))
    assert metrics == {"parity/logprobs_diff_mean": Mean(0.25, 2.0), "parity/logprobs_diff_max": Max(0.25)}
    newer_differ = begun_in_another_step([-1.0, -9.0, -2.0], begun=1)
    with pytest.raises(ParityError, match="on 2 tokens"):
        ParityCheck(0.25).check([Probe(newer_differ, ())], FixedTrainer([-1.0, -1.25, -2.0]))


@pytest.mark.parametrize(
    ("lengths", "compared"), [([1, 1], 2), ([64, 5], 1), ([63, 5, 5], 2), ([30, 30, 30, 30], 3), ([200, 200], 1)]
)
def test_without_truncation_the_probe_is_the_first_completions_of_the_first_group(engine, lengths, compared):
    groups = [sampled(*([-1.0] * length for length in lengths)), sampled([-3.0], [-4.0])]
    [probe] = ParityCheck(0.1).probe(groups, engine, UNTRUNCATED, prompt=groups[0].prompt, version=3)
    assert probe.first.prompt is groups[0].prompt
    assert probe.first.rollouts == groups[0].rollouts[:compared]
    assert engine.calls == ()


def test_completions_whose_environment_failed_are_not_compared(engine):
    group = sampled([-1.0] * 70, [-1.1] * 70, [-1.2] * 70)
    failed = replace(group.rollouts[0].completion, error="the environment died")
    group = replace(group, rollouts=(Rollout(failed, group.rollouts[0].score), *group.rollouts[1:]))
    [probe] = ParityCheck(0.1).probe([group], engine, UNTRUNCATED, prompt=group.prompt, version=3)
    assert (probe.first.rollouts, [each.rollouts for each in probe.further]) == (
        group.rollouts[1:2],
        [group.rollouts[2:]],
    )


def test_further_completions_are_those_after_the_first_up_to_four_times_their_tokens(engine):
    groups = [sampled([-1.0] * 80, [-1.1] * 80), sampled(*[[-1.2] * 80] * 2), sampled(*[[-1.3] * 80] * 5)]
    [probe] = ParityCheck(0.1).probe(groups, engine, UNTRUNCATED, prompt=groups[0].prompt, version=3)
    assert [group.rollouts for group in probe.further] == [
        groups[0].rollouts[1:],
        groups[1].rollouts,
        groups[2].rollouts[:1],
    ]
    [probe] = ParityCheck(0.1).probe(groups[:1], engine, UNTRUNCATED, prompt=groups[0].prompt, version=3)
    assert [group.rollouts for group in probe.further] == [groups[0].rollouts[1:]]
    [probe] = ParityCheck(0.1).probe([sampled([-1.0])], engine, UNTRUNCATED, prompt=sampled([-1.0]).prompt, version=3)
    assert probe.further == ()


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 50}])
@pytest.mark.parametrize(("max_tokens", "length"), [(40, SAMPLED_PROBE_TOKENS), (5, 5)])
def test_with_truncation_a_short_untruncated_completion_is_sampled(engine, truncation, max_tokens, length):
    sampling = replace(UNTRUNCATED, max_tokens=max_tokens, **truncation)
    with engine.awake(NO_WEIGHTS, version=6):
        [probe] = ParityCheck(0.1).probe(
            [sampled([-9.0], [-9.0])], engine, sampling, prompt=sampled([-1.0]).prompt, version=6
        )
    [first, further] = engine.calls
    assert first == (["train:17"], replace(UNTRUNCATED, n=1, max_tokens=length, one_turn=True))
    assert further == (["train:17"], replace(UNTRUNCATED, n=5, max_tokens=length, one_turn=True))
    [rollout] = probe.first.rollouts
    assert len(rollout.completion.token_ids) == length
    assert rollout.completion.policy_version == 6
    [group] = probe.further
    assert [len(rollout.completion.token_ids) for rollout in group.rollouts] == [length] * 4
    assert ParityCheck(1e-6).check([probe], FakeTrainEngine())["parity/logprobs_diff_max"] == Max(0.0)


class RecordingEngine(FakeEngine):
    """A fake engine of some replicas that records the arguments of each call."""

    calls, num_replicas = (), 1

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        self.calls = (*self.calls, ([prompt.prompt_id for prompt in prompts], sampling))
        rows = super().generate(prompts, sampling, on_progress=on_progress, on_group=on_group)
        return [
            [replace(completion, replica=index % self.num_replicas) for completion in row]
            for index, row in enumerate(rows)
        ]


@pytest.fixture
def engine(tokenizer):
    stop = tokenizer.eos_token_id
    return RecordingEngine(tokenizer=tokenizer, stop_token_id=stop, complete=lambda p, v, s: "one two " * 40)


def sampled_by(replica, logprob, *, version=3):
    group = sampled([logprob])
    [rollout] = group.rollouts
    completion = replace(rollout.completion, replica=replica, policy_version=version)
    return RolloutGroup(replace(group.prompt, prompt_id=f"train:{replica}"), (replace(rollout, completion=completion),))


def test_a_replica_without_groups_of_this_step_samples_a_short_completion(engine):
    engine.num_replicas = 3
    groups = [sampled_by(2, -1.0), sampled_by(0, -1.0, version=2)]
    with engine.awake(NO_WEIGHTS, version=3):
        probes = ParityCheck(0.1).probe(groups, engine, UNTRUNCATED, prompt=groups[0].prompt, version=3)
    assert [probe.first.rollouts[0].completion.replica for probe in probes] == [0, 1, 2]
    assert [len(probe.first.rollouts[0].completion.token_ids) for probe in probes] == [16, 16, 1]
    assert [(prompt_ids, used.n) for prompt_ids, used in engine.calls] == [(["train:2"] * 3, n) for n in (1, 5)]
    further = [[group.rollouts for group in probe.further] for probe in probes]
    assert [[rollout.completion.replica for rollouts in each for rollout in rollouts] for each in further] == [
        [0] * 4,
        [1] * 4,
        [],
    ]
