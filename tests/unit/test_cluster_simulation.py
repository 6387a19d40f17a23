"""The simulation of clusters (benchmarks/simulation.py, cluster_modes.py), by hand, and how it is
compared with real runs (cluster_runs.py)."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from cluster_modes import MODES, Hardware, simulate
from cluster_runs import FITTED, LAYOUTS, PREDICTED, Step, Times, fit, measured_seconds, predict
from simulation import Clock, Group, Linear, LongTail, Replica, SamplingTimes, draw_groups

BY_NAME = {mode.name: mode for mode in MODES}
K0, K1, CONTINUE = BY_NAME["separate, k = 0"], BY_NAME["separate, k = 1"], BY_NAME["separate, k = 4, continue"]
OVERSAMPLING, FINISH = BY_NAME["colocated, oversampling"], BY_NAME["separate, k = 4, finish"]

# A token takes 1 s + 0.5 s for each sequence.
SLOW = SamplingTimes(Linear(1.0, 0.5), max_sequences=8)
TAIL = LongTail.with_longest(100, ratio=8, of=512)
CLUSTER = Hardware(4, SamplingTimes(Linear(0.01, 0.001), 16, 0.02, 0.001), learn_token=1e-3, sync_seconds=0.5)


def sample(times, *lengths):
    """Return when each group, all of which are submitted at 0, has ended."""
    clock, ends = Clock(), {}

    def ended(group):
        ends[group.number] = clock.now

    replica = Replica(clock, times, ended)
    replica.submit(completion for number, each in enumerate(lengths) for completion in of(number, each).completions)
    clock.run()
    return ends


def of(number, lengths):
    return Group.of(number, 10, lengths)


def run(mode, hardware=CLUSTER, *, lengths=TAIL, groups=8, steps=5, warm_up=0):
    drawn = draw_groups(lengths, 4, seed=1)
    return simulate(mode, hardware, drawn, groups_per_step=groups, prompt=20, steps=steps, warm_up=warm_up)


def constant(lengths):
    return itertools.repeat(lengths)


# -- one replica -----------------------------------------------------------------------------------


def test_sequences_share_the_steps_of_a_replica_and_groups_their_prompt():
    # 10 tokens at 2 s for both, and then 10 at 1.5 s for the longer one.
    assert sample(SLOW, [10], [20]) == pytest.approx({0: 20.0, 1: 35.0})
    assert sample(replace(SLOW, max_sequences=1), [10], [20]) == pytest.approx({0: 15.0, 1: 45.0})
    assert sample(replace(SLOW, prompt_seconds=3.0), [10, 10]) == pytest.approx({0: 3.0 + 20.0})


def test_new_weights_prefill_again_what_was_sampled_and_tokens_have_their_version():
    clock, ends = Clock(), []
    replica = Replica(clock, replace(SLOW, prompt_seconds=3.0, token_seconds=0.25), lambda _: ends.append(clock.now))
    group = of(0, [10])
    replica.submit(group.completions)
    clock.at(9.0, replica.pause)  # 3 s of prefill, and 4 tokens
    clock.at(12.0, lambda: replica.load(1))
    clock.run()
    assert ends == pytest.approx([12.0 + 3.0 + 4 * 0.25 + 6 * 1.5])
    assert dict(group.completions[0].segments) == pytest.approx({0: 4.0, 1: 6.0})
    assert replica.totals()[0] == pytest.approx(ends[0] - 3.0)  # not while it was paused


# -- modes -----------------------------------------------------------------------------------------


def equal(mode, **changes):
    """Two replicas, and a step of two groups of 2 x 10 tokens: 20 s; learning takes 30 s."""
    hardware = Hardware(2, SLOW, learn_token=30 / 60, sync_seconds=1.0, group_seconds=2.0, **changes)
    return simulate(mode, hardware, constant((10, 10)), groups_per_step=2, prompt=10, steps=3, warm_up=0)


def test_in_turn_a_step_is_the_sum_of_its_phases():
    found = equal(K0)
    # 20 s of sampling, 4 s of the driver, 30 s of learning, and between steps 1 s of weight sync.
    assert found.step_ends == pytest.approx([0, 54, 109, 164])
    assert found.ages == {0: 120.0}
    assert (found.sampling, found.learning) == pytest.approx((60 / 164, 90 / 164))
    assert (found.driver, found.running) == pytest.approx((12 / 164, 2.0))


def test_in_a_pipeline_a_step_is_its_longer_phase_and_all_tokens_are_one_version_old():
    found = equal(K1)
    # Batch 2 is sampled while step 1 learns; then weights are sent, and step 2 learns.
    assert found.step_ends == pytest.approx([0, 54, 54 + 31, 54 + 62])
    assert found.ages == {0: 40.0, 1: 80.0}  # batch 1 cannot be older


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_groups_and_tokens_are_conserved(mode):
    found = run(mode)
    assert found.started == found.learned + found.dropped + found.unfinished
    assert found.learned == 5 * 8
    assert sum(found.ages.values()) == pytest.approx(found.tokens)
    assert found.max_age <= max(mode.max_staleness, 4 if mode is OVERSAMPLING else 0)
    assert all(0 < share <= 1 + 1e-9 for share in (found.sampling, found.learning))
    assert run(mode) == found


@pytest.mark.parametrize("mode", [FINISH, CONTINUE], ids=lambda mode: mode.name)
def test_streaming_keeps_both_pools_busy_and_drops_what_is_too_old(mode):
    balanced = replace(CLUSTER, learn_token=6e-4)
    found = run(mode, balanced, steps=20, warm_up=5)
    assert found.max_age <= 4
    assert found.tokens_per_second > run(K1, balanced, steps=20, warm_up=5).tokens_per_second
    # With a limit of 0 there is nothing to gain: what was sampled before an update is dropped.
    on_policy = run(replace(mode, max_staleness=0), balanced, steps=5)
    assert on_policy.max_age == 0


# -- the comparison with real runs ----------------------------------------------------------------

TIMES = Times(prompt=0.2, decode=Linear(0.01, 0.001), learn_fixed=1.5, learn_token=0.002, sync=0.3, group=0.05)
PROMPT = FITTED[0].shape.prompt


def step(lengths, workers=1):
    """Return a step that takes what TIMES says. All completions of a worker have one length."""
    mine = lengths[::workers]
    tokens = sum(map(sum, lengths))
    gen = 0.2 * len(mine) + 0.01 * max(map(max, mine)) + 0.001 * sum(map(sum, mine))
    update = 1.0 + 0.002 * (PROMPT * len(lengths) + tokens)
    rest = 0.5 + 0.05 * len(lengths)
    seconds = {"gen": gen, "update_actor": update, "weights": 0.3, "save_checkpoint": 7.0}
    return Step(lengths, seconds | {"step": gen + update + 0.3 + rest + 7.0})


def lengths(setting):
    return [(setting.shape.response,) * setting.shape.n] * setting.shape.prompts


@pytest.mark.parametrize("workers", [1, 2])
def test_the_fit_finds_the_times_of_runs_that_have_them(workers):
    found = fit([step(lengths(setting), workers) for setting in FITTED], prompt=PROMPT, workers=workers)
    assert (found.prompt, found.learn_fixed, found.learn_token) == pytest.approx((0.2, 1.5, 0.002))
    assert (found.decode.fixed, found.decode.per_sequence) == pytest.approx((0.01, 0.001))
    assert (found.sync, found.group) == pytest.approx((0.3, 0.05))


def test_steps_of_other_lengths_are_predicted_and_in_a_pipeline_the_longer_phase():
    setting = PREDICTED[0]
    steps = [step(lengths(setting))] * 4
    assert predict(LAYOUTS["one worker"], setting, steps, TIMES) == pytest.approx(measured_seconds(steps))
    of_phase = steps[0].seconds
    learning = of_phase["update_actor"] + 0.5
    assert of_phase["gen"] < learning
    assert predict(LAYOUTS["separate, k = 1"], setting, steps, TIMES) == pytest.approx(learning + 0.3)
