"""Episodes of several turns in the real engines, with images in observations."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from support.builders import make_builder
from support.episodes import Answer, LocalEnvironments, Observed, drawing, make_settings, with_pixels
from support.oracle import load_hugging_face, padded_episode
from support.rollout import handle_of, make_transformers_engine, make_vllm_settings
from support.videos import make_video
from trigon.data.turns import TurnTemplate
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_environment
from trigon.metrics import values
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.restart import RestartingEngine
from trigon.rollout.transformers import _TransformersTurns
from trigon.rollout.turns import TurnRequest
from trigon.rollout.vllm.turns import VllmTurns
from trigon.system.stopping import SAME_COMMAND
from trigon.types import SamplingParams

MAX_MODEL_LEN = 1024
SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=600, ignore_eos=False, seed=5)
SCENES = [
    pytest.param(("vllm", "qwen2"), id="vllm-qwen2", marks=[pytest.mark.vllm, pytest.mark.long]),
    pytest.param(("vllm", "qwen2_5_vl"), id="vllm-qwen2_5_vl", marks=pytest.mark.vllm),
    pytest.param(("vllm", "qwen3_vl"), id="vllm-qwen3_vl", marks=[pytest.mark.vllm, pytest.mark.long]),
    pytest.param(("transformers", "qwen2_5_vl"), id="transformers-qwen2_5_vl"),
]
QUESTION = "Which of the shapes in the drawing has the most sides? " * 3
HINT = "The drawing is turned by a quarter, and one of its shapes is hidden. " * 2


@dataclass
class Scene:
    """An engine with environments of this process, and what vLLM got and returned."""

    engine: Any
    processors: Any
    weights: Any
    environments: LocalEnvironments
    prompts: list
    is_vllm: bool
    outputs: list = field(default_factory=list)

    @cached_property
    def expected(self):
        """What a call gives that nothing disturbs."""
        return self.generate()

    def generate(self, prompts=None, sampling=SAMPLING, *, delay=None, version=0, engine=None, **callbacks):
        self.environments.delay = delay
        engine = engine or self.engine
        with engine.awake(handle_of(self.weights), version=version):
            return engine.generate(self.prompts if prompts is None else prompts, sampling, **callbacks)

    def record(self, monkeypatch):
        """Record vLLM's finished outputs from now on."""
        step, self.outputs = self.engine._llm_engine.step, []

        def recording_step():
            outputs = step()
            self.outputs += [output for output in outputs if output.finished]
            return outputs

        monkeypatch.setattr(self.engine._llm_engine, "step", recording_step)


def answer(row, actions):
    """Show an image at every turn where the model has any; the number of turns differs by row."""
    images = (drawing(31 * row["number"] + len(actions), 196, 196 + 28 * len(actions)),) if row["sees"] else ()
    return Answer(0, Observed(f"{HINT}{len(actions)} of 3.", images), 0.25, len(actions) == 2 + row["number"] % 2)


def make_prompts(processors):
    """Return prompts without generation prompt: of text, with an image, with two, with a video."""
    sees = processors.family.has_vision
    builder = make_builder(processors, process_images=False, max_prompt_length=512)
    rows = [(QUESTION, {}), ("Find x.", {})]
    if sees:
        rows += [
            ("<image>" + QUESTION, {"images": [drawing(200)]}),
            ("<image>Find <image>.", {"images": [drawing(90), drawing(91, 140, 56)]}),
        ]
        video = make_builder(processors, max_prompt_length=512)
        rows += [("<video>How many?", {"videos": [make_video()]})]
    prompts = []
    for number, (text, media) in enumerate(rows):
        row = {"problem": text, "answer": "", "number": number, "sees": sees, **media}
        prompts.append((video if "videos" in media else builder).build(row, f"train:{number}"))
    return prompts


