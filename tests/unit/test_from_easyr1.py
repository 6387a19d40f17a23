"""docs/from-easyr1.md says what is so: its tables, and the tests that it calls upon."""

import importlib.util
import re
from pathlib import Path

import pytest

from trigon.config.load import load_config
from trigon.errors import ConfigError

ROOT = Path(__file__).parents[2]
NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)


def tables():
    spec = importlib.util.spec_from_file_location("from_easyr1", ROOT / "scripts" / "from_easyr1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = tables()
DEFAULTS = TABLES.defaults()


def test_the_committed_tables_are_the_written_ones():
    assert TABLES.main(["--check"]) == 0, "run: python scripts/from_easyr1.py"


def test_there_is_a_reason_for_each_default_that_differs_and_for_no_other():
    ours = TABLES.today()
    differing = {key for key in DEFAULTS.keys() & ours.keys() if not TABLES.is_same_default(ours[key], DEFAULTS[key])}
    assert differing == TABLES.OTHER_DEFAULTS.keys()


ALONE = {
    "trainer.n_gpus_per_node": (),
    "worker.rollout.tensor_parallel_size": ("trainer.n_gpus_per_node=2",),  # 2 copies of nothing would be refused
}
"""What has to stand beside a key."""


@pytest.mark.parametrize("key", [key for key in DEFAULTS if DEFAULTS[key] not in (None, "", {})])
def test_every_key_of_easyr1_is_taken_with_its_default(key):
    beside = (*NEEDED, *ALONE.get(key, ()))
    override = f"{key}={TABLES.written(DEFAULTS[key])}"
    what, _ = TABLES.fate(key, DEFAULTS[key])
    loaded = load_config(None, (*(one for one in beside if not one.startswith(f"{key}=")), override, *NEEDED[-1:]))
    no_effect = [warning for warning in loaded.warnings if warning.startswith(f"{key} (command line) has no effect")]
    assert len(no_effect) == (1 if what.startswith("no effect") else 0)
    if what == "same":
        assert loaded.config == load_config(None, beside).config


def test_a_refused_value_gives_the_reason_of_the_page():
    page = (ROOT / "docs/from-easyr1.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_config(None, (*NEEDED, "worker.hybrid_engine=false"))
    reason = str(refusal.value).partition(": ")[2]
    assert f"any other value is refused: {reason} |" in page


def test_what_the_page_calls_upon_is_there():
    page = (ROOT / "docs/from-easyr1.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:trigon|scripts|examples)/[\w/.-]+\.(?:py|sh|yaml))\b", page)
    assert len(files) >= 4
    assert [file for file in files if not (ROOT / file).is_file()] == []
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    called = re.findall(r"`(test_\w+)`", page)
    assert len(called) >= 25
    assert [test for test in called if f"def {test}(" not in tests] == []
