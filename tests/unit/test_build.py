"""From wishes to objects: the mappings that need no model."""

from pathlib import Path

import pytest
import torch

from trigon.algorithms.importance import Correction
from trigon.algorithms.kl import AdaptiveKl
from trigon.algorithms.losses import LossSettings
from trigon.batch import GroupFilter
from trigon.build.auto_micro_batch import plan_with_budgets
from trigon.build.data import open_evaluator
from trigon.build.engines import Engines
from trigon.build.models import choose_device, choose_kernel
from trigon.build.options import (
    DTYPES,
    advantage_settings,
    group_filter,
    initial_kl,
    intervals,
    kl_is_in_reward,
    loss_terms,
    needs_reference,
    parity_tolerance,
    run_folder,
    sampling_params,
    validation_sampling_params,
)
from trigon.build.run import TrackerEnvironment, tracker_settings
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ConfigError, ModelError
from trigon.loop import Intervals
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.report.summary import next_steps
from trigon.train_groups import AdvantageSettings
from trigon.training.budget import Budgets, Lengths
from trigon.training.fake import FakeTrainEngine
from trigon.training.step import LossTerms
from trigon.types import SamplingParams


def config(**sections) -> Config:
    return Config(**sections)


def test_training_samples_as_the_rollout_section_says():
    wishes = config(
        data={"max_response_length": 77},
        worker={"rollout": {"n": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "ignore_eos": True, "seed": 3}},
    )
    assert sampling_params(wishes) == SamplingParams(
        n=5, temperature=0.7, top_p=0.9, top_k=20, max_tokens=77, ignore_eos=True, seed=3
    )


def test_validation_samples_as_training_where_nothing_else_is_said():
    wishes = config(data={"max_response_length": 77}, worker={"rollout": {"n": 5, "temperature": 0.7, "seed": 3}})
    assert validation_sampling_params(wishes) == sampling_params(wishes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("temperature", 0.0),
        ("top_p", 0.5),
        ("top_k", 4),
        ("max_tokens", 9),
        ("ignore_eos", False),
        ("seed", 0),
    ],
)
def test_each_override_of_validation_counts_even_where_it_is_zero_and_changes_nothing_else(field, value):
    rollout = {"n": 5, "temperature": 0.7, "ignore_eos": True, "seed": 3}
    wishes = config(worker={"rollout": {**rollout, "val_override_config": {field: value}}})
    training, validation = sampling_params(wishes), validation_sampling_params(wishes)
    assert getattr(validation, field) == value
    assert getattr(training, field) != value
    others = [name for name in SamplingParams.__slots__ if name != field]
    assert [getattr(validation, name) for name in others] == [getattr(training, name) for name in others]


KL = [
    # disable_kl, kl_coef, use_kl_loss -> needs a reference, in the reward, estimator in the loss
    (False, 0.01, False, True, True, None),
    (False, 0.01, True, True, False, "low_var_kl"),
    (False, 0.0, False, False, False, None),
    (False, 0.0, True, False, False, None),
    (True, 0.01, False, False, False, None),
    (True, 0.01, True, False, False, None),
]


@pytest.mark.parametrize(("disable_kl", "kl_coef", "use_kl_loss", "needs", "in_reward", "in_loss"), KL)
def test_where_the_kl_goes(disable_kl, kl_coef, use_kl_loss, needs, in_reward, in_loss):
    wishes = config(
        algorithm={
            "disable_kl": disable_kl,
            "kl_coef": kl_coef,
            "use_kl_loss": use_kl_loss,
            "kl_penalty": "low_var_kl",
        }
    )
    assert needs_reference(wishes) == needs
    assert kl_is_in_reward(wishes) == in_reward
    assert loss_terms(wishes).kl_estimator == in_loss


