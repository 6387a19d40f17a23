"""Requests that vLLM loses, an engine that fails, and a weight sync that fails half-way."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from support.rollout import make_vllm_engine
from trigon.errors import EngineError, RolloutError
from trigon.metrics import values
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.restart import RestartingEngine
from trigon.rollout.vllm.weights import itself
from trigon.system.stopping import SAME_COMMAND
from trigon.types import LocalWeights, Prompt, SamplingParams

pytestmark = [pytest.mark.faults, pytest.mark.vllm, pytest.mark.extended]

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def processors(tiny_model):
    return load_processors(str(tiny_model("qwen2")))


@pytest.fixture(scope="module")
def weights(tiny_model, processors):
    """Return other weights than those in the model folder: a new engine has to load them."""
    model = load_model(str(tiny_model("qwen2")), dtype=torch.float32, device="cpu")
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=())
    return {name: weight * 1.25 for name, weight in policy.named_weights()}


@pytest.fixture(scope="module")
def prompts(processors):
    texts = ("Which number does the dot stand on? " * 4, "What is 3 + 4?", "What is one and one and one and one?")
    return [
        Prompt(f"train:{i}", tuple(processors.tokenizer(text)["input_ids"]), None, text, None, {}, ())
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def engine(tiny_model, processors):
    engine = make_vllm_engine(tiny_model("qwen2"), processors)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine, weights, prompts):
    """Return the completions of an engine that does not fail."""
    with engine.awake(handle_of(weights), version=7):
        return engine.generate(prompts, SAMPLING)


def handle_of(weights, read=None):
    """Return a handle of the weights. read: gets the name of each tensor that is read."""

    def tensors(dtype=None):
        for name, weight in weights.items():
            if read is not None:
                read.append(name)
            yield name, weight

    return LocalWeights(tensors)


def lose(engine, monkeypatch, *, prompt, times, how="abort"):
    """Let running requests of a prompt be lost, `times` of them.

    how: "abort" without the engine's knowledge, or "error": vLLM reports that they have failed.
    """
    llm_engine = engine._llm_engine
    step, left = llm_engine.step, times

    def step_and_lose():
        nonlocal left
        outputs = step()
        if how == "error":
            for output in outputs:
                if left and output.finished and output.request_id.startswith(f"{prompt}."):
                    output.outputs[0].finish_reason = "error"
                    left -= 1
            return outputs
        running = [state.external_req_id for state in llm_engine.output_processor.request_states.values()]
        for name in running:
            if left and name.startswith(f"{prompt}."):
                llm_engine.abort_request([name])
                left -= 1
        return outputs

    monkeypatch.setattr(llm_engine, "step", step_and_lose)


@pytest.mark.parametrize(("how", "times"), [("abort", 1), ("abort", 3), ("error", 3)])
def test_lost_requests_are_repeated_with_the_same_completions_and_counted(
    engine, weights, prompts, expected, monkeypatch, how, times
):
    engine.pop_metrics()
    lose(engine, monkeypatch, prompt=1, times=times, how=how)
    done, groups = [], []
    with engine.awake(handle_of(weights), version=7):
        rows = engine.generate(prompts, SAMPLING, on_progress=done.append, on_group=lambda *group: groups.append(group))
    assert [[each.token_ids for each in row] for row in rows] == [[each.token_ids for each in row] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for each, undisturbed in zip(row, other, strict=True):
            assert each.sampling_logprobs == pytest.approx(undisturbed.sampling_logprobs, abs=1e-6)
    assert sum(done) == 9
    assert dict(groups) == dict(enumerate(rows))
    assert values(engine.pop_metrics()) == {"rollout/retried_requests": times}
    assert values(engine.pop_metrics()) == {"rollout/retried_requests": 0}


@pytest.mark.parametrize("how", ["abort", "error"])
def test_a_request_that_is_lost_twice_leaves_its_prompt_without_completions(
    engine, weights, prompts, expected, monkeypatch, how
):
    lose(engine, monkeypatch, prompt=1, times=100, how=how)
    groups = []
    with engine.awake(handle_of(weights), version=7):
        rows = engine.generate(prompts, SAMPLING, on_group=lambda *group: groups.append(group))
        assert [len(row) for row in rows] == [3, 0, 3]
        assert dict(groups) == dict(enumerate(rows))
        monkeypatch.undo()
        assert engine.generate(prompts, SAMPLING) == expected


def memory_of(engine):
    """Return references to the model and the KV cache of an engine that do not keep them."""
    [model] = engine._llm_engine.apply_model(itself)
    runner = engine._llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return {"model": weakref.ref(model), "KV cache": weakref.ref(runner.kv_caches[0])}


def fail_to_compute(monkeypatch, *, at):
    """Let the forward pass of a vLLM engine fail at these calls, counted from 1."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    execute, calls = CPUModelRunner.execute_model, itertools.count(1)

    def failing(runner, *args, **kwargs):
        if next(calls) in at:
            raise RuntimeError("a kernel failed")
        return execute(runner, *args, **kwargs)

    monkeypatch.setattr(CPUModelRunner, "execute_model", failing)


