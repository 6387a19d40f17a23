"""The committed page and the committed examples say what the schema says."""

import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml

from trigon.config.document import document
from trigon.config.load import load_config, split_arguments
from trigon.config.options import meanings, options, read_text_option, sections
from trigon.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))


def test_the_committed_page_is_the_written_one():
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == document(), (
        "run: python -m trigon.config.document > docs/configuration.md"
    )


def test_every_option_and_section_has_its_sentence():
    assert meanings().keys() == {*options(), *(path for path, _ in sections())}
    assert [".".join(path) for path, sentence in meanings().items() if not sentence.endswith(".")] == []


def test_the_example_configuration_loads_without_a_warning(monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_config(Path("examples/config.yaml"), ())
    assert loaded.warnings == ()
    assert loaded.config.worker.rollout.n == 5


def test_the_example_configuration_is_easyr1s_on_one_device():
    def leaves(tree: dict, path: tuple = ()) -> dict:
        found: dict = {}
        for key, value in tree.items():
            found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
        return found

    ours = leaves(yaml.safe_load((ROOT / "examples/config.yaml").read_text(encoding="utf-8")))
    theirs = leaves(yaml.safe_load((Path(__file__).parent / "data/easyr1_current.yaml").read_text(encoding="utf-8")))
    differing = {".".join(path): ours[path] for path in ours.keys() & theirs.keys() if ours[path] != theirs[path]}
    assert differing == {
        "trainer.logger": ["console", "file"],
        "trainer.n_gpus_per_node": 1,
        "worker.rollout.tensor_parallel_size": 1,
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_script_runs_the_command_it_shows(script, tmp_path, monkeypatch):
    # A stand-in for python3 writes down its arguments: the script runs, the trainer does not.
    stand_in = tmp_path / "python3"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    output = subprocess.run(
        ["bash", str(script), "trainer.max_steps=10", "data.system_prompt=two words"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    ).stdout
    module, name, *argv = output.split("\0")[:-1]
    assert (module, name) == ("-m", "trigon.trainer.main")
    monkeypatch.chdir(ROOT)
    loaded = load_config(*split_arguments(argv))
    assert loaded.warnings == ()
    assert (loaded.config.trainer.max_steps, loaded.config.data.system_prompt) == (10, "two words")
    assert loaded.config.data.train_files == ("hiyouga/geometry3k@train",)


def test_there_is_a_script_for_both_sizes_and_for_swanlab():
    assert [path.name for path in SCRIPTS] == [
        "qwen2_5_vl_3b_geo3k_grpo.sh",
        "qwen2_5_vl_7b_geo3k_grpo.sh",
        "qwen2_5_vl_7b_geo3k_swanlab.sh",
    ]


@pytest.mark.parametrize(
    ("name", "asked_for"),
    [("math", ("<think>", "</think>", "\\boxed{}")), ("r1v", ("<think>", "<answer>")), ("dapo", ('"Answer: ',))],
)
def test_a_shipped_prompt_asks_for_what_its_reward_looks_for(name, asked_for):
    template = (ROOT / f"examples/format_prompt/{name}.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template).render(content=" <image>How many? ")
    assert "<image>How many?" in text
    assert "  " not in text
    assert text == text.strip()
    for part in asked_for:
        assert part in text


def test_a_template_is_read_from_its_file_or_taken_as_it_is(tmp_path):
    path = tmp_path / "prompt.jinja"
    path.write_text("{{ content }}!", encoding="utf-8")
    assert read_text_option(str(path)) == "{{ content }}!"
    assert read_text_option("{{ content }}?") == "{{ content }}?"
    assert read_text_option(None) is None
    with pytest.raises(ConfigError, match="cannot read the template"):
        read_text_option(str(tmp_path / "none.jinja"))
