"""Reads a YAML file, a command line and Python values into one frozen configuration.

The command line and Python values override the file, which overrides the defaults. All problems are
reported in one error, each with its file and line. Checks across options are in checks.py, renamed
and ignored keys in legacy.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path, PurePath
from typing import Any, assert_never

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.events import AliasEvent
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from trigon.config.checks import MAX_PROBLEMS, find_problems, find_warnings, raise_problems
from trigon.config.files import find_missing_objects
from trigon.config.legacy import (
    IGNORED,
    RENAMED,
    UNSUPPORTED_VALUES,
    VERL_SECTIONS,
    entry_of,
    nearest_option,
    renamed_file,
)
from trigon.config.options import KeyPath, Option, options, sections
from trigon.config.paths import expand_path
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.system.secrets import MASKED, REWARD, USER_ARGUMENTS, VAL_REWARD, mask, mask_text, masked_names, secrets_in
from trigon.system.terminal import did_you_mean

COMMAND_LINE = "command line"
ARGUMENTS = "arguments"

Override = str | Mapping[str, Any]
"""`key=value`, or options as Python values, nested or with dotted names."""

MAX_KEY_CHARACTERS = 200
"""Maximum length of a key outside of free mappings, all its parts together."""

MAX_SHOWN_CHARACTERS = 80
"""Maximum length of a value in a message."""

_PROMPT_OPTIONS = ("data.format_prompt", "data.override_chat_template", "data.system_prompt")
_REFERENCE = re.compile(r"\$\{(?:[A-Za-z_]\w*[.:]|\.+[A-Za-z_])[^{}]*\}")
"""OmegaConf's reference to another value, such as ${trainer.project_name} or ${oc.env:HOME}."""
_REFERENCE_IN_ARGUMENTS = re.compile(r"\$\{oc\.[^{}]*\}")
"""Such a reference in arguments of the user's code, whose texts may have braces of their own."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, the warnings to show, and its problems.

    config: invalid and misspelt options have their defaults. sources: where each option that is not
    a default was written, by its name. problems: problems of the schema and across options; empty
    if the configuration can run, which load_config ensures. uncertain: the names of the options
    that have their default because the user's value is invalid or misspelt. path: the YAML file.
    """

    config: Config
    warnings: tuple[str, ...]
    sources: Mapping[str, str]
    problems: tuple[str, ...] = ()
    uncertain: frozenset[str] = frozenset()
    path: Path | None = None


def split_arguments(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the YAML file and the `key=value` overrides of a command line.

    The file is given by `config=run.yaml`, or by a first argument that ends in .yaml or .yml.
    Raises: ConfigError if an argument is neither, or if two files are given.
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
                "an argument is blank: a line of the script ends in a backslash and a space; "
                "remove the space, or the lines after it are not part of the command"
            )
        else:
            advice = "write config=run.yaml, or key=value"
            if argument.startswith("-"):
                advice = advise_without_dashes(argument, argv[position + 1 : position + 2])
            raise ConfigError(f"cannot read the argument {mask_text(argument)!r}: {advice}")
    if len(paths) > 1:
        raise ConfigError(f"two configuration files are given, {paths[0]} and {paths[1]}: keep one")
    return (Path(paths[0]) if paths else None), overrides


def advise_without_dashes(argument: str, following: Sequence[str]) -> str:
    """Return how to write an option that was given with dashes.

    following: the next argument, if there is one.
    """
    name, equals, written = argument.lstrip("-").partition("=")
    name = name.replace("-", "_")
    key = "config" if name == "config" else nearest_option(name)
    is_value = bool(following) and not following[0].startswith("-") and "=" not in following[0]
    value = written if equals else following[0] if is_value else "..."
    shown = mask_text(f"{name}={value}").partition("=")[2]
    return f"options have no dashes, and an equals sign; write {key}={shown}"


def load_config(
    path: Path | None,
    overrides: Sequence[Override],
    *,
    python_objects: Collection[str] = (),
    undecided: Collection[str] = (),
) -> LoadedConfig:
    """Return the checked configuration of a YAML file and of overrides.

    Args: as inspect_config. Raises: ConfigError, with all problems in one message.
    """
    loaded = inspect_config(path, overrides, python_objects=python_objects, undecided=undecided)
    raise_problems(loaded.problems)
    return loaded


