"""From a YAML file and a command line to one frozen configuration: defaults < YAML < command line.

Every problem is found before any is reported, with the place it was written at. Knows files, YAML and the tables of
options.py and legacy.py; refuses to know what any option is for, and imports nothing heavy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import yaml
from pydantic import ValidationError
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trigon.config.checks import check, refuse
from trigon.config.legacy import ABSENT, FOREIGN_SECTIONS, RENAMED, RETIRED, renamed_file, retired_key
from trigon.config.options import KeyPath, Option, options, sections
from trigon.config.schema import Config
from trigon.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration that passed every check, and what its reader should be told."""

    config: Config
    warnings: tuple[str, ...]


def split_arguments(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the YAML file and the `key=value` overrides of a command line.

    The file is `config=run.yaml`, anywhere, or a first argument that ends in .yaml or .yml.
    Raises: ConfigError if an argument is neither, or two files are named.
    """
    paths: list[str] = []
    overrides: list[str] = []
    for position, argument in enumerate(argv):
        key, equals, value = argument.partition("=")
        if position == 0 and argument.endswith((".yaml", ".yml")) and (not equals or "/" in key):
            paths.append(argument)
        elif key == "config" and value:
            paths.append(value)
        elif equals and key.strip() and key != "config":
            overrides.append(argument)
        elif not argument.strip():
            raise ConfigError(
                "an argument is only blanks: a line of the script ends in a backslash and a space; "
                "remove the space, or the lines after it are not part of the command"
            )
        else:
            raise ConfigError(f"cannot read the argument {argument!r}: write config=run.yaml, or key=value")
    if len(paths) > 1:
        raise ConfigError(f"two configuration files are named, {paths[0]} and {paths[1]}: keep one")
    return (Path(paths[0]) if paths else None), overrides


def load_config(path: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    """Return the checked configuration of a YAML file (None: defaults only) and of `key=value` overrides.

    Raises: ConfigError, with every problem in one message.
    """
    reading = _Reading()
    if path is not None:
        reading.read_yaml(_read_text(path), str(path))
    for override in overrides:
        reading.read_override(override)
    config = reading.config()
    return LoadedConfig(config, (*reading.warnings, *check(config)))


def dump_config(config: Config) -> str:
    """Return the whole configuration, defaults included, as YAML that load_config reads back to the same one."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=120)


class _Yaml(yaml.SafeLoader):
    """YAML in which 1e-6 is a number, as in YAML 1.2 and in Python; PyYAML wants 1.0e-6."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was written: its YAML node, and the place, for messages."""

    node: Node
    where: str


class _Reading:
    """What has been read so far: values by path, a later one in place of an earlier one."""

    def __init__(self) -> None:
        self.given: dict[KeyPath, _Given] = {}
        self.retired: dict[str, tuple[str, _Given]] = {}
        self.warnings: list[str] = []
        self.problems: list[str] = []

    def read_yaml(self, text: str, source: str) -> None:
        """Take the values of a YAML text, in which no key may be given twice."""
        try:
            node = _composed(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
        if node is None:
            return
        if not isinstance(node, MappingNode):
            raise ConfigError(f"{source} must hold sections such as `data:` and `trainer:`, not a list or a text")
        first: dict[KeyPath, tuple[KeyPath, Node]] = {}
        for path, value in self._leaves(node, (), source):
            target = _renamed(path)
            written, known = first.setdefault(target, (path, value))
            if known is not value and (written == path or _plain(known) != _plain(value)):
                names = "" if written == path else f", as {_name(written)} and as {_name(path)}"
                self.problems.append(_twice(target, source, _line(known), _line(value), names))
            self._take(path, value, f"{source}, line {_line(value)}")

    def read_override(self, override: str) -> None:
        """Take one `key=value` of the command line."""
        key, _, text = override.partition("=")
        path = tuple(key.strip().split("."))
        option = options().get(_renamed(path))
        if option is not None and option.kind == "list" and not text.strip():
            self._take(path, SequenceNode("tag:yaml.org,2002:seq", []), COMMAND_LINE)
            return
        if option is not None and option.kind == "text":  # as it is: a prompt may hold colons, braces and quotes
            null = option.optional and text.strip() in ("", "null", "~")
            self._take(path, ScalarNode(_NULL if null else "tag:yaml.org,2002:str", text), COMMAND_LINE)
            return
        try:
            node = _composed(text) or ScalarNode(_NULL, "")
        except (yaml.YAMLError, ValueError):
            self.problems.append(f"{key} is {text!r} ({COMMAND_LINE}), which is not valid YAML")
            return
        for inner, value in self._leaves(node, path, COMMAND_LINE):
            self._take(inner, value, COMMAND_LINE)

    def config(self) -> Config:
        """Return the configuration. Raises: ConfigError with all problems of all that was read."""
        for key, (name, given) in self.retired.items():
            entry, value = RETIRED[key], _plain(given.node)
            if name == key and entry.refuses(value):
                self.problems.append(f"{key} is {_shown(value)} ({given.where}): {entry.instead}")
            else:
                self.warnings.append(f"{key} ({given.where}) has no effect: {entry.because}")
        values: dict[str, Any] = {}
        for path, given in self.given.items():
            option = _option_at(path)
            try:
                value = _plain(given.node) if len(path) > len(option.path) else _value(option, given.node)
            except ValueError:
                self._mistyped(option, given)
            else:
                _put(values, path, value)
        try:
            config = Config.model_validate(values)
        except ValidationError as error:
            for path in {_option_at(tuple(map(str, problem["loc"]))).path: None for problem in error.errors()}:
                self._mistyped(options()[path], self.given[path])
            config = None
        refuse(self.problems)
        assert config is not None  # a validation error is a problem, and problems are refused
        return config

    def _leaves(self, node: Node, path: KeyPath, source: str) -> Iterator[tuple[KeyPath, Node]]:
        """Yield the values under a node with their paths, down to options, retired keys and unknown ones."""
        in_free_mapping = _is_free(path)
        if not isinstance(node, MappingNode) or not (in_free_mapping or _is_section(path)):
            yield path, node
            return
        if not node.value and in_free_mapping and _renamed(path) not in options():
            yield path, node  # an empty mapping inside a free one is a value
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in lines:
                self.problems.append(_twice((*path, name), source, lines[name], _line(key)))
                continue
            lines[name] = _line(key)
            # `worker.actor:` may stand for `worker:` and `actor:` below it.
            yield from self._leaves(value, (*path, name) if in_free_mapping else (*path, *name.split(".")), source)

    def _take(self, path: KeyPath, node: Node, where: str) -> None:
        """Sort one value in: an option, a renamed key, a retired key, or an unknown one."""
        name = _name(path)
        null = isinstance(node, ScalarNode) and node.tag == _NULL
        if (old := _older_name(path)) is not None:
            self._warn_once(f"{old} ({where}) is now {RENAMED[old]}")
            path, where = _renamed(path), f"{where}, as {name}"
        if _option_at_or_none(path) is not None:
            self._set(path, _Given(self._renamed_example(path, node, where), where), null=null)
        elif (key := retired_key(name)) is not None:
            self.retired[key] = (name, _Given(node, where))
        elif _is_section(path):
            if not null:
                self.problems.append(f"{name} is {_shown(_plain(node))} ({where}), but it is a section that holds keys")
        elif path[0] in FOREIGN_SECTIONS:
            self.problems.append(f"{name} ({where}) is unknown: {FOREIGN_SECTIONS[path[0]]}")
        else:
            self.problems.append(f"{name} ({where}) is unknown; did you mean {_nearest(name)}?")

    def _set(self, path: KeyPath, given: _Given, *, null: bool) -> None:
        if _is_free(path):
            # Inside a free mapping a value may take the place of a mapping, or a mapping of a value.
            for known in [known for known in self.given if _overlap(known, path) and known != path]:
                del self.given[known]
            if null and path in options():
                return  # `override_config:` with nothing below it
        self.given[path] = given

    def _renamed_example(self, path: KeyPath, node: Node, where: str) -> Node:
        """Return the node, or one with today's path if it names a shipped example by its older path."""
        if _name(path) in ("data.format_prompt", "worker.reward.reward_function") and isinstance(node, ScalarNode):
            renamed = renamed_file(node.value)
            if renamed != node.value:
                self._warn_once(f"{_name(path)} ({where}): {node.value} is now {renamed}")
                return ScalarNode(node.tag, renamed, node.start_mark, node.end_mark)
        return node

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _mistyped(self, option: Option, given: _Given) -> None:
        value = _plain(given.node)
        reason = ABSENT.get((option.name, str(value)))
        nearest = _nearest_choice(str(value), option.choices)
        hint = f": {reason}" if reason else f"; did you mean {nearest}?" if nearest else ""
        self.problems.append(f"{option.name} is {_shown(value)} ({given.where}), but must be {option.expected}{hint}")


def _nearest_choice(value: str, choices: Sequence[str]) -> str | None:
    """Return the choice that somebody who wrote value may have meant."""
    near = difflib.get_close_matches(value, choices, n=1)
    return near[0] if near else next((choice for choice in choices if value.startswith(choice)), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        folder = path.resolve().parent
        near = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
        there = f"; there is {', '.join(near[:5])}" if near else ""
        raise ConfigError(f"no configuration file at {path} (looked for {path.resolve()}){there}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error


def _composed(text: str) -> Node | None:
    """Return the nodes of a YAML text, None if it holds none, all of which can be constructed.

    Raises: YAMLError or ValueError.
    """
    node: Node | None = yaml.compose(text, Loader=_Yaml)
    if node is not None:
        _plain(node)
    return node


def _value(option: Option, node: Node) -> Any:
    """Return what a node says, as the option's kind. Bounds and choices are the schema's. Raises: ValueError."""
    if isinstance(node, ScalarNode) and node.tag == _NULL:
        if option.optional:
            return None
        raise ValueError
    if option.kind == "list" and isinstance(node, SequenceNode):
        return tuple(_scalar(option, item) for item in node.value)
    return _scalar(option, node)


def _scalar(option: Option, node: Node) -> Any:
    if not isinstance(node, ScalarNode):
        raise ValueError
    text: str = node.value
    match option.item:
        case "text" | "choice":
            return text
        case "true or false":
            if node.tag != _BOOL:
                raise ValueError
            return _plain(node)
        case "whole number":
            try:
                return int(text)
            except ValueError:
                number = float(text)  # 4e6
            if not number.is_integer():
                raise ValueError
            return int(number)
        case "number":
            return float(text)
        case "list" | "mapping":
            raise ValueError
        case _:
            assert_never(option.item)


def _plain(node: Node) -> Any:
    """Return what a node says by itself, without an option's type."""
    return SafeConstructor().construct_document(node)


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value


def _name(path: KeyPath) -> str:
    return ".".join(path)


def _twice(path: KeyPath, source: str, first: int, second: int, names: str = "") -> str:
    return f"{_name(path)} is given twice{names} ({source}, lines {first} and {second}): keep one"


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _older_name(path: KeyPath) -> str | None:
    """Return the entry of RENAMED that a path is or lies under, or None."""
    return next((old for n in range(1, len(path) + 1) if (old := _name(path[:n])) in RENAMED), None)


def _renamed(path: KeyPath) -> KeyPath:
    """Return the path's name today; what lies below a renamed mapping moves with it."""
    old = _older_name(path)
    return path if old is None else (*RENAMED[old].split("."), *path[old.count(".") + 1 :])


def _is_section(path: KeyPath) -> bool:
    """Whether keys may lie below this path, today's or older ones."""
    prefix = f"{_name(path)}."
    return (
        any(path == section for section, _ in sections())
        or any(key.startswith(prefix) for key in RETIRED)
        or any(key.startswith(prefix) for key in RENAMED)
    )


def _is_free(path: KeyPath) -> bool:
    """Whether this path is a free mapping, which takes any key, or lies inside one."""
    option = _option_at_or_none(_renamed(path))
    return option is not None and option.kind == "mapping"


def _option_at_or_none(path: KeyPath) -> Option | None:
    """Return the option at this path, or the free mapping that the path lies in."""
    for length in range(len(path), 0, -1):
        option = options().get(path[:length])
        if option is not None:
            return option if length == len(path) or option.kind == "mapping" else None
    return None


def _option_at(path: KeyPath) -> Option:
    """Return the option at this path or above it."""
    return next(options()[path[:length]] for length in range(len(path), 0, -1) if path[:length] in options())


def _nearest(name: str) -> str:
    """Return the known key that is most like this name, as a whole and in its last part."""

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, name, known).ratio()
        last = difflib.SequenceMatcher(None, name.rpartition(".")[2], known.rpartition(".")[2]).ratio()
        return whole + last

    names = [_name(path) for path in options()] + [_name(path) for path, _ in sections() if path]
    return max(names, key=likeness)
