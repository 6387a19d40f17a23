"""How large the result of an operation in a Jinja template can be, before it is computed.

One operation can fill the memory: a product, a replacement, a width, a list that has another one
in it many times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

_MAX_NODES = 200_000
"""Values that are visited to measure one; one that has more counts as infinite."""

_INFINITE = 1 << 62

_SEQUENCES = (str, bytes, list, tuple)

_OTHER = 30
"""Characters of a number, an undefined value or another object, about."""

_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_BRACE_FIELD = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_DIGITS = re.compile(r"\d+")


def announce_operations() -> None:
    """Make operators of templates calls of Jinja's, which a trace function sees.

    For all sandboxes of the process that compile a template later. Results stay the same.
    """
    SandboxedEnvironment.intercepted_binops |= {"*", "%", "+"}


def text_size(value: Any) -> int:
    """Return about how many characters `str(value)` has. Parts that are shared count each time."""
    size, num_nodes, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        num_nodes += 1
        if isinstance(item, (str, bytes)):
            size += len(item)
            continue
        if isinstance(item, Namespace):
            item = item._Namespace__attrs  # which templates cannot reach
        if isinstance(item, (list, tuple, set, frozenset, dict)):
            if num_nodes + len(waiting) + len(item) > _MAX_NODES:
                return _INFINITE
            size += 2 * len(item)
            waiting.extend(item)
            if isinstance(item, dict):
                waiting.extend(item.values())
        else:
            size += _OTHER + (item.bit_length() // 3 if isinstance(item, int) else 0)
    return size


def expected_size(name: str, values: Mapping[str, Any]) -> int:
    """Return how many characters the result of a call may have, 0 if not more than its arguments.

    name: of a function in MEASURED_CALLS. values: its arguments by name.
    """
    return MEASURED_CALLS[name](values)


def _operation(values: Mapping[str, Any]) -> int:
    left, right = values["left"], values["right"]
    match values["operator"]:
        case "*":
            if isinstance(left, int) and isinstance(right, int):
                return (left.bit_length() + right.bit_length()) // 3
            for one, other in ((left, right), (right, left)):
                if isinstance(one, _SEQUENCES) and isinstance(other, int):
                    return text_size(one) * max(other, 0)
        case "%" if isinstance(left, (str, bytes)):
            text = str(left)
            widths = [width for field in _PERCENT_FIELD.findall(text) for width in field if width]
            return _formatted(text, text.count("%"), widths, right, has_widths="*" in widths)
        case "+" if isinstance(left, _SEQUENCES):
            return text_size((left, right))
    return 0


def _braces(text: str, arguments: Any) -> int:
    """Return the size of `text.format(...)`."""
    fields = _BRACE_FIELD.findall(text)
    widths = [digits for field in fields for digits in _DIGITS.findall(field)]
    return _formatted(text, len(fields), widths, arguments, has_widths=any("{" in field[1:] for field in fields))


def _formatted(text: str, num_fields: int, widths: Collection[str], arguments: Any, *, has_widths: bool) -> int:
    """Return the size of a formatted text: every field may have any argument, and any width.

    widths: those in the text. has_widths: whether arguments may be widths.
    """
    sizes = [int(width) if len(width) < 12 else _INFINITE for width in widths if width != "*"]
    if has_widths:
        sizes += [value for value in _flat(arguments) if isinstance(value, int)]
    return len(text) + num_fields * (text_size(arguments) + max(sizes, default=0))


def _flat(arguments: Any) -> Collection[Any]:
    if isinstance(arguments, Mapping):
        return arguments.values()
    return arguments if isinstance(arguments, (list, tuple)) else (arguments,)


def _method(values: Mapping[str, Any]) -> int:
    """Return the size of the result of a text's method."""
    method, arguments = values["_SandboxedEnvironment__obj"], [*values["args"], *values["kwargs"].values()]
    text = getattr(method, "__self__", None)
    if not isinstance(text, (str, bytes)) or not arguments:
        return 0
    first = arguments[0]
    match getattr(method, "__name__", ""):
        case "center" | "ljust" | "rjust" | "zfill" if isinstance(first, int):
            return max(first, len(text))
        case "expandtabs" if isinstance(first, int):
            return len(text) * max(first, 1)
        case "replace" if len(arguments) > 1 and all(isinstance(each, (str, bytes)) for each in arguments[:2]):
            return _replaced(text, first, arguments[1])
        case "join":
            return _joined(first, text)
        case "translate":
            return len(text) * text_size(first)
    return 0


def _replaced(text: Any, old: Any, new: Any) -> int:
    return len(text) + int(text.count(old)) * len(new)


def _joined(items: Any, separator: Any) -> int:
    # What an iterator yields is counted when it does.
    return text_size(items) + (len(items) if isinstance(items, Collection) else 1000) * len(separator)


def _filter_join(values: Mapping[str, Any]) -> int:
    return _joined(values["value"], str(values["d"]))


def _filter_replace(values: Mapping[str, Any]) -> int:
    return _replaced(*(str(values[name]) for name in ("s", "old", "new")))


def _filter_center(values: Mapping[str, Any]) -> int:
    return values["width"] if isinstance(values["width"], int) else 0


def _filter_indent(values: Mapping[str, Any]) -> int:
    text, width = str(values["s"]), values["width"]
    return len(text) + (1 + text.count("\n")) * (width if isinstance(width, int) else len(str(width)))


def _filter_format(values: Mapping[str, Any]) -> int:
    arguments = values["kwargs"] or values["args"]
    return _operation({"operator": "%", "left": str(values["value"]), "right": arguments})


def _str_format(values: Mapping[str, Any]) -> int:
    return _braces(values["f_self"], [*values["args"], *values["kwargs"].values()])


def _filter_parts(values: Mapping[str, Any]) -> int:
    count = values["linecount"] if "linecount" in values else values["slices"]
    return count if isinstance(count, int) else 0


def _json(values: Mapping[str, Any]) -> int:
    indent, value = values.get("indent"), values.get("x", values.get("value"))
    return text_size(value) * (1 + (indent if isinstance(indent, int) else len(indent or "")))


MEASURED_CALLS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "call_binop": _operation,
    "call": lambda values: _method(values) if "_SandboxedEnvironment__obj" in values else 0,
    "wrapper": lambda values: _str_format(values) if "f_self" in values else 0,
    "str_join": lambda values: text_size(values["seq"]),
    "markup_join": lambda values: text_size(values["seq"]),
    "do_join": _filter_join,
    "sync_do_join": _filter_join,
    "do_replace": _filter_replace,
    "do_center": _filter_center,
    "do_indent": _filter_indent,
    "do_format": _filter_format,
    "do_batch": _filter_parts,
    "do_slice": _filter_parts,
    "sync_do_slice": _filter_parts,
    "tojson": _json,
    "do_tojson": _json,
    "__setitem__": lambda values: text_size(values["value"]),
}
"""Name of a function of Jinja's, or of a filter for chat templates, to the size of its result."""
