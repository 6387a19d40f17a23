"""Command lines of the recipes, and the other files of examples/; test_examples.py trains them."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from support.recipes import EXAMPLES, RECIPES, ROOT, arguments_of, name_of
from trigon.config.load import load_config, split_arguments

NUMBERS = {"one GPU": 1, "two GPUs": 2, "eight GPUs": 8}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def recipe(name):
    return EXAMPLES / f"{name}.sh"


def configured(path, folder, *overrides):
    """Return the configuration of a recipe; creates the local files that some recipes read."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (data / f"{split}.parquet").touch()
    loaded = load_config(*split_arguments(arguments_of(path, folder, *overrides, environment={"DATA": str(data)})))
    assert loaded.warnings == ()
    return loaded.config


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_names_its_model_and_gpus_and_its_prompt_fits_its_reward(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n# Qwen")
    assert "\nset -euo pipefail\n" in text
    assert path.stat().st_mode & 0o111
    comment = " ".join(line.lstrip("# ") for line in text.split("set -euo")[0].splitlines()[1:])
    config = configured(path, tmp_path)
    gpus = [number for words, number in NUMBERS.items() if re.search(rf"\bon {words}\b", comment)]
    assert gpus == [config.trainer.n_gpus_per_node]
    model = re.search(r"MODEL_PATH:-Qwen/([\w.-]+?)(-Instruct)?\}", text)[1]
    assert comment.startswith(model), (comment[:40], model)
    assert f"bash examples/{name_of(path)}.sh trainer.max_steps=10" in comment
    if config.worker.rollout.environment is not None:  # which says what to write, and rewards it
        assert (config.data.format_prompt, config.worker.reward.reward_function) == (None, "environment")
    else:
        prompt, reward = Path(config.data.format_prompt), Path(config.worker.reward.reward_function.partition(":")[0])
        assert prompt.stem == reward.stem
        assert reward.is_file()


def test_options_follow_the_name_of_a_recipe(tmp_path):
    config = configured(RECIPES[0], tmp_path, "trainer.max_steps=10", "worker.rollout.n=3")
    assert (config.trainer.max_steps, config.worker.rollout.n) == (10, 3)


def test_the_readme_lists_every_recipe_and_recipes_write_to_different_folders(tmp_path):
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/.-]+)\.sh` \|.*\| (\d+) \|$", readme, re.MULTILINE)
    trainers = {name_of(path): configured(path, tmp_path).trainer for path in RECIPES}
    assert sorted(rows) == sorted((name, str(trainer.n_gpus_per_node)) for name, trainer in trainers.items())
    del trainers["qwen2_5_vl_7b_geo3k_swanlab"]  # the same run as ..._grpo with another logger
    assert len({(each.project_name, each.experiment_name) for each in trainers.values()}) == len(trainers)


ALGORITHMS = {
    # (adv_estimator, loss_type, loss_avg_mode, disable_kl, online_filtering)
    "qwen2_5_vl_7b_geo3k_grpo": ("grpo", "default", "token", False, False),
    "qwen2_5_vl_7b_geo3k_gspo": ("grpo", "gspo_token", "seq", True, False),
    "qwen2_5_vl_7b_geo3k_cispo": ("grpo", "cispo", "token", False, False),
    "qwen2_5_vl_7b_geo3k_sapo": ("grpo", "sapo", "token", True, False),
    "qwen2_5_vl_7b_geo3k_dapo": ("grpo", "default", "token", True, True),
    "qwen2_5_vl_7b_geo3k_reinforce": ("reinforce_plus_plus", "default", "token", False, False),
    "qwen2_5_vl_7b_geo3k_recommended": ("grpo_batch", "default", "token", True, False),
    "qwen3_14b_dapo17k_dapo": ("grpo", "default", "token", True, True),
}


@pytest.mark.parametrize(("name", "expected"), ALGORITHMS.items())
def test_a_recipe_configures_the_algorithm_of_its_name(name, expected, tmp_path):
    config = configured(recipe(name), tmp_path)
    algorithm, actor = config.algorithm, config.worker.actor
    configured_algorithm = (algorithm.adv_estimator, actor.loss_type, actor.loss_avg_mode)
    assert (*configured_algorithm, algorithm.disable_kl, algorithm.online_filtering) == expected


# -- gui/ ------------------------------------------------------------------------------------------


@pytest.fixture
def gui(monkeypatch):
    """Return the modules settings and make of examples/gui, which import each other by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "gui"))
    modules = {}
    for name in ("settings", "make"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        modules[name] = importlib.import_module(name)
    yield modules
    for name in modules:
        del sys.modules[name]


def begin(gui, seed=0):
    """Return an episode of the settings, and functions that tap its group and its switch."""
    row = gui["make"].row_of(seed)
    episode = gui["settings"].Settings()
    first = episode.reset(row)
    group = next(name for name, switches in episode.groups.items() if row["switch"] in switches)

    def tap(lines, name, x=200):
        return episode.step(f"<think>{name}</think><action>tap({x}, {70 * (lines.index(name) + 1) + 35})</action>")

    return row, episode, first, lambda: tap(list(episode.groups), group), lambda name: tap(episode.groups[group], name)


@pytest.mark.parametrize("seed", range(2))
def test_two_taps_set_the_switch_of_a_task(gui, seed):
    row, episode, first, tap_group, tap_switch = begin(gui, seed)
    assert (first.width % 28, first.height % 28) == (0, 0)
    second, reward, done = tap_group()
    assert (reward, done) == (0.0, False)
    assert second.tobytes() != first.tobytes()
    assert tap_switch(row["switch"]) == (None, 1.0, True)
    assert episode.is_on[row["switch"]] == (row["state"] == "on")


# -- scripts/model_merger.py -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"), [(["--local_dir"], 1, "CheckpointError: "), ([], 2, "--local_dir")]
)
def test_easyr1s_merge_script_runs_trigon_merge(arguments, status, message, tmp_path, monkeypatch, capsys):
    actor = tmp_path / "global_step_1" / "actor"
    monkeypatch.setattr(sys, "argv", ["model_merger.py", *arguments, *([str(actor)] if arguments else [])])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "model_merger.py"), run_name="__main__")
    assert stopped.value.code == status
    assert message in capsys.readouterr().err
