"""docs/from-easyr1.md has the generated tables; every key of EasyR1 is accepted."""

import importlib.util
from pathlib import Path

import pytest

from support.options import NEEDED
from trigon.config.load import load_config

ROOT = Path(__file__).parents[2]


def tables():
    spec = importlib.util.spec_from_file_location("from_easyr1", ROOT / "scripts" / "from_easyr1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = tables()
DEFAULTS = TABLES.defaults()


def test_the_committed_tables_are_up_to_date():
    assert TABLES.main(["--check"]) == 0, "run: python scripts/from_easyr1.py"


def test_exactly_the_defaults_that_differ_have_a_reason():
    options = TABLES.current_options()
    differing = {
        key for key in DEFAULTS.keys() & options.keys() if not TABLES.is_same_default(options[key], DEFAULTS[key])
    }
    assert differing == TABLES.DEFAULT_REASONS.keys()


REQUIRES = {
    "trainer.n_gpus_per_node": (),
    "worker.rollout.tensor_parallel_size": ("trainer.n_gpus_per_node=2",),  # must divide the number of workers
}
"""Further overrides that a key's default of EasyR1 requires."""


@pytest.mark.parametrize("key", [key for key in DEFAULTS if DEFAULTS[key] not in (None, "", {})])
def test_every_key_of_easyr1_is_accepted_with_its_default(key):
    others = (*NEEDED, *REQUIRES.get(key, ()))
    override = f"{key}={TABLES.format_yaml(DEFAULTS[key])}"
    status, _ = TABLES.status_of(key, DEFAULTS[key])
    loaded = load_config(
        None, (*(other for other in others if not other.startswith(f"{key}=")), override, *NEEDED[-1:])
    )
    no_effect = [warning for warning in loaded.warnings if warning.startswith(f"{key} (command line) has no effect")]
    assert len(no_effect) == (1 if status.startswith("no effect") else 0)
    if status == "same":
        assert loaded.config == load_config(None, others).config
