"""The model that the learning tests start from: one that can answer, and has not learned what it is asked here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def with_gradient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the embedded model, as `trigon tiny` makes it, with its data. Do not write into either."""
    folder = tmp_path_factory.mktemp("taught")
    command = [sys.executable, "-m", "trigon.cli", "tiny", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder
