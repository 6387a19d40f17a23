"""`trigon init [FOLDER]`: writes a run to start from: configuration, reward function, five rows."""

from __future__ import annotations

import json
import random
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trigon.config.paths import local_path, nearest_path
from trigon.errors import ConfigError
from trigon.system.terminal import sanitize
from trigon.tools.cli.parser import ArgumentParser, new_folder, require_absent

DEFAULT_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
"""The model of run.yaml, a hub id."""

NUM_ROWS = 5
SEED = 1

_FILES = Path(__file__).parents[1] / "init"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see main.py. Raises TrigonError."""
    parser = ArgumentParser(
        prog="trigon init",
        description="Write run.yaml, reward.py with its test, and data.jsonl with five images, to be replaced by your "
        "own. Nothing is overwritten.",
        examples=[
            ("trigon init my_run", "for a model of the hub, on a GPU"),
            ("trigon init my_run --tiny", "with a tiny model, for a laptop"),
        ],
    )
    parser.add_argument("folder", type=new_folder, nargs="?", default=Path(), help="default: this folder")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="ID", help=f"hub id or folder; default: {DEFAULT_MODEL}")
    choice.add_argument(
        "--tiny", action="store_true", help="make a tiny model, with which the run works without a GPU and a hub"
    )
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    written = write_starter(folder, model=chosen.model or DEFAULT_MODEL, tiny=chosen.tiny)
    first = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    files = ", ".join(str(path.relative_to(folder)) for path in written if path.parent == folder)
    commands = [*first, "trigon check run.yaml", "python reward.py", "trigon train run.yaml"]
    lines = "\n".join(f"  {command}" for command in commands)
    print(sanitize(f"wrote {files}, and images/\n\nnext:\n{lines}", max_characters=5000))
    return 0


def write_starter(folder: Path, *, model: str = DEFAULT_MODEL, tiny: bool = False) -> list[Path]:
    """Write the files of a run into a folder, which is made if needed, and return their paths.

    model: a hub id, or a folder, which is written as an absolute path, since the run is started
    from another folder. tiny: make the embedded tiny model in the folder instead, which takes about
    as long as `trigon tiny`.
    Raises: ConfigError if model is a path at which there is nothing, or if one of the files exists
    already; nothing is written then.
    """
    from trigon.tools.quickstart.drawings import PROBLEM, draw

    model_path = "./model" if tiny else json.dumps(_model_path(model))
    rows = [(f"images/{number}.png", number) for number in range(1, NUM_ROWS + 1)]
    names = ["run.yaml", "reward.py", "data.jsonl", *(name for name, _ in rows), *(["model"] if tiny else [])]
    require_absent(folder, names)
    folder.mkdir(parents=True, exist_ok=True)
    if tiny:  # first, since it takes a while: a call that is interrupted leaves no file, and can be repeated
        make_model(folder)
    (folder / "images").mkdir(exist_ok=True)
    rng = random.Random(SEED)
    for name, area in rows:
        draw(rng, area).save(folder / name)
    lines = [json.dumps({"problem": PROBLEM, "images": [name], "answer": str(area)}) for name, area in rows]
    (folder / "data.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    template = _FILES / ("run_tiny.yaml" if tiny else "run.yaml")
    text = template.read_text(encoding="utf-8").replace("MODEL", model_path, 1)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    (folder / "reward.py").write_bytes((_FILES / "reward_template.py").read_bytes())
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
    from trigon.tools.quickstart.quickstart import make

    with tempfile.TemporaryDirectory(dir=folder, prefix=".tiny") as temporary:
        if not make(Path(temporary), Console()):
            raise ConfigError("the tiny model could not be made, see above")
        (Path(temporary) / "model").rename(folder / "model")
