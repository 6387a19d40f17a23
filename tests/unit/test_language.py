"""Keeps the project's language plain: words that were replaced by the field's terms must not come
back.

One word for one thing: what the policy generates is a completion, the dataset's truth is the ground
truth, the user's scoring code is a reward function that runs in reward workers, weights reach the
rollout engine in a weight sync, a row that is not used is skipped, a group that is not learned from
is filtered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("trigon", "tests", "benchmarks", "scripts", "examples", "docs", "docker")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")
ENDINGS = {".py", ".md", ".sh", ".yaml", ".toml", ".svg", ""}
# Keys and names in files that users have keep their spelling.
KEPT = re.compile(
    r"grader/\w*|filter/ungraded_fraction|filter/\{kept,low,high,ungraded\}_fraction|nobody/nothing"
    r"|num_set_aside|(?<![ \w])set_aside\b|actor/vision_remembered|group/all_right_fraction"
)

REPLACED = {
    "type": r"passports?|suitcases?",
    "module, layer, folder": r"rooms|floors|floor plan|houses|roads|seams?",
    "worker group, worker": r"crews?",
    "heartbeat": r"vitals?",
    "intervals": r"rhythms?",
    "reward function, reward worker, scored": r"graders?|graded|ungraded",
    "weight sync": r"hand-?overs?|handing over|handed over",
    "skipped, filtered": r"set(?:s|ting)? (?:\w+ )?aside|sets? them aside",
    "wait for the remaining workers": r"hear(?:s|d)? (?:the others|out)|heard of|heard out|hears? of",
    "more expensive": r"dearer",
    "readable": r"as a person (?:says|reads)|a person says",
    "does not depend on": r"refus(?:es|ing|ed) to know|knows? nothing (?:of|else)",
    "other code": r"somebody(?: else)?(?:'s)?|nobody(?: else)?(?:'s)?|whose hands",
    "dummy, dry run": r"made[- ]up|rehears\w+",
    "option, setting": r"wish(?:es|ed)?",
    "Trigon only": r"Ours\.",
    "policy / reference outputs": r"theirs",
    "wake-up socket": r"bells?|ears?",
    "serialization": r"on the wire|over the wire",
    "gradient": r"taught|teaches nothing",
    "": r"strangers?|cards|goes by|go by that|whatever (?:else|they|it)|once upon|said to be",
}


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield (file, line number, line) of every text file that is written by hand."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    for path in sorted({*files, *(ROOT / page for page in PAGES)}):
        if path.is_file() and "__pycache__" not in path.parts and path != Path(__file__):
            name = str(path.relative_to(ROOT))
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                yield name, number, KEPT.sub("", line)


LINES = list(texts())


@pytest.mark.parametrize(("instead", "pattern"), REPLACED.items(), ids=lambda value: str(value)[:30])
def test_replaced_words_do_not_come_back(instead: str, pattern: str) -> None:
    word = re.compile(rf"(?<![\w/.-])(?:{pattern})(?![\w-])", flags=re.IGNORECASE)
    found = [f"{name}:{number}: {match.group()}" for name, number, line in LINES for match in word.finditer(line)]
    assert not found, f"write {instead or 'it plainly'} instead:\n" + "\n".join(found[:40])


def test_docstrings_begin_with_a_sentence_of_one_line() -> None:
    wrong = []
    for path in sorted((ROOT / "trigon").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first, *_ = (ast.get_docstring(node) or ".").splitlines()
                if not first.endswith((".", "?", "!")):
                    wrong.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {first}")
    assert not wrong, "\n".join(wrong)