@pytest.fixture(scope="module", params=SCENES)
def scene(request, tiny_model):
    name, model_type = request.param
    folder = tiny_model(model_type)
    # One token in twenty is a stop token, so that turns end.
    processors = replace(load_processors(str(folder)), stop_token_ids=tuple(range(0, 1000, 20)))
    environments = LocalEnvironments(answer)
    template = TurnTemplate(processors, max_image_pixels=1_000_000)
    settings = make_settings(environments, processors, template=template, max_turns=3)
    weights = load_weights(folder, processors)
    if name == "vllm":
        from trigon.rollout.vllm import VllmEngine

        # Prefixes are cached although the option is off.
        vllm_settings = make_vllm_settings(
            folder, max_model_len=MAX_MODEL_LEN, limit_images=2, shows_videos=True, enable_prefix_caching=False
        )
        engine: Any = VllmEngine(vllm_settings, processors, settings)
    else:
        engine = make_transformers_engine(folder, processors, max_model_len=MAX_MODEL_LEN, episodes=settings)
    yield Scene(engine, processors, weights, environments, make_prompts(processors), name == "vllm")
    engine.close()


def load_weights(folder, processors):
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    return {name: weight * 1.1 for name, weight in policy.named_weights()}


def bits(rows):
    """Return all of the completions, in a form that can be compared."""
    return [
        [(replace(each, vision=None), each.vision and (each.vision.encoded, each.vision.hashes)) for each in row]
        for row in rows
    ]


@torch.no_grad()
def max_difference(scene, rows):
    """Return the largest |log-probability difference| between engine and Hugging Face.

    One forward of each whole sequence, whose positions transformers computes.
    """
    model = load_hugging_face(Path(scene.processors.tokenizer.name_or_path), torch.float32)
    model.load_state_dict({name: weight * 1.1 for name, weight in model.state_dict().items()})
    differences = []
    for prompt, row in zip(scene.prompts, rows, strict=True):
        for completion in row:
            expected, _ = padded_episode(
                model,
                with_pixels(scene.processors, prompt),
                with_pixels(scene.processors, completion),
                temperature=1.0,
                banned_token_ids=scene.processors.banned_token_ids,
            )
            differences.append(float((expected - torch.tensor(completion.sampling_logprobs)).abs().max()))
    return max(differences)


def sample_turn(scene, request):
    """Return one turn of the engine, without an environment, past end-of-sequence tokens."""
    sampling = replace(SAMPLING, ignore_eos=True)
    with scene.engine.awake(handle_of(scene.weights), version=0):
        if scene.is_vllm:
            llm = scene.engine._llm_engine
            turns = VllmTurns(llm, scene.processors, sampling, to_text=scene.engine._episodes.decode)
        else:
            turns = _TransformersTurns(lambda batch: scene.engine._sample(batch, sampling))
        turns.submit(request)
        while not (ended := turns.step()):
            pass
    return ended[0][1]


@pytest.mark.extended
def test_a_turn_ends_with_the_token_that_completes_a_stop_text(scene):
    prompt, stops = scene.prompts[1], []
    request = TurnRequest("a", prompt, prompt.token_ids, (), 60, seed=3)
    whole = sample_turn(scene, request)
    decode = scene.processors.tokenizer.decode
    for start in range(5, len(whole.token_ids) - 1):
        pair = decode(whole.token_ids[start : start + 2])
        if pair.isascii() and len(decode(whole.token_ids[start : start + 1])) > 1:
            stops.append(pair[1:])  # of two tokens
    assert stops, "the random model writes some letters"
    num_kept = next(n for n in range(60) if stops[0] in decode(whole.token_ids[:n]))
    assert num_kept < len(whole.token_ids)
    stopped = sample_turn(scene, replace(request, stop=("never written", stops[0])))
    assert stopped.token_ids == whole.token_ids[:num_kept]
    assert stopped.logprobs == pytest.approx(whole.logprobs[:num_kept], abs=1e-5)
    assert stopped.finish_reason == "stop"
    assert whole.text.startswith(stopped.text)


