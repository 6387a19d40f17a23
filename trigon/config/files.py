"""The options that name files and folders: what a run reads, and whether it is there.

Hub ids are not looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, assert_never

from trigon.config.names import SHIPPED_REWARDS
from trigon.config.options import value_of
from trigon.config.paths import (
    DATASET_SUFFIXES,
    expand_path,
    is_inline_template,
    is_local_dataset,
    is_python_object,
    local_path,
    nearest_path,
    path_exists,
    split_dataset,
)
from trigon.config.schema import Config, reward_specs

_Kind = Literal["dataset", "model", "template", "reward", "code", "path"]

PATH_OPTIONS: Mapping[str, _Kind] = {
    "data.format_prompt": "template",
    "data.override_chat_template": "template",
    "data.train_files": "dataset",
    "data.val_files": "dataset",
    "data.image_dir": "path",
    "worker.actor.model.model_path": "model",
    "worker.actor.model.tokenizer_path": "model",
    "worker.critic.model.model_path": "model",
    "worker.reward.reward_function": "reward",
    "worker.reward.val_reward_function": "reward",
    "worker.reward.writable": "path",
    "worker.rollout.environment": "code",
    "worker.rollout.tools": "code",
    "trainer.load_checkpoint_path": "path",
}
"""The options whose values are, or contain, paths on this machine."""

_OF_TRAINING = ("data.train_files", "worker.actor.model.model_path", "worker.critic.model.model_path")
_HINTS: Mapping[_Kind, str] = {
    "template": "; an inline template contains {{ }}",
    "reward": f"; it is file.py:function, or one of {', '.join(SHIPPED_REWARDS)}",
}


def find_missing(config: Config, name: str) -> list[str]:
    """Return problems of the files and folders of an option that do not exist."""
    if name == "data.train_files" and config.trainer.val_only:
        return []
    return [
        f"{place}: there is no {path} (looked for {expand_path(path).absolute()})"
        f"{nearest_path(path) or _HINTS.get(PATH_OPTIONS[name], '')}"
        for place, path in _paths_of(config, name).items()
        if not path_exists(path)
    ]


def local_sources(config: Config) -> dict[str, str]:
    """Return the absolute path of each file and folder that a run reads, by its text.

    These are models, datasets, images, templates and the user's code. Models and datasets that are
    not among them are hub ids, or objects of a program.
    """
    names = (name for name in PATH_OPTIONS if name != "trainer.load_checkpoint_path")
    texts = [path for name in names for path in _paths_of(config, name).values()]
    return {text: str(expand_path(text).absolute()) for text in texts}


def locate_sources(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a run that only validates in which relative paths become absolute.

    values: the options of the run by name, which may have been started in another folder. sources:
    as local_sources returned them for it. A path stays relative only if the file of the run no
    longer exists, and this folder has one of the same name.
    """
    names = [name for name in PATH_OPTIONS if name in values and name not in _OF_TRAINING]
    located = {name: _locate(values[name], sources) for name in names}
    return {name: value for name, value in located.items() if value != values[name]}


def is_same_code(text: str, of_run: str, sources: Mapping[str, str]) -> bool:
    """Return whether two texts name the same function or class, perhaps in two ways.

    of_run: the text in the configuration of a run, which may have been started in another folder.
    sources: what local_sources returned for that run. A file without a name stands for its function
    `main`.
    """
    return text == of_run or not _code_places(text, {}).isdisjoint(_code_places(of_run, sources))


def _code_places(text: str, sources: Mapping[str, str]) -> set[str]:
    """Return `file:name` with each absolute path that the file may have."""
    if is_python_object(text) or text in SHIPPED_REWARDS:
        return {text}
    path, _, name = text.rpartition(":") if ":" in text else (text, "", "main")
    return {f"{expand_path(each).resolve()}:{name}" for each in (path, sources.get(path, path))}


def find_missing_objects(config: Config, known: Collection[str]) -> list[str]:
    """Return problems of datasets and functions that were Python objects of another program.

    known: the objects that the caller has.
    """
    return [
        f"{name} is {text}, which a program gave to trigon.train as a Python object; give a file, or call trigon.train "
        "again"
        for name in PATH_OPTIONS
        for text in _texts_of(config, name)
        if is_python_object(text) and text not in known
        if not (name == "data.train_files" and config.trainer.val_only)
    ]


def _texts_of(config: Config, name: str) -> tuple[str, ...]:
    """Return the texts in the value of an option, each of which has one path at most."""
    if name == "worker.critic.model.model_path" and not config.algorithm.has_values:
        return ()
    value = value_of(config, name)
    if PATH_OPTIONS[name] == "reward":
        return reward_specs(value)
    return ((value,) if value else ()) if isinstance(value, str | None) else tuple(value)


def _paths_of(config: Config, name: str) -> dict[str, str]:
    """Return the local paths of an option by their place: {"data.train_files[1]": "b.jsonl"}."""
    texts = _texts_of(config, name)
    paths = {
        f"{name}[{number}]" if len(texts) > 1 else name: _path_in(text, PATH_OPTIONS[name])
        for number, text in enumerate(texts)
    }
    return {place: path for place, path in paths.items() if path is not None}


def _path_in(text: str, kind: _Kind) -> str | None:
    """Return the path in a text; None if it is a hub id, a template, or the name of something."""
    if is_python_object(text):
        return None
    match kind:
        case "template":
            return None if is_inline_template(text) else text
        case "dataset":
            location, _ = split_dataset(text)
            return None if local_path(location, suffixes=DATASET_SUFFIXES) is None else location
        case "model":
            return None if local_path(text) is None else text
        case "reward":
            return None if text in SHIPPED_REWARDS else text.rpartition(":")[0] or text
        case "code":
            file = text.rpartition(":")[0]
            return file if file.endswith(".py") else None
        case "path":
            return text
        case _:
            assert_never(kind)


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


def hub_names(config: Config) -> list[str]:
    """Return the models and datasets that are not in local folders, and may be downloaded."""
    model, data = config.worker.actor.model, config.data
    paths = (model.model_path, model.tokenizer_path, config.critic_model_path)
    models = [path for path in paths if path and local_path(path) is None]
    datasets = [
        split_dataset(spec)[0]
        for spec in (*data.train_files, *data.val_files)
        if not is_local_dataset(spec) and not is_python_object(spec)
    ]
    return list(dict.fromkeys((*models, *datasets)))
