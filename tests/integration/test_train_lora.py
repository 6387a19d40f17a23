"""A run with LoRA: the reference has no adapters, and vLLM samples from the merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.engines import tensors_in
from support.runs import lines, make_run, rollouts
from support.tensors import assert_equal_tensors
from trigon.tools.cli.export import main

pytestmark = pytest.mark.extended

STEPS = 3


def train(made: Path, folder: Path) -> None:
    make_run(
        made,
        folder,
        "worker.actor.model.lora.rank=4",
        "worker.actor.model.lora.alpha=8",
        "worker.actor.model.lora.exclude_modules=.*visual.*",
        "worker.actor.global_batch_size=4",  # one update per step: before the first the policy equals the reference
        "worker.actor.optim.lr=1e-2",
        "trainer.save_freq=1",
        "trainer.save_limit=-1",
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def run(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(made, folder)
    return folder


def test_the_kl_is_zero_before_the_first_update_and_vllm_samples_from_the_merged_weights(run: Path) -> None:
    metrics = [line["metrics"] for line in lines(run)[1:]]
    for step in metrics:  # from step 2 on with trained adapters
        assert max(step["parity/logprobs_diff_max"], step["mismatch/logprobs_diff_max"]) < 1e-4
    kl = [step["actor/kl_loss"] for step in metrics]
    assert len(kl) == STEPS
    assert kl[0] == 0
    assert all(1e-4 < later < 1 for later in kl[1:])
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0 for step in metrics)


def test_a_checkpoint_has_the_adapters_only(made: Path, run: Path) -> None:
    actor = run / f"global_step_{STEPS}" / "actor"
    assert not (actor / "weights").exists()
    assert json.loads((actor / "adapter_config.json").read_text())["base_model_name_or_path"] == str(made / "model")


@pytest.mark.long
def test_a_run_resumes_from_a_checkpoint_of_adapters(made: Path, run: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "run"  # as if killed after the second save
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / f"global_step_{STEPS}")
    train(made, resumed)
    assert lines(resumed) == lines(run)
    assert rollouts(resumed) == rollouts(run)
    for part in ("adapter", "optimizer"):
        assert_equal_tensors(*(tensors_in(root / f"global_step_{STEPS}" / "actor" / part) for root in (resumed, run)))


def test_the_export_is_a_merged_model_or_an_adapter(made: Path, run: Path, tmp_path: Path) -> None:
    """What peft computes with the adapter is compared with the merged weights by the command."""
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert main([str(run), "--output", str(merged)]) == 0
    assert main([str(run), "--output", str(adapter), "--adapter"]) == 0
    weights = load_file(merged / "model.safetensors")
    before = load_file(made / "model" / "model.safetensors")
    changed = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in weights if name.startswith("model.layers.") and name.endswith("proj.weight")}
