"""The GPUs that docs/install.md and the recipes name are enough for what they run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hardware_page import DEVICE_BYTES
from support.published import CONFIGS
from support.recipes import RECIPES, ROOT, arguments_of, name_of
from trigon.assemble.memory import GIB, Hardware, check_memory, count_memory, size_of_model
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


def test_the_commands_that_the_page_spells_out_are_its_recipes(tmp_path: Path) -> None:
    recipes, spelled_out = commands("bash examples/")[1::2], commands("trigon train")
    loaded = [configured(command, tmp_path) for command in recipes + spelled_out]
    assert [run.warnings for run in loaded] == [()] * 4
    assert [run.config.trainer.n_gpus_per_node for run in loaded] == [1, 8, 1, 8]
    assert [run.config for run in loaded[:2]] == [run.config for run in loaded[2:]]


def test_the_memory_that_the_page_names_is_that_of_its_commands(tmp_path: Path) -> None:
    devices, hosts = [], []
    for command in commands("trigon train"):
        config = configured(command, tmp_path).config
        folder = CONFIGS / Path(config.worker.actor.model.model_path or "").name
        config = with_options(config, {"worker.actor.model.model_path": str(folder)})
        memory = count_memory(config, size_of_model(config), Hardware("cuda", 79 * GIB, 1000 * GIB))
        largest = {each.pool: each for each in sorted(memory.phases, key=lambda each: each.expected)}
        devices += [round(largest["GPU"].expected / GIB), largest["GPU"].phase]
        hosts.append(round(largest["host"].expected / GIB))
    text = " ".join(PAGE.split())
    small, phase, large, other = devices
    assert (
        f"{small} GiB of a GPU's 79 GiB for 3B on one (the {phase}), and {large} GiB for 7B on eight ({other})" in text
    )
    assert f"{hosts[0]} GiB for 3B on one GPU, {hosts[1]} GiB for 7B on eight" in text


@pytest.mark.extended(but=["qwen2_5_vl_3b_geo3k_grpo"])
@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_fits_the_gpus_that_its_first_line_names(path, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.parquet").touch()
    config = load_config(*split_arguments(arguments_of(path, tmp_path, environment={"DATA": str(data)}))).config
    text = path.read_text(encoding="utf-8")
    model = re.search(r"MODEL_PATH:-Qwen/([\w.-]+)\}", text)[1]
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert text.splitlines()[1] == f"# {model.removesuffix('-Instruct')}, {gpus} x 80 GB."
    config = with_options(config, {"worker.actor.model.model_path": str(CONFIGS / model.removesuffix("-Base"))})
    warnings: list[str] = []
    check_memory(config, size_of_model(config), Hardware("cuda", DEVICE_BYTES, 1000 * GIB), warn=warnings.append)
    # Of linear attention, weights and states are counted, and not what a pass keeps.
    assert [text for text in warnings if "are not counted" not in text] == []
