"""Samples and scores a dataset with one or several models, and compares the results.

Prompts, engines, rewards and seeds are the same as in a run's validation (loop.py, assemble/), so
that the same settings give the same completions. The folder of an evaluation:

root/
  evaluation.json     every number; marks the folder as that of an evaluation
  config.yaml ...     with one model, its run folder: metrics.jsonl, rollouts/, images/, ...
  blind/              with one model, the run folder of its evaluation with blank images
  1-NAME/ 2-NAME/     with several models, the run folder of each, with its own blind/
  exported/1-NAME/    exports of checkpoints whose own folder cannot be written
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

from trigon.api import check_keywords, make_objects, name_in_config, name_reward
from trigon.assemble.data import open_evaluator, scan_datasets
from trigon.assemble.engines import Engines, open_engines
from trigon.assemble.options import make_validation_sampling_params
from trigon.assemble.parts import check_environment, open_parts
from trigon.assemble.preflight import RunObjects, open_rewards, open_validation_rewards
from trigon.assemble.run import open_reporter
from trigon.checkpoint.store import exported_step
from trigon.config.files import locate_sources
from trigon.config.load import check_overrides, dump_config
from trigon.config.names import Dtype
from trigon.config.paths import PYTHON_PREFIX, dataset_names, expand_path
from trigon.config.plan import make_plan
from trigon.config.schema import Config, describe_rewards
from trigon.data.images import ignore_pillow_warnings
from trigon.data.sources import Source, open_python_rows, open_source
from trigon.data.stream import Prompts
from trigon.errors import ConfigError, raises_at_caller
from trigon.loop import report_validation
from trigon.models.dtypes import DTYPES
from trigon.models.load import model_folder
from trigon.models.weight_files import stored_dtype
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.rollouts import IMAGES, RolloutRow, rollout_rows
from trigon.report.run import CONFIG, LOCK, METRICS, RunRecord
from trigon.report.run_folder import SKIPPED_ROWS, RunFolder
from trigon.rewards.callables import Reward
from trigon.rewards.pool import RewardPool
from trigon.system.files import write_json
from trigon.system.secrets import ARGUMENTS, ENVIRONMENT_ARGUMENTS, mask
from trigon.system.terminal import shorten
from trigon.tools.eval.results import (
    DATASET,
    Blind,
    Comparison,
    Evaluation,
    ModelEvaluation,
    PromptOutcome,
    accuracy_name,
    check_columns,
    compare_outcomes,
    default_ks,
    outcomes_of,
    show,
    summarize,
    summarize_by,
)
from trigon.tools.eval.settings import (
    SHIPPED_FORMS,
    SHORT_NAMES,
    AnswerForm,
    ModelSource,
    context_length,
    exported_folder,
    find_differences,
    find_model,
    given_options,
    known_settings,
    load_settings,
    recorded_of,
    without_other_arguments,
)
from trigon.tools.eval.statistics import CONFIDENCE, holm

_MAX_SHOWN = 60
"""Characters of a setting's value on the console."""

DATA = f"{PYTHON_PREFIX}validation"
"""What data.val_files is in an evaluation of Python objects."""

RESULT = "evaluation.json"
BLIND = "blind"
"""Folder of the evaluation without images, below that of the evaluation with them."""

EXPORTED = "exported"
_RUN_FILES = (CONFIG, METRICS, LOCK, SKIPPED_ROWS)
_RUN_FOLDERS = ("rollouts", IMAGES)
_MODEL_FOLDER = re.compile(r"\d+-.+")


