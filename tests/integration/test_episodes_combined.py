"""Episodes with images in observations, together with what else a run can have.

One run has LoRA, online filtering with a surplus, a frozen vision tower and environments that fail;
another one videos in the prompts, ReMax and measured token budgets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.clusters import two_ray_nodes
from support.runs import assert_learned, comparable, finish, lines, make_run, rollouts, start, stored_images
from support.videos import make_video
from trigon.report.rollouts import RolloutRow, read_rollouts
from trigon.tools.cli.main import main

pytestmark = pytest.mark.long

STEPS = 4
ENVIRONMENT = '''
import random

from PIL import Image


class Gallery:
    """Shows a picture before each turn, of a colour that depends on the row and the turn.

    The letters of an action decide its reward, and whether the environment fails: about one in
    `fails` does.
    """

    def __init__(self, turns: int = 3, fails: int = 6) -> None:
        self.turns = turns
        self.fails = fails

    def reset(self, row):
        self.seed = row["seed"]
        self.num_actions = 0
        return self.observe()

    def step(self, action):
        self.num_actions += 1
        number = sum(map(ord, action)) % self.fails
        if number == 0:
            raise RuntimeError("the picture fell off the wall")
        return self.observe(), number / self.fails, self.num_actions == self.turns

    def observe(self):
        colours = random.Random(f"{self.seed} {self.num_actions}")
        colour = tuple(colours.randrange(256) for _ in range(3))
        return {"text": f"Picture {self.num_actions}.", "images": [Image.new("RGB", (56, 56), colour)]}
'''
# Rows whose seed is divisible by 4 give nothing, so that online filtering leaves them out.
REWARD = """
REWARD_TYPE = "sequential"


def compute_score(reward_input):
    turns = reward_input["turns"]
    earned = sum(turn["reward"] or 0.0 for turn in turns)
    written = sum(map(ord, reward_input["response"])) % 7 / 7
    overall = earned + written if reward_input["row"]["seed"] % 4 else 0.0
    return {"overall": overall, "turns": len(turns), "earned": earned}
"""
LORA_FILTERED_FROZEN = (
    "worker.actor.model.lora.rank=4",
    "worker.actor.model.lora.alpha=8",
    "worker.actor.model.lora.exclude_modules=.*visual.*",
    "worker.actor.model.freeze_vision_tower=true",
    "worker.actor.optim.lr=1e-2",
    "algorithm.online_filtering=true",
    "algorithm.filter_surplus=keep",
    "algorithm.filter_low=0",
    "algorithm.filter_high=100",
    "data.mini_rollout_batch_size=4",
)


def write_rows(path: Path, seeds: Sequence[int], **columns: Sequence[str]) -> None:
    """Write a row for each seed, with further columns."""
    rows = [
        {"problem": "Say what you see.", "answer": "nothing", "seed": seed}
        | {name: values[number] for name, values in columns.items()}
        for number, seed in enumerate(seeds)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the environment, the reward function and rows that have a seed."""
    folder = tmp_path_factory.mktemp("gallery")
    (folder / "gallery.py").write_text(ENVIRONMENT)
    (folder / "reward.py").write_text(REWARD)
    write_rows(folder / "train.jsonl", range(16))
    write_rows(folder / "validation.jsonl", range(101, 104))
    return folder


def episodes_of(parts: Path) -> tuple[str, ...]:
    """Return the options of a run with the environment, the data and the reward in `parts`."""
    return (
        "data.rollout_batch_size=2",
        "data.max_response_length=512",
        "trainer.save_freq=2",
        "trainer.val_freq=2",
        "worker.rollout.max_turns=4",
        "worker.rollout.max_turn_tokens=100",
        f"data.train_files={parts / 'train.jsonl'}",
        f"data.val_files={parts / 'validation.jsonl'}",
        f"worker.reward.reward_function={parts / 'reward.py'}:compute_score",
        f"worker.rollout.environment={parts / 'gallery.py'}:Gallery",
    )


