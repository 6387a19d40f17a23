"""The fake engine satisfies the rollout protocol as the real ones do."""

import json
from dataclasses import replace

import pytest

from support.rollout import NO_WEIGHTS, drawn
from trigon.rollout.fake import FakeEngine
from trigon.system.trace import NUM_DECODE_STEPS, DecodeTracer
from trigon.types import Prompt, SamplingParams

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)


def prompt(name="train:0"):
    return Prompt(name, token_ids=(1, 2, 3), vision=None, text="How many?", ground_truth="3", row={}, image_refs=())


def engine(tokenizer, complete=lambda prompt, version, seed: f"{prompt.ground_truth} {version}"):
    return FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)


@pytest.mark.parametrize(
    ("text", "temperature", "logprob", "reason"),
    [("3 4", 1.0, -1.0, "stop"), ("3 4", 0.0, 0.0, "stop"), ("one two three " * 20, 1.0, -1.0, "length")],
    ids=["sampled", "greedy", "cut"],
)
def test_a_completion_is_the_text_of_the_function_and_a_stop_token(tokenizer, text, temperature, logprob, reason):
    fake, counts = engine(tokenizer, complete=lambda prompt, version, seed: text), []
    with fake.awake(NO_WEIGHTS, version=4):
        [[completion, _]] = fake.generate(
            [prompt()], replace(SAMPLING, temperature=temperature), on_progress=counts.append
        )
    assert completion.token_ids == (*tokenizer.encode(text), tokenizer.eos_token_id)[:20]
    assert completion.sampling_logprobs == (logprob,) * len(completion.token_ids)
    assert (completion.finish_reason, completion.policy_version, counts) == (reason, 4, [2])


def traced_engine(tokenizer, folder, **names):
    return FakeEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=lambda prompt, version, seed: "one two three " * 20,
        tokens_per_step=1,
        tracer=DecodeTracer(folder, steps=(2, 5), **names),
    )


def num_decode_steps(trace):
    return [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]].count("decode step")


@pytest.mark.parametrize(
    ("names", "length", "traced", "name"),
    [
        ({"rank": None}, 20, NUM_DECODE_STEPS, "step_000002.decode.json"),
        ({"rank": 1}, 3, 3, "step_000002.decode.rank_1.json"),  # all that there are
        ({"rank": 0, "pool": "sampler_3"}, 20, NUM_DECODE_STEPS, "step_000002.decode.sampler_3.rank_0.json"),
    ],
)
def test_decode_steps_of_the_first_call_of_a_traced_step_are_traced(tokenizer, tmp_path, names, length, traced, name):
    fake, sampling = traced_engine(tokenizer, tmp_path, **names), replace(SAMPLING, max_tokens=length)
    with fake.awake(NO_WEIGHTS, version=0):
        fake.generate(drawn([prompt("a"), prompt("b")], 1), sampling)
        assert list(tmp_path.iterdir()) == []
        fake.generate(drawn([prompt("a"), prompt("b")], 2), sampling)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert num_decode_steps(tmp_path / name) == traced
        (tmp_path / name).unlink()
        fake.generate(drawn([prompt("a")], 2), sampling)  # a further round of sampling, or a validation
        assert list(tmp_path.iterdir()) == []


def test_a_traced_call_that_is_interrupted_writes_its_trace(tokenizer, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    fake = traced_engine(tokenizer, tmp_path, rank=None)
    with fake.awake(NO_WEIGHTS, version=0), pytest.raises(KeyboardInterrupt):
        fake.generate(drawn([prompt()], 2), SAMPLING, on_progress=interrupt)
    assert num_decode_steps(tmp_path / "step_000002.decode.json") == 1