def check_overrides(overrides: Sequence[Override]) -> None:
    """Raise ConfigError if a name or the type of a value in overrides is wrong."""
    reader = _ConfigReader()
    reader.read_overrides(overrides)
    reader.build()
    raise_problems(reader.problems)


def inspect_config(
    path: Path | None,
    overrides: Sequence[Override],
    *,
    python_objects: Collection[str] = (),
    undecided: Collection[str] = (),
) -> LoadedConfig:
    """Return the configuration of a YAML file and of overrides, with all its problems.

    path: None for the defaults only. overrides: later ones replace earlier ones. python_objects:
    the names of those that the caller has (paths.PYTHON_PREFIX). undecided: options that the caller
    will change; the checks across options that read them are left out, see find_problems.
    Raises: ConfigError if the file cannot be read, or is no YAML.
    """
    reader = _ConfigReader()
    if path is not None:
        path = expand_path(str(path))
        reader.read_yaml(_read_text(path), str(path))
    reader.read_overrides(overrides)
    config = reader.build()
    missing = find_missing_objects(config, python_objects)
    sources = {_dotted(path): value.location for path, value in reader.values.items()}
    uncertain = reader.uncertain.union(undecided)
    found = find_problems(config, uncertain=uncertain)
    problems = (*reader.problems, *found, *missing, *_find_masked(config, sources))
    exposed = _find_exposed(config, [key for key, source in sources.items() if source == COMMAND_LINE])
    on_purpose = [key for key, source in sources.items() if source in (COMMAND_LINE, ARGUMENTS)]
    found_warnings = find_warnings(config, on_purpose=on_purpose, uncertain=uncertain)
    warnings = (*reader.warnings, *found_warnings, *exposed)
    return LoadedConfig(config, warnings, sources, problems, frozenset(reader.uncertain), path)


def dump_config(config: Config) -> str:
    """Return the configuration as YAML, with defaults; load_config reads it to an equal one.

    It has MASKED in place of secrets, which load_config asks for; see trigon/system/secrets.py.
    """
    return yaml.safe_dump(mask("", config.model_dump()), sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True, slots=True)
class _SourceValue:
    """The YAML node of a value, and where it was written, for messages.

    older_name: the name that was written, if it is not the option's own.
    """

    node: Node
    location: str
    older_name: str = ""

    @property
    def described_location(self) -> str:
        return f"{self.location}, as {self.older_name}" if self.older_name else self.location


