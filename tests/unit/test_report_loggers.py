"""The loggers: which are known, how calls reach them, and what TensorBoard gets."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from support.samples import SAMPLES, logged_run
from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import LoadedConfig
from trigon.config.names import LOGGERS
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.report.delivery import (
    Deliveries,
    LoggedRun,
    check_loggers,
    make_loggers,
    open_loggers,
)
from trigon.report.samples import as_html, image_strip
from trigon.system.installation import install_command


class Recorder:
    """A logger that keeps its calls, and may wait or fail in them."""

    name = "recorder"

    def __init__(self, *, error: BaseException | None = None, wait: threading.Event | None = None) -> None:
        self.calls: list[tuple] = []
        self.error, self.wait = error, wait

    def _call(self, *call: object) -> None:
        if self.wait is not None:
            self.wait.wait(10)
        if self.error is not None:
            raise self.error
        self.calls.append(call)

    def log_metrics(self, step, metrics):
        self._call("metrics", step, metrics)

    def log_samples(self, step, split, samples):
        self._call("samples", step, split, samples)

    def close(self):
        self._call("close")


class TwoMethods:
    """The least that a logger can be."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, step, metrics):
        self.steps.append(step)

    def log_samples(self, step, split, samples):
        pass


def opened(names, run):
    loggers = make_loggers(names)
    open_loggers(loggers, run)
    return loggers


# Which are known


