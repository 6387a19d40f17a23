"""Trigon from Python: training with Python objects.

The names that users import are in trigon/__init__.py. Imports nothing heavy: torch, transformers
and vLLM are imported when a run starts, after the errors that can be found without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias

from trigon.assemble.start import StopSignals, TrainResult, start_run
from trigon.config.legacy import OTHER_NAMES, nearest_option
from trigon.config.load import load_config
from trigon.config.options import options as all_options
from trigon.config.paths import PYTHON_PREFIX, dataset_names, expand_path
from trigon.config.schema import Config
from trigon.errors import ConfigError, raises_at_caller
from trigon.rewards.callables import Reward, describe_reward, name_of, reward_terms
from trigon.rewards.contract import short_repr
from trigon.system.terminal import did_you_mean

if TYPE_CHECKING:
    from trigon.assemble.preflight import RunObjects
    from trigon.data.sources import Source
    from trigon.report.delivery import Logger
    from trigon.rewards.load import RewardTerm
    from trigon.types import RolloutGroup

    Data: TypeAlias = str | PurePath | Sequence[str | PurePath] | Sequence[Mapping[str, Any]] | Any
    """Files, folders and hub ids as in a YAML file, a list of dicts, or a datasets.Dataset."""

TRAIN = f"{PYTHON_PREFIX}train"
"""What data.train_files is in a run whose training data is a Python object."""
VALIDATION = f"{PYTHON_PREFIX}validation"

_OTHER_ARGUMENTS = {
    "args": "options",
    "callback": "on_step",
    "callbacks": "on_step",
    "eval_dataset": "val_data",
    "hooks": "on_step",
    "train_dataset": "data",
}
"""Arguments of other libraries' trainers -> the one that is meant, for suggestions."""


