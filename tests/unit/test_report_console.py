"""The console: untrusted text, numbers, step lines, progress and tables."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from support.samples import ROW
from trigon.report.console import Console
from trigon.system.terminal import format_duration, format_number, sanitize


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \\boxed{4}\n\tnext", "plain \\boxed{4}\n\tnext"),
        ("\x1b]0;new title\x07rest", r"\x1b]0;new title\x07rest"),
        ("\x9b31mred", r"\x9b31mred"),
        ("over\rwrite\x08\x07\x00", r"over\rwrite\x08\x07\x00"),
        ("\r\nline", "\nline"),
        ("abc\u202edcb\u2066x\u200b", r"abc\u202edcb\u2066x\u200b"),
        ("half \ud83d pair", r"half \ud83d pair"),
        ("tags \U000e0041", r"tags \U000e0041"),
        ("family 👨\u200d👩 and \u3000 space", "family 👨\u200d👩 and \u3000 space"),
        ("答案 🙂 é", "答案 🙂 é"),
        ("[bold]not markup[/bold] [/]", "[bold]not markup[/bold] [/]"),
    ],
)
def test_control_characters_are_shown_as_text(text, shown):
    assert sanitize(text, max_characters=100) == shown


def test_long_text_is_cut_and_the_cut_is_shown():
    assert sanitize("x" * 1_000_000, max_characters=5) == "xxxxx ... (999,995 more characters)"
    assert sanitize("xxxxx", max_characters=5) == "xxxxx"
    shown = sanitize("\x1b]" * 500_000, max_characters=20_000)
    assert "\x1b" not in shown
    assert len(shown) < 60_000


def test_numbers_and_durations_by_hand():
    numbers = {0.8125: "0.8125", 63.24: "63.2", 12345.678: "12,346", 0.0004: "4.0e-04", -0.5: "-0.5", 0.0: "0"}
    assert {value: format_number(value) for value in numbers} == numbers
    assert format_number(float("nan")) == "nan"
    durations = {
        0: "0.0 s",
        0.04: "40 ms",
        0.42: "420 ms",
        59.9: "59.9 s",
        250: "4 min 10 s",
        7500: "2 h 5 min",
        200_000: "2.3 days",
    }
    assert {seconds: format_duration(seconds) for seconds in durations} == durations


def cells(line):
    """Return the cells of a row of the steps: two spaces or more are between them."""
    return re.split(r" {2,}", line.strip())


STEP = {
    "reward/overall": 0.8125,
    "reward/accuracy": 0.75,
    "response_length/mean": 63.24,
    "actor/kl_loss": 0.00021,
    "actor/lr": 1e-6,
    "perf/throughput": 5123.4,
    "timing_s/step": 2.31,
    "unknown/key": 1.0,
}


def test_a_step_is_a_row_below_the_names_of_its_metrics(stream):
    console = Console(stream=stream)
    console.step(1, 60, STEP, seconds_left=110.0)
    console.step(12, 60, {"reward/overall": 0.5}, seconds_left=None)
    header, first, second = stream.getvalue().splitlines()
    names = ["step", "reward", "accuracy", "length", "KL", "lr", "tokens/s", "seconds", "left"]
    assert cells(header) == names
    row = ["1/60", "0.8125", "0.7500", "63.2", "2.1e-04", "1.0e-06", "5,123", "2.3", "1 min 50 s"]
    assert cells(first) == row
    assert cells(second) == ["12/60", "0.5000"]
    assert header.index("reward") + len("reward") == second.index("0.5000") + len("0.5000")


def test_the_rows_of_special_steps(stream):
    console = Console(stream=stream)
    console.step(0, 60, {"val/reward_score": 1.0, "timing_s/step": 2.0}, seconds_left=None)
    assert stream.getvalue() == ""  # a validation before the first step is no row
    counts = {"reward_function/num_failed": 0.0, "reward_function/num_timed_out": 2.0}
    console.step(60, 60, {"reward/overall": 1.0, **counts}, seconds_left=0.0)
    _header, row, trouble = stream.getvalue().splitlines()
    assert cells(row) == ["60/60", "1.0000"]  # no time left
    assert trouble.strip() == "rewards timed out: 2"
    quiet = Console(stream=stream, step_lines=False, progress=False)
    stream.truncate(0)
    quiet.step(1, 2, {}, seconds_left=None)
    quiet.table("Overview\x1b[2J", ("name\x1b[2J", "value"), [("[red]prompts[/red]\x1b[2J", "512")])
    quiet.warn("[disk] is nearly full\x1b[2J")
    text = stream.getvalue()
    assert "[red]prompts[/red]" in text
    assert text.endswith("warning: [disk] is nearly full\\x1b[2J\n")
    assert "\x1b" not in text


def progress(stream, *, total, waits, enabled=True, becomes=None):
    """Return what is printed of a phase that advances by one after each wait."""
    clock = Clock()
    with Console(stream=stream, clock=clock, progress=enabled).progress("gen", total) as advance:
        for seconds in waits:
            clock.now += seconds
            if becomes is not None:
                advance.set_total(becomes)
            advance(1)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("phase", "printed"),
    [
        (
            {"total": 100, "waits": [0.5] * 50},
            "gen  20/100  2/s, 40.0 s left\ngen  40/100  2/s, 30.0 s left\ngen  done in 25.0 s\n",
        ),
        ({"total": None, "waits": [10], "becomes": 4}, "gen  1/4  0.1/s, 30.0 s left\ngen  done in 10.0 s\n"),
        ({"total": 2, "waits": [1, 1]}, ""),
        ({"total": 2, "waits": [100], "enabled": False}, ""),
    ],
)
def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(stream, phase, printed):
    assert progress(stream, **phase) == printed


def test_completions_are_shown_with_prompt_ground_truth_and_reward(stream):
    parts = {"accuracy": 1.0, "format": 0.0}
    row = replace(ROW, prompt_id="val:3", prompt="<image> How many?", ground_truth=4, reward=0.5, parts=parts)
    row = replace(row, response="[/bold]\x1b[31m4\nthen 5")
    Console(stream=stream).completions("validation after step 5", [row])
    assert stream.getvalue() == (
        "validation after step 5 | val:3\n"
        "  prompt        <image> How many?\n"
        "  completion    [/bold]\\x1b[31m4\n"
        "                then 5\n"
        "  ground truth  4\n"
        "  reward        0.5 (accuracy 1, format 0)\n"
    )


def run_on_a_terminal(script: str, *, columns: int) -> str:
    """Return what a Python script prints on a terminal of this width, without escape sequences."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65536):
            output += chunk
    except OSError:  # raised when the other end of the pseudo-terminal is closed
        pass
    os.close(master)
    assert process.wait() == 0, output.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())


