"""The committed page of commands is what the commands' help pages say."""

from pathlib import Path

import pytest

from command_line_page import document

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _keep_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_the_committed_page_is_up_to_date():
    assert (ROOT / "docs/command-line.md").read_text(encoding="utf-8") == document(), (
        "run: python scripts/command_line_page.py > docs/command-line.md"
    )
    assert str(Path.home()) + "/" not in document()
