"""A finished run predicts the time of another configuration on the same machine.

The timings were recorded with the commands of docs/plan.md: two cores, vLLM, the tiny model. They
are the first step and the three fastest ones, since the machine had other work to do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError, DataError
from trigon.report.metrics import StepMetrics
from trigon.tools.plan.calibration import calibrate, observe
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.plan import plan
from trigon.tools.plan.timing import PHASES

RECORDED = json.loads((Path(__file__).parent / "data" / "plan_timings.json").read_text(encoding="utf-8"))


def write_run(folder, name, model):
    """Write the folder of a recorded run: its options, and the timings of its steps."""
    recorded = RECORDED[name]
    path = folder / name
    path.mkdir()
    config = json.loads(json.dumps(recorded["config"]))
    config["worker"]["actor"]["model"]["model_path"] = str(model)
    (path / "config.yaml").write_text(json.dumps(config))
    lines = [json.dumps({"step": step, "metrics": metrics}) for step, metrics in enumerate(recorded["steps"], start=1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def seconds_of(name):
    return observe(
        [StepMetrics(step, metrics) for step, metrics in enumerate(RECORDED[name]["steps"], start=1)],
        name,
        groups_per_step=1,
    ).seconds


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("runs")
    return {name: write_run(folder, name, tiny_model("qwen2_5_vl")) for name in RECORDED}


def predicted(runs, name, calibrated_by):
    import yaml

    config = Config.model_validate(yaml.safe_load((runs[name] / "config.yaml").read_text()))
    lengths = LengthOptions(prompt_tokens=39, image_tokens=16)
    return plan(config, calibrate_with=runs[calibrated_by], lengths=lengths).time


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "base"])
def test_the_step_of_another_configuration_is_predicted_within_thirty_percent(runs, name):
    time, measured = predicted(runs, name, "base"), seconds_of(name)
    assert time.calibrated
    assert time.total == pytest.approx(sum(measured.values()), rel=0.3)
    assert time.phases["gen"] == pytest.approx(measured["gen"], rel=0.3)


def test_a_run_predicts_itself(runs):
    time, measured = predicted(runs, "base", "base"), seconds_of("base")
    for phase in PHASES:
        assert time.phases[phase] == pytest.approx(measured[phase], rel=0.01), phase


def test_a_run_with_less_room_for_observations_than_the_plan_calibrates_it(runs, tmp_path):
    import yaml

    shutil.copytree(runs["base"], tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["worker"]["rollout"].update(environment="games.mazes:Maze", ignore_eos=False)
    file.write_text(yaml.safe_dump(config))
    most = Config.model_validate(config).data.max_response_length
    longer = with_options(Config.model_validate(config), {"data.max_response_length": 4 * most})
    lengths = LengthOptions(prompt_tokens=39, image_tokens=16, observed_tokens=2 * most)
    made = plan(longer, calibrate_with=tmp_path / "run", lengths=lengths)
    assert made.time.calibrated
    assert made.lengths.observed_tokens == 2 * most


def test_the_first_step_is_not_used_and_the_others_by_their_median():
    def step(number, seconds):
        return StepMetrics(number, {"timing_s/update_actor": seconds, "actor/skipped_groups": 2.0})

    observed = observe([step(1, 100.0), step(2, 1.0), step(3, 3.0), step(4, 50.0)], "run", groups_per_step=8)
    assert observed.seconds["update_actor"] == 3.0
    assert observed.learned_share == 0.75
    with pytest.raises(DataError, match="1 training steps"):
        observe([StepMetrics(0, {"timing_s/validation": 9.0}), step(1, 2.0)], "run", groups_per_step=8)


def test_factors_by_hand():
    steps = [
        StepMetrics(number, {"timing_s/update_actor": 6.0, "timing_s/gen": 1.0, "timing_s/reward": 0.5})
        for number in (1, 2)
    ]
    observed = observe(steps, "run", groups_per_step=1)
    seconds = dict.fromkeys(PHASES, 0.0) | {"update_actor": 2.0, "gen": 4.0}
    calibration = calibrate(observed, seconds, completions=10, source="run")
    other = dict.fromkeys(PHASES, 0.0) | {"update_actor": 5.0, "gen": 8.0, "old": 1.5}
    changed = calibration.apply(other, completions=30)
    assert changed["update_actor"] == 15.0
    assert changed["gen"] == 2.0
    assert changed["old"] == 4.5  # as the update, which the run that calibrates has
    assert changed["reward"] == 1.5  # per completion


def test_a_run_with_separate_pools_calibrates_nothing(runs, tmp_path):
    import yaml

    shutil.copytree(runs["base"], tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    shared = yaml.safe_load(file.read_text())
    separate = {**shared, "worker": {**shared["worker"], "hybrid_engine": False}}
    file.write_text(yaml.safe_dump(separate))
    lengths = LengthOptions(prompt_tokens=39, image_tokens=16)
    with pytest.raises(ConfigError, match=r"separate workers .*calibrate with a run of shared workers"):
        plan(Config.model_validate(shared), calibrate_with=tmp_path / "run", lengths=lengths)
    # A run of shared workers calibrates both, except for the weight sync.
    made = plan(Config.model_validate(separate), calibrate_with=runs["base"], lengths=lengths)
    plain = plan(Config.model_validate(separate), lengths=lengths)
    assert made.time.calibrated
    assert made.time.phases["weights"] == plain.time.phases["weights"]
    assert made.time.phases["gen"] != plain.time.phases["gen"]
