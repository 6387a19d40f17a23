"""The committed configuration page and examples agree with the schema."""

from pathlib import Path

import jinja2
import pytest
import yaml

from configuration_page import document
from trigon.config.load import load_config
from trigon.config.options import descriptions, options, sections

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_up_to_date():
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == document(), (
        "run: python scripts/configuration_page.py > docs/configuration.md"
    )


def test_every_option_and_section_has_a_description():
    assert descriptions().keys() == {*options(), *(path for path, _ in sections())}
    assert [".".join(path) for path, text in descriptions().items() if not text.endswith(".")] == []


def test_the_example_configuration_is_easyr1s_for_one_device_and_loads_without_a_warning(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(Path("examples/config.yaml"), ()).warnings == ()

    def leaves(tree: dict, path: tuple = ()) -> dict:
        found: dict = {}
        for key, value in tree.items():
            found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
        return found

    example = leaves(yaml.safe_load((ROOT / "examples/config.yaml").read_text(encoding="utf-8")))
    easyr1 = leaves(yaml.safe_load((Path(__file__).parent / "data/easyr1_current.yaml").read_text(encoding="utf-8")))
    differing = {
        ".".join(path): example[path] for path in example.keys() & easyr1.keys() if example[path] != easyr1[path]
    }
    assert differing == {
        "trainer.logger": ["console", "file"],
        "trainer.n_gpus_per_node": 1,
        "worker.rollout.tensor_parallel_size": 1,
        # EasyR1's 7B in float32 does not fit on one GPU (docs/hardware.md).
        "worker.actor.model.model_path": "Qwen/Qwen2.5-3B-Instruct",
        "trainer.experiment_name": "qwen2_5_3b_math_grpo",
    }


@pytest.mark.parametrize(
    ("name", "expected_parts"),
    [
        ("math", ("<think>", "</think>", "\\boxed{}")),
        ("r1v", ("<think>", "<answer>")),
        ("dapo", ('"Answer: ',)),
        *((name, ("<think>", "</think>", "<answer>", "</answer>")) for name in ("counting", "geoqa", "vqa")),
        ("android_gui", ("<answer>", "</answer>", '{"action": "click", "point": [x, y]}')),
    ],
)
def test_a_shipped_prompt_asks_for_the_format_that_its_reward_expects(name, expected_parts):
    template = (ROOT / f"examples/format_prompt/{name}.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template).render(content=" <image>How many? ")
    assert "<image>How many?" in text
    assert "  " not in text
    assert text == text.strip()
    for part in expected_parts:
        assert part in text
