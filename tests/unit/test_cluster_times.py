"""The simulation in benchmarks/cluster.py has the times of benchmarks/cluster_times.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from cluster import COLOCATED, CONTINUE, Workload, make_hardware, num_learners, run, times_of
from simulation import LongTail

EQUAL = Workload(lengths=LongTail(200, 0.0, 200))
PROMPTS = 8 * EQUAL.prompts_per_gpu


def test_with_equal_lengths_a_simulated_step_is_prompts_decoding_update_and_sync():
    times = times_of(EQUAL, 8, PROMPTS)
    found = run(EQUAL, COLOCATED, 8, 8, PROMPTS, group_seconds=0.0).outcome
    prompts, completions = EQUAL.prompts_per_gpu, EQUAL.prompts_per_gpu * EQUAL.completions
    sampling = prompts * times.prompt_seconds + 200 * times.decode_step(completions)
    assert found.step_seconds == pytest.approx(sampling + times.update_seconds + times.sync_seconds)
    assert found.learning == pytest.approx(times.update_seconds / found.step_seconds)


def test_learners_share_the_update_and_all_weights_go_over_the_network():
    colocated, separate = make_hardware(EQUAL, COLOCATED, 8, 8), make_hardware(EQUAL, CONTINUE, 16, 8)
    assert (colocated.replicas, separate.replicas) == (8, 8)
    assert separate.learn_token == colocated.learn_token
    assert make_hardware(EQUAL, CONTINUE, 64, 32).learn_token == pytest.approx(separate.learn_token / 4)
    # 8.29 billion parameters in two bytes, at 70 % of 400 Gbit/s.
    assert separate.sync_seconds == pytest.approx(2 * 8.29e9 / (0.7 * 50e9), rel=1e-3)


def test_a_model_that_does_not_fit_is_refused():
    small = replace(EQUAL, gpu="A100-40G")
    with pytest.raises(ValueError, match="does not fit into 4 x A100-40G"):
        make_hardware(small, CONTINUE, 8, 4)


@pytest.mark.parametrize(("share", "gpus", "learners"), [(0.5, 8, 4), (0.9, 8, 4), (0.1, 32, 4), (0.625, 128, 80)])
def test_both_pools_get_gpus(share, gpus, learners):
    assert num_learners(share, gpus) == learners