LONG_LINES = """
    from trigon.report.console import Console
    console = Console()
    metrics = {
        "reward/overall": 0.8125, "reward/accuracy": 0.75, "response_length/mean": 63.2, "actor/kl_loss": 0.0021,
        "actor/entropy": 1.234, "actor/grad_norm": 0.567, "actor/lr": 1e-6, "filter/rounds": 2.0,
        "reward_function/num_timed_out": 3.0,
        "perf/throughput": 5123.4, "timing_s/step": 2.31, "response_length/clip_ratio": 0.25,
    }
    console.step(12, 400, metrics, seconds_left=3540.0)
    console.warn("attention " * 30)
    console.print("run: /" + "x" * 200)
"""


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (80, "step  reward  accuracy  length  cut  rounds  seconds  left"),
        (120, "step  reward  accuracy  length  cut  rounds  KL  entropy  grad norm  tokens/s  seconds  left"),
    ],
)
def test_on_a_terminal_a_step_is_one_line_and_others_wrap_between_words(columns, names):
    lines = run_on_a_terminal(LONG_LINES, columns=columns).splitlines()
    path = "/" + "x" * 200
    assert any(line.rstrip().endswith(path) for line in lines)  # without a line break, so that it can be copied
    assert max(len(line) for line in lines if path not in line) <= columns
    assert cells(lines[0]) == cells(names)  # the most important ones that fit
    assert len(cells(lines[1])) == len(cells(names))
    assert cells(lines[1])[-1] == "59 min 0 s"
    assert lines[2].strip() == "rewards timed out: 3"
    words = " ".join(lines).split()
    assert words.count("attention") == 30
