"""Checks that required options are set, and that local files and folders exist.

Each function reads few options, so that a problem with one of them hides few others. Hub ids are
not looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from trigon.config.names import SHIPPED_REWARDS
from trigon.config.paths import (
    DATASET_SUFFIXES,
    expand_path,
    is_inline_template,
    is_python_object,
    local_path,
    nearest_path,
    path_exists,
    split_dataset,
)
from trigon.config.rewards import RewardOption, reward_specs
from trigon.config.schema import Config

Paths = Mapping[str, str]
"""Local paths of a configuration, by the name of their option."""


def _require_model(config: Config) -> list[str]:
    if config.worker.actor.model.model_path:
        return []
    return ["worker.actor.model.model_path is not set; give a hub id (Qwen/Qwen2.5-VL-3B-Instruct) or a local folder"]


def _require_reward(config: Config) -> list[str]:
    if config.worker.reward.reward_function:
        return []
    return [
        "worker.reward.reward_function is not set; give file.py:function, or one of the shipped "
        f"{', '.join(SHIPPED_REWARDS)}"
    ]


def _check_reward_env(config: Config) -> list[str]:
    return [
        f"worker.reward.env has {name.partition('=')[0]!r}, but takes names of environment variables "
        "without values; export the variable, and give its name only, for example OPENAI_API_KEY"
        for name in config.worker.reward.env
        if not name.isidentifier()
    ]


def _check_reward_kwargs(config: Config) -> list[str]:
    reward = config.worker.reward
    if isinstance(reward.reward_function, str | None) or not reward.reward_function_kwargs:
        return []
    return [
        "worker.reward.reward_function_kwargs are arguments of a single reward function, and there is a list; give "
        "each its own: reward_function: [{function: ..., weight: ..., kwargs: {...}}]"
    ]


def _require_train_files(config: Config) -> list[str]:
    if config.data.train_files or config.trainer.val_only:
        return []
    return ["data.train_files is not set; give a hub id (hiyouga/geometry3k@train), a file or a folder"]


def _require_val_files(config: Config) -> list[str]:
    trainer = config.trainer
    if config.data.val_files or not (trainer.val_only or trainer.val_before_train or trainer.val_freq > 0):
        return []
    advice = (
        "give a hub id (hiyouga/geometry3k@test), a file or a folder"
        if trainer.val_only
        else "set it, or leave out trainer.val_before_train and trainer.val_freq"
    )
    return [f"data.val_files is not set, but validation is on; {advice}"]


def _format_prompt(config: Config) -> Paths:
    return _template("data.format_prompt", config.data.format_prompt)


def _chat_template(config: Config) -> Paths:
    return _template("data.override_chat_template", config.data.override_chat_template)


def _template(key: str, text: str | None) -> Paths:
    return {key: text} if text and not is_inline_template(text) else {}


def _train_files(config: Config) -> Paths:
    return {} if config.trainer.val_only else _datasets("data.train_files", config.data.train_files)


def _val_files(config: Config) -> Paths:
    return _datasets("data.val_files", config.data.val_files)


def _datasets(key: str, datasets: tuple[str, ...]) -> Paths:
    paths = {}
    for number, dataset in enumerate(datasets):
        if is_python_object(dataset):
            continue
        location, _ = split_dataset(dataset)
        if local_path(location, suffixes=DATASET_SUFFIXES) is not None:
            paths[f"{key}[{number}]" if len(datasets) > 1 else key] = location
    return paths


def _model(config: Config) -> Paths:
    return _local_model("worker.actor.model.model_path", config.worker.actor.model.model_path)


def _critic_model(config: Config) -> Paths:
    path = config.worker.critic.model.model_path if config.algorithm.adv_estimator == "gae" else None
    return _local_model("worker.critic.model.model_path", path)


def _tokenizer(config: Config) -> Paths:
    return _local_model("worker.actor.model.tokenizer_path", config.worker.actor.model.tokenizer_path)


def _local_model(key: str, path: str | None) -> Paths:
    return {key: path} if path and local_path(path) is not None else {}


def _reward(config: Config) -> Paths:
    reward = config.worker.reward
    return {
        **_reward_files("worker.reward.reward_function", reward.reward_function),
        **_reward_files("worker.reward.val_reward_function", reward.val_reward_function),
    }


def _reward_files(key: str, reward: RewardOption) -> Paths:
    specs = reward_specs(reward)
    return {
        f"{key}[{number}]" if len(specs) > 1 else key: spec.rpartition(":")[0] or spec
        for number, spec in enumerate(specs)
        if spec not in SHIPPED_REWARDS and not is_python_object(spec)
    }


def _writable(config: Config) -> Paths:
    key, paths = "worker.reward.writable", config.worker.reward.writable
    return {f"{key}[{number}]" if len(paths) > 1 else key: path for number, path in enumerate(paths)}


def _image_dir(config: Config) -> Paths:
    return {"data.image_dir": config.data.image_dir} if config.data.image_dir else {}


def _checkpoint(config: Config) -> Paths:
    path = config.trainer.load_checkpoint_path
    return {"trainer.load_checkpoint_path": path} if path else {}


def _episode_code(config: Config) -> Paths:
    rollout = config.worker.rollout
    texts = (*rollout.tools, *((rollout.environment,) if rollout.environment else ()))
    files = {text.rpartition(":")[0] for text in texts if not is_python_object(text)}
    return {file: file for file in files if file.endswith(".py")}


def local_sources(config: Config) -> dict[str, str]:
    """Return the absolute path of each file and folder that a run reads, by its text.

    These are models, datasets, images, templates and the user's code. Models and datasets that are
    not among them are hub ids, or objects of a program.
    """
    texts = {**_model(config), **_critic_model(config), **_tokenizer(config)}
    texts |= {**_datasets("data.train_files", config.data.train_files), **_val_files(config), **_image_dir(config)}
    texts |= {**_format_prompt(config), **_chat_template(config), **_reward(config), **_writable(config)}
    texts |= _episode_code(config)
    return {text: str(expand_path(text).absolute()) for text in texts.values()}


_LOCATED = (
    "data.val_files",
    "data.image_dir",
    "data.format_prompt",
    "data.override_chat_template",
    "worker.actor.model.tokenizer_path",
    "worker.reward.reward_function",
    "worker.reward.val_reward_function",
    "worker.reward.writable",
    "worker.rollout.environment",
    "worker.rollout.tools",
)


def locate_sources(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a run that only validates in which relative paths become absolute.

    values: the options of the run by name, which may have been started in another folder. sources:
    as local_sources returned them for it. A path that the run had, and that exists no more, is kept
    as it is only if it exists here.
    """
    located = {name: _locate(values[name], sources) for name in _LOCATED if name in values}
    return {name: value for name, value in located.items() if value != values[name]}


