"""Runs with measured token budgets have the numbers of runs with configured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import assert_learned, lines, log_of, make_run, rollouts

pytestmark = pytest.mark.long

# A group of maximum lengths has 128 + 4 * 64 = 384 tokens. In CPU memory the two groups of an
# update fit into one row, and so do the four of a step: 4 and 8 times the 192 tokens of the longest
# sequence.
LENGTHS = ("data.max_prompt_length=128", "data.max_response_length=64")
# One checkpoint, that of the last step, and no validation.
NO_VALIDATION = ("trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.val_before_train=false", "data.val_files=")
CONFIGURED = (
    "worker.actor.micro_batch_size_per_device_for_update=4",
    "worker.actor.micro_batch_size_per_device_for_experience=8",
)
AUTO = "trainer.auto_micro_batch=true"


def test_a_resumed_run_with_measured_budgets_has_the_numbers_of_one_with_configured_budgets(
    made: Path, tmp_path: Path
) -> None:
    configured, measured = tmp_path / "configured", tmp_path / "measured"
    make_run(made, configured, *LENGTHS, *NO_VALIDATION, *CONFIGURED, steps=2)
    assert_learned(configured)

    make_run(made, measured, *LENGTHS, *NO_VALIDATION, AUTO, steps=1)
    stored = json.loads((measured / "auto_micro_batch.json").read_text())
    assert (stored["budgets"]["update_tokens"], stored["budgets"]["experience_tokens"]) == (768, 1536)
    assert stored["budgets"]["device"] == "CPU"
    assert stored["measured_for"]["model"] == str(made / "model")
    modified_ns = (measured / "auto_micro_batch.json").stat().st_mtime_ns
    make_run(made, measured, *LENGTHS, *NO_VALIDATION, AUTO, steps=2)
    assert (measured / "auto_micro_batch.json").stat().st_mtime_ns == modified_ns

    assert lines(measured) == lines(configured)
    assert rollouts(measured) == rollouts(configured)
    log = " ".join(log_of(measured).read_text().split())
    assert log.count("auto micro-batch: 768 tokens per update pass (") == 2
    assert log.count("1,536 per pass without gradient (") == 2
    assert log.count(", reused from the run folder") == 1
    assert log.count("at most 768 tokens, prompts counted once") == 2


@pytest.mark.alone
def test_several_workers_measure_the_same_budgets(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    make_run(made, folder, *LENGTHS, *NO_VALIDATION, AUTO, "trainer.n_gpus_per_node=2", steps=1)
    stored = json.loads((folder / "auto_micro_batch.json").read_text())
    assert (stored["budgets"]["update_tokens"], stored["budgets"]["experience_tokens"]) == (768, 1536)
    assert stored["measured_for"]["workers"] == 2
    [line] = lines(folder)
    assert line["metrics"]["actor/grad_norm"] > 0
    assert line["metrics"]["actor/micro_batches"] == 4  # two updates with one row on each worker
