"""docs/install.md agrees with the command line, the recipes, the metrics and the pins."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.published import CONFIGS
from support.recipes import ROOT, arguments_of
from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.config.load import LoadedConfig, load_config, split_arguments
from trigon.config.options import with_options

PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8").partition("\n## A first run on GPUs\n")[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def commands(start: str) -> list[str]:
    """Return the commands of the code blocks that start like this, without their pipes."""
    code = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)).replace("\\\n", " ")
    return [line.partition(" 2>&1")[0].strip() for line in code.splitlines() if line.startswith(start)]


def configured(command: str, folder: Path) -> LoadedConfig:
    """Return the configuration that a command trains with: of a recipe, or of `trigon train`."""
    words = shlex.split(command)
    if words[0] == "bash":
        return load_config(*split_arguments(arguments_of(ROOT / words[1], folder, *words[2:], environment={})))
    assert words[:2] == ["trigon", "train"]
    return load_config(*split_arguments(words[2:]))


def test_every_training_command_of_the_page_is_a_valid_configuration(tmp_path: Path) -> None:
    recipes, spelled_out = commands("bash examples/"), commands("trigon train")
    assert (len(recipes), len(spelled_out)) == (4, 2)
    loaded = [configured(command, tmp_path) for command in recipes + spelled_out]
    assert [run.warnings for run in loaded] == [()] * 6
    trainers = [run.config.trainer for run in loaded]
    assert [trainer.n_gpus_per_node for trainer in trainers] == [1, 1, 8, 8, 1, 8]
    assert [(trainer.max_steps, trainer.profile_steps) for trainer in trainers[:4]] == [(5, ()), (None, ())] * 2
    for recipe, command in zip((loaded[1], loaded[3]), loaded[4:], strict=True):
        assert recipe.config == command.config  # what the page says that the script runs


@pytest.mark.parametrize(
    ("model", "largest", "host"), [("Qwen2.5-VL-3B", ("update", 67), 93), ("Qwen2.5-VL-7B", ("sampling", 49), 235)]
)
def test_the_memory_is_that_of_the_configurations_and_fits(
    model: str, largest: tuple[str, int], host: int, tmp_path: Path
) -> None:
    [command] = [command for command in commands("trigon train") if model in command]
    config = configured(command, tmp_path).config
    config = with_options(config, {"worker.actor.model.model_path": str(CONFIGS / f"{model}-Instruct")})
    memory = count_memory(config, size_of_model(config), Hardware("cuda", 79 * GIB, 1000 * GIB))
    worst = {
        pool: max((phase for phase in memory.phases if phase.pool == pool), key=lambda phase: phase.expected)
        for pool in ("GPU", "host")
    }
    assert (worst["GPU"].phase, round(worst["GPU"].expected / GIB)) == largest
    assert round(worst["host"].expected / GIB) == host
    text = " ".join(PAGE.split())
    assert "67 GiB of a GPU's 79 GiB for 3B on one (the update), and 49 GiB for 7B on eight (sampling)" in text
    assert "93 GiB for 3B on one GPU, 235 GiB for 7B on eight" in text
