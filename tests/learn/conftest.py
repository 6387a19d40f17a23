"""The tiny model that the learning tests start from, after its warm start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model and data, made by `trigon tiny`. Do not change either."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "trigon", "tiny", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder
