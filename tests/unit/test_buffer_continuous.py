"""Groups sampled all the time, on fake engines: ages, the bound, drops, resuming, failures."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from support.fake_runs import (
    FILTER,
    SAMPLING,
    Record,
    SplitEngine,
    StoppingReference,
    check_ages,
    engine_of,
    full_settings,
    latest_checkpoint,
    lines_of,
    mixed_by_prompt,
    open_run,
    plan_of,
    prompts_of,
    record_of,
    rollouts_of,
    rows_by_step,
    saved_steps,
    sometimes_right,
    train_in,
)
from trigon.errors import EngineError, LostSamplersError, RewardError
from trigon.loop import train
from trigon.report.console import Console
from trigon.report.delivery import Hooks
from trigon.system.stopping import Grace
from trigon.types import Completion

PER_STEP = 4
STREAM_SAMPLING = replace(SAMPLING, max_tokens=200)


class StreamingEngine(SplitEngine):
    """An engine on GPUs of its own.

    pause_after: forward passes, after which a call waits until it is interrupted, or for this many
    steps of the learner as pause_steps; but not for long, since the learner may wait for it.
    is_idle: whether no call of generate runs. losses: calls, from 0, whose odd prompts are
    returned as they were begun, as those of a lost replica. failures: errors of calls. fails: for
    each prompt; failing: of these calls. on_awake: called with the version of weights.
    """

    on_awake = None

    def prepare(self, *, pause_after=0, pause_steps=0, losses=(), failures=None, fails=False, failing=()):
        self.failing = failing
        self.pause_after, self.pause_steps = pause_after, pause_steps
        self.losses, self.failures, self.fails = losses, failures or {}, fails
        self.num_steps = 0
        self.num_calls = 0
        self.record = Record()
        self.is_idle = True
        return self

    @contextmanager
    def awake(self, weights, *, version):
        assert self.is_idle, "weights are sent while completions run"
        with super().awake(weights, version=version):
            if self.on_awake is not None:
                self.on_awake(version)
            yield

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        if until is None:  # probes, and validations
            return super().generate(prompts, sampling, on_progress=on_progress, on_group=on_group)
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if call in self.failures:
            raise self.failures[call]
        if self.fails or call in self.failing:
            return [[] for _ in prompts]
        lost = {index for index in range(len(prompts)) if call in self.losses and index % 2}

        passes = itertools.count(1)

        def advance(k):
            on_progress(k)
            if next(passes) == self.pause_after:
                started, steps = time.monotonic(), self.num_steps
                while time.monotonic() < started + 0.5 and (
                    self.num_steps < steps + self.pause_steps if self.pause_steps else until.interrupted is None
                ):
                    time.sleep(0.002)
                    on_progress(None)

        def receive(index, completions):
            if index not in lost:
                on_group(index, completions)

        self.is_idle = False
        try:
            rows = super().generate(prompts, sampling, until=until, on_progress=advance, on_group=receive)
        finally:
            self.is_idle = True
        nothing = [Completion((), (), "unfinished", "", self._version)] * sampling.n
        return [list(until.begun[index]) or nothing if index in lost else row for index, row in enumerate(rows)]


def stream(parts, k, partial, *, steps, complete=sometimes_right, tokens_per_step=1, waits=False, **options):
    """Return the settings of a run. waits: a step waits until all that may begin has ended."""
    rollout = engine_of(parts, StreamingEngine, complete, tokens_per_step=tokens_per_step).prepare(**options)

    def on_rollouts(groups):
        rollout.num_steps += 1
        if waits:
            wait_for_samplers()

    return {
        "rollout": rollout,
        "max_staleness": k,
        "partial": partial,
        "hybrid_engine": False,
        "sampling": STREAM_SAMPLING,
        "plan": plan_of(steps=steps),
        "hooks": Hooks(on_rollouts=on_rollouts),
    }


def wait_for_samplers():
    for thread in threading.enumerate():
        if thread.name.startswith("sampling for step"):
            thread.join(30)


def long_tailed(so_far, version, seed):
    """Complete some prompts in a few tokens, and others in many."""
    if int(so_far.ground_truth) % 3 == 0:
        return "no idea " * 40
    return so_far.ground_truth if seed % 2 else "no idea"


def learned_prompts(folder):
    """Return how often each row of the dataset was learned from."""
    names = [{row["prompt_id"] for row in rows} for rows in rows_by_step(folder).values()]
    return Counter(name.partition("#")[0] for of_step in names for name in of_step)


def drawn_prompts(parts, folder, steps):
    """Return how often this many steps draw each row of the dataset."""
    with open_run(parts, folder) as run:
        return Counter(each.prompt_id.partition("#")[0] for each in prompts_of(run).take(steps * PER_STEP))


@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_samplers_that_are_faster_stay_max_staleness_steps_ahead(parts, tmp_path, partial):
    run = train_in(tmp_path, parts, **stream(parts, 3, partial, steps=8, waits=True))
    # Steps 1 to 4 have weights 0, and each step later begins as many groups as it learns from.
    versions = [{row["policy_version"] for row in rows} for rows in rows_by_step(tmp_path).values()]
    assert versions == [{0}, {0}, {0}, {0}, {1}, {2}, {3}, {4}]
    sampled = [event for event in run.validation.rollout.record.events if "until" in event]
    assert sampled == ["sample 16 for 1 until 16", *[f"sample 4 for {step} until 4" for step in range(2, 6)]]
    assert record_of(run).events.count("learn from 4") == 8
    lines = lines_of(tmp_path)
    assert all(lines[step]["staleness/dropped_groups"] == 0 for step in range(1, 9))
    assert [lines[step]["rollout/waiting_groups"] for step in (6, 7, 8)] == [8, 4, 0]
    assert max(line["rollout/waiting_groups"] for line in lines.values()) <= 3 * PER_STEP
    check_ages(tmp_path, 3)


def test_completions_that_continue_have_the_version_of_each_token(parts, tmp_path):
    train_in(tmp_path, parts, **stream(parts, 8, "continue", steps=6, complete=long_tailed, pause_after=30))
    check_ages(tmp_path, 8)
    rows = [row for rows in rows_by_step(tmp_path).values() for row in rows]
    several = [row for row in rows if row["policy_versions"]]
    assert several
    for row in several:
        versions = [version for version, _ in row["policy_versions"]]
        assert versions == sorted(set(versions))
        assert row["policy_version"] == versions[-1]
    assert sum(line["rollout/carried_tokens"] for line in lines_of(tmp_path).values()) > 0
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 6)


def test_completions_that_finish_have_one_version_and_steps_go_on_meanwhile(parts, tmp_path):
    options = {"complete": long_tailed, "pause_after": 40, "pause_steps": 2}
    run = train_in(tmp_path, parts, **stream(parts, 8, "finish", steps=6, **options))
    awake = [event for event in run.validation.rollout.record.events if event.startswith("awake")]
    check_ages(tmp_path, 8)
    assert all(not row["policy_versions"] for rows in rows_by_step(tmp_path).values() for row in rows)
    assert len(awake) < 6  # the weights were not sent in each step
    compared = ["parity/logprobs_diff_mean" in line for line in lines_of(tmp_path).values()]
    assert compared.count(True) == len(set(awake))
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 6)


@pytest.mark.extended
@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_groups_that_become_too_old_are_counted_and_begin_again(parts, tmp_path, partial):
    train_in(tmp_path, parts, **stream(parts, 2, partial, steps=8, complete=long_tailed, pause_after=30))
    check_ages(tmp_path, 2)
    lines = list(lines_of(tmp_path).values())
    # Completions that finish end before the groups that began with them are used up.
    for unit in ("groups", "tokens"):
        assert (sum(line[f"staleness/dropped_{unit}"] for line in lines) > 0) == (partial == "continue")
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 8)


@pytest.mark.extended(but=["continue"])
@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_a_run_that_resumes_learns_from_each_prompt_once(parts, tmp_path, partial):
    settings = full_settings(6) | stream(parts, 4, partial, steps=6, complete=long_tailed, pause_after=30)
    train_in(tmp_path, parts, stop_after=3, **settings)
    saved = latest_checkpoint(tmp_path).progress["buffer"]
    assert len(saved["ready"]) + len(saved["work"]) == 3 * PER_STEP
    tokens = sum(len(each["token_ids"]) for group in saved["work"] for each in group["completions"])
    assert (tokens > 0) == (partial == "continue")
    train_in(tmp_path, parts, resumes=True, **settings)
    check_ages(tmp_path, 4)
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 6)


@pytest.mark.parametrize("while_weights_are_sent", [False, True])
def test_a_step_that_is_left_saves_the_groups_that_it_was_to_learn_from(parts, tmp_path, while_weights_are_sent):
    unfinished = {"complete": long_tailed, "pause_after": 30} if while_weights_are_sent else {}
    settings = full_settings(6) | stream(parts, 4, "continue", steps=6, **unfinished)
    leave_step_4(parts, tmp_path, settings, while_weights_are_sent=while_weights_are_sent)
    saved = latest_checkpoint(tmp_path).progress["buffer"]
    assert len(saved["ready"]) + len(saved["work"]) == 3 * PER_STEP
    assert any(each["completions"] for each in saved["work"]) or not while_weights_are_sent
    train_in(tmp_path, parts, resumes=True, **settings)
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 6)


def test_a_step_that_is_left_saves_what_was_filtered_out_for_it_and_its_counts(parts, tmp_path):
    settings = full_settings(5) | FILTER
    settings |= stream(parts, 3, "continue", steps=5, complete=mixed_by_prompt, waits=True)
    leave_step_4(parts, tmp_path, settings)
    filtered = {row["prompt_id"] for row in rollouts_of(tmp_path)["filtered_000004.jsonl"]}
    assert filtered
    saved = latest_checkpoint(tmp_path).progress["buffer"]
    assert filtered <= {group["prompt_id"] for group in saved["filtered"]}
    assert saved["num_tokens"] > 0
    train_in(tmp_path, parts, resumes=True, **settings)
    assert filtered <= {row["prompt_id"] for row in rollouts_of(tmp_path)["filtered_000004.jsonl"]}
    assert "filter/low_fraction" in lines_of(tmp_path)[4]


def leave_step_4(parts, folder, settings, *, while_weights_are_sent=False):
    grace = Grace(1e-9)  # shorter than any save
    left = {"grace": grace}
    if while_weights_are_sent:
        settings["rollout"].on_awake = lambda version: version == 3 and grace.request(limited=True)
    else:
        left["reference"] = StoppingReference(settings["reference"], grace)
    with open_run(parts, folder, **settings | left) as run:
        assert train(run, None) == 3
    assert saved_steps(folder) == [2, 3]
    settings["rollout"].on_awake = None


@pytest.mark.parametrize(
    ("partial", "failures"),
    [
        ("finish", {"losses": (0, 2), "complete": long_tailed, "pause_after": 30}),
        ("continue", {"losses": (0, 2), "complete": long_tailed, "pause_after": 30}),
        ("continue", {"failures": {1: LostSamplersError("all are lost")}, "waits": True}),
    ],
)
def test_what_lost_samplers_had_is_sampled_again(parts, tmp_path, partial, failures):
    train_in(tmp_path, parts, **stream(parts, 3, partial, steps=6, **failures))
    check_ages(tmp_path, 3)
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 6)


def test_a_step_is_saved_before_the_error_of_what_is_sampled_meanwhile_ends_the_run(parts, tmp_path):
    settings = stream(parts, 2, "continue", steps=5, waits=True, failures={1: RewardError("as asked")})
    with pytest.raises(RewardError, match="as asked"):
        train_in(tmp_path, parts, **settings, save_freq=2)
    assert saved_steps(tmp_path) == [2]
    train_in(tmp_path, parts, resumes=True, **stream(parts, 2, "continue", steps=5))
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", 5)


def test_an_engine_that_fails_for_every_prompt_ends_the_run(parts, tmp_path):
    with pytest.raises(EngineError, match="any of 8 prompts"):
        train_in(tmp_path, parts, **stream(parts, 2, "continue", steps=2, fails=True))


@pytest.mark.parametrize("failing", [{1}, {1, 2}])
def test_a_prompt_that_fails_is_replaced_and_a_flight_of_few_prompts_may_fail_once(parts, tmp_path, failing):
    drawn, later = drawn_prompts(parts, tmp_path / "other", 3), drawn_prompts(parts, tmp_path / "later", 4)
    once = next(name for name, count in drawn.items() if count == later[name] == 1)
    failed = str(10 + int(once.removeprefix("train:")))

    def complete(so_far, version, seed):
        return None if so_far.ground_truth == failed else so_far.ground_truth

    # Calls: 12 prompts, of which one fails; one in its place; one in the place of that.
    settings = stream(parts, 2, "finish", steps=3, complete=complete, waits=True, failing=failing)
    if len(failing) == 2:
        with pytest.raises(EngineError, match="any of 1 prompts"):
            train_in(tmp_path, parts, **settings)
        return
    run = train_in(tmp_path, parts, **settings)
    calls = [event for event in run.validation.rollout.record.events if "until" in event]
    assert calls[1:] == ["sample 1 for 3 until 1"]
    assert sum(line["rollout/num_skipped"] for line in lines_of(tmp_path).values()) == 2
    assert learned_prompts(tmp_path).total() == 12
    assert once not in learned_prompts(tmp_path)


def test_a_filter_whose_last_prompts_fail_learns_from_what_there_is(parts, tmp_path):
    # Step 1 samples 8 prompts, one of which fails, and takes 4; step 2 one more, which fails.
    with open_run(parts, tmp_path / "other") as run:
        failed = prompts_of(run).take(8)[5].ground_truth

    def complete(so_far, version, seed):
        return None if so_far.ground_truth == failed else so_far.ground_truth if seed % 2 else "no idea"

    bounds = FILTER | {"filter_low": -1.0, "filter_high": 2.0, "mini_rollout_batch_size": 1, "max_try_make_batch": 1}
    settings = bounds | stream(parts, 2, "finish", steps=2, complete=complete, waits=True, failing={1})
    train_in(tmp_path, parts, **settings)
    assert [len(rows) for rows in rows_by_step(tmp_path).values()] == [4 * SAMPLING.n, 3 * SAMPLING.n]


def test_a_prompt_that_is_drawn_again_in_a_step_is_sampled_with_other_seeds(parts, tmp_path):
    def complete(so_far, version, seed):
        return so_far.ground_truth if seed % 2 and int(so_far.ground_truth) % 5 == 0 else "no idea"

    train_in(tmp_path, parts, **FILTER, **stream(parts, 2, "continue", steps=1, complete=complete, waits=True))
    rows = rollouts_of(tmp_path)
    names = [row["prompt_id"] for row in rows["filtered_000001.jsonl"] + rows["step_000001.jsonl"]]
    assert max(Counter(name.partition("#")[0] for name in names).values()) > SAMPLING.n  # drawn twice
    assert max(Counter(names).values()) == SAMPLING.n


def test_a_validation_has_the_newest_weights_and_waits_for_what_runs(parts, tmp_path):
    settings = full_settings(4) | stream(parts, 3, "continue", steps=4, complete=long_tailed, pause_after=30)
    train_in(tmp_path, parts, **settings)
    for step in (2, 4):
        validated = rollouts_of(tmp_path)[f"validation_{step:06d}.jsonl"]
        assert {row["policy_version"] for row in validated} == {step}


@pytest.mark.parametrize("change", ["in line", "another size"])
def test_groups_that_a_resumed_run_cannot_use_are_sampled_again(parts, tmp_path, change):
    train_in(tmp_path, parts, stop_after=1, **stream(parts, 3, "finish", steps=4, waits=True))
    assert len(latest_checkpoint(tmp_path).progress["buffer"]["ready"]) == 3 * PER_STEP
    settings = {"plan": plan_of(steps=2)}
    if change == "another size":
        settings = stream(parts, 3, "finish", steps=4) | {"sampling": replace(STREAM_SAMPLING, n=2)}
    shown = io.StringIO()
    with open_run(parts, tmp_path, **settings) as run:
        run.report._console = Console(stream=shown, progress=False)
        train(run, latest_checkpoint(tmp_path))
    assert "12 groups that the saved run had sampled ahead are sampled again" in " ".join(shown.getvalue().split())
    learned = {step: Counter(row["prompt_id"] for row in rows) for step, rows in rows_by_step(tmp_path).items()}
    sizes = [set(counts.values()) for counts in learned.values()]
    assert sizes == [{3}, *[{run.buffer._sampling.n}] * (run.plan.total_steps - 1)]
    assert learned_prompts(tmp_path) == drawn_prompts(parts, tmp_path / "other", run.plan.total_steps)