def test_the_loss_is_what_the_actor_section_says():
    wishes = config(
        data={"max_response_length": 77},
        algorithm={
            "use_kl_loss": True,
            "kl_coef": 0.02,
            "kl_penalty": "mse",
            "mismatch_correction": "mask",
            "mismatch_level": "sequence",
            "mismatch_low": 0.9,
            "mismatch_high": 1.1,
        },
        worker={
            "actor": {
                "clip_ratio_low": 0.1,
                "clip_ratio_high": 0.4,
                "clip_ratio_dual": 5.0,
                "loss_avg_mode": "seq_fixed",
                "loss_type": "cispo",
                "cispo_cap": 6.0,
                "tau_positive": 1.5,
                "tau_negative": 2.5,
                "entropy_coeff": 0.003,
            }
        },
    )
    assert loss_terms(wishes) == LossTerms(
        policy=LossSettings(
            kind="cispo", clip_low=0.1, clip_high=0.4, clip_dual=5.0, cap=6.0, tau_positive=1.5, tau_negative=2.5
        ),
        averaging="seq_fixed",
        fixed_length=77,
        kl_estimator="mse",
        kl_coefficient=0.02,
        entropy_coefficient=0.003,
        correction=Correction("mask", "sequence", 0.9, 1.1),
    )


def test_what_was_not_wished_for_is_left_to_its_default():
    terms = loss_terms(config(worker={"actor": {"clip_ratio_high": 0.4, "loss_fixed_length": 9}}))
    assert (terms.policy.cap, terms.fixed_length, terms.correction, terms.entropy_coefficient) == (1.4, 9, None, 0.0)


def test_which_groups_are_learned_from():
    assert group_filter(config()) is None
    filtering = {"online_filtering": True, "filter_key": "accuracy", "filter_low": 0.1, "filter_high": 0.8}
    data = {"rollout_batch_size": 8}
    assert group_filter(config(data=data, algorithm=filtering, trainer={"max_try_make_batch": -1})) == GroupFilter(
        key="accuracy", low=0.1, high=0.8, prompts_per_round=8, max_rounds=0, keep_surplus=False
    )
    wishes = config(
        data={**data, "mini_rollout_batch_size": 3},
        algorithm={**filtering, "filter_surplus": "keep"},
        trainer={"max_try_make_batch": 5},
    )
    chosen = group_filter(wishes)
    assert (chosen.prompts_per_round, chosen.max_rounds, chosen.keep_surplus) == (3, 5, True)


def test_how_rewards_become_advantages():
    plain = advantage_settings(config(algorithm={"disable_kl": True}))
    assert plain == AdvantageSettings(estimator="grpo", gamma=1.0, weights=None, kl_in_reward=None, mask_overlong=False)
    wishes = {
        "adv_estimator": "gdpo",
        "gamma": 0.9,
        "reward_weights": {"accuracy": 2.0},
        "kl_penalty": "full",
        "overlong_filtering": True,
    }
    assert advantage_settings(config(algorithm=wishes)) == AdvantageSettings(
        "gdpo", 0.9, {"accuracy": 2.0}, "full", True
    )


@pytest.mark.parametrize(("kl_type", "horizon"), [("fixed", 0.0), ("adaptive", 500.0)])
def test_only_an_adaptive_kl_has_a_horizon(kl_type, horizon):
    wishes = config(algorithm={"kl_type": kl_type, "kl_coef": 0.02, "kl_target": 0.3, "kl_horizon": 500.0})
    assert initial_kl(wishes) == AdaptiveKl(coefficient=0.02, target=0.3, horizon=horizon)


@pytest.mark.parametrize(
    ("rollout", "actor", "tolerance"),
    [
        ({"dtype": "fp32"}, {"mp_param_dtype": "fp32"}, 1e-3),
        ({"dtype": "bf16"}, {"mp_param_dtype": "fp32"}, 0.1),
        ({"dtype": "fp32"}, {"mp_param_dtype": "bf16"}, 0.1),
        ({"dtype": "fp16"}, {"mp_param_dtype": "fp16"}, 0.1),
        ({}, {}, 0.1),
        ({"dtype": "fp32", "parity_tolerance": 0.5}, {"mp_param_dtype": "fp32"}, 0.5),
        ({"parity_tolerance": 1e-5}, {}, 1e-5),
    ],
)
def test_the_parity_tolerance_follows_the_formats_unless_it_is_given(rollout, actor, tolerance):
    assert parity_tolerance(config(worker={"rollout": rollout, "actor": {"fsdp": actor}})) == tolerance


