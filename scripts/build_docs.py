#!/usr/bin/env python3
"""Builds the site of docs/ into build/site; a link that leads nowhere is an error.

    scripts/build_docs.py             # what `make docs` runs
    scripts/build_docs.py --sources   # only write build/site-sources, the pages that zensical reads

The pages of docs/ are written for GitHub, where they link to files of the repository. The site has
no such files, so they become pages of the site: a Markdown file as it is, and each other file as a
page that shows it. Links are rewritten to match. Needs the `docs` extra, and nothing of Trigon.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "build/site-sources"

PAGES = {
    Path("CONTRIBUTING.md"): Path("contributing.md"),
    Path("CHANGELOG.md"): Path("changelog.md"),
    Path("SECURITY.md"): Path("security.md"),
    Path("examples/README.md"): Path("recipes.md"),
}
"""Markdown files outside docs/ -> their place on the site; others are below files/."""

LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".jinja": "jinja", ".toml": "toml", ".ipynb": "json"}
"""Ending of a file -> the language that it is highlighted as."""

LINK = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)#\s]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write the sources, build the site unless told otherwise, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", action="store_true", help="only write the pages that zensical reads")
    only_sources = parser.parse_args().sources
    try:
        write_sources(SOURCES)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if only_sources:
        return 0
    shutil.rmtree(ROOT / "build/site", ignore_errors=True)
    # No colours: zensical colours each character, which a log shows as noise.
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)
    if built.returncode:
        print(output.split("Traceback (most recent call last)")[0], file=sys.stderr)
        return 1
    print(f"built: {(ROOT / 'build/site/index.html').relative_to(ROOT)}")
    return 0


def write_sources(folder: Path) -> list[Path]:
    """Write every page of the site and the files that it shows, and return the paths of the pages.

    folder: replaced. Raises: FileNotFoundError for a link to a file that does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = {page: page.relative_to("docs") for page in map(relative, sorted((ROOT / "docs").rglob("*.md")))}
    for file in map(relative, sorted((ROOT / "docs").rglob("*"))):
        if (ROOT / file).is_file() and file not in pages:
            write(folder / file.relative_to("docs"), (ROOT / file).read_bytes())
    todo = {**pages, **PAGES}
    done: dict[Path, Path] = {}
    while todo:
        file, place = todo.popitem()
        done[file] = place
        text, linked = page_of(file, place)
        write(folder / place, text.encode())
        todo.update({other: where for other, where in linked.items() if other not in done})
    return sorted(done.values())


def page_of(file: Path, place: Path) -> tuple[str, dict[Path, Path]]:
    """Return the page of a file or folder of the repository, and the further pages that it needs.

    file: relative to the repository. place: of the page, relative to the site.
    """
    if (ROOT / file).is_dir():
        files = [entry.relative_to(ROOT) for entry in sorted((ROOT / file).iterdir()) if entry.is_file()]
        text = "\n".join([f"# {file}", "", *(f"- [{entry.name}]({entry.name})" for entry in files), ""])
        base = file
    elif file.suffix == ".md":
        text, base = (ROOT / file).read_text(encoding="utf-8"), file.parent
    else:
        content = (ROOT / file).read_text(encoding="utf-8").rstrip()
        return f"# {file}\n\n`````{LANGUAGES.get(file.suffix, 'text')}\n{content}\n`````\n", {}
    linked: dict[Path, Path] = {}

    def rewrite(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(base / match[2]))
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{file} links to {match[2]}, which does not exist")
        where = place_of(target)
        if (ROOT / target).is_dir() or where.suffix == ".md":
            linked[target] = where
        return f"{match[1]}{os.path.relpath(where, place.parent)}{match[3] or ''}{match[4]}"

    # Code is left as it is: it may have brackets before parentheses.
    parts = CODE.split(text)
    return "".join(part if number % 2 else LINK.sub(rewrite, part) for number, part in enumerate(parts)), linked


def place_of(file: Path) -> Path:
    """Return where the site has a file or folder of the repository."""
    if file in PAGES:
        return PAGES[file]
    if file.parts[0] == "docs":
        return file.relative_to("docs")
    if (ROOT / file).is_dir():
        return Path("files") / file / "index.md"
    return Path("files") / file.with_name(file.name if file.suffix == ".md" else file.name + ".md")


def relative(path: Path) -> Path:
    """Return a path relative to the repository."""
    return path.relative_to(ROOT)


def write(path: Path, content: bytes) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
