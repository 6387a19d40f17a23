"""The loggers: which are known, how calls reach them, and what TensorBoard gets."""

from __future__ import annotations

import contextvars
import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from support.samples import ROW, SAMPLES, logged_run
from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import LoadedConfig
from trigon.config.schema import Config
from trigon.errors import BadRow, ConfigError
from trigon.report.delivery import (
    Deliveries,
    LoggerEnvironment,
    check_logger_objects,
    check_loggers,
    make_loggers,
    open_loggers,
)
from trigon.report.loggers.trackio import TrackioLogger
from trigon.report.loggers.wandb import WandbLogger
from trigon.report.samples import as_html, image_strip, make_samples
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


def opened(names, run, environment=LoggerEnvironment()):  # noqa: B008
    loggers = make_loggers(names, environment)
    open_loggers(loggers, run)
    return loggers


# Which are known


def test_loggers_are_checked_by_name():
    assert make_loggers(["console", "file"], LoggerEnvironment()) == []
    with pytest.raises(ConfigError, match=r"'wandbb'; it takes console, file, mlflow, swanlab, tensorboard, trackio"):
        check_loggers(["console", "wandbb"])
    for name in ("mlflow", "swanlab", "trackio", "wandb"):
        if find_spec(name) is None:
            with pytest.raises(ConfigError, match=re.escape(install_command(name))):
                check_loggers(["console", name])


def test_a_logger_that_fails_to_open_is_a_config_error_and_the_others_are_closed(tmp_path):
    (tmp_path / "file").write_text("a file, not a folder")
    [tensorboard] = make_loggers(["tensorboard"], LoggerEnvironment(tensorboard_dir=tmp_path / "file"))
    first = Recorder()
    with pytest.raises(ConfigError, match=r"names tensorboard, which failed to open: .*TENSORBOARD_DIR"):
        open_loggers([first, tensorboard], logged_run(tmp_path))
    assert first.calls == [("close",)]


def test_libraries_are_not_imported_unless_chosen():
    script = """
import sys
import trigon.report.reporter
from trigon.report.delivery import check_loggers
check_loggers(["console", "file", "tensorboard"])
assert not {"wandb", "swanlab", "mlflow", "trackio", "tensorboard", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class MetricsOnly:
    """Not a logger: it has no log_samples, and what it has for metrics cannot be called."""

    log_metrics = "metrics.txt"


@pytest.mark.parametrize(
    ("methods", "missing"),
    [((), "without log_metrics and log_samples"), (("log_metrics",), "without log_samples")],
)
def test_an_object_that_cannot_be_a_logger_is_a_config_error(methods, missing):
    logger = MetricsOnly()
    for name in methods:
        setattr(logger, name, print)
    with pytest.raises(ConfigError, match=f"MetricsOnly {missing}"):
        check_logger_objects([Recorder(), logger])
    with pytest.raises(ConfigError, match="the class TwoMethods instead of an object"):
        check_logger_objects([TwoMethods])


def test_objects_that_are_no_loggers_are_refused_before_a_run_starts(tmp_path):
    config = Config(trainer={"save_checkpoint_path": str(tmp_path / "run")})
    loaded = LoadedConfig(config, (), {})
    with pytest.raises(ConfigError, match=r"the class TwoMethods instead of an object"):
        start_run(loaded, stop=StopSignals(), loggers=[TwoMethods])
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
def test_a_logger_that_blocks_stops_neither_a_step_nor_the_end_of_the_run():
    warned, release = [], threading.Event()
    slow = Recorder(wait=release)
    deliveries = Deliveries([slow], warn=warned.append)
    start = time.monotonic()
    for step in range(50):
        deliveries.metrics(step, {})
    deliveries.close(seconds=0.2)
    assert time.monotonic() - start < 5
    assert len(warned) == 1
    assert "has not finished 0.2 s after the end of the run" in warned[0]
    release.set()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_pending": 3}, "is 3 reports behind"), ({"call_seconds": 0.05}, "has not returned from a call for 0.05 s")],
)
def test_a_logger_that_is_too_slow_is_given_up(limits, reason):
    warned, release = [], threading.Event()
    deliveries = Deliveries([Recorder(wait=release)], warn=warned.append, **limits)
    for step in range(10):
        deliveries.metrics(step, {})
        time.sleep(0.03)
    [warning] = warned
    assert reason in warning
    release.set()
    deliveries.close()


# Samples


def png(size):
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, "PNG")
    return stream.getvalue()


def test_samples_have_the_images_of_their_prompts_reduced_or_none():
    rows = [ROW, replace(ROW, sample=1), replace(ROW, prompt_id="val:4", images=()), replace(ROW, prompt_id="val:5")]
    read, warned = [], []

    def read_images(prompt_id):
        read.append(prompt_id)
        if prompt_id == "val:5":
            raise BadRow("the file is gone")
        return [png((2048, 1024)), png((10, 10))]

    samples = make_samples(rows, read_images, warn=warned.append)
    assert [[image.size for image in sample.images] for sample in samples] == [[(512, 256), (10, 10)]] * 2 + [[], []]
    assert read == ["val:3", "val:5"]
    assert warned == ["the loggers do not get the images of val:5: the file is gone"]


def test_several_images_become_one_side_by_side():
    assert image_strip([]) is None
    strip = image_strip(SAMPLES[0].images)
    assert strip.size == (6 + 4 + 8, 8)
    assert (strip.getpixel((0, 0)), strip.getpixel((17, 7))) == ((255, 0, 0), (0, 0, 255))


def test_html_escapes_what_models_write():
    table = as_html(SAMPLES)
    assert "<script>" not in table
    assert "&lt;script&gt;alert(1)" in table
    assert table.count("<img src='data:image/png;base64,") == 2
    assert "\x1b" not in table


# Which run of a library a run continues. tests/loggers has these with the libraries.


class FakeTrackio:
    """trackio's rule for runs: "allow" continues the latest of that name in the project."""

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []
        self.current = contextvars.ContextVar("current", default=None)

    def init(self, *, project, name, config, resume, embed):
        print("* Created or resumed")
        found = [run for run in self.runs if (run.project, run.name) == (project, name)]
        if resume == "never" or not found:
            found = [SimpleNamespace(project=project, name=name, steps=[], finish=self.finish)]
            found[0].log = lambda metrics, step, steps=found[0].steps: steps.append(step)
            self.runs.append(found[0])
        self.current.set(found[-1])
        return found[-1]

    def finish(self):
        print("* Run finished")


