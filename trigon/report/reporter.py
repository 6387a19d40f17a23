"""Reports metrics, rollouts and progress to the run folder, the console and the loggers.

Measures the wall-clock time of each phase and the peak memory. These are the only numbers that
differ between equal runs; their keys start with timing_s/, timing_per_token_ms/ or perf/. All other
metrics come from the caller.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from trigon.metrics import Max, Mean, Metric, Metrics, Sum, merge, values
from trigon.report.console import SAMPLE_CHARACTERS, Advance, Console
from trigon.report.delivery import CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR, Deliveries, Logger
from trigon.report.rollouts import Filtered, RolloutRow, rollout_rows
from trigon.report.run import StepMetrics
from trigon.report.run_folder import ImageStore, ReadImages, RunFolder, RunWriter
from trigon.report.samples import make_samples
from trigon.system.hangs import HangWatch
from trigon.system.machine import gpu_memory_metrics
from trigon.system.terminal import format_duration, format_number
from trigon.types import RolloutGroup, TokenLogprobs, TrainGroup

NOT_TRAINING = ("validation", "save_checkpoint")
"""Phases whose time is not part of perf/time_per_step and perf/throughput."""

PER_RESPONSE_TOKEN = ("gen", "reward")
"""Phases whose time is divided by completion tokens; the others by all tokens."""


class Reporter:
    """Reports a run.

    loggers: opened; the reporter closes them. One that fails is reported once and not used again.
    num_devices: divisor of perf/throughput. images: where the prompts' images are stored; None:
    they are not. token_texts: decodes token by token; needed to write tokens.
    watch: receives phases and their progress. clock: seconds, for tests.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        console: Console,
        loggers: Sequence[Logger] = (),
        *,
        num_devices: int = 1,
        critic_warmup: int = 0,
        images: ImageStore | None = None,
        token_texts: Callable[[Sequence[int]], Sequence[str]] | None = None,
        watch: HangWatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = run_folder
        self._console = console
        self._loggers = Deliveries(loggers, warn=self.warn)
        self._writer = RunWriter(run_folder, images=images, token_texts=token_texts, warn=self.warn)
        self._num_devices = num_devices
        self._critic_warmup = critic_warmup
        self._watch = HangWatch() if watch is None else watch
        self._clock = clock
        self._step_started = clock()
        self._seconds: dict[str, float] = {}  # by phase, since then
        self._depth = 0
        self._check: Callable[[], object] | None = None
        self._recent: deque[float] = deque(maxlen=10)  # seconds of the last steps

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[Advance]:
        """Show a phase, and yield advance(k), to be called when k more of total are done.

        The watch counts every call as progress, except calls with None.

        Its wall-clock seconds are added to timing_s/<name> of the step that is reported next. Of
        nested phases only the outermost one is timed.
        """
        from trigon.system.trace import marked  # imports torch

        self._call_check()
        start = self._clock()
        self._depth += 1
        try:
            with self._watch.phase(name), marked(f"phase {name}"), self._console.progress(name, total) as advance:
                yield Advance(partial(self._advance, advance), advance.set_total, self._call_check)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    @contextmanager
    def checking(self, check: Callable[[], object]) -> Iterator[None]:
        """Call check within the context, whenever a phase begins or advances; it may raise."""
        self._check = check
        try:
            yield
        finally:
            self._check = None

    def _advance(self, advance: Advance, k: int) -> None:
        if k:
            advance(k)
        self._watch.beat()  # also for 0, such as a token of completions that take hours
        self._call_check()

    def _call_check(self) -> None:
        if self._check is not None:
            self._check()

    def begin(self) -> None:
        """Start timing a step, and discard the times measured so far."""
        self._seconds.clear()
        self._step_started = self._clock()

    def step(
        self, step: int, total_steps: int, metrics: Metrics, *, num_tokens: int = 0, num_response_tokens: int = 0
    ) -> dict[str, float]:
        """Report the metrics of a step, with its timings, throughput and memory added.

        Call it before the step's checkpoint is saved, so that the metrics of a resumed run are
        complete; the time of the save belongs to the next step.
        num_tokens: number of tokens of all sequences of the step, prompts included;
        num_response_tokens: number of tokens of their completions. 0: no throughput is reported.
        Returns: all numbers that were recorded.
        """
        plain = self.record(step, metrics, num_tokens=num_tokens, num_response_tokens=num_response_tokens)
        self._recent.append(plain["timing_s/step"])
        average = sum(self._recent) / len(self._recent)
        self._console.step(step, total_steps, plain, seconds_left=average * (total_steps - step) if step else None)
        return plain

    def record(
        self, step: int, metrics: Metrics, *, num_tokens: int = 0, num_response_tokens: int = 0
    ) -> dict[str, float]:
        """Do what step() does, without a line on the console.

        Returns: all numbers that were recorded.
        """
        merged = merge(metrics, self._measured(num_tokens, num_response_tokens), self._utilization(metrics))
        plain = values(merged)
        self._writer.metrics(step, plain)
        self._loggers.metrics(step, plain)
        self.begin()
        return plain

    def _measured(self, num_tokens: int, num_response_tokens: int) -> dict[str, Metric]:
        seconds = self._clock() - self._step_started
        training = seconds - sum(self._seconds.get(name, 0.0) for name in NOT_TRAINING)
        measured: dict[str, Metric] = {
            "timing_s/step": Sum(seconds),
            "perf/time_per_step": Sum(training),
            "perf/cpu_memory_used_gb": Max(_peak_resident_bytes() / 2**30),
            **{f"timing_s/{name}": Sum(spent) for name, spent in self._seconds.items()},
            "timing_s/other": Sum(seconds - sum(self._seconds.values())),
            **gpu_memory_metrics(),
        }
        if num_tokens and num_response_tokens:
            measured["perf/total_num_tokens"] = Sum(float(num_tokens))
            measured["perf/throughput"] = Sum(num_tokens / training / self._num_devices)
            for name, spent in self._seconds.items():
                if name not in NOT_TRAINING:
                    tokens = num_response_tokens if name in PER_RESPONSE_TOKEN else num_tokens
                    measured[f"timing_per_token_ms/{name}"] = Sum(1000.0 * spent / tokens)
        return measured

    def _utilization(self, metrics: Metrics) -> dict[str, Metric]:
        """Return the model FLOPs utilization of the updates, or nothing if the peak is unknown."""
        utilization: dict[str, Metric] = {}
        for model in ("actor", "critic"):
            work, peak = metrics.get(f"{model}/model_tflops"), metrics.get("perf/peak_tflops")
            seconds = self._seconds.get(f"update_{model}", 0.0)
            if work is not None and peak is not None and seconds:
                utilization[f"perf/mfu_{model}"] = Mean(work.value / (seconds * self._num_devices * peak.value))
        return utilization

    def skipped_rows(self, dataset: str, rows: Sequence[tuple[int, str, str]]) -> Path:
        """Write the rows of a dataset that are not used into the run folder, and return the file.

        rows: (index, reason, message) of each.
        """
        return self._folder.write_skipped_rows(dataset, rows)

    def rollouts(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        *,
        learned: Sequence[TrainGroup] | None,
        recorded: Mapping[int, Sequence[TokenLogprobs] | None],
        read_images: ReadImages,
        shown: int = 0,
    ) -> None:
        """Write the rollouts of a step into the run folder.

        learned: what the update learns from, for each group; None if the step ends before it.
        recorded: the outputs of the update, if it computed any, by the index of a group whose
        tokens are written too.
        read_images: reads the images of prompts. shown: number of first rollouts that the loggers
        get.
        """
        rows = self._with_steps(rollout_rows(groups, learned=learned, recorded=recorded))
        self._writer.rollouts(step, "train", rows, read_images)
        if shown:
            self._loggers.samples(step, "train", partial(make_samples, rows[:shown], read_images, warn=self.warn))

    def filtered(self, step: int, groups: Sequence[tuple[RolloutGroup, Filtered]], *, read_images: ReadImages) -> None:
        """Write what was sampled for a step, and no step learns from, into the run folder."""
        rows = [row for group, why in groups for row in rollout_rows([group], filtered=why)]
        if rows:
            self._writer.rollouts(step, "filtered", self._with_steps(rows), read_images)

    def validation(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        metrics: Mapping[str, float],
        *,
        shown: int,
        token_groups: int,
        read_images: ReadImages,
    ) -> None:
        """Write the validation rollouts into the run folder, and show the first `shown` of them.

        The console shows the beginning of one even if shown is 0.
        metrics: metrics of the validation, for the console only; pass them to step() to record
        them.
        token_groups: number of groups whose tokens are written too. read_images: reads the images
        of prompts.
        """
        rows = self._with_steps(rollout_rows(groups, recorded=dict.fromkeys(range(token_groups))))
        self._writer.rollouts(step, "validation", rows, read_images)
        figures = "  ".join(f"{_short_name(key)} {format_number(value)}" for key, value in _validation_metrics(metrics))
        self._console.print(f"validation after step {step}: {len(rows)} completions  {figures}")
        shown_rows = rows[:shown]
        if not shown_rows:
            self._console.completions("sample", rows[:1], max_characters=SAMPLE_CHARACTERS)
        else:
            self._console.completions("sample", shown_rows)
            make = partial(make_samples, shown_rows, read_images, warn=self.warn)
            self._loggers.samples(step, "validation", make)

    def _with_steps(self, rows: Sequence[RolloutRow]) -> list[RolloutRow]:
        """Return rows with steps instead of versions, which do not count the steps of a warm-up."""
        if not self._critic_warmup:
            return list(rows)

        def step_of(version: int) -> int:
            return version + self._critic_warmup if version > 0 else 0

        return [
            replace(
                row,
                policy_version=step_of(row.policy_version),
                policy_versions=tuple((step_of(version), count) for version, count in row.policy_versions),
            )
            for row in rows
        ]

    def flush(self) -> None:
        """Wait until all rollouts are on disk, except those that could not be written.

        Lines of metrics that wait are tried again. Raises: as RunWriter.flush.
        """
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Remove what was reported after this step, from which a run resumes.

        At step 0, reports of an earlier run are moved, with a warning.
        """
        moved = self._folder.rewind(step)
        if moved is not None:
            self.warn(
                f"this run starts from the beginning: metrics and rollouts of an earlier run were moved to {moved}"
            )
        self.begin()

    def overview(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the table of what the run will do: (name, value)."""
        self._console.table("Overview of the run", ("", ""), rows)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.warn(text)

    def summary(self, *, exported: Path | None, next_steps: Sequence[str]) -> None:
        """Print the first and the last validation, the time of each phase, and the paths.

        All of it is read from the run folder, so steps before a resume are included.
        exported: folder of the exported model, if any. next_steps: hints, one line each.
        """
        lines = self._folder.read_metrics()
        validated = [line for line in lines if "val/reward_score" in line.metrics]
        if validated:
            first, last = validated[0], validated[-1]
            header = ["", f"before (step {first.step})", f"after (step {last.step})"]
            rows: list[tuple[str, ...]] = [
                (_short_name(key), format_number(first.metrics.get(key, float("nan"))), format_number(value))
                for key, value in _validation_metrics(last.metrics)
            ]
            if len(validated) == 1:
                header, rows = ["", f"step {last.step}"], [(name, value) for name, _before, value in rows]
            self._console.table("Validation", header, rows)
        spent = _totals(lines, "timing_s/")
        all_seconds = spent.pop("step", 0.0)
        spent.pop("other", 0.0)  # computed below, as the last row
        tokens = _totals(lines, "perf/total_num_tokens").get("", 0.0)
        times = [
            (name, format_duration(seconds), f"{100 * seconds / all_seconds:.0f} %")
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
            if seconds > 0
        ]
        if times:
            other = max(all_seconds - sum(spent.values()), 0.0)
            times += [
                ("other", format_duration(other), f"{100 * other / all_seconds:.0f} %"),
                ("all", format_duration(all_seconds), "100 %"),
            ]
            self._console.table("Time", ("phase", "time", "share"), times)
        if tokens:
            rate = format_number(tokens / all_seconds)
            self._console.print(f"tokens, prompts included: {format_number(tokens)} ({rate} per second of the run)")
        self._console.print(f"run:      {self._folder.path}")
        self._console.print(f"metrics:  {self._folder.path / 'metrics.jsonl'}")
        self._console.print(f"rollouts: {self._folder.path / 'rollouts'}")
        if exported is not None:
            self._console.print(f"model:    {exported}")
        if next_steps:
            self._console.print("\n".join(("next:", *(f"  {line}" for line in next_steps))))

    def close(self, *, after_error: bool = False) -> None:
        """Write pending rollouts, and close the loggers. The run folder is closed by its owner.

        Warns of what could not be written. after_error: give the loggers less time.
        """
        try:
            self._writer.close()
        finally:
            self._loggers.close(seconds=CLOSE_SECONDS_AFTER_ERROR if after_error else CLOSE_SECONDS)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(after_error=error is not None)


def _validation_metrics(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the val/ metrics: accuracy, format, reward, then the others by name."""
    order = ("val/accuracy_reward", "val/format_reward", "val/reward_score")
    # overall_reward is reward_score by another name
    rest = sorted(key for key in metrics if key.startswith("val/") and not key.endswith("/overall_reward"))
    rest = [key for key in rest if key not in order]
    return [(key, metrics[key]) for key in (*order, *rest) if key in metrics]


def _short_name(key: str) -> str:
    """Return the name of a validation metric on the console: val/accuracy_reward is accuracy."""
    return key.removeprefix("val/").removesuffix("_reward").removesuffix("_score")


def _totals(lines: Sequence[StepMetrics], prefix: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in lines:
        for key, value in line.metrics.items():
            if key.startswith(prefix):
                totals[key.removeprefix(prefix)] = totals.get(key.removeprefix(prefix), 0.0) + value
    return totals


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