def _locate(value: Any, sources: Mapping[str, str]) -> Any:
    """Return a value of an option with absolute paths in place of relative ones.

    A path may be followed by `:function` or `@split`, and is in the entry `function` of a mapping.
    """
    if isinstance(value, list | tuple):
        return [_locate(each, sources) for each in value]
    if isinstance(value, Mapping):
        return {key: _locate(each, sources) if key == "function" else each for key, each in value.items()}
    if not isinstance(value, str):
        return value
    for path in (value, value.rpartition(":")[0], value.rpartition("@")[0]):
        if path in sources and (path_exists(sources[path]) or not path_exists(path)):
            return sources[path] + value.removeprefix(path)
    return value


def find_missing_objects(config: Config, known: Collection[str]) -> list[str]:
    """Return problems of datasets and functions that were another program's objects.

    known: those that the caller has.
    """
    data, reward, rollout = config.data, config.worker.reward, config.worker.rollout
    train_files = () if config.trainer.val_only else data.train_files
    given = [("data.train_files", each) for each in train_files]
    given += [("data.val_files", each) for each in data.val_files]
    given += [("worker.reward.reward_function", each) for each in reward_specs(reward.reward_function)]
    given += [("worker.reward.val_reward_function", each) for each in reward_specs(reward.val_reward_function)]
    given += [("worker.rollout.environment", each) for each in (rollout.environment,) if each]
    given += [("worker.rollout.tools", each) for each in rollout.tools]
    return [
        f"{key} is {text}, which a program gave to trigon.train as a Python object; give a file, or call trigon.train "
        "again"
        for key, text in given
        if is_python_object(text) and text not in known
    ]


_HINTS = {
    "data.format_prompt": "; an inline template contains {{ content }}",
    "data.override_chat_template": "; an inline template contains {{ }}",
    "worker.reward.reward_function": f"; it is file.py:function, or one of {', '.join(SHIPPED_REWARDS)}",
    "worker.reward.val_reward_function": f"; it is file.py:function, or one of {', '.join(SHIPPED_REWARDS)}",
}


def _check_files(config: Config, *, paths: Callable[[Config], Paths]) -> list[str]:
    """Return problems of missing files. paths: returns those of some options."""
    return [
        f"{key}: there is no {path} (looked for {expand_path(path).absolute()})"
        f"{nearest_path(path) or _HINTS.get(key.partition('[')[0], '')}"
        for key, path in paths(config).items()
        if not path_exists(path)
    ]


REQUIRED_CHECKS = (
    _require_model,
    _require_reward,
    _check_reward_env,
    _check_reward_kwargs,
    _require_train_files,
    _require_val_files,
)
"""Checks that options without a default are set."""

FILE_CHECKS = tuple(
    partial(_check_files, paths=paths)
    for paths in (
        _format_prompt,
        _chat_template,
        _train_files,
        _val_files,
        _model,
        _critic_model,
        _tokenizer,
        _reward,
        _writable,
        _image_dir,
        _checkpoint,
    )
)
"""Checks that files and folders exist."""
