"""`trigon eval MODEL [MODEL ...] DATA`: accuracy with intervals, pass@k, scores, comparisons."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from trigon.config.names import SHIPPED_REWARDS
from trigon.report.console import Console
from trigon.system.process_settings import keep_compiled_code
from trigon.tools.cli.parser import ArgumentParser, count
from trigon.tools.eval.settings import SHORT_NAMES, AnswerForm, find_model, looks_like_model

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+=")


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    overrides = [argument for argument in chosen.arguments if _OVERRIDE.match(argument)]
    names = [argument for argument in chosen.arguments if not _OVERRIDE.match(argument)]
    models, data = split_models(parser, names, chosen.data, chosen.config)
    console = Console(stream=sys.stderr if chosen.json else sys.stdout)
    keep_compiled_code()
    # Imported here, so that errors of the command line do not wait for heavy libraries.
    from trigon.tools.eval.evaluate import evaluate
    from trigon.tools.eval.results import show

    evaluation = evaluate(
        models,
        tuple(data),  # none: the validation data of the run
        reward=chosen.reward,
        limit=chosen.limit,
        by=chosen.by,
        k=chosen.k,
        answers=chosen.answers,
        blind=chosen.blind,
        config=chosen.config,
        options=overrides,
        output=chosen.output,
        console=console,
        **{name: getattr(chosen, name) for name in SHORT_NAMES},
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

    config: the file of --config. Raises: ModelError.
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
    parser.add_argument(
        "--data", action="append", default=[], help="the dataset; may be repeated; all other arguments are then models"
    )
    parser.add_argument("--reward", metavar="REWARD", help=f"file.py:function, or one of {', '.join(SHIPPED_REWARDS)}")
    parser.add_argument("--format-prompt", metavar="TEMPLATE", help="Jinja template of the question, or its file")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column of the question")
    parser.add_argument("--answer-key", metavar="COLUMN", help="column of the ground truth")
    parser.add_argument("--image-key", metavar="COLUMN", help="column of the images")
    parser.add_argument("--image-dir", metavar="FOLDER", help="folder of relative image paths")
    parser.add_argument("-n", type=count, metavar="N", help="completions for each prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="probability mass to sample from")
    parser.add_argument("--max-tokens", type=count, metavar="TOKENS", help="maximum tokens of a completion")
    parser.add_argument("--seed", type=int, help="sampling seed")
    parser.add_argument("--engine", choices=["vllm", "transformers"], help="vllm if it is installed")
    parser.add_argument("--limit", type=count, metavar="ROWS", help="use the first rows of the dataset only")
    parser.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="also for each value of a column; may be repeated"
    )
    parser.add_argument(
        "--k",
        action="append",
        default=[],
        type=count,
        help="of pass@k and maj@k; may be repeated; default: powers of two up to n",
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
