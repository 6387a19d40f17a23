"""Hub ids: resolved by the mirror in HF_ENDPOINT or by ModelScope, and by no other hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

from trigon.assemble.pools import config_for_workers
from trigon.config.load import load_config
from trigon.data.sources import open_source
from trigon.errors import ConfigError, DataError, ModelError
from trigon.models.hub import VARIABLE, uses_modelscope
from trigon.models.load import family_of_folder, model_folder

OPEN_BOTH = """
from trigon.data.sources import open_source
from trigon.models.load import model_folder
for open_it in (model_folder, open_source):
    try:
        open_it("owner/thing")
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


@pytest.fixture
def mirror() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of an empty hub, and the list of paths requested from it."""
    requested: list[str] = []

    class EmptyHub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET
        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Do not log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.extended
def test_a_mirror_replaces_the_hugging_face_hub(mirror: tuple[str, list[str]], tmp_path: Path) -> None:
    address, requested = mirror
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, "-c", OPEN_BOTH], env=environment, capture_output=True, text=True, timeout=120
    )
    lines = completed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ModelError", "DataError"], completed.stdout + completed.stderr
    assert all(address in line and "huggingface.co" not in line for line in lines)
    for kind in ("models", "datasets"):
        assert any("owner/thing" in path and (kind == "models") != ("datasets" in path) for path in requested), kind


# A fake of the package, which finds repositories in a folder of the test and records the requests.
FAKE_PACKAGE = """
from pathlib import Path
from modelscope.hub.errors import HubError

HUB = Path({hub!r})

def snapshot_download(model_id, *, ignore_patterns):
    assert "*.bin" in ignore_patterns
    return str(_found("models", model_id))

def dataset_snapshot_download(dataset_id):
    return str(_found("datasets", dataset_id))

def _found(kind, name):
    with (HUB / "requests").open("a") as requests:
        requests.write(f"{{kind}}/{{name}}\\n")
    if not (HUB / kind / name).is_dir():
        raise HubError(f"no {{kind}}/{{name}}")
    return HUB / kind / name
"""


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Select ModelScope, with a fake package; yield the folder of its repositories."""
    package = tmp_path / "site" / "modelscope"
    (package / "hub").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_PACKAGE.format(hub=str(tmp_path)))
    (package / "hub" / "__init__.py").write_text("")
    (package / "hub" / "errors.py").write_text("class HubError(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv(VARIABLE, "1")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelscope"]:
        del sys.modules[name]


def test_models_come_from_modelscope_and_workers_get_the_downloaded_folder(modelscope: Path, tiny_vlm: Path) -> None:
    (modelscope / "models" / "owner").mkdir(parents=True)
    (modelscope / "models" / "owner" / "tiny").symlink_to(tiny_vlm)
    folder = model_folder("owner/tiny")
    assert family_of_folder(folder).model_type == "qwen2_5_vl"
    assert model_folder(str(tiny_vlm)) == tiny_vlm  # a local folder is not a hub id
    assert (modelscope / "requests").read_text() == "models/owner/tiny\n"
    needed = ("data.train_files=a/b", "worker.reward.reward_function=math", "worker.rollout.n=2")
    off = ("trainer.val_before_train=false", "trainer.val_freq=-1", "worker.actor.model.model_path=owner/tiny")
    model = config_for_workers(load_config(None, (*needed, *off)).config).worker.actor.model
    assert (model.model_path, model.tokenizer_path) == (str(folder), None)


def test_datasets_come_from_modelscope(modelscope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", modelscope / "cache")
    for split, count in (("train", 3), ("test", 2)):
        path = modelscope / "datasets" / "owner" / "data" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"problem": f"{i}?", "answer": str(i)}) + "\n" for i in range(count)))
    source = open_source("owner/data@test")
    assert (source.name, len(source.rows)) == ("test", 2)
    assert len(open_source("owner/data").rows) == 3
    assert (modelscope / "requests").read_text() == "datasets/owner/data\n" * 2


def test_a_repository_that_modelscope_does_not_have_is_an_error(modelscope: Path) -> None:
    with pytest.raises(
        ModelError, match=r"'owner/none' is neither a folder .* that could be downloaded from ModelScope"
    ):
        model_folder("owner/none")
    with pytest.raises(DataError, match="nor a dataset that could be downloaded from ModelScope"):
        open_source("owner/none")


def test_values_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in {"1": True, "True": True, "0": False, "": False, "no": False}.items():
        monkeypatch.setenv(VARIABLE, value)
        assert uses_modelscope() is expected
    monkeypatch.setenv(VARIABLE, "modelscope.cn")
    with pytest.raises(ConfigError, match=r"USE_MODELSCOPE_HUB is 'modelscope\.cn'"):
        uses_modelscope()
