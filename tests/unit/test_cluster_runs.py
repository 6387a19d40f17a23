"""The comparison of the simulation with real runs (benchmarks/cluster_runs.py), by hand."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from cluster_runs import FITTED, LAYOUTS, PREDICTED, Step, Times, fit, measured_seconds, predict
from simulation import Linear

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


def test_of_a_pipeline_the_busy_time_of_each_pool_is_counted():
    seconds = {"step": 5.0, "weights": 0.3, "parity": 0.2, "update_actor": 2.0, "wait": 1.5, "save_checkpoint": 0.5}
    ahead = Step([(4, 6)], seconds, idle={"learners": 1.5, "samplers": 0.75})
    assert (ahead.total, ahead.sampling, ahead.learning) == (4.5, 3.75, 3.0)
    assert ahead.sync == 0.5  # the parity probe is sampled before the next batch
    assert ahead.rest == pytest.approx(0.5)
    in_turn = step([(4, 6)])
    assert (in_turn.sync, in_turn.rest) == pytest.approx((0.3, 0.55))


def test_no_time_is_negative_where_one_would_fit_best():
    # Twice the tokens in the same time: a fixed time explains it, and a negative one less.
    slow = [step([(10, 10)]), step([(20, 20)])]
    seconds = dict(slow[0].seconds)
    found = fit([slow[0], Step(slow[1].lengths, seconds)], prompt=PROMPT, workers=1)
    assert min(found.prompt, found.decode.fixed, found.decode.per_sequence, found.learn_fixed, found.learn_token) >= 0


@pytest.mark.parametrize("setting", PREDICTED[:2], ids=lambda setting: setting.name)
def test_steps_of_other_lengths_and_batches_are_predicted(setting):
    steps = [step(lengths(setting))] * 4
    predicted = predict(LAYOUTS["one worker"], setting, steps, TIMES)
    assert predicted == pytest.approx(measured_seconds(steps))


def test_in_a_pipeline_the_longer_phase_is_predicted():
    setting = PREDICTED[0]
    steps = [step(lengths(setting))] * 4
    of_phase = steps[0].seconds
    learning = of_phase["update_actor"] + 0.5
    assert of_phase["gen"] < learning
    assert predict(LAYOUTS["separate, k = 1"], setting, steps, TIMES) == pytest.approx(learning + 0.3)
