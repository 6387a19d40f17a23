"""`trigon push`: what it writes is loaded by transformers, and what it pushes arrives at a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from support.fake_hub import READER, UNKNOWN, WRITER, Repository, fake_hub
from support.fake_runs import config_text
from trigon.checkpoint.store import CheckpointStore
from trigon.config.schema import LoraConfig
from trigon.models.families import family_of
from trigon.models.load import copy_side_files, load_model
from trigon.models.lora import adapter_config, add_lora
from trigon.models.policy import Policy
from trigon.report.run_folder import RunFolder
from trigon.tools.cli.main import main
from trigon.training.state import save_tensors

pytestmark = pytest.mark.extended

SECRET = "hf_abcdefghij0123456789"


def make_run(folder: Path, model: Path, *, lora: bool = False) -> Path:
    """Write the folder of a run with checkpoints of steps 2 and 4."""
    loaded = load_model(str(model), dtype=torch.float32, device="cpu")
    policy = Policy(loaded, family_of(loaded.config), temperature=1.0, banned_token_ids=())
    if lora:
        add_lora(policy.model, LoraConfig(rank=4, alpha=8, exclude_modules=".*visual.*"), seed=0)

    def write(actor: Path) -> None:
        if lora:
            (actor / "adapter_config.json").write_text(json.dumps(adapter_config(policy.model, base_model=str(model))))
        save_tensors(dict(policy.saved_tensors()), actor / ("adapter" if lora else "weights"), group=None)
        save_tensors({"state": torch.zeros(1)}, actor / "optimizer", group=None)
        copy_side_files(model, actor / "huggingface")

    for step in (2, 4):
        CheckpointStore(folder, keep=-1).save(step, write=write, progress={}, score=1.0 / step)
    options = {
        "data.train_files": ["hiyouga/geometry3k@train"],
        "data.val_files": ["hiyouga/geometry3k@test"],
        "worker.actor.model.model_path": str(model),
        "worker.reward.reward_function_kwargs": {"judge": SECRET},
        "worker.reward.reward_function": "math",
        "worker.actor.model.lora.rank": 4 if lora else 0,
    }
    with RunFolder(folder) as run:
        run.write_config(config_text(options))
        run.write_local_sources({str(model): str(model)})
        for step in range(5):
            run.append_metrics(step, {"val/accuracy_reward": step / 4, "reward/overall": step / 5})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_vlm):
    return make_run(tmp_path_factory.mktemp("push") / "run", tiny_vlm)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, tiny_vlm):
    return make_run(tmp_path_factory.mktemp("push") / "lora", tiny_vlm, lora=True)


DRIVER = """
import json, os, sys
from trigon.tools.cli.main import main
for token, arguments in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    status = main(["push", *arguments])
    print("STATUS", status, flush=True)
    print("STATUS", status, file=sys.stderr, flush=True)
