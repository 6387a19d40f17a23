"""Where models are found, and the configuration of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trigon.assemble.options import recorded_settings
from trigon.config.files import local_sources, locate_sources
from trigon.config.load import dump_config, inspect_config, load_config
from trigon.errors import ConfigError, ModelError
from trigon.tools.eval.settings import (
    context_length,
    exported_folder,
    find_differences,
    find_model,
    given_options,
    known_settings,
    load_settings,
    looks_like_model,
    recorded_of,
    without_other_arguments,
)

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"
FILES = ["worker.actor.model.model_path=owner/base", "data.train_files=owner/set", "data.val_files=owner/set@test"]
REWARD_AND_DATA = given_options(["owner/set@test"], reward="math")


def no_export(text: str) -> None:
    pytest.fail(text)


def settings(base=None, options=REWARD_AND_DATA, overrides=(), **changes):
    arguments = {"model_path": "owner/model", "folder": Path("out"), "context": None, "weight_dtype": None} | changes
    return load_settings(base, options, overrides, **arguments).config


@pytest.fixture
def run(tmp_path):
    """Return a run folder with its configuration and two checkpoints, in a folder of its own."""
    folder = tmp_path / "quick" / "run"
    for step in (4, 12):
        (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
    config = load_config(
        QUICKSTART,
        [
            "worker.actor.model.model_path=owner/base",
            "worker.actor.model.lora.rank=8",
            "data.train_files=owner/set@train",
            "data.val_files=owner/set@validation",
            "data.train_weights=[2]",
            "trainer.n_gpus_per_node=4",
            "worker.rollout.tensor_parallel_size=2",
            "worker.rollout.val_override_config.temperature=0.6",
        ],
    )
    (folder / "config.yaml").write_text(dump_config(config.config))
    return folder


def test_a_model_is_a_folder_a_hub_id_a_checkpoint_or_a_run(run, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = find_model(str(tmp_path / "model"))
    assert (folder.kind, folder.step, folder.run_config) == ("folder", 0, None)
    assert find_model("Qwen/Qwen2.5-VL-3B-Instruct").kind == "hub"
    for spec, step in ((run, 12), (run.parent, 12), (run / "global_step_4", 4), (run / "global_step_4" / "actor", 4)):
        found = find_model(str(spec))
        assert found.kind == "checkpoint"
        assert found.step == step
        assert Path(found.path).name == f"global_step_{step}"
        assert found.run_config is not None
        assert found.run_config.samefile(run / "config.yaml")
    (tmp_path / "data.jsonl").write_text("{}")
    assert looks_like_model(str(run / "global_step_4"))
    assert not looks_like_model(str(tmp_path / "data.jsonl"))
    assert not looks_like_model("owner/set@test")


def test_what_is_no_model_is_an_error_that_says_so(run, tmp_path):
    with pytest.raises(ModelError, match=r"there is no model folder .*; did you mean .*quick"):
        find_model(str(tmp_path / "quik"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="neither a Hugging Face model"):
        find_model(str(tmp_path / "empty"))
    for step in (4, 12):
        (run / f"global_step_{step}" / "actor").rmdir()
        (run / f"global_step_{step}").rmdir()
    with pytest.raises(ModelError, match="has no checkpoint yet"):
        find_model(str(run))


def test_an_earlier_export_of_the_same_step_is_used_again(run):
    exported = run / "global_step_12" / "huggingface_model"
    exported.mkdir()
    (exported / "trigon_export.json").write_text(json.dumps({"step": 12}))
    said = []
    path = exported_folder(find_model(str(run)), Path("unused"), warn=no_export, on_progress=said.append)
    assert Path(path).samefile(exported)
    assert "exported earlier" in said[0]


def test_settings_of_a_run_are_kept_but_for_its_machines_and_its_adapters(run):
    config = settings(run / "config.yaml", given_options([]))
    assert config.data.val_files == ("owner/set@validation",)
    assert config.data.prompt_key == "problem"
    assert config.worker.reward.reward_function == "math"
    assert config.worker.rollout.val_override_config.temperature == 0.6
    assert (config.data.max_prompt_length, config.data.max_response_length) == (128, 24)
    assert config.trainer.n_gpus_per_node == config.worker.rollout.tensor_parallel_size == 1
    assert config.worker.actor.model.lora.rank == 0
    assert config.worker.actor.model.model_path == "owner/model"
    assert config.trainer.val_only
    assert config.trainer.save_checkpoint_path == "out"


def test_options_are_above_the_run_and_overrides_above_options(run):
    options = given_options(["a {b}: c.jsonl", "d@test"], n=4, max_tokens=16)
    with pytest.raises(ConfigError, match=r"data.val_files\[0\]: there is no a \{b\}: c.jsonl"):
        settings(run / "config.yaml", options)
    options = given_options(["d@test"], n=4, temperature=0.0, format_prompt="{{ content }}: go")
    config = settings(run / "config.yaml", options, ["worker.rollout.val_override_config.n=8"])
    assert config.data.val_files == ("d@test",)
    assert config.worker.rollout.val_override_config.n == 8
    assert config.worker.rollout.val_override_config.temperature == 0
    assert config.data.format_prompt == "{{ content }}: go"


def test_an_export_has_the_settings_of_its_run_and_differences_are_told(tmp_path):
    overrides = [
        "data.system_prompt=Be\nbrief: {always}.",
        "data.format_prompt={{ content }} Now.",
        "worker.rollout.val_override_config.temperature=0.6",
        "data.max_pixels=5000000",
    ]
    trained = load_config(QUICKSTART, [*FILES, *overrides]).config
    export, checkpoint = tmp_path / "export", tmp_path / "global_step_3"
    recorded = recorded_settings(trained, pixel_limits=(3136, 5_000_000))
    for folder in (export, checkpoint / "actor"):
        folder.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "trigon_export.json").write_text(json.dumps({"step": 3, "settings": recorded}))
    (checkpoint / "actor" / "run_settings.json").write_text(json.dumps(recorded))
    read = [recorded_of(find_model(str(folder))) for folder in (export, checkpoint)]
    assert read == [recorded, recorded]

    config = settings(first=known_settings({**recorded, "data.of_a_later_version": 1}))
    assert find_differences(recorded, config) == {}
    assert (config.data.system_prompt, config.data.format_prompt) == ("Be\nbrief: {always}.", "{{ content }} Now.")
    assert (config.data.min_pixels, config.data.max_pixels) == (3136, 5_000_000)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (128, 24)
    assert config.worker.rollout.dtype == "fp32"
    changed = given_options(["a/b"], reward="math", temperature=1.0, n=4, format_prompt="{{ content }}")
    differing = find_differences(recorded, settings(options=changed, first=known_settings(recorded)))
    assert differing == {
        "data.format_prompt": ("{{ content }} Now.", "{{ content }}"),
        "worker.rollout.val_override_config.temperature": (0.6, 1.0),
    }
    assert find_differences({}, config) == {}


def test_a_run_of_another_folder_is_evaluated_with_its_own_files(tmp_path, monkeypatch):
    start = tmp_path / "start"
    (start / "data").mkdir(parents=True)
    for name in ("data/val.jsonl", "q.jinja", "mine.py", "other.py", "games.py"):
        (start / name).write_text("{{ content }}")
    monkeypatch.chdir(start)
    values = {
        "data.val_files": ["data@x", "data/val.jsonl", "owner/set@test"],
        "data.image_dir": "data",
        "data.format_prompt": "q.jinja",
        "worker.reward.reward_function": [{"function": "mine.py:score", "weight": 2}, {"function": "math"}],
        "worker.reward.val_reward_function": "other.py:score",
        "worker.rollout.environment": "games.py:Maze",
    }
    config = inspect_config(None, [values]).config
    sources = local_sources(config)
    monkeypatch.chdir(tmp_path)
    located = locate_sources(values, sources)
    assert located == {
        "data.val_files": [f"{start}/data@x", f"{start}/data/val.jsonl", "owner/set@test"],
        "data.image_dir": f"{start}/data",
        "data.format_prompt": f"{start}/q.jinja",
        "worker.reward.reward_function": [{"function": f"{start}/mine.py:score", "weight": 2}, {"function": "math"}],
        "worker.reward.val_reward_function": f"{start}/other.py:score",
        "worker.rollout.environment": f"{start}/games.py:Maze",
    }
    # What has moved is read from here, if it is here; otherwise the run's own path is missing.
    (start / "data").rename(tmp_path / "data")
    (start / "q.jinja").unlink()
    moved = locate_sources(values, sources)
    assert "data.val_files" not in moved
    assert moved["data.format_prompt"] == f"{start}/q.jinja"


def test_another_reward_function_gets_no_arguments_of_the_runs_own(run):
    overrides = ["worker.reward.reward_function_kwargs={format_weight: 0.5}", "worker.rollout.tensor_parallel_size=1"]
    (run / "config.yaml").write_text(dump_config(load_config(run / "config.yaml", overrides).config))

    def arguments(reward, *further):
        given = given_options([], reward=reward)
        first = without_other_arguments(run / "config.yaml", given, {})
        return settings(run / "config.yaml", given, further, first=first).worker.reward.reward_function_kwargs

    assert arguments(None) == arguments("math") == {"format_weight": 0.5}
    assert arguments("vqa") == {}
    assert arguments("vqa", "worker.reward.reward_function_kwargs={format_weight: 0.2}") == {"format_weight": 0.2}


def test_without_a_run_the_lengths_follow_the_context_of_the_language_model(tmp_path):
    config = {"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 4096}}
    for content, length in ((config, 4096), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert context_length(tmp_path) == length
    assert settings().data.max_prompt_length + settings().data.max_response_length == 8192
    short = settings(context=1000).data
    assert (short.max_prompt_length, short.max_response_length) == (500, 500)
    long = settings(options=given_options(["a/b"], reward="math", max_tokens=6000), context=100_000).data
    assert (long.max_prompt_length, long.max_response_length) == (6144, 6000)


def test_an_environment_or_tools_may_be_python_objects_and_take_the_place_of_those_of_a_run(run):
    without = (run / "config.yaml").read_text()

    def evaluated(trained_with, options):
        overrides = [f"worker.rollout.{each}" for each in (trained_with, "max_turns=3", "tensor_parallel_size=1")]
        config = load_config(run / "config.yaml", overrides)
        (run / "config.yaml").write_text(dump_config(config.config))
        rollout = settings(run / "config.yaml", options).worker.rollout
        return rollout.environment, rollout.tools, rollout.max_turns

    given = given_options([], tools=("crop", "python:search"))
    assert evaluated("environment=games:Maze", given) == (None, ("crop", "python:search"), 3)
    (run / "config.yaml").write_text(without)
    given = given_options([], environment="python:Maze")
    assert evaluated("tools=[crop]", given) == ("python:Maze", (), 3)
    assert evaluated("max_turns=3", given_options([])) == (None, ("crop",), 3)