def fail_to_load(monkeypatch, *, at):
    """Let vLLM's loader of a fused parameter fail at these calls, counted from 1."""
    from vllm.model_executor.parameter import _ColumnvLLMParameter

    load, calls = _ColumnvLLMParameter.load_qkv_weight, itertools.count(1)

    def failing(parameter, loaded_weight, **kwargs):
        if next(calls) in at:
            raise RuntimeError("no memory for a copy")
        load(parameter, loaded_weight, **kwargs)

    monkeypatch.setattr(_ColumnvLLMParameter, "load_qkv_weight", failing)


def test_an_engine_that_fails_is_started_again_once_with_the_same_bits(engine, weights, prompts, expected, monkeypatch):
    warnings, done, groups, offloaded = [], [], [], []

    def restart():
        offloaded.append(engine._awake)
        engine.restart()

    restarting = RestartingEngine(
        engine,
        restart,
        warn=warnings.append,
        same_command=SAME_COMMAND,
    )
    restarting.pop_metrics()
    before = memory_of(engine)
    with restarting.awake(handle_of(weights), version=7):
        fail_to_compute(monkeypatch, at=[5])
        rows = restarting.generate(
            prompts, SAMPLING, on_progress=done.append, on_group=lambda *group: groups.append(group)
        )
        assert rows == expected  # tokens and log-probabilities, bit for bit
        assert restarting.generate(prompts, SAMPLING) == expected
    gc.collect()
    assert [name for name, part in before.items() if part() is not None] == []
    assert offloaded == [False]
    assert sum(done) == 9
    assert len(groups) == 3
    assert dict(groups) == dict(enumerate(rows))
    assert values(restarting.pop_metrics()) == {"rollout/engine_restarts": 1, "rollout/retried_requests": 0}
    [warning] = warnings
    assert "vLLM failed while it sampled: RuntimeError: a kernel failed" in warning
    assert "started again, and loads the trainer's weights" in warning

    monkeypatch.undo()
    with restarting.awake(handle_of(weights), version=8):
        fail_to_compute(monkeypatch, at=[2])
        with pytest.raises(RolloutError) as caught:
            restarting.generate(prompts, SAMPLING)
        assert "a kernel failed" in str(caught.value)
        assert "was already started again in this run, and has failed again" in str(caught.value)
        with pytest.raises(EngineError, match=r"cannot be used: it failed while it sampled\. Start a new one"):
            engine.generate(prompts, SAMPLING)
    assert len(warnings) == 1
    monkeypatch.undo()
    engine.restart()


def test_a_weight_sync_that_fails_half_way_is_made_again_by_a_new_engine(
    engine, weights, prompts, expected, monkeypatch
):
    read, warnings = [], []
    restarting = RestartingEngine(engine, engine.restart, warn=warnings.append, same_command=SAME_COMMAND)
    fail_to_load(monkeypatch, at=[2])
    with restarting.awake(handle_of(weights, read), version=9):
        rows = restarting.generate(prompts, SAMPLING)
    assert [[each.token_ids for each in row] for row in rows] == [[each.token_ids for each in row] for row in expected]
    assert [[each.sampling_logprobs for each in row] for row in rows] == [
        [each.sampling_logprobs for each in row] for row in expected
    ]
    # Also what was left when the loader failed: other ranks wait until all of it has been gathered.
    assert read == 2 * list(weights)
    [warning] = warnings
    assert "could not load the weights of policy version 9; the last tensor that it read is" in warning
    assert "no memory for a copy" in warning


@pytest.mark.parametrize(
    ("again", "state"),
    [(4, "it could not be started again"), (20, "its last weight sync did not finish")],
    ids=["start", "sync"],
)
def test_a_new_engine_that_fails_too_ends_the_run(engine, weights, prompts, monkeypatch, again, state):
    restarting = RestartingEngine(engine, engine.restart, warn=lambda text: None, same_command=SAME_COMMAND)
    # The new engine reads the model folder with the same loader: 12 calls, 3 for each bias as well.
    fail_to_load(monkeypatch, at=[2, again])
    with pytest.raises(RolloutError) as caught, restarting.awake(handle_of(weights), version=10):
        pytest.fail("it must not sample from mixed weights")
    assert str(caught.value).count("no memory for a copy") == 2
    with pytest.raises(EngineError, match=state):
        engine.generate(prompts, SAMPLING)
    monkeypatch.undo()
    engine.restart()
