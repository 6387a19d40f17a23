"""docs/first-gpu-run.md agrees with the command line, the recipes, the metrics and the pins."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.published import CONFIGS
from support.recipes import ROOT, arguments_of
from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.config.load import LoadedConfig, load_config, split_arguments
from trigon.config.options import options, with_options
from trigon.config.plan import make_plan
from trigon.tools.cli.main import COMMANDS

PAGE = (ROOT / "docs/first-gpu-run.md").read_text(encoding="utf-8")
ROWS_OF_GEOMETRY3K = 2101


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


def test_the_numbers_of_steps_updates_and_validations_are_those_of_the_configuration(tmp_path: Path) -> None:
    for command in commands("trigon train"):
        config = configured(command, tmp_path).config
        plan = make_plan(config, num_train_prompts=ROWS_OF_GEOMETRY3K)
        assert (plan.steps_per_epoch, plan.total_steps, plan.updates_per_step) == (4, 60, 4)
        assert (config.data.rollout_batch_size, config.worker.rollout.n) == (512, 5)
        assert config.trainer.val_before_train
        assert config.trainer.val_freq == 5
        assert 1 + plan.total_steps // config.trainer.val_freq == 13
        assert config.trainer.save_limit == 3
        assert config.worker.actor.offload.offload_params
        assert config.worker.actor.offload.offload_optimizer
        assert config.trainer.save_in_background
    text = " ".join(PAGE.split())
    for claim in ("512 prompts x 5 completions and makes 4 updates", "60 steps in 15 epochs", "the 13 validations"):
        assert claim in text


def test_the_other_commands_and_options_of_the_page_exist() -> None:
    named = set(re.findall(r"(?<![\w/-])trigon ([a-z]+)", "\n".join(commands("") + re.findall(r"`([^`\n]+)`", PAGE))))
    assert named == {"doctor", "train"}
    assert named <= set(COMMANDS)
    assert re.search(r"^gpu-check:.*\n", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {".".join(path) for path in options()}
    keys = set(re.findall(r"(?<![\w/.])((?:data|algorithm|worker|trainer)(?:\.[a-z_]+)+)(?![\w/])", PAGE))
    assert keys - known == set()


def test_every_metric_of_the_page_is_documented() -> None:
    documented = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_0-9]+)`", PAGE))
    assert len(named) > 25
    # Documented as `reward/<part>`, `val/<part>_reward` and `timing_s/<phase>`, or in a list.
    by_pattern = {"reward/overall", "reward/format", "reward/accuracy", "val/accuracy_reward"}
    by_pattern |= {
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/old",
        "timing_s/ref",
        "response_length/clip_ratio",
    }
    assert {name for name in named - by_pattern if f"`{name}`" not in documented} == set()
    assert all(text in documented for text in ("`reward/<part>`", "`val/<part>_reward`", "`timing_s/<phase>`"))


def test_the_sizes_are_those_of_the_pins_and_12_or_16_bytes_per_weight() -> None:
    pins = (ROOT / "constraints/gpu.txt").read_text(encoding="utf-8")
    [(packed, unpacked)] = re.findall(r"([\d.]+) GB to download, ([\d.]+) GB installed", pins)
    assert f"{unpacked} GB for the packages, and {packed} GB for pip's downloads" in PAGE
    weights = {"3B": 3.75e9, "7B": 8.29e9}
    checkpoints = {name: 4 * 12 * number / 1e9 for name, number in weights.items()}
    assert "180 GB (3B) or 400 GB (7B)" in PAGE
    assert checkpoints == pytest.approx({"3B": 180, "7B": 400}, rel=0.01)
    assert "60 GB for the 3B\nmodel on one GPU, 17 GB of the 7B model on each of eight" in PAGE
    assert (16 * weights["3B"] / 1e9, 16 * weights["7B"] / 8e9) == pytest.approx((60, 17), rel=0.03)


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
