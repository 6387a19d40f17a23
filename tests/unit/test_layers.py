"""Checks the layers of docs/architecture.md: imports, and what only certain files may do.

Reads the source without importing it, except for the test of what importing the configuration
loads.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trigon"

LAYER = {
    "tools": 10,
    "api": 9, "assemble": 9,
    "loop": 8,
    "distributed": 7, "checkpoint": 7,
    "report": 6,
    "rollout": 5, "training": 5,
    "data": 4,
    "models": 3, "environments": 3,
    "algorithms": 2, "rewards": 2,
    "config": 1,
    "system": 0,
    "types": -1, "errors": -1, "metrics": -1,
    # Names of all layers, imported when they are first used, and the ways to start the command.
    "__init__": 11, "__main__": 11, "trainer": 11,
}  # fmt: skip

# The few that share a layer and know each other, in one direction; modules of the loop do freely.
NEIGHBOURS = {("api", "assemble")}

# Who may import what is heavy, or speaks to other processes. A name that ends in / is a folder.
ONLY_IN = {
    "vllm": ("rollout/vllm/",),
    "ray": ("distributed/",),
    "torch.distributed": (
        "distributed/",
        "rollout/vllm/leader.py",
        "rollout/vllm/process.py",
        "rollout/vllm/weight_check.py",
        "models/sequence_parallel.py",
        "training/parallel.py",
        "training/fsdp.py",
        "training/state.py",
    ),
    "cloudpickle": ("system/user_code.py",),
    "datasets": ("data/sources.py",),
    "av": ("data/videos.py",),
    "peft": ("models/lora.py",),
    "flash_attn": ("models/kernels.py",),
    "fla": ("models/linear_attention.py",),
    "torch.nn.attention": ("models/kernels.py",),
    "liger_kernel": ("models/fused.py",),
    "modelscope": ("models/hub.py",),
    "matplotlib": ("tools/plot/figure.py",),
    "rich": ("report/console.py",),
    "starlette": ("tools/view/server.py",),
    "uvicorn": ("tools/view/server.py",),
    "sqlite3": ("tools/view/index.py",),
    "torch.utils.tensorboard": ("report/loggers/tensorboard.py",),
    "gymnasium": ("environments/gymnasium.py",),
    "openenv": ("environments/openenv.py",),
    **{file.stem: (f"report/loggers/{file.name}",) for file in (PACKAGE / "report" / "loggers").glob("[a-z]*.py")},
}


class Import(NamedTuple):
    place: str  # "trigon/data/images.py:12"
    file: str  # "data/images.py"
    module: str  # absolute


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_name(path: Path) -> str:
    """Return the folder of a file in the package, or its own name: "data", "loop"."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layer(module: str) -> str | None:
    """Return "data" for the module "trigon.data.images", and None for modules of other packages."""
    package, _, rest = module.partition(".")
    if package != "trigon":
        return None
    name = rest.split(".")[0]
    return name if name in LAYER else "__init__"


def is_among(file: str, places: tuple[str, ...]) -> bool:
    return any(file.startswith(place) if place.endswith("/") else file == place for place in places)


def called_name(function: ast.expr) -> str:
    """Return the last part of what is called (importlib.import_module -> "import_module")."""
    return ast.unparse(function).rsplit(".", 1)[-1]


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return every import of a file, those inside functions too. `from a import b` counts as a and
    as a.b.
    """
    return tuple(_find_imports(path))


def _find_imports(path: Path) -> Iterator[Import]:
    parents = ["trigon", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                above = parents[: len(parents) - level + 1] if level else []
                module = ".".join([*above, *([module] if module else [])])
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if "import" in called_name(func):
                modules = [module]  # import_module("...") and its like
            case _:
                continue
        for module in modules:
            yield Import(f"trigon/{name_of(path)}:{node.lineno}", name_of(path), module)


def test_imports_go_down_or_stay_in_their_folder() -> None:
    wrong = []
    for path in FILES:
        here = layer_name(path)
        for found in imports(path):
            there = imported_layer(found.module)
            if there in (None, here, "__init__") or (here, there) in NEIGHBOURS or LAYER[there] < LAYER[here]:
                continue
            if LAYER[here] == LAYER[there] == LAYER["loop"]:
                continue
            wrong.append(f"{found.place}: {here} (layer {LAYER[here]}) knows {found.module} (layer {LAYER[there]})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_heavy_library_is_imported_in_its_own_file_only(library: str) -> None:
    found = {found for path in FILES for found in imports(path) if f"{found.module}.".startswith(f"{library}.")}
    wrong = sorted({place for place, file, _ in found if not is_among(file, ONLY_IN[library])})
    assert not wrong, f"{library} belongs in {ONLY_IN[library]}, not at {wrong}"


def test_importing_the_configuration_brings_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "vllm", "ray", "datasets", "numpy", "rich")
    script = f"import sys, trigon.config.schema, trigon.config.load; print(*(m for m in {heavy!r} if m in sys.modules))"
    brought = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert brought.returncode == 0, brought.stderr
    assert brought.stdout.split() == []
