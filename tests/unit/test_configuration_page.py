"""The committed page and the committed examples say what the schema says."""

from pathlib import Path

import jinja2
import pytest
import yaml

from configuration_page import document
from trigon.config.load import load_config
from trigon.config.options import meanings, options, read_text_option, sections
from trigon.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_the_written_one():
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == document(), (
        "run: python scripts/configuration_page.py > docs/configuration.md"
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


@pytest.mark.parametrize(
    ("name", "asked_for"),
    [
        ("math", ("<think>", "</think>", "\\boxed{}")),
        ("r1v", ("<think>", "<answer>")),
        ("dapo", ('"Answer: ',)),
        ("counting", ("<think>", "</think>", "<answer>", "</answer>")),
        ("geoqa", ("<think>", "</think>", "<answer>", "</answer>")),
        ("vqa", ("<think>", "</think>", "<answer>", "</answer>")),
        ("android_gui", ("<think>", "</think>", "<answer>", "</answer>", '{"action": "click", "point": [x, y]}')),
    ],
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