"""


def push(endpoint: str, *cases: tuple[str, Sequence[str]]) -> list[tuple[int, str, str]]:
    """Run `trigon push` with (token, arguments) of each case, in a process that uses a hub.

    Returns: exit status and both outputs of each.
    """
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(cases)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr

    def parts(text: str) -> list[str]:
        return [part.partition("\n")[2] if number else part for number, part in enumerate(text.split("STATUS "))]

    statuses = [int(part.partition("\n")[0]) for part in done.stdout.split("STATUS ")[1:]]
    return list(zip(statuses, parts(done.stdout), parts(done.stderr), strict=False))


@pytest.fixture(scope="module")
def pushed(run, tmp_path_factory):
    """Return the hub after three pushes, their outputs, and the folder of the first."""
    folder = tmp_path_factory.mktemp("pushed") / "folder"
    with fake_hub() as hub:
        hub.repositories["me/public"] = Repository(private=False)
        results = push(
            hub.endpoint,
            (WRITER, [str(run), "me/geo", "--private", "--output", str(folder), "--license", "mit"]),
            (WRITER, [str(run), "geo", "--no-logits", "--step", "2"]),
            (WRITER, [str(run), "me/public", "--private", "--no-logits"]),
        )
    return hub, results, folder


def test_the_files_of_the_folder_arrive_in_a_private_repository(pushed):
    hub, results, folder = pushed
    status, out, err = results[0]
    assert (status, "Error" in err) == (0, False)
    repository = hub.repositories["me/geo"]
    assert repository.private
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert written.keys() == repository.files.keys()
    assert {"README.md", "curves.png", "model.safetensors", "config.json", "trigon_export.json"} <= written.keys()
    assert repository.messages == ["Step 4 of run", "Step 2 of run"]
    assert out.splitlines()[-1].startswith(f"pushed: {hub.endpoint}/me/geo/commit/")

    assert hub.repositories["me/geo"].files["model.safetensors"] in hub.objects.values()
    assert (folder / "config.json").read_bytes() not in hub.objects.values()
    names = [request.rpartition("/")[0] for request in hub.requests]
    assert names.index("GET /api") < names.index("POST /api/repos") < names.index("PUT /storage")


def test_another_step_replaces_the_files_and_a_public_repository_is_not_pushed_to_as_private(pushed, run):
    hub, results, _ = pushed
    assert results[1][0] == 0
    record = json.loads(hub.repositories["me/geo"].files["trigon_export.json"])
    assert record["step"] == 2
    assert [path.name for path in run.iterdir() if "push" in path.name] == []  # its folder was removed
    status, _, err = results[2]
    assert status == 1
    assert err.startswith("PushError: me/public exists and is public, which --private does not change")
    assert hub.repositories["me/public"].files == {}


def test_the_card_that_arrives_is_valid_and_has_no_secret(pushed):
    hub, _, folder = pushed
    text = (folder / "README.md").read_text()
    data = ModelCard(text).data
    assert (data.license, data.datasets) == ("mit", ["hiyouga/geometry3k"])
    assert "| accuracy | 0.000 | 1.000 | unknown |" in text
    assert [name for name, content in hub.repositories["me/geo"].files.items() if SECRET.encode() in content] == []


def test_the_folder_of_a_dry_run_is_loaded_by_transformers(run, tmp_path, capsys):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tmp_path / "folder"
    assert main(["push", str(run), "me/geo", "--dry-run", "--output", str(folder), "--no-logits"]) == 0
    assert "written, and not pushed" in capsys.readouterr().out
    AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000
    # Again: the folder is that of an earlier push.
    assert main(["push", str(run), "me/geo", "--dry-run", "--output", str(folder), "--no-logits"]) == 0


def test_a_lora_run_pushes_its_adapter_or_with_merged_a_model(lora_run, tiny_vlm, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    arguments = ["push", str(lora_run), "me/geo", "--dry-run", "--no-logits", "--output"]
    assert main([*arguments, str(tmp_path / "adapter")]) == 0
    out = capsys.readouterr().out
    assert "cannot be pushed: the base model of the adapter is a local folder" in " ".join(out.split())
    data = ModelCard((tmp_path / "adapter" / "README.md").read_text()).data
    assert data.library_name == "peft"
    assert "lora" in data.tags
    PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(tiny_vlm), tmp_path / "adapter")

    assert main([*arguments, str(tmp_path / "merged"), "--merged"]) == 0
    AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert ModelCard((tmp_path / "merged" / "README.md").read_text()).data.library_name == "transformers"


def test_failures_are_one_sentence_and_nothing_is_exported(run, lora_run):
    with fake_hub() as hub:
        hub.locked.add("closed")
        (run / "global_step_2_copy").mkdir(exist_ok=True)
        results = push(
            hub.endpoint,
            ("", [str(run), "me/geo"]),
            (UNKNOWN, [str(run), "me/geo"]),
            (READER, [str(run), "me/geo"]),
            (WRITER, [str(run), "others/geo"]),
            (WRITER, [str(lora_run), "me/geo"]),
            (WRITER, [str(run), "closed/geo", "--no-logits"]),
            (WRITER, [str(run), "me/geo", "--step", "3"]),
        )
        assert hub.repositories == {}
    unreachable = push(hub.endpoint, (WRITER, [str(run), "me/geo"]))
    expected = [
        "there is no token for the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN",
        "refused me/geo with status 401: the token is not valid",
        "the token of the Hugging Face Hub may only read",
        "me cannot push to others/geo: the namespace must be one of me, lab, closed",
        "the base model of the adapter is a local folder",
        "refused closed/geo with status 403: the token has no permission to write there",
        "has no checkpoint of step 3; it has global_step_2, global_step_4",
        "cannot be reached",
    ]
    for (status, out, err), message in zip([*results, *unreachable], expected, strict=True):
        assert status == 1
        assert message in err
        assert err.count("\n") == 1
        assert ("writing" in out) == ("closed" in err and "refused" in err), "exported only if the token may write"


def test_offline_mode_is_named(run, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)  # HF_HUB_OFFLINE is set in all tests
    assert main(["push", str(run), "me/geo"]) == 1
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


def test_a_wrong_name_of_a_repository_is_wrong_usage(capsys):
    for repo in ("a/b/c", "a b", "../x", ""):
        with pytest.raises(SystemExit, match="2"):
            main(["push", "run", repo])
        assert "is no name of a repository: write NAMESPACE/NAME" in capsys.readouterr().err
