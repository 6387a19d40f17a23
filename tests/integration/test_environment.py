"""The environment of `make setup` works in plain processes, with an empty home folder and empty
caches.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended


@pytest.mark.long(but=["transformers"])
@pytest.mark.vllm(cases=["vllm"])
@pytest.mark.parametrize(
    "script",
    [
        "import torchvision",
        "import peft",
        "from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration",
        # As `vllm serve` starts: vLLM inspects the class in a process that loads no plugin before
        # torchvision.
        "from vllm.model_executor.models import ModelRegistry\n"
        "if __name__ == '__main__':\n"
        "    ModelRegistry.models['Qwen2_5_VLForConditionalGeneration'].inspect_model_cls()",
    ],
    ids=["torchvision", "peft", "transformers", "vllm"],
)
def test_a_plain_process_loads_what_users_load(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    folders = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TMPDIR")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, **folders, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
