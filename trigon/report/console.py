"""What a person sees while a run runs: progress, one line a step, tables, warnings.

Text that a model or a dataset wrote is hostile: it reaches the terminal without control characters, and nothing in it
is read as markup. On something that is no terminal, bars become plain lines, at most one every few seconds. Knows rich;
refuses to know files, trackers and what a step does.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from trigon.report.run_folder import RolloutRow

SECONDS_BETWEEN_LINES = 10.0
"""How often a phase reports on something that is no terminal."""

_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).{0,500}?(?:\x1b\\|\x07|\x9c)"  # strings: titles, links, the clipboard
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # control sequences: colours, the cursor
    r"|\x1b.?",
    re.DOTALL,
)
# Control characters but newline and tab, marks that hide text or turn its direction, halves of surrogate pairs.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)

# What a step's line shows: a word, and the keys that can say it; the first one present is taken.
_STEP_LINE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/overall", "critic/score/mean")),
    ("accuracy", ("reward/accuracy",)),
    ("validation accuracy", ("val/accuracy_reward",)),
    ("validation reward", ("val/reward_score",)),
    ("length", ("response_length/mean",)),
    ("KL", ("actor/kl_loss", "actor/kl_penalty")),
    ("entropy", ("actor/entropy", "actor/entropy_loss")),
    ("grad norm", ("actor/grad_norm",)),
    ("lr", ("actor/lr",)),
    ("tokens/s", ("perf/throughput",)),
    ("seconds", ("timing_s/step",)),
)


def harmless(text: str, *, max_characters: int) -> str:
    """Return text that a terminal only prints: no escape sequences, no control characters, capped in length."""
    left_out = len(text) - max_characters
    text = text[: 2 * max_characters]  # what is removed below may make room, but a megabyte need not be searched
    text = _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))[:max_characters]
    return f"{text} ... ({left_out:,} more characters)" if left_out > 0 else text


class Console:
    """The screen.

    stream: where to write. progress: whether long phases show theirs. step_lines: whether each step prints its line;
    tables and warnings are printed in any case.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        progress: bool = True,
        step_lines: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Plain text is the default everywhere: with markup on, "[/bold]" in an answer would be read as an instruction.
        self._rich = RichConsole(file=stream or sys.stdout, markup=False, highlight=False, emoji=False)
        self._progress_on = progress
        self._step_lines = step_lines
        self._clock = clock
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            _Count(),
            _Pace(),
            console=self._rich,
            transient=True,
        )

    @contextmanager
    def progress(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show a phase while the context lasts, and yield advance(k), which may be called from any thread.

        total: None when it cannot be known.
        """
        if not self._progress_on:
            yield _ignore
        elif self._rich.is_terminal:
            with self._bar(name, total) as advance:
                yield advance
        else:
            lines = _Lines(name, total, self.print, self._clock)
            yield lines.advance
            lines.finish()

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        # One display for all bars: phases can lie within each other, live displays cannot.
        task = self._bars.add_task(harmless(name, max_characters=40), total=total)
        self._bars.start()
        try:
            yield lambda k: self._bars.advance(task, k)
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float], *, seconds_left: float | None) -> None:
        """Print the line of a step from what its metrics hold. seconds_left: until the last step, None if unknown."""
        if not self._step_lines:
            return
        parts = [f"step {step}/{total_steps}"]
        for word, keys in _STEP_LINE:
            value = next((metrics[key] for key in keys if key in metrics), None)
            if value is not None:
                parts.append(f"{word} {number(value)}")
        if seconds_left is not None and step < total_steps:
            parts.append(f"left {duration(seconds_left)}")
        self.print("  ".join(parts))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; cells that look like numbers stand on the right."""
        table = Table(title=title, title_justify="left", title_style="bold", show_header=any(header))
        for column, name in enumerate(header):
            numeric = all(_looks_numeric(row[column]) for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(harmless(cell, max_characters=500)) for cell in row))
        self._rich.print(table)

    def generations(self, title: str, rows: Sequence[RolloutRow]) -> None:
        """Print answers in full, as far as that is sensible, each with its question, its truth and its reward."""
        for row in rows:
            parts = ", ".join(f"{key} {number(value)}" for key, value in sorted(row.parts.items()))
            self._rich.print(Text(f"{title} | {harmless(row.prompt_id, max_characters=100)}", style="bold"))
            for name, text in (
                ("prompt", row.prompt),
                ("answer", row.response),
                ("truth", str(row.ground_truth)),
                ("reward", f"{number(row.reward)} ({harmless(parts or row.error, max_characters=500)})"),
            ):
                shown = harmless(text, max_characters=2000).replace("\n", "\n          ")
                self._rich.print(Text.assemble((f"  {name:<6}  ", "dim"), shown), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning that cannot be overlooked."""
        self._rich.print(
            Text.assemble(("warning: ", "bold yellow"), harmless(text, max_characters=5000)), soft_wrap=True
        )

    def print(self, text: str) -> None:
        """Print lines of our own or others' making."""
        self._rich.print(Text(harmless(text, max_characters=20_000)), soft_wrap=True)


class _Lines:
    """A phase on something that is no terminal."""

    def __init__(
        self, name: str, total: int | None, print_line: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._name, self._total, self._print, self._clock = name, total, print_line, clock
        self._start = self._last = clock()
        self._done = 0

    def advance(self, k: int) -> None:
        self._done += k
        now = self._clock()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            pace = _pace(self._done, self._total, now - self._start)
            self._print(f"{self._name}  {_count(self._done, self._total)}  {pace}")

    def finish(self) -> None:
        seconds = self._clock() - self._start
        if seconds >= SECONDS_BETWEEN_LINES:
            self._print(f"{self._name}  done in {duration(seconds)}")


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_count(int(task.completed), None if task.total is None else int(task.total)))


class _Pace(ProgressColumn):
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        total = None if task.total is None else int(task.total)
        return Text(_pace(int(task.completed), total, task.elapsed or 0.0))


def _count(done: int, total: int | None) -> str:
    if total is None:
        return str(done) if done else ""
    return f"{done}/{total}"


def _pace(done: int, total: int | None, seconds: float) -> str:
    """Say how fast it goes and how long it still takes, or just how long it has taken when nothing is done yet."""
    if not done or seconds <= 0:
        return duration(seconds)
    rate = done / seconds
    if total is None:
        return f"{number(rate)}/s, {duration(seconds)}"
    return f"{number(rate)}/s, {duration(max(total - done, 0) / rate)} left"


def number(value: float) -> str:
    """Return a number as a line of text wants it: 0.8125, 63.2, 12,345, 1.0e-06."""
    if not isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a stretch of time as people say it: 3.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _looks_numeric(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d,.]+(e[-+]\d+)?( ?(%|s|min|GiB|MiB))?|", cell))


def _ignore(k: int) -> None:
    """Hear of progress that nobody wants to see."""
