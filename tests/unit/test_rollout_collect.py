"""collect() samples and scores groups, in order; scoring overlaps with sampling."""

import time
from dataclasses import replace

import pytest

from support.rewards import reward_pool
from support.rollout import NO_WEIGHTS, Phases
from trigon.errors import EngineError
from trigon.rollout.collect import collect, collect_until, collect_until_interrupted
from trigon.rollout.episode_state import sample_seed
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Interruption, Work
from trigon.types import Prompt, SamplingParams, Score

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)

# The length of a response, what its request says, and the number of completions in its call. A
# file shows that it was scored.
REWARD = """
import pathlib

REWARD_TYPE = {contract!r}

def score(completion, batch_size):
    pathlib.Path({folder!r}, "scored " + completion["ground_truth"]).touch()
    return {{
        "overall": len(completion["response"]),
        "length": completion["response_length"],
        "stopped": completion["finish_reason"] == "stop",
        "level": completion["row"]["level"],
        "batch_size": batch_size,
    }}

def main(completions):
    if REWARD_TYPE == "sequential":
        return score(completions, 1)
    return [score(completion, len(completions)) for completion in completions]
"""


def open_rewards(folder, contract="sequential"):
    return reward_pool(folder, REWARD.format(contract=contract, folder=str(folder)), max_failed_fraction=0.0)


def complete_with_seed(prompt, version, seed):
    return "x" * (1 + seed % 9)


def make_engine(tokenizer, complete=complete_with_seed, *, kind=FakeEngine, tokens_per_step=None):
    stop = tokenizer.eos_token_id
    return kind(tokenizer=tokenizer, stop_token_id=stop, complete=complete, tokens_per_step=tokens_per_step)


def make_prompts():
    return [
        Prompt(f"train:{i}", (1, 2, 3), None, text="How many?", ground_truth=str(i), row={"level": i}, image_refs=())
        for i in range(4)
    ]


@pytest.mark.parametrize("contract", ["sequential", "batch"])
def test_groups_come_in_order_and_are_scored_before_the_last_one_is_sampled(tokenizer, tmp_path, contract):
    def complete(prompt, version, seed):
        if prompt.ground_truth == "3":  # the test's time limit ends the wait if nothing is scored
            while not (tmp_path / "scored 0").exists():
                time.sleep(0.005)
        return complete_with_seed(prompt, version, seed)

    phases, prompts, engine = Phases(), make_prompts(), make_engine(tokenizer, complete)
    with open_rewards(tmp_path, contract) as rewards, engine.awake(NO_WEIGHTS, version=0):
        groups = collect(prompts, engine, rewards, SAMPLING, phase=phases)
    assert [group.prompt for group in groups] == prompts
    for level, group in enumerate(groups):
        for rollout in group.rollouts:
            completion, score = rollout.completion, rollout.score
            assert (score.outcome, score.overall) == ("ok", len(completion.text))
            assert (score.parts["stopped"], score.parts["level"]) == (1.0, level)
            assert score.parts["length"] == len(completion.token_ids)
            assert score.parts["batch_size"] == (1 if contract == "sequential" else 3)  # a group
    assert phases.announced == [("gen", 12, 12), ("reward", None, 0)]


class FailingEngine(FakeEngine):
    """A fake engine that fails to sample the prompts of these indices."""

    failing: tuple[int, ...] = ()

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        def forward_group(index, row):
            on_group(index, [] if index in self.failing else row)

        rows = super().generate(prompts, sampling, on_progress=on_progress, on_group=forward_group)
        return [[] if index in self.failing else row for index, row in enumerate(rows)]


def test_a_prompt_that_the_engine_fails_to_sample_has_no_group(tokenizer, tmp_path):
    engine, prompts = make_engine(tokenizer, kind=FailingEngine), make_prompts()
    with open_rewards(tmp_path) as rewards, engine.awake(NO_WEIGHTS, version=0):
        engine.failing = (0, 1, 2, 3)
        with pytest.raises(EngineError, match="failed to sample any of 4 prompts"):
            collect(prompts, engine, rewards, SAMPLING, phase=Phases())
        engine.failing = (0, 2)
        groups = collect(prompts, engine, rewards, SAMPLING, phase=Phases())  # reward workers remain usable
        assert collect([], engine, rewards, SAMPLING, phase=Phases()) == []
    assert [group.prompt for group in groups] == [prompts[1], prompts[3]]
    assert [score.overall for group in groups for score in (each.score for each in group.rollouts)] == [
        len(rollout.completion.text) for group in groups for rollout in group.rollouts
    ]


