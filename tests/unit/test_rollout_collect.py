"""collect() samples and scores groups, in order; scoring overlaps with sampling."""

import time
from contextlib import closing
from dataclasses import replace

import pytest

from support.rollout import NO_WEIGHTS, Phases
from trigon.errors import EngineError, RewardError
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect, collect_as_they_end, collect_until
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Until
from trigon.rollout.seeds import sample_seed
from trigon.types import Prompt, SamplingParams, Score

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)

REWARD = """
REWARD_TYPE = "sequential"

def reward(completion):
    names = {"response", "response_length", "ground_truth", "prompt", "finish_reason", "row", "turns", "image_sizes"}
    assert set(completion) == names
    digit, _, seed = completion["response"].partition(" ")
    return {
        "overall": float(digit == completion["ground_truth"]),
        "length": completion["response_length"],
        "seed": float(seed),
        "stopped": completion["finish_reason"] == "stop",
        "has_prompt": completion["prompt"] == "How many?",
        "level": completion["row"]["level"],
    }
"""


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    pool = RewardPool(
        f"{tmp_path / 'reward.py'}:reward", kwargs={}, num_workers=1, timeout_seconds=10, max_failed_fraction=0.0
    )
    yield pool
    pool.close()


def make_prompts():
    return [
        Prompt(f"train:{i}", (1, 2, 3), None, text="How many?", ground_truth=str(i), row={"level": i}, image_refs=())
        for i in range(4)
    ]


def test_groups_come_in_order_with_their_scores(tokenizer, rewards):
    def complete(prompt, version, seed):
        return f"{2 * (int(prompt.ground_truth) // 2)} {seed % 1000}"  # correct for prompts with an even number

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)
    phases, prompts = Phases(), make_prompts()
    with engine.awake(NO_WEIGHTS, version=0):
        groups = collect(prompts, engine, rewards, SAMPLING, phase=phases)

    assert [group.prompt for group in groups] == prompts
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[1.0] * 3, [0.0] * 3] * 2
    assert all(rollout.score.outcome == "ok" for group in groups for rollout in group.rollouts)
    for level, group in enumerate(groups):
        for rollout in group.rollouts:
            completion, parts = rollout.completion, rollout.score.parts
            assert completion.text.split()[1] == str(int(parts["seed"]))
            assert (parts["stopped"], parts["has_prompt"], parts["level"]) == (1.0, 1.0, level)
            assert parts["length"] == len(completion.token_ids)
    assert phases.announced == [("gen", 12, 12), ("reward", None, 0)]


def test_no_prompts_give_no_groups(tokenizer, rewards):
    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    with engine.awake(NO_WEIGHTS, version=0):
        assert collect([], engine, rewards, SAMPLING, phase=Phases()) == []


class FailingEngine(FakeEngine):
    """A fake engine that fails to sample the prompts of these indices."""

    failing: tuple[int, ...] = ()

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        def forward_group(index, row):
            on_group(index, [] if index in self.failing else row)

        rows = super().generate(prompts, sampling, on_progress=on_progress, on_group=forward_group)
        return [[] if index in self.failing else row for index, row in enumerate(rows)]


def test_a_prompt_that_the_engine_fails_to_sample_has_no_group(tokenizer, rewards):
    engine = FailingEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    engine.failing = (0, 2)
    prompts = make_prompts()
    with engine.awake(NO_WEIGHTS, version=0):
        groups = collect(prompts, engine, rewards, SAMPLING, phase=Phases())
    assert [group.prompt for group in groups] == [prompts[1], prompts[3]]
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[1.0] * 3, [0.0] * 3]


def test_an_engine_that_fails_for_every_prompt_raises(tokenizer, rewards):
    engine = FailingEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    engine.failing = (0, 1, 2, 3)
    with (
        engine.awake(NO_WEIGHTS, version=0),
        pytest.raises(EngineError, match="failed to sample any of 4 prompts"),
    ):
        collect(make_prompts(), engine, rewards, SAMPLING, phase=Phases())


# Writes a file for each completion that it scored, and returns how many completions it scored in
# one call.
RECORDING_REWARD = """
import pathlib

REWARD_TYPE = {contract!r}

def score(completion, batch_size):
    if completion["ground_truth"] in {failing!r}:
        raise ValueError("no")
    (pathlib.Path({folder!r}) / ("scored " + completion["ground_truth"])).touch()
    return {{"overall": float(completion["ground_truth"]), "batch_size": batch_size}}

def reward(completions):
    if REWARD_TYPE == "sequential":
        return score(completions, 1)
    return [score(completion, len(completions)) for completion in completions]
"""


