"""`trigon score ROLLOUTS REWARD [REWARD]`: scores stored rollouts again, and compares scores."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from trigon.config.names import SHIPPED_REWARDS
from trigon.config.schema import RewardConfig
from trigon.report.console import Console
from trigon.report.rollouts import SPLITS, to_json_line
from trigon.system.confinement.options import ConfinementLevel
from trigon.system.terminal import format_duration, format_number
from trigon.tools.cli.parser import ArgumentParser, count, number, writing

if TYPE_CHECKING:
    from trigon.tools.eval.score import Agreement, Bin, RewardSummary, ScoreResult

NUM_SHOWN = 10
"""Disagreements that are printed by default."""

BAR_CHARACTERS = 40
SCORES = "the scores"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if len(chosen.rewards) > 2:
        parser.error(f"{len(chosen.rewards)} reward functions are given; one or two can be")
    console = Console(stream=sys.stderr if chosen.json else sys.stdout)
    if chosen.output is not None:
        check_output(chosen.output)
    start = time.monotonic()
    from trigon.tools.eval.score import score  # here, as it loads numpy

    result = score(
        chosen.rollouts,
        chosen.rewards,
        kwargs=chosen.kwargs or None,
        splits=chosen.split or SPLITS,
        steps=None if chosen.steps is None else StepRanges(chosen.steps),
        limit=chosen.limit,
        part=chosen.part,
        num_workers=chosen.workers,
        timeout_seconds=chosen.timeout,
        max_memory_gb=chosen.max_memory_gb,
        env=chosen.env,
        confinement=chosen.confinement,
        console=console,
    )
    # Printed before they are written, so that a full disk loses the file only.
    if chosen.json:
        print(json.dumps(result.to_json(), ensure_ascii=True, indent=2), flush=True)
    else:
        show(result, console, num_shown=chosen.show, seconds=time.monotonic() - start)
    if chosen.output is not None:
        with writing(chosen.output, SCORES), chosen.output.open("wb") as file:
            file.writelines(score_lines(result))
        console.print(f"scores: {chosen.output}")
    return 0


class StepRanges:
    """All steps from the first to the last of some ranges."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = ranges

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and any(first <= step <= last for first, last in self._ranges)


