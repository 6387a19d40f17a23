"""docs/check.md has the example, the checks and the thresholds of `trigon check` as they are."""

import runpy
from pathlib import Path

import pytest

from trigon.config.schema import Config
from trigon.tools.check.dataset import CONSTANT_FRACTION
from trigon.tools.check.lengths import FAIL_FRACTION, WARN_FRACTION
from trigon.tools.check.rewards import MAX_SECONDS, NUM_TRIED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_cache(own_datasets_cache):
    """Do not fill the cache that other tests share."""


@pytest.mark.extended
def test_the_generated_parts_are_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "check_page.py"))
    assert script["page"](PAGE) == PAGE, "run: python scripts/check_page.py"


def test_the_thresholds_are_those_of_the_code():
    config = Config()
    lines = " ".join(PAGE.split())
    assert (WARN_FRACTION, FAIL_FRACTION) == (0.05, 0.20)
    assert "| rows above `data.max_prompt_length` | from 5 % on | from 20 % on" in lines
    assert f"| the most frequent ground truth | from {CONSTANT_FRACTION:.0%} of the rows on".replace("%", " %") in lines
    assert f"above `data.max_bad_row_fraction` ({config.data.max_bad_row_fraction:.0%}".replace("%", " %") in lines
    failed = config.worker.reward.max_failed_fraction
    assert f"above `worker.reward.max_failed_fraction` ({failed:.0%}".replace("%", " %") in lines
    assert f"for up to {MAX_SECONDS:g} seconds" in lines
    assert NUM_TRIED == 6
    assert "are tried on six rows" in lines