def recording_rewards(folder, contract, *, failing=(), max_failed_fraction=0.0):
    (folder / "recording.py").write_text(
        RECORDING_REWARD.format(contract=contract, failing=failing, folder=str(folder))
    )
    spec = f"{folder / 'recording.py'}:reward"
    return closing(
        RewardPool(spec, kwargs={}, num_workers=1, timeout_seconds=20, max_failed_fraction=max_failed_fraction)
    )


@pytest.mark.parametrize("contract", ["sequential", "batch"])
def test_completions_are_scored_before_the_last_one_is_sampled(tokenizer, tmp_path, contract):
    def complete(prompt, version, seed):
        if prompt.ground_truth == "3":  # the test's time limit ends the wait if nothing is scored
            while not (tmp_path / "scored 0").exists():
                time.sleep(0.005)
        return "1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)
    with recording_rewards(tmp_path, contract) as rewards, engine.awake(NO_WEIGHTS, version=0):
        groups = collect(make_prompts(), engine, rewards, SAMPLING, phase=Phases())
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[i] * 3 for i in range(4)]
    batch_size = 1 if contract == "sequential" else 3  # a group
    assert {rollout.score.parts["batch_size"] for group in groups for rollout in group.rollouts} == {batch_size}


def test_reward_workers_remain_usable_after_an_engine_error(tokenizer, rewards):
    def complete(prompt, version, seed):
        if prompt.ground_truth == "2":
            raise EngineError("out of memory")
        return "1 1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)
    prompts = make_prompts()
    with engine.awake(NO_WEIGHTS, version=0):
        with pytest.raises(EngineError, match="out of memory"):
            collect(prompts, engine, rewards, SAMPLING, phase=Phases())
        groups = collect(prompts[:2], engine, rewards, SAMPLING, phase=Phases())
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.extended
def test_too_many_reward_failures_stop_the_sampling(tokenizer, tmp_path):
    sampled = []

    def complete(prompt, version, seed):
        sampled.append(prompt.prompt_id)
        time.sleep(0.01)
        return "1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)
    prompts = make_prompts() * 200
    with (
        recording_rewards(tmp_path, "sequential", failing=("0",)) as rewards,
        engine.awake(NO_WEIGHTS, version=0),
        pytest.raises(RewardError, match="could not score 1 of 2400 completions"),
    ):
        collect(prompts, engine, rewards, SAMPLING, phase=Phases())
    assert len(sampled) < 2400


# Returns the reward of a completion, the number of completions in its call, and for whom it was.
BASELINE_REWARD = """
REWARD_TYPE = {contract!r}

def score(completion, batch_size):
    return {{"overall": float(len(completion["response"])), "batch_size": batch_size}}

def reward(completions):
    if REWARD_TYPE == "sequential":
        return score(completions, 1)
    return [score(completion, len(completions)) for completion in completions]
"""

WITH_BASELINE = replace(SAMPLING, n=2, with_baseline=True)


def complete_with_seed(prompt, version, seed):
    return "x" * (1 + seed % 9)


def collect_in_parts(prompts, engine, rewards, sampling):
    """Return the groups of two calls, the second of which continues what the first has begun."""
    first = collect_until(prompts, engine, rewards, sampling, Until(1), phase=Phases())
    begun = tuple(completions for _, completions in first.unfinished)
    assert begun
    assert all(len(completions) == sampling.num_completions for completions in begun)
    rest = [prompt for prompt, _ in first.unfinished]
    until = Until(len(rest), begun=begun)
    second = collect_until(rest, engine, rewards, sampling, until, phase=Phases())
    assert second.unfinished == []
    return sorted([*first.groups, *second.groups], key=lambda group: group.prompt.prompt_id)


def collect_ended(prompts, engine, rewards, sampling):
    groups = []
    until = Until(len(prompts))
    unfinished = collect_as_they_end(
        prompts, engine, rewards, sampling, until, phase=Phases(), on_scored=groups.append, min_counted=0
    )
    assert unfinished == []
    return sorted(groups, key=lambda group: group.prompt.prompt_id)


def collect_all(prompts, engine, rewards, sampling):
    return collect(prompts, engine, rewards, sampling, phase=Phases())


