"""Learning curves: which runs are repetitions, the numbers of lines and bands, and the figure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from math import isnan, nan, sqrt
from pathlib import Path

import pytest

from trigon.errors import ConfigError, DataError
from trigon.report.run import RunRecord, open_run
from trigon.report.run_folder import RunFolder
from trigon.tools.cli.main import main
from trigon.tools.plot.curves import as_csv, group_runs, interval, learning_curves, moving_mean
from trigon.tools.plot.figure import Reference, describe, save_plot


def make_run(
    folder: Path,
    rewards: list[float],
    *,
    seed: int = 0,
    config: str = "",
    accuracies: dict[int, float] | None = None,
) -> RunRecord:
    """Write a run with these rewards from step 1 on, and accuracies of validations by step."""
    made = folder.parent / "made" / f"tiny_seed{seed}"
    with RunFolder(folder) as run:
        run.write_config(
            f"data: {{seed: {seed}, train_files: [{made}/train.parquet]}}\n"
            f"worker: {{rollout: {{seed: {seed}}}}}\n"
            f"trainer: {{save_checkpoint_path: {folder}, experiment_name: {folder.name}}}\n{config}"
        )
        accuracies = accuracies or {}
        for step in range(len(rewards) + 1):
            metrics = {"timing_s/step": 1800.0}
            if step:
                metrics |= {"reward/overall": rewards[step - 1], "perf/total_num_tokens": 100.0 * (seed + 1)}
            if step in accuracies:
                metrics["val/accuracy_reward"] = accuracies[step]
            run.append_metrics(step, metrics)
    return open_run(folder)


@pytest.fixture
def seeds(tmp_path):
    """Return three runs that differ in their seeds only."""
    values = {0: [1.0, 2.0, 3.0], 1: [3.0, 4.0, 5.0], 2: [2.0, 3.0, 7.0]}
    return [
        make_run(tmp_path / f"seed{seed}" / "run", rewards, seed=seed, accuracies={0: 0.25, 3: 0.5 + seed / 10})
        for seed, rewards in values.items()
    ]


def groups_of(runs, by):
    return [(group.label, len(group.runs)) for group in group_runs(runs, by)]


def test_runs_are_grouped_by_all_but_their_seeds_or_by_an_option(seeds, tmp_path):
    assert groups_of(seeds, "seed") == [("3 seeds", 3)]
    assert groups_of(seeds, "none") == [("seed 0", 1), ("seed 1", 1), ("seed 2", 1)]
    rloo = make_run(tmp_path / "rloo" / "run", [1.0], seed=4, config="algorithm: {adv_estimator: rloo}\n")
    # The default, which the first runs do not write, is the value of the option.
    assert groups_of([*seeds, rloo], "seed") == [("adv_estimator grpo", 3), ("adv_estimator rloo", 1)]
    a = make_run(tmp_path / "a" / "run", [1.0], config="algorithm: {adv_estimator: rloo}\ndata: {seed: 9}\n")
    b = make_run(tmp_path / "b" / "run", [1.0], config="algorithm: {adv_estimator: rloo, gamma: 0.9}\n")
    assert groups_of([*seeds, a, b], "adv_estimator") == [("adv_estimator grpo", 3), ("adv_estimator rloo", 2)]
    assert groups_of([a, b], "none") == [("a", 1), ("b", 1)]  # too many differences to name


def test_values_that_differ_beyond_what_a_label_shows_are_different_groups(tmp_path):
    runs = [make_run(tmp_path / name, [1.0]) for name in "ab"]
    for run in runs:
        files = f"[/data/projects/geometry3k/processed/train_{run.path.name}.parquet]"
        (run.path / "config.yaml").write_text(f"data: {{train_files: {files}}}\n")
    groups = group_runs(runs, "train_files")
    assert [len(group.runs) for group in groups] == [1, 1]
    assert all(f"train_{name}.parquet" in group.label for name, group in zip("ab", groups, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group_by": "adv_estimatr"}, ConfigError, r"did you mean algorithm\.adv_estimator\?"),
        (
            {"group_by": "torch_dtype"},
            ConfigError,
            r"worker\.actor\.fsdp\.torch_dtype or .*; give the whole name",
        ),
        ({"metrics": ["reward/overal"]}, DataError, r"metric 'reward/overal'; did you mean reward/overall\?"),
        ({"metrics": ["zzz"]}, DataError, "no run has the metric 'zzz'; docs/metrics.md"),
    ],
)
def test_an_unknown_metric_or_way_to_group_is_an_error(seeds, options, error, message):
    with pytest.raises(error, match=message):
        learning_curves(seeds, **options)


def test_a_seed_within_a_larger_number_is_not_replaced(tmp_path):
    runs = [
        make_run(tmp_path / "a", [1.0], seed=1, config="worker.actor.model: {model_path: m_seed12}\n"),
        make_run(tmp_path / "b", [1.0], seed=2, config="worker.actor.model: {model_path: m_seed12}\n"),
        make_run(tmp_path / "c", [1.0], seed=3, config="worker.actor.model: {model_path: m_seed13}\n"),
    ]
    assert [len(group.runs) for group in group_runs(runs, "seed")] == [2, 1]


def test_mean_and_bands_by_hand(seeds):
    [curve] = learning_curves(seeds, metrics=["reward/overall"], band="std").curves
    assert (curve.label, curve.num_runs, curve.x) == ("3 seeds", 3, (1.0, 2.0, 3.0))
    assert curve.mean == (2.0, 3.0, 5.0)
    # Of 1, 3, 2 and of 2, 4, 3 the deviation is 1; of 3, 5, 7 it is 2.
    assert curve.low == pytest.approx((1.0, 2.0, 3.0))
    assert curve.high == pytest.approx((3.0, 4.0, 7.0))
    [curve] = learning_curves(seeds, metrics=["reward/overall"], band="minmax").curves
    assert (curve.low, curve.high) == ((1.0, 2.0, 3.0), (3.0, 4.0, 7.0))
    [curve] = learning_curves(seeds, metrics=["reward/overall"], band="ci95").curves
    assert curve.high[0] == pytest.approx(2.0 + 4.3027 / sqrt(3), abs=1e-4)


def test_the_default_metrics_are_accuracy_of_validations_and_reward(seeds, tmp_path):
    assert learning_curves(seeds).metrics == ("val/accuracy_reward", "reward/overall")
    without = make_run(tmp_path / "without", [1.0])
    assert learning_curves([without]).metrics == ("reward/overall",)


def test_tokens_and_hours_are_sums_and_their_mean_over_the_runs(seeds):
    [curve] = learning_curves(seeds, metrics=["reward/overall"], x="tokens").curves
    assert curve.x == (200.0, 400.0, 600.0)  # runs with 100, 200 and 300 a step
    [curve] = learning_curves(seeds[:1], metrics=["reward/overall"], x="hours").curves
    assert curve.x == (1.0, 1.5, 2.0)  # the first line, of step 0, counts


def test_a_validation_added_later_is_at_its_step_and_takes_no_time_of_the_training(seeds):
    before = learning_curves(seeds, x="hours")
    for run in seeds:
        config = (run.path / "config.yaml").read_text()
        with RunFolder(run.path) as folder:
            folder.append_metrics(2, {"timing_s/step": 7200.0, "val/accuracy_reward": 0.375})
            if run is seeds[0]:  # the others were validated on another machine
                folder.write_config(config.replace("trainer: {", "trainer: {val_only: true, "))
    validation, training = learning_curves(seeds, x="hours").curves
    assert training == before.curves[1]
    assert (validation.x, validation.mean) == ((0.5, 1.5, 2.0), (0.25, 0.375, pytest.approx(0.6)))


def test_smoothing_is_a_centred_mean_of_training_metrics_only(seeds):
    assert moving_mean([1.0, 2.0, 6.0, 3.0], 3) == [1.5, 3.0, pytest.approx(11 / 3), 4.5]
    assert moving_mean([1.0, nan, 3.0], 1)[0::2] == [1.0, 3.0]
    assert isnan(moving_mean([1.0, nan, 3.0], 1)[1])
    validation, training = learning_curves(seeds[:1], smooth=3).curves
    assert validation.mean == (0.25, 0.5)
    assert training.mean == (1.5, 2.0, 2.5)


def test_a_shorter_run_ends_the_line_and_is_named(seeds, tmp_path):
    short = make_run(tmp_path / "seed3" / "run", [1.0, 1.0], seed=3)
    curves = learning_curves([*seeds, short], metrics=["reward/overall"])
    assert curves.curves[0].x == (1.0, 2.0)
    assert curves.notes == ("4 seeds: to step 2 of 3, where the shortest run ends",)
    assert curves.notes[0] in describe(curves)


def test_a_run_that_is_given_twice_is_not_two_seeds(seeds, tmp_path):
    (tmp_path / "link").symlink_to(seeds[0].path)
    again = [open_run(tmp_path / "seed0"), open_run(tmp_path / "link")]
    curves = learning_curves([seeds[0], *again, seeds[0]], metrics=["reward/overall"])
    [curve] = curves.curves
    assert (curve.num_runs, curve.label, curve.low) == (1, "seed0/run", curve.mean)
    assert curves.notes == ("seed0/run was given more than once, and counts once",)
    both = learning_curves([*seeds[:2], *again], metrics=["reward/overall"])
    assert both.curves == learning_curves(seeds[:2], metrics=["reward/overall"]).curves


def test_a_number_that_is_not_finite_is_a_gap(seeds, tmp_path):
    odd = make_run(tmp_path / "seed3" / "run", [1.0, nan, 1.0], seed=3)
    curves = learning_curves([*seeds, odd], metrics=["reward/overall"])
    [curve] = curves.curves
    assert isnan(curve.mean[1])
    assert isnan(curve.low[1])
    assert as_csv(curves).splitlines()[2] == "reward/overall,4 seeds,4,2.0,,,"
    save_plot(curves, tmp_path / "gap.png")


def test_the_numbers_are_written_as_csv(seeds):
    header, first, *_ = as_csv(learning_curves(seeds, band="minmax")).splitlines()
    assert header == "metric,group,runs,step,mean,low,high"
    assert first == "val/accuracy_reward,3 seeds,3,0.0,0.25,0.25,0.25"


def test_the_interval_of_one_run_is_its_value():
    assert interval([5.0], "ci95") == (5.0, 5.0)


def test_a_run_without_steps_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="has no metrics yet"):
        learning_curves([open_run(tmp_path)])


@pytest.mark.extended
@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_same_runs_give_an_identical_file_without_bitmaps(seeds, tmp_path, ending, start):
    files = [tmp_path / f"{name}.{ending}" for name in ("one", "two")]
    for file in files:
        save_plot(learning_curves(seeds), file, title="a title", references=[Reference(0.2, "chance")])
    content = files[0].read_bytes()
    assert content == files[1].read_bytes()
    assert content.startswith(start)
    assert not any(bitmap in content for bitmap in (b"<image", b"/Type3"))


def test_the_caption_says_what_lines_and_bands_are(seeds):
    text = describe(learning_curves(seeds, smooth=2, band="ci95"))
    assert text == (
        "Line: mean of 3 runs. Band: 95 % confidence interval of the mean. Training metrics: moving mean of 2 steps."
    )
    assert describe(learning_curves(seeds[:1])) == ""


def test_many_groups_have_distinct_lines(tmp_path):
    runs = [
        make_run(tmp_path / f"run{n}", [float(n), 2.0], config=f"data.max_pixels: {300000 + n}\n") for n in range(9)
    ]
    curves = learning_curves(runs)
    assert [curve.label for curve in curves.curves][:2] == ["max_pixels 300000", "max_pixels 300001"]
    save_plot(curves, tmp_path / "many.svg")
    text = (tmp_path / "many.svg").read_text()
    lines = re.findall(r'<path [^>]*style="fill: none; (stroke[^"]*stroke-width: 1.6[^"]*)"', text)
    assert Counter(lines) == dict.fromkeys(lines, 2)  # in the panel and in the legend
    assert len(set(lines)) == 9


def test_dollar_signs_in_names_are_no_formulas(tmp_path):
    runs = [make_run(tmp_path / name, [1.0]) for name in ("$x_$ a", "$y^$ b")]
    save_plot(learning_curves(runs, group_by="none"), tmp_path / "a.svg", title="costs $1_$")
    assert (tmp_path / "a.svg").is_file()


def test_the_command_writes_figures_and_numbers(seeds, tmp_path, capsys):
    outputs = [tmp_path / "out" / name for name in ("curves.svg", "curves.csv")]
    arguments = [str(run.path) for run in seeds] + [word for path in outputs for word in ("-o", str(path))]
    assert main(["plot", *arguments, "--band", "minmax", "--reference", "0.25:chance"]) == 0
    out = capsys.readouterr().out
    assert "3 seeds: reward/overall 2 -> 5 (3 to 7) of 3 runs" in out
    assert all(path.stat().st_size > 100 for path in outputs)


def test_without_matplotlib_the_error_names_the_extra_and_numbers_are_still_written(seeds, tmp_path):
    script = "import sys; sys.modules['matplotlib'] = None; from trigon.tools.cli.main import main; sys.exit(main())"

    def plot(output: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, "plot", str(seeds[0].path), "-o", str(tmp_path / output)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    failed = plot("a.png")
    assert failed.returncode == 2
    assert re.search(r"^ConfigError: figures need the package matplotlib.*; run pip install .*\[plot\]", failed.stderr)
    assert plot("a.csv").returncode == 0
