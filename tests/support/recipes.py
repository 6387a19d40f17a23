"""The recipes of examples/ and their trainer arguments, captured by a fake python3."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path for path in EXAMPLES.rglob("*.sh") if "trigon.trainer.main" in path.read_text(encoding="utf-8"))
"""Every script in examples/ that trains. New scripts are tested automatically."""


def name_of(recipe: Path) -> str:
    """Return the name of a recipe: "baselines/qwen2_5_vl_3b_clevr"."""
    return recipe.relative_to(EXAMPLES).with_suffix("").as_posix()


def arguments_of(
    recipe: Path, folder: Path, *overrides: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the trainer's arguments of a recipe run with further arguments and a fake trainer."""
    folder.mkdir(exist_ok=True)
    fake_python = folder / "python3"
    fake_python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    fake_python.chmod(0o755)
    output = subprocess.run(
        ["bash", str(recipe), *overrides],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), **(environment or {})},
        cwd=ROOT,
    ).stdout
    module, name, *arguments = output.split("\0")[:-1]
    assert (module, name) == ("-m", "trigon.trainer.main")
    return arguments