def read_ranges(text: str) -> list[tuple[int, int]]:
    """Return the first and last step of each range in "0,10-20". Raises: as argparse asks."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ArgumentTypeError(f"{text!r} is not a list of steps such as 12, 10-20 or 0,10-20")
        ranges.append((int(first), int(last) if dash else int(first)))
    return ranges


def read_kwargs(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a JSON text. Raises: as argparse asks."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ArgumentTypeError(f'{text!r} is not a JSON object such as {{"format_weight": 0.2}}')
    return content


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon score",
        description="Score stored rollouts with a reward function, in reward workers as in training. Prints the "
        "distribution, the failures and the slowest, and where the scores differ from the stored ones; with a second "
        "reward function, where the two differ.",
        examples=[
            ("trigon score runs/quickstart math", "the same scores again?"),
            ("trigon score runs/quickstart reward.py:old reward.py:new", "where two functions differ"),
            ("trigon score runs/quickstart math --split validation --steps 0-40", "some of the rollouts"),
        ],
    )
    parser.add_argument("rollouts", metavar="ROLLOUTS", help="a run folder, or a file of its folder rollouts/")
    parser.add_argument(
        "rewards",
        nargs="+",
        metavar="REWARD",
        help=f"file.py:function, or one of {', '.join(SHIPPED_REWARDS)}; one or two",
    )
    parser.add_argument(
        "--split", action="append", choices=SPLITS, help="of a run: these rollouts only; may be repeated"
    )
    parser.add_argument("--steps", type=read_ranges, metavar="STEPS", help="of a run: 12, 10-20 or 0,10-20")
    parser.add_argument("--limit", type=count, metavar="N", help="score the first rollouts only")
    parser.add_argument("--part", default="overall", metavar="SCORE", help="the score that is compared (%(default)s)")
    parser.add_argument(
        "--kwargs",
        action="append",
        type=read_kwargs,
        metavar="JSON",
        help="keyword arguments of the reward function; once for each, in order; default: those of the run for its "
        "own reward function",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="as worker.reward.env")
    parser.add_argument(
        "--confinement", choices=get_args(ConfinementLevel), default="default", help="as worker.reward.confinement"
    )
    parser.add_argument("--workers", type=count, metavar="N", help="reward workers; default: the usable CPUs")
    parser.add_argument(
        "--timeout",
        type=number(0.001, 1e6),
        default=RewardConfig().timeout_seconds,
        metavar="SECONDS",
        help="for each (%(default)g)",
    )
    parser.add_argument(
        "--max-memory-gb",
        type=number(1, 100_000),
        default=RewardConfig().max_memory_gb,
        metavar="GIB",
        help="as worker.reward.max_memory_gb (%(default)g)",
    )
    parser.add_argument(
        "--show",
        type=number(0, whole=True),
        default=NUM_SHOWN,
        metavar="N",
        help="disagreements that are printed (%(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the scores of every rollout as JSON lines")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    return parser


def show(result: ScoreResult, console: Console, *, num_shown: int, seconds: float) -> None:
    """Print the result. num_shown: most disagreements. seconds: time of the whole command."""
    console.print(f"{len(result.completions):,} rollouts of {result.rollouts}, scored in {format_duration(seconds)}")
    for summary in result.rewards:
        show_reward(summary, console)
    for agreement in result.with_stored:
        show_agreement(agreement, console, num_shown=0 if result.between is not None else num_shown)
    if result.between is not None:
        show_agreement(result.between, console, num_shown=num_shown)


def show_reward(summary: RewardSummary, console: Console) -> None:
    """Print the scores of one reward function."""
    console.print(
        f"\n{summary.reward}: {summary.num_scored:,} scored, {summary.num_failed:,} failed, {summary.num_timeouts:,} "
        f"timed out; {format_duration(summary.total_seconds)} in the function, median "
        f"{format_duration(summary.median_seconds)}, maximum {format_duration(summary.max_seconds)}"
    )
    rows = [
        (name, f"{mean.value:.4f}", f"[{mean.low:.4f}, {mean.high:.4f}]", f"{mean.num_values:,}")
        for name, mean in summary.parts.items()
    ]
    if rows:
        console.table("Mean of each score", ("score", "mean", "95 % interval", "completions"), rows)
        console.print("\n".join(("distribution of overall", *draw(summary.distribution))))
    if summary.failures:
        console.table(
            "Failures",
            ("completions", "error of the first", "where"),
            [(f"{failure.count:,}", failure.error, failure.example) for failure in summary.failures[:NUM_SHOWN]],
        )
    if summary.max_seconds > 0:
        slow = ", ".join(f"{each.place} {format_duration(each.seconds)}" for each in summary.slowest[:3])
        console.print(f"slowest: {slow}")


def draw(bins: Sequence[Bin]) -> list[str]:
    """Return the lines of a bar chart."""
    most = max((each.count for each in bins), default=1)
    labels = [
        format_number(each.low) if each.low == each.high else f"{each.low:.3g} to {each.high:.3g}" for each in bins
    ]
    width = max(map(len, labels), default=0)
    return [
        f"  {name:>{width}}  {'#' * -(-each.count * BAR_CHARACTERS // most):<{BAR_CHARACTERS}}  {each.count:,}"
        for name, each in zip(labels, bins, strict=True)
    ]


def show_agreement(agreement: Agreement, console: Console, *, num_shown: int) -> None:
    """Print how two scores agree, and some completions on which they do not."""
    names = f"{agreement.first} and {agreement.second}"
    if not agreement.num_compared:
        console.print(f"\n{names}: no completion has the score {agreement.part!r} of both")
        return
    rate = agreement.agreement
    console.print(
        f"\n{names} agree on {agreement.part!r} for {rate.value:.2%} [{rate.low:.2%}, {rate.high:.2%}] of "
        f"{agreement.num_compared:,} completions"
        + (
            f"; {agreement.first} is higher for {agreement.num_higher:,} and lower for {agreement.num_lower:,}, on "
            f"average by {agreement.mean_difference:+.4f}"
            if agreement.disagreements
            else ""
        )
        + (f"; {agreement.num_only_one:,} are scored by one only" if agreement.num_only_one else "")
    )
    rows = [
        (each.place, f"{each.first:.4g}", f"{each.second:.4g}", each.ground_truth[:40], each.ending[-80:])
        for each in agreement.disagreements[:num_shown]
    ]
    if rows:
        console.table(
            f"Disagreements ({len(rows)} of {len(agreement.disagreements):,}; --json lists more)",
            ("completion", agreement.first, agreement.second, "ground truth", "end of the completion"),
            rows,
        )


def check_output(path: Path) -> None:
    """Make the folder of a file, and raise ConfigError if the file cannot be written."""
    with writing(path, SCORES):
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()


def score_lines(result: ScoreResult) -> Iterator[bytes]:
    """Yield the scores of each rollout as a line of JSON."""
    for each in result.completions:
        scores = [
            {"reward": summary.reward, "parts": score.parts, "outcome": score.outcome, "error": score.error}
            | {"seconds": seconds}
            for summary, score, seconds in zip(result.rewards, each.scores, each.seconds, strict=True)
        ]
        place = {"file": each.file, "line": each.line, "step": each.step, "split": each.split}
        yield to_json_line({**place, "prompt_id": each.prompt_id, "sample": each.sample, "scores": scores})
