"""docs/from-easyr1.md has the generated tables; every key of EasyR1 is accepted."""

import importlib.util
from pathlib import Path

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


def test_every_key_of_easyr1_is_accepted_with_its_default():
    given = {key: default for key, default in DEFAULTS.items() if default not in (None, "", {})}
    statuses = {key: TABLES.status_of(key, default)[0] for key, default in given.items()}
    others = (*NEEDED, "trainer.n_gpus_per_node=8", "worker.rollout.tensor_parallel_size=2")
    before = load_config(None, others)

    def added(keys):
        """Return the configuration with these keys, and those that it says have no effect."""
        loaded = load_config(None, (*others, *(f"{key}={TABLES.format_yaml(given[key])}" for key in keys), *NEEDED))
        ignored = [text.partition(" ")[0] for text in loaded.warnings if "has no effect:" in text]
        return loaded.config, sorted(ignored)

    same = [key for key, status in statuses.items() if status == "same"]
    assert added(same) == (before.config, [])
    assert added(given)[1] == sorted(key for key, status in statuses.items() if status.startswith("no effect"))
