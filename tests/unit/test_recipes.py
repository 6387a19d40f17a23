"""Command lines of the recipes, and the other files of examples/; test_examples.py trains them."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.recipes import EXAMPLES, RECIPES, ROOT, arguments_of, name_of
from trigon.config.load import load_config, split_arguments
from trigon.config.names import SHIPPED_REWARDS
from trigon.data.sources import open_source
from trigon.tools.quickstart.drawings import make_dataset

RECIPE_NAMES = [
    "baselines/qwen2_5_vl_3b_clevr",
    "baselines/qwen2_5_vl_3b_geoqa8k",
    "grpo_trainer/run_qwen2_5_vl-7b",
    "qwen2_5_7b_math_grpo",
    "qwen2_5_vl_32b_geo3k_grpo",
    "qwen2_5_vl_3b_android_gui_grpo",
    "qwen2_5_vl_3b_geo3k_grpo",
    "qwen2_5_vl_7b_geo3k_cispo",
    "qwen2_5_vl_7b_geo3k_dapo",
    "qwen2_5_vl_7b_geo3k_grpo",
    "qwen2_5_vl_7b_geo3k_gspo",
    "qwen2_5_vl_7b_geo3k_recommended",
    "qwen2_5_vl_7b_geo3k_reinforce",
    "qwen2_5_vl_7b_geo3k_sapo",
    "qwen2_5_vl_7b_geo3k_swanlab",
    "qwen2_5_vl_7b_gui_agent_grpo",
    "qwen2_5_vl_7b_multi_image",
    "qwen2_5_vl_7b_visual_search_crop",
    "qwen3_14b_dapo17k_dapo",
    "qwen3_4b_math_grpo",
    "qwen3_4b_math_grpo_lora",
    "qwen3_5_4b_geo3k_grpo",
    "qwen3_vl_30b_geo3k_grpo",
    "qwen3_vl_4b_geo3k_grpo",
    "qwen3_vl_4b_geo3k_grpo_lora",
]
"""Names from EasyR1 and verl, the recommended recipe, and those with environments or tools."""


def test_the_readme_lists_every_recipe_with_its_number_of_gpus(tmp_path):
    rows = re.findall(
        r"^\| `([\w/.-]+)\.sh` \|.*\| (\d+) \|$", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE
    )
    needed = {name_of(path): configured(path, tmp_path).trainer.n_gpus_per_node for path in RECIPES}
    assert {name: int(gpus) for name, gpus in rows} == needed
    assert len(rows) == len(needed)


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


def test_the_recipes_have_their_published_names():
    assert [name_of(path) for path in RECIPES] == RECIPE_NAMES


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_passes_arguments_on_and_the_last_value_counts(path, tmp_path):
    config = configured(path, tmp_path, "trainer.max_steps=10", "data.system_prompt=two words", "worker.rollout.n=3")
    assert (config.trainer.max_steps, config.data.system_prompt, config.worker.rollout.n) == (10, "two words", 3)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_the_comment_of_a_recipe_names_the_model_and_the_number_of_gpus(path, tmp_path):
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


def test_recipes_write_to_different_folders(tmp_path):
    names = {name_of(path): configured(path, tmp_path).trainer for path in RECIPES}
    folders = {name: (trainer.project_name, trainer.experiment_name) for name, trainer in names.items()}
    del folders["qwen2_5_vl_7b_geo3k_swanlab"]  # the same run as ..._grpo with another logger
    assert len(set(folders.values())) == len(folders)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_prompt_and_reward_of_a_recipe_match(path, tmp_path):
    config = configured(path, tmp_path)
    if config.worker.rollout.environment is not None:  # which says what to write, and rewards it
        assert (config.data.format_prompt, config.worker.reward.reward_function) == (None, "environment")
        return
    prompt, reward = Path(config.data.format_prompt), Path(config.worker.reward.reward_function.partition(":")[0])
    assert prompt.stem == reward.stem
    assert reward.is_file()


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


def test_cispo_has_no_lower_bound_and_a_cap_of_5(tmp_path):
    actor = configured(recipe("qwen2_5_vl_7b_geo3k_cispo"), tmp_path).worker.actor
    assert (actor.clip_ratio_low, actor.cispo_cap) == (1.0, 5.0)


def test_the_recommended_recipe_makes_one_update_per_step(tmp_path):
    config = configured(recipe("qwen2_5_vl_7b_geo3k_recommended"), tmp_path)
    actor, algorithm = config.worker.actor, config.algorithm
    assert config.data.rollout_batch_size == actor.global_batch_size
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.ppo_epochs, config.worker.rollout.n) == (0.2, 0.28, 1, 8)
    assert (algorithm.mismatch_correction, algorithm.mismatch_level, algorithm.mismatch_high) == (
        "truncate",
        "token",
        2,
    )
    assert actor.model.freeze_vision_tower


def test_each_shipped_reward_has_its_files_and_its_line_in_the_documentation():
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    for name in set(SHIPPED_REWARDS) - {"environment"}:  # it reads no answer
        assert (EXAMPLES / "reward_function" / f"{name}.py").is_file()
        assert (EXAMPLES / "format_prompt" / f"{name}.jinja").is_file()
        assert f"| `{name}` | `{name}.py` |" in page


@pytest.mark.parametrize("question", ["Open the settings.", "<image>Open the settings."])
def test_the_prompt_for_screens_contains_the_image_once(question):
    template = (EXAMPLES / "format_prompt/android_gui.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template).render(content=question)
    assert text.count("<image>") == 1
    assert "Open the settings." in text


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


@pytest.mark.parametrize("seed", range(8))
def test_two_taps_set_the_switch_of_a_task(gui, seed):
    row, episode, first, tap_group, tap_switch = begin(gui, seed)
    assert (first.width % 28, first.height % 28) == (0, 0)
    second, reward, done = tap_group()
    assert (reward, done) == (0.0, False)
    assert second.tobytes() != first.tobytes()
    assert tap_switch(row["switch"]) == (None, 1.0, True)
    assert episode.is_on[row["switch"]] == (row["state"] == "on")


def test_another_switch_ends_the_episode_without_a_reward(gui):
    row, episode, _, tap_group, tap_switch = begin(gui)
    tap_group()
    other = next(name for name in episode.groups[episode.shown] if name != row["switch"])
    assert tap_switch(other) == (None, 0.0, True)


def test_the_arrow_leads_back_and_other_places_do_nothing(gui):
    _, episode, first, tap_group, _ = begin(gui)
    assert episode.step("tap(30, 30)")[0].tobytes() == first.tobytes()  # no arrow yet
    second = tap_group()[0]
    assert episode.step("tap(200, 690)")[0].tobytes() == second.tobytes()
    assert episode.step("tap(30, 30)")[0].tobytes() == first.tobytes()


@pytest.mark.parametrize("text", ["", "tap(1)", "tap(1, 2) tap(3, 4)", "<think>tap(1, 2)</think>"])
def test_a_turn_without_one_action_is_told_what_to_write(gui, text):
    _, episode, _, _, _ = begin(gui)
    assert episode.step(text) == ("Write one action: tap(x, y), with whole numbers.", -0.1, False)


def test_the_rows_name_a_switch_and_its_state(gui, tmp_path):
    assert gui["make"].main(["--folder", str(tmp_path), "--num-train", "3", "--num-test", "2"]) == 0
    train, test = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    assert (len(train), len({row["seed"] for row in train + test})) == (3, 5)
    assert all(f"Turn {row['state']} {row['switch']}." in row["problem"] for row in train)


# -- data_preprocess/geo3k.py ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepare():
    """Return a function that runs geo3k.py from a source into a folder."""
    spec = importlib.util.spec_from_file_location("geo3k", EXAMPLES / "data_preprocess" / "geo3k.py")
    geo3k = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(geo3k)
    return lambda folder, source: geo3k.main(["--local_dir", str(folder), "--source", str(source)])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a folder with both splits; one of its hundred training rows is unusable."""
    folder = tmp_path_factory.mktemp("source")
    train, validation = make_dataset(folder, num_train=100, num_validation=6, seed=0)
    validation.rename(folder / "test.parquet")
    rows = pq.read_table(train).to_pylist()
    rows[7]["problem"] = "no image here"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(train)), train)
    return folder


