"""The environment variables that processes with user code get, and what is said of the others."""

import pytest

from trigon.errors import RewardError
from trigon.system.child import (
    check_passed_variables,
    child_environment,
    explain_withheld,
    warn_of_withheld_variables,
)


@pytest.mark.faults
def test_the_environment_is_a_list_of_what_is_allowed():
    kept = {
        "PATH": "/bin",
        "HF_HOME": "/cache",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTP_PROXY": "http://proxy:1",
        "https_proxy": "proxy:1",
        "LANG": "de_DE@euro",
        "OPENAI_BASE_URL": "http://judge/v1",
    }
    withheld = {
        "HF_TOKEN": "hf_x",
        "OPENAI_API_KEY": "sk-x",
        "AWS_PROFILE": "x",
        "WANDB_BASE_URL": "http://wandb",
        "PGPASSWORD": "x",
        "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/x",
        "DATABASE_URL": "postgres://db",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "ANYTHING_ELSE": "x",
        "http_proxy": "http://me:pw@proxy:1",
        "ALL_PROXY": "me:pw@proxy:1",
        "HF_ENDPOINT": "https://token@mirror",
    }
    added = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert child_environment(kept | withheld) == kept | added
    passed = child_environment(kept | withheld, ["HF_TOKEN", "http_proxy"])
    assert passed == kept | added | {"HF_TOKEN": "hf_x", "http_proxy": "http://me:pw@proxy:1"}


def test_variables_that_a_file_names_and_does_not_get_are_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    monkeypatch.setenv("JUDGE_MODEL", "large")
    (tmp_path / "reward.py").write_text("""
import os
URL = os.getenv("JUDGE_URL", "http://localhost")
MODEL, HOME, OTHER = os.environ["JUDGE_MODEL"], os.environ['HOME'], os.getenv("NOT_SET")
""")
    warn_of_withheld_variables([str(tmp_path / "reward.py"), "missing.py"], ["JUDGE_MODEL"])
    [message] = caplog.messages
    assert "do not get: JUDGE_URL; worker.reward.env=[JUDGE_URL]" in message


@pytest.mark.parametrize(
    ("error", "named"),
    [
        ("KeyError: 'OPENAI_API_KEY' (reward.py:2)", "OPENAI_API_KEY"),
        ("set the OPENAI_API_KEY variable", "OPENAI_API_KEY"),
        ("KeyError: 'NOT_SET_TOKEN'", "NOT_SET_TOKEN"),
        ("KeyError: 'NOT_SET'", ""),
        ("KeyError: 'PASSED_KEY'", ""),
        ("no file in HOME", ""),
    ],
)
def test_an_error_about_a_withheld_variable_names_the_option_that_passes_it(monkeypatch, error, named):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123")
    monkeypatch.setenv("PASSED_KEY", "sk-123")
    explained = explain_withheld(error, ["PASSED_KEY"])
    assert explained.startswith(error)
    assert (f"worker.reward.env=[{named}]" in explained) if named else explained == error


def test_a_variable_that_is_passed_must_be_set():
    with pytest.raises(RewardError, match=r"worker\.reward\.env names NOT_SET_KEY, which is not set"):
        check_passed_variables(["NOT_SET_KEY"])