def log_steps(logger, run, steps):
    logger.open(run)
    for step in steps:
        logger.log_metrics(step, {"reward": 1.0})
    logger.close()


def test_trackio_continues_the_run_of_the_same_folder_only(tmp_path, monkeypatch, capsys):
    library = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", library)
    for folder, first_step, steps in (("a", 0, (1, 2)), ("b", 0, (1,)), ("a", 3, (3,)), ("a", 0, (0,)), ("a", 1, (1,))):
        log_steps(TrackioLogger(LoggerEnvironment()), logged_run(tmp_path / folder, first_step=first_step), steps)
    names = [f"demo-{hashlib.sha256(str((tmp_path / each).resolve()).encode()).hexdigest()[:6]}" for each in "ab"]
    assert [(run.name, run.steps) for run in library.runs] == [
        (names[0], [1, 2, 3]),
        (names[1], [1]),
        (names[0], [0, 1]),
    ]
    assert capsys.readouterr().out == ""
    assert library.current.get() is None  # nothing is left for trackio to finish at exit


def test_wandb_continues_the_run_in_its_folder_unless_it_begins_anew(tmp_path, monkeypatch):
    ids = []

    def init(*, id, **settings):
        ids.append(id)
        return SimpleNamespace(settings=SimpleNamespace(mode="online"), url="", log=print, finish=print)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    for first_step in (3, None, 0, 3, None, 0, 2):
        log_steps(WandbLogger(LoggerEnvironment()), logged_run(tmp_path, first_step=first_step), ())
    of_earlier_versions = hashlib.sha256(str(tmp_path.resolve()).encode()).hexdigest()[:16]
    first, second = ids[2], ids[5]
    assert ids == [of_earlier_versions] * 2 + [first] * 3 + [second] * 2
    assert len({of_earlier_versions, first, second}) == 3
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"run_id": second}


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


def test_two_experiments_have_their_own_folders_in_the_configured_one(tmp_path):
    environment = LoggerEnvironment(tensorboard_dir=tmp_path / "all")
    for name, reward in (("a", 0.25), ("b", 0.75)):
        [logger] = opened(["tensorboard"], logged_run(tmp_path, experiment=name), environment)
        logger.log_metrics(1, {"reward": reward})
        logger.close()
    read = {name: read_tensorboard(tmp_path / "all" / "easy_r1" / name).Scalars("reward") for name in "ab"}
    assert {name: [event.value for event in events] for name, events in read.items()} == {"a": [0.25], "b": [0.75]}


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    for first_step, steps in ((0, (1, 2, 3, 4)), (3, (3,))):
        [logger] = opened(["tensorboard"], logged_run(tmp_path, first_step=first_step))
        for step in steps:
            logger.log_metrics(step, {"reward": 10.0 * first_step + step})
        logger.close()
        time.sleep(1.1)  # the names of event files have whole seconds, and are read in their order
    events = read_tensorboard(tmp_path / "tensorboard").Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 33.0)]
