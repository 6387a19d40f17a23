"""What a plan predicts for fixed lengths is what a run counts: tokens, rows, operations, disk."""

from __future__ import annotations

import pytest
import yaml

from support.runs import lines, make_run
from trigon.config.schema import Config
from trigon.report.run import read_metrics
from trigon.tools.plan.plan import plan

pytestmark = pytest.mark.extended

STEPS = 2
OVERRIDES = (
    "worker.rollout.ignore_eos=true",  # all completions have the maximum length
    "data.rollout_batch_size=4",
    "worker.actor.ppo_epochs=2",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=-1",
    "worker.actor.micro_batch_size_per_device_for_update=3",
)


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    """Return the folder of a finished run with a KL term, so that every group has a gradient."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    rows = f"data.train_files={made / 'data' / 'train.parquet'}@train[:{4 * STEPS}]"
    make_run(made, folder, rows, *OVERRIDES, steps=STEPS)
    return folder


@pytest.fixture(scope="module")
def planned(run):
    return plan(Config.model_validate(yaml.safe_load((run / "config.yaml").read_text())))


def test_tokens_rows_and_operations_are_those_that_the_run_counts(run, planned):
    steps = lines(run)
    assert len(steps) == STEPS
    # Both steps together are one epoch, of which the plan has the mean step.
    assert planned.plan.steps_per_epoch == STEPS

    def total(key):
        return sum(step["metrics"][key] for step in steps)

    assert total("actor/model_tflops") == pytest.approx(STEPS * planned.flops.update / 1e12, rel=1e-9)
    assert total("actor/packed_tokens") == pytest.approx(STEPS * planned.batches.row_tokens)
    assert total("actor/micro_batches") == STEPS * planned.plan.updates_per_step * planned.batches.update_rows
    assert total("response_length/mean") * 16 == STEPS * planned.batches.response_tokens
    measured = [step.metrics for step in read_metrics(run)]
    assert sum(each["perf/total_num_tokens"] for each in measured) == STEPS * planned.batches.sequence_tokens
    assert total("prompt_length/mean") * 4 == pytest.approx(STEPS * planned.batches.prompt_tokens)


def test_seconds_of_the_same_run_are_those_that_it_measured(run):
    config = Config.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    made, measured = plan(config, measured=run), read_metrics(run)[-1].metrics  # without the first step
    assert made.seconds["gen"] == pytest.approx(measured["timing_s/gen"])
    growth = made.batches.row_tokens / measured["actor/packed_tokens"]
    assert made.seconds["update_actor"] == pytest.approx(growth * measured["timing_s/update_actor"])
    validating = made.num_validations * made.validation_seconds  # the one at the end
    assert made.run_seconds == pytest.approx(STEPS * made.step_seconds + validating)


def test_the_checkpoint_has_the_size_of_the_plan(run, planned):
    actor = run / f"global_step_{STEPS}" / "actor"
    written = sum(
        path.stat().st_size for part in ("weights", "optimizer") for path in (actor / part).rglob("*") if path.is_file()
    )
    assert written == pytest.approx(planned.disk.checkpoint, rel=0.02)