WITH_BASELINE = replace(SAMPLING, n=2, with_baseline=True)


def collect_in_parts(prompts, engine, rewards, sampling):
    """Return the groups of two calls, the second of which continues what the first has begun."""
    work = [Work(prompt) for prompt in prompts]
    first = collect_until(work, engine, rewards, sampling, num_groups=1, phase=Phases())
    left = first.unfinished
    assert left
    assert all(len(each.completions) == sampling.num_completions for each in left)
    second = collect_until(left, engine, rewards, sampling, num_groups=len(left), phase=Phases())
    assert second.unfinished == []
    groups = [*first.groups, *second.groups]
    rollouts = [rollout for group in groups for rollout in (*group.rollouts, *filter(None, [group.baseline]))]
    assert first.num_tokens + second.num_tokens == sum(len(rollout.completion.token_ids) for rollout in rollouts)
    return sorted(groups, key=lambda group: group.prompt.prompt_id)


def collect_ended(prompts, engine, rewards, sampling):
    groups = []
    work, interruption = [Work(prompt) for prompt in prompts], Interruption()
    unfinished = collect_until_interrupted(
        work, engine, rewards, sampling, interruption, phase=Phases(), on_scored=groups.append, min_counted=0
    )
    assert unfinished == []
    return sorted(groups, key=lambda group: group.prompt.prompt_id)


def collect_all(prompts, engine, rewards, sampling):
    return collect(prompts, engine, rewards, sampling, phase=Phases())


EVERY_WAY = pytest.mark.parametrize(
    ("contract", "collects"),
    [("sequential", collect_all), ("batch", collect_in_parts), ("group", collect_in_parts), ("group", collect_ended)],
)


@EVERY_WAY
def test_the_greedy_completion_of_a_group_is_its_baseline_and_scored_by_itself(tokenizer, tmp_path, contract, collects):
    engine, prompts = make_engine(tokenizer, tokens_per_step=1), make_prompts()
    with open_rewards(tmp_path, contract) as rewards, engine.awake(NO_WEIGHTS, version=0):
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


def test_progress_counts_baselines_and_a_group_without_its_baseline_is_not_complete(tokenizer, tmp_path):
    def complete(prompt, version, seed):
        if prompt.ground_truth == "1" and seed == greedy_seed:
            return "1 1 " * 20
        return "1 1"

    greedy_seed = sample_seed(7, draw=0, prompt_id="train:1", sample=2)
    engine, phases, prompts = make_engine(tokenizer, complete, tokens_per_step=1), Phases(), make_prompts()
    with open_rewards(tmp_path) as rewards, engine.awake(NO_WEIGHTS, version=0):
        work = [Work(prompt) for prompt in prompts]
        found = collect_until(work, engine, rewards, WITH_BASELINE, num_groups=3, phase=phases)
    assert [group.prompt for group in found.groups] == [prompts[0], prompts[2], prompts[3]]
    [left] = found.unfinished
    assert left.prompt is prompts[1]
    assert [each.finish_reason for each in left.completions] == ["stop", "stop", "unfinished"]
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


@EVERY_WAY
def test_completions_whose_environment_failed_are_not_scored(tokenizer, tmp_path, contract, collects):
    engine = make_engine(tokenizer, kind=BrokenEnvironments, tokens_per_step=1)
    with open_rewards(tmp_path, contract) as rewards, engine.awake(NO_WEIGHTS, version=0):
        groups = collects(make_prompts(), engine, rewards, WITH_BASELINE)
    for group in groups:
        for sample, rollout in enumerate([*group.rollouts, group.baseline]):
            if (group.prompt.prompt_id, sample) in BrokenEnvironments.broken:
                assert rollout.score == Score(0.0, {}, "failed", "it broke")
            else:
                assert rollout.score.outcome == "ok"
                assert rollout.score.overall == len(rollout.completion.text)
