"""docs/hardware.md is what its script writes, and the recipes fit what their first line says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardware_page import DEVICE_BYTES, document
from support.published import CONFIGS
from support.recipes import RECIPES, arguments_of, name_of
from trigon.assemble.memory import GIB, Hardware, check_memory, size_of_model
from trigon.config.load import load_config, split_arguments
from trigon.config.options import with_options
from trigon.config.schema import Config

ROOT = Path(__file__).parents[2]
HARDWARE = Hardware("cuda", DEVICE_BYTES, 1000 * GIB)


@pytest.mark.extended
def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8") == document(), (
        "run: python scripts/hardware_page.py > docs/hardware.md"
    )


def fits(config: Config, model: str) -> None:
    config = with_options(config, {"worker.actor.model.model_path": str(CONFIGS / model)})
    warnings: list[str] = []
    check_memory(config, size_of_model(config), HARDWARE, warn=warnings.append)
    # Of linear attention, weights and states are counted, and not what a pass keeps.
    assert [text for text in warnings if "are not counted" not in text] == []


@pytest.mark.extended(but=["qwen2_5_vl_3b_geo3k_grpo"])
@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_fits_the_gpus_that_its_first_line_names(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.parquet").touch()
    config = load_config(*split_arguments(arguments_of(path, tmp_path, environment={"DATA": str(data)}))).config
    text = path.read_text(encoding="utf-8")
    model = re.search(r"MODEL_PATH:-Qwen/([\w.-]+)\}", text)[1]
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert text.splitlines()[1] == f"# {model.removesuffix('-Instruct')}, {gpus} x 80 GB."
    fits(config, model.removesuffix("-Base"))
