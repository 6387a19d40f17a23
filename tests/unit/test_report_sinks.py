"""The trackers: which are known, and what TensorBoard gets."""

import io
import re
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from trigon.errors import ConfigError
from trigon.installation import install_command
from trigon.records.rollouts import RolloutRow
from trigon.report.sinks import TrackerSettings, check_sinks, open_sinks


def settings(folder, **changes):
    values = {
        "project": "easy_r1",
        "experiment": "demo",
        "config": {"data": {"train_files": "a.parquet"}, "trainer": {"max_steps": 3}},
        "folder": folder,
        "first_step": 0,
        "tensorboard_dir": None,
        "swanlab_dir": None,
        "swanlab_mode": None,
        "swanlab_api_key": None,
    }
    return TrackerSettings(**(values | changes))


ROW = RolloutRow(
    prompt_id="val:3",
    sample=0,
    prompt="<image> How many?",
    response="![pixel](http://evil/x.png)\x1b[2J\n4",
    reward=1.0,
    parts={"accuracy": 1.0},
    outcome="ok",
    error="",
    finish_reason="stop",
    num_tokens=3,
    policy_version=7,
    images=(),
    ground_truth=4,
    ground_truth_type="int",
    row={},
    filtered="",
)


def test_console_and_file_are_not_trackers(tmp_path):
    assert open_sinks(["console", "file"], settings(tmp_path)) == []


def test_the_error_of_an_unknown_tracker_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"names 'wandbb'; it takes console, file, mlflow, swanlab, tensorboard, wandb"
    ):
        check_sinks(["console", "wandbb"])


@pytest.mark.parametrize("name", [name for name in ("mlflow", "swanlab", "wandb") if find_spec(name) is None])
def test_the_error_of_a_tracker_that_is_not_installed_names_the_extra(name):
    with pytest.raises(ConfigError, match=re.escape(install_command(name))):
        check_sinks(["console", name])


def test_a_tracker_that_fails_to_open_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"trainer\.logger names tensorboard, which failed to open: "):
        open_sinks(["tensorboard"], settings(tmp_path, tensorboard_dir=tmp_path / "file"))


def read_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_gets_metrics_and_completions_as_plain_text(tmp_path):
    (sink,) = open_sinks(["console", "tensorboard"], settings(tmp_path))
    sink.log(1, {"reward/overall": 0.5, "actor/lr": 1e-6})
    sink.log(2, {"reward/overall": 0.75})
    sink.rollouts(2, [ROW], {"val:3": [Image.new("RGB", (6, 4), "red"), Image.new("RGB", (8, 8), "blue")]})
    sink.close()
    events = read_tensorboard(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("reward/overall")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("actor/lr")[0].value == pytest.approx(1e-6)
    (text,) = events.Tensors("val/generations/text_summary")
    lines = text.tensor_proto.string_val[0].decode().split("\n")
    assert r"    completion: ![pixel](http://evil/x.png)\x1b[2J" in lines
    assert all(line.startswith("    ") for line in lines)  # a Markdown code block, in which nothing is rendered
    assert "\x1b" not in "".join(lines)
    shown = {tag: events.Images(tag) for tag in events.Tags()["images"]}
    assert {tag: [(image.step, image.width, image.height) for image in images] for tag, images in shown.items()} == {
        "val/images/val-3-0": [(2, 6, 4)],
        "val/images/val-3-1": [(2, 8, 8)],
    }
    with Image.open(io.BytesIO(shown["val/images/val-3-0"][0].encoded_image_string)) as red:
        assert red.convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_tensorboard_writes_into_the_configured_folder(tmp_path):
    (sink,) = open_sinks(["tensorboard"], settings(tmp_path, tensorboard_dir=tmp_path / "elsewhere"))
    sink.close()
    assert list((tmp_path / "elsewhere").rglob("events.*"))


def test_two_experiments_have_their_own_folders_in_the_configured_one(tmp_path):
    for name, reward in (("a", 0.25), ("b", 0.75)):
        (sink,) = open_sinks(["tensorboard"], settings(tmp_path, tensorboard_dir=tmp_path / "all", experiment=name))
        sink.log(1, {"reward": reward})
        sink.close()
    read = {name: read_tensorboard(tmp_path / "all" / "easy_r1" / name).Scalars("reward") for name in "ab"}
    assert {name: [event.value for event in events] for name, events in read.items()} == {"a": [0.25], "b": [0.75]}


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    for first_step, steps in ((0, (1, 2, 3, 4)), (3, (3,))):
        (sink,) = open_sinks(["tensorboard"], settings(tmp_path, first_step=first_step))
        for step in steps:
            sink.log(step, {"reward": 10.0 * first_step + step})
        sink.close()
        time.sleep(1.1)  # the names of event files have whole seconds, and are read in their order
    events = read_tensorboard(tmp_path / "tensorboard").Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 33.0)]


class Mlflow(ModuleType):
    """Stands in for the mlflow library, which is not a dependency of the tests."""

    def __init__(self, uri="http://user:password@server"):
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)
        self.uri, self.runs, self.params, self.artifacts, self.active = uri, [], [], [], None

    def get_tracking_uri(self):
        return self.uri

    def set_experiment(self, name):
        pass

    def start_run(self, *, run_name=None, run_id=None):
        if run_id is None:
            run_id = f"run {len(self.runs)}"
            self.runs.append(run_id)
        assert run_id in self.runs
        self.active = run_id
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        self.params.append(self.active)

    def log_text(self, text, artifact_file):
        self.artifacts.append(artifact_file)

    def log_image(self, image, artifact_file):
        assert isinstance(image, Image.Image)
        self.artifacts.append(artifact_file)

    def end_run(self):
        self.active = None


def test_mlflow_gets_the_images_beside_the_completions(tmp_path, monkeypatch):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    (sink,) = open_sinks(["mlflow"], settings(tmp_path))
    sink.rollouts(2, [ROW], {"val:3": [Image.new("RGB", (6, 4))]})
    assert mlflow.artifacts == ["val_generations/step_000002.txt", "val_generations/step_000002/val-3-0.png"]


@pytest.mark.parametrize(
    ("first_step", "uri", "active"),
    [
        (3, "http://user:password@server", "run 0"),
        (0, "http://user:password@server", "run 1"),
        (3, "http://another", "run 1"),
    ],
    ids=["resumed", "from the beginning", "on another server"],
)
def test_a_resumed_run_continues_its_mlflow_run(tmp_path, monkeypatch, first_step, uri, active):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    (sink,) = open_sinks(["mlflow"], settings(tmp_path))
    sink.close()
    assert "password" not in (tmp_path / "mlflow.json").read_text()
    mlflow.uri = uri
    (sink,) = open_sinks(["mlflow"], settings(tmp_path, first_step=first_step))
    assert mlflow.active == active
    assert mlflow.params == mlflow.runs  # once for each run
    sink.close()


def test_trackers_are_not_imported_unless_chosen():
    script = """
import sys
import trigon.report.reporter
trigon.report.sinks.check_sinks(["console", "file", "tensorboard"])
assert not {"wandb", "swanlab", "mlflow", "tensorboard", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