@pytest.mark.extended(but=["vllm-qwen2_5_vl-False"])
@pytest.mark.parametrize("turn_by_turn", [True, False])
def test_logprobs_of_episodes_equal_a_forward_of_the_whole_sequence(scene, monkeypatch, turn_by_turn):
    monkeypatch.setattr(scene.engine._episodes, "turn_by_turn", turn_by_turn)
    rows = scene.generate(delay=lambda row, number: (row["number"] * 7 + number) % 5)
    assert [len(row) for row in rows] == [2] * len(scene.prompts)
    completions = [completion for row in rows for completion in row]
    assert {completion.error for completion in completions} == {""}
    assert {len(completion.turns) for completion in completions} == {2, 3}
    assert all(turn.observation for completion in completions for turn in completion.turns)
    if scene.processors.family.has_vision:
        assert {len(completion.vision.encoded) for completion in completions} == {2, 3}
    assert max_difference(scene, rows) <= 1e-4
    assert values(scene.engine.pop_metrics())["rollout/episodes_failed"] == 0


@pytest.mark.extended
@pytest.mark.faults
def test_results_are_the_same_bits_however_long_environments_take(scene):
    rows = [
        scene.generate(delay=lambda row, number, seed=seed: random.Random(f"{seed} {row} {number}").randrange(9))
        for seed in range(2)
    ]
    assert bits(rows[0]) == bits(rows[1]) == bits(scene.expected)
    assert len({completion.token_ids for row in rows[0] for completion in row}) == 2 * len(scene.prompts)


@pytest.mark.extended
def test_vllm_held_the_tokens_of_the_completion_and_computed_new_ones_only(scene, monkeypatch):
    if not scene.is_vllm:
        pytest.skip("it has no cache")
    scene.record(monkeypatch)
    rows = scene.generate(sampling=replace(SAMPLING, n=1))
    held: dict[str, list[int]] = {}  # by prompt and sample
    num_new, num_computed = 0, 0
    for output in sorted(scene.outputs, key=lambda output: output.request_id):
        episode = output.request_id.rsplit(".", 2)[0]
        before = held.get(episode, [])
        assert output.prompt_token_ids[: len(before)] == before
        # vLLM has not computed a turn's last token, with which it ended.
        num_new += len(output.prompt_token_ids) - max(len(before) - 1, 0)
        num_computed += len(output.prompt_token_ids) - output.num_cached_tokens
        held[episode] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    for index, (prompt, [completion]) in enumerate(zip(scene.prompts, rows, strict=True)):
        assert tuple(held[f"{index}.0"]) == prompt.token_ids + completion.token_ids
    print(f"computed {num_computed}, new {num_new}: {num_computed / num_new:.3f}")
    assert num_computed <= 1.2 * num_new


@pytest.mark.extended
def test_another_image_in_a_later_turn_gives_other_log_probabilities(scene):
    if not scene.processors.family.has_vision:
        pytest.skip("a text model")
    [asked] = scene.prompts[:1]
    twice = [replace(asked, row={**asked.row, "number": number}) for number in (0, 120, 0)]

    scene.environments.answer = lambda row, actions: replace(
        answer(row, actions), observation=Observed("Look.", (drawing(row["number"] * len(actions), 196, 196),))
    )
    first, other, same = scene.generate(twice)
    scene.environments.answer = answer
    assert bits([first]) == bits([same])
    for one, two in zip(first, other, strict=True):
        assert one.token_ids[: one.turns[0].end] == two.token_ids[: one.turns[0].end]
        second = one.turns[0].end - one.turns[0].start
        # The first turn saw the same image, and the second one another.
        assert one.sampling_logprobs[:second] == pytest.approx(two.sampling_logprobs[:second], abs=1e-5)
        assert one.sampling_logprobs[second] != pytest.approx(two.sampling_logprobs[second], abs=1e-4)


