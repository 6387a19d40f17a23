"""The parts of a run that need no model: tracker settings and the evaluator."""

from pathlib import Path

from trigon.build.data import open_evaluator
from trigon.build.run import TrackerEnvironment, make_tracker_settings
from trigon.config.schema import Config


def test_trackers_get_the_resolved_configuration():
    environment = TrackerEnvironment(Path("/tb"), None, "offline", "secret")
    config = Config(trainer={"project_name": "p", "experiment_name": "e"})
    settings = make_tracker_settings(config, environment, Path("/runs/x"))
    assert (settings.project, settings.experiment, settings.folder) == ("p", "e", Path("/runs/x"))
    assert settings.config == config.model_dump()
    assert (settings.tensorboard_dir, settings.swanlab_mode) == (Path("/tb"), "offline")


def test_without_validation_prompts_there_is_no_evaluator():
    assert open_evaluator(Config(trainer={"val_freq": 5}), None, None) is None