@raises_at_caller
def train(
    *,
    model: str | PurePath | None = None,
    data: Data | None = None,
    reward: Reward | PurePath | None = None,
    val_data: Data | None = None,
    val_reward: Reward | PurePath | None = None,
    environment: str | Callable[..., Any] | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    config: str | PurePath | None = None,
    options: Mapping[str, Any] | None = None,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    on_rollouts: Callable[[Sequence[RolloutGroup]], object] | None = None,
    loggers: str | Sequence[str | Logger] | None = None,
    export_to: str | PurePath | None = None,
    **keyword_options: Any,
) -> TrainResult:
    """Train a model in this process, and return where the results are. See docs/python.md.

    A run that has checkpoints in its folder continues after the last one, as on the command line:
    trainer.experiment_name or trainer.save_checkpoint_path choose the folder.

    Args:
        model: a hub id or a folder (worker.actor.model.model_path).
        data: the training data (data.train_files): a list of dicts, of which images may be PIL
            images; a datasets.Dataset; or files, folders and hub ids.
        reward: `file.py:function`, a shipped name, a function, or a list of functions or (function,
            weight), whose weighted sum is the reward (worker.reward.reward_function).
        val_data: the validation data (data.val_files).
        val_reward: the reward of validation, given like reward; None: the same.
        environment: in which completions of several turns act: a class, or `file.py:Class`
            (worker.rollout.environment). See docs/agents.md.
        tools: functions that the model may call, each a function, `file.py:function`, or the name
            of a built-in one (worker.rollout.tools).
        config: a YAML file to start from.
        options: options by the names of docs/configuration.md, dotted or nested.
        on_step: called with (step, metrics) when a step is finished and its checkpoint, if one is
            due, is saved. metrics: all numbers of the step in metrics.jsonl. It may return "save",
            to save the step, or "stop", to save it and end the run.
        on_rollouts: called with the groups of a step, a list of RolloutGroup, when they are scored,
            before the update. An error in a hook ends the run, and is raised here.
        loggers: names, which replace trainer.logger, and objects with the methods of a logger,
            which are added to it: without a name among them, trainer.logger stays. A single name
            may be text.
        export_to: folder in which the last checkpoint is written as a Hugging Face model, unless a
            signal stopped the run.
        **keyword_options: further options, which replace those in `options`: trainer={"max_steps":
            20}. The other arguments replace both.
    Returns: with stopped=True after "stop", Ctrl-C or SIGTERM, which let the current step end and
        save it; a second signal acts at once. They are handled in the main thread only.
    Raises: TypeError for an unknown argument; ConfigError with all problems of the options;
        RewardError if a reward function cannot be sent to the reward workers, and EpisodeError for
        an environment or a tool; DataError, and other
        TrigonErrors. Most are raised before the models are loaded.
    """
    check_type("export_to", export_to, str | PurePath, "the path of a folder")
    given = read_arguments(
        model=model,
        data=data,
        reward=reward,
        val_data=val_data,
        val_reward=val_reward,
        environment=environment,
        tools=tools,
        config=config,
        loggers=loggers,
        options=options,
        keyword_options=keyword_options,
    )
    loaded = load_config(given.config, given.options, python_objects=given.objects)
    objects = make_objects(
        loaded.config,
        sources={spec: open_rows(dataset, spec) for spec, dataset in given.data.items()},
        reward=reward,
        val_reward=val_reward,
        environment=environment,
        tools=tools,
        on_step=on_step,
        on_rollouts=on_rollouts,
    )
    return start_run(
        loaded,
        stop=StopSignals(owns_process=False),
        export_to=None if export_to is None else expand_path(str(export_to)),
        loggers=given.loggers,
        objects=objects,
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of train or trigon.plan, as a configuration and Python objects.

    config, options: what load_config takes, options with the names of Python objects. objects:
    these names. data: the datasets among them, by their names.
    """

    config: Path | None
    options: Sequence[Mapping[str, Any]]
    objects: Collection[str]
    data: Mapping[str, Any]
    loggers: Sequence[Logger]


def read_arguments(
    *,
    model: str | PurePath | None,
    data: Data | None,
    reward: Reward | PurePath | None,
    val_data: Data | None,
    config: str | PurePath | None,
    loggers: str | Sequence[str | Logger] | None,
    options: Mapping[str, Any] | None,
    keyword_options: Mapping[str, Any],
    val_reward: Reward | PurePath | None = None,
    environment: str | Callable[..., Any] | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    caller: Callable[..., Any] = train,
) -> Arguments:
    """Return the arguments of train. caller: the function that got them.

    Raises: TypeError for an unknown argument; ConfigError for one of another type.
    """
    check_keywords(keyword_options, caller)
    check_type("model", model, str | PurePath, "a hub id or the path of a folder")
    check_type("config", config, str | PurePath, "the path of a YAML file, and single options as `options`")
    check_type("options", options, Mapping, "a dict such as {'trainer.max_steps': 20}")
    check_type("tools", tools, list | tuple, "a list of functions and names")
    named: dict[str, Any] = {}
    datasets: dict[str, Any] = {}
    if model is not None:
        named["worker.actor.model.model_path"] = str(model)
    for key, spec, given in (("data.train_files", TRAIN, data), ("data.val_files", VALIDATION, val_data)):
        if given is not None:
            names = dataset_names(given)
            named[key] = spec if names is None else names
            datasets |= {spec: given} if names is None else {}
    for key, function in (("reward_function", reward), ("val_reward_function", val_reward)):
        if function is not None:
            named[f"worker.reward.{key}"] = name_reward(function)
    if environment is not None:
        named["worker.rollout.environment"] = name_in_config(environment)
    if tools:
        named["worker.rollout.tools"] = [name_in_config(tool) for tool in tools]
    objects = {
        *datasets,
        *(name_reward(each) for each in (reward, val_reward) if not isinstance(each, str | PurePath | None)),
        *(name_in_config(each) for each in (environment, *(tools or ())) if not isinstance(each, str | None)),
    }
    log_names, log_objects = _split_loggers(loggers)
    if log_names:
        named["trainer.logger"] = log_names
    return Arguments(
        config=None if config is None else Path(config),
        options=[dict(options or {}), keyword_options, named],
        objects=objects,
        data=datasets,
        loggers=log_objects,
    )


def make_objects(
    config: Config,
    *,
    sources: Mapping[str, Source],
    reward: Reward | PurePath | None,
    environment: str | Callable[..., Any] | None,
    tools: Sequence[str | Callable[..., Any]] | None,
    val_reward: Reward | PurePath | None = None,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    on_rollouts: Callable[[Sequence[RolloutGroup]], object] | None = None,
) -> RunObjects:
    """Return what train or evaluate was given as Python objects, for the run.

    sources: the opened datasets among them. The others are as for train; texts are in the
    configuration, and need no object.
    Raises: RewardError, EpisodeError.
    """
    from trigon.assemble.preflight import RunObjects
    from trigon.environments.source import find_environment, find_tools
    from trigon.report.delivery import Hooks

    def terms(function: Reward | PurePath | None, kwargs: Mapping[str, Any]) -> Sequence[RewardTerm] | None:
        return None if isinstance(function, str | PurePath | None) else reward_terms(function, kwargs=kwargs)

    return RunObjects(
        sources=sources,
        reward=terms(reward, config.worker.reward.reward_function_kwargs),
        val_reward=terms(val_reward, {}),
        hooks=Hooks(on_step, on_rollouts),
        environment=None if environment is None else find_environment(environment),
        tools=find_tools(tools or ()),
    )


def name_reward(reward: Reward | PurePath) -> str:
    """Return a reward function as the text of an option."""
    return str(reward) if isinstance(reward, str | PurePath) else f"{PYTHON_PREFIX}{describe_reward(reward)}"


def check_type(name: str, given: object, kind: type | UnionType, remedy: str) -> None:
    """Raise ConfigError for an argument of another type. None passes. remedy: what to give."""
    if given is not None and not isinstance(given, kind):
        raise ConfigError(f"{name} is {short_repr(given)} ({type(given).__name__}); give {remedy}")


def name_in_config(code: str | Callable[..., Any]) -> str:
    """Return an environment or a tool as the text of an option."""
    return code if isinstance(code, str) else f"{PYTHON_PREFIX}{name_of(code)}"


def _split_loggers(loggers: Any) -> tuple[list[str], list[Logger]]:
    """Return the names among loggers, and the objects. Raises: ConfigError if it is no list."""
    if isinstance(loggers, str):
        return [loggers], []
    if loggers is not None and not isinstance(loggers, list | tuple):
        raise ConfigError(
            f"loggers is a {type(loggers).__name__}; give a list of names and of objects with the methods of a logger: "
            "loggers=['console', mine]"
        )
    names = [each for each in loggers or () if isinstance(each, str)]
    return names, [each for each in loggers or () if not isinstance(each, str)]


def check_keywords(
    keywords: Mapping[str, Any], function: Callable[..., object], *, short_names: Collection[str] = ()
) -> None:
    """Raise TypeError for an argument that is neither one of the function nor an option.

    short_names: of options, which the function takes as well.
    """
    for key in keywords:
        if "." in key or key in Config.model_fields or key in short_names:
            continue
        parameters = inspect.signature(function).parameters.values()
        own = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]
        hint = did_you_mean(_OTHER_ARGUMENTS.get(key, key), [*own, *short_names])
        is_option = key in OTHER_NAMES or any(option.path[-1] == key for option in all_options().values())
        if not hint or is_option:
            hint = f"; if {(name := nearest_option(key))} is meant, give options={{{name!r}: ...}}"
        raise TypeError(f"{function.__name__}() has no argument {key!r}{hint}")


def open_rows(data: Any, spec: str) -> Source:
    from trigon.data.sources import open_python_rows

    return open_python_rows(data, spec=spec, name=spec.removeprefix(PYTHON_PREFIX))
