"""Prints the tables of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trigon.report.console import Console, format_number
from trigon.tools.eval.results import Evaluation, ModelEvaluation, Summary
from trigon.tools.eval.statistics import Difference, Estimate

MAX_VALUES_SHOWN = 20
"""Values of a column that are printed; evaluation.json has all of them."""

MIN_CUT_FRACTION = 0.05
"""Fraction of completions that are cut from which there is a hint."""


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of an evaluation."""
    models = evaluation.models
    names = [short_name(each.model) for each in models]
    settings = evaluation.settings
    console.print(
        f"\ndata: {', '.join(settings['data'])}   reward: {settings['reward_function']}   n {settings['n']}, "
        f"temperature {settings['temperature']:g}, top_p {settings['top_p']:g}, at most {settings['max_tokens']} "
        f"tokens, seed {settings['seed']}"
    )
    rows = summary_rows([each.summary for each in models])
    console.table("Evaluation, with 95 % intervals by prompt", ("", *names), rows)
    for column in models[0].by:
        show_column(column, models, names, console)
    for each in models:
        if each.blind is not None:
            show_blind(each, console)
    if evaluation.comparisons:
        comparisons = [
            (
                short_name(each.model),
                show_difference(each.difference),
                show_p_value(each.adjusted_p_value),
                f"{each.difference.num_better:,}",
                f"{each.difference.num_worse:,}",
                f"{each.difference.num_prompts:,}",
            )
            for each in evaluation.comparisons
        ]
        console.table(
            f"Accuracy minus that of {names[0]}, paired by prompt (permutation test)",
            ("", "difference", "p", "better", "worse", "prompts"),
            comparisons,
        )
    for line in remarks(evaluation):
        console.print(line)
    console.print(f"rollouts: {' '.join(str(each.folder) for each in models)}   (trigon view FOLDER)")
    console.print(f"results:  {evaluation.output / 'evaluation.json'}")


def summary_rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return the rows of the table of results, one column for each summary."""
    first = summaries[0]
    name = "accuracy" if first.accuracy_name == "accuracy" else f"accuracy (score {first.accuracy_name!r})"
    rows: list[tuple[str, ...]] = [(name, *(show_estimate(each.accuracy) for each in summaries))]
    if max(first.pass_at, default=1) > 1:
        rows += [(f"pass@{k}", *(show_optional(each.pass_at.get(k)) for each in summaries)) for k in first.pass_at]
        rows += [
            (f"maj@{k}", *(show_optional(each.majority_at.get(k)) for each in summaries))
            for k in first.majority_at
            if k > 1
        ]
    for part in dict.fromkeys(part for each in summaries for part in each.parts):
        if part != first.accuracy_name:
            rows.append((f"score {part}", *(show_optional(each.parts.get(part)) for each in summaries)))
    rows += [
        ("tokens", *(f"{show_estimate(each.length)} max {each.max_length:,}" for each in summaries)),
        ("cut at the limit", *(f"{each.cut.value:.1%}" for each in summaries)),
        ("prompts / completions", *(f"{each.num_prompts:,} / {each.num_completions:,}" for each in summaries)),
    ]
    if any(each.num_failed or each.num_timeouts for each in summaries):
        rows.append(("not scored", *(f"{each.num_failed} failed, {each.num_timeouts} timed out" for each in summaries)))
    return rows


def show_column(column: str, models: Sequence[ModelEvaluation], names: Sequence[str], console: Console) -> None:
    """Print the accuracy for each value of a column."""
    first = models[0].by[column]
    rows = [
        (value, f"{summary.num_prompts:,}", *(show_value(each, column, value) for each in models))
        for value, summary in list(first.items())[:MAX_VALUES_SHOWN]
    ]
    title = f"Accuracy by {column}"
    if len(first) > MAX_VALUES_SHOWN:
        title += f" ({MAX_VALUES_SHOWN} of {len(first)} values; evaluation.json has all)"
    console.table(title, (column, "prompts", *names), rows)


def show_value(model: ModelEvaluation, column: str, value: str) -> str:
    """Return the accuracy for one value of a column as text; empty if the model has none."""
    summary = model.by[column].get(value)
    return "" if summary is None else show_estimate(summary.accuracy)


def show_blind(model: ModelEvaluation, console: Console) -> None:
    """Print what the images are worth."""
    blind = model.blind
    assert blind is not None
    difference = blind.difference
    console.table(
        "Does it need the images?",
        ("", short_name(model.model)),
        [
            ("accuracy with images", show_estimate(model.summary.accuracy)),
            ("accuracy with blank images", show_estimate(blind.summary.accuracy)),
            ("difference, paired by prompt", show_difference(difference)),
            ("p (permutation test)", show_p_value(difference.p_value)),
        ],
    )
    if blind.num_with_images < model.summary.num_prompts:
        console.print(f"{blind.num_with_images:,} of {model.summary.num_prompts:,} prompts have images or videos.")
    if difference.low > 0:
        accuracy = model.summary.accuracy.value
        if accuracy > 0 and blind.summary.accuracy.value >= 0:
            lost = f"{difference.value / accuracy:.0%} of its accuracy is lost"
        else:  # a reward that can be negative has no such share
            lost = f"its accuracy is lower by {difference.value:.4f}"
        console.print(f"It needs them: {lost} without the images.")
    elif difference.high < 0:
        console.print("It is better without the images: look at the rollouts.")
    else:
        console.print(
            "Not shown: the interval of the difference contains 0. Either the answers do not depend on the images, or "
            "there are too few prompts to tell."
        )


def remarks(evaluation: Evaluation) -> list[str]:
    """Return what a reader of the numbers has to know, one line each."""
    lines = []
    for each in evaluation.models:
        name = short_name(each.model)
        if each.skipped:
            counts = ", ".join(f"{count} {reason}" for reason, count in each.skipped.items())
            lines.append(f"{name}: {sum(each.skipped.values())} of {each.num_rows} rows are not in it ({counts})")
        if each.num_not_sampled:
            lines.append(f"{name}: {each.num_not_sampled} prompts are not in it, since they could not be sampled")
        if each.summary.cut.value >= MIN_CUT_FRACTION:
            lines.append(
                f"{name}: {each.summary.cut.value:.0%} of the completions were cut at "
                f"{evaluation.settings['max_tokens']} tokens; raise --max-tokens"
            )
        if max(each.summary.majority_at, default=1) > 1 and each.summary.no_answer >= MIN_CUT_FRACTION:
            lines.append(
                f"{name}: {each.summary.no_answer:.0%} of the completions have no answer by --answers "
                f"{evaluation.settings['answers']}, and do not vote in maj@k"
            )
    return lines


def short_name(model: str) -> str:
    """Return a model's name for a column of a table: the last two parts of a path."""
    return "/".join(Path(model).parts[-2:])


def show_estimate(estimate: Estimate) -> str:
    """Return a mean with its interval as text: 0.4635 [0.3944, 0.5341]."""
    value, low, high = (
        f"{number:.4f}" if abs(number) < 10 else format_number(number)
        for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def show_optional(estimate: Estimate | None) -> str:
    """Return a mean with its interval as text; empty for None."""
    return "" if estimate is None else show_estimate(estimate)


def show_difference(difference: Difference) -> str:
    """Return a difference with its sign and interval as text."""
    return f"{difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def show_p_value(p_value: float) -> str:
    """Return a p-value as text."""
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"