@pytest.fixture(scope="module")
def combined(made: Path, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with LoRA, online filtering and a frozen vision tower."""
    folder = tmp_path_factory.mktemp("combined") / "run"
    make_run(made, folder, *episodes_of(parts), *LORA_FILTERED_FROZEN, "trainer.save_limit=-1", steps=STEPS)
    assert_learned(folder)
    return folder


def rows_of(folder: Path, step: int, split: str = "step") -> list[RolloutRow]:
    return list(read_rollouts(folder / "rollouts" / f"{split}_{step:06d}.jsonl"))


def groups_of(folder: Path, step: int) -> list[list[RolloutRow]]:
    """Return the rollouts of each group that a step learned from."""
    groups: dict[str, list[RolloutRow]] = {}
    for row in rows_of(folder, step):
        groups.setdefault(row.prompt_id, []).append(row)
    return list(groups.values())


def assert_parity(folder: Path) -> None:
    """Assert that engine and trainer have the same log-probabilities in each step.

    Of all tokens, unless some were sampled in the step before, with other weights.
    """
    for line in lines(folder)[1:]:
        step, metrics = line["step"], line["metrics"]
        assert metrics["parity/logprobs_diff_max"] < 1e-4
        if all(row.policy_version == step - 1 for row in rows_of(folder, step)):
            assert metrics["mismatch/logprobs_diff_max"] < 1e-4


def images_in(rows: Sequence[RolloutRow]) -> set[str]:
    return {file for row in rows for turn in row.turns for file in turn.image_files}


def all_rows(folder: Path) -> list[tuple[Path, RolloutRow]]:
    """Return each rollout with its file."""
    return [(path, row) for path in sorted((folder / "rollouts").iterdir()) for row in read_rollouts(path)]


def surplus_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the completions that a checkpoint keeps for the next step."""
    progress = json.loads((folder / f"global_step_{step}" / "progress.json").read_text())
    return [completion for group in progress["progress"]["buffer"]["ready"] for completion in group["rollouts"]]


def images_processed(folder: Path) -> float:
    written = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sum(metrics.get("perf/images_processed", 0.0) for metrics in written)


def test_turns_have_their_images_in_every_step_and_log_probabilities_agree(combined):
    assert_parity(combined)
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(combined, step) if row.outcome == "ok"]
    assert max(len(row.turns) for row in rows) == 3
    for row in rows:
        assert row.parts["turns"] == len(row.turns)
        assert [turn.observation.count("<image>") for turn in row.turns] == [1] * len(row.turns)
        assert [len(turn.image_files) for turn in row.turns] == [1] * len(row.turns)
        assert row.parts["earned"] == pytest.approx(sum(turn.reward or 0.0 for turn in row.turns))


def test_advantages_are_those_of_the_episodes_that_did_not_fail(combined):
    partly = 0
    for step in range(1, STEPS + 1):
        for group in groups_of(combined, step):
            assert len(group) == 4
            scored = [row for row in group if row.outcome == "ok"]
            rewards = [row.reward for row in scored]
            partly += 2 <= len(scored) < 4
            mean = statistics.fmean(rewards)
            deviation = statistics.stdev(rewards) if len(set(rewards)) > 1 else 1.0
            for row in scored:
                assert row.advantage == pytest.approx((row.reward - mean) / (deviation + 1e-6), rel=1e-4, abs=1e-6)
            for row in group:
                if row.outcome != "ok":
                    assert "the picture fell off the wall" in row.error
                    assert row.advantage is None
    assert partly > 0


def test_groups_without_rewards_are_filtered_and_a_surplus_is_learned_from_in_the_next_step(combined):
    ages = []
    for step in range(1, STEPS + 1):
        kept = groups_of(combined, step)
        assert len(kept) == 2
        assert all(row.row["seed"] % 4 for group in kept for row in group)
        assert all(any(row.outcome == "ok" for row in group) for group in kept)
        ages += [step - 1 - group[0].policy_version for group in kept]
    assert set(ages) == {0, 1}
    filtered = [row for path, row in all_rows(combined) if path.name.startswith("filtered")]
    assert {row.row["seed"] % 4 for row in filtered if row.filtered == "low"} == {0}
    assert {row.filtered for row in filtered} <= {"low", "unscored", "surplus"}


def test_the_images_of_a_frozen_tower_are_processed_once_and_their_features_cached(combined):
    kept = {  # for a next step, so that they are in no rollouts
        f"images/{hashlib.sha256(base64.b64decode(image)).hexdigest()}.png"
        for completion in surplus_of(combined, STEPS)
        for image in completion["images"]
    }
    assert images_processed(combined) == len(images_in([row for _, row in all_rows(combined)]) | kept)
    cached = [line["metrics"]["actor/vision_cached_fraction"] for line in lines(combined)[1:]]
    assert min(cached) > 0.3


def test_a_surplus_of_episodes_with_images_is_saved_and_the_run_resumes_with_it(made, parts, combined, tmp_path):
    resumed = tmp_path / "run"  # as if killed after the save of step 2
    shutil.copytree(combined, resumed)
    shutil.rmtree(resumed / f"global_step_{STEPS}")
    completions = surplus_of(resumed, 2)
    assert completions
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for each in completions for image in each["images"])
    assert any(len(each["turns"]) > 1 for each in completions)
    make_run(made, resumed, *episodes_of(parts), *LORA_FILTERED_FROZEN, "trainer.save_limit=-1", steps=STEPS)
    assert comparable(lines(resumed)) == comparable(lines(combined))
    assert rollouts(resumed) == rollouts(combined)
    assert stored_images(resumed) == stored_images(combined)