@raises_at_caller
def evaluate(
    models: str | PurePath | Sequence[str | PurePath],
    data: Any = (),
    *,
    reward: Reward | PurePath | None = None,
    environment: str | Callable[..., Any] | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    limit: int | None = None,
    by: Sequence[str] = (),
    k: Sequence[int] = (),
    answers: AnswerForm | None = None,
    blind: bool = False,
    config: str | PurePath | None = None,
    options: Mapping[str, Any] | Sequence[str] = (),
    output: str | PurePath | None = None,
    console: Console | None = None,
    **keyword_options: Any,
) -> Evaluation:
    """Evaluate models on a dataset, and return accuracy, pass@k, scores and comparisons.

    Args:
        models: Hugging Face folders, hub ids, checkpoints, or run folders (their last checkpoint).
        data: as for trigon.train: a list of dicts, a datasets.Dataset, or files, folders and hub
            ids. Empty: the validation data of the run, if a model is one.
        reward, environment, tools: as for trigon.train. None: as in the first model that is a
            run. What a run was given as Python objects has to be given again.
        limit: use the first rows of each dataset only; None: all.
        by: columns of the dataset, for each value of which there is a summary as well.
        k: the k of pass@k and maj@k; empty: powers of two up to n.
        answers: where the answer of a completion is, for majority votes; None: as the shipped
            reward function has it, otherwise "auto".
        blind: evaluate again with images of one colour, and compare.
        config: a configuration to start from instead of a run's.
        options: options by the names of docs/configuration.md, dotted or nested, or `key=value`
            texts.
        output: folder for the rollouts and evaluation.json, a run folder as well; None: a new one
            in `evaluations`. What an earlier evaluation wrote in it is replaced, once all models
            and datasets have been found.
        console: for progress and warnings; None: standard output, which gets the tables too.
        **keyword_options: options by a short name (SHORT_NAMES): n, temperature, top_p, max_tokens,
            seed, engine, format_prompt, prompt_key, answer_key, image_key, image_dir; or sections,
            such as worker={"rollout": {"max_turns": 3}}.
    Raises: TypeError for an unknown argument; TrigonError, before the models are loaded where
        possible.
    """
    ignore_pillow_warnings()
    check_keywords(keyword_options, evaluate, short_names=SHORT_NAMES)
    shows, console = console is None, console or Console()
    overrides = [options] if isinstance(options, Mapping) else list(options)
    check_overrides(overrides)  # before a model is looked for on the hub
    sources = [find_model(str(each)) for each in ([models] if isinstance(models, str | PurePath) else models)]
    run_config = next((source.run_config for source in sources if source.run_config is not None), None)
    base = run_config if config is None else Path(config)
    recorded = [recorded_of(source) for source in sources]
    first: dict[str, Any] = {}
    if base is None:
        first = known_settings(next(filter(None, recorded), {}))
        if first:
            console.print(f"settings of the run that the model was exported from: {show_settings(first)}")
    else:
        console.print(f"settings: {base}, and the options of this evaluation")
        first = locate_run(base.parent) if config is None else {}
    names = dataset_names(data) if not isinstance(data, tuple) or data else []
    opened = {} if names is not None else {DATA: open_python_rows(data, spec=DATA, name="validation")}
    given = given_options(
        [DATA] if names is None else [names] if isinstance(names, str) else names,
        reward=None if reward is None else name_reward(reward),
        environment=None if environment is None else name_in_config(environment),
        tools=[name_in_config(tool) for tool in tools or ()],
        **keyword_options,
    )
    if base is not None:
        local = RunRecord(base.parent).local_sources() if config is None else None
        first = {**first, **without_other_arguments(base, given, local or {})}
    # Before anything is exported or downloaded, so that a wrong option is found at once.
    load = partial(load_settings, base, given, overrides, first=first)
    early = load(model_path=sources[0].spec, folder=Path(), context=None, weight_dtype=None).config
    ks = choose_ks(k, make_validation_sampling_params(early).n)
    form = answers or answer_form(early)
    objects = make_objects(early, sources=opened, reward=reward, environment=environment, tools=tools)
    if output is not None:
        check_output(expand_path(str(output)))
    find_all(sources, early, by, opened)
    folder = open_output(output, sources[0])
    settings = describe_settings(early, limit=limit, ks=ks, form=form)
    if not (folder / RESULT).exists():  # so that the next evaluation may replace what this one leaves
        write_json(folder / RESULT, {"settings": settings, "models": []})
    places = [label(number, source) for number, source in enumerate(sources, start=1)]
    paths = [
        exported_folder(source, folder / EXPORTED / place, warn=console.warn, on_progress=console.print)
        for source, place in zip(sources, places, strict=True)
    ]
    lengths = [length for path in paths if (length := context_length(model_folder(path))) is not None]
    outputs = [folder / place for place in places] if len(sources) > 1 else [folder]
    results: list[tuple[ModelEvaluation, list[PromptOutcome]]] = []
    with ExitStack() as stack:
        rewards = open_validation_rewards(early, objects) or open_rewards(early, objects)
        stack.callback(rewards.close)
        loaded = [
            load(
                model_path=path,
                folder=place,
                context=min(lengths, default=None),
                weight_dtype=stored_weight_dtype(path),
            )
            for path, place in zip(paths, outputs, strict=True)
        ]
        for warning in (*loaded[0].warnings, *warn_of_differences(sources, recorded, loaded[0].config)):
            console.warn(warning)
        rewards.ready()
        # Only now, so that an error until here costs nothing.
        remove_earlier(folder, kept=[Path(path) for path in paths])
        write_json(folder / RESULT, {"settings": settings, "models": []})
        warn = cache(console.warn)  # of several models, once
        for source, each, place in zip(sources, loaded, outputs, strict=True):
            if len(sources) > 1:
                console.print(f"model {len(results) + 1} of {len(sources)}: {source.spec}")
            results.append(
                evaluate_model(
                    source,
                    each.config,
                    rewards,
                    place,
                    console,
                    warn=warn,
                    by=by,
                    ks=ks,
                    form=form,
                    blind=blind,
                    limit=limit,
                    objects=objects,
                )
            )
    evaluation = Evaluation(
        models=tuple(model for model, _ in results),
        comparisons=compare_models(results),
        settings=settings,
        output=folder,
    )
    write_json(folder / RESULT, evaluation.to_json())
    if shows:
        show(evaluation, console)
    return evaluation