class _ConfigReader:
    """Collects values by the paths of their options.

    A later value replaces an earlier one, except that mappings with free keys are joined.
    """

    def __init__(self) -> None:
        self.values: dict[KeyPath, _SourceValue] = {}
        self.written: dict[KeyPath, _SourceValue] = {}
        """The values as they were written, those inside of mappings too, the last one last."""
        self.ignored: dict[str, tuple[str, _SourceValue]] = {}
        """Entry of IGNORED: the name that was written, and its value."""
        self.warnings: list[str] = []
        self.problems: list[str] = []
        self.uncertain: set[str] = set()
        """Options whose value is in doubt: it is invalid, given twice, or under a misspelt key."""

    def read_yaml(self, text: str, source: str) -> None:
        """Add the values of a YAML text, in which each key may be given once."""
        try:
            root = self._parse(text, (), source)
        except yaml.YAMLError as error:
            raise ConfigError(f"{source} is not valid YAML: {mask_text(' '.join(str(error).split()))}") from error
        if root is None:
            return
        if not isinstance(root, MappingNode):
            raise ConfigError(f"{source} must hold sections such as `data:` and `trainer:`, not a list or a text")
        first: dict[KeyPath, tuple[KeyPath, Node]] = {}
        for path, node in self._flatten(root, (), source):
            current = _current_path(path)
            first_path, first_node = first.setdefault(current, (path, node))
            if first_node is not node and (first_path == path or construct(first_node) != construct(node)):
                names = "" if first_path == path else f", as {_dotted(first_path)} and as {_dotted(path)}"
                self.problems.append(_duplicate_key(current, source, _line(first_node), _line(node), names))
                self.uncertain.add(_dotted(current))
            self._add(path, node, _place(source, node))

    def read_overrides(self, overrides: Sequence[Override]) -> None:
        """Add values of the command line, and Python values."""
        for override in overrides:
            if isinstance(override, str):
                self.read_override(override)
            else:
                self.read_yaml(write_arguments(override), ARGUMENTS)

    def read_override(self, override: str) -> None:
        """Add one `key=value`."""
        key, _, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not self._check_path(path, COMMAND_LINE):
            return
        option = options().get(_current_path(path))
        if option is not None and option.kind == "list" and not text.strip():
            text = "[]"
        is_list = option is not None and option.kind == "text or list" and text.lstrip().startswith(("[", "{"))
        if option is not None and option.kind in ("text", "text or list") and not is_list:
            # Not YAML: a prompt may hold colons, braces and quotes.
            is_null = option.optional and text.strip() in ("", "null", "~")
            self._add(path, ScalarNode(NULL_TAG if is_null else TEXT_TAG, text), COMMAND_LINE)
            return
        try:
            root = self._parse(text, path, COMMAND_LINE) or ScalarNode(NULL_TAG, "")
        except yaml.YAMLError:
            self.problems.append(f"{key} is {_format_value(text)} ({COMMAND_LINE}), which is not valid YAML")
            return
        for inner_path, node in self._flatten(root, path, COMMAND_LINE):
            self._add(inner_path, node, COMMAND_LINE)

    def build(self) -> Config:
        """Return the configuration. Invalid values become problems, and have their defaults."""
        for key, (name, value) in self.ignored.items():
            entry, written = IGNORED[key], construct(value.node)
            if name == key and entry.rejects(written):
                self.problems.append(f"{key} is {_format_value(written)} ({value.location}): {entry.advice}")
            else:
                self.warnings.append(f"{key} ({value.location}) has no effect: {entry.reason}")
        converted: dict[KeyPath, Any] = {}
        for path, value in self.values.items():
            option = options()[path]
            pattern = _REFERENCE_IN_ARGUMENTS if option.kind == "mapping" else _REFERENCE
            if option.name not in _PROMPT_OPTIONS and (reference := _find_reference(construct(value.node), pattern)):
                self.uncertain.add(option.name)
                self.problems.append(
                    f"{option.name} has {reference} ({value.described_location}), which OmegaConf replaces by another "
                    "value and Trigon does not; write the value itself"
                )
                continue
            try:
                converted[path] = _convert(option, value.node)
            except ValueError:
                self._add_invalid_value(option, value)
        return self._validate(converted)

    def _validate(self, converted: dict[KeyPath, Any]) -> Config:
        """Return the configuration of these values. Invalid values are problems, and left out."""
        tree: dict[str, Any] = {}
        for path, value in converted.items():
            section = tree
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = value
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            places = [tuple(map(str, problem["loc"])) for problem in error.errors()]
            invalid = {option.path: place for place in reversed(places) if (option := _option_at_or_above(place))}
            if not invalid:
                raise
        for path, place in reversed(invalid.items()):
            # The last value written at this place, inside it (a mapping) or around it (a list).
            written = (value for at, value in reversed(self.written.items()) if at[: len(place)] == place[: len(at)])
            self._add_invalid_value(options()[path], next(written))
        return self._validate({path: value for path, value in converted.items() if path not in invalid})

    def _parse(self, text: str, path: KeyPath, source: str) -> Node | None:
        """Return the root node of a YAML text, or None if it is empty. Raises: YAMLError."""
        root = compose(text)
        if root is not None:
            self._check_keys(root, path, source)
            construct(root)  # so that a value that cannot be constructed is an error here
        return root

    def _check_keys(self, node: Node, path: KeyPath, source: str) -> None:
        """Remove keys that are given twice, or lack the space after the colon, as problems."""
        if isinstance(node, SequenceNode):
            for item in node.value:
                self._check_keys(item, path, source)
        if not isinstance(node, MappingNode):
            return
        first: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in first:
                lines = _line(first[name][0]), _line(key)
                self.problems.append(_duplicate_key((*path, name), source, *lines))
            elif _is_null(value) and ":" in name and not value.value:  # {n:4}, a pair in Hydra. A null may be written
                spaced = name.replace(":", ": ", 1)
                place = f"{_dotted((*path, name))} ({_place(source, key)})"
                self.problems.append(f"{place} lacks the space after the colon: {{{spaced}}}")
            else:
                first[name] = key, value
                self._check_keys(value, (*path, name), source)
        node.value = list(first.values())

    def _flatten(self, node: Node, path: KeyPath, source: str) -> Iterator[tuple[KeyPath, Node]]:
        """Yield the values below a node with their paths: of options, ignored and unknown keys."""
        option = _option_at_or_above(_current_path(path))
        in_mapping = option is not None and option.kind == "mapping"
        if not isinstance(node, MappingNode) or not (path in _sections() or (in_mapping and node.value)):
            yield path, node
            return
        # A key that was merged (<<) comes before the key of the same name, which replaces it.
        for name, (key, value) in {str(pair[0].value): pair for pair in node.value}.items():
            # `worker.actor:` may stand for `worker:` and `actor:` below it.
            inner = (*path, name) if in_mapping else (*path, *name.split("."))
            if in_mapping or self._check_path(inner, _place(source, key)):
                yield from self._flatten(value, inner, source)

    def _check_path(self, path: KeyPath, location: str) -> bool:
        """Return whether a key can be looked up; add a problem if it cannot."""
        name = _dotted(path)
        if len(name) > MAX_KEY_CHARACTERS or len(path) > MAX_DEPTH:
            self.problems.append(
                f"the key {name[:60]}... ({location}) has {len(name):,} characters in {len(path):,} parts; at most "
                f"{MAX_KEY_CHARACTERS} in {MAX_DEPTH} parts are read"
            )
            return False
        if not all(part.strip() for part in path):
            self.problems.append(f"the key {name!r} ({location}) has an empty part; write section.key")
            return False
        return True

    def _add(self, path: KeyPath, node: Node, location: str) -> None:
        """Add one value of an option, renamed key or ignored key. Anything else is a problem."""
        name, older_name = _dotted(path), ""
        if (old := entry_of(name, RENAMED)) is not None:
            self._warn_once(f"{old} ({location}) is now {RENAMED[old]}")
            path, older_name = _current_path(path), name
        option = _option_at_or_above(path)
        if option is not None and (option.path == path or option.kind == "mapping"):
            node = self._update_example_path(path, node, location)
            self.written.pop(path, None)
            self.written[path] = _SourceValue(node, location, older_name)
            for inner in reversed(path[len(option.path) :]):
                node = MappingNode(MAPPING_TAG, [(ScalarNode(TEXT_TAG, inner), node)])
            if option.path in self.values and option.kind == "mapping":
                node = _join(self.values[option.path].node, node)
            self.values[option.path] = _SourceValue(node, location, older_name)
        elif (key := entry_of(name, IGNORED)) is not None:
            self.ignored[key] = (name, _SourceValue(node, location))
        elif path in _sections():
            if not _is_null(node):
                self.problems.append(
                    f"{name} is {_format_value(construct(node))} ({location}), but it is a section that holds keys"
                )
        elif path[0] in VERL_SECTIONS:
            self.problems.append(f"{name} ({location}) is unknown: {VERL_SECTIONS[path[0]]}")
        elif len(self.problems) < MAX_PROBLEMS:
            meant = nearest_option(name, [_dotted(section) for section, _ in sections() if section])
            self.problems.append(f"{name} ({location}) is unknown; did you mean {meant}?")
            self.uncertain |= {o.name for o in options().values() if f"{o.name}.".startswith(f"{meant}.")}
        else:
            self.problems.append(f"{name} ({location}) is unknown")  # not shown: no need for the nearest key

    def _update_example_path(self, path: KeyPath, node: Node, location: str) -> Node:
        """Return the node; the older path of a shipped example becomes its current path."""
        if _dotted(path) in ("data.format_prompt", "worker.reward.reward_function") and isinstance(node, ScalarNode):
            renamed = renamed_file(node.value)
            if renamed != node.value:
                self._warn_once(f"{_dotted(path)} ({location}): {node.value} is now {renamed}")
                return ScalarNode(node.tag, renamed, node.start_mark, node.end_mark)
        return node

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _add_invalid_value(self, option: Option, value: _SourceValue) -> None:
        self.uncertain.add(option.name)
        node, written = value.node, construct(value.node)
        reason = UNSUPPORTED_VALUES.get((option.name, str(written)))
        items = written if isinstance(written, list) else [written]
        wrong = next((str(item) for item in items if str(item) not in option.choices), "")
        hint = f": {reason}" if reason else did_you_mean(wrong, option.choices)
        # A number as it is written: 0x10 is no integer here, and 16 would not say why.
        is_number = isinstance(node, ScalarNode) and node.tag in (INTEGER_TAG, FLOAT_TAG)
        shown = node.value[:MAX_SHOWN_CHARACTERS] if is_number else _format_value(written)
        self.problems.append(
            f"{option.name} is {shown} ({value.described_location}), but must be {option.expected}{hint}"
        )


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)  # the parser refuses a longer one
    except FileNotFoundError as error:
        folder = path.resolve().parent
        names = sorted(file.name for file in folder.glob("*.y*ml")) if folder.is_dir() else []
        hint = f"; there is {', '.join(names[:5])}" if names else ""
        raise ConfigError(f"no configuration file at {path} (looked for {path.resolve()}){hint}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the path
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error


def _dotted(path: KeyPath) -> str:
    return ".".join(path)


def _duplicate_key(path: KeyPath, source: str, first: int, second: int, names: str = "") -> str:
    lines = "" if source in (ARGUMENTS, COMMAND_LINE) else f", lines {first} and {second}"
    return f"{_dotted(path)} is given twice{names} ({source}{lines}): keep one"


def _place(source: str, node: Node) -> str:
    """Return where a node was written. Only a file has lines."""
    return source if source in (ARGUMENTS, COMMAND_LINE) else f"{source}, line {_line(node)}"


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _format_value(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | None) else mask_text(repr(value)[:1000])
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def _find_reference(value: Any, pattern: re.Pattern[str]) -> str:
    """Return the first match of a pattern in a value or in the texts inside it, or ""."""
    if isinstance(value, str):
        found = pattern.search(value)
        return "" if found is None else found.group()
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next(filter(None, (_find_reference(each, pattern) for each in inner)), "")


def _current_path(path: KeyPath) -> KeyPath:
    """Return the path under its current name. Keys below a renamed mapping move with it."""
    old = entry_of(_dotted(path), RENAMED)
    return path if old is None else (*RENAMED[old].split("."), *path[old.count(".") + 1 :])


@cache
def _sections() -> frozenset[KeyPath]:
    """Return the paths of all sections, current and older ones, the path of the root included."""
    paths = [*options(), *(tuple(key.split(".")) for key in (*IGNORED, *RENAMED))]
    return frozenset(path[:length] for path in paths for length in range(len(path)))


def _option_at_or_above(path: KeyPath) -> Option | None:
    """Return the option at a path or above it, or None for another path."""
    return next((option for n in range(len(path), 0, -1) if (option := options().get(path[:n]))), None)


def _join(before: Node, node: Node) -> Node:
    """Return a node in which a mapping keeps what an earlier one has besides."""
    if not (isinstance(before, MappingNode) and isinstance(node, MappingNode)):
        return node
    pairs = {str(key.value): (key, value) for key, value in before.value}
    for key, value in node.value:
        name = str(key.value)
        # Inside of a mapping an empty one replaces what was there.
        pairs[name] = key, _join(pairs[name][1], value) if name in pairs and value.value else value
    return MappingNode(MAPPING_TAG, list(pairs.values()))


# -- the kind of a value ---------------------------------------------------------------------------


def _convert(option: Option, node: Node) -> Any:
    """Return the value of a node in the kind of the option. The schema checks bounds and choices.

    Raises: ValueError if the node is of another kind.
    """
    if _is_null(node):
        if not option.optional and option.default not in ((), {}):
            raise ValueError
        return None if option.optional else option.default
    if option.kind == "text or list":
        is_text = isinstance(node, ScalarNode)
        if not is_text and not isinstance(node, SequenceNode):
            raise ValueError
        return node.value if is_text else tuple(construct(item) for item in node.value)
    if option.kind == "list" and isinstance(node, SequenceNode):
        return tuple(_convert_scalar(option, item) for item in node.value)
    if option.kind == "mapping" and isinstance(node, MappingNode):
        return _with_text_keys(node)
    return _convert_scalar(option, node)


def _with_text_keys(node: Node) -> Any:
    """Return the value of a node with keys as they are written: `{1: a}` is {"1": "a"}."""
    if isinstance(node, MappingNode):
        return {str(key.value): _with_text_keys(value) for key, value in node.value}
    return construct(node)


def _convert_scalar(option: Option, node: Node) -> Any:
    if not isinstance(node, ScalarNode):
        raise ValueError
    text: str = node.value
    match option.item:
        case "text" | "choice":
            if node.tag == NULL_TAG:  # an item of a list
                raise ValueError
            return text
        case "true or false":
            if text.lower() not in SafeConstructor.bool_values:  # perhaps in quotes, as numbers may be
                raise ValueError
            return SafeConstructor.bool_values[text.lower()]
        case "integer":
            try:
                return int(text)
            except ValueError:
                number = float(text)  # 4e6
            if not number.is_integer():
                raise ValueError
            return int(number)
        case "number":
            return float(text)
        case "list" | "mapping" | "text or list":
            raise ValueError
        case _:
            assert_never(option.item)


# -- options that are Python values ----------------------------------------------------------------


def write_arguments(values: Mapping[str, Any]) -> str:
    """Return options as YAML text. Tuples become lists, paths text, numpy scalars numbers.

    Raises: ConfigError if a name is not text, or a value is none of the values that YAML has.
    """
    return yaml.safe_dump(_plain(values, "options", 0), sort_keys=False, allow_unicode=True) if values else ""


def _plain(value: Any, name: str, depth: int) -> Any:
    """Return a copy of a value that consists of what YAML has."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name[:60]}... has more than {MAX_DEPTH} levels")
    match value:
        case None | bool() | int() | float() | str():
            # Not a subclass, such as an enum, which YAML would write as an object of its class.
            return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        case PurePath():
            return str(value)
        case list() | tuple():
            return [_plain(item, f"{name}[{number}]", depth + 1) for number, item in enumerate(value)]
        case Mapping():
            plain: dict[str, Any] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ConfigError(f"{name} has the key {key!r}, a {type(key).__name__}; names of options are text")
                plain[str(key)] = _plain(item, key if depth == 0 else f"{name}.{key}", depth + 1)
            return plain
        case _ if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return _plain(value.item(), name, depth + 1)
        case _:
            raise ConfigError(
                f"{name} is a {type(value).__module__}.{type(value).__name__}, which no option takes; options are "
                "text, numbers, True, False, None, lists and dicts"
            )


# -- secrets that were left out, or that others can read ------------------------------------------

_ENV_HINT = ", or export a variable and write env:NAME in its place"


def _find_masked(config: Config, sources: Mapping[str, str]) -> list[str]:
    """Return problems of values that are not there: the file was written by a run, without secrets.

    sources: where each option was written, by its name.
    """
    problems = []
    for name in masked_names("", config.model_dump()):
        place = next((source for option, source in sources.items() if _is_at_or_below(name, option)), "")
        hint = f"; {name}=env:NAME reads it from the environment variable NAME" if _takes_variables(name) else ""
        if name.startswith((f"{REWARD}[", f"{VAL_REWARD}[")):  # an element of a list has no name on the command line
            hint = ", or env:NAME, which reads it from the environment variable NAME"
        problems.append(
            f"{name}{f' ({place})' if place else ''} is {MASKED!r}: the file was written by a run, which writes no "
            f"secrets; give the value again{hint}"
        )
    return problems


def _find_exposed(config: Config, names: Collection[str]) -> list[str]:
    """Return warnings of secrets on the command line. names: the options that were given there."""
    values = config.model_dump()
    given = [option for option in options().values() if option.name in names]
    exposed = [each.name for each in given if secrets_in(each.name, reduce(getitem, each.path, values))]
    return [
        f"{name} has a secret on the command line, which every user of this machine can read while the run lasts, and "
        f"which trackers may record; write it into a file{_ENV_HINT if _takes_variables(name) else ''}"
        for name in exposed
    ]


def _takes_variables(name: str) -> bool:
    """Return whether env:NAME has a meaning in this option or value."""
    return any(_is_at_or_below(name, option) for option in USER_ARGUMENTS)


def _is_at_or_below(name: str, option: str) -> bool:
    return name == option or name.startswith((f"{option}.", f"{option}["))


# -- YAML ------------------------------------------------------------------------------------------

# Size, depth and aliases are bounded, and every invalid text raises YAMLError: PyYAML itself
# recurses once per level, expands aliases without limit, and raises KeyError and others.

MAX_CHARACTERS = 1_000_000
"""Maximum length of a YAML text. Configuration files have some thousand characters."""

MAX_NODES = 10_000
"""Maximum number of keys and values, with each alias counted as often as it is used."""

MAX_DEPTH = 32
"""Maximum number of levels, with those inside an alias. The schema has five."""

MAX_INTEGER_BITS = 1024
"""Maximum size of an integer. Python refuses to print one of more than about 14,000 bits."""

NULL_TAG = "tag:yaml.org,2002:null"
INTEGER_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"
TEXT_TAG = "tag:yaml.org,2002:str"
MAPPING_TAG = "tag:yaml.org,2002:map"


def compose(text: str) -> Node | None:
    """Return the root node of a YAML text, or None if the text is empty.

    Raises: YAMLError if the text is not valid YAML, or exceeds a limit of this module.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        root: Node | None = yaml.compose(text, Loader=_Loader)
    except (ValueError, OverflowError) as error:  # PyYAML's, for "\UFFFFFFFF" in a quoted text
        raise yaml.YAMLError(f"it has an invalid character or number: {error}") from error
    return root


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag == NULL_TAG


def construct(node: Node) -> Any:
    """Return the value of a node as YAML defines it, independent of the option."""
    return _Constructor().construct_document(node)


class _Loader(yaml.SafeLoader):
    """Composes nodes within the limits. 1e-6 is a number, as in YAML 1.2, not only 1.0e-6."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_composed = 0
        self._extents: dict[Node, tuple[int, int]] = {}
        """Number of nodes in a node, and its levels, aliases expanded; of finished nodes only."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(AliasEvent):
            node: Node | None = super().compose_node(parent, index)
            if node not in self._extents:
                raise ComposerError(None, None, "an alias (*) refers to a value that contains it", mark)
            if self._depth + self._extents[node][1] > MAX_DEPTH:
                raise ComposerError(None, None, f"it has more than {MAX_DEPTH} levels", mark)
            return node
        self._depth += 1
        self._num_composed += 1
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"it has more than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            inner = [self._extents[child] for child in _children(node)]
            num_nodes = 1 + sum(count for count, _ in inner)
            self._extents[node] = num_nodes, 1 + max((levels for _, levels in inner), default=0)
            if max(num_nodes, self._num_composed) > MAX_NODES:
                raise ComposerError(None, None, f"it has more than {MAX_NODES:,} keys and values", mark)
        return node


_Loader.add_implicit_resolver(FLOAT_TAG, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, CollectionNode) else []


class _Constructor(SafeConstructor):
    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        # `!!bool maybe`, `!!int ''`, `!!timestamp x`, a date in year 10000
        except (KeyError, IndexError, AttributeError, ValueError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"a value is not a valid {kind}", node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise ConstructorError(None, None, f"a number has more than {MAX_INTEGER_BITS:,} bits", node.start_mark)
        return value
