"""docs/model-families.md lists every supported family, and none that is refused."""

from __future__ import annotations

import re
from pathlib import Path

from trigon.models.families import family_named, supported_model_types

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of a section's table by each `model_type` that its first column names."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*\|$", section, flags=re.MULTILINE)[1:]:  # below the heading
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), others)
    return found


def test_the_table_is_that_of_the_code() -> None:
    assert sorted(rows("The table")) == list(supported_model_types())
    for model_type, (_, images, _) in rows("The table").items():
        assert images == ("yes" if family_named(model_type).has_vision else "no")


def test_what_is_said_to_be_impossible_is_refused() -> None:
    impossible = rows("What is not possible now, and why")
    assert len(impossible) > 5
    assert not set(impossible) & set(supported_model_types())
