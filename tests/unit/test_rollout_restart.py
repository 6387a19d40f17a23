"""Starting a rollout engine again, with an engine that fails on request."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from support.rollout import NO_WEIGHTS
from trigon.assemble.run import EXPORT, SLOW_SECONDS, limit_of
from trigon.config.schema import Config
from trigon.errors import EngineError, RolloutError
from trigon.metrics import Sum, values
from trigon.rollout.restart import RESTART, RestartingEngine
from trigon.system.hangs import FOLLOWS
from trigon.system.stopping import SAME_COMMAND
from trigon.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.faults

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, ignore_eos=True, seed=5)
PROMPTS = [Prompt(f"train:{i}", (1,), None, "", "", {}, ()) for i in range(3)]


class FailingEngine:
    """Fails at these events, each once; records all of them."""

    num_replicas = 1

    def __init__(self, *failures):
        self.failures, self.events, self.starts = list(failures), [], 0

    def happens(self, event):
        self.events.append(event)
        if event in self.failures:
            self.failures.remove(event)
            raise RolloutError(f"{event} failed")

    @contextmanager
    def awake(self, weights, *, version):
        assert weights is NO_WEIGHTS
        self.happens(f"load {version}")
        try:
            yield
        finally:
            self.events.append("asleep")

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        rows = []
        for index in range(len(prompts)):
            self.happens(f"sample {index}")
            rows.append([Completion((index,), (-1.0,), "stop", f"start {self.starts}", 1)] * sampling.n)
            on_progress(sampling.n)
            on_group(index, rows[-1])
        return rows

    def restart(self):
        self.happens("restart")
        self.starts += 1

    def pop_metrics(self):
        return {"rollout/retried_requests": Sum(0.0)}

    def close(self):
        self.events.append("close")


def sample(engine):
    """Return the completions of the prompts, how many were reported as done, and the groups."""
    done, groups = [], []
    rows = engine.generate(PROMPTS, SAMPLING, on_progress=done.append, on_group=lambda *group: groups.append(group))
    return rows, done, groups


@pytest.mark.faults
def test_a_failure_while_sampling_wakes_a_new_engine_and_reports_each_group_once():
    engine, warnings = FailingEngine("sample 1"), []
    restarting = RestartingEngine(
        engine,
        engine.restart,
        warn=warnings.append,
        same_command=SAME_COMMAND,
    )
    with restarting.awake(NO_WEIGHTS, version=4):
        rows, done, groups = sample(restarting)
        assert engine.events[:7] == [
            *("load 4", "sample 0", "sample 1"),
            *("asleep", "restart", "load 4", "sample 0"),
        ]
    assert engine.events[7:] == ["sample 1", "sample 2", "asleep"]
    assert [row[0].token_ids for row in rows] == [(0,), (1,), (2,)]
    assert [row[0].text for row in rows] == ["start 0", "start 1", "start 1"]  # as reported
    assert done == [2, 0, 2, 2]  # the first prompt of the new engine was counted before
    assert groups == list(enumerate(rows))
    assert len(warnings) == 1
    assert values(restarting.pop_metrics()) == {"rollout/engine_restarts": 1.0, "rollout/retried_requests": 0.0}
    assert restarting.pop_metrics()["rollout/engine_restarts"] == Sum(0.0)


def test_a_failure_while_loading_loads_again_also_inside_another_context():
    engine = FailingEngine("load 5")
    restarting = RestartingEngine(engine, engine.restart, warn=lambda text: None, same_command=SAME_COMMAND)
    with restarting.awake(NO_WEIGHTS, version=4):
        with restarting.awake(NO_WEIGHTS, version=5):
            sample(restarting)
        sample(restarting)
    assert engine.events[:6] == ["load 4", "load 5", "asleep", "restart", "load 4", "load 5"]
    assert [event for event in engine.events[6:] if not event.startswith("sample")] == ["asleep", "asleep"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (("sample 1", "sample 1"), "sample 1 failed\nThe rollout engine was already started again in this run"),
        (("load 4", "sample 2"), "sample 2 failed\nThe rollout engine was already started again in this run"),
        (("load 4", "load 4"), "load 4 failed\nIt failed when it was started again after: load 4 failed"),
        (("sample 0", "restart"), "restart failed\nIt failed when it was started again after: sample 0"),
    ],
)
def test_a_second_failure_ends_the_run(failures, message):
    engine = FailingEngine(*failures)
    restarting = RestartingEngine(engine, engine.restart, warn=lambda text: None, same_command=SAME_COMMAND)
    with pytest.raises(RolloutError) as caught, restarting.awake(NO_WEIGHTS, version=4):
        sample(restarting)
    assert str(caught.value).startswith(message)
    assert engine.events.count("restart") == 1
    other = FailingEngine()
    restarting = RestartingEngine(other, other.restart, warn=lambda text: None, same_command=SAME_COMMAND)
    with pytest.raises(EngineError, match="too long"), restarting.awake(NO_WEIGHTS, version=4):
        raise EngineError("a prompt is too long")  # does not start it again
    assert other.events == ["load 4", "asleep"]


def test_the_restart_is_a_phase_with_the_limits_of_a_start():
    config = Config.model_validate({"trainer": {"worker_timeout_seconds": 60.0}})
    assert limit_of(config, False, RESTART) == limit_of(config, False, "start rollout engine") == SLOW_SECONDS
    assert limit_of(config, True, RESTART) == SLOW_SECONDS  # what it reads is on the disk by then
    assert limit_of(config, False, "gen") == 60.0
    assert limit_of(config, False, EXPORT) is None
    assert limit_of(config, False, f"{FOLLOWS}{EXPORT}") == 60.0
