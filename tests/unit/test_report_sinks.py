"""The trackers: which are known, and what TensorBoard gets."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trigon.errors import ConfigError
from trigon.installation import install_command
from trigon.report.run_folder import RolloutRow
from trigon.report.sinks import TrackerSettings, check_sinks, open_sinks


def settings(folder, **changes):
    values = {
        "project": "easy_r1",
        "experiment": "demo",
        "config": {"data": {"train_files": "a.parquet"}, "trainer": {"max_steps": 3}},
        "folder": folder,
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
    sink.rollouts(2, [ROW])
    sink.close()
    events = read_tensorboard(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("reward/overall")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("actor/lr")[0].value == pytest.approx(1e-6)
    (text,) = events.Tensors("val/generations/text_summary")
    lines = text.tensor_proto.string_val[0].decode().split("\n")
    assert r"    completion: ![pixel](http://evil/x.png)\x1b[2J" in lines
    assert all(line.startswith("    ") for line in lines)  # a Markdown code block, in which nothing is rendered
    assert "\x1b" not in "".join(lines)


def test_tensorboard_writes_into_the_configured_folder(tmp_path):
    (sink,) = open_sinks(["tensorboard"], settings(tmp_path, tensorboard_dir=tmp_path / "elsewhere"))
    sink.close()
    assert list((tmp_path / "elsewhere").iterdir())


def test_trackers_are_not_imported_unless_chosen():
    script = """
import sys
import trigon.report.reporter
trigon.report.sinks.check_sinks(["console", "file", "tensorboard"])
assert not {"wandb", "swanlab", "mlflow", "tensorboard", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