def test_loggers_are_checked_by_name_and_imported_when_chosen():
    assert make_loggers(["console", "file"]) == []
    assert len(make_loggers(["tensorboard", "tensorboard"])) == 1
    with pytest.raises(ConfigError, match="'wandbb'; it takes " + ", ".join(("console", "file", *LOGGERS))):
        check_loggers(["console", "wandbb"])
    for name in ("mlflow", "swanlab", "trackio", "wandb"):
        if find_spec(name) is None:
            with pytest.raises(ConfigError, match=re.escape(install_command(name))):
                check_loggers(["console", name])
    script = """
import sys
import trigon.report.reporter
from trigon.report.delivery import check_loggers
check_loggers(["console", "file", "tensorboard"])
assert not {"wandb", "swanlab", "mlflow", "trackio", "tensorboard", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("library", "is_accepted"), [(None, True), ("json", True), ("no_such_library", False)])
def test_a_logger_may_need_no_library_or_one_of_another_name(monkeypatch, library, is_accepted):
    logger = next(name for name in LOGGERS if name != "tensorboard")
    monkeypatch.setattr(f"trigon.report.loggers.{logger}.LOGGER.library", library, raising=False)
    with nullcontext() if is_accepted else pytest.raises(ConfigError, match="not installed"):
        check_loggers([logger])


def test_a_logger_that_fails_to_open_is_a_config_error_and_the_others_are_closed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file, not a folder")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "file"))
    [tensorboard] = make_loggers(["tensorboard"])
    first = Recorder()
    with pytest.raises(ConfigError, match=r"names tensorboard, which failed to open: .*TENSORBOARD_DIR"):
        open_loggers([first, tensorboard], logged_run(tmp_path))
    assert first.calls == [("close",)]


class MetricsOnly:
    """Not a logger: it has no log_samples, and what it has for metrics cannot be called."""

    log_metrics = "metrics.txt"


class TakesNoStep(TwoMethods):
    def log_metrics(self, metrics): ...


def test_an_object_that_cannot_be_a_logger_is_refused_before_a_run_starts(tmp_path):
    with_metrics = MetricsOnly()
    with_metrics.log_metrics = print
    for logger, problem in (
        (MetricsOnly(), "MetricsOnly without log_metrics and log_samples"),
        (with_metrics, "MetricsOnly without log_samples"),
        (TwoMethods, "the class TwoMethods instead of an object"),
        (
            TakesNoStep(),
            r"log_metrics of the logger TakesNoStep takes \(metrics\), but .* log_metrics\(step, metrics\)",
        ),
    ):
        loaded = LoadedConfig(Config(trainer={"save_checkpoint_path": str(tmp_path / "run")}), (), {})
        with pytest.raises(ConfigError, match=problem):
            start_run(loaded, stop=StopSignals(), loggers=[TwoMethods(), logger])
    assert not (tmp_path / "run").exists()


# How calls reach them


def test_calls_arrive_in_order_and_samples_are_made_once_in_another_thread():
    made = []

    def make():
        made.append(threading.current_thread())
        return SAMPLES

    recorder, other = Recorder(), Recorder()
    warned = []
    deliveries = Deliveries([recorder, other], warn=warned.append)
    deliveries.samples(1, "train", make)
    deliveries.metrics(1, {"a": 1.0})
    deliveries.metrics(2, {"a": 2.0})
    deliveries.close()
    expected = [
        ("samples", 1, "train", SAMPLES),
        ("metrics", 1, {"a": 1.0}),
        ("metrics", 2, {"a": 2.0}),
        ("close",),
    ]
    assert recorder.calls == other.calls == expected
    assert warned == []
    assert len(made) == 1
    assert made[0] is not threading.current_thread()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Recorder(error=ConnectionError("no network")), "recorder failed: ConnectionError: no network"),
        (Recorder(error=SystemExit(3)), "recorder failed: SystemExit: 3"),  # ends the thread of the logger
        (MetricsOnly(), "MetricsOnly failed: TypeError"),
        (object(), "object failed: AttributeError"),
    ],
)
def test_a_logger_that_fails_is_reported_once_and_the_others_go_on(bad, reason):
    warned, good = [], TwoMethods()
    deliveries = Deliveries([bad, good], warn=warned.append)
    for step in (1, 2, 3):
        deliveries.metrics(step, {})
        deliveries.samples(step, "train", lambda: SAMPLES)
    deliveries.close(seconds=10)
    assert good.steps == [1, 2, 3]
    [warning] = warned
    assert warning.startswith(f"the logger {reason}")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({}, "has not finished 0.1 s after the end of the run"),
        ({"MAX_PENDING": 3}, "is 3 reports behind"),
        ({"CALL_SECONDS": 0.05}, "has not returned from a call for 0.05 s"),
    ],
)
def test_a_logger_that_blocks_stops_neither_a_step_nor_the_end_of_the_run(monkeypatch, limits, reason):
    for name, limit in limits.items():
        monkeypatch.setattr(f"trigon.report.delivery.{name}", limit)
    warned, release = [], threading.Event()
    deliveries = Deliveries([Recorder(wait=release)], warn=warned.append)
    for step in range(6):
        deliveries.metrics(step, {})
        time.sleep(0.03)
    deliveries.close(seconds=0.1)
    release.set()
    [warning] = warned
    assert reason in warning


# Samples


def test_html_escapes_what_models_write():
    table = as_html(SAMPLES)
    assert "<script>" not in table
    assert "&lt;script&gt;alert(1)" in table
    assert table.count("<img src='data:image/png;base64,") == 2
    strip = image_strip(SAMPLES[0].images)
    assert (strip.size, image_strip([])) == ((6 + 4 + 8, 8), None)
    assert (strip.getpixel((0, 0)), strip.getpixel((17, 7))) == ((255, 0, 0), (0, 0, 255))
    assert "\x1b" not in table


# TensorBoard


def read_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_gets_metrics_configuration_and_samples_as_plain_text(tmp_path):
    [logger] = opened(["console", "tensorboard"], logged_run(tmp_path))
    logger.log_metrics(1, {"reward/overall": 0.5, "actor/lr": 1e-6})
    logger.log_metrics(2, {"reward/overall": 0.75})
    logger.log_samples(2, "validation", SAMPLES)
    logger.close()
    events = read_tensorboard(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("reward/overall")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("actor/lr")[0].value == pytest.approx(1e-6)
    (config,) = events.Tensors("config/text_summary")
    assert "    trainer.max_steps: 3" in config.tensor_proto.string_val[0].decode().split("\n")
    (text,) = events.Tensors("samples/validation/text_summary")
    lines = text.tensor_proto.string_val[0].decode().split("\n")
    assert r"    response: ![pixel](http://evil/x.png)\x1b[2J" in lines
    assert all(line.startswith("    ") for line in lines)  # a Markdown code block, in which nothing is rendered
    assert "\x1b" not in "".join(lines)
    assert events.Tags()["images"] == ["samples/validation/val-3"]
    [image] = events.Images("samples/validation/val-3")
    with Image.open(io.BytesIO(image.encoded_image_string)) as strip:
        assert strip.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
        assert strip.size == (18, 8)


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "all"))
    folder = tmp_path / "all" / "easy_r1" / "demo"
    for first_step, steps in ((0, (1, 2, 3, 4)), (3, (3,))):
        [logger] = opened(["tensorboard"], logged_run(tmp_path, first_step=first_step))
        for step in steps:
            logger.log_metrics(step, {"reward": 10.0 * first_step + step})
        logger.close()
        for file in folder.iterdir():  # whole seconds, in whose order the files are read
            file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    events = read_tensorboard(folder).Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 33.0)]


# What lets a run continue its curves


def test_a_moved_run_folder_continues_its_curves_and_a_copy_beside_the_original_does_not(tmp_path):
    def resumed(name: str) -> LoggedRun:
        return logged_run(tmp_path / name, first_step=3)

    (tmp_path / "a").mkdir()
    resumed("a").write_record("wandb", {"run_id": "1"})
    assert resumed("a").read_record("wandb")["run_id"] == "1"
    assert logged_run(tmp_path / "a").read_record("wandb") == {}  # from the beginning
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert resumed("copy").read_record("wandb") == {}
    (tmp_path / "a").rename(tmp_path / "moved")
    assert resumed("moved").read_record("wandb")["run_id"] == "1"
    (tmp_path / "a").mkdir()
    resumed("a").write_record("wandb", {"run_id": "2"})  # a new run in its place
    assert resumed("moved").read_record("wandb")["run_id"] == "1"
