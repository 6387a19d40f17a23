"""Runs in which completions have several turns, with images in observations."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from support.runs import (
    assert_learned,
    kill,
    lines,
    make_run,
    num_lines,
    rollouts,
    start,
    stored_images,
    wait_for,
)
from trigon.report.rollouts import read_rollouts

STEPS = 3
ENVIRONMENT = '''
import random
import time

from PIL import Image

LOG = {log!r}


class Drawing:
    """Shows one picture, and after each turn another one. A word of the action decides the reward."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, row):
        self.random = random.Random(row["seed"])
        self.step_number = 0
        return self._observe("Here is a picture.")

    def step(self, action):
        time.sleep(random.random() * 0.05)
        self.step_number += 1
        if self.step_number == 2 and self.random.random() < 0.1:
            raise RuntimeError("the picture fell off the wall")
        reward = sum(map(ord, action)) % 7 / 7
        return self._observe("And another one."), reward, self.step_number == self.turns

    def _observe(self, text):
        colour = tuple(self.random.randrange(256) for _ in range(3))
        image = Image.new("RGB", (56, 28 * self.random.randint(1, 2)), colour)
        return {{"text": text, "images": [image]}}
'''
REWARD = """
REWARD_TYPE = "sequential"
REWARD_IMAGES = True


def compute_score(reward_input):
    turns = reward_input["turns"]
    rewards = [turn["reward"] or 0.0 for turn in turns]
    looked = sum(sum(image.getpixel((0, 0))) for turn in turns for image in turn["images"])
    observed = sum(len(turn["images"]) for turn in turns)
    return {"overall": sum(rewards), "turns": len(turns), "looked": looked, "observed": observed}
"""
EPISODES = (
    "data.rollout_batch_size=2",
    "data.max_response_length=512",
    "trainer.save_freq=2",
    "trainer.val_freq=2",
    "worker.rollout.max_turns=4",
    "worker.rollout.max_turn_tokens=100",
)


@pytest.fixture(scope="module")
def parts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the environment, the reward function and rows that have a seed."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("episodes")
    (folder / "drawing.py").write_text(ENVIRONMENT.format(log=""))
    (folder / "reward.py").write_text(REWARD)
    for name, seeds in (("train", range(16)), ("validation", range(100, 104))):
        rows = {
            "problem": [f"Say what you see, number {seed}." for seed in seeds],
            "answer": ["nothing"] * len(seeds),
            "seed": list(seeds),
        }
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"{name}.parquet")
    return folder


def episodes_of(parts: Path) -> tuple[str, ...]:
    """Return the options of a run with the environment, the data and the reward in `parts`."""
    return (
        *EPISODES,
        f"data.train_files={parts / 'train.parquet'}",
        f"data.val_files={parts / 'validation.parquet'}",
        f"worker.reward.reward_function={parts / 'reward.py'}:compute_score",
        f"worker.rollout.environment={parts / 'drawing.py'}:Drawing",
    )


@pytest.fixture(scope="module")
def uninterrupted(made: Path, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    make_run(made, folder, *episodes_of(parts), steps=STEPS)
    assert_learned(folder)
    return folder


@pytest.mark.extended
def test_turns_are_sampled_scored_learned_from_and_recorded(uninterrupted):
    rows = list(read_rollouts(uninterrupted / "rollouts" / "step_000001.jsonl"))
    assert len(rows) == 8
    scored = [row for row in rows if row.outcome == "ok"]
    assert scored
    for row in scored:
        assert 1 <= len(row.turns) <= 3
        assert row.parts["turns"] == row.parts["observed"] == len(row.turns)
        assert all(len(turn.image_files) == 1 for turn in row.turns)
        stored = [Image.open(uninterrupted / file) for turn in row.turns for file in turn.image_files]
        assert row.parts["looked"] == sum(sum(image.getpixel((0, 0))) for image in stored)
        assert "Here is a picture." in row.turns[0].observation
        assert all("And another one." in turn.observation for turn in row.turns[1:])
        assert row.num_tokens == sum(turn.num_tokens for turn in row.turns)
        assert row.response == "\n".join(turn.text for turn in row.turns)
        assert row.reward == pytest.approx(sum(turn.reward or 0.0 for turn in row.turns))
    assert max(len(row.turns) for row in scored) > 1
    for row in rows:
        if row.outcome != "ok":
            assert "the picture fell off the wall" in row.error
            assert row.advantage is None
    metrics = {key: [line["metrics"][key] for line in lines(uninterrupted)[1:]] for key in PARITY}
    assert max(metrics["parity/logprobs_diff_max"]) < 1e-4
    assert min(metrics["rollout/num_turns"]) > 1


PARITY = ("parity/logprobs_diff_max", "rollout/num_turns")


@pytest.mark.long
def test_a_run_killed_in_the_middle_of_an_episode_equals_an_uninterrupted_one(made, parts, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder, *episodes_of(parts), steps=STEPS)
    # In step 3, after the checkpoint of step 2 and its validation.
    wait_for(lambda: num_lines(folder) >= 3 and any(folder.glob("global_step_*")), process, folder)
    kill(process)
    make_run(made, folder, *episodes_of(parts), steps=STEPS)
    assert lines(folder) == lines(uninterrupted)
    assert rollouts(folder) == rollouts(uninterrupted)
    assert stored_images(folder) == stored_images(uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_workers_have_the_numbers_of_one(made, parts, uninterrupted, tmp_path, tensor_parallel_size):
    folder = tmp_path / "run"
    options = ("trainer.n_gpus_per_node=2", f"worker.rollout.tensor_parallel_size={tensor_parallel_size}")
    make_run(made, folder, *episodes_of(parts), *options, steps=STEPS)
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(uninterrupted)]
    counted = ("rollout/episodes_failed", "rollout/num_turns")
    for mine, others in zip(lines(folder), lines(uninterrupted), strict=True):
        for key in ("reward/overall/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean", *counted):
            if key in others["metrics"]:
                assert mine["metrics"][key] == pytest.approx(others["metrics"][key], rel=1e-3, abs=1e-5), key
    first = [read_rollouts(run / "rollouts" / "step_000001.jsonl") for run in (folder, uninterrupted)]
    assert [row.turns for row in first[0]] == [row.turns for row in first[1]]
