"""Each logger with its real library, offline: metrics, configuration, samples, resuming.

`make test-loggers` runs these where all libraries are installed, with TRIGON_TEST_LOGGERS=1: then
one that is missing is a failure. Elsewhere it is skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from support.samples import SAMPLES, logged_run
from trigon.report.delivery import Deliveries, LoggedRun, make_loggers, open_loggers

# The libraries warn of what they will change.
pytestmark = pytest.mark.filterwarnings("default")

ALL_ARE_INSTALLED = os.environ.get("TRIGON_TEST_LOGGERS") == "1"
SENTENCE = "alert(1)"  # of a response


def use(name: str) -> None:
    """Skip the test if a library is not installed."""
    if not ALL_ARE_INSTALLED and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    importlib.import_module(name)


def log(name: str, run: LoggedRun, steps: range) -> None:
    """Do what a run does: from the thread of the logger."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    loggers = make_loggers([name])
    open_loggers(loggers, run)
    warned: list[str] = []
    deliveries = Deliveries(loggers, warn=warned.append)
    for step in steps:
        if step % 2 == 0:
            deliveries.samples(step, "validation", lambda: SAMPLES)
            deliveries.samples(step, "train", lambda: SAMPLES[1:])  # without images
        deliveries.metrics(step, {"reward/overall": 0.5 + step, "nan": float("nan")})
    deliveries.close()
    assert warned == []
    assert signal.getsignal(signal.SIGINT) is on_interrupt


def sizes(paths: list[Path]) -> set[tuple[int, int]]:
    found = set()
    for path in paths:
        with Image.open(path) as image:
            found.add(image.size)
    return found