@pytest.mark.extended
@pytest.mark.faults
def test_a_request_lost_in_a_later_turn_is_repeated_with_the_same_tokens(scene, monkeypatch):
    if not scene.is_vllm:
        pytest.skip("it loses no requests")
    expected = scene.expected
    scene.engine.pop_metrics()
    llm_engine, lost = scene.engine._llm_engine, []
    step = llm_engine.step

    def step_and_lose():
        outputs = step()
        for state in list(llm_engine.output_processor.request_states.values()):
            _, _, turn, _ = state.external_req_id.split(".")
            if turn == "1" and not lost:
                llm_engine.abort_request([state.external_req_id])
                lost.append(state.external_req_id)
        return outputs

    monkeypatch.setattr(llm_engine, "step", step_and_lose)
    rows = scene.generate()
    assert len(lost) == 1
    assert [[each.token_ids for each in row] for row in rows] == [[each.token_ids for each in row] for row in expected]
    assert values(scene.engine.pop_metrics())["rollout/retried_requests"] == 1


@pytest.mark.extended
@pytest.mark.faults
def test_a_prompt_whose_turn_is_lost_twice_has_no_completions(scene, monkeypatch):
    if not scene.is_vllm:
        pytest.skip("it loses no requests")
    expected = scene.expected
    llm_engine = scene.engine._llm_engine
    step, groups = llm_engine.step, []

    def failing_step():
        outputs = step()
        for output in outputs:
            if output.finished and output.request_id.startswith("0.1.1."):
                output.outputs[0].finish_reason = "error"
        return outputs

    monkeypatch.setattr(llm_engine, "step", failing_step)
    rows = scene.generate(on_group=lambda *group: groups.append(group))
    assert [len(row) for row in rows] == [0, *[2] * (len(scene.prompts) - 1)]
    assert dict(groups) == dict(enumerate(rows))
    assert len(groups) == len(rows)
    assert [[each.token_ids for each in row] for row in rows[1:]] == [
        [each.token_ids for each in row] for row in expected[1:]
    ]
    assert scene.environments.running == {}


@pytest.mark.extended
@pytest.mark.faults
def test_an_engine_that_fails_in_a_later_turn_is_started_again_with_the_same_bits(scene, monkeypatch):
    if not scene.is_vllm:
        pytest.skip("it is not started again")
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    expected = scene.expected
    scene.engine.pop_metrics()
    execute, has_failed = CPUModelRunner.execute_model, []

    def failing(runner, *args, **kwargs):
        if not has_failed and any(actions for _, actions in scene.environments.running.values()):
            has_failed.append(True)
            raise RuntimeError("a kernel failed")
        return execute(runner, *args, **kwargs)

    monkeypatch.setattr(CPUModelRunner, "execute_model", failing)
    warnings = []
    restarting = RestartingEngine(scene.engine, scene.engine.restart, warn=warnings.append, same_command=SAME_COMMAND)
    assert bits(scene.generate(engine=restarting)) == bits(expected)
    assert has_failed
    assert len(warnings) == 1
    assert scene.environments.running == {}
    metrics = values(restarting.pop_metrics())
    num_turns = [len(each.turns) for row in expected for each in row]
    assert metrics["rollout/engine_restarts"] == 1
    assert metrics["rollout/num_turns"] == pytest.approx(sum(num_turns) / len(num_turns))


@pytest.mark.extended
@pytest.mark.faults
def test_an_interrupted_call_does_not_affect_the_next_one(scene):
    expected = scene.expected
    calls = []

    def interrupt(done):
        calls.append(done)
        if len(calls) == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.generate(on_progress=interrupt)
    assert scene.environments.running == {}
    assert bits(scene.generate()) == bits(expected)


# -- episodes that one call begins and others continue --

POOLED = """
import time
from PIL import Image

class Shapes:
    def reset(self, row):
        self.row, self.number = row, 0
        return self.observe()

    def step(self, action):
        self.number += 1
        time.sleep(0.1 * (self.row["number"] % 3))
        return self.observe(), float(len(action)), self.number == 2 + self.row["number"] % 2

    def observe(self):
        text = f"The drawing is turned by a quarter. {self.number} of 3."
        if not self.row["sees"]:
            return text
        colour = (31 * self.row["number"] % 256, 80 + 40 * self.number, 200)
        return {"text": text, "image": Image.new("RGB", (196, 196 + 28 * self.number), colour)}
"""


