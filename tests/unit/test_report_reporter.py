"""The reporter: timings, throughput, loggers, validation and the summary."""

import contextlib
import io
import json
import math

import pytest
from PIL import Image

from trigon.metrics import Max, Mean, Sum
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.system.hangs import HangWatch
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class MemoryLogger:
    """A logger that stores its calls."""

    name = "memory"

    def __init__(self):
        self.logged, self.shown, self.sizes = [], [], []

    def log_metrics(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def log_samples(self, step, split, samples):
        self.shown.append((step, split, [sample.row.prompt_id for sample in samples]))
        self.sizes.append([[image.size for image in sample.images] for sample in samples])

    def close(self):
        pass


def group(prompt_id):
    prompt = Prompt(prompt_id, (1,), None, "<image> How many?", "4", {}, ("a.png",))
    completion = Completion((5, 6), (-0.5, -0.25), "stop", "\\boxed{4}", 0)
    score = Score(1.0, {"overall": 1.0, "accuracy": 1.0}, "ok", "")
    return RolloutGroup(prompt, (Rollout(completion, score),) * 2)


def read_images(prompt_id):
    stream = io.BytesIO()
    Image.new("RGB", (1024, 256)).save(stream, "PNG")
    return [stream.getvalue()]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        yield folder


def reporter(folder, stream, clock, *loggers, **options):
    return Reporter(folder, Console(stream=stream, clock=clock), loggers, clock=clock, **options)


def test_mfu_is_the_work_of_the_updates_over_the_peak_of_all_devices(folder, stream, clock):
    """300 TFLOP in 2 s on two devices with 100 TFLOP/s each: an MFU of 0.75."""
    report = reporter(folder, stream, clock, num_devices=2)
    work, peak = {"actor/model_tflops": Sum(300.0)}, {"perf/peak_tflops": Max(100.0)}
    for step, metrics in enumerate((work | peak, work, peak, {}), start=1):
        with report.phase("update_actor"):
            clock.now += 2.0
        clock.now += 1.0
        report.step(step, 5, metrics)
    report.step(5, 5, work | peak)  # a step without an update
    lines = [line.metrics.get("perf/mfu_actor") for line in folder.read_metrics()]
    assert lines == [0.75, None, None, None, None]


def test_a_step_is_reported_to_folder_console_and_loggers_with_its_timings(folder, stream, clock):
    logger = MemoryLogger()
    report = reporter(folder, stream, clock, logger, num_devices=2)
    with report.phase("gen", total=8) as advance:
        advance(8)
        clock.now += 3.0
    for seconds in (0.5, 0.25):
        with report.phase("update_actor"):
            clock.now += seconds
    with report.phase("validation"):
        clock.now += 10.0
    clock.now += 0.25
    metrics = {"reward/overall": Mean(3.0, 4.0), "actor/grad_norm": Mean(0.0, 0.0)}
    report.step(1, 5, metrics, num_tokens=6000, num_response_tokens=1000)

    (line,) = folder.read_metrics()
    assert math.isnan(line.metrics.pop("actor/grad_norm"))
    assert {key: value for key, value in line.metrics.items() if "memory" not in key} == {
        "reward/overall": 0.75,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 0.75,
        "timing_s/validation": 10.0,
        "timing_s/other": 0.25,
        "timing_s/step": 14.0,
        "perf/time_per_step": 4.0,
        "perf/total_num_tokens": 6000.0,
        "perf/throughput": 750.0,
        "timing_per_token_ms/gen": 3.0,
        "timing_per_token_ms/update_actor": 0.125,
    }
    assert 0.01 < line.metrics["perf/cpu_memory_used_gb"] < 100
    report.close()
    assert logger.logged[0][1].items() >= line.metrics.items()
    assert stream.getvalue().splitlines()[-1].split() == ["1/5", "0.7500", "nan", "750", "14.0", "56.0", "s"]


def test_the_outermost_phase_is_timed_also_if_it_raises_and_a_save_belongs_to_the_next_step(folder, stream, clock):
    report = reporter(folder, stream, clock)
    with report.phase("load_model"):
        clock.now += 60.0
    report.rewind(0)  # what is before the first step is not part of it
    with report.phase("validation"), report.phase("gen", total=1) as advance:
        clock.now += 2.0
        advance(1)
    report.step(0, 2, {})
    with contextlib.suppress(ZeroDivisionError), report.phase("gen"):
        clock.now += 1.0
        raise ZeroDivisionError
    report.step(1, 2, {})
    with report.phase("save_checkpoint"):
        clock.now += 2.0
    clock.now += 1.0
    report.step(2, 2, {})
    keys = ("timing_s/validation", "timing_s/gen", "timing_s/save_checkpoint", "timing_s/step", "perf/time_per_step")
    assert [[line.metrics.get(key) for key in keys] for line in folder.read_metrics()] == [
        [2.0, None, None, 2.0, 0.0],
        [None, 1.0, None, 1.0, 1.0],
        [None, None, 2.0, 3.0, 1.0],
    ]
    assert not any("timing_s/load_model" in line.metrics for line in folder.read_metrics())


def test_all_but_waiting_is_progress_for_the_watchdog_and_the_check_is_called_each_time(folder, stream):
    class CountingWatch(HangWatch):
        beats = 0

        def beat(self):
            self.beats += 1

    watch, checks = CountingWatch(), []
    with (
        Reporter(folder, Console(stream=stream), watch=watch) as report,
        report.checking(lambda: checks.append(watch.beats)),
        report.phase("gen", total=2) as advance,
    ):
        for k in (None, 0, 0, None, 1):
            advance(k)
    assert checks == [0, 0, 1, 2, 2, 3]  # the first as the phase begins


@pytest.mark.faults
def test_lines_that_cannot_be_written_wait_and_the_run_continues(folder, stream, clock):
    report = reporter(folder, stream, clock)
    (folder.path / "metrics.jsonl").mkdir()
    report.step(1, 3, {"reward/overall": Mean(1.0)})
    report.step(2, 3, {"reward/overall": Mean(2.0)})
    assert stream.getvalue().count("lines of metrics.jsonl cannot be written") == 1
    (folder.path / "metrics.jsonl").rmdir()
    report.close()
    assert [line.step for line in folder.read_metrics()] == [1, 2]
    assert "could not be written and are not in" not in stream.getvalue()


def test_all_validation_completions_are_written_and_the_first_are_shown(folder, stream, clock):
    logger = MemoryLogger()
    report = reporter(folder, stream, clock, logger)
    metrics = {
        "val/reward_score": 0.9,
        "val/format_reward": 1.0,
        "val/accuracy_reward": 0.85,
        "val_response_length/mean": 9,
    }
    report.validation(5, [group("val:1"), group("val:2")], metrics, shown=3, token_groups=0, read_images=read_images)
    report.close()
    written = (folder.path / "rollouts" / "validation_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt_id"] for line in written] == ["val:1", "val:1", "val:2", "val:2"]
    assert logger.shown == [(5, "validation", ["val:1", "val:1", "val:2"])]
    assert logger.sizes == [[[(512, 128)]] * 3]  # reduced
    assert stream.getvalue().count("How many?") == 3
    assert "validation after step 5: 4 completions  accuracy 0.85  format 1  reward 0.9\n" in stream.getvalue()


