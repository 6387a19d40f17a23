"""The parts of a run that need no model: tracker settings, the evaluator, early errors."""

import json
import shutil
from pathlib import Path

import pytest

from trigon.build.data import open_evaluator
from trigon.build.run import TrackerEnvironment, make_tracker_settings, run_training
from trigon.config.load import load_config
from trigon.config.schema import Config
from trigon.errors import RewardError


def test_trackers_get_the_resolved_configuration():
    environment = TrackerEnvironment(Path("/tb"), None, "offline", "secret")
    config = Config(trainer={"project_name": "p", "experiment_name": "e"})
    settings = make_tracker_settings(config, environment, Path("/runs/x"))
    assert (settings.project, settings.experiment, settings.folder) == ("p", "e", Path("/runs/x"))
    assert settings.config == config.model_dump()
    assert (settings.tensorboard_dir, settings.swanlab_mode) == (Path("/tb"), "offline")


def test_without_validation_prompts_there_is_no_evaluator():
    assert open_evaluator(Config(trainer={"val_freq": 5}), None, None) is None


def run(folder: Path, *, model: Path, reward: str) -> None:
    """Start a run on two rows. It can only fail: its reward function or its model is of no use."""
    rows = [{"problem": f"What is {n} + 0?", "answer": str(n)} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    overrides = [
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.prompt_key=problem",
        f"worker.actor.model.model_path={model}",
        f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
        f"trainer.save_checkpoint_path={folder / 'run'}",
        "worker.rollout.name=transformers",
        "worker.rollout.n=2",
        "data.rollout_batch_size=2",
        "worker.actor.global_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.logger=[file]",
    ]
    run_training(
        load_config(None, overrides).config,
        warnings=(),
        trackers=TrackerEnvironment(None, None, None, None),
        should_stop=lambda: False,
        export_to=None,
    )


@pytest.fixture
def damaged_model(tiny_model, tmp_path) -> Path:
    """A model whose tokenizer can be loaded, and whose weights cannot."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2"), folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def test_a_reward_function_that_fails_is_an_error_before_the_model_is_loaded(tmp_path, damaged_model):
    reward = "def compute_score(predict_str, ground_truth):\n    return None\n"
    with pytest.raises(RewardError, match=r"no score for a dummy completion of rows:0, .*: returned None for"):
        run(tmp_path, model=damaged_model, reward=reward)