def test_wandb(tmp_path, monkeypatch):
    for variable, value in {
        "WANDB_MODE": "offline",
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(variable, value)
    use("wandb")
    log("wandb", logged_run(tmp_path), range(3))
    [record] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # Another process writes the file; it may still do so when finish has returned.
    deadline = time.monotonic() + 30
    while not all(text in record.read_bytes() for text in (b'"max_steps":3', b"reward/overall")):
        assert time.monotonic() < deadline, record.read_bytes()[:200]
        time.sleep(0.1)
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/*/files/media/table/samples/*.json")]
    assert {tuple(table["columns"][:3]) for table in tables} == {("images", "prompt_id", "sample")}
    assert any(SENTENCE in row[4] for table in tables for row in table["data"])
    staged = (tmp_path / "data" / "artifacts" / "staging").iterdir()
    images = [path for path in staged if path.read_bytes().startswith(b"\x89PNG")]
    assert sizes(images) == {(18, 8)}  # both images, side by side
    log("wandb", logged_run(tmp_path, first_step=3), range(3, 4))  # resumed: the same run
    assert {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")} == {record.stem}
    # trainer.val_only: another one, since wandb has step 2 of this one already.
    log("wandb", logged_run(tmp_path, first_step=None), range(2, 3))
    [validation] = {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")} - {record.stem}
    assert record.stem == f"run-{json.loads((tmp_path / 'wandb.json').read_text())['run_id']}"
    log("wandb", logged_run(tmp_path), range(1))  # from the beginning: another one
    runs = {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    [other] = runs - {record.stem, validation}
    assert other == f"run-{json.loads((tmp_path / 'wandb.json').read_text())['run_id']}"


def test_swanlab(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    use("swanlab")
    for folder in ("first", "second"):  # the second in the same process
        log("swanlab", logged_run(tmp_path / folder), range(3))
        [run] = (tmp_path / folder / "swanlab").glob("run-*")
        assert b"reward/overall" in next(run.glob("*.swanlab")).read_bytes()
        assert "max_steps" in (run / "files" / "config.yaml").read_text()
        tables = [path.read_text() for path in run.glob("media/html/*.html")]
        assert len(tables) == 4
        assert all(SENTENCE in table and "<script>" not in table for table in tables)
        assert sum("data:image/png;base64," in table for table in tables) == 2


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    use("mlflow")
    import mlflow

    log("mlflow", logged_run(tmp_path), range(3))
    log("mlflow", logged_run(tmp_path, first_step=2), range(2, 4))  # resumed after step 1
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("easy_r1")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.max_steps"] == "3"
    history = client.get_metric_history(run.info.run_id, "reward/overall")
    assert {entry.step: entry.value for entry in history} == {0: 0.5, 1: 1.5, 2: 2.5, 3: 3.5}
    table = client.load_table(run.info.experiment_id, "samples/validation_000000.json", [run.info.run_id])
    assert list(table["reward"]) == [1.0, 1.0]
    assert SENTENCE in table["response"][0]
    assert sizes(list((tmp_path / "store").rglob("table_images/samples/validation_000000/*.png"))) == {(18, 8), (1, 1)}
    [again] = (tmp_path / "store").rglob("validation_000002_resumed_*.json")
    assert len(client.load_table(run.info.experiment_id, f"samples/{again.name}", [run.info.run_id])) == 2
    log("mlflow", logged_run(tmp_path, first_step=0), range(1))  # from the beginning: another run
    assert len(client.search_runs([experiment.experiment_id])) == 2
    assert "password" not in (tmp_path / "mlflow.json").read_text()


def test_mlflow_without_a_server_has_a_store_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    use("mlflow")
    import mlflow

    folder = tmp_path / "run"
    folder.mkdir()
    log("mlflow", logged_run(folder), range(3))
    log("mlflow", logged_run(folder, first_step=2), range(2, 4))  # resumed after step 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("easy_r1").experiment_id])
    assert {entry.step for entry in client.get_metric_history(run.info.run_id, "reward/overall")} == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory) -> Iterator[Path]:
    """Return the folder of trackio's databases, which it reads once, as it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRACKIO_DIR", str(folder))
        use("trackio")
        yield folder


def test_trackio(tmp_path, trackio_folder, capsys):
    import trackio

    log("trackio", logged_run(tmp_path), range(3))
    log("trackio", logged_run(tmp_path, first_step=3), range(3, 5))  # resumed after step 2
    with sqlite3.connect(trackio_folder / "easy_r1.db") as connection:
        rows = connection.execute("select step, run_name, metrics from metrics order by step").fetchall()
    logged = [(step, json.loads(metrics)) for step, _, metrics in rows]
    assert len({name for _, name, _ in rows}) == 1
    assert [(step, each["reward/overall"]) for step, each in logged if "reward/overall" in each] == [
        (step, 0.5 + step) for step in range(5)
    ]
    assert trackio.Api().runs("easy_r1")[0].config["trainer"]["max_steps"] == 3
    tables = [each["samples/validation"]["_value"] for _, each in logged if "samples/validation" in each]
    assert [len(table) for table in tables] == [2, 2, 2]
    assert [image["_type"] for image in tables[0][0]["images"]] == ["trackio.image"] * 2
    assert SENTENCE in tables[0][0]["response"]
    assert sizes(list((trackio_folder / "media").rglob("*.png"))) == {(6, 4), (8, 8)}
    assert capsys.readouterr().out == ""


def test_trackio_continues_the_run_of_the_same_folder_only(tmp_path, trackio_folder):
    a = logged_run(tmp_path / "a", project="folders")
    b = replace(a, folder=tmp_path / "b")
    log("trackio", a, range(1, 3))
    log("trackio", b, range(1, 2))
    log("trackio", replace(a, first_step=3), range(3, 4))
    log("trackio", a, range(1, 2))  # from the beginning
    log("trackio", replace(a, first_step=2), range(2, 4))
    with sqlite3.connect(trackio_folder / "folders.db") as connection:
        rows = connection.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    steps: dict[tuple[str, str], list[int]] = {}
    for run_id, name, step, metrics in rows:
        if "reward/overall" in json.loads(metrics):
            steps.setdefault((run_id, name), []).append(step)
    assert list(steps.values()) == [[1, 2, 3], [1], [1, 2, 3]]
    first, other, anew = (name for _, name in steps)
    assert first == anew != other


def test_trackio_prints_nothing_at_the_end_of_the_process(tmp_path):
    use("trackio")
    script = """
import sys
from pathlib import Path
from support.samples import logged_run
from trigon.report.loggers.trackio import TrackioLogger

logger = TrackioLogger()
logger.open(logged_run(Path(sys.argv[1])))
logger.log_metrics(1, {"reward": 1.0})
logger.close()
"""
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent), os.environ.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout == ""
