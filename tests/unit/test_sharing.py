"""What a model card says of a run, and what it hides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from support.fake_runs import config_text
from support.samples import ROW
from trigon.config.files import local_sources
from trigon.config.schema import Config
from trigon.errors import DataError
from trigon.report.run import RunRecord, open_run
from trigon.report.run_folder import RunFolder
from trigon.system.secrets import HIDDEN, hide
from trigon.tools.cli.main import main
from trigon.tools.push.push import (
    CURVES,
    PushSettings,
    base_license,
    hub_id,
    model_card,
    public_base,
    read_options,
    read_validations,
)

BASE = "Qwen/Qwen2.5-VL-3B-Instruct"
SECRET = "hf_" + "aB3" * 12
OPTIONS = {
    "data.train_files": ["hiyouga/geometry3k@train"],
    "data.val_files": ["hiyouga/geometry3k@test"],
    "worker.actor.model.model_path": BASE,
    "worker.reward.reward_function": "/home/me/work/geometry.py:score",
    "worker.reward.reward_function_kwargs": {
        "judge": {"api_key": "plain", "url": "https://me:pw@judge.org/v1?key=5"},
        "x": SECRET,
    },
    "worker.rollout.n": 4,
    "algorithm.adv_estimator": "dr_grpo",
    "algorithm.kl_coef": 0.02,
    "trainer.save_checkpoint_path": "/home/me/work/runs/geo",
}


def write_run(folder: Path, *, local: Mapping[str, str] = MappingProxyType({}), **changed: Any) -> RunRecord:
    """Write a run with OPTIONS. changed: other values, by the last parts of their names."""
    names = {name.rpartition(".")[2]: name for name in OPTIONS} | {"system_prompt": "data.system_prompt"}
    values = OPTIONS | {names[key]: value for key, value in changed.items()}
    with RunFolder(folder) as run:
        run.write_config(config_text(values))
        run.write_local_sources(dict(local))
        for step, accuracy in ((0, 0.25), (10, 0.5), (20, 0.75), (30, 0.875)):
            run.append_metrics(
                step, {"val/accuracy_reward": accuracy, "val/reward_score": accuracy / 2, "val/overall_reward": 9.0}
            )
            rows = [replace(ROW, prompt_id=f"geometry:{n}", sample=k) for n in range(7) for k in range(2)]
            run.write_rollouts(step, "validation", rows)
    return open_run(folder)


def card_of(run: RunRecord, exported: Path, *, step: int = 20, base: str | None = BASE, **given: Any) -> ModelCard:
    """Return the card of a model that was exported after a step. given: further arguments."""
    exported.mkdir(exist_ok=True)
    record = {"trigon_version": "0.1.0", "step": step, "dtype": "bfloat16"}
    (exported / "trigon_export.json").write_text(json.dumps(record))
    arguments = {"license_id": None, "has_vision": True, "is_adapter": False, "has_curves": False} | given
    return model_card(read_options(run), exported, "me/geo", base_model=base, **arguments)


@pytest.fixture
def card(tmp_path):
    """Return the text of the card of a run with OPTIONS."""
    run = write_run(tmp_path / "run")
    return lambda **given: str(card_of(run, tmp_path / "exported", **given))


def test_the_metadata_is_valid_and_complete(card):
    text = card(license_id="apache-2.0", has_curves=True)
    data = ModelCard(text).data  # raises for metadata that the hub does not accept
    assert data.base_model == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert data.datasets == ["hiyouga/geometry3k"]
    assert data.license == "apache-2.0"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "image-text-to-text"
    assert data.tags == ["trigon", "reinforcement-learning", "dr-grpo"]
    [result] = data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("hiyouga/geometry3k", "accuracy", 0.75)


def test_the_card_has_the_evaluation_the_settings_and_the_curves(card):
    text = card(has_curves=True)
    for fact in (
        "20 steps of dr_grpo",
        "| accuracy | 0.250 | 0.750 | 7 |",
        "| reward | 0.125 | 0.375 | 7 |",
        "0.02",
        CURVES,
    ):
        assert fact in text, fact
    assert CURVES not in card()


def test_the_card_lists_the_options_that_are_not_the_defaults_without_secrets_and_folders_of_the_machine(card):
    text = card()
    for part in (SECRET, "plain", ":pw@", "key=5", "/home/me", "/work", "save_checkpoint_path"):
        assert part not in text
    listed = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert listed["algorithm"] == {"adv_estimator": "dr_grpo", "kl_coef": 0.02}
    assert listed["worker"]["rollout"] == {"n": 4}
    assert listed["worker"]["reward"] == {
        "reward_function": "geometry.py:score",
        "reward_function_kwargs": {"judge": {"api_key": HIDDEN, "url": HIDDEN}, "x": HIDDEN},
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("data.max_prompt_length", 5, 5),
        ("worker.reward.skip_special_tokens", True, True),
        ("data.answer_key", "answer", "answer"),
        ("override_config", {"hf_token": "x", "password": 1234}, {"hf_token": HIDDEN, "password": HIDDEN}),
        ("override_config", {SECRET: 1, "bearer": "abc123"}, {HIDDEN: 1, "bearer": HIDDEN}),
        ("text", f"use {SECRET} now", f"use {HIDDEN} now"),
        ("text", "AKIAABCDEFGHIJKLMNOP", HIDDEN),
        ("model", "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"),
        ("files", ["/data/me/a.parquet", "b.parquet"], ["a.parquet", "b.parquet"]),
        ("reward", "~/rewards/r.py:score", "r.py:score"),
        ("url", "https://judge.org/v1?a=b", "https://judge.org/v1"),
        ("url", "https://s3cr3ttoken@host/v1", f"https://{HIDDEN}@host/v1"),
        ("url", "https://me:p@ss@host/v1 and me@host", f"https://{HIDDEN}@host/v1 and me@host"),
        ("text", "Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {HIDDEN}"),
        ("text", '{"authorization": "Token abc"}', f'{{"authorization": "Token {HIDDEN}"}}'),
        ("text", "use basic dXNlcjpwYXNzMQ== here", f"use basic {HIDDEN} here"),
        ("text", "Basic geometry; a bearer of news", "Basic geometry; a bearer of news"),
    ],
)
def test_what_is_hidden(name, value, expected):
    assert hide(name, value) == expected


def test_of_the_arguments_of_a_reward_function_only_what_cannot_be_a_secret_is_published():
    arguments = {
        "url": "https://hooks.chat.org/services/T0/B0/Xy12", "pwd": "hunter2", "passphrase": "open sesame",
        "note": "open sesame", "header": "Authorization: Basic dXNlcjpwYXNz", "room": "abc123", "pin_key": 5,
        "models": {SECRET: "x1"}, "model": SECRET, "object": object(),
    }  # fmt: skip
    shown = {
        "mode": "exact_match", "scale": 0.5, "num": 3, "strict": True, "limit": None, "units": ["cm", "mm"],
        "judge": {"judge_model": "Qwen/Qwen2.5-VL-3B-Instruct", "model_name": "gpt-4o-mini"},
    }  # fmt: skip
    hidden = hide("worker.reward.reward_function_kwargs", arguments | shown)
    assert hidden == dict.fromkeys(arguments, HIDDEN) | {"models": {HIDDEN: HIDDEN}} | shown


def test_a_local_base_model_and_local_data_have_names_and_no_metadata(tmp_path):
    run = write_run(
        tmp_path / "run",
        model_path="/models/mine/tiny",
        train_files=["/data/a.parquet", "b/c.jsonl"],
        val_files=["/data/Val_1.parquet"],
    )
    text = str(card_of(run, tmp_path / "exported", base=None))
    data = ModelCard(text).data
    assert (data.base_model, data.datasets, data.license) == (None, None, None)
    assert "the local model `mine/tiny`" in text
    assert "on `a.parquet`, `c.jsonl`" in text
    assert (data.eval_results[0].dataset_type, data.eval_results[0].dataset_name) == ("val-1-parquet", "Val_1.parquet")
    assert "/data/" not in text


def test_several_validation_sets_have_rows_and_results_of_their_own(tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(
        json.dumps({"step": 20, "metrics": {"val/a/accuracy_reward": 0.5, "val/geometry/accuracy_reward": 0.25}}) + "\n"
    )
    text = str(card_of(run, tmp_path / "exported"))
    assert "| a | accuracy |  | 0.500 | unknown |" in text
    assert "| geometry | accuracy |  | 0.250 | 7 |" in text
    assert [result.dataset_name for result in ModelCard(text).data.eval_results] == ["a", "geometry"]


def test_the_evaluation_is_that_of_the_pushed_step(tmp_path):
    run = write_run(tmp_path / "run")
    assert [each.after for each in read_validations(run, 15)] == [0.5, 0.25]
    assert "| accuracy | 0.250 | 0.500 | 7 |" in str(card_of(run, tmp_path / "exported", step=15))
    with RunFolder(tmp_path / "run") as folder:  # with trainer.val_only, after the end of the run
        folder.append_metrics(5, {"val/accuracy_reward": 0.125})
    assert [each.after for each in read_validations(run, 15)] == [0.5, 0.25]
    assert [(each.step, each.after) for each in read_validations(run, 9)] == [(5, 0.125)]
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert read_validations(run, 20) == []
    assert "## Evaluation" not in str(card_of(run, tmp_path / "exported"))


def test_texts_of_options_cannot_end_the_block_of_code(tmp_path):
    run = write_run(tmp_path / "run", system_prompt="```\n# Other\n[x](javascript:y)")
    text = str(card_of(run, tmp_path / "exported"))
    assert text.count("```") == 4
    assert "\n# Other" not in text


@pytest.mark.parametrize("output", [[], ["--output", "RUN/push"]])
def test_a_push_that_fails_removes_nothing_that_was_there(tmp_path, output, capsys):
    run = write_run(tmp_path / "run")
    (run.path / "push").mkdir()
    (run.path / "push" / "README.md").write_text("of a dry run")
    before = sorted(run.path.rglob("*"))
    # HF_HUB_OFFLINE is set in all tests.
    assert main(["push", str(run.path), "me/geo", *(text.replace("RUN", str(run.path)) for text in output)]) == 1
    assert "PushError" in capsys.readouterr().err
    assert sorted(run.path.rglob("*")) == before


def test_hub_ids_are_told_from_local_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "model").mkdir(parents=True)
    assert hub_id("Qwen/Qwen3-4B", "models") == "Qwen/Qwen3-4B"
    assert hub_id("local/model", "models") is None
    assert hub_id("data/train.parquet", "datasets") is None
    assert hub_id("/a/models--Qwen--Qwen3-4B/snapshots/0a", "models") == "Qwen/Qwen3-4B"
    assert hub_id("a/b/c", "models") is None


def test_a_local_path_is_no_hub_id_wherever_the_push_runs(tmp_path, monkeypatch):
    start = tmp_path / "start"
    for name in ("demo/model", "demo/data"):
        (start / name).mkdir(parents=True)
    (start / "demo" / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.chdir(start)
    files = ["demo/data@train", "demo/public@train"]
    config = Config.model_validate(
        {"data": {"train_files": files}, "worker": {"actor": {"model": {"model_path": "demo/model"}}}}
    )
    local = local_sources(config)
    assert local == {name: str(start / name) for name in ("demo/model", "demo/data")}
    run = write_run(tmp_path / "run", local=local, model_path="demo/model", train_files=files, val_files=files[:1])
    monkeypatch.chdir(tmp_path)
    assert public_base(read_options(run), PushSettings()) is None
    assert public_base(read_options(run), PushSettings(base="demo/model")) == "demo/model"
    assert base_license(read_options(run), PushSettings()) == "mit"
    card = card_of(run, tmp_path / "exported", base=None)
    assert "on `data`, [demo/public](https://huggingface.co/datasets/demo/public)" in str(card)
    data = card.data
    assert (data.base_model, data.datasets, data.eval_results[0].dataset_name) == (None, ["demo/public"], "data")


def test_a_run_that_does_not_say_what_was_local_has_no_hub_ids_but_of_the_cache(tmp_path):
    run = write_run(tmp_path / "run")
    for content in ("[]", "{"):
        (run.path / "local_sources.json").write_text(content)
        with pytest.raises(DataError, match=r"local_sources\.json cannot be read"):
            public_base(read_options(run), PushSettings())
    (run.path / "local_sources.json").unlink()
    assert public_base(read_options(run), PushSettings()) is None
    assert public_base(read_options(run), PushSettings(base=BASE)) == BASE
    assert read_options(run).hub_id("hiyouga/geometry3k", "datasets") is None
    assert read_options(run).hub_id("/a/models--Qwen--Qwen3-4B/snapshots/0a", "models") == "Qwen/Qwen3-4B"
