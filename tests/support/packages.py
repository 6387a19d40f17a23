"""Packages that only some environments of the tests have."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """Return an imported package, or skip the test file without it.

    `make test-environments` sets TRIGON_TEST_ENVIRONMENTS=1: there a package that is missing, or
    that cannot be imported, is an error.
    """
    if os.environ.get("TRIGON_TEST_ENVIRONMENTS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"needs {name}: make test-environments")