def test_an_evaluation_of_the_merged_model_has_the_numbers_of_the_validation(combined, tmp_path, capsys):
    output = tmp_path / "evaluation"
    assert main(["eval", str(combined), "--output", str(output), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["settings"]["environment"].endswith("gallery.py:Gallery")
    validated = rows_of(combined, STEPS, "validation")
    evaluated = rows_of(output, STEPS, "validation")
    assert len(validated) == 3
    assert [row.turns for row in evaluated] == [row.turns for row in validated]
    assert [row.reward for row in evaluated] == [row.reward for row in validated]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with two_ray_nodes(tmp_path_factory.mktemp("nodes")) as environment:
        yield environment


@pytest.mark.alone
@pytest.mark.timeout(1200)  # of the fixtures too, on busy cores
def test_two_nodes_with_small_token_budgets_have_the_numbers_of_one_worker(made, parts, combined, two_nodes, tmp_path):
    """A group exceeds the budget of a pass, so that it is split, and its prompt repeated."""
    folder = tmp_path / "run"
    options = (
        *LORA_FILTERED_FROZEN,
        "trainer.nnodes=2",
        "worker.actor.micro_batch_size_per_device_for_update=1",
        "worker.actor.micro_batch_size_per_device_for_experience=1",
    )
    finish(start(made, folder, *episodes_of(parts), *options, steps=STEPS, environment=two_nodes), folder)
    assert_parity(folder)
    assert [line["step"] for line in lines(folder)] == [line["step"] for line in lines(combined)]
    # Later steps may sample other tokens: updates follow the rounding of two ranks.
    for mine, others in zip(lines(folder)[:3], lines(combined)[:3], strict=True):
        assert mine["step"] <= 2
        for key in ("reward/overall", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "response_length/mean"):
            assert (key in mine["metrics"]) == (key in others["metrics"])
            if key in others["metrics"]:
                assert mine["metrics"][key] == pytest.approx(others["metrics"][key], rel=1e-3, abs=1e-5), key
    for mine, others in zip(lines(folder)[1:], lines(combined)[1:], strict=True):
        assert mine["metrics"]["actor/micro_batches"] > others["metrics"]["actor/micro_batches"]
    for step in (1, 2):
        assert [row.turns for row in rows_of(folder, step)] == [row.turns for row in rows_of(combined, step)]


def test_remax_compares_with_a_greedy_episode_of_its_own_also_with_videos_in_the_prompt(made, parts, tmp_path):
    """Validation is greedy, on the same rows and weights: its rewards are the baselines."""
    (tmp_path / "clips").mkdir()
    seeds = range(1, 4)
    for seed in seeds:
        (tmp_path / "clips" / f"{seed}.mp4").write_bytes(make_video(frames=8 + 4 * seed, first=seed))
    rows = tmp_path / "rows.jsonl"
    videos = [f"clips/{seed}.mp4" for seed in seeds]
    write_rows(rows, seeds, problem=["<video>What moves?"] * len(seeds), videos=videos)
    folder = tmp_path / "run"
    options = (
        "algorithm.adv_estimator=remax",
        "worker.rollout.environment_kwargs={fails: 12}",
        "trainer.auto_micro_batch=true",
        "trainer.save_freq=-1",
        "trainer.val_freq=1",
        "worker.rollout.n=3",
        "worker.rollout.val_override_config.temperature=0",
        "worker.rollout.val_override_config.n=1",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.rollout_batch_size=3",
        "worker.actor.global_batch_size=3",
        "data.video_fps=5",
        "data.max_video_frames=6",
        "data.max_prompt_length=200",
    )
    make_run(made, folder, *episodes_of(parts), *options, steps=2)
    assert_learned(folder)
    assert_parity(folder)
    assert (folder / "auto_micro_batch.json").is_file()
    compared = 0
    for step in (1, 2):
        greedy = {row.row["seed"]: row for row in rows_of(folder, step - 1, "validation")}
        missing = sum(row.outcome != "ok" for row in greedy.values())
        assert lines(folder)[step]["metrics"]["reward_function/num_missing_baselines"] == missing
        for group in groups_of(folder, step):
            baseline = greedy[group[0].row["seed"]]
            for row in group:
                assert all(len(turn.image_files) == 1 for turn in row.turns)
                if row.outcome == "ok" and baseline.outcome == "ok":
                    compared += 1
                    assert row.advantage == pytest.approx(row.reward - baseline.reward, abs=1e-6)
                else:
                    assert row.advantage is None
    assert compared > 0
    # The greedy episodes go other ways than the sampled ones.
    texts = {row.response for row in rows_of(folder, 1)}
    assert any(row.response not in texts for row in rows_of(folder, 0, "validation"))
