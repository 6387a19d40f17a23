"""Parses YAML into nodes, which keep the line and the text of each value.

Size, depth and aliases are bounded, and every invalid text raises YAMLError: PyYAML itself recurses
once per level, expands aliases without limit, and raises KeyError, IndexError and others.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.events import AliasEvent
from yaml.nodes import CollectionNode, MappingNode, Node

MAX_CHARACTERS = 1_000_000
"""Maximum length of a YAML text. Configuration files have some thousand characters."""

MAX_NODES = 10_000
"""Maximum number of keys and values, with each alias counted as often as it is used."""

MAX_DEPTH = 32
"""Maximum number of levels, with those inside an alias. The schema has five."""

MAX_INTEGER_BITS = 1024
"""Maximum size of an integer. Python refuses to print one of more than about 14,000 bits."""

NULL_TAG = "tag:yaml.org,2002:null"
BOOL_TAG = "tag:yaml.org,2002:bool"
TEXT_TAG = "tag:yaml.org,2002:str"
LIST_TAG = "tag:yaml.org,2002:seq"


def parse_yaml(text: str) -> Node | None:
    """Return the root node of a YAML text, or None if the text is empty.

    Raises: YAMLError if the text is not valid YAML, exceeds a limit of this module, or has a value
    that cannot be constructed.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        root: Node | None = yaml.compose(text, Loader=_Loader)
    except (ValueError, OverflowError) as error:  # PyYAML's, for "\UFFFFFFFF" in a quoted text
        raise yaml.YAMLError(f"it has an invalid character or number: {error}") from error
    if root is not None:
        construct(root)
    return root


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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
