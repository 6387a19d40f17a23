"""The code blocks of the project's pages, with the marks that say how they are tested.

A mark is an HTML comment on the line before a block:

    <!-- run: NAME -->               run by tests/integration/: the marked blocks of a
                                     page with the same NAME, in order, in one folder and one shell
    <!-- file: NAME path -->          written to this file before the blocks after it run
    <!-- background: NAME URL -->     started, waited for until URL answers, and ended at the end

Blocks without a mark are not run: their commands are checked (tests/unit/test_pages.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    sorted(
        [
            *("README.md", "CONTRIBUTING.md", "examples/README.md"),
            *(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md")),
        ]
    )
)

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>run|file|background): (?P<values>[^>]*?) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^[ ]*(?P=fence)[ ]*$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block. page: relative to the repository. line: of its first fence, from 1.

    mark: run, file, background, or "". name: of the session that it belongs to. value: the file or
    the URL.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        name, _, value = (match["values"] or "").partition(" ")
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("fence")) + 1
        blocks.append(Block(page, line, match["language"], code, match["mark"] or "", name, value))
    return blocks


def sessions() -> dict[str, list[Block]]:
    """Return the marked blocks of all pages: "page name" -> its blocks, in order."""
    found: dict[str, list[Block]] = {}
    for page in PAGES:
        for block in blocks_of(page):
            if block.mark:
                found.setdefault(f"{page} {block.name}", []).append(block)
    return found