@pytest.mark.parametrize("contract", ["sequential", "batch", "group"])
@pytest.mark.parametrize("collects", [collect_all, collect_in_parts, collect_ended])
def test_the_greedy_completion_of_a_group_is_its_baseline_and_scored_by_itself(tokenizer, tmp_path, contract, collects):
    (tmp_path / "reward.py").write_text(BASELINE_REWARD.format(contract=contract))
    engine = FakeEngine(
        tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete_with_seed, tokens_per_step=1
    )
    prompts = make_prompts()
    with (
        closing(
            RewardPool(
                f"{tmp_path / 'reward.py'}:reward",
                kwargs={},
                num_workers=1,
                timeout_seconds=20,
                max_failed_fraction=0.0,
            )
        ) as rewards,
        engine.awake(NO_WEIGHTS, version=0),
    ):
        plain = collect_all(prompts, engine, rewards, replace(WITH_BASELINE, with_baseline=False))
        groups = collects(prompts, engine, rewards, WITH_BASELINE)
    assert [group.prompt for group in groups] == prompts
    for group, without in zip(groups, plain, strict=True):
        assert without.baseline is None
        assert group.baseline is not None
        assert set(group.baseline.completion.sampling_logprobs) == {0.0}
        assert group.baseline.score.overall == len(group.baseline.completion.text)
        assert group.baseline.score.parts["batch_size"] == 1
        for rollout in group.rollouts:
            assert set(rollout.completion.sampling_logprobs) == {-1.0}
            assert rollout.score.overall == len(rollout.completion.text)
        if collects is collect_all:  # the same lists as without
            assert group.rollouts == without.rollouts
        elif contract == "group":
            assert [rollout.score.parts["batch_size"] for rollout in group.rollouts] == [2.0, 2.0]


def test_progress_counts_baselines_and_a_group_without_its_baseline_is_not_complete(tokenizer, rewards):
    def complete(prompt, version, seed):
        if prompt.ground_truth == "1" and seed == greedy_seed:
            return "1 1 " * 20
        return "1 1"

    greedy_seed = sample_seed(7, draw=0, prompt_id="train:1", sample=2)
    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete, tokens_per_step=1)
    phases, prompts = Phases(), make_prompts()
    with engine.awake(NO_WEIGHTS, version=0):
        found = collect_until(prompts, engine, rewards, WITH_BASELINE, Until(3), phase=phases)
    assert [group.prompt for group in found.groups] == [prompts[0], prompts[2], prompts[3]]
    [(prompt, row)] = found.unfinished
    assert prompt is prompts[1]
    assert [each.finish_reason for each in row] == ["stop", "stop", "unfinished"]
    assert phases.announced[0] == ("gen", 12, 11)


class BrokenEnvironments(FakeEngine):
    """A fake engine some of whose completions have an environment that failed."""

    broken = (("train:2", 1), ("train:3", 2))

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        def break_row(index, row):
            broken = [(prompts[index].prompt_id, sample) in self.broken for sample in range(len(row))]
            return [
                replace(each, error="it broke") if is_broken and not each.is_unfinished else each
                for each, is_broken in zip(row, broken, strict=True)
            ]

        def forward_group(index, row):
            on_group(index, break_row(index, row))

        rows = super().generate(prompts, sampling, until=until, on_progress=on_progress, on_group=forward_group)
        return [break_row(index, row) for index, row in enumerate(rows)]


@pytest.mark.parametrize("contract", ["sequential", "batch", "group"])
@pytest.mark.parametrize("collects", [collect_all, collect_in_parts, collect_ended])
def test_completions_whose_environment_failed_are_not_scored(tokenizer, tmp_path, contract, collects):
    (tmp_path / "reward.py").write_text(BASELINE_REWARD.format(contract=contract))
    engine = BrokenEnvironments(
        tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete_with_seed, tokens_per_step=1
    )
    pool = RewardPool(
        f"{tmp_path / 'reward.py'}:reward", kwargs={}, num_workers=1, timeout_seconds=20, max_failed_fraction=0.0
    )
    with closing(pool) as rewards, engine.awake(NO_WEIGHTS, version=0):
        groups = collects(make_prompts(), engine, rewards, WITH_BASELINE)
    for group in groups:
        for sample, rollout in enumerate([*group.rollouts, group.baseline]):
            if (group.prompt.prompt_id, sample) in BrokenEnvironments.broken:
                assert rollout.score == Score(0.0, {}, "failed", "it broke")
            else:
                assert rollout.score.outcome == "ok"
                assert rollout.score.overall == len(rollout.completion.text)
