"""Counts the lines of code of the package and its tests: `python scripts/count_code.py`.

Blank lines, comments, docstrings and the texts that document a name are no code. Characters are
counted beside lines, so that denser lines gain nothing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(path: Path) -> tuple[int, int]:
    """Return the lines of code of a file, and their characters without white space at both ends."""
    text = path.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            for line in range(token.start[0], token.end[0] + 1):
                lines.setdefault(line, [])
    code = [number for number in lines if number not in documented]
    written = text.splitlines()
    return len(code), sum(len(written[number - 1].strip()) for number in code)


def main() -> None:
    """Print a row for each folder of the package, the core, the package, and the tests."""
    modules: Counter[str] = Counter()
    code: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    package, tests = ROOT / "trigon", ROOT / "tests"
    for path in sorted([*package.rglob("*.py"), *tests.rglob("*.py")]):
        parts = path.relative_to(ROOT).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*.py"
        totals = [parts[0]] + (["core (trigon without tools)"] if parts[:2] != ("trigon", "tools") else [])
        lines, size = count(path)
        for name in [folder, *(totals if parts[0] == "trigon" else totals[:1])]:
            modules[name] += 1
            code[name] += lines
            characters[name] += size
    width = max(map(len, modules))
    print(f"{'':{width}}  modules    lines  characters")
    for name in sorted(modules, key=lambda name: (not name.startswith("trigon/"), name)):
        print(f"{name:{width}}  {modules[name]:7,}  {code[name]:7,}  {characters[name]:10,}")
    physical = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests.rglob("*.py"))
    print(f"physical lines of tests: {physical:,}")


if __name__ == "__main__":
    main()
