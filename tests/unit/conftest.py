"""Fixtures that several unit test files share. Imports nothing heavy, as tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.fake_runs import SharedParts


@pytest.fixture(scope="module")
def parts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedParts]:
    """Return what the runs of a test file on fake engines share."""
    from support.fake_runs import open_shared_parts

    with open_shared_parts(tiny_model("qwen2"), tmp_path_factory.mktemp("parts")) as parts:
        yield parts
