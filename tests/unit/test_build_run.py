"""The parts of a run that need no model: what loggers are told, the evaluator, early errors."""

import importlib.util
import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import save_file

from trigon.assemble.parts import check_environment
from trigon.assemble.run import choose_checkpoint, describe_run, warn_of_moved_run
from trigon.assemble.start import StopSignals, start_run
from trigon.checkpoint.store import Checkpoint, CheckpointStore
from trigon.config.load import LoadedConfig, dump_config, inspect_config
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ConfigError, DataError, RewardError
from trigon.report.run_folder import RunFolder


@pytest.mark.parametrize(("val_only", "resumed", "first_step"), [(False, 8, 9), (False, None, 0), (True, 8, None)])
def test_loggers_get_the_resolved_configuration_and_the_first_step_of_which_a_run_reports(
    val_only, resumed, first_step
):
    checkpoint = None if resumed is None else Checkpoint(resumed, Path(f"/runs/x/global_step_{resumed}"), {}, None)
    own = {"project_name": "p", "experiment_name": "e", "logger": ("console",), "val_only": val_only}
    run = describe_run(Config(trainer=own), Path("/runs/x"), checkpoint)
    assert (run.project, run.experiment, run.folder, run.first_step) == ("p", "e", Path("/runs/x"), first_step)
    assert run.config["trainer"]["logger"] == ["console"]  # of JSON types
    assert json.loads(json.dumps(run.config, allow_nan=False)) == run.config


def test_the_configuration_of_a_run_folder_that_was_moved_names_both_folders(tmp_path, monkeypatch):
    started, moved = tmp_path / "started", tmp_path / "moved"
    with RunFolder(started) as folder:
        folder.write_config(dump_config(Config(trainer={"save_checkpoint_path": str(started)})))
    path = started / "config.yaml"
    assert warn_of_moved_run(inspect_config(path, [])) == []
    started.rename(moved)
    path = moved / "config.yaml"
    [text] = warn_of_moved_run(inspect_config(path, []))
    assert f"writes into {started}" in text
    assert f"trainer.save_checkpoint_path={moved}" in text
    monkeypatch.setenv("HOME", str(tmp_path))
    assert warn_of_moved_run(inspect_config("~/moved/config.yaml", [])) == [text]
    assert warn_of_moved_run(inspect_config(path, [f"trainer.save_checkpoint_path={moved}"])) == []
    assert warn_of_moved_run(inspect_config(path, [{"trainer.save_checkpoint_path": str(tmp_path / "new")}])) == []
    shutil.copy(path, tmp_path / "config.yaml")  # no run folder
    assert warn_of_moved_run(inspect_config(tmp_path / "config.yaml", [])) == []


def test_a_run_without_vllm_ends_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm, which is not installed: .*worker\.rollout\.name=transformers"):
        check_environment(Config(trainer={"device": "cpu"}))