@pytest.fixture
def pooled(scene, monkeypatch, tmp_path):
    """A scene whose environments are processes, and in which more turns end, also greedy ones."""
    (tmp_path / "shapes.py").write_text(POOLED)
    with closing(
        EnvironmentPool(EnvironmentSettings(environment=find_environment(f"{tmp_path}/shapes.py:Shapes")))
    ) as pool:
        episodes = scene.engine._episodes
        monkeypatch.setattr(episodes, "_settings", replace(episodes._settings, environments=pool))
        processors = replace(scene.processors, stop_token_ids=tuple(range(0, 1000, 8)))
        monkeypatch.setattr(scene.engine, "_processors", processors)
        monkeypatch.setattr(episodes, "stop_token_ids", processors.stop_token_ids)
        yield scene
        episodes.stop()
        assert pool._episodes == {}


@pytest.mark.extended
@pytest.mark.parametrize("turn_by_turn", [True, False])
def test_greedy_episodes_that_are_interrupted_are_those_of_one_call(pooled, monkeypatch, turn_by_turn):
    scene = pooled
    monkeypatch.setattr(scene.engine._episodes, "turn_by_turn", turn_by_turn)
    sampling = replace(SAMPLING, n=1, temperature=0.0, max_tokens=250, with_baseline=True)
    whole = scene.generate(sampling=sampling)
    assert sum(len(row[0].turns) for row in whole) > len(whole) + 1
    scene.engine.pop_metrics()

    def sample(kind, num_passes, begun, version):
        interruption, passes = Interruption(), []

        def on_progress(_):
            passes.append(1)
            if len(passes) == num_passes:
                interruption.ask(kind)

        until = Until(len(scene.prompts), begun=tuple(map(tuple, begun)), interruption=interruption)
        return scene.generate(sampling=sampling, until=until, on_progress=on_progress, version=version)

    rows, version = sample("stop", 5, (), 0), 0
    while any(each.is_unfinished for row in rows for each in row):
        for row, its_whole in zip(rows, whole, strict=True):
            for each, expected in zip(row, its_whole, strict=True):
                assert each.token_ids == expected.token_ids[: len(each.token_ids)]
        scene.generate(scene.prompts[:1], sampling=replace(SAMPLING, n=1, max_tokens=100))  # a validation
        version += 1
        rows = sample("drain" if version % 3 == 0 else "stop", 4, rows, version)
        assert version < 500
    assert version > (2 if turn_by_turn else 0)  # else it depends on how long environments take
    for row, its_whole in zip(rows, whole, strict=True):
        assert row[0].token_ids == row[1].token_ids
        for each, expected in zip(row, its_whole, strict=True):
            assert sum(count for _, count in each.version_runs) == each.num_sampled
            assert each.turns == expected.turns
            assert bits([[each]]) == bits(
                [[replace(expected, policy_version=each.policy_version, policy_versions=each.policy_versions)]]
            )
    assert values(scene.engine.pop_metrics())["rollout/episodes_begun_again"] == 0


@pytest.mark.extended
def test_the_log_probabilities_of_an_interrupted_episode_are_those_of_its_whole_sequence(scene):
    rows: Any = ()
    for num_passes in (10, 25, 40, 10**9):
        interruption, passes = Interruption(), []

        def on_progress(_, passes=passes, interruption=interruption, num_passes=num_passes):
            passes.append(1)
            if len(passes) == num_passes:
                interruption.ask("stop")

        until = Until(len(scene.prompts), begun=tuple(map(tuple, rows)), interruption=interruption)
        rows = scene.generate(until=until, on_progress=on_progress)
    assert not any(each.is_unfinished for row in rows for each in row)
    assert max_difference(scene, rows) <= 1e-4
    assert scene.environments.running == {}
