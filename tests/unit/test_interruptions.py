"""Calls of a rollout engine that end early: what is left, and how the next call continues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.fake_runs import SAMPLING
from support.rollout import NO_WEIGHTS
from trigon.distributed.messages import for_sampling, pack, unpack
from trigon.distributed.worker import Worker, WorkerEngines
from trigon.rollout.episode_state import sample_seed, turn_seed
from trigon.rollout.episodes import Episodes
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.turns import BegunTurn, SampledTurn
from trigon.types import Prompt

LONG = replace(SAMPLING, n=2, max_tokens=40)


def prompt(number):
    return Prompt(f"train:{number}", (1, 2, 3), None, "?", str(number), {}, ())


def never_right(so_far, version, seed):
    return "no idea " * 20


def engine(tokenizer, complete=never_right, *, tokens_per_step=2, token_logprob=-1.0):
    return FakeEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=complete,
        token_logprob=token_logprob,
        tokens_per_step=tokens_per_step,
    )


@pytest.fixture(scope="module")
def letters(tokenizer):
    """Return a function that completes with a number of tokens, each of them one letter."""
    one = next(letter for letter in "xyz0" if len(tokenizer.encode(letter * 9, add_special_tokens=False)) == 9)

    def complete(so_far, version, seed):
        return one * max(0, int(so_far.ground_truth) - (len(so_far.token_ids) - 3))

    return complete


def test_each_token_keeps_its_version_and_its_log_probability(tokenizer, letters):
    first, second = engine(tokenizer, letters), engine(tokenizer, letters, token_logprob=-2.0)
    finished = []
    with first.awake(NO_WEIGHTS, version=3):
        rows = first.generate(
            [prompt(3), prompt(9)], LONG, until=Until(1), on_group=lambda index, _: finished.append(index)
        )
    assert finished == [0]
    assert [each.finish_reason for row in rows for each in row] == ["stop", "stop", "unfinished", "unfinished"]
    begun = rows[1][0]
    assert (len(begun.token_ids), begun.sampling_logprobs, begun.text) == (4, (-1.0,) * 4, "")
    assert begun.version_runs == ((3, 4),)
    with second.awake(NO_WEIGHTS, version=4):
        [row] = second.generate([prompt(9)], LONG, until=Until(1, begun=(tuple(rows[1]),)))
    for completion in row:
        assert completion.token_ids[:4] == begun.token_ids
        assert len(completion.token_ids) == 10
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert completion.sampling_logprobs == (-1.0,) * 4 + (-2.0,) * 6
        assert completion.policy_versions == completion.version_runs == ((3, 4), (4, 6))
        assert completion.policy_version == 4
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert len(completion.turns) == 1
        assert (completion.turns[0].start, completion.turns[0].end) == (0, 10)


def test_a_completion_continues_twice_and_under_the_same_weights_as_one(tokenizer, letters):
    fake, begun = engine(tokenizer, letters), ()
    limited = replace(LONG, max_tokens=6)
    with fake.awake(NO_WEIGHTS, version=0):
        [_, row] = fake.generate([prompt(1), prompt(30)], limited, until=Until(1))
        [row] = fake.generate([prompt(30)], limited, until=Until(1, begun=(tuple(row),)))
    assert [(len(each.token_ids), each.finish_reason) for each in row] == [(6, "length")] * 2
    for version in (0, 0, 1):
        with fake.awake(NO_WEIGHTS, version=version):
            rows = fake.generate([prompt(2), prompt(9)], LONG, until=Until(1, begun=begun))
        begun = ((), tuple(rows[1]))
    assert begun[1][0].version_runs == ((0, 8), (1, 2))
    with fake.awake(NO_WEIGHTS, version=1):
        [whole] = fake.generate([prompt(9)], LONG)
    assert begun[1][0].token_ids == whole[0].token_ids
    assert begun[1][0].finish_reason == "stop"


def test_what_continues_has_a_seed_of_its_own(tokenizer):
    seeds = []

    def complete(so_far, version, seed):
        seeds.append(seed)
        return "a b c d e f g h i j"

    fake = engine(tokenizer, complete)
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate([prompt(0)], LONG, until=Until(1, num_required=1))
        begun = tuple(replace(each, finish_reason="unfinished") for each in rows[0])
        fake.generate([prompt(0)], LONG, until=Until(1, begun=(begun,)))
    first = [sample_seed(LONG.seed, draw=0, prompt_id="train:0", sample=sample) for sample in (0, 1)]
    assert seeds == [*first, *(turn_seed(seed, 0, num_begun=len(begun[0].token_ids)) for seed in first)]
    assert len(set(seeds)) == 4


def test_required_groups_are_waited_for(tokenizer, letters):
    fake = engine(tokenizer, letters)
    prompts = [prompt(20), prompt(2), prompt(30)]
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate(prompts, LONG, until=Until(1, num_required=1))
        none = fake.generate(prompts, LONG, until=Until(0))
    assert [row[0].finish_reason for row in rows] == ["stop", "stop", "unfinished"]
    assert [len(each.token_ids) for row in none for each in row] == [0] * 6
    assert {each.finish_reason for row in none for each in row} == {"unfinished"}


def sample(fake, kind, *, after):
    """Return the completions of two prompts in a call that is interrupted after these passes."""
    interruption, ended, passes = Interruption(), [], []

    def on_progress(_):
        passes.append(1)
        if len(passes) == after:
            interruption.ask(kind)

    until = Until(2, interruption=interruption)
    if after == 0:
        interruption.ask(kind)
    with fake.awake(NO_WEIGHTS, version=3):
        rows = fake.generate(
            [prompt(1), prompt(2)],
            LONG,
            until=until,
            on_progress=on_progress,
            on_group=lambda i, _: ended.append(i),
        )
    return rows, ended


@pytest.mark.parametrize(("after", "tokens"), [(3, 6), (0, 0)], ids=["while it samples", "before it begins"])
def test_a_stop_keeps_the_tokens_of_all_that_has_not_ended(tokenizer, after, tokens):
    rows, ended = sample(engine(tokenizer), "stop", after=after)
    assert [(each.finish_reason, len(each.token_ids)) for row in rows for each in row] == [("unfinished", tokens)] * 4
    assert ended == []


def test_a_drain_lets_what_has_begun_end_and_begins_nothing(tokenizer):
    rows, ended = sample(engine(tokenizer), "drain", after=3)
    assert {each.finish_reason for row in rows for each in row} <= {"stop", "length"}
    assert sorted(ended) == [0, 1]
    # One prompt at a time: the second has not begun.
    rows, ended = sample(engine(tokenizer, tokens_per_step=None), "drain", after=1)
    assert [len(each.token_ids) > 0 for row in rows for each in row] == [True, True, False, False]
    assert {each.finish_reason for each in rows[1]} == {"unfinished"}
    assert ended == [0]
    rows, ended = sample(engine(tokenizer), "drain", after=0)
    assert ([len(each.token_ids) for row in rows for each in row], ended) == ([0] * 4, [])


def test_a_stop_is_not_undone_by_a_drain():
    interruption = Interruption()
    interruption.ask("stop")
    interruption.ask("drain")
    assert interruption.kind == "stop"


class OneByOne:
    """A TurnEngine that samples one turn per pass."""

    def __init__(self):
        self.pending = []

    def submit(self, request):
        self.pending.append(request)

    def is_decoding(self):
        return True

    def step(self):
        return [(self.pending.pop(0).name, SampledTurn((7,), (-1.0,), "x", "stop"))]

    def stop(self):
        stopped, self.pending = [(each.name, BegunTurn((), ())) for each in self.pending], []
        return stopped

    def stop_waiting(self):
        return [name for name, _ in self.stop()]

    def abort(self):
        self.pending.clear()


def test_a_group_of_which_a_drain_leaves_a_completion_is_announced_when_that_has_ended():
    episodes = Episodes(None, tokenizer=None, skip_special_tokens=True, stop_token_ids=(0,), turn_by_turn=True)
    interruption, ended = Interruption(), []

    def run(until, version):
        prompts = [prompt(1)]
        return episodes.run(
            OneByOne(),
            prompts,
            LONG,
            unprocessed=prompts,
            policy_version=version,
            until=until,
            on_progress=lambda _: interruption.ask("drain"),
            on_group=lambda index, _: ended.append(version),
        )

    [row] = run(Until(1, interruption=interruption), 3)
    assert ([each.finish_reason for each in row], ended) == (["stop", "unfinished"], [])
    [row] = run(Until(1, begun=(tuple(row),)), 5)
    assert [each.version_runs for each in row] == [((3, 1),), ((5, 1),)]
    assert ended == [5]


def test_a_worker_is_interrupted_in_the_call_that_is_meant_only(tokenizer, monkeypatch):
    monkeypatch.setattr("trigon.distributed.worker.ignore_stop_signals", lambda: None)  # of this process
    worker = Worker(0)
    asks = {1: 2, 2: 2}  # call -> the call that is interrupted while it runs

    class Asking(FakeEngine):
        def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
            def progress(k):
                on_progress(k)
                worker.interrupt(asks[worker._generation.number], "stop")

            return super().generate(prompts, sampling, until=until, on_progress=progress, on_group=on_group)

    fake = Asking(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=lambda so_far, version, seed: "no idea",
        tokens_per_step=1,
    )
    worker._engines = WorkerEngines(None, None, fake, None, replica_rank=0)
    until, prompts = Until(1), [prompt(1)]
    reasons = []
    with fake.awake(NO_WEIGHTS, version=3):
        for generation in (1, 2):
            worker.generate(pack((for_sampling(prompts, with_rows=False), until)), LONG, generation)
            [(_, message)] = worker._generation.groups
            reasons.append({each.finish_reason for each in unpack(message)})
    assert reasons == [{"stop"}, {"unfinished"}]
