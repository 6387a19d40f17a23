"""The watchers on made series of metrics: thresholds, episodes, gaps, resumes, memory."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

from trigon.assemble.watchers import make_watch_settings
from trigon.config.plan import make_plan
from trigon.config.schema import Config, WatchConfig
from trigon.metrics import Max, Mean
from trigon.report.watch.memory import HOST, KINDS, LEAST_STEPS, WARM_UP_STEPS, WORKER, Growth, MemoryGrowth
from trigon.report.watch.rules import WatcherName
from trigon.report.watch.slope import fit_slope
from trigon.report.watch.watch import MEMORY, Watch, WatchSettings

HEALTHY = {
    "actor/pg_loss": -0.01,
    "actor/grad_norm": 0.3,
    "actor/kl_loss": 0.1,
    "actor/kl_penalty": 0.1,
    "actor/ppo_kl": 0.001,
    "actor/entropy": 0.4,
    "response_length/mean": 200.0,
    "response_length/clip_ratio": 0.05,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "group/equal_rewards_fraction": 0.5,
    "grader/failed_fraction": 0.0,
    "mismatch/logprobs_diff_mean": 0.01,
    "mismatch/k3": 0.001,
    "staleness/max": 0.0,
    "critic/vf_explained_var": 0.4,
    "critic/vf_loss": 0.05,
    "critic/returns/max": 1.0,
    "critic/returns/min": -1.0,
    "actor/lr": 1e-6,
}

# Each is one way to fail: the watcher, the numbers of a failing step, the numbers of one that is
# just within the default thresholds, and words of the message.
FAILURES: dict[str, tuple[WatcherName, dict[str, float], dict[str, float], str]] = {
    "loss": ("loss", {"actor/pg_loss": -12.0}, {"actor/pg_loss": -9.9}, "actor/pg_loss is -12"),
    "gradient": ("loss", {"actor/grad_norm": 31.0}, {"actor/grad_norm": 29.0}, "actor/grad_norm is 31, and was 0.3"),
    "kl": ("kl", {"actor/kl_loss": 5.1}, {"actor/kl_loss": 4.9}, "actor/kl_loss is 5.1 nats"),
    "kl in the reward": ("kl", {"actor/kl_penalty": 5.1}, {"actor/kl_penalty": 4.9}, "actor/kl_penalty is 5.1 nats"),
    "update": ("kl", {"actor/ppo_kl": -1.1}, {"actor/ppo_kl": 0.9}, "actor/ppo_kl is -1.1 nats"),
    "entropy": ("entropy", {"actor/entropy": 0.004}, {"actor/entropy": 0.006}, "actor/entropy is 0.004 nats"),
    "cut": (
        "length",
        {"response_length/clip_ratio": 0.96},
        {"response_length/clip_ratio": 0.94},
        "96% of the completions are cut",
    ),
    "collapse": (
        "length",
        {"response_length/mean": 19.0},
        {"response_length/mean": 21.0},
        "completions have 19 tokens on average (response_length/mean), and had 200",
    ),
    "equal in groups": (
        "equal_rewards",
        {"group/equal_rewards_fraction": 1.0},
        {"group/equal_rewards_fraction": 0.99},
        "in every group",
    ),
    "equal in all": (
        "equal_rewards",
        {"critic/score/max": 0.0, "group/equal_rewards_fraction": 1.0},
        {"critic/score/max": 0.1},
        "all completions have the reward 0",
    ),
    "failures": (
        "reward_failures",
        {"grader/failed_fraction": 0.06},
        {"grader/failed_fraction": 0.05},
        "6.0% of the completions",
    ),
    "mismatch": (
        "mismatch",
        {"mismatch/logprobs_diff_mean": 0.051},
        {"mismatch/logprobs_diff_mean": 0.049},
        "mismatch/logprobs_diff_mean is 0.051 nats, and was 0.01",
    ),
    "critic": (
        "critic",
        {"critic/vf_explained_var": -1.1},
        {"critic/vf_explained_var": -0.9},
        "critic/vf_explained_var is -1.1 while the policy learns",
    ),
    "value loss": (
        "critic",
        {"critic/vf_loss": 5.1},
        {"critic/vf_loss": 4.9},
        "critic/vf_loss is 5.1, and was 0.05 before",
    ),
    "mismatch, k3": ("mismatch", {"mismatch/k3": 0.11}, {"mismatch/k3": 0.09}, "mismatch/k3 is 0.11 nats"),
    "older weights": (
        "mismatch",
        {"staleness/max": 4.0, "mismatch/k3": 0.11},
        # Grown, since older weights differ, and less than what is too far.
        {"staleness/max": 4.0, "mismatch/k3": 0.09, "mismatch/logprobs_diff_mean": 0.2},
        "mismatch/k3 is 0.11 nats, of weights that are up to 4 steps old. The policy changes too much",
    ),
}

START = 12
"""Healthy steps before the failing ones: the rules that compare need ten."""


def settings_of(
    *, total_steps: int = 10_000, n: int = 4, rollout: dict | None = None, num_workers: int = 1, **watch
) -> WatchSettings:
    trainer = {"watch": watch, "max_steps": total_steps, "n_gpus_per_node": num_workers}
    config = Config(trainer=trainer, worker={"rollout": {"n": n, **(rollout or {})}})
    return make_watch_settings(config, make_plan(config, num_train_prompts=1000))


def open_watch(**settings) -> Watch:
    return Watch(settings_of(**settings))


def observe(watch: Watch, step: int, numbers: dict[str, float]):
    return watch.observe(step, {key: Mean(value) for key, value in numbers.items()})


def run_steps(watch: Watch, steps: list[dict[str, float]], *, first: int = 1):
    """Observe steps with these changes to healthy ones, and return what was said, by step."""
    seen = {step: observe(watch, step, {**HEALTHY, **changes}) for step, changes in enumerate(steps, first)}
    return {step: watched for step, watched in seen.items() if watched.metrics}


def steps_needed(name: str) -> int:
    watch = WatchConfig()
    if name == "critic":
        return watch.critic_steps
    return watch.equal_reward_steps if FAILURES[name][0] == "equal_rewards" else watch.steps


def test_every_watcher_has_an_option_and_a_test():
    assert set(get_args(WatcherName)) <= set(WatchConfig.model_fields)
    assert {watcher for watcher, *_ in FAILURES.values()} | {"validation", "memory"} == set(get_args(WatcherName))


@pytest.mark.faults
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_warns_once_after_enough_steps_in_a_row(name):
    watcher, failing, _within, words = FAILURES[name]
    needed = steps_needed(name)
    said = run_steps(open_watch(), [{}] * START + [failing] * (needed + 3))
    first = START + needed
    # The history of the last twenty steps keeps the level of before for the steps of this test.
    assert list(said) == list(range(first, first + 4))
    [alarm] = said[first].new
    assert (alarm.watcher, alarm.first_step, alarm.stops) == (watcher, START + 1, False)
    assert words in alarm.text
    assert all(set(watched.metrics) == {f"watch/{watcher}"} for watched in said.values())
    assert [watched.new for step, watched in said.items() if step > first] == [()] * 3
    assert all(watched.stop is None for watched in said.values())


@pytest.mark.faults
@pytest.mark.parametrize("name", FAILURES)
def test_values_within_the_thresholds_and_short_failures_say_nothing(name):
    watcher, failing, within, _words = FAILURES[name]
    needed = steps_needed(name)
    assert run_steps(open_watch(), [{}] * START + [within] * (needed + 5)) == {}
    assert run_steps(open_watch(), [{}] * START + [failing] * (needed - 1) + [{}] + [failing] * (needed - 1)) == {}
    assert run_steps(open_watch(**{watcher: "off"}), [{}] * START + [failing] * (needed + 1)) == {}


@pytest.mark.faults
@pytest.mark.parametrize("name", FAILURES)
def test_a_watcher_stops_the_run_if_it_is_told_to(name):
    watcher, failing, _within, _words = FAILURES[name]
    needed = steps_needed(name)
    said = run_steps(open_watch(**{watcher: "stop"}), [{}] * START + [failing] * needed)
    alarm = said[START + needed].stop
    assert alarm is not None
    assert (alarm.watcher, alarm.saves) == (watcher, False)


def test_a_second_episode_warns_again_after_as_many_steps_without():
    failing = {"actor/entropy": 0.001}
    episode = [failing] * 5
    said = run_steps(open_watch(), [*episode, *[{}] * 4, *episode, *[{}] * 5, *episode])
    assert [step for step, watched in said.items() if watched.new] == [5, 24]


def warned_with_gaps(key: str, failing: float, gap: float | None) -> list[int]:
    """Return when a run warns whose steps 2 to 4 have no number; None: not even the metric."""
    watch = open_watch()
    raised = []
    for step in range(1, 13):
        numbers = {**HEALTHY, key: failing}
        if step in (2, 3, 4):
            numbers[key] = gap if gap is not None else 0.0
            if gap is None:
                del numbers[key]
        if observe(watch, step, numbers).new:
            raised.append(step)
    return raised


@pytest.mark.faults
@pytest.mark.parametrize("gap", [float("nan"), float("inf"), None])
def test_a_step_without_the_number_neither_counts_nor_ends_a_series(gap):
    assert warned_with_gaps("actor/kl_loss", 9.0, gap) == [8]


def test_a_step_without_an_update_has_the_entropy_of_the_step_before():
    assert warned_with_gaps("actor/entropy", 0.001, None) == [5]
    assert warned_with_gaps("actor/entropy", 0.001, float("nan")) == [8]
    assert warned_with_gaps("actor/entropy", 0.4, None) == []


def test_rules_that_compare_with_the_start_say_nothing_before_there_is_a_start():
    norms = [{"actor/grad_norm": 1000.0**step} for step in range(9)]
    assert run_steps(open_watch(steps=1), norms) == {}
    assert list(run_steps(open_watch(steps=1), [*norms, *norms])) != []


def test_a_collapse_within_a_few_steps_is_found():
    # As in a run of a tiny model that was paid for short completions.
    lengths = [19.0, 12.1, 2.8, 1.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    said = run_steps(open_watch(), [{"response_length/mean": length} for length in lengths])
    assert [step for step, watched in said.items() if watched.new] == [9]


def test_nothing_is_said_of_what_the_configuration_asks_for():
    cut = [{"response_length/clip_ratio": 1.0}] * 20
    assert run_steps(open_watch(rollout={"ignore_eos": True}), cut) == {}
    assert run_steps(open_watch(), cut) != {}
    single = [{"group/equal_rewards_fraction": 1.0}] * 20  # as every group of one completion has
    assert run_steps(open_watch(n=1), single) == {}


def test_a_critic_may_know_nothing_while_the_policy_rests():
    watch = open_watch()
    healthy = {key: value for key, value in HEALTHY.items() if key != "actor/lr"}
    resting = {**healthy, "critic/vf_explained_var": -3.0}
    assert [observe(watch, step, resting).new for step in range(1, 41)] == [()] * 40
    said = run_steps(watch, [{"critic/vf_explained_var": -3.0}] * 20, first=41)
    assert [step for step, watched in said.items() if watched.new] == [60]


def test_a_critic_whose_loss_is_below_that_of_values_of_zero_does_not_explode():
    assert run_steps(open_watch(), [{"critic/vf_loss": 1e-5}] * 12 + [{"critic/vf_loss": 0.49}] * 20) == {}


def test_a_critic_explodes_also_where_the_returns_contain_its_values():
    # All values are 50, and the returns, with a lambda below 1, are close to them.
    exploded = {"critic/vf_loss": 700.0, "critic/returns/max": 50.0, "critic/returns/min": 1.0}
    said = run_steps(open_watch(), [{}] * START + [exploded] * WatchConfig().steps)
    assert [alarm.watcher for watched in said.values() for alarm in watched.new] == ["critic"]


def test_the_validation_has_to_be_far_below_its_best_twice():
    def scores(*values, before=0.1):
        watch = open_watch()
        watch.validation(0, {"val/reward_score": Mean(before)})
        return run_steps(watch, [{"val/reward_score": value} for value in values])

    assert scores(0.5, 0.8, 0.41, 0.41) == {}
    assert scores(0.5, 0.8, 0.3, 0.5, 0.3) == {}
    said = scores(0.5, 0.8, 0.39, 0.3)
    assert list(said) == [4]
    assert said[4].new[0].first_step == 3
    assert "val/reward_score is 0.3, and was 0.8 after step 2" in said[4].new[0].text
    # A first validation without a score is none.
    assert scores(0.8, 0.3, 0.3, before=float("nan")) != {}
    # Negative rewards, and rewards around 0: the range is the scale.
    assert scores(-1.0, -0.2, -0.5, -0.5, before=-1.0) == {}
    assert list(scores(-1.0, -0.2, -0.9, -0.9, before=-1.0)) == [4]


@pytest.mark.faults
def test_a_resumed_run_says_the_same_at_the_same_steps():
    rng = random.Random(0)
    steps = []
    for _ in range(120):
        changes: dict[str, float] = {}
        for _watcher, failing, _within, _words in FAILURES.values():
            if rng.random() < 0.7:
                changes |= failing
        if rng.random() < 0.3:
            changes["val/reward_score"] = rng.random()
        if rng.random() < 0.2:
            changes["actor/entropy"] = float("nan")
        steps.append(changes)
    whole = run_steps(open_watch(steps=3, equal_reward_steps=3, critic_steps=3), steps)
    assert len(whole) > 50
    for split in (1, 30, 77):
        before = open_watch(steps=3, equal_reward_steps=3, critic_steps=3)
        first = run_steps(before, steps[:split])
        after = open_watch(steps=3, equal_reward_steps=3, critic_steps=3)
        after.load_state(json.loads(json.dumps(before.state())))
        assert {**first, **run_steps(after, steps[split:], first=split + 1)} == whole


def test_a_checkpoint_without_a_state_starts_anew():
    watch = open_watch()
    watch.load_state({})
    assert run_steps(watch, [{}] * 3) == {}


# -- memory --


def memory_steps(growth_gb: list[float], *, free_gb: float = 100.0, key: str = "perf/memory_driver_gb", noise=0.01):
    """Return what memory has to say in each step: None, or whether it stops."""
    rng = random.Random(1)
    memory, used, said = MemoryGrowth(), 0.0, []
    for step, grown in enumerate(growth_gb, 1):
        used += grown
        measured = {key: 10.0 + used + rng.uniform(-noise, noise), HOST.left: free_gb - used}
        memory.add(step, measured)
        said.append(memory.find(steps_to_stop=5, total_steps=10_000))
    return said


def test_flat_noisy_memory_gives_no_alarm():
    assert memory_steps([0.0] * 300, free_gb=0.5, noise=0.3) == [None] * 300


@pytest.mark.faults
def test_a_jump_and_growth_in_the_warm_up_give_no_alarm():
    assert memory_steps([5.0] * WARM_UP_STEPS + [0.0] * 200) == [None] * (WARM_UP_STEPS + 200)
    # Without the warm-up the eighth step would stop: 23 GiB left, and 5 GiB more at each step.
    assert memory_steps([5.0] * 7 + [0.0] * 50, free_gb=58.0) == [None] * 57
    assert memory_steps([0.0] * 50 + [20.0] + [0.0] * 100) == [None] * 151
    jumps = [0.5 if step % 20 == 0 else 0.0 for step in range(150)]  # as of validations, three in a window
    assert not any(found and found[1] for found in memory_steps(jumps))
    caches = [2.0 * 0.5**step for step in range(150)]
    assert memory_steps(caches, noise=0.0) == [None] * 150


def test_a_fast_leak_stops_before_nothing_is_left():
    said = memory_steps([2.0] * 60, free_gb=50.0)
    stopped = next(step for step, found in enumerate(said, 1) if found is not None and found[1])
    growth, _ = said[stopped - 1]
    assert 50.0 - 2.0 * stopped > 0
    assert stopped >= WARM_UP_STEPS + LEAST_STEPS
    assert growth.steps_left == pytest.approx((50.0 - 2.0 * stopped) / 2.0, rel=0.05)
    assert "host memory grows by 2.0" in growth.describe()
    assert "perf/memory_driver_gb" in growth.describe()


def test_a_slow_leak_warns_only_if_it_reaches_the_limit_before_the_last_step():
    steps = [0.02] * 100
    found = [each for each in memory_steps(steps, free_gb=20.0, noise=0.005) if each is not None]
    assert found
    assert not any(is_near for _, is_near in found)
    assert memory_steps(steps, free_gb=1000.0, noise=0.005) == [None] * 100  # 50,000 steps


def test_a_leak_that_begins_late_is_found_by_its_own_slope():
    said = memory_steps([0.0] * 100 + [3.0] * 40, free_gb=130.0)
    stopped = next(step for step, found in enumerate(said, 1) if found is not None and found[1])
    assert stopped < 100 + 130 / 3


def test_every_kind_of_memory_is_watched():
    for kind in KINDS:
        memory = MemoryGrowth()
        for step in range(1, 40):
            memory.add(step, {kind.used[0]: 0.5 * step, kind.left: 20.0 - 0.5 * step})
        growth, must_stop = memory.find(steps_to_stop=5, total_steps=1000)
        assert growth.kind is kind
        assert must_stop is (kind.name != "Ray's object store")  # whose objects go to disk


def test_an_object_store_that_fills_warns_and_hides_no_other_memory():
    [store] = [kind for kind in KINDS if not kind.ends_run]
    watch, said = open_watch(), {}
    for step in range(1, 120):
        used = {store.used[0]: Max(0.5 * step), store.left: Max(max(20 - 0.5 * step, 0.0))}
        if step > 60:
            used |= {HOST.used[0]: Max((step - 60) / 3), HOST.left: Max(20 - (step - 60) / 3)}
        said[step] = watch.observe(step, {**{key: Mean(value) for key, value in HEALTHY.items()}, **used})
    first = next(watched for watched in said.values() if watched.new)
    assert "objects are written to disk" in first.new[0].text
    assert not first.new[0].stops
    stop = next(watched for watched in said.values() if watched.stop is not None).stop
    assert "host memory grows" in stop.text


def test_the_memory_that_a_save_needs_has_to_be_left_when_the_run_stops():
    """2 GiB more at each step, of 50; at its end 5 GiB more are left than the least of a step."""

    def stop_step(**settings) -> tuple[int, Growth]:
        memory = MemoryGrowth(**settings)
        for step in range(1, 60):
            left = 50.0 - 2.0 * step
            memory.add(step, {HOST.used[0]: 2.0 * step, HOST.left: left}, left_now_gb=left + 5.0)
            found = memory.find(steps_to_stop=5, total_steps=10_000)
            if found is not None and found[1]:
                return step, found[0]
        raise AssertionError

    step, growth = stop_step(save_gb=20.0)
    assert 0 < 55.0 - 2.0 * step - 20.0 <= 10.0
    assert growth.steps_left == pytest.approx((55.0 - 2.0 * step - 20.0) / 2.0)
    assert f"{55.0 - 2.0 * step:.2f} GiB are left, of which a save takes 20.00 GiB: at this" in growth.describe()
    without, growth = stop_step()
    assert 50.0 - 2.0 * without == 10.0
    assert "a save" not in growth.describe()
    # A save that fits into the room between the least of a step and its end changes nothing.
    assert stop_step(save_gb=4.0)[0] == without


def test_the_copies_of_a_save_in_progress_are_not_subtracted_again():
    def stop_step(saving: bool) -> int:
        watch = Watch(replace(settings_of(), save_gb=10.0), SimpleNamespace(measure=dict, left_gb=25.0))
        for step in range(1, 60):
            watch.begin_step(saving=saving)
            memory = {WORKER: Max(float(step)), HOST.left: Max(25.0 - step)}
            if watch.observe(step, memory).stop is not None:
                return step
        raise AssertionError

    assert stop_step(saving=True) == 20  # 5 steps before nothing is left
    assert stop_step(saving=False) == 13  # the first step that can stop, since 15 steps later it is too late


def test_workers_that_grow_alike_reach_the_limit_of_their_machine_together():
    def stop(workers: int) -> tuple[int, str]:
        watch = open_watch(num_workers=workers)
        for step in range(1, 200):
            memory = {WORKER: Max(0.125 * step), HOST.left: Max(20.0 - 0.125 * workers * step)}
            watched = watch.observe(step, memory)
            if watched.stop is not None:
                return step, watched.stop.text
        raise AssertionError

    step, text = stop(8)
    assert 20.0 - step == 5.0  # 1 GiB at each step
    assert "host memory grows by 1.02e+03 MiB per step" in text
    assert "perf/memory_worker_gb by 128 in each of 8 workers" in text
    step, text = stop(1)
    assert 20.0 - 0.125 * step == 5 * 0.125
    assert "in each of" not in text


def test_the_memory_of_workers_is_in_the_metrics_of_the_step():
    watch = open_watch()
    said = {}
    for step in range(1, 40):
        metrics = {"perf/memory_worker_gb": Max(step / 2), HOST.left: Max(20 - step / 2)}
        said[step] = watch.observe(step, {**{key: Mean(value) for key, value in HEALTHY.items()}, **metrics})
    stopping = [step for step, watched in said.items() if watched.stop is not None]
    assert said[stopping[0]].stop.saves
    assert MEMORY in said[stopping[0]].metrics
    assert "perf/memory_worker_gb by 512" in said[stopping[0]].stop.text
    first = next(step for step, watched in said.items() if watched.new)
    assert first == stopping[0]


# -- slopes --


def test_the_slope_of_a_line_with_outliers_is_that_of_the_line():
    xs = list(range(20))
    ys = [3.0 + 0.5 * x for x in xs]
    ys[3] = ys[11] = 1000.0
    slope = fit_slope(xs, ys)
    assert slope.value == pytest.approx(0.5)
    assert slope.low == pytest.approx(0.5)
    assert slope.high == pytest.approx(0.5)


def test_the_slope_by_hand():
    # Pairs of (0, 0), (1, 1), (2, 3), (3, 3): slopes 1, 1.5, 1, 2, 1, 0.
    slope = fit_slope([0, 1, 2, 3], [0, 1, 3, 3])
    assert slope.value == 1.0
    assert (slope.low, slope.high) == (0.0, 2.0)
    with pytest.raises(ValueError, match="three points"):
        fit_slope([0, 1], [0, 1])


def test_the_interval_holds_the_true_slope_about_as_often_as_it_says():
    rng = random.Random(0)
    held = 0
    for _ in range(200):
        ys = [0.2 * x + rng.gauss(0, 1) for x in range(30)]
        slope = fit_slope(range(30), ys)
        held += slope.low <= 0.2 <= slope.high
    assert 180 <= held <= 199
