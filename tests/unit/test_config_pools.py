"""Separate pools of workers in the configuration: checks, sizes, and the default correction."""

import pytest

from trigon.config.defaults import resolve_mismatch_correction
from trigon.config.load import LoadedConfig, load_config
from trigon.config.plan import num_devices, num_samplers, num_workers
from trigon.errors import ConfigError

NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)
SEPARATE = ("worker.hybrid_engine=false",)
STREAM = (*SEPARATE, "algorithm.max_staleness=4", "worker.rollout.n_gpus_per_node=2")


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, (*NEEDED, *overrides))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("algorithm.max_staleness=1",), "set worker.hybrid_engine=false, or max_staleness=0"),
        ((*SEPARATE, "worker.rollout.partial=continue"), "Set max_staleness=2, or partial=finish"),
        (("worker.rollout.partial=continue",), "needs worker.hybrid_engine=false and algorithm.max_staleness above 1"),
        (
            (*SEPARATE, "worker.rollout.n_gpus_per_node=3", "worker.rollout.tensor_parallel_size=2"),
            r"there are 1 x 3 = 3 workers \(worker.rollout.nnodes x worker.rollout.n_gpus_per_node\), which it must",
        ),
    ],
)
def test_pools_that_cannot_work_are_refused_with_what_to_change(options, problem):
    with pytest.raises(ConfigError, match=problem):
        load(*options)


@pytest.mark.parametrize(
    "options",
    [
        (*SEPARATE, "worker.rollout.oversampling=0.5"),
        (*SEPARATE, "algorithm.max_staleness=1", "algorithm.online_filtering=true"),
        (*STREAM, "algorithm.online_filtering=true", "worker.rollout.oversampling=0.5"),
        (*STREAM, "worker.rollout.tensor_parallel_size=2"),
        (*STREAM, "worker.rollout.tools=[crop]", "worker.rollout.partial=continue"),
        (*STREAM, "algorithm.adv_estimator=remax"),
    ],
)
def test_pools_compose_with_what_decides_which_groups_are_learned_from(options):
    load(*options)


def test_separate_pools_may_have_other_sizes_and_correct_for_staleness_unless_that_is_set():
    config = load(*SEPARATE, "worker.rollout.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=4").config
    assert (num_workers(config), num_samplers(config), num_devices(config)) == (1, 4, 5)
    assert resolve_mismatch_correction(config) == "off"
    stale = (*SEPARATE, "algorithm.max_staleness=1")
    assert resolve_mismatch_correction(load(*stale).config) == "truncate"
    assert resolve_mismatch_correction(load(*stale, "algorithm.mismatch_correction=off").config) == "off"
    assert resolve_mismatch_correction(load(*STREAM, "worker.rollout.partial=continue").config) == "truncate"


def test_sizes_of_samplers_have_no_effect_without_a_pool_of_their_own():
    assert load("worker.rollout.nnodes=2").warnings == (
        "worker.rollout.nnodes has no effect without worker.hybrid_engine=false",
    )
