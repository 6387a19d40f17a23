"""Parses mathematical expressions in plain text, such as `(x+1)/sqrt(2)`.

A grammar of numbers, variables, + - * / ^ ! and a few functions. Nothing is evaluated as Python, so
text from a model can be passed. Text that is too long or nested too deeply raises TooComplex.
values.py computes values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_TOKENS = 300
MAX_DEPTH = 40
"""Maximum nesting of parentheses, signs and exponents."""

MAX_DIGITS = 200
"""Maximum number of digits of a number."""

FUNCTIONS = ("sqrt", "root", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp")
_TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
    rf"|(?P<name>{'|'.join(FUNCTIONS)}|pi|[^\W\d_][\u0300-\u036f\u20d0-\u20ff]*)"
    r"|(?P<symbol>[-+*/^()\[\]!,&_])"
)
_LETTERS = re.compile(r"[^\W\d_]+")
_KNOWN_NAME = re.compile(rf"{'|'.join(FUNCTIONS)}|^pi|pi$")


class TooComplex(Exception):
    """An answer exceeds the bounds of this package; it counts as wrong."""


class NotAnExpression(Exception):
    """A text is not an expression of the grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression's tree.

    kind: "number", "variable", "pi", an operator or the name of a function. name: of a variable.
    number: the value of a number.
    """

    kind: str
    arguments: tuple[Node, ...] = ()
    name: str = ""
    number: Fraction = Fraction(0)


def parse(text: str) -> Node:
    """Return the tree of an expression in the plain form of notation.py.

    Raises: NotAnExpression if the text is not in the grammar, TooComplex if it exceeds the bounds.
    """
    for word in _LETTERS.findall(text):
        if len(_KNOWN_NAME.sub("", word)) > 2:
            raise NotAnExpression(f"the word {word[:20]}")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or (found["name"] and not text[position].isalpha()):  # such as ①
            raise NotAnExpression(f"the character {text[position]!r}")
        if len(tokens) == MAX_TOKENS:
            raise TooComplex(f"more than {MAX_TOKENS} numbers, names and symbols")
        tokens.append((str(found.lastgroup), found[0]))
        position = found.end()
    return _Parser(tokens).parse()


class _Parser:
    """Recursive descent.

    sum: product (("+" | "-") product)*
    product: signed (("*" | "/" | nothing) signed)*
    signed: ("+" | "-") signed | power
    power: postfix ("^" signed)?
    postfix: atom "!"?
    atom: number | mixed number | variable | pi | function | "(" sum ")" | "[" sum "]"
    """

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def parse(self) -> Node:
        tree = self._sum()
        if self._position < len(self._tokens):
            raise NotAnExpression(f"unexpected {self._text()!r}")
        return tree

    def _kind(self) -> str:
        return self._tokens[self._position][0] if self._position < len(self._tokens) else ""

    def _text(self) -> str:
        return self._tokens[self._position][1] if self._position < len(self._tokens) else ""

    def _next(self) -> str:
        text = self._text()
        self._position += 1
        return text

    def _take(self, text: str) -> None:
        if self._next() != text:
            raise NotAnExpression(f"expected {text!r}")

    def _sum(self) -> Node:
        self._enter()
        tree = self._product()
        while self._text() in ("+", "-"):
            tree = Node(self._next(), (tree, self._product()))
        self._depth -= 1
        return tree

    def _product(self) -> Node:
        tree = self._signed()
        while True:
            if self._text() in ("*", "/"):
                tree = Node(self._next(), (tree, self._signed()))
            elif self._kind() == "name" or self._text() in ("(", "[") or self._is_number_after_other():
                tree = Node("*", (tree, self._power()))
            else:
                return tree

    def _is_number_after_other(self) -> bool:
        return self._kind() == "number" and self._tokens[self._position - 1][0] != "number"

    def _signed(self) -> Node:
        self._enter()
        if self._text() in ("+", "-"):
            sign = self._next()
            tree = self._signed()
            tree = Node("negative", (tree,)) if sign == "-" else tree
        else:
            tree = self._power()
        self._depth -= 1
        return tree

    def _power(self) -> Node:
        base = self._atom()
        if self._text() == "!":
            base = Node(self._next(), (base,))
        if self._text() == "^":
            return Node(self._next(), (base, self._signed()))
        return base

    def _atom(self) -> Node:
        kind, text = self._kind(), self._next()
        if kind == "number":
            return self._mixed_number(_read_number(text)) if self._text() == "&" else _read_number(text)
        if text in ("(", "["):
            tree = self._sum()
            self._take(")" if text == "(" else "]")
            return tree
        if kind != "name":
            raise NotAnExpression(f"unexpected {text!r}")
        if text == "pi":
            return Node("pi")
        if text in FUNCTIONS:
            return self._function(text)
        return Node("variable", name=text + (self._subscript() if self._text() == "_" else ""))

    def _subscript(self) -> str:
        """Return "_12" for "_12" and "_(12)"."""
        self._take("_")
        has_parentheses = self._text() == "("
        if has_parentheses:
            self._take("(")
        if self._kind() not in ("number", "name"):
            raise NotAnExpression(f"the subscript {self._text()!r}")
        subscript = self._next()
        if has_parentheses:
            self._take(")")
        return f"_{subscript}"

    def _mixed_number(self, integer: Node) -> Node:
        self._take("&")
        numerator = _read_number(self._next())
        self._take("/")
        return Node("+", (integer, Node("/", (numerator, _read_number(self._next())))))

    def _function(self, name: str) -> Node:
        if name == "root":
            self._take("(")
            degree = self._sum()
            self._take(",")
            argument = self._sum()
            self._take(")")
            return Node("root", (degree, argument))
        base = exponent = None
        if name == "log" and self._text() == "_":
            self._next()
            base = self._atom()
        if self._text() == "^":  # sin^2(x)
            self._next()
            exponent = self._atom()
            if exponent.kind != "number":
                raise NotAnExpression("a function with an exponent that is not a number")
        argument = self._function_argument(name)
        tree = Node(name, (argument,)) if base is None else Node("/", (Node("ln", (argument,)), Node("ln", (base,))))
        return tree if exponent is None else Node("^", (tree, exponent))

    def _function_argument(self, name: str) -> Node:
        """Return the argument: (2x), or without parentheses 2 of sqrt2x, and 2x of sin2x."""
        self._enter()
        if self._text() == "(" or name == "sqrt":
            argument = self._atom()
        else:
            argument = self._power()
            while self._kind() in ("number", "name") and self._text() not in FUNCTIONS:
                argument = Node("*", (argument, self._power()))
        self._depth -= 1
        return argument

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:  # a pair of parentheses is a sum and a signed term
            raise TooComplex(f"nested more than {MAX_DEPTH} times")


def _read_number(text: str) -> Node:
    if not re.fullmatch(r"[\d.]+(?:e[+-]?\d+)?", text):
        raise NotAnExpression(f"expected a number, found {text[:20]!r}")
    digits, _, exponent = text.partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise TooComplex(f"a number of more than {MAX_DIGITS} digits")
    return Node("number", number=Fraction(text))
