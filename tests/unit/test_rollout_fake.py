"""The fake engine satisfies the rollout protocol as the real ones do."""

import json
from dataclasses import replace

import pytest
import torch

from support.rollout import NO_WEIGHTS, drawn
from trigon.errors import EngineError
from trigon.rollout.fake import FakeEngine
from trigon.rollout.seeds import sample_seed
from trigon.system.trace import NUM_DECODE_STEPS, DecodeTracer
from trigon.types import LocalWeights, Prompt, SamplingParams, WeightsHandle

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)


def prompt(name="train:0"):
    return Prompt(name, token_ids=(1, 2, 3), vision=None, text="How many?", ground_truth="3", row={}, image_refs=())


def engine(tokenizer, complete=lambda prompt, version, seed: f"{prompt.ground_truth} {version}"):
    return FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=complete)


def test_a_completion_is_the_text_of_the_function_and_a_stop_token(tokenizer):
    fake = engine(tokenizer)
    with fake.awake(NO_WEIGHTS, version=4):
        [[completion, _]] = fake.generate([prompt()], SAMPLING)
    assert completion.text == "3 4"
    assert completion.token_ids == (*tokenizer.encode("3 4"), tokenizer.eos_token_id)
    assert completion.sampling_logprobs == (-1.0,) * len(completion.token_ids)
    assert completion.finish_reason == "stop"
    assert completion.policy_version == 4


def test_a_long_completion_is_cut(tokenizer):
    fake = engine(tokenizer, complete=lambda prompt, version, seed: "one two three " * 20)
    with fake.awake(NO_WEIGHTS, version=0):
        [[completion, _]] = fake.generate([prompt()], SAMPLING)
    assert len(completion.token_ids) == 20
    assert completion.finish_reason == "length"


def test_each_sample_has_its_own_seed(tokenizer):
    fake = engine(tokenizer, complete=lambda prompt, version, seed: str(seed))
    with fake.awake(NO_WEIGHTS, version=0):
        [first, second] = fake.generate([prompt("a"), prompt("b")], SAMPLING)
    assert first[1].text == str(sample_seed(7, draw=0, prompt_id="a", sample=1))[: len(first[1].text)]
    assert len({completion.token_ids for completion in first + second}) == 4


def test_greedy_decoding_has_log_probabilities_of_zero(tokenizer):
    greedy = SamplingParams(n=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)
    fake = engine(tokenizer)
    with fake.awake(NO_WEIGHTS, version=0):
        [[completion]] = fake.generate([prompt()], greedy)
    assert set(completion.sampling_logprobs) == {0.0}


def test_weights_are_read_once_for_each_version(tokenizer):
    fake = engine(tokenizer)
    reads = []

    def read(dtype=None):
        reads.append("updates")
        yield "updates", torch.zeros(1)

    for version in (0, 0, 1):
        with fake.awake(LocalWeights(read), version=version):
            pass
    assert len(reads) == 2


def test_weights_of_another_process_are_rejected(tokenizer):
    with pytest.raises(EngineError, match=r"cannot load WeightsHandle.*weights\(\) of a train engine"):
        engine(tokenizer).awake(WeightsHandle(), version=0)


def test_progress_counts_completions(tokenizer):
    counts = []
    fake = engine(tokenizer)
    with fake.awake(NO_WEIGHTS, version=0):
        fake.generate([prompt("a"), prompt("b"), prompt("c")], SAMPLING, on_progress=counts.append)
    assert counts == [2, 2, 2]


def test_on_group_is_called_before_the_next_prompt_is_sampled(tokenizer):
    events = []

    def complete(prompt, version, seed):
        events.append(prompt.prompt_id)
        return "3"

    fake = engine(tokenizer, complete)
    with fake.awake(NO_WEIGHTS, version=0):
        rows = fake.generate(
            [prompt("a"), prompt("b")], SAMPLING, on_group=lambda index, row: events.append((index, row))
        )
    assert events == ["a", "a", (0, rows[0]), "b", "b", (1, rows[1])]


def test_generate_raises_while_the_engine_sleeps(tokenizer):
    fake = engine(tokenizer)
    with pytest.raises(EngineError, match="sleeps"):
        fake.generate([prompt()], SAMPLING)
    with fake.awake(NO_WEIGHTS, version=0):
        pass
    with pytest.raises(EngineError, match="sleeps"):
        fake.generate([prompt()], SAMPLING)


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
