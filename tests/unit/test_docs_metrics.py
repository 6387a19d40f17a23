"""docs/metrics.md describes every metric that a run reports, and no other."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from support.critics import make_critic, to_learn
from support.engines import KL, make_engine, make_rollouts, to_train, with_loss
from support.fake_runs import (
    ALL_INTERVALS,
    FILTER,
    SAMPLING,
    changed,
    full_settings,
    open_run,
    open_shared_parts,
    plan_of,
    sometimes_crashing,
)
from support.models import processors_of
from trigon.config.names import WatchRule
from trigon.config.plan import ModelPlan
from trigon.config.schema import AlgorithmConfig
from trigon.data.media_processing import MediaProcessor
from trigon.data.vision import image_processor_of
from trigon.distributed.worker_group import Traffic
from trigon.loop import train
from trigon.metrics import Metrics, values
from trigon.report.memory_growth import MemoryMeter, measure_worker
from trigon.report.watch import MEMORY
from trigon.rollout.parity import ParityCheck, Probe
from trigon.rollout.statistics import describe_carried, describe_staleness, describe_validation
from trigon.training.fake import FAKE_LOGPROB, FakeCriticEngine, FakeTrainEngine
from trigon.types import Rollout, RolloutGroup, Score

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
GPU_ONLY = {
    "perf/gpu_memory_allocated_gb",
    "perf/gpu_memory_free_gb",
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "perf/mfu_actor",
    "perf/mfu_critic",
    "perf/peak_tflops",
}
AHEAD_ONLY = {
    "perf/sampling_seconds",
    "rollout/waiting_groups",
    "staleness/dropped_groups",
    "staleness/dropped_tokens",
}
"""Reported in tests/unit/test_buffer_ahead.py and test_buffer_continuous.py."""

VLLM_ONLY = {"rollout/engine_restarts", "rollout/retried_requests"}
"""Reported in tests/integration/test_rollout_vllm_faults.py."""

EPISODES_ONLY = {
    "perf/environment_step_seconds",
    "perf/environment_wait_fraction",
    "rollout/dropped_tokens",
    "rollout/episodes_begun_again",
    "rollout/episodes_ended_by_length",
    "rollout/episodes_failed",
    "rollout/num_turns",
}
"""Reported in tests/unit/test_rollout_episodes.py."""

MOE_ONLY = {"actor/router_aux_loss", "actor/router_replay_fraction"}
"""Reported in tests/unit/test_training_router_loss.py and invariants/test_router_replay.py."""

RAY_ONLY = {
    "perf/object_store_free_gb",
    "perf/object_store_used_gb",
    "moved/weights_sent_bytes",
    "moved/values_bytes",
}


def documented_keys() -> set[str]:
    """Return the keys and key patterns in the first column of the page's tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key for cell in cells for pattern in re.findall(r"`([^`]+)`", cell) for key in choices(pattern)}


def choices(pattern: str) -> list[str]:
    """Return the keys for which a pattern stands: `x/{mean,max}` for two."""
    parts = re.split(r"\{([^}]*)\}", pattern)  # what is in braces is at the odd places
    return ["".join(each) for each in product(*(re.split(", *", p) if n % 2 else [p] for n, p in enumerate(parts)))]


def as_regex(pattern: str) -> re.Pattern[str]:
    """Translate a key pattern: `<word>` is any name, and `...` any text."""
    parts = re.split(r"(<[^>]*>|\.\.\.)", pattern)
    return re.compile(
        "".join("[^/]+" if part[:1] == "<" else ".+" if part == "..." else re.escape(part) for part in parts)
    )


