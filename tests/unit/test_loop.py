"""The training loop on fake engines: the order of a step, intervals, traces, guards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from support.fake_runs import (
    INTERVALS,
    NUM_VALIDATION,
    RecordingEngine,
    changed,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    record_of,
    rollouts_of,
    saved_steps,
)
from trigon.errors import EngineError, ParityError
from trigon.loop import count_tokens, groups_to_record, is_due, train
from trigon.metrics import Sum
from trigon.training.fake import FAKE_LOGPROB
from trigon.types import TrainGroup, TrainSequence


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


def test_every_ppo_epoch_makes_an_update_of_each_mini_batch(parts, tmp_path):
    plan = plan_of(steps=2, per_update=2, epochs=3)
    with open_run(parts, tmp_path, plan=plan, needs_old_logprobs=True) as run:
        train(run, None)
        assert run.trainer.updates == plan.total_updates == 12
        first = [[group.prompt.prompt_id for group in batch] for batch in record_of(run).learned[:6]]
    assert first == [first[0], first[1]] * 3
    assert first[0] + first[1] == [row["prompt_id"] for row in rollouts_of(tmp_path)["step_000001.jsonl"][::3]]


@pytest.mark.parametrize(
    ("intervals", "validated", "saved"),
    [
        (INTERVALS, [], [5]),
        (replace(INTERVALS, save_every=2), [], [2, 4, 5]),
        (replace(INTERVALS, save_every=5), [], [5]),
        (replace(INTERVALS, validate_first=True, validate_last=True), [0, 5], [5]),
        (replace(INTERVALS, validate_first=True, validate_every=2, validate_last=True), [0, 2, 4, 5], [5]),
        (replace(INTERVALS, validate_every=5, validate_last=True, save_every=3), [5], [3, 5]),
    ],
    ids=["never", "save every 2", "save every 5", "before and after", "every 2", "both at the last"],
)
def test_validation_and_saving_happen_at_their_intervals(parts, tmp_path, intervals, validated, saved):
    with open_run(parts, tmp_path, plan=plan_of(steps=5), intervals=intervals) as run:
        train(run, None)
    lines = lines_of(tmp_path)
    assert sorted(lines) == ([0] if 0 in validated else []) + [1, 2, 3, 4, 5]
    assert [step for step in lines if "val/reward_score" in lines[step]] == validated
    files = [name for name in rollouts_of(tmp_path) if name.startswith("validation")]
    assert files == [f"validation_{step:06d}.jsonl" for step in validated]
    assert saved_steps(tmp_path) == saved


def test_validation_uses_the_weights_after_its_step_and_its_score_is_saved_with_them(parts, tmp_path):
    intervals = replace(INTERVALS, validate_first=True, validate_every=2, save_every=1)
    with open_run(parts, tmp_path, plan=plan_of(steps=3), intervals=intervals) as run:
        train(run, None)
    rollouts = rollouts_of(tmp_path)
    for step in (0, 2):
        rows = rollouts[f"validation_{step:06d}.jsonl"]
        assert {row["policy_version"] for row in rows} == {step}
        assert [row["prompt_id"] for row in rows[::2]] == [parts.validation[i].prompt_id for i in range(3)]
        score = sum(row["reward"] for row in rows) / 6
        assert lines_of(tmp_path)[step]["val/reward_score"] == pytest.approx(score)
    scores = {
        step: json.loads((tmp_path / f"global_step_{step}" / "progress.json").read_text())["val_reward_score"]
        for step in (1, 2, 3)
    }
    assert scores == {1: None, 2: pytest.approx(lines_of(tmp_path)[2]["val/reward_score"]), 3: None}


class CountingEngine(RecordingEngine):
    """Counts the prompts that it has sampled since the last pop_metrics."""

    sampled = 0

    def generate(self, prompts, sampling, **options):
        self.sampled += len(prompts)
        return super().generate(prompts, sampling, **options)

    def pop_metrics(self):
        sampled, self.sampled = self.sampled, 0
        return {"rollout/sampled": Sum(float(sampled))}


def test_a_step_has_the_counts_of_its_validation_so_that_a_resumed_run_has_the_same(parts, tmp_path):
    def counted(folder, steps, checkpoint=None):
        rollout = CountingEngine(
            tokenizer=parts.processors.tokenizer,
            stop_token_id=parts.processors.stop_token_ids[0],
            complete=lambda p, v, s: p.ground_truth if s % 2 else "no",
            token_logprob=FAKE_LOGPROB,
        )
        intervals = replace(INTERVALS, validate_every=2, save_every=2)
        with open_run(parts, folder, plan=plan_of(steps=steps), intervals=intervals, rollout=rollout) as run:
            train(run, checkpoint)
        return [line["rollout/sampled"] for line in lines_of(folder).values()]

    assert counted(tmp_path / "whole", 3) == [4.0, 4.0 + NUM_VALIDATION, 4.0]
    assert counted(tmp_path / "cut", 2) == [4.0, 4.0 + NUM_VALIDATION]
    assert counted(tmp_path / "cut", 3, latest_checkpoint(tmp_path / "cut")) == [4.0, 4.0 + NUM_VALIDATION, 4.0]


def test_val_only_validates_the_given_checkpoint_records_it_and_changes_nothing_else(parts, tmp_path):
    with open_run(parts, tmp_path, plan=plan_of(steps=4), intervals=replace(INTERVALS, save_every=2)) as run:
        train(run, None)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    checkpoint = latest_checkpoint(tmp_path)
    with open_run(parts, tmp_path, intervals=replace(INTERVALS, validate_only=True), prompts=None) as run:
        assert train(run, checkpoint) == 4
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


def test_profiled_steps_write_a_trace_of_one_update(parts, tmp_path):
    with open_run(parts, tmp_path, traced_steps=frozenset({2, 3, 9})) as run:
        train(changed(run, plan=plan_of(steps=3, per_update=2)), None)
    traces = {path.name: path for path in (tmp_path / "profile").iterdir()}
    assert sorted(traces) == ["step_000002.json", "step_000003.json"]
    spans = [event.get("name", "") for event in json.loads(traces["step_000002.json"].read_text())["traceEvents"]]
    assert spans.count("update actor") == 1  # of two
    assert not any("gen" in name for name in spans if name.startswith("phase"))


def test_a_profiled_update_that_fails_writes_its_trace(parts, tmp_path):
    with open_run(parts, tmp_path, traced_steps=frozenset({1})) as run:

        def fail(groups):
            raise EngineError("failed")

        run.trainer.step = fail
        with pytest.raises(EngineError):
            train(run, None)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_000001.json"]


def test_a_rollout_engine_with_other_weights_stops_the_run_before_the_update(parts, tmp_path):
    with open_run(parts, tmp_path, token_logprob=-1.5) as run:
        with pytest.raises(ParityError, match=r"0\.5.*policy version 0|policy version 0.*0\.5"):
            train(run, None)
        assert run.trainer.updates == 0
    assert saved_steps(tmp_path) == []


def test_tokens_are_counted_with_and_without_prompts(parts, tmp_path):
    with open_run(parts, tmp_path, plan=plan_of(steps=1)) as run:
        train(run, None)
        [groups] = record_of(run).learned
    lengths = [len(sequence.token_ids) for group in groups for sequence in group.sequences]
    prompts = sum(len(group.prompt.token_ids) * 3 for group in groups)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())["metrics"]
    assert line["perf/total_num_tokens"] == sum(lengths) + prompts
    assert line["response_length/mean"] == pytest.approx(sum(lengths) / 12)
    assert count_tokens([]) == 0


@pytest.mark.parametrize(
    ("step", "every", "due"), [(1, 1, True), (4, 2, True), (3, 2, False), (2, 4, False), (5, 0, False)]
)
def test_an_interval_of_zero_is_never(step, every, due):
    assert is_due(step, every) == due


def test_rollouts_are_recorded_with_advantages_and_the_first_group_with_tokens(parts, tmp_path):
    with open_run(parts, tmp_path, plan=plan_of(steps=1)) as run:
        train(run, None)
        [groups] = record_of(run).learned
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    expected = [float(sequence.advantages.mean()) for group in groups for sequence in group.sequences]
    assert [row["advantage"] for row in rows] == expected
    assert [row["tokens"] is not None for row in rows] == [True] * 3 + [False] * 9
    tokens = rows[0]["tokens"]
    assert len(tokens["ids"]) == rows[0]["num_tokens"] == len(tokens["entropy"])
    assert set(tokens["old_logprobs"]) == set(tokens["sampling_logprobs"]) == {-1.0}
    assert "".join(tokens["texts"]).startswith(rows[0]["response"])


def test_the_rollouts_of_a_step_that_fails_are_on_disk(parts, tmp_path):
    def fail(self, groups):
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


def test_tokens_are_recorded_of_groups_that_are_learned_from_before_others(parts):
    values = torch.ones(2)

    def group(*advantages):
        sequences = [TrainSequence((1, 2), values, values * each, values, None, None) for each in advantages]
        return TrainGroup(parts.prompts[0], tuple(sequences))

    groups = [group(0.0, 0.0), group(1.0, -1.0), group(0.0, 0.0), group(0.0, 2.0)]
    assert [groups_to_record(groups, count) for count in (0, 1, 2, 3, 9)] == [[], [1], [1, 3], [0, 1, 3], [0, 1, 2, 3]]
