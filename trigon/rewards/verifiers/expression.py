"""Parses expressions in plain text, such as `(x+1)/sqrt(2)`, and compares their values.

A grammar of numbers, variables, + - * / ^ ! and a few functions. Nothing is evaluated as Python, so
text from a model can be passed. Rational values are exact (Fraction), others have 60 digits
(Decimal). Text that is too long or nested too deeply, values that are too large and too many
operations raise TooComplex, which bounds the time of a comparison.
"""

from __future__ import annotations

import decimal
import hashlib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_TOKENS = 300
MAX_DEPTH = 40
"""Maximum nesting of parentheses, signs and exponents."""

MAX_DIGITS = 200
"""Maximum number of digits of a number."""

MAX_BITS = 4096
"""Maximum size of numerator and denominator of a value together."""

MAX_EXPONENT = 1000
MAX_FACTORIAL = 50
MAX_VARIABLES = 6
_MAX_ARGUMENT = 10**6  # of trigonometric functions and exp
_MAX_FUNCTION_CALLS = 2000  # for all points of a comparison
_NUM_POINTS = 12

_CONTEXT = decimal.Context(prec=60, Emax=10**6, Emin=-(10**6), traps=[decimal.Overflow, decimal.InvalidOperation])
_RELATIVE_TOLERANCE = Decimal("1e-40")
_ABSOLUTE_TOLERANCE = Decimal("1e-45")

FUNCTIONS = ("sqrt", "root", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp")
_TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
    rf"|(?P<name>{'|'.join(FUNCTIONS)}|pi|[^\W\d_][\u0300-\u036f\u20d0-\u20ff]*)"
    r"|(?P<symbol>[-+*/^()\[\]!,&_])"
)
_LETTERS = re.compile(r"[^\W\d_]+")
_KNOWN_NAME = re.compile(rf"{'|'.join(FUNCTIONS)}|^pi|pi$")

_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

Value = Fraction | Decimal


class TooComplex(Exception):
    """An answer exceeds the bounds of this package; it counts as wrong."""


class NotAnExpression(Exception):
    """A text is not an expression of the grammar."""


