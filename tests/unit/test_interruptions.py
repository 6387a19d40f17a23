"""Calls of a rollout engine that another thread ends: what continues, what is left and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.fake_runs import SAMPLING
from support.rollout import NO_WEIGHTS
from trigon.distributed.messages import for_sampling, pack, unpack
from trigon.distributed.worker import Worker, WorkerEngines
from trigon.rollout.episodes import Episodes
from trigon.rollout.fake import FakeEngine
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.turns import BegunTurn, SampledTurn
from trigon.types import Prompt

LONG = replace(SAMPLING, n=2, max_tokens=40)


def prompt(number):
    return Prompt(f"train:{number}", (1, 2, 3), None, "?", str(number), {}, ())


def engine(tokenizer, *, tokens_per_step):
    return FakeEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=lambda so_far, version, seed: "no idea " * 20,
        tokens_per_step=tokens_per_step,
    )


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
    rows, ended = sample(engine(tokenizer, tokens_per_step=2), "stop", after=after)
    assert [(each.finish_reason, len(each.token_ids)) for row in rows for each in row] == [("unfinished", tokens)] * 4
    assert ended == []


def test_a_drain_lets_what_has_begun_end_and_begins_nothing(tokenizer):
    rows, ended = sample(engine(tokenizer, tokens_per_step=2), "drain", after=3)
    assert {each.finish_reason for row in rows for each in row} <= {"stop", "length"}
    assert sorted(ended) == [0, 1]
    # One prompt at a time: the second has not begun.
    rows, ended = sample(engine(tokenizer, tokens_per_step=None), "drain", after=1)
    assert [len(each.token_ids) > 0 for row in rows for each in row] == [True, True, False, False]
    assert {each.finish_reason for each in rows[1]} == {"unfinished"}
    assert ended == [0]
    rows, ended = sample(engine(tokenizer, tokens_per_step=2), "drain", after=0)
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
