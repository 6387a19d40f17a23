"""docs/model-families.md lists every supported family, and none of the unsupported ones."""

from __future__ import annotations

import re
from pathlib import Path

from trigon.models.families import family_named, supported_model_types

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"


def table_rows(heading: str) -> dict[str, list[str]]:
    """Return the table of a section: each `model_type` of the first column -> the other cells."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = {}
    for line in re.findall(r"^\| `.*\|$", section, flags=re.MULTILINE)[1:]:  # without the header
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        rows |= dict.fromkeys(re.findall(r"`([^`]+)`", first), others)
    return rows


def test_the_page_lists_the_supported_families() -> None:
    assert sorted(table_rows("Supported families")) == list(supported_model_types())
    for model_type, (_, images, _) in table_rows("Supported families").items():
        assert images == ("yes" if family_named(model_type).has_vision else "no")


def test_families_listed_as_unsupported_are_not_supported() -> None:
    unsupported = table_rows("Unsupported families")
    assert len(unsupported) > 5
    assert not set(unsupported) & set(supported_model_types())


def test_the_measured_differences_are_those_of_supported_families_and_within_the_tests_tolerances() -> None:
    rows = table_rows("Measured differences")
    assert rows
    assert set(rows) <= set(supported_model_types())
    for model_type, (packed, gradients, vllm, transformers) in rows.items():
        assert max(float(packed), float(gradients)) <= 1e-5, model_type
        assert float(transformers) <= 1e-4, model_type
        assert vllm == "-" or float(vllm) <= 1e-4, model_type
