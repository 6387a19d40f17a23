"""Validation samples the complete set, in calls of a given size, with the same seeds each time."""

import json

import datasets
import pytest
from PIL import Image

from support.builders import make_builder, prompts_of
from support.rollout import NO_WEIGHTS, Phases
from trigon.data.stream import mix
from trigon.errors import BadRow, EngineError
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import Evaluator
from trigon.rollout.fake import FakeEngine
from trigon.types import SamplingParams

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=30, ignore_eos=False, seed=7)
REWARD = """
REWARD_TYPE = "sequential"

def reward(completion):
    return {"overall": float(completion["response"].split()[0] == completion["ground_truth"])}
"""


class RecordingEngine(FakeEngine):
    """A fake engine that records the draws and the prompts of each call."""

    calls = ()

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        self.calls = (*self.calls, ({prompt.draw for prompt in prompts}, [prompt.prompt_id for prompt in prompts]))
        return super().generate(prompts, sampling, on_progress=on_progress, on_group=on_group)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(REWARD)
    pool = RewardPool(find_reward(f"{file}:reward", {}), num_workers=1, timeout_seconds=10, max_failed_fraction=0.0)
    yield pool
    pool.close()


@pytest.fixture
def prompts(processors, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = []
    for number in range(5):
        Image.new("RGB", (56, 56), (10 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"images": [f"{number}.png"], "problem": "<image>How many?", "answer": str(number)})
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder = make_builder(processors)
    return prompts_of(str(tmp_path / "validation.jsonl"), builder)


@pytest.fixture
def engine(processors):
    tokenizer = processors.tokenizer
    # Correct for an even ground truth; then the seed, so that completions differ.
    return RecordingEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=lambda prompt, version, seed: f"{2 * (int(prompt.ground_truth) // 2)} {seed}",
    )


def evaluate(evaluator, engine, rewards, *, version=0, phases=None):
    with engine.awake(NO_WEIGHTS, version=version):
        return evaluator.sample(engine, rewards, phase=phases or Phases())


def texts(groups):
    return [[rollout.completion.text for rollout in group.rollouts] for group in groups]


def fail(text):
    pytest.fail(f"warned: {text}")


def test_every_prompt_is_sampled_and_scored_in_order(prompts, engine, rewards):
    phases = Phases()
    groups = evaluate(Evaluator(prompts, SAMPLING, 2, 2, fail), engine, rewards, phases=phases)
    assert [group.prompt.ground_truth for group in groups] == ["0", "1", "2", "3", "4"]
    assert [[rollout.score.overall for rollout in group.rollouts] for group in groups] == [
        [1.0, 1.0],
        [0.0, 0.0],
        [1.0, 1.0],
        [0.0, 0.0],
        [1.0, 1.0],
    ]
    assert all(group.prompt.vision is None for group in groups), "pixels are not kept"
    ids = [group.prompt.prompt_id for group in groups]
    assert engine.calls == tuple(({0}, part) for part in (ids[:2], ids[2:4], ids[4:]))
    assert phases.announced[-1] == ("validation", 5, 5)
    assert [name for name, _, _ in phases.announced[:-1]] == ["gen", "reward"] * 3


def test_a_last_prompt_that_the_engine_fails_to_sample_is_left_out(prompts, engine, rewards):
    engine._complete_text = lambda prompt, version, seed: None if prompt.ground_truth == "4" else "0"
    groups = evaluate(Evaluator(prompts, SAMPLING, 2, 1, fail), engine, rewards)  # the last call has it alone
    assert [group.prompt.ground_truth for group in groups] == ["0", "1", "2", "3"]
    engine._complete_text = lambda prompt, version, seed: None if prompt.ground_truth in "23" else "0"
    with pytest.raises(EngineError, match="any of 2 prompts"):  # a whole call
        evaluate(Evaluator(prompts, SAMPLING, 2, 1, fail), engine, rewards)


def test_the_images_of_prompts_are_the_files_of_their_dataset(prompts, tmp_path):
    mixed = mix([*prompts.parts, *prompts.parts])
    evaluator = Evaluator(mixed, SAMPLING, 2, 2, fail)
    for index in (2, 7):
        assert evaluator.image_files(mixed[index].prompt_id) == [(tmp_path / "2.png").read_bytes()]
    (tmp_path / "3.png").unlink()
    with pytest.raises(BadRow, match=r"validation.*:3"):
        evaluator.image_files(mixed[3].prompt_id)


def test_completions_are_the_same_each_time_and_for_any_batch_size(prompts, engine, rewards):
    first = texts(evaluate(Evaluator(prompts, SAMPLING, 2, 1, fail), engine, rewards))
    again = texts(evaluate(Evaluator(prompts, SAMPLING, 5, 3, fail), engine, rewards, version=9))
    assert first == again
    assert len({text for group in first for text in group}) == 10, "every completion has its own seed"


def test_a_prompt_whose_image_was_deleted_is_skipped_with_a_warning(prompts, engine, rewards, tmp_path):
    complete = texts(evaluate(Evaluator(prompts, SAMPLING, 2, 1, fail), engine, rewards))
    (tmp_path / "1.png").unlink()
    warnings, phases = [], Phases()
    groups = evaluate(Evaluator(prompts, SAMPLING, 2, 1, warnings.append), engine, rewards, phases=phases)
    assert [group.prompt.ground_truth for group in groups] == ["0", "2", "3", "4"]
    assert texts(groups) == [complete[0], *complete[2:]]
    [warning] = warnings
    assert "skipped in this validation" in warning
    assert "1.png" in warning
    assert phases.announced[-1] == ("validation", 5, 5)