@pytest.mark.parametrize("never", [0, -1])
def test_a_frequency_of_0_or_minus_1_is_never(never):
    wishes = config(trainer={"val_freq": never, "save_freq": never, "val_generations_to_log": 3})
    assert intervals(wishes, can_validate=True) == Intervals(
        validate_first=True,
        validate_only=False,
        validate_every=0,
        validate_last=True,
        save_every=0,
        generations_shown=3,
    )


def test_without_validation_prompts_nothing_is_validated():
    wishes = config(trainer={"val_freq": 5, "val_before_train": True, "save_freq": 2})
    kept = intervals(wishes, can_validate=False)
    assert (kept.validate_first, kept.validate_every, kept.validate_last) == (False, 0, False)
    assert kept.save_every == 2
    assert open_evaluator(wishes, None, None) is None


def test_the_intervals_is_the_trainers():
    wishes = config(trainer={"val_freq": 5, "val_before_train": False, "save_freq": 2, "val_only": True})
    kept = intervals(wishes, can_validate=True)
    assert (kept.validate_first, kept.validate_only, kept.validate_every) == (False, True, 5)


def test_every_format_has_its_dtype():
    assert {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} == DTYPES
    for name in ("float32", "bfloat16", "float16"):
        dtype = config(worker={"rollout": {"dtype": name}}).worker.rollout.dtype
        assert DTYPES[dtype] == getattr(torch, name)


def test_the_run_folder_is_the_one_named_or_made_of_project_and_experiment():
    names = {"project_name": "p", "experiment_name": "e"}
    assert run_folder(config(trainer=names)) == Path("checkpoints/p/e")
    assert run_folder(config(trainer={**names, "save_checkpoint_path": "/runs/x"})) == Path("/runs/x")


def test_the_device_is_the_one_wished_for():
    assert choose_device(config(trainer={"device": "cpu"})) == torch.device("cpu")
    if torch.cuda.is_available():
        assert choose_device(config()).type == "cuda"
    else:
        assert choose_device(config()).type == "cpu"
        with pytest.raises(ConfigError, match=r"trainer\.device is cuda.*trainer\.device=cpu"):
            choose_device(config(trainer={"device": "cuda"}))


