"""The messages of the first rank of a replica to the others. The ranks are threads."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from trigon.errors import RolloutError
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.rollout.vllm.leader import follow, leading
from trigon.system.trace import DecodeTracer
from trigon.types import Prompt, Vision


class Ranks:
    """Sends messages to another thread. other: whose messages are received; None: no others."""

    def __init__(self, other=None):
        self.calls = count()
        self.messages = SimpleQueue() if other is None else other.messages
        self.sizes = []

    def send(self, message, *, seconds=None):
        encoded = pickle.dumps(message)
        self.sizes.append(len(encoded))
        self.messages.put(encoded)

    def receive(self):
        return pickle.loads(self.messages.get(timeout=10))


class Turns:
    """Records the calls; a step ends the turn that was submitted first."""

    def __init__(self):
        self.calls = []
        self.names = []

    def submit(self, request):
        if request.max_tokens == 0:
            raise LookupError("a request that cannot be sampled")
        self.calls.append(request)
        self.names.append(request.name)

    def is_decoding(self):
        return True

    def step(self):
        self.calls.append("step")
        return [(self.names.pop(0), SampledTurn((1,), (0.0,), "", "stop"))]

    def stop(self):
        self.calls.append("stop")
        stopped, self.names = self.names, []
        return [(name, BegunTurn((), ())) for name in stopped]

    def stop_waiting(self):
        self.calls.append("stop_waiting")
        return [self.names.pop()]

    def abort(self):
        self.calls.append("abort")


def vision(seed, patches=4):
    pixels = torch.randn(patches, 8, generator=torch.Generator().manual_seed(seed))
    return Vision(pixels, torch.tensor([[1, 2, 2]]), (f"hash {seed}",))


def prompts_of_a_rank():
    visions = (None, vision(0), vision(1))
    return [Prompt(f"train:{i}", (i, 2), each, "", None, {}, ()) for i, each in enumerate(visions)]


def lead(run, follower=None):
    """Run a function with the TurnEngine of the first rank; return the calls of both ranks."""
    ranks, first, second = Ranks(), Turns(), Turns() if follower is None else follower
    others_ranks = Ranks(ranks)
    prompts, others = prompts_of_a_rank(), prompts_of_a_rank()
    with ThreadPoolExecutor(1) as threads, DecodeTracer(Path(), rank=1, steps=()).call(0) as trace:
        following = threads.submit(follow, second, others_ranks, others, trace)
        try:
            with leading(first, ranks, prompts) as turns:
                run(turns, prompts)
        finally:
            following.result(timeout=10)
    return first.calls, second.calls, others, ranks.sizes


def request(prompt, name, *visions, **changes):
    shown = () if prompt.vision is None else (prompt.vision,)
    return replace(TurnRequest(name, prompt, (*prompt.token_ids, 7), (*shown, *visions), 9, seed=3), **changes)


def test_the_others_get_the_same_calls_with_their_own_prompts():
    observed = vision(5)

    def run(turns, prompts):
        turns.submit(request(prompts[0], "0.0.0", stop=("end",)))
        turns.submit(request(prompts[2], "2.0.0", begun=(7,)))
        assert turns.is_decoding()
        assert [name for name, _ in turns.step()] == ["0.0.0"]
        turns.submit(request(prompts[2], "2.1.0", observed))
        turns.submit(request(prompts[0], "0.0.1"))
        assert turns.stop_waiting() == ["0.0.1"]
        turns.step()
        turns.submit(request(prompts[1], "1.0.0"))
        assert [name for name, _ in turns.stop()] == ["2.1.0", "1.0.0"]
        turns.abort()

    calls, followed, prompts, _ = lead(run)
    assert len(calls) == len(followed) == 10
    for call, same in zip(calls, followed, strict=True):
        if isinstance(call, str):
            assert call == same
            continue
        plain = [field.name for field in fields(call) if field.name not in ("prompt", "visions")]
        assert [getattr(call, name) for name in plain] == [getattr(same, name) for name in plain]
        assert any(same.prompt is prompt for prompt in prompts)
        assert same.prompt.prompt_id == call.prompt.prompt_id
        assert [each.hashes for each in same.visions] == [each.hashes for each in call.visions]
    assert followed[1].visions[0] is prompts[2].vision
    assert torch.equal(followed[3].visions[1].pixel_values, observed.pixel_values)


def test_pixels_of_an_observation_are_sent_once_and_those_of_prompts_never():
    observed = vision(5, patches=10_000)

    def run(turns, prompts):
        for number in range(3):
            turns.submit(request(prompts[1], f"1.0.{number}", observed))
            turns.step()

    _, followed, _, sizes = lead(run)
    large, *small = sizes
    assert 320_000 < large < 330_000
    assert max(small) < 1024
    assert len({id(call.visions[1]) for call in followed if call != "step"}) == 1


def test_an_error_of_the_first_rank_ends_the_call_of_the_others_with_what_was_submitted():
    def run(turns, prompts):
        turns.submit(request(prompts[0], "0.0.0"))
        turns.submit(request(prompts[0], "0.1.0", max_tokens=0))

    follower = Turns()
    with pytest.raises(LookupError, match="cannot be sampled"):
        lead(run, follower)
    assert [call.name for call in follower.calls] == ["0.0.0"]


def test_what_was_sent_after_a_rank_had_failed_is_not_of_the_next_call():
    class Failing(Turns):
        def step(self):
            raise RolloutError("vLLM failed")

    first = Ranks()
    second = Ranks(first)

    def lead_and_follow(kind):
        prompts, followed = prompts_of_a_rank(), kind()
        errors = []
        try:
            with leading(kind(), first, prompts) as turns:
                turns.submit(request(prompts[0], "0.0.0"))
                turns.step()
        except RolloutError as error:
            errors.append(error)
        try:
            with DecodeTracer(Path(), rank=1, steps=()).call(0) as trace:
                follow(followed, second, prompts, trace)
        except RolloutError as error:
            errors.append(error)
        return len(errors), len(followed.calls)

    assert lead_and_follow(Failing) == (2, 1)
    assert first.messages.qsize() == 1  # the end of the call
    assert lead_and_follow(Turns) == (0, 2)
    assert first.messages.empty()


def test_another_number_of_turns_raises_on_the_rank_that_differs():
    class Faster(Turns):
        def step(self):
            return [*super().step(), *super().step()]

    def run(turns, prompts):
        for sample in range(3):
            turns.submit(request(prompts[0], f"0.{sample}.0"))
        turns.step()
        turns.step()

    with pytest.raises(RolloutError, match="this one samples 1 turns, and the first one 2"):
        lead(run, Faster())
