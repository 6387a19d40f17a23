"""Prompts become scored groups: everything in order, and the reward function sees all there is to see, in time."""

import time
from contextlib import closing, contextmanager

import pytest
import torch

from trigon.errors import EngineError, RewardError
from trigon.models.load import load_processors
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect
from trigon.rollout.fake import FakeEngine
from trigon.types import Prompt, SamplingParams

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)

REWARD = """
REWARD_TYPE = "sequential"

def reward(answer):
    assert set(answer) == {"response", "response_length", "ground_truth", "prompt", "finish_reason", "row"}
    digit, _, seed = answer["response"].partition(" ")
    return {
        "overall": float(digit == answer["ground_truth"]),
        "length": answer["response_length"],
        "seed": float(seed),
        "stopped": answer["finish_reason"] == "stop",
        "asked": answer["prompt"] == "How many?",
        "level": answer["row"]["level"],
    }
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_processors(str(tiny_model("qwen2"))).tokenizer


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    pool = RewardPool(
        f"{tmp_path / 'reward.py'}:reward", kwargs={}, num_workers=1, timeout_seconds=10, max_failed_fraction=0.0
    )
    yield pool
    pool.close()


class Phases:
    """Remembers what was announced: (name, total, how far it came)."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def __call__(self, name, *, total=None):
        done = []
        yield done.append
        self.seen.append((name, total, sum(done)))


def prompts():
    return [
        Prompt(f"train:{i}", (1, 2, 3), None, text="How many?", ground_truth=str(i), row={"level": i}, image_refs=())
        for i in range(4)
    ]


def test_groups_come_in_order_with_their_scores(tokenizer, rewards):
    def answer(prompt, version, seed):
        return f"{2 * (int(prompt.ground_truth) // 2)} {seed % 1000}"  # right for the even prompts

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=answer)
    phases, asked = Phases(), prompts()
    with engine.awake(iter([("updates", torch.zeros(1))]), version=0):
        groups = collect(asked, engine, rewards, SAMPLING, step=1, phase=phases)

    assert [group.prompt for group in groups] == asked
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[1.0] * 3, [0.0] * 3] * 2
    assert all(rollout.score.outcome == "ok" for group in groups for rollout in group.rollouts)
    for level, group in enumerate(groups):
        for rollout in group.rollouts:
            completion, parts = rollout.completion, rollout.score.parts
            assert completion.text.split()[1] == str(int(parts["seed"]))
            assert (parts["stopped"], parts["asked"], parts["level"]) == (1.0, 1.0, level)
            assert parts["length"] == len(completion.token_ids)
    assert phases.seen == [("gen", 12, 12), ("reward", None, 0)]


def test_no_prompts_no_groups(tokenizer, rewards):
    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    with engine.awake(iter([("updates", torch.zeros(1))]), version=0):
        assert collect([], engine, rewards, SAMPLING, step=1, phase=Phases()) == []


class Failing(FakeEngine):
    """Fails to sample some prompts."""

    fails: tuple[int, ...] = ()

    def generate(self, prompts, sampling, *, step, on_progress=None, on_group=None):
        def hear(index, row):
            on_group(index, [] if index in self.fails else row)

        rows = super().generate(prompts, sampling, step=step, on_progress=on_progress, on_group=hear)
        return [[] if index in self.fails else row for index, row in enumerate(rows)]


def test_a_prompt_that_the_engine_fails_for_is_left_out(tokenizer, rewards):
    engine = Failing(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    engine.fails = (0, 2)
    asked = prompts()
    with engine.awake(iter([("updates", torch.zeros(1))]), version=0):
        groups = collect(asked, engine, rewards, SAMPLING, step=1, phase=Phases())
    assert [group.prompt for group in groups] == [asked[1], asked[3]]
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[1.0] * 3, [0.0] * 3]


def test_an_engine_that_fails_for_every_prompt_ends_the_run(tokenizer, rewards):
    engine = Failing(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "1 1")
    engine.fails = (0, 1, 2, 3)
    with (
        engine.awake(iter([("updates", torch.zeros(1))]), version=0),
        pytest.raises(EngineError, match="failed to sample any of 4 prompts"),
    ):
        collect(prompts(), engine, rewards, SAMPLING, step=1, phase=Phases())


# Tells by files what it has graded, and how many answers it was handed together.
NOTING = """
import pathlib

REWARD_TYPE = {contract!r}

def one(answer, together):
    if answer["ground_truth"] in {bad!r}:
        raise ValueError("no")
    (pathlib.Path({notes!r}) / ("graded " + answer["ground_truth"])).touch()
    return {{"overall": float(answer["ground_truth"]), "together": together}}

def reward(answers):
    return one(answers, 1) if REWARD_TYPE == "sequential" else [one(answer, len(answers)) for answer in answers]
"""


def noting(folder, contract, *, bad=(), max_failed_fraction=0.0):
    (folder / "noting.py").write_text(NOTING.format(contract=contract, bad=bad, notes=str(folder)))
    spec = f"{folder / 'noting.py'}:reward"
    return closing(
        RewardPool(spec, kwargs={}, num_workers=1, timeout_seconds=20, max_failed_fraction=max_failed_fraction)
    )


@pytest.mark.parametrize("contract", ["sequential", "batch"])
def test_answers_are_graded_before_the_last_is_sampled(tokenizer, tmp_path, contract):
    def answer(prompt, version, seed):
        if prompt.ground_truth == "3":  # the test's own time limit ends a wait in vain
            while not (tmp_path / "graded 0").exists():
                time.sleep(0.005)
        return "1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=answer)
    with noting(tmp_path, contract) as rewards, engine.awake(iter([]), version=0):
        groups = collect(prompts(), engine, rewards, SAMPLING, step=1, phase=Phases())
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[i] * 3 for i in range(4)]
    together = 1 if contract == "sequential" else 3  # a quarter of the twelve
    assert {rollout.score.parts["together"] for group in groups for rollout in group.rollouts} == {together}


def test_an_engine_that_fails_in_the_middle_leaves_the_graders_usable(tokenizer, rewards):
    def answer(prompt, version, seed):
        if prompt.ground_truth == "2":
            raise EngineError("out of memory")
        return "1 1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=answer)
    asked = prompts()
    with engine.awake(iter([]), version=0):
        with pytest.raises(EngineError, match="out of memory"):
            collect(asked, engine, rewards, SAMPLING, step=1, phase=Phases())
        groups = collect(asked[:2], engine, rewards, SAMPLING, step=1, phase=Phases())
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [[0.0] * 3, [1.0] * 3]


def test_too_many_failures_end_the_sampling(tokenizer, tmp_path):
    sampled = []

    def answer(prompt, version, seed):
        sampled.append(prompt.prompt_id)
        time.sleep(0.01)
        return "1"

    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=answer)
    many = prompts() * 200
    with (
        noting(tmp_path, "sequential", bad=("0",)) as rewards,
        engine.awake(iter([]), version=0),
        pytest.raises(RewardError, match="could not score 1 of 2400 completions"),
    ):
        collect(many, engine, rewards, SAMPLING, step=1, phase=Phases())
    assert len(sampled) < 2400
