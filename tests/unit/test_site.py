"""The site of docs/: its navigation, and that `make docs` builds it and refuses a broken link."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import build_docs
import drawings

ROOT = Path(__file__).parents[2]


def navigation(entries: Any) -> Iterator[str]:
    """Yield the pages of the navigation, in order."""
    for entry in entries:
        for content in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(content, str):
                yield content
            else:
                yield from navigation(content)


def test_the_navigation_has_every_page_once(tmp_path):
    pages = [page.as_posix() for page in build_docs.write_sources(tmp_path / "sources")]
    listed = list(navigation(tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]))
    assert sorted(listed) == sorted(page for page in pages if not page.startswith("files/"))


def test_links_that_leave_docs_lead_to_pages_of_the_site(tmp_path):
    build_docs.write_sources(tmp_path / "sources")
    text = (tmp_path / "sources/distributed.md").read_text("utf-8")
    assert "[`examples/cluster/slurm.sh`](files/examples/cluster/slurm.sh.md)" in text
    assert "#!/usr/bin/env bash" in (tmp_path / "sources/files/examples/cluster/slurm.sh.md").read_text("utf-8")
    assert "](architecture.md)" in (tmp_path / "sources/contributing.md").read_text("utf-8")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of what the site is made from."""
    pytest.importorskip("zensical", reason="the docs extra is not installed")
    copy = tmp_path_factory.mktemp("repository")
    for name in ("docs", "examples", "docker", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "README.md", "zensical.toml"):
        shutil.copy(ROOT / name, copy)
    return copy


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, folder / "scripts/build_docs.py"], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.extended
def test_the_site_is_built_without_a_broken_link(copied):
    result = build(copied)
    assert (result.returncode, result.stderr) == (0, "")
    assert "<h1" in (copied / "build/site/quickstart/index.html").read_text("utf-8")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[x](data.md#no-such-heading)", "anchor does not exist"),
        ("[x](no-such-page.md)", "no-such-page.md, which does not exist"),
        ("![x](images/no-such-drawing.svg)", "no-such-drawing.svg, which does not exist"),
    ],
)
def test_a_broken_link_fails_the_build(copied, link, message):
    page = copied / "docs/quickstart.md"
    text = page.read_text("utf-8")
    page.write_text(f"{text}\n{link}\n", "utf-8")
    result = build(copied)
    page.write_text(text, "utf-8")
    assert result.returncode == 1
    assert message in result.stderr


@pytest.mark.extended(but=["command_line_page"])
@pytest.mark.parametrize("script", ["command_line_page", "hardware_page", "check_page"])
def test_a_generated_page_is_up_to_date(script, monkeypatch, own_datasets_cache):
    monkeypatch.setenv("COLUMNS", "100")
    page = ROOT / "docs" / f"{script.removesuffix('_page').replace('_', '-')}.md"
    text, module = page.read_text("utf-8"), importlib.import_module(script)
    assert text == (module.page(text) if script == "check_page" else module.document()), f"run: scripts/{script}.py"
    assert f"{Path.home()}/" not in text


def test_the_drawings_are_what_the_script_writes():
    folder = ROOT / "docs/images"
    made = drawings.drawings()
    assert {name: (folder / name).read_text("utf-8") for name in made} == made
