"""The parts of a run that need no model: tracker settings and the evaluator."""

from pathlib import Path

import pytest

from trigon.build.data import open_evaluator
from trigon.build.run import TrackerEnvironment, make_tracker_settings
from trigon.checkpoint.store import Checkpoint
from trigon.config.schema import Config


def test_trackers_get_the_resolved_configuration():
    environment = TrackerEnvironment(Path("/tb"), None, "offline", "secret")
    config = Config(trainer={"project_name": "p", "experiment_name": "e"})
    settings = make_tracker_settings(config, environment, Path("/runs/x"), None)
    assert (settings.project, settings.experiment, settings.folder) == ("p", "e", Path("/runs/x"))
    assert settings.config == config.model_dump()
    assert (settings.tensorboard_dir, settings.swanlab_mode) == (Path("/tb"), "offline")


@pytest.mark.parametrize(("val_only", "resumed", "first_step"), [(False, 8, 9), (False, None, 0), (True, 8, None)])
def test_trackers_are_told_from_which_step_a_run_reports(val_only, resumed, first_step):
    environment = TrackerEnvironment(None, None, None, None)
    checkpoint = None if resumed is None else Checkpoint(resumed, Path(f"/runs/x/global_step_{resumed}"), {}, None)
    config = Config(trainer={"val_only": val_only})
    assert make_tracker_settings(config, environment, Path("/runs/x"), checkpoint).first_step == first_step


def test_without_validation_prompts_there_is_no_evaluator():
    assert open_evaluator(Config(trainer={"val_freq": 5}), None, None) is None
