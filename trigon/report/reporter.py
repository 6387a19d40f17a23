"""Everything that is reported goes through here: to the run folder, to the screen, and to the trackers.

Measures what the reported numbers need: wall-clock time of each phase, peak memory. Such numbers differ from run to
run, and all of them live under timing_s/, timing_per_token_ms/ and perf/; every other key belongs to the caller. Knows
the three places; refuses to know how a step is made.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from trigon.metrics import Max, Mean, Metric, Metrics, Sum, merge, values
from trigon.report.console import Console, duration, number
from trigon.report.run_folder import RunFolder, Split, StepMetrics, rollout_rows
from trigon.report.sinks import Sink, Trackers
from trigon.types import RolloutGroup

NOT_TRAINING = ("validation", "save_checkpoint")
"""Phases that are not part of a step's pace: perf/time_per_step and perf/throughput leave them out."""

PER_RESPONSE_TOKEN = ("gen", "reward")
"""Phases whose work grows with the response; that of all others grows with all tokens."""


class Reporter:
    """Reports a run.

    num_devices: over how many devices perf/throughput is divided. clock: seconds from some moment on, for tests.
    A tracker that fails is reported once and not used again.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        console: Console,
        sinks: Sequence[Sink] = (),
        *,
        num_devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = run_folder
        self._console = console
        self._trackers = Trackers(sinks, warn=self.warn)
        self._num_devices = num_devices
        self._clock = clock
        self._step_started = clock()
        self._seconds: dict[str, float] = {}  # of the phases since then
        self._depth = 0
        self._recent: deque[float] = deque(maxlen=10)  # seconds of the last steps

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show a stretch of work and yield advance(k), to be called as k more of total are done.

        Its wall-clock seconds become timing_s/<name> of the step reported next, a phase that comes again adding to it.
        A phase within another shows its progress, but its time counts as the outer one's.
        """
        from trigon.training.trace import marked  # which brings torch along

        start = self._clock()
        self._depth += 1
        try:
            with marked(f"phase {name}"), self._console.progress(name, total) as advance:
                yield advance
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def begin(self) -> None:
        """Forget the time since the last step: what was loaded before the first one is not part of it."""
        self._seconds.clear()
        self._step_started = self._clock()

    def step(
        self, step: int, total_steps: int, metrics: Metrics, *, num_tokens: int = 0, num_response_tokens: int = 0
    ) -> None:
        """Write the metrics of a step everywhere, with its timings, pace and memory added.

        To be called before the step's checkpoint is saved, so that no resumed run lacks the line; the time of that save
        is part of the next step's. num_tokens: of all the step's sequences, prompts included; num_response_tokens: of
        their responses alone; 0: no pace is told.
        """
        merged = merge(metrics, self._measured(num_tokens, num_response_tokens), self._utilization(metrics))
        plain = values(merged)
        self._recent.append(plain["timing_s/step"])
        self._folder.append_metrics(step, plain)
        average = sum(self._recent) / len(self._recent)
        self._console.step(step, total_steps, plain, seconds_left=average * (total_steps - step) if step else None)
        self._trackers.log(step, plain)
        self.begin()

    def _measured(self, num_tokens: int, num_response_tokens: int) -> dict[str, Metric]:
        seconds = self._clock() - self._step_started
        training = seconds - sum(self._seconds.get(name, 0.0) for name in NOT_TRAINING)
        measured: dict[str, Metric] = {
            "timing_s/step": Sum(seconds),
            "perf/time_per_step": Sum(training),
            "perf/cpu_memory_used_gb": Max(_peak_resident_bytes() / 2**30),
            **{f"timing_s/{name}": Sum(spent) for name, spent in self._seconds.items()},
            "timing_s/other": Sum(seconds - sum(self._seconds.values())),
            **_gpu_memory(),
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
        """Return which share of what the devices can do at most the updates did; nothing where that is not known."""
        work, peak = metrics.get("actor/model_tflops"), metrics.get("perf/peak_tflops")
        seconds = self._seconds.get("update_actor", 0.0)
        if work is None or peak is None or not seconds:
            return {}
        return {"perf/mfu_actor": Mean(work.value / (seconds * self._num_devices * peak.value))}

    def rollouts(self, step: int, groups: Sequence[RolloutGroup], split: Split) -> None:
        """Write every rollout of a step into the run folder."""
        self._folder.write_rollouts(step, split, rollout_rows(groups))

    def validation(
        self, step: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float], *, shown: int
    ) -> None:
        """Write every validation answer into the run folder, and show the first `shown` of them: the same each time.

        metrics: of the validation, for the screen alone: to be recorded, they go into the metrics of a step as well.
        """
        rows = rollout_rows(groups)
        self._folder.write_rollouts(step, "validation", rows)
        some = rows[:shown]
        if some:
            self._console.generations(f"validation after step {step}", some)
            self._trackers.rollouts(step, some)
        figures = "  ".join(f"{_plain_name(key)} {number(value)}" for key, value in _validation(metrics))
        self._console.print(f"validation after step {step}: {len(rows)} answers  {figures}")

    def rewind(self, step: int) -> None:
        """Forget what was reported after this step, where a resumed run goes on. At 0 an earlier run is set aside."""
        moved = self._folder.rewind(step)
        if moved is not None:
            self.warn(
                f"this run starts from the beginning: an earlier one's metrics and rollouts were moved to {moved}"
            )
        self.begin()

    def overview(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print what the run will do: (what, how much)."""
        self._console.table("What this run will do", ("", ""), rows)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.warn(text)

    def summary(self, *, exported: Path | None, next_steps: Sequence[str]) -> None:
        """Print what came of the run, from its folder alone, so that a run that was resumed is told whole.

        exported: where the Hugging Face model lies, if it was written. next_steps: commands or hints, one line each.
        """
        lines = self._folder.read_metrics()
        validated = [line for line in lines if "val/reward_score" in line.metrics]
        if validated:
            first, last = validated[0], validated[-1]
            self._console.table(
                "Validation",
                ("", f"before (step {first.step})", f"after (step {last.step})"),
                [
                    (_plain_name(key), number(first.metrics.get(key, float("nan"))), number(value))
                    for key, value in _validation(last.metrics)
                ],
            )
        spent = _total(lines, "timing_s/")
        whole = spent.pop("step", 0.0)
        spent.pop("other", 0.0)  # it is what is left, and comes last
        tokens = _total(lines, "perf/total_num_tokens").get("", 0.0)
        rows = [
            (name, duration(seconds), f"{100 * seconds / whole:.0f} %")
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
            if seconds > 0
        ]
        if rows:
            rest = max(whole - sum(spent.values()), 0.0)
            rows += [("other", duration(rest), f"{100 * rest / whole:.0f} %"), ("all", duration(whole), "100 %")]
            self._console.table("Time", ("phase", "time", "share"), rows)
        if tokens:
            self._console.print(f"tokens trained on: {number(tokens)} ({number(tokens / whole)} a second over all)")
        self._console.print(f"run:      {self._folder.path}")
        self._console.print(f"metrics:  {self._folder.path / 'metrics.jsonl'}")
        self._console.print(f"rollouts: {self._folder.path / 'rollouts'}")
        if exported is not None:
            self._console.print(f"model:    {exported}")
        if next_steps:
            self._console.print("\n".join(("next:", *(f"  {line}" for line in next_steps))))

    def close(self) -> None:
        """Close the trackers. The run folder is its owner's to close."""
        self._trackers.close()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _validation(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the figures of a validation, what is looked for first coming first."""
    order = ("val/accuracy_reward", "val/format_reward", "val/reward_score")
    rest = sorted(key for key in metrics if key.startswith("val/") and key not in (*order, "val/overall_reward"))
    return [(key, metrics[key]) for key in (*order, *rest) if key in metrics]


def _plain_name(key: str) -> str:
    """Return what val/accuracy_reward or val/reward_score is called among people: accuracy, reward."""
    return key.removeprefix("val/").removesuffix("_reward").removesuffix("_score")


def _total(lines: Sequence[StepMetrics], prefix: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in lines:
        for key, value in line.metrics.items():
            if key.startswith(prefix):
                totals[key.removeprefix(prefix)] = totals.get(key.removeprefix(prefix), 0.0) + value
    return totals


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _gpu_memory() -> dict[str, Metric]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 2**30),
        "perf/max_memory_reserved_gb": Max(torch.cuda.max_memory_reserved() / 2**30),
    }