def evaluate_model(
    source: ModelSource,
    config: Config,
    rewards: RewardPool,
    output: Path,
    console: Console,
    *,
    warn: Callable[[str], None],
    by: Sequence[str],
    ks: Sequence[int],
    form: AnswerForm,
    blind: bool,
    limit: int | None,
    objects: RunObjects,
) -> tuple[ModelEvaluation, list[PromptOutcome]]:
    """Validate one model as a run does, and write its rollouts into the run folder output."""
    check_environment(config)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(output))
        folder.write_config(dump_config(config))
        parts = open_parts(config, objects, folder.path, warn, stack)
        report = stack.enter_context(open_reporter(config, folder, console, parts.processors, (), None))
        specs = config.data.val_files
        prompts = scan_datasets(config, specs, (), parts.builder, report, max_rows=limit, opened=objects.sources)
        parts.try_prompt(config, rewards, prompts[0])
        check_columns([prompts[0].row], by)  # all rows of a table have the same columns
        plan = make_plan(config, num_train_prompts=0)
        engines = open_engines(config, parts, plan, report, stack, shows_videos=prompts.shows_videos)
        with engines.rollout.awake(engines.trainer.weights(), version=source.step):
            take = partial(sample, config, engines, rewards, source.step)
            rows = take(prompts, report)
            accuracy = accuracy_name(rows)
            outcomes = outcomes_of(rows, accuracy=accuracy, form=form, ks=ks)
            without_images = None
            if blind and not (num_with_images := sum(bool(each.rows[0].images) for each in outcomes)):
                warn("no prompt has an image or a video: there is no evaluation without images")
            elif blind:
                console.print("the same prompts with blank images:")
                with RunFolder(output / BLIND) as hidden:
                    hidden.write_config(dump_config(config))
                    with open_reporter(config, hidden, console, parts.processors, (), None) as hidden_report:
                        rows = take(prompts.with_blank_media(), hidden_report)
                without = outcomes_of(rows, accuracy=accuracy, form=form, ks=ks)
                difference = compare_outcomes(outcomes, without)
                without_images = Blind(
                    summarize(without, accuracy=accuracy), difference, num_with_images, output / BLIND
                )
    columns = (*by, DATASET) if len(specs) > 1 and DATASET not in by else by
    evaluation = ModelEvaluation(
        model=source.spec,
        path=str(config.worker.actor.model.model_path),
        step=source.step,
        folder=output,
        summary=summarize(outcomes, accuracy=accuracy),
        by={column: summarize_by(outcomes, column, accuracy=accuracy) for column in columns},
        blind=without_images,
        num_rows=prompts.num_rows,
        skipped={str(reason): count for reason, count in prompts.num_skipped.items()},
        num_not_sampled=len(prompts) - len(outcomes),
    )
    return evaluation, outcomes