def test_models_attend_by_the_kernel_that_was_asked_for_or_the_best_that_runs(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wishes = [config(worker={"actor": {"model": {"attention_kernel": kernel}}}) for kernel in ("auto", "sdpa", "flex")]
    exact = config(worker={"actor": {"fsdp": {"mp_param_dtype": "fp32"}}})
    assert [choose_kernel(each, gpu) for each in (*wishes, exact)] == ["varlen", "sdpa", "flex", "sdpa"]
    assert [choose_kernel(each, cpu) for each in wishes[:2]] == ["sdpa", "sdpa"]
    with pytest.raises(ModelError, match="attention_kernel=flex needs a GPU"):
        choose_kernel(wishes[2], cpu)


def test_fused_functions_are_refused_where_they_cannot_run():
    fused = config(worker={"actor": {"model": {"use_liger_kernel": True}}})
    with pytest.raises(ModelError, match="use_liger_kernel needs a GPU"):
        choose_kernel(fused, torch.device("cpu"))
    both = config(worker={"actor": {"model": {"use_liger_kernel": True, "compile_layers": True}}})
    with pytest.raises(ConfigError, match="change the same norms and MLPs"):
        choose_kernel(both, torch.device("cpu"))


def test_trackers_are_told_the_whole_configuration():
    environment = TrackerEnvironment(Path("/tb"), None, "offline", "secret")
    wishes = config(trainer={"project_name": "p", "experiment_name": "e"})
    settings = tracker_settings(wishes, environment, Path("/runs/x"))
    assert (settings.project, settings.experiment, settings.folder) == ("p", "e", Path("/runs/x"))
    assert settings.config == wishes.model_dump()
    assert (settings.tensorboard_dir, settings.swanlab_mode) == (Path("/tb"), "offline")


def test_what_to_do_next_depends_on_what_came_of_the_run():
    def said(exported, step):
        return " ".join(next_steps(config(), Path("/runs/x"), exported, step))

    assert "trigon export /runs/x" in said(None, 5)
    assert "export" not in said(Path("/model"), 5)
    assert "export" not in said(None, 0)


FOUND = Budgets(
    update_tokens=36_864,
    update_bytes=43 * 2**30,
    experience_tokens=98_304,
    experience_bytes=61 * 2**30,
    device="Emulated",
    device_bytes=139 * 2**30,
)


def fitted(wishes: Config, folder: RunFolder, *, resumes: bool = False) -> tuple[tuple[int, int], list[tuple]]:
    """Return the token budgets of the plan, and with what the engines were asked."""
    asked: list[tuple] = []

    def fit(lengths: Lengths, known: Budgets | None) -> Budgets:
        asked.append((lengths, known))
        return FOUND

    engine = FakeTrainEngine()
    engines = Engines("", engine, None, None, (), None, fit)
    console = Console(progress=False, step_lines=False)
    plan = plan_with_budgets(
        wishes,
        make_plan(wishes, num_train_prompts=1000),
        engines,
        folder,
        Reporter(folder, console),
        console,
        resumes=resumes,
    )
    return (plan.tokens_per_update_pass, plan.tokens_per_experience_pass), asked


def wishes_that_measure(**model) -> Config:
    return config(
        data={"max_prompt_length": 100, "max_response_length": 30, "rollout_batch_size": 8, "max_pixels": 5000},
        worker={"actor": {"global_batch_size": 4, "model": {"model_path": "some/model", **model}}, "rollout": {"n": 5}},
        trainer={"auto_micro_batch": True},
    )


def test_measured_budgets_are_the_plan_s_are_told_and_hold_for_a_run_that_goes_on(tmp_path, capsys):
    with RunFolder(tmp_path) as folder:
        budgets, asked = fitted(wishes_that_measure(), folder)
        assert budgets == (36_864, 98_304)
        assert asked == [(Lengths(100, 30, 5000, update_tokens=4 * 250, step_tokens=8 * 250), None)]
        told = " ".join(capsys.readouterr().out.split())
        assert (
            "auto micro-batch: 36,864 tokens an update pass (43.0 GiB of 139.0 GiB), 98,304 a pass without gradient "
            "(61.0 GiB)"
        ) in told

        _, asked = fitted(wishes_that_measure(vision_cache_gb=1.0), folder, resumes=True)  # on which nothing depends
        assert asked[0][1] == FOUND
        output = " ".join(capsys.readouterr().out.split())
        assert "as measured before" in output
        assert "anew" not in output

        _, asked = fitted(wishes_that_measure(enable_gradient_checkpointing=False), folder, resumes=True)
        assert asked[0][1] is None
        assert "measured anew" in "".join(capsys.readouterr())


def test_budgets_that_cannot_be_read_are_refused(tmp_path):
    with RunFolder(tmp_path) as folder:
        (tmp_path / "auto_micro_batch.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"auto_micro_batch.json is no JSON.*remove it"):
            fitted(wishes_that_measure(), folder)
        (tmp_path / "auto_micro_batch.json").write_text("[1]")
        with pytest.raises(CheckpointError, match="remove it"):
            folder.read_budgets()
        (tmp_path / "auto_micro_batch.json").write_text('{"of another": "version"}')
        assert fitted(wishes_that_measure(), folder)[1][0][1] is None