@pytest.fixture
def run(tiny_vlm, tmp_path, monkeypatch):
    """Return a function that starts a run whose model has unreadable weights: loading it fails."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def start(rows, *, source=tiny_vlm, change=None, score="0.0", lora_rank=0, **data):
        model = shutil.copytree(source, tmp_path / "model")
        for weights in model.glob("*.safetensors"):
            weights.write_bytes(b"nothing")
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        (model / "config.json").write_text(json.dumps(content | (change or {})))
        (tmp_path / "reward.py").write_text(f"def compute_score(predict_str, ground_truth):\n    return {score}\n")
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes = {"rollout_batch_size": 2, "min_pixels": None, "max_pixels": None}
        config = Config(
            data={"train_files": (str(path),), "prompt_key": "problem", **sizes, **data},
            worker={
                "actor": {"model": {"model_path": str(model), "lora": {"rank": lora_rank}}, "global_batch_size": 2},
                "reward": {"reward_function": f"{tmp_path}/reward.py:compute_score", "num_cpus": 1},
            },
            trainer={"save_checkpoint_path": str(tmp_path / "run"), "device": "cpu", "val_freq": -1},
        )
        start_run(LoadedConfig(config, (), {}), stop=StopSignals())

    return start


def test_a_model_that_does_not_fit_is_an_error_before_it_is_loaded(run, tiny_model):
    too_large = {"hidden_size": 2**17, "intermediate_size": 2**20}
    with pytest.raises(ConfigError, match=r"(?s)this run needs at least .* during update, and there are .*\n.*weights"):
        run(rows(1, 2, 3), source=tiny_model("qwen2"), change=too_large)


def test_a_reward_function_that_fails_is_an_error_before_the_model_is_loaded(run):
    with pytest.raises(RewardError, match=r"no score for a dummy completion of train:0, .*: returned None, expected"):
        run(rows(1, 2, 3), score="None")


def rows(*numbers):
    return [{"problem": f"{number} + 1?", "answer": str(number + 1)} for number in numbers]


def save_checkpoint(folder, *, part, **progress):
    """Write the checkpoint of an earlier run, whose tensors are never read."""

    def write(actor):
        for name in (part, "optimizer"):
            (actor / name).mkdir()
            save_file({"x": torch.zeros(1)}, actor / name / "x.safetensors")
        (actor / "state.json").write_text('{"updates": 1, "strategy": "adamw"}')
        if part == "adapter":
            (actor / "adapter_config.json").write_text('{"r": 8}')

    made_from = {"options": {}, "contents": {}, "given": {}, "noted": {}}
    CheckpointStore(folder, keep=-1).save(1, write=write, progress={"made_from": made_from, **progress}, score=None)


PROMPTS = {
    "epoch": 0,
    "offset": 2,
    "taken": 2,
    "skipped": [],
    "datasets": [{"spec": "old.jsonl", "num_prompts": 3, "fingerprint": "f", "weight": 1.0, "skipped": ""}],
    "shuffle": True,
    "seed": 1,
}


@pytest.mark.parametrize(
    ("part", "lora_rank", "expected"),
    [
        ("weights", 0, r"other options or files:\n  data\.train_files was old\.jsonl, and is now \S+train\.jsonl\n"),
        ("weights", 8, "all weights of a run without LoRA, and this run trains LoRA adapters; set .*lora.rank=0"),
        ("adapter", 4, "LoRA adapters of rank 8, and worker.actor.model.lora.rank is 4; set it to 8"),
    ],
)
def test_a_checkpoint_of_another_run_is_rejected_before_the_model_loads(run, tmp_path, part, lora_rank, expected):
    save_checkpoint(tmp_path / "run", part=part, prompts=PROMPTS, buffer={})
    with pytest.raises(CheckpointError, match=expected):
        run(rows(1, 2, 3), lora_rank=lora_rank)


def test_a_tilde_stands_for_the_home_folder_in_the_paths_of_runs_and_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = "~/run/global_step_1"
    config = Config(trainer={"save_checkpoint_path": "~/run", "load_checkpoint_path": checkpoint, "val_only": True})
    assert config.trainer.run_folder == tmp_path / "run"
    save_checkpoint(tmp_path / "run", part="weights", prompts=PROMPTS, buffer={})
    found = choose_checkpoint(config, CheckpointStore(tmp_path / "another", keep=-1))
    assert found.folder == tmp_path / "run" / "global_step_1"


OLD_PROMPTS = {**PROMPTS, "datasets": [{"spec": "old.jsonl", "num_prompts": 3, "fingerprint": "f", "files": ""}]}


@pytest.mark.faults
@pytest.mark.parametrize("progress", [{"prompts": PROMPTS, "surplus": []}, {"prompts": OLD_PROMPTS, "buffer": {}}])
def test_a_checkpoint_of_an_earlier_format_is_rejected_with_what_to_do(run, tmp_path, progress):
    save_checkpoint(tmp_path / "run", part="weights", **progress)
    with pytest.raises(CheckpointError, match=r"global_step_1 was saved by an earlier version.*trigon export"):
        run(rows(1, 2, 3))


def test_skipped_rows_are_listed_in_the_run_folder(run, tmp_path):
    bad = [{"problem": "", "answer": "1"}, {"problem": "<image>?", "answer": "1"}]
    listing = tmp_path / "run" / "skipped_rows.jsonl"
    with pytest.raises(DataError) as caught:
        run([*bad, *rows(1, 2)], max_bad_row_fraction=0.25)
    assert f"all skipped rows are listed in {listing}" in str(caught.value)
    lines = [json.loads(line) for line in listing.read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(0, "prompt"), (1, "markers")]
    assert {line["dataset"] for line in lines} == {str(tmp_path / "train.jsonl")}
