"""docs/check.md has the example, the checks and the thresholds of `trigon check` as they are."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_cache(own_datasets_cache):
    """Do not fill the cache that other tests share."""


@pytest.mark.extended
def test_the_generated_parts_are_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "check_page.py"))
    assert script["page"](PAGE) == PAGE, "run: python scripts/check_page.py"
