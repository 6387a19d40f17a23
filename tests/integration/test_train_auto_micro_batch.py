"""Runs that measure how many tokens a pass may take: the numbers of one that was told, and the same when resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import assert_learned, finish, lines, log_of, rollouts, start

# A group of the greatest lengths has 128 + 4 * 64 = 384 tokens. On a CPU with this much memory all of an update's two
# groups fit into one row, and all of a step's four: 4 and 8 times the 192 of the longest sequence.
LENGTHS = ("data.max_prompt_length=128", "data.max_response_length=64")
# Nor a checkpoint but the last, nor a validation, which the last step has.
RARELY = ("trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.val_before_train=false", "data.val_files=")
TOLD = (
    "worker.actor.micro_batch_size_per_device_for_update=4",
    "worker.actor.micro_batch_size_per_device_for_experience=8",
)
AUTO = "trainer.auto_micro_batch=true"


def test_a_run_that_measures_and_is_resumed_writes_the_numbers_of_one_that_was_told(made: Path, tmp_path: Path) -> None:
    told, measured = tmp_path / "told", tmp_path / "measured"
    finish(start(made, told, *LENGTHS, *RARELY, *TOLD, steps=2), told)
    assert_learned(told)

    finish(start(made, measured, *LENGTHS, *RARELY, AUTO, steps=1), measured)
    found = json.loads((measured / "auto_micro_batch.json").read_text())
    assert (found["budgets"]["update_tokens"], found["budgets"]["experience_tokens"]) == (768, 1536)
    assert found["budgets"]["device"] == "CPU"
    assert found["measured_for"]["model"] == str(made / "model")
    written = (measured / "auto_micro_batch.json").stat().st_mtime_ns
    finish(start(made, measured, *LENGTHS, *RARELY, AUTO, steps=2), measured)
    assert (measured / "auto_micro_batch.json").stat().st_mtime_ns == written

    assert lines(measured) == lines(told)
    assert rollouts(measured) == rollouts(told)
    log = " ".join(log_of(measured).read_text().split())
    assert log.count("auto micro-batch: 768 tokens an update pass (") == 2
    assert log.count("1,536 a pass without gradient (") == 2
    assert log.count(", as measured before") == 1
    assert log.count("in micro-batches of at most 768 tokens") == 2


@pytest.mark.alone
def test_several_workers_measure_together(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    finish(start(made, folder, *LENGTHS, *RARELY, AUTO, "trainer.n_gpus_per_node=2", steps=1), folder)
    found = json.loads((folder / "auto_micro_batch.json").read_text())
    assert (found["budgets"]["update_tokens"], found["budgets"]["experience_tokens"]) == (768, 1536)
    assert found["measured_for"]["workers"] == 2
    [line] = lines(folder)
    assert line["metrics"]["actor/grad_norm"] > 0
    assert line["metrics"]["actor/micro_batches"] == 4  # two updates, one row on each worker