class Undefined(Exception):
    """An expression has no real value, such as 1/0."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression's tree.

    kind: "number", "variable", "pi", an operator or the name of a function. name: the name of a
    variable.
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


def is_equal(left: str, right: str) -> bool:
    """Return whether two expressions have the same value for all real values of their variables.

    Expressions with variables are compared at points that depend on both texts; they must be
    defined at the same points.
    Raises: as expression.parse; TooComplex also if a value is too large.
    """
    trees = parse(left), parse(right)
    names = sorted(_variables(trees[0]) | _variables(trees[1]))
    if len(names) > MAX_VARIABLES:
        raise TooComplex(f"more than {MAX_VARIABLES} variables")
    evaluator = _Evaluator()
    num_defined = 0
    for index in range(_NUM_POINTS if names else 1):
        point = {name: _coordinate(f"{name} {index} {left} {right}") for name in names}
        values = [_value_or_none(evaluator, tree, point) for tree in trees]
        if (values[0] is None) != (values[1] is None):
            return False
        if values[0] is not None and values[1] is not None:
            if not _is_close(values[0], values[1]):
                return False
            num_defined += 1
    return num_defined >= (2 if names else 1)


def _variables(tree: Node) -> set[str]:
    names = {tree.name} if tree.kind == "variable" else set()
    return names.union(*map(_variables, tree.arguments))


def _coordinate(seed: str) -> Fraction:
    """Return a rational number between -64 and 64, of any magnitude from 1/8."""
    digest = hashlib.sha256(seed.encode()).digest()
    magnitude = Fraction(digest[0] % 61 + 64, 64) * Fraction(2) ** (digest[1] % 9 - 3)
    return magnitude if digest[2] % 8 < 5 else -magnitude


def _value_or_none(evaluator: _Evaluator, tree: Node, point: Mapping[str, Fraction]) -> Value | None:
    try:
        with decimal.localcontext(_CONTEXT):
            return evaluator.value(tree, point)
    except Undefined:
        return None
    except decimal.DecimalException as error:
        raise TooComplex(f"a value exceeds the bounds ({type(error).__name__})") from error


def _is_close(left: Value, right: Value) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    with decimal.localcontext(_CONTEXT):
        a, b = _to_decimal(left), _to_decimal(right)
        return abs(a - b) <= max(_RELATIVE_TOLERANCE * max(abs(a), abs(b)), _ABSOLUTE_TOLERANCE)


class _Evaluator:
    """Computes the value of trees at points, and counts the calls of functions."""

    def __init__(self) -> None:
        self._num_calls = 0

    def value(self, tree: Node, point: Mapping[str, Fraction]) -> Value:
        """Return the value of a tree. Raises: Undefined, TooComplex, DecimalException."""
        if tree.kind == "number":
            return tree.number
        if tree.kind == "variable":
            return point[tree.name]
        if tree.kind == "pi":
            return _PI
        arguments = [self.value(argument, point) for argument in tree.arguments]
        return _bounded(self._apply(tree.kind, arguments))

    def _apply(self, kind: str, arguments: list[Value]) -> Value:
        x, y = arguments[0], arguments[-1]
        if kind in _ARITHMETIC:
            return _arithmetic(kind, x, y)
        if kind == "negative":
            return -x
        if kind == "!":
            return _factorial(x)
        self._num_calls += 1
        if self._num_calls > _MAX_FUNCTION_CALLS:
            raise TooComplex(f"more than {_MAX_FUNCTION_CALLS} calls of functions")
        if kind == "^":
            return _power(x, y)
        if kind == "root":
            return _root(x, y)
        if kind == "sqrt":
            return _root(Fraction(2), x)
        return _function(kind, x)


def _arithmetic(kind: str, x: Value, y: Value) -> Value:
    if kind == "/" and y == 0:
        raise Undefined
    compute: Callable[[Any, Any], Value] = _ARITHMETIC[kind]
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return compute(x, y)
    return compute(_to_decimal(x), _to_decimal(y))


def _factorial(x: Value) -> Value:
    if not isinstance(x, Fraction) or x.denominator != 1 or x < 0:
        raise Undefined
    if x > MAX_FACTORIAL:
        raise TooComplex(f"a factorial of more than {MAX_FACTORIAL}")
    return Fraction(math.factorial(int(x)))


def _power(base: Value, exponent: Value) -> Value:
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise TooComplex(f"an exponent of more than {MAX_EXPONENT}")
    if base == 0 and exponent <= 0:
        raise Undefined
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction) and _bits(base) * abs(int(exponent)) > 2 * MAX_BITS:
            raise TooComplex("a power with too many digits")
        return base ** int(exponent)
    if base < 0:
        raise Undefined
    if isinstance(exponent, Fraction) and exponent.denominator == 2:
        return _power(_root(Fraction(2), base), Fraction(exponent.numerator))
    return _to_decimal(base) ** _to_decimal(exponent)


def _root(degree: Value, x: Value) -> Value:
    """Return the real root. The roots of squares are exact."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= MAX_EXPONENT:
        raise Undefined
    if x < 0:
        if degree % 2 == 0:
            raise Undefined
        return -_root(degree, -x)
    if x == 0:
        return Fraction(0)
    if degree != 2:
        root = _to_decimal(x) ** (1 / _to_decimal(degree))
        nearest = Fraction(round(root)) if root < 10**20 else Fraction(0)
        return nearest if nearest**2 < 2**64 and degree < 64 and nearest ** int(degree) == x else root
    if isinstance(x, Fraction):
        numerator, denominator = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if numerator**2 == x.numerator and denominator**2 == x.denominator:
            return Fraction(numerator, denominator)
    return _to_decimal(x).sqrt()


def _function(name: str, x: Value) -> Value:
    if name in ("ln", "log"):
        if x <= 0:
            raise Undefined
        # Whether log has the base e, 2 or 10 is unknown, so that only ratios of logarithms count.
        return _to_decimal(x).ln() * (1 if name == "ln" else _UNKNOWN_BASE)
    if not -_MAX_ARGUMENT <= x <= _MAX_ARGUMENT:
        raise TooComplex(f"an argument of {name} of more than {_MAX_ARGUMENT}")
    if name == "exp":
        return _to_decimal(x).exp()
    sine, cosine = _sine(_to_decimal(x)), _sine(_to_decimal(x) + _PI / 2)
    numerators = {"sin": sine, "cos": cosine, "tan": sine, "cot": cosine, "sec": Decimal(1), "csc": Decimal(1)}
    denominators = {"tan": cosine, "cot": sine, "sec": cosine, "csc": sine}
    denominator = denominators.get(name, Decimal(1))
    if abs(denominator) < _ABSOLUTE_TOLERANCE:
        raise Undefined
    return numerators[name] / denominator


def _sine(x: Decimal) -> Decimal:
    """Return the sine by its Taylor series, for x in radians."""
    x = x.remainder_near(2 * _PI)
    term = total = x
    for n in range(2, 200, 2):
        term = -term * x * x / (n * (n + 1))
        total += term
        if abs(term) < Decimal("1e-65"):
            break
    return total


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction) and _bits(value) > MAX_BITS:
        raise TooComplex("a number with too many digits")
    return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _to_decimal(value: Value) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator) if isinstance(value, Fraction) else value


_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
_UNKNOWN_BASE = Decimal("1.0823232337111381915160036965411679027747509519187269")
