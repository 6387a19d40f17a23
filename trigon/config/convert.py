"""Converts the YAML value of an option into the kind that the schema has for it."""

from __future__ import annotations

from typing import Any, assert_never

from yaml.nodes import Node, ScalarNode, SequenceNode

from trigon.config.options import Option
from trigon.config.yaml_nodes import BOOL_TAG, NULL_TAG, construct


def convert(option: Option, node: Node) -> Any:
    """Return the value of a node in the kind of the option. The schema checks bounds and choices.

    Raises: ValueError if the node is of another kind.
    """
    if isinstance(node, ScalarNode) and node.tag == NULL_TAG:
        if option.optional:
            return None
        if option.kind == "list" and option.default == ():
            return ()
        raise ValueError
    if option.kind == "text or list":
        is_text = isinstance(node, ScalarNode)
        if not is_text and not isinstance(node, SequenceNode):
            raise ValueError
        return node.value if is_text else tuple(construct(item) for item in node.value)
    if option.kind == "list" and isinstance(node, SequenceNode):
        return tuple(_convert_scalar(option, item) for item in node.value)
    return _convert_scalar(option, node)


def _convert_scalar(option: Option, node: Node) -> Any:
    if not isinstance(node, ScalarNode):
        raise ValueError
    text: str = node.value
    match option.item:
        case "text" | "choice":
            return text
        case "true or false":
            if node.tag != BOOL_TAG:
                raise ValueError
            return construct(node)
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