@pytest.fixture(scope="module")
def reported_keys(tiny_model, tmp_path_factory) -> set[str]:
    """Return the keys that a run can report.

    They are those of a short run with all features enabled, and of updates of real models.
    """
    folder = tmp_path_factory.mktemp("reported")
    (folder / "kit").mkdir()
    with (
        open_shared_parts(tiny_model("qwen2"), folder / "kit") as kit,
        open_run(
            kit,
            folder / "critic",
            critic=FakeCriticEngine(),
            algorithm=AlgorithmConfig(disable_kl=True, adv_estimator="gae"),
            plan=replace(plan_of(steps=1), critic=ModelPlan(2, 1, 2, 2, 0, 100, 100)),
        ) as with_critic,
        open_run(
            kit,
            folder / "run",
            complete=sometimes_crashing,
            hybrid_engine=False,
            **(full_settings(2) | {"algorithm": AlgorithmConfig(adv_estimator="remax", kl_penalty="kl")}),
            sampling=replace(SAMPLING, top_k=50),
            **(FILTER | {"filter_low": -1.0, "filter_high": 2.0}),
        ) as run,
    ):
        train(changed(run, **ALL_INTERVALS | {"save_freq": 1}), None)
        train(with_critic, None)
    lines = [line for name in ("run", "critic") for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in json.loads(line)["metrics"]}

    model = tiny_model("qwen2")
    rollouts = make_rollouts(model)
    engine = make_engine(
        model,
        config=with_loss(
            KL, mismatch_correction="truncate", mismatch_level="token", mismatch_low=0.5, mismatch_high=2.0
        ),
    )
    for old in (None, engine.logprobs(rollouts)):
        keys |= values(engine.step(to_train(rollouts, old=old, ref=engine.logprobs(rollouts)))).keys()
    frozen = tiny_model("qwen2_5_vl")
    keys |= values(make_engine(frozen, freeze=True).step(to_train(make_rollouts(frozen)))).keys()
    keys |= values(make_critic(frozen, freeze=True).step(to_learn(make_rollouts(frozen)))).keys()
    parts = {"overall": 1.0, "accuracy": 1.0}
    datasets = [
        replace(
            group,
            prompt=replace(group.prompt, prompt_id=f"{name}:0"),
            rollouts=tuple(replace(each, score=Score(1.0, parts, "ok", "")) for each in group.rollouts),
        )
        for name, group in zip(("geometry", "charts"), rollouts, strict=False)
    ]
    keys |= describe_validation(datasets).keys()
    keys |= describe_carried(()).keys() | describe_staleness(rollouts, version=0).keys()
    keys |= excused_parity_metrics(rollouts).keys()
    traffic = Traffic()
    for phase in ("rollout", "logprobs", "reference_logprobs", "full_kl", "update"):
        traffic.count(phase, sent=1)
    image_processor = image_processor_of(processors_of(frozen))
    media = MediaProcessor(image_processor, max_image_pixels=1, num_workers=1, max_bytes=0)
    with MemoryMeter() as meter:
        keys |= meter.measure().keys() | measure_worker().keys()
    keys |= {MEMORY if name == "memory" else f"watch/{name}" for name in get_args(WatchRule)}
    return keys | traffic.pop_metrics().keys() | media.pop_metrics().keys()


def excused_parity_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return the metrics of a parity check whose first tokens exceed the tolerance."""
    differing, agreeing = (
        replace(group, rollouts=tuple(with_logprob(rollout, FAKE_LOGPROB - difference) for rollout in group.rollouts))
        for group, difference in zip(groups, (1.0, 0.0), strict=False)
    )
    return ParityCheck(0.6).check([Probe(differing, (agreeing,))], FakeTrainEngine(), warn=lambda text: None)


def with_logprob(rollout: Rollout, logprob: float) -> Rollout:
    completion = rollout.completion
    logprobs = (logprob,) * len(completion.token_ids)
    return replace(rollout, completion=replace(completion, sampling_logprobs=logprobs))


def test_every_reported_metric_is_documented(reported_keys):
    patterns = [as_regex(pattern) for pattern in documented_keys()]
    assert sorted(key for key in reported_keys if not any(pattern.fullmatch(key) for pattern in patterns)) == []


def test_every_documented_metric_is_reported(reported_keys):
    expected = documented_keys() - GPU_ONLY - RAY_ONLY - VLLM_ONLY - EPISODES_ONLY - MOE_ONLY - AHEAD_ONLY
    unknown = [p for p in expected if not any(as_regex(p).fullmatch(key) for key in reported_keys)]
    assert sorted(unknown) == []
