"""Writes the folder from which a user starts: run.yaml, reward.py, data.jsonl and its images."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from trigon.config.paths import local_path, nearest_path
from trigon.errors import ConfigError
from trigon.tools.quickstart.drawings import PROBLEM, draw

DEFAULT_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
"""The model of run.yaml, a hub id."""

NUM_ROWS = 5
SEED = 1

_HERE = Path(__file__).parent


def write_starter(folder: Path, *, model: str = DEFAULT_MODEL, tiny: bool = False) -> list[Path]:
    """Write the files of a run into a folder, which is made if needed, and return their paths.

    model: a hub id, or a folder, which is written as an absolute path, since the run is started
    from another folder. tiny: make the embedded tiny model in the folder instead, which takes about
    as long as `trigon tiny`.
    Raises: ConfigError if model is a path at which there is nothing, or if one of the files exists
    already; nothing is written then.
    """
    model_path = "./model" if tiny else json.dumps(_model_path(model))
    rows = [(f"images/{number}.png", number) for number in range(1, NUM_ROWS + 1)]
    names = ["run.yaml", "reward.py", "data.jsonl", *(name for name, _ in rows), *(["model"] if tiny else [])]
    if existing := [name for name in names if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} has {', '.join(existing)} already, and nothing is overwritten: name another folder, or remove it"
        )
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    for name, area in rows:
        draw(rng, area).save(folder / name)
    lines = [json.dumps({"problem": PROBLEM, "images": [name], "answer": str(area)}) for name, area in rows]
    (folder / "data.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    template = _HERE / ("run_tiny.yaml" if tiny else "run.yaml")
    text = template.read_text(encoding="utf-8").replace("MODEL", model_path, 1)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    (folder / "reward.py").write_bytes((_HERE / "reward_template.py").read_bytes())
    if tiny:
        make_model(folder)
    return [folder / name for name in names]


def _model_path(model: str) -> str:
    """Return a hub id as it is, and the folder of a model as an absolute path."""
    path = local_path(model)
    if path is None:
        return model
    if not path.exists():
        raise ConfigError(f"there is no model at {model}{nearest_path(model)}; name a folder, or a hub id (owner/name)")
    return str(path.resolve())


def make_model(folder: Path) -> None:
    """Make the tiny model in folder/model, after its supervised warm start on other drawings.

    Raises: ConfigError if it could not be made.
    """
    from trigon.report.console import Console
    from trigon.tools.quickstart.make import make

    with tempfile.TemporaryDirectory(dir=folder, prefix=".tiny") as temporary:
        if not make(Path(temporary), Console()):
            raise ConfigError("the tiny model could not be made, see above")
        (Path(temporary) / "model").rename(folder / "model")
