"""The rules on made series of metrics: bounds, episodes, gaps, resumes."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from trigon.config.names import WatchRule
from trigon.config.schema import WatchConfig
from trigon.metrics import Mean
from trigon.report.watch import RULES, Watch, Watched

HEALTHY = {
    "actor/pg_loss": -0.01,
    "actor/grad_norm": 0.3,
    "actor/kl_loss": 0.1,
    "actor/kl_penalty": 0.1,
    "actor/ppo_kl": 0.001,
    "actor/entropy": 0.4,
    "actor/lr": 1e-6,
    "response_length/mean": 200.0,
    "response_length/clip_ratio": 0.05,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/grad_norm": 0.05,
    "critic/vf_explained_var": 0.4,
    "group/equal_rewards_fraction": 0.5,
    "reward_function/failed_fraction": 0.0,
    "mismatch/logprobs_diff_mean": 0.01,
    "mismatch/k3": 0.001,
    "staleness/max": 0.0,
}

# For each metric with a rule: the rule, a value out of bounds, one just within, changes to both.
FAILURES: dict[str, tuple[WatchRule, float, float, dict[str, float]]] = {
    "actor/pg_loss": ("loss", -12.0, -9.9, {}),
    "actor/grad_norm": ("loss", 31.0, 29.0, {}),
    "critic/grad_norm": ("loss", 5.1, 4.9, {}),
    "actor/kl_loss": ("kl", 5.1, 4.9, {}),
    "actor/kl_penalty": ("kl", 5.1, 4.9, {}),
    "actor/ppo_kl": ("kl", -1.1, 0.9, {}),
    "actor/entropy": ("entropy", 0.004, 0.006, {}),
    "response_length/clip_ratio": ("length", 0.96, 0.94, {}),
    "response_length/mean": ("length", 19.0, 21.0, {}),
    "group/equal_rewards_fraction": ("equal_rewards", 1.0, 0.99, {}),
    "reward_function/failed_fraction": ("reward_failures", 0.06, 0.05, {}),
    "mismatch/k3": ("mismatch", 0.11, 0.09, {"staleness/max": 4.0}),
    "mismatch/logprobs_diff_mean": ("mismatch", 0.051, 0.049, {}),
    "critic/vf_explained_var": ("critic", -1.1, -0.9, {}),
}
STEPS = {rule.metric: rule.steps for rule in RULES}

START = 12
"""Healthy steps before those that fail: the rules with a recent level need ten."""


def observe(watch: Watch, step: int, numbers: dict[str, float]) -> Watched:
    return watch.observe(step, {key: Mean(value) for key, value in numbers.items()})


def run_steps(watch: Watch, steps: list[dict[str, float]], *, first: int = 1) -> dict[int, Watched]:
    """Observe steps with these changes to healthy ones, and return what was said, by step."""
    seen = {step: observe(watch, step, {**HEALTHY, **changes}) for step, changes in enumerate(steps, first)}
    return {step: watched for step, watched in seen.items() if watched.metrics}


def new_in(said: dict[int, Watched]) -> list[int]:
    return [step for step, watched in said.items() if watched.new]


def open_watch(level="warn", ignore=(), **settings) -> Watch:
    return Watch(WatchConfig(level=level, ignore=ignore), **settings)


def test_every_rule_has_a_test():
    assert {rule.metric: rule.name for rule in RULES} == {metric: name for metric, (name, *_) in FAILURES.items()}


@pytest.mark.faults
@pytest.mark.parametrize("metric", FAILURES)
def test_a_metric_out_of_bounds_warns_once_or_stops_after_enough_steps_in_a_row(metric):
    name, out, within, changes = FAILURES[metric]
    failing, healthy, needed = {metric: out, **changes}, [{}] * START, STEPS[metric]
    said = run_steps(open_watch(), healthy + [failing] * (needed + 3))
    first = START + needed
    assert list(said) == list(range(first, first + 4))
    assert new_in(said) == [first]
    [alarm] = said[first].new
    assert (alarm.rule, alarm.first_step, alarm.stops, alarm.saves) == (name, START + 1, False, False)
    assert f"{metric} is {out:.3g}" in alarm.text
    assert all(set(watched.metrics) == {f"watch/{name}"} and watched.stop is None for watched in said.values())
    stopping = run_steps(open_watch("stop"), healthy + [failing] * needed)[first].stop
    assert stopping == replace(alarm, stops=True)
    # Values within the bounds, and too few steps in a row.
    assert run_steps(open_watch(), healthy + [{metric: within, **changes}] * (needed + 5)) == {}
    assert run_steps(open_watch(), healthy + [failing] * (needed - 1) + [{}] + [failing] * (needed - 1)) == {}
    for watch in (open_watch(ignore=(name,)), open_watch("off")):
        assert run_steps(watch, healthy + [failing] * (needed + 1)) == {}


def test_a_second_episode_warns_again_after_as_many_steps_without():
    episode = [{"actor/entropy": 0.001}] * 5
    assert new_in(run_steps(open_watch(), [*episode, *[{}] * 4, *episode, *[{}] * 5, *episode])) == [5, 24]


@pytest.mark.faults
@pytest.mark.parametrize("gap", [float("nan"), float("inf"), None])
# Without an update the policy, and so its entropy, stays as it is.
@pytest.mark.parametrize(("metric", "failing", "step"), [("actor/kl_loss", 9.0, 8), ("actor/entropy", 0.001, 5)])
def test_a_step_without_the_number_neither_counts_nor_ends_a_series(metric, failing, step, gap):
    watch, said = open_watch(), {}
    for number in range(1, 13):
        numbers = {**HEALTHY, metric: gap if number in (2, 3, 4) else failing}
        said[number] = observe(watch, number, {key: value for key, value in numbers.items() if value is not None})
    assert new_in(said) == [step]


def test_a_recent_level_takes_ten_steps_and_a_collapse_within_a_few_steps_is_found():
    norms = [{"actor/grad_norm": 1000.0**step} for step in range(9)]
    rules = [replace(rule, steps=1) for rule in RULES]
    assert run_steps(open_watch(rules=rules), norms) == {}
    assert run_steps(open_watch(rules=rules), [*norms, *norms]) != {}
    # As in a run of a tiny model that was paid for short completions.
    lengths = [19.0, 12.1, 2.8, 1.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert new_in(run_steps(open_watch(), [{"response_length/mean": length} for length in lengths])) == [9]


def test_nothing_is_said_of_what_the_configuration_asks_for():
    cut, single = [{"response_length/clip_ratio": 1.0}] * 20, [{"group/equal_rewards_fraction": 1.0}] * 20
    assert run_steps(open_watch(completions_end=False), cut) == {}
    assert run_steps(open_watch(groups_compared=False), single) == {}  # as of groups with one completion
    equal = [{"critic/score/max": 0.0}] * 20
    assert new_in(run_steps(open_watch(groups_compared=False), equal)) == [10]
    # Older weights differ, and the critic may know nothing while the policy does not learn.
    older = [{"staleness/max": 4.0, "mismatch/logprobs_diff_mean": 0.2}] * 20
    assert run_steps(open_watch(), [{}] * START + older) == {}
    warm_up = {key: value for key, value in HEALTHY.items() if key != "actor/lr"} | {"critic/vf_explained_var": -3.0}
    watch = open_watch()
    assert all(observe(watch, step, warm_up).new == () for step in range(1, 41))
    assert new_in(run_steps(watch, [{"critic/vf_explained_var": -3.0}] * 20, first=41)) == [60]


@pytest.mark.parametrize(
    ("before", "scores", "warns"),
    [
        (0.1, [0.5, 0.8, 0.41, 0.41], []),
        (0.1, [0.5, 0.8, 0.3, 0.5, 0.3], []),
        (0.1, [0.5, 0.8, 0.39, 0.3], [4]),
        (float("nan"), [0.8, 0.3, 0.3], [3]),  # a first validation without a score is none
        (-1.0, [-0.2, -0.5, -0.5], []),  # negative rewards, and rewards around 0: the range is the scale
        (-1.0, [-0.2, -0.9, -0.9], [3]),
    ],
)
def test_the_validation_has_to_be_far_below_its_best_twice(before, scores, warns):
    watch = open_watch()
    watch.validation(0, {"val/reward_score": Mean(before)})
    said = run_steps(watch, [{"val/reward_score": score} for score in scores])
    assert new_in(said) == warns
    assert all(alarm.first_step == step - 1 for step, watched in said.items() for alarm in watched.new)


@pytest.mark.faults
def test_a_resumed_run_says_the_same_at_the_same_steps():
    rng = random.Random(0)
    steps = []
    for _ in range(120):
        changes: dict[str, float] = {}
        for metric, (_name, out, _within, others) in FAILURES.items():
            if rng.random() < 0.7:
                changes |= {metric: out, **others}
        if rng.random() < 0.3:
            changes["val/reward_score"] = rng.random()
        if rng.random() < 0.2:
            changes["actor/entropy"] = float("nan")
        steps.append(changes)
    rules = [replace(rule, steps=3) for rule in RULES]
    whole = run_steps(open_watch(rules=rules), steps)
    assert len(whole) > 50
    for split in (1, 30, 77):
        before, after = open_watch(rules=rules), open_watch(rules=rules)
        first = run_steps(before, steps[:split])
        after.load_state(json.loads(json.dumps(before.state())))
        assert {**first, **run_steps(after, steps[split:], first=split + 1)} == whole
    watch = open_watch()
    watch.load_state({})  # a checkpoint without a state
    assert run_steps(watch, [{}] * 3) == {}
