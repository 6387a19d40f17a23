"""Runs of an MoE model with router replay: in one process, and with two workers that resume."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import NO_VALIDATION, finish, lines, start

pytestmark = pytest.mark.long

OPTIONS = (
    "worker.rollout.name=transformers",
    "worker.actor.router_replay=R3",
    "worker.actor.router_aux_loss_coef=0.01",
    *NO_VALIDATION,
    "data.max_response_length=12",
)


def run(made: Path, folder: Path, model: Path, *options: str, steps: int) -> subprocess.Popen[str]:
    return start(made, folder, *OPTIONS, f"worker.actor.model.model_path={model}", *options, steps=steps)


def test_the_experts_of_the_engine_reach_the_update(
    made: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, one, two = tiny_model("qwen3_vl_moe"), tmp_path / "one", tmp_path / "two"
    finish(run(made, one, model, steps=2), one)
    finish(run(made, two, model, "trainer.n_gpus_per_node=2", steps=1), two)
    finish(run(made, two, model, "trainer.n_gpus_per_node=2", steps=2), two)  # resumes
    for first, second in zip(lines(one), lines(two), strict=True):
        alone, together = first["metrics"], second["metrics"]
        for metrics in (alone, together):
            assert 0.9 < metrics["actor/router_replay_fraction"] < 1  # the last token of each completion has no record
            assert metrics["actor/router_aux_loss"] > 1.9
            assert metrics["mismatch/logprobs_diff_max"] < 1e-4
        for key in ("actor/router_replay_fraction", "actor/router_aux_loss", "actor/pg_loss", "critic/rewards/mean"):
            assert together[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), key
