"""The recipes of examples/, and what each hands to the trainer: a stand-in for python3 writes its arguments down."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path for path in EXAMPLES.rglob("*.sh") if "trigon.trainer.main" in path.read_text(encoding="utf-8"))
"""Every script that trains. A new one is tested because it is there."""


def name_of(recipe: Path) -> str:
    """Return how a recipe is called: "baselines/qwen2_5_vl_3b_clevr"."""
    return recipe.relative_to(EXAMPLES).with_suffix("").as_posix()


def arguments_of(
    recipe: Path, folder: Path, *overrides: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Run a recipe with these further arguments, its trainer replaced, and return what the trainer is given."""
    folder.mkdir(exist_ok=True)
    stand_in = folder / "python3"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
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
