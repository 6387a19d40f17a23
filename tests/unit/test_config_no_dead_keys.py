"""Every configuration key is read by the package.

The search follows the schema's types through the package's syntax trees without importing it: from
parameters, fields and return values annotated with a section (`config: Config`,
`def load_config(...) -> LoadedConfig`), through attributes (`config.worker.actor.optim.lr`) and
simple assignments (`actor = config.worker.actor`, `a, b = x.data, x.trainer`). `getattr`,
`model_dump`, loops over sections and names in strings do not count as reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trigon
from trigon.config.options import options, sections

PACKAGE = Path(trigon.__file__).parent
SECTIONS = {section.__name__: (path, section) for path, section in sections()}
GENERIC_FILES = {"schema.py", "legacy.py", "options.py", "load.py"}
"""Files of trigon/config that process all keys alike, and so read none of them."""

Scope = dict[str, str]
"""Variables of known type: name -> name of the class."""


class Reads:
    """The options that a set of modules reads: option names by file."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.by_file: dict[str, set[str]] = {}
        self._fields: dict[tuple[str, str], str] = {}
        self._returns: dict[str, str] = {}
        trees = {name: ast.parse(source) for name, source in modules.items()}
        for _ in range(2):  # a field's class may be declared later
            for tree in trees.values():
                self._declare(tree)
        for name, tree in trees.items():
            self._file = self.by_file.setdefault(name, set())
            self._follow(tree.body, {}, owner=None)

    def _declare(self, tree: ast.Module) -> None:
        """Record the types of fields and of return values."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in SECTIONS:
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        self._record_type(self._fields, (node.name, statement.target.id), statement.annotation)
                    elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                        parameters = self._parameters(statement, owner=node.name)
                        for target, value in _assignments(statement.body):
                            kind = self._type(value, parameters)
                            if isinstance(target, ast.Attribute) and kind is not None:
                                self._fields[node.name, target.attr] = kind
            elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                self._record_type(self._returns, node.name, node.returns)

    def _record_type(self, table: dict, key: object, annotation: ast.expr) -> None:
        kind = self._config_class(annotation)
        if kind is not None:
            table[key] = kind

    def _config_class(self, annotation: ast.expr | None) -> str | None:
        """Return the class of an annotation if the configuration can be reached from it."""
        match annotation:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                known = name in SECTIONS or any(owner == name for owner, _ in self._fields)
                return name if known else None
            case ast.Constant(value=str(text)):
                return self._config_class(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._config_class(left) or self._config_class(right)
            case _:
                return None

    def _parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, owner: str | None) -> Scope:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        scope = {argument.arg: self._config_class(argument.annotation) for argument in arguments}
        if owner is not None and arguments:
            scope[arguments[0].arg] = owner
        return {name: kind for name, kind in scope.items() if kind is not None}

    def _follow(self, body: list[ast.stmt], outer: Scope, owner: str | None) -> None:
        """Record the reads of a body. Functions inside it see its variables."""
        scope = dict(outer)
        for _ in range(3):  # in a loop an assignment may use a later one
            for target, value in _assignments(body):
                kind = self._type(value, scope)
                if isinstance(target, ast.Name) and kind is not None:
                    scope[target.id] = kind
            for node in _nodes_of_body(body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    self._record_type(scope, node.target.id, node.annotation)
        for node in _nodes_of_body(body):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                section = self._type(node.value, scope)
                if section in SECTIONS and node.attr in SECTIONS[section][1].model_fields:
                    self._file.add(".".join((*SECTIONS[section][0], node.attr)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._follow(node.body, {**scope, **self._parameters(node, owner)}, owner=None)
            elif isinstance(node, ast.Lambda):
                self._follow([ast.Expr(node.body)], {**scope, **self._parameters(node, None)}, owner=None)
            elif isinstance(node, ast.ClassDef):
                self._follow(node.body, scope, owner=node.name)

    def _type(self, expression: ast.expr, scope: Scope) -> str | None:
        match expression:
            case ast.Name(id=name):
                return scope.get(name)
            case ast.NamedExpr(value=value):
                return self._type(value, scope)
            case ast.Attribute(value=value, attr=attribute):
                owner = self._type(value, scope)
                if owner in SECTIONS:
                    field = SECTIONS[owner][1].model_fields.get(attribute)
                    name = getattr(field.annotation, "__name__", "") if field else ""
                    return name if name in SECTIONS else None
                return self._fields.get((owner, attribute)) if owner else None
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._returns.get(name)
            case _:
                return None


def _nodes_of_body(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a body, without descending into functions, lambdas and classes."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pending += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
            case ast.Lambda() | ast.ClassDef():
                pass
            case _:
                pending += ast.iter_child_nodes(node)


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of every assignment of a body. Tuples are unpacked."""
    for node in _nodes_of_body(body):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from zip(targets, values, strict=False)
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                yield target, value
            case _:
                pass


@pytest.fixture(scope="module")
def reads() -> Reads:
    files = [
        path for path in PACKAGE.rglob("*.py") if not (path.parent.name == "config" and path.name in GENERIC_FILES)
    ]
    return Reads({str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in files})


@pytest.mark.extended
def test_every_key_is_read(reads):
    read = set().union(*reads.by_file.values())
    assert [option.name for option in options().values() if option.name not in read] == []


def test_every_key_is_read_outside_the_checks(reads):
    outside = set().union(*(names for file, names in reads.by_file.items() if file != "config/checks.py"))
    assert {option.name for option in options().values()} - outside == set()


def test_each_section_class_is_used_once():
    assert len(SECTIONS) == len(list(sections()))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(config: Config): return config.worker.actor.optim.lr", {"worker.actor.optim", "worker.actor.optim.lr"}),
        ("def f(data: schema.DataConfig | None): return data.seed", {"data.seed"}),
        ("def f(data: 'DataConfig'):\n  x = data\n  return [x.seed for _ in y]", {"data.seed"}),
        ("def f(c: Config):\n  a, b = c.data, c.trainer\n  def g(): return a.seed\n  return b.device", {"data.seed"}),
        ("def f(c: Config):\n  if (r := c.worker.rollout).n: return lambda: r.top_p", {"worker.rollout.top_p"}),
        (
            "class L:\n  config: Config\ndef g() -> L: ...\ndef f():\n  x = g()\n  return x.config.data.seed",
            {"data.seed"},
        ),
        (
            "class R:\n  def __init__(self, c: Config): self.c = c\n  def f(self): return self.c.data.seed",
            {"data.seed"},
        ),
    ],
)
def test_the_search_finds_a_read(source, expected):
    assert expected <= Reads({"m.py": source}).by_file["m.py"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(config): return config.data.seed",
        "def f(config: Config): return 'data.seed'",
        "def f(config: Config): config.data.model_dump()",
        "def f(data: Other): return data.seed",
        "def f(data: DataConfig): ...\ndef g(data): return data.seed",
    ],
)
def test_the_search_ignores_what_is_not_a_read(source):
    assert "data.seed" not in Reads({"m.py": source}).by_file["m.py"]
