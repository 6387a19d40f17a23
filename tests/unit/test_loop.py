"""The training loop on fake engines: the order of a step, intervals, traces, guards."""

from __future__ import annotations

import json

import pytest

from support.fake_runs import (
    changed,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    record_of,
    rollouts_of,
    saved_steps,
    train_in,
    validation_of,
)
from trigon.errors import EngineError, ParityError
from trigon.loop import train, validate_only


def test_a_step_samples_with_the_weights_of_the_last_step_and_then_updates(parts, tmp_path):
    with open_run(parts, tmp_path) as run:
        assert train(run, None) == 3
        assert record_of(run).events == [
            *("awake 0", "sample 4 for 1", "asleep", "learn from 4"),
            *("awake 1", "sample 4 for 2", "asleep", "learn from 4"),
            *("awake 2", "sample 4 for 3", "asleep", "learn from 4"),
        ]
        assert run.report.phases == [
            *("weights", "data", "gen", "reward", "parity", "update_actor") * 3,
            "save_checkpoint",
        ]
    versions = {name: {row["policy_version"] for row in rows} for name, rows in rollouts_of(tmp_path).items()}
    assert versions == {"step_000001.jsonl": {0}, "step_000002.jsonl": {1}, "step_000003.jsonl": {2}}
    assert {len(rows) for rows in rollouts_of(tmp_path).values()} == {12}
    [groups] = record_of(run).learned[:1]
    lengths = [len(sequence.token_ids) for group in groups for sequence in group.sequences]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert line["perf/total_num_tokens"] == sum(lengths) + sum(len(group.prompt.token_ids) * 3 for group in groups)
    assert line["response_length/mean"] == pytest.approx(sum(lengths) / 12)


@pytest.mark.parametrize(
    ("intervals", "validated", "saved"),
    [
        ({}, [], [5]),
        ({"save_freq": 2}, [], [2, 4, 5]),
        ({"save_freq": 5}, [], [5]),
        ({"val_before_train": True}, [0, 5], [5]),
        ({"val_before_train": True, "val_freq": 2}, [0, 2, 4, 5], [5]),
        ({"val_freq": 5, "save_freq": 3}, [5], [3, 5]),
    ],
    ids=["never", "save every 2", "save every 5", "before and after", "every 2", "both at the last"],
)
def test_validation_and_saving_happen_at_their_intervals(parts, tmp_path, intervals, validated, saved):
    train_in(tmp_path, parts, plan=plan_of(steps=5), **intervals)
    lines = lines_of(tmp_path)
    assert sorted(lines) == ([0] if 0 in validated else []) + [1, 2, 3, 4, 5]
    assert [step for step in lines if "val/reward_score" in lines[step]] == validated
    files = [name for name in rollouts_of(tmp_path) if name.startswith("validation")]
    assert files == [f"validation_{step:06d}.jsonl" for step in validated]
    assert saved_steps(tmp_path) == saved


def test_validation_uses_the_weights_after_its_step_and_its_score_is_saved_with_them(parts, tmp_path):
    intervals = {"val_before_train": True, "val_freq": 2, "save_freq": 1}
    train_in(tmp_path, parts, plan=plan_of(steps=3), **intervals)
    rollouts = rollouts_of(tmp_path)
    for step in (0, 2, 3):
        rows = rollouts[f"validation_{step:06d}.jsonl"]
        assert {row["policy_version"] for row in rows} == {step}
        assert [row["prompt_id"] for row in rows[::2]] == [parts.validation[i].prompt_id for i in range(3)]
        score = sum(row["reward"] for row in rows) / 6
        assert lines_of(tmp_path)[step]["val/reward_score"] == pytest.approx(score)
    scores = {
        step: json.loads((tmp_path / f"global_step_{step}" / "progress.json").read_text())["val_reward_score"]
        for step in (1, 2, 3)
    }
    lines = lines_of(tmp_path)
    assert scores == {1: None} | {step: pytest.approx(lines[step]["val/reward_score"]) for step in (2, 3)}


def test_val_only_validates_the_given_checkpoint_records_it_and_changes_nothing_else(parts, tmp_path):
    train_in(tmp_path, parts, plan=plan_of(steps=4), save_freq=2)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    checkpoint = latest_checkpoint(tmp_path)
    with open_run(parts, tmp_path, val_only=True) as run:
        assert validate_only(validation_of(run), checkpoint) == 4
        assert run.trainer.updates == 4
        assert record_of(run).learned == []
        assert record_of(run).events == ["awake 4", "sample 2 for 0", "sample 1 for 0", "asleep"]
    *unchanged, added = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert unchanged == before
    line = json.loads(added)
    assert line["step"] == 4
    assert {"val/reward_score", "val_response_length/mean", "timing_s/validation"} <= line["metrics"].keys()
    assert saved_steps(tmp_path) == [2, 4]
    assert {row["policy_version"] for row in rollouts_of(tmp_path)["validation_000004.jsonl"]} == {4}


def test_profiled_steps_write_a_trace_of_one_update_even_if_it_fails(parts, tmp_path):
    with open_run(parts, tmp_path, traced_steps=frozenset({2, 3, 9}), plan=plan_of(steps=3, per_update=2)) as run:
        step = run.trainer.step

        def fail_in_the_third(groups, outputs):
            if run.trainer.updates == 4:
                raise EngineError("failed")
            return step(groups, outputs)

        run.trainer.step = fail_in_the_third
        with pytest.raises(EngineError):
            train(run, None)
    traces = {path.name: path for path in (tmp_path / "profile").iterdir()}
    assert sorted(traces) == ["step_000002.json", "step_000003.json"]
    spans = [event.get("name", "") for event in json.loads(traces["step_000002.json"].read_text())["traceEvents"]]
    assert spans.count("update actor") == 1  # of two


def test_a_rollout_engine_with_other_weights_stops_the_run_before_the_update(parts, tmp_path):
    with open_run(parts, tmp_path, token_logprob=-1.5) as run:
        with pytest.raises(ParityError, match=r"0\.5.*policy version 0|policy version 0.*0\.5"):
            train(run, None)
        assert run.trainer.updates == 0
    assert saved_steps(tmp_path) == []


def test_the_rollouts_of_a_step_that_fails_are_on_disk(parts, tmp_path):
    def fail(self, *_):
        raise RuntimeError("out of memory")

    for method, folder, advantages in (("logprobs", "before", False), ("step", "update", True)):
        with open_run(parts, tmp_path / folder, plan=plan_of(steps=2)) as run:
            failing = type("Failing", (type(run.trainer),), {method: fail})(record_of(run))
            with pytest.raises(RuntimeError, match="out of memory"):
                train(changed(run, trainer=failing), None)
        rows = rollouts_of(tmp_path / folder)["step_000001.jsonl"]
        assert len(rows) == 12
        assert all((row["advantage"] is not None) == advantages for row in rows)
        assert not (tmp_path / folder / "metrics.jsonl").exists()
