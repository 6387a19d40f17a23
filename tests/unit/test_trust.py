"""Files that others made run no code: models, checkpoints, datasets and configurations."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import trigon
from trigon.config.load import load_config
from trigon.config.schema import ModelConfig
from trigon.data.sources import open_source
from trigon.errors import ConfigError, DataError, ModelError
from trigon.models.load import load_model, load_processors
from trigon.training.state import ShardedFiles, load_tensors, save_tensors

pytestmark = pytest.mark.faults

PACKAGE = Path(trigon.__file__).parent

# Where Trigon unpickles what it has pickled itself a moment before, in another process.
OWN_PICKLES = {"system/user_code.py"}

WORDS = r"\b(pickle|cloudpickle|marshal|eval|exec|yaml|sympify|trust_remote_code|torch\.load)\b"
"""A file without any of them has none of the calls of these tests."""


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.write_text, (self.mark, "code was run"))


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return the file, the dotted name and the node of each call in files with one of WORDS."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func), node)
        for path, text in texts.items()
        if re.search(WORDS, text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    ]


@pytest.mark.extended
def test_nothing_is_unpickled_but_what_trigon_pickled_itself():
    loads = {"pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "torch.load", "marshal.loads"}
    assert {file for file, name, _ in calls() if name in loads} == OWN_PICKLES


def test_yaml_is_read_without_objects_and_no_text_is_evaluated(tmp_path):
    forbidden = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "sympy.sympify"}
    # Of the tool `python`, which runs what a model wrote in a process that can reach nothing.
    sandboxed = [("system/confinement/code_main.py", "exec")] * 2
    assert [(file, name) for file, name, _ in calls() if name in forbidden] == sandboxed
    path, mark = tmp_path / "run.yaml", tmp_path / "mark"
    path.write_text(f"trainer: !!python/object/apply:pathlib.Path.touch [{mark}]")
    with pytest.raises(ConfigError):
        load_config(path, [])
    assert not mark.exists()


def test_code_of_model_repositories_is_never_trusted_by_the_package_itself():
    assert ModelConfig().trust_remote_code is False
    given = [
        (file, ast.unparse(keyword.value))
        for file, _, node in calls()
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
    ]
    assert given
    assert [(file, value) for file, value in given if value == "True"] == []


def test_the_code_of_a_model_folder_does_not_run(tiny_vlm, tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_vlm, folder)
    for module in ("modeling_evil.py", "configuration_evil.py"):
        (folder / module).write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: ...\n")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModelForImageTextToText": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    load_processors(str(folder))
    load_model(str(folder), dtype=torch.float32, device="cpu")  # by the library's own code
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "model_type": "evil"}))
    with pytest.raises(ModelError):
        load_processors(str(folder))
    assert not mark.exists()


def test_a_pickle_in_place_of_weights_does_not_run(tiny_vlm, tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_vlm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"lm_head.weight": Evil(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(str(folder), dtype=torch.float32, device="cpu")
    assert not mark.exists()
    with (folder / "pytorch_model.bin").open("rb") as file:  # it would run
        torch.load(file, weights_only=False)
    assert mark.exists()


def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path):
    folder, mark = tmp_path / "weights", tmp_path / "mark"
    saved = {"a": torch.arange(6.0).view(2, 3)}
    save_tensors(saved, folder, group=None)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))  # torch's own format has one, and unpickles it
    loaded = {"a": torch.zeros(2, 3)}
    load_tensors(loaded, folder, group=None)
    assert torch.equal(loaded["a"], saved["a"])
    assert list(ShardedFiles(folder).tensors) == ["a"]
    HuggingFaceStorageReader(str(folder)).read_metadata()  # what several ranks read with
    assert not mark.exists()


@pytest.mark.usefixtures("own_datasets_cache")
def test_the_script_of_a_dataset_does_not_run(tmp_path):
    folder, mark = tmp_path / "data", tmp_path / "mark"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with pytest.raises(DataError):
        open_source(str(folder))
    (folder / "train.jsonl").write_text('{"prompt": "q", "answer": "1"}\n')
    assert len(open_source(str(folder)).rows) == 1
    assert not mark.exists()


WRITE = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[2], 8))
from trigon.report.rollouts import RolloutRow
from trigon.report.run_folder import ImageStore
from trigon.report.run_folder import RunFolder
from trigon.training.state import save_tensors
import torch
root = Path(sys.argv[1])
with RunFolder(root / "checkpoints" / "run") as folder:
    folder.write_config("trainer: {}")
    folder.write_local_sources({"a": "b"})
    folder.write_budgets({"a": 1})
    folder.write_skipped_rows("train", [(0, "prompt", "empty")])
    folder.append_metrics(1, {"a": 1.0})
    folder.write_rollouts(1, "train", [])
    save_tensors({"a": torch.zeros(2)}, folder.path / "global_step_1" / "weights", group=None)
"""


@pytest.mark.extended
@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_a_run_folder_has_the_permissions_of_the_umask(tmp_path, umask):
    command = [sys.executable, "-c", WRITE, str(tmp_path), f"{umask:o}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    paths = list((tmp_path / "checkpoints").rglob("*"))
    assert len(paths) > 8
    for path in paths:
        allowed = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(os.stat(path).st_mode) == allowed, path
