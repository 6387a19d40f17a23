"""`trigon eval MODEL [MODEL ...] DATA`: accuracy with intervals, pass@k, scores, comparisons."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from trigon.cli.parser import ArgumentParser
from trigon.evaluation.answers import AnswerForm
from trigon.evaluation.models import find_model, looks_like_model
from trigon.names import SHIPPED_REWARDS
from trigon.report.console import Console, format_number
from trigon.system.variables import keep_compiled_code

if TYPE_CHECKING:
    from trigon.evaluation.results import Evaluation, ModelEvaluation, Summary
    from trigon.evaluation.statistics import Difference, Estimate

MAX_VALUES_SHOWN = 20
"""Values of a column that are printed; evaluation.json has all of them."""

MIN_CUT_FRACTION = 0.05
"""Fraction of completions that are cut from which there is a hint."""

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+=")


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.cli.main."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    overrides = [argument for argument in chosen.arguments if _OVERRIDE.match(argument)]
    names = [argument for argument in chosen.arguments if not _OVERRIDE.match(argument)]
    models, data = split_models(parser, names, chosen.data, chosen.config)
    console = Console(stream=sys.stderr if chosen.json else sys.stdout)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # see trigon.cli.train
    keep_compiled_code()
    # Imported here, so that errors of the command line do not wait for heavy libraries.
    from trigon.evaluation.evaluate import evaluate

    evaluation = evaluate(
        models,
        data,
        reward=chosen.reward,
        format_prompt=chosen.format_prompt,
        prompt_key=chosen.prompt_key,
        answer_key=chosen.answer_key,
        image_key=chosen.image_key,
        image_dir=chosen.image_dir,
        n=chosen.n,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        max_tokens=chosen.max_tokens,
        seed=chosen.seed,
        engine=chosen.engine,
        limit=chosen.limit,
        by=chosen.by,
        k=chosen.k,
        answers=chosen.answers,
        blind=chosen.blind,
        config=chosen.config,
        overrides=overrides,
        output=chosen.output,
        console=console,
    )
    if chosen.json:
        print(json.dumps(evaluation.to_json(), ensure_ascii=True, indent=2))
    else:
        show(evaluation, console)
    return 0


def split_models(
    parser: ArgumentParser, names: Sequence[str], data: Sequence[str], config: Path | None
) -> tuple[list[str], list[str]]:
    """Return the models and the datasets of the positional arguments and of --data.

    config: of --config. Raises: ModelError.
    """
    if not names:
        parser.error("name a model: trigon eval MODEL DATA")
    if data:
        return list(names), list(data)
    if len(names) == 1:
        # Of a run, the configuration names the data.
        if config is None and find_model(names[0]).run_config is None:
            parser.error(f"name the dataset: trigon eval {names[0]} DATA")
        return list(names), []
    *models, last = names
    if looks_like_model(last):
        parser.error(
            f"the last argument is the dataset, and {last} is a model or a run; name the dataset after the models, or "
            "with --data"
        )
    return models, [last]


def positive(text: str) -> int:
    """Return a text as an integer of at least 1. Raises: ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "whole number of at least 1"  # as argparse names it in its errors


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = ArgumentParser(
        prog="trigon eval",
        usage="trigon eval MODEL [MODEL ...] DATA [options] [key=value ...]",
        description="Sample and score a dataset with one or several models. Prints accuracy, pass@k, majority votes "
        "and all scores with 95 % confidence intervals that take the prompt as the unit, and compares models on the "
        "same prompts.",
        epilog="Settings that are not given are those of the first MODEL that is a run, or the defaults of `trigon "
        "options`; key=value sets any of them. docs/evaluation.md explains every number.",
        examples=[
            ("trigon eval runs/quickstart", "the last checkpoint, on the run's validation data"),
            ("trigon eval Qwen/Qwen2.5-VL-3B-Instruct test.jsonl --reward math -n 8", "pass@k and maj@k"),
            ("trigon eval run/global_step_50 run/global_step_100 test.jsonl", "two checkpoints, compared"),
            ("trigon eval runs/quickstart --blind", "with and without images"),
        ],
    )
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="MODEL ... DATA [key=value ...]",
        help="models: Hugging Face folders, hub ids, run folders (their last checkpoint) or checkpoints "
        "(global_step_N); then the dataset: a hub id with @split, a file or a folder; of a run, its own by default",
    )
    parser.add_argument("--data", action="append", default=[], help="the dataset; all other arguments are then models")
    parser.add_argument("--reward", metavar="REWARD", help=f"file.py:function, or one of {', '.join(SHIPPED_REWARDS)}")
    parser.add_argument("--format-prompt", metavar="TEMPLATE", help="Jinja template of the question, or its file")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column of the question")
    parser.add_argument("--answer-key", metavar="COLUMN", help="column of the ground truth")
    parser.add_argument("--image-key", metavar="COLUMN", help="column of the images")
    parser.add_argument("--image-dir", metavar="FOLDER", help="folder of relative image paths")
    parser.add_argument("-n", type=positive, metavar="N", help="completions for each prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="probability mass to sample from")
    parser.add_argument("--max-tokens", type=positive, metavar="TOKENS", help="maximum tokens of a completion")
    parser.add_argument("--seed", type=int, help="sampling seed")
    parser.add_argument("--engine", choices=["vllm", "transformers"], help="vllm if it is installed")
    parser.add_argument("--limit", type=positive, metavar="ROWS", help="use the first rows of the dataset only")
    parser.add_argument("--by", action="append", default=[], metavar="COLUMN", help="also for each value of a column")
    parser.add_argument(
        "--k", action="append", default=[], type=positive, help="of pass@k and maj@k; default: powers of two up to n"
    )
    parser.add_argument(
        "--answers",
        choices=get_args(AnswerForm),
        help="where a completion's answer is, for maj@k; default: as the shipped reward function has it, else auto: "
        "the last \\boxed{}, <answer> tag or `Answer:` line",
    )
    parser.add_argument(
        "--blind", action="store_true", help="repeat it with blank images, and say how much the answers need them"
    )
    parser.add_argument("--config", type=Path, metavar="YAML", help="a configuration to take the settings from")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for evaluation.json and the rollouts, which `trigon "
        "view` opens; default: a new one in evaluations/",
    )
    parser.add_argument("--json", action="store_true", help="print evaluation.json; progress goes to stderr")
    return parser


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
