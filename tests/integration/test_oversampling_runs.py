"""Runs with oversampling: what is carried survives a kill, and workers stop by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import assert_learned, comparable, kill, lines, make_run, num_lines, rollouts, start, wait_for

pytestmark = pytest.mark.long

OVERSAMPLING = (
    "worker.rollout.oversampling=0.75",
    "worker.rollout.max_carried_steps=2",
    "worker.rollout.n=2",
    "data.max_response_length=320",  # of a model that ends after about 100 tokens
    "data.val_files=",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
)


@pytest.fixture(scope="module")
def uninterrupted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    make_run(made, folder, *OVERSAMPLING, "trainer.save_limit=-1")
    assert_learned(folder)
    return folder


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for text in rollouts(folder).values() for line in text.splitlines()]


def assert_carries(folder: Path) -> None:
    """Assert that some completions were begun in one step and ended in another."""
    several = [row for row in rows_of(folder) if row["policy_versions"]]
    assert several
    metrics = [line["metrics"] for line in lines(folder)]
    assert max(each["rollout/carried_tokens"] for each in metrics) > 0
    assert 1 <= max(each["staleness/max"] for each in metrics) <= 2
    assert max(each["mismatch/corrected_fraction"] for each in metrics) >= 0  # there is a correction
    assert max(each["parity/logprobs_diff_max"] for each in metrics) < 1e-3


def test_a_run_killed_with_unfinished_completions_equals_an_uninterrupted_one(made, uninterrupted, tmp_path):
    assert_carries(uninterrupted)
    folder = tmp_path / "run"
    process = start(made, folder, *OVERSAMPLING)
    wait_for(lambda: num_lines(folder) >= 3, process, folder)  # after the checkpoint of step 2
    kill(process)
    make_run(made, folder, *OVERSAMPLING)
    assert lines(folder) == lines(uninterrupted)
    assert rollouts(folder) == rollouts(uninterrupted)


def test_two_workers_stop_and_resume_alike(made, tmp_path):
    folder, again = tmp_path / "run", tmp_path / "again"
    options = (*OVERSAMPLING, "trainer.n_gpus_per_node=2")
    make_run(made, folder, *options)
    assert_carries(folder)
    process = start(made, again, *options)
    wait_for(lambda: num_lines(again) >= 3, process, again)
    kill(process)
    make_run(made, again, *options)
    assert comparable(lines(again)) == comparable(lines(folder))
    assert rollouts(again) == rollouts(folder)