def sample(
    config: Config, engines: Engines, rewards: RewardPool, step: int, prompts: Prompts, report: Reporter
) -> list[RolloutRow]:
    """Sample and score all prompts, and write and return the rollouts. The engine must be awake."""
    evaluator = open_evaluator(config, prompts, report)
    assert evaluator is not None
    report.begin()
    groups = evaluator.sample(engines.rollout, rewards, phase=report.phase)
    tokens = config.trainer.rollout_tokens
    report.record(step, report_validation(report, step, groups, evaluator, shown=0, token_groups=tokens))
    return rollout_rows(groups)


def compare_models(results: Sequence[tuple[ModelEvaluation, list[PromptOutcome]]]) -> tuple[Comparison, ...]:
    """Return the comparison of each further model with the first."""
    (baseline, expected), *others = results
    differences = [compare_outcomes(outcomes, expected) for _, outcomes in others]
    p_values = holm([each.p_value for each in differences])
    return tuple(
        Comparison(model.model, baseline.model, difference, p_value)
        for (model, _), difference, p_value in zip(others, differences, p_values, strict=True)
    )


def locate_run(run: Path) -> dict[str, Any]:
    """Return the options of a run whose relative paths become paths of the run's own machine.

    They start from the folder in which the run was started, which may be another one than this.
    """
    record = RunRecord(run)
    return locate_sources(record.options(), record.local_sources() or {})


def warn_of_differences(
    sources: Sequence[ModelSource], recorded: Sequence[Mapping[str, Any]], config: Config
) -> Iterator[str]:
    """Yield a warning for each model whose run had other prompts, pixels, limits or sampling."""
    for source, settings in zip(sources, recorded, strict=True):
        differences = find_differences(settings, config)
        if differences:
            listed = "; ".join(
                f"{name} was {_shown(was)}, and is {_shown(now)}" for name, (was, now) in differences.items()
            )
            yield f"{source.spec} is not evaluated as its run validated it: {listed}"


def show_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as `key=value`, separated by spaces."""
    return " ".join(f"{name}={_shown(value)}" for name, value in settings.items())


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return shorten(text, _MAX_SHOWN)


def find_all(sources: Sequence[ModelSource], config: Config, by: Sequence[str], opened: Mapping[str, Source]) -> None:
    """Find models, datasets and columns, downloaded if needed. Raises: ModelError or DataError."""
    for source in sources:
        if source.kind != "checkpoint":
            model_folder(source.path)
    found = [opened[spec] if spec in opened else open_source(spec) for spec in config.data.val_files]
    check_columns([dict.fromkeys(found[0].columns)], by)


def choose_ks(ks: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Return the values of k, sorted. Raises: ConfigError if one is not possible."""
    for k in ks:
        if not 1 <= k <= num_samples:
            raise ConfigError(
                f"pass@{k} needs at least {k} completions of each prompt, and n is {num_samples}; raise n, or choose "
                f"k between 1 and {num_samples}"
            )
    return tuple(sorted(set(ks))) or default_ks(num_samples)


