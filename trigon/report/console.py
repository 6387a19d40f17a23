"""The console output of a run: progress bars, one row per step, tables and warnings.

Text from models and datasets is untrusted: its control characters are shown as text, and it is
never parsed as markup. If the output is not a terminal, progress bars become plain lines, at most
one every few seconds.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from trigon.report.rollouts import RolloutRow
from trigon.system.terminal import format_duration, format_number, sanitize

SECONDS_BETWEEN_LINES = 10.0
"""Interval of a phase's progress lines when the output is not a terminal."""

SECONDS_BEFORE_BAR = 2.0
"""Age of a phase from which its bar is shown on a terminal: short phases would only flicker."""

MAX_NAME_CHARACTERS = 40

ROWS_PER_HEADER = 20
"""Steps after which the names of the columns are printed again."""

SAMPLE_CHARACTERS = 240
"""Length to which the texts of a sample that was not asked for are cut."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the rows of steps.

    keys: metrics, of which the first one that a step has is shown. decimals: None: formatted by
    format_number. width: width of a cell in characters; a longer number moves the rest of a row.
    rank: a narrow terminal has the columns of the lowest ranks.
    """

    rank: int
    label: str
    width: int
    keys: tuple[str, ...]
    decimals: int | None = 4

    def find(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of a step, or None."""
        return next((metrics[key] for key in self.keys if key in metrics), None)

    def cell(self, metrics: Mapping[str, float]) -> str:
        """Return the cell of a step, empty for one without a value."""
        value = self.find(metrics)
        if value is None:
            return ""
        is_tiny = 0 < abs(value) < 1e-3
        return format_number(value) if self.decimals is None or is_tiny else f"{value:,.{self.decimals}f}"


_COLUMNS = (
    _Column(1, "reward", 7, ("reward/overall", "critic/score/mean")),
    _Column(2, "accuracy", 8, ("reward/accuracy",)),
    _Column(3, "length", 7, ("response_length/mean",), 1),
    _Column(5, "cut", 6, ("response_length/clip_ratio",)),
    _Column(6, "rounds", 6, ("filter/rounds",), 0),
    _Column(7, "KL", 7, ("actor/kl_loss", "actor/kl_penalty")),
    _Column(8, "entropy", 7, ("actor/entropy", "actor/entropy_loss")),
    _Column(9, "grad norm", 9, ("actor/grad_norm",)),
    _Column(11, "lr", 7, ("actor/lr",), None),
    _Column(10, "tokens/s", 8, ("perf/throughput",), 0),
    _Column(4, "seconds", 7, ("timing_s/step",), 1),
)

_LEFT_WIDTH = 11  # 59 min 59 s

_TROUBLES = (
    ("updates skipped, not finite", "actor/nonfinite_updates"),
    ("rewards failed", "reward_function/num_failed"),
    ("rewards timed out", "reward_function/num_timed_out"),
)
"""Counts that have a line of their own below a step in which they are not 0."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Advances the progress of a phase: advance(k) when k more are done. From any thread.

    set_total: for a phase whose total was not known when it began. waits: called while the phase
    only waits, which is no progress.
    """

    advance: Callable[[int], None]
    set_total: Callable[[int], None]
    waits: Callable[[], object] = lambda: None

    def __call__(self, k: int | None) -> None:
        """Count k more as done; None: the phase only waits."""
        if k is None:
            self.waits()
        else:
            self.advance(k)


class Console:
    """Prints to a terminal or another text stream.

    stream: default standard output. progress: show the progress of phases. step_lines: print a line
    per step; tables and warnings are always printed. clock: seconds, for tests.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        progress: bool = True,
        step_lines: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stdout
        # A notebook's stream says that it is a terminal, but it keeps every frame of a bar; and as
        # HTML each line would be a block of its own.
        in_notebook = type(stream).__module__.startswith("ipykernel.")
        # Markup is off: "[/bold]" in a completion must not be parsed.
        self._rich = RichConsole(
            file=cast(TextIO, LenientStream(stream)),
            markup=False,
            highlight=False,
            emoji=False,
            force_jupyter=False,
            force_terminal=False if in_notebook else None,
        )
        self._progress_on = progress
        self._step_lines = step_lines
        self._known: set[_Column] = set()  # those that a step has had
        self._header = ""
        self._num_rows = 0  # since the header
        self._clock = clock
        self._bars = _Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            _Status(),
            console=self._rich,
            transient=True,
        )

    @contextmanager
    def progress(self, name: str, total: int | None) -> Iterator[Advance]:
        """Show the progress of a phase, and yield what advances it, from any thread.

        total: None if unknown.
        """
        if not self._progress_on:
            yield Advance(lambda k: None, lambda number: None)
        elif self._rich.is_terminal:
            with self._bar(name, total) as advance:
                yield advance
        else:
            lines = _Lines(name, total, self.print, self._clock)
            yield Advance(lines.advance, lines.set_total)
            lines.finish()

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        # One display for all bars: phases can be nested, live displays of rich cannot.
        task = self._bars.add_task(_shortened(sanitize(name, max_characters=500)), total=total)
        self._bars.start()
        try:
            yield Advance(lambda k: self._bars.advance(task, k), lambda number: self._bars.update(task, total=number))
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float], *, seconds_left: float | None) -> None:
        """Print the row of a step, in columns as wide as the terminal; a log has all of them.

        seconds_left: until the end of the last step, if known.
        """
        if not self._step_lines or step == 0:  # before the first step there was a validation, which is printed
            return
        self._known |= {column for column in _COLUMNS if column.find(metrics) is not None}
        steps_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        columns = self._fitting(self._width - steps_width - _LEFT_WIDTH - 2)
        header = "  ".join(
            ["step".rjust(steps_width), *(column.label.rjust(column.width) for column in columns), "left".rjust(11)]
        )
        if header != self._header or self._num_rows >= ROWS_PER_HEADER:
            self._header, self._num_rows = header, 0
            self._print(Text(header, style="dim"))
        self._num_rows += 1
        left = format_duration(seconds_left) if seconds_left is not None and step < total_steps else ""
        cells = [f"{step}/{total_steps}".rjust(steps_width)]
        cells += [column.cell(metrics).rjust(column.width) for column in columns]
        self.print("  ".join([*cells, left.rjust(_LEFT_WIDTH)]).rstrip())
        for label, key in _TROUBLES:
            if metrics.get(key, 0.0):
                self.print(f"{'':{steps_width}}  {label}: {format_number(metrics[key])}")

    @property
    def _width(self) -> float:
        return self._rich.width if self._rich.is_terminal else inf

    def _fitting(self, width: float) -> list[_Column]:
        """Return the most important known columns that fit, in their order."""
        chosen: set[_Column] = set()
        for column in sorted(self._known, key=lambda column: column.rank):
            if column.width + 2 <= width:
                width -= column.width + 2
                chosen.add(column)
        return [column for column in _COLUMNS if column in chosen]

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. Columns of numbers are aligned right."""
        table = Table(
            title=sanitize(title, max_characters=500), title_justify="left", title_style="bold", show_header=any(header)
        )
        for column, name in enumerate(header):
            numeric = all(_looks_numeric(row[column]) for row in rows)
            table.add_column(
                sanitize(name, max_characters=500), justify="right" if numeric else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(sanitize(cell, max_characters=500)) for cell in row))
        self._rich.print(table)

    def completions(self, title: str, rows: Sequence[RolloutRow], *, max_characters: int = 2000) -> None:
        """Print completions with prompt, ground truth and reward.

        max_characters: most characters of each text.
        """
        for row in rows:
            parts = ", ".join(f"{key} {format_number(value)}" for key, value in sorted(row.parts.items()))
            self._rich.print(Text(sanitize(f"{title} | {row.prompt_id}", max_characters=200), style="bold"))
            for name, text in (
                ("prompt", row.prompt),
                ("completion", row.response),
                ("ground truth", str(row.ground_truth)),
                ("reward", f"{format_number(row.reward)} ({sanitize(parts or row.error, max_characters=500)})"),
            ):
                shown = sanitize(text, max_characters=max_characters).replace("\n", "\n" + " " * 16)
                self._print(Text.assemble((f"  {name:<12}  ", "dim"), shown))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(Text.assemble(("warning: ", "bold yellow"), sanitize(text, max_characters=5000)))

    def print(self, text: str) -> None:
        """Print text, sanitized."""
        self._print(Text(sanitize(text, max_characters=20_000)))

    def _print(self, text: Text) -> None:
        """Print text, wrapped between words on a terminal, and with unchanged lines elsewhere.

        A word that is longer than a line, such as a path, is not broken, so that it can be copied.
        """
        if self._rich.is_terminal:
            text = _wrapped(text, self._rich.width)
        self._rich.print(text, soft_wrap=True)


class LenientStream:
    """Passes text to a stream. What cannot be written is dropped, and counted when that ends.

    Output that is redirected to a file fails when the disk is full, a pipe when its reader has
    ended, and a terminal when it is closed. None of them is to end a run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = 0

    def write(self, text: str) -> int:
        """Write text, after a note of what was dropped before; return its number of characters."""
        note = f"({self._dropped:,} writes to this output failed)\n" if self._dropped else ""
        try:
            self._stream.write(note + text)
        except OSError:
            self._dropped += 1
        else:
            self._dropped = 0
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError:
            self._dropped += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Bars(Progress):
    """Bars of the phases that have taken longer than SECONDS_BEFORE_BAR."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is shown now; called at each refresh."""
        shown = [task for task in self.tasks if (task.elapsed or 0.0) >= SECONDS_BEFORE_BAR]
        if shown:
            yield self.make_tasks_table(shown)