def test_geo3k_is_written_as_two_files_that_contain_the_images(prepare, source, tmp_path, capsys):
    folder = tmp_path / "geo3k"
    assert prepare(folder, source) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"{folder / 'train.parquet'}: 99 rows", f"{folder / 'test.parquet'}: 6 rows"]
    assert "skipped: train:7: 0 <image> markers, 1 images\n" in printed.err
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    written, original = open_source(f"{folder}@test"), open_source(f"{source}@test")
    assert written.image_columns == ("images",)
    assert written.rows[:]["answer"] == original.rows[:]["answer"]
    assert [row["images"][0]["bytes"] for row in written.rows] == [row["images"][0]["bytes"] for row in original.rows]


def test_image_files_of_the_source_are_written_into_the_output(prepare, tmp_path):
    source = tmp_path / "source"
    dataset, _ = make_dataset(tmp_path / "made", num_train=1, num_validation=1, seed=0)
    png = pq.read_table(dataset).to_pylist()[0]["images"][0]["bytes"]
    source.mkdir()
    (source / "figure.png").write_bytes(png)
    for split in ("train", "test"):
        row = '{"problem": "<image>Find x.", "answer": "48", "images": ["figure.png"]}\n'
        (source / f"{split}.jsonl").write_text(row, encoding="utf-8")
    assert prepare(tmp_path / "geo3k", source) == 0
    [row] = pq.read_table(tmp_path / "geo3k" / "train.parquet").to_pylist()
    assert row == {"problem": "<image>Find x.", "answer": "48", "images": [{"bytes": png, "path": None}]}


MISSING = '{"problem": "<image>Find x.", "answer": "1", "images": ["none.png"]}\n'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (MISSING * 3, "train: 3 of 3 rows cannot be used; see above"),
        ('{"question": "?", "answer": "1"}\n', "has no column 'problem', only question, answer"),
        (None, "there is no file or folder"),
    ],
)
def test_a_source_without_usable_rows_is_an_error(prepare, rows, message, tmp_path, capsys):
    source = tmp_path / "source"
    if rows is not None:
        source.mkdir()
        (source / "train.jsonl").write_text(rows, encoding="utf-8")
    assert prepare(tmp_path / "out", source) == 1
    assert message in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_prompt_for_mathematics_has_easyr1s_wording():
    """So that scores can be compared."""
    assert (EXAMPLES / "format_prompt" / "math.jinja").read_text(encoding="utf-8").strip() == (
        "{{ content | trim }} You FIRST think about the reasoning process as an internal monologue and then "
        "provide the final answer. The reasoning process MUST BE enclosed within <think> </think> tags. "
        "The final answer MUST BE put in \\boxed{}."
    )


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
