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


def test_steps_of_other_lengths_are_predicted_and_in_a_pipeline_the_longer_phase():
    setting = PREDICTED[0]
    steps = [step(lengths(setting))] * 4
    assert predict(LAYOUTS["one worker"], setting, steps, TIMES) == pytest.approx(measured_seconds(steps))
    of_phase = steps[0].seconds
    learning = of_phase["update_actor"] + 0.5
    assert of_phase["gen"] < learning
    assert predict(LAYOUTS["separate, k = 1"], setting, steps, TIMES) == pytest.approx(learning + 0.3)
