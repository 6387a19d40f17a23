"""The environments of other trainers get the torch of this one, from the sources of pip."""

import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import side_trigon
from peers import PYTORCH_INDEX, own_torch, torch_source
from shared import SHORT

from trigon.rewards.load import find_source, load_function


def test_pip_knows_the_versions_of_torch_and_torchvision():
    # What is installed satisfies a requirement without an index; torchvision.__version__ would not.
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", *own_torch()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_versions_are_read_without_importing_torch():
    script = "import sys, peers; peers.own_torch(); print(*{'torch', 'torchvision'} & set(sys.modules))"
    path = f"import sys; sys.path.append({str(Path(__file__).parents[2] / 'benchmarks')!r}); "
    assert subprocess.run([sys.executable, "-c", path + script], check=True, capture_output=True).stdout == b"\n"


def test_pytorchs_index_is_asked_only_if_pips_sources_lack_the_build(monkeypatch):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    pip = [sys.executable, "-m", "pip", "install", "--no-index"]
    assert torch_source([*pip, "--find-links", "/nowhere"], "torch==0.0.1+cpu") == ["--extra-index-url", PYTORCH_INDEX]
    assert torch_source(["true"], "torch==2.13.0+cpu") == []
    assert torch_source(["false"], "torch==2.13.0") == []
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/whl")
    assert torch_source(["true"], "torch==2.13.0+cpu") == ["--extra-index-url", "https://example.org/whl"]


def test_the_reward_function_of_the_whole_step_benchmark_exists(tmp_path):
    [spec] = [text for text in side_trigon.options(tmp_path, SHORT, 1) if text.startswith("worker.reward.reward_func")]
    loaded = load_function(find_source(spec.partition("=")[2]))
    assert set(loaded.function([{"response": "some text"}])[0]) == {"overall"}
