"""Which options a checkpoint is compared with when a run is resumed."""

import json
from fnmatch import fnmatchcase

import pytest

from trigon.config.checks import find_problems
from trigon.config.compared import BY_CONTENT, FREE, compared_options, is_accepted, schedule_depends_on_length
from trigon.config.options import options
from trigon.config.plan import fill_batch_sizes
from trigon.config.schema import Config

# Together they use every option on which numbers depend.
CONFIGS = [
    Config(algorithm={"kl_type": "adaptive", "online_filtering": True, "mismatch_correction": "mask"}),
    Config(algorithm={"max_staleness": 2}, data={"val_files": ("a/b",)}),
    Config(algorithm={"adv_estimator": "gdpo"}, worker={"actor": {"loss_type": "sapo", "loss_avg_mode": "seq_fixed"}}),
    Config(
        algorithm={"adv_estimator": "reinforce_plus_plus"},
        worker={
            "actor": {
                "loss_type": "cispo",
                "optim": {"lr_scheduler_type": "cosine"},
                "model": {"lora": {"rank": 4}},
            },
            "rollout": {"tools": ("crop",)},
        },
    ),
    Config(worker={"rollout": {"oversampling": 0.25}}),
    Config(
        algorithm={"adv_estimator": "gae"},
        worker={"critic": {"optim": {"lr_scheduler_type": "cosine"}, "model": {"lora": {"rank": 4}}}},
    ),
    Config(algorithm={"adv_estimator": "gae"}, worker={"critic": {"share_trunk": True}}),
]
CONFIGS += [fill_batch_sizes(config, 40)[0] for config in CONFIGS]  # as after the data is read


def test_options_are_compared_unless_they_change_rounding_only():
    names = {option.name for option in options().values()}
    compared = {name for config in CONFIGS for name in compared_options(config)}
    kept = {name for name in names if any(fnmatchcase(name, each) for each in (*FREE, *BY_CONTENT))}
    assert not compared & kept
    assert all(name.startswith("trainer.") for name in names - compared - kept)
    assert {"data.seed", "worker.actor.optim.lr", "worker.critic.optim.lr", "algorithm.gamma"} <= compared
    assert [each for each in (*FREE, *BY_CONTENT) if not any(fnmatchcase(name, each) for name in names)] == []


def test_the_values_survive_a_checkpoint_and_changes_are_accepted_by_name():
    for config in CONFIGS:
        values = compared_options(config)
        assert json.loads(json.dumps(values, allow_nan=False)) == values
    for accepted, expected in ((("data.seed",), True), (("all",), True), (("worker.rollout.seed",), False)):
        assert is_accepted("data.seed", accepted) is expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"worker": {"actor": {"fsdp": {"torch_dtype": None}}}},
            {"worker": {"actor": {"fsdp": {"torch_dtype": "fp32"}}}},
        ),
        ({"algorithm": {"filter_low": 0.1}}, {"algorithm": {"filter_low": 0.2}}),  # online_filtering is off
        ({"worker": {"actor": {"tau_positive": 2.0}}}, {}),  # not sapo
        (
            {"algorithm": {"mismatch_correction": "truncate", "mismatch_low": 0.1}},
            {"algorithm": {"mismatch_correction": "truncate"}},
        ),
        ({"trainer": {"max_steps": 3, "save_freq": 1}}, {"trainer": {"max_steps": 30, "n_gpus_per_node": 4}}),
    ],
)
def test_an_option_without_effect_and_a_default_that_is_written_out_are_no_difference(before, after):
    assert compared_options(Config(**before)) == compared_options(Config(**after))


def test_a_learning_rate_that_depends_on_the_number_of_steps():
    def depends(**optim):
        return schedule_depends_on_length(Config(worker={"actor": {"optim": optim}}))

    assert depends(lr_scheduler_type="cosine")
    assert depends(lr_warmup_ratio=0.1)
    assert not depends(lr_warmup_ratio=0.1, lr_warmup_steps=3)
    assert not depends()


def test_a_name_that_is_no_option_is_a_problem():
    def problems(*names):
        found = find_problems(Config(trainer={"accept_changes": names}))
        return [problem for problem in found if "accept_changes" in problem]

    assert problems("all", "data.seed", "worker.reward.reward_function") == []
    [problem] = problems("optim.lr")
    assert "'optim.lr'" in problem
    assert "worker.actor.optim.lr" in problem