def test_the_summary_includes_the_steps_before_a_resume(folder, stream, clock, tmp_path):
    before = {"val/accuracy_reward": 0.25, "val/format_reward": 0.5, "val/reward_score": 0.3}
    after = {"val/accuracy_reward": 0.875, "val/format_reward": 1.0, "val/reward_score": 0.9}
    folder.append_metrics(0, before | {"timing_s/step": 2.0, "timing_s/validation": 2.0})
    folder.append_metrics(1, {"timing_s/step": 8.0, "timing_s/gen": 5.0, "perf/total_num_tokens": 4000.0})
    folder.append_metrics(2, after | {"timing_s/step": 10.0, "timing_s/gen": 6.0, "perf/total_num_tokens": 6000.0})
    report = reporter(folder, stream, clock)
    report.summary(exported=tmp_path / "model", next_steps=["trigon train more=1"])
    words = [line.split() for line in stream.getvalue().replace("│", " ").replace("┃", " ").splitlines()]
    assert ["accuracy", "0.25", "0.875"] in words
    assert ["format", "0.5", "1"] in words
    assert ["reward", "0.3", "0.9"] in words
    assert ["gen", "11.0", "s", "55", "%"] in words
    assert ["validation", "2.0", "s", "10", "%"] in words
    assert ["other", "7.0", "s", "35", "%"] in words
    assert ["all", "20.0", "s", "100", "%"] in words
    text = stream.getvalue()
    assert "tokens, prompts included: 10,000 (500 per second of the run)" in text
    assert "trained on" not in text  # nothing is learned from prompts
    for part in (f"run:      {folder.path}\n", f"model:    {tmp_path / 'model'}\n", "next:\n  trigon train more=1\n"):
        assert part in text