def answer_form(config: Config) -> AnswerForm:
    """Return where the reward function of a configuration finds the answer; "auto" if unknown."""
    reward = config.worker.reward.of_validation
    return SHIPPED_FORMS.get(reward, "auto") if isinstance(reward, str) else "auto"


def stored_weight_dtype(path: str) -> Dtype | None:
    """Return the format in which a model's weights are stored, if all have the same."""
    stored = stored_dtype(model_folder(path))
    return next((name for name, dtype in DTYPES.items() if dtype == stored), None)


def describe_settings(config: Config, *, limit: int | None, ks: Sequence[int], form: AnswerForm) -> dict[str, Any]:
    """Return what an evaluation is made with, for evaluation.json."""
    sampling = make_validation_sampling_params(config)
    reward, rollout = config.worker.reward, config.worker.rollout
    episodes = {
        "environment": rollout.environment,
        "environment_kwargs": mask(ENVIRONMENT_ARGUMENTS, rollout.environment_kwargs),
        "tools": list(rollout.tools),
        "max_turns": rollout.max_turns,
    }
    return {
        "data": list(config.data.val_files),
        "limit": limit,
        "format_prompt": config.data.format_prompt,
        "reward_function": describe_rewards(reward.of_validation),
        "reward_function_kwargs": mask(ARGUMENTS, reward.reward_function_kwargs),
        **(episodes if rollout.has_episodes else {}),
        "engine": rollout.name,
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "k": list(ks),
        "answers": form,
        "confidence": CONFIDENCE,
    }


# -- the folder of an evaluation -------------------------------------------------------------------


def label(number: int, source: ModelSource) -> str:
    """Return the name of the folder of one of several models."""
    name = re.sub(r"[^\w.-]+", "-", Path(source.spec).resolve().name).strip("-")
    return f"{number}-{name or 'model'}"


def check_output(folder: Path) -> None:
    """Raise ConfigError if a folder has files, and is none of an earlier evaluation."""
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / RESULT).is_file():
        raise ConfigError(f"{folder} exists and is no earlier evaluation; choose another --output")


def open_output(output: str | PurePath | None, source: ModelSource) -> Path:
    """Return the folder for the results, made if needed. An earlier evaluation stays in it.

    output: as check_output accepts it; None: a new folder in `evaluations`, named like the model.
    """
    if output is None:
        name = label(1, source).partition("-")[2]
        number = 1
        while (folder := Path("evaluations") / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
    else:
        folder = expand_path(str(output))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_earlier(folder: Path, *, kept: Collection[Path]) -> None:
    """Remove what an earlier evaluation wrote into a folder, but for these exports.

    Anything else stays, and so does what a link leads to. Raises: ConfigError as check_output.
    """
    check_output(folder)
    (folder / RESULT).unlink(missing_ok=True)
    models = [each for each in _folders(folder) if _MODEL_FOLDER.fullmatch(each.name)]
    blind = [each for run in (folder, *models) for each in _folders(run) if each.name == BLIND]
    for run in (folder, *models, *blind):
        for name in _RUN_FILES:
            (run / name).unlink(missing_ok=True)
        for entry in _folders(run):
            if entry.name in _RUN_FOLDERS:
                shutil.rmtree(entry)
    for run in (*blind, *models):
        _remove_empty(run)
    resolved = {path.resolve() for path in kept}
    exported = folder / EXPORTED
    for entry in _folders(exported):
        if exported_step(entry) is not None and entry.resolve() not in resolved:
            shutil.rmtree(entry)
    _remove_empty(exported)


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()] if folder.is_dir() else []


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
