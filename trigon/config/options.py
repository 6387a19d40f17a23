"""The schema as a flat table: the path, type, default and description of every option."""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trigon.config import schema
from trigon.config.schema import Config, Section

Kind = Literal["text", "choice", "integer", "number", "true or false", "list", "mapping", "text or list"]

KeyPath = tuple[str, ...]
"""Path of an option or a section, outermost section first: ("data", "max_pixels")."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of the configuration.

    kind: "text or list" is text, or a list of mappings.
    item: the kind of a list's items; the same as kind for everything else.
    optional: whether null is allowed.
    choices: the allowed values of a choice, or of each item of a list; empty for all else.
    expected: the allowed values, for messages: "an integer, at least 1, or null".
    """

    path: KeyPath
    kind: Kind
    item: Kind
    optional: bool
    choices: tuple[str, ...]
    expected: str
    default: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)


def sections(section: type[Section] = Config, path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section]]]:
    """Yield a section and all sections below it with their paths, in the order of the schema."""
    yield path, section
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from sections(inner, (*path, key))


@cache
def options() -> dict[KeyPath, Option]:
    """Return every option by its path, in the order of the schema."""
    return {
        (*path, key): _option((*path, key), field)
        for path, section in sections()
        for key, field in section.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    }


def value_of(config: Config, name: str) -> Any:
    """Return the value of an option, or a section, by its full name."""
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key)
    return value


def with_options(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with new values of options, given by their full names."""
    values = config.model_dump()
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[key] = value
    return Config.model_validate(values)


def _option(path: KeyPath, field: FieldInfo) -> Option:
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    kind, item, expected = _describe(annotation)
    optional = expected.endswith(", or null")
    choices = _choices(annotation) if item == "choice" else ()
    return Option(path, kind, item, optional, choices, expected, field.get_default(call_default_factory=True))


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of the Literal inside an annotation."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return tuple(map(str, arguments))
    return _choices(next(argument for argument in arguments if argument is not type(None)))


def _describe(annotation: Any, bounds: tuple[Any, ...] = ()) -> tuple[Kind, Kind, str]:
    """Return the kind of an annotation, the kind of its items, and its allowed values in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], (*bounds, *arguments[1:]))
    if origin in (Union, types.UnionType):
        described = [_describe(argument, bounds) for argument in arguments if argument is not type(None)]
        kind, item, _ = described[0] if len(described) == 1 else ("text or list", "mapping", "")
        return kind, item, f"{', or '.join(expected for *_, expected in described)}, or null"
    if origin is Literal:
        names = [str(argument) for argument in arguments]
        return "choice", "choice", " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"
    if origin is tuple:
        _, item, expected = _describe(arguments[0])
        count = "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
        return "list", item, f"{count}, each {expected}"
    if origin is dict:
        values = "" if arguments[1] is Any else f", each value {_describe(arguments[1])[2]}"
        return "mapping", "mapping", f"a mapping{values}"
    if issubclass(annotation, BaseModel):
        return "mapping", "mapping", f"a mapping of {', '.join(annotation.model_fields)}"
    kinds: dict[type, Kind] = {bool: "true or false", int: "integer", float: "number", str: "text"}
    kind = kinds[annotation]
    name = {"integer": "an integer", "number": "a number"}.get(kind, kind)
    return kind, kind, name + _bounds_in_words(bounds)


def _bounds_in_words(bounds: tuple[Any, ...]) -> str:
    words: list[str] = []
    for bound in bounds:
        match bound:
            case Ge(ge=least):
                words.append(f"at least {_format_bound(least)}")
            case Gt(gt=limit):
                words.append(f"above {_format_bound(limit)}")
            case Le(le=most):
                words.append(f"at most {_format_bound(most)}")
            case Lt(lt=limit):
                words.append(f"below {_format_bound(limit)}")
            case MinLen():
                words.append("not empty")
            case FieldInfo(metadata=inner) if inner:
                return _bounds_in_words(tuple(inner))
            case _:
                pass  # a validator, which has no bound to describe
    return f", {' and '.join(words)}" if words else ""


def format_value(value: Any) -> str:
    """Return the value of an option in YAML notation."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return value if isinstance(value, str) and value else json.dumps(value)


def _format_bound(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


@cache
def descriptions() -> dict[KeyPath, str]:
    """Return the description of each option and each section: its docstring in schema.py."""
    by_class = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    result: dict[KeyPath, str] = {}
    for path, section in sections():
        result[path] = ast.get_docstring(by_class[section.__name__]) or ""
        nodes = [by_class[each.__name__] for each in reversed(section.__mro__) if each.__name__ in by_class]
        body = [statement for node in nodes for statement in node.body]
        for field, docstring in pairwise(body):
            match field, docstring:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    result[(*path, key)] = " ".join(text.split())
                case _:
                    pass  # the docstring of the section, or a field that is a section
    return result