def _shortened(name: str) -> str:
    """Return the name of a phase, such as a long path, without its middle."""
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    start = name.find(" ") + 1
    start = start if 0 < start <= 12 else 0
    return f"{name[:start]}...{name[-(MAX_NAME_CHARACTERS - 3 - start) :]}"


class _Lines:
    """The progress of a phase as plain lines, for an output that is not a terminal."""

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
            self._print(f"{self._name}  {_status(self._done, self._total, now - self._start)}")

    def set_total(self, total: int) -> None:
        self._total = total

    def finish(self) -> None:
        seconds = self._clock() - self._start
        if seconds >= SECONDS_BETWEEN_LINES:
            self._print(f"{self._name}  done in {format_duration(seconds)}")


class _Status(ProgressColumn):
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        total = None if task.total is None else int(task.total)
        return Text(_status(int(task.completed), total, task.elapsed or 0.0))


def _wrapped(text: Text, width: int) -> Text:
    """Return text with a line break before each word that would pass the width."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        used = None
        for word in re.finditer(r"\S+\s*", line.plain):
            if used is None:
                used = word.start()  # spaces before the first word
            elif used + cell_len(word.group().rstrip()) > width:
                breaks.append(word.start())
                used = 0
            used += cell_len(word.group())
        for part in line.divide(breaks):
            part.rstrip()
            lines.append(part)
    return Text("\n").join(lines)


def _status(done: int, total: int | None, seconds: float) -> str:
    """Return what is done, with rate and time left, or with the time so far."""
    count = f"{done}/{total}  " if total is not None else f"{done}  " if done else ""
    if not done or seconds <= 0:
        return f"{count}{format_duration(seconds)}"
    rate = done / seconds
    time_left = None if total is None else format_duration(max(total - done, 0) / rate)
    return f"{count}{format_number(rate)}/s, {f'{time_left} left' if time_left else format_duration(seconds)}"


def _looks_numeric(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d,.]+(e[-+]\d+)?( ?(%|ms|s|min|GiB|MiB|KiB))?|", cell))
