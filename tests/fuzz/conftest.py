"""Every test in this folder generates inputs, and runs longer with `make test-faults`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as faults."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.parent == folder:
            item.add_marker(pytest.mark.faults)
