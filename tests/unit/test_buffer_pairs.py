"""Every combination of staleness, oversampling, online filtering and remax, on fake engines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from support.fake_runs import (
    FILTER,
    SAMPLING,
    SplitEngine,
    engine_of,
    lines_of,
    plan_of,
    rollouts_of,
    train_in,
)
from trigon.config.schema import AlgorithmConfig

STEPS, PER_STEP = 6, 4
MAX_CARRIED = 2
STALENESS = {
    "in line": {"max_staleness": 0},
    "one ahead": {"max_staleness": 1},
    "continue": {"max_staleness": 4, "partial": "continue"},
    "finish": {"max_staleness": 4, "partial": "finish"},
}
FILTERS = {
    "all": {},
    "filtered": FILTER | {"mini_rollout_batch_size": 6, "max_try_make_batch": 0},
    "kept": FILTER | {"mini_rollout_batch_size": 6, "max_try_make_batch": 0, "filter_surplus": "keep"},
}
IN_EACH_RUN = [("continue", 0.5, "filtered", "remax"), ("finish", 0.5, "kept", "remax")]
PAIRS = [  # each two choices together, once or more
    (staleness, (0.0, 0.5)[number % 2], filtering, ("grpo", "remax")[number // 2 % 2])
    for number, (staleness, filtering) in enumerate(itertools.product(STALENESS, FILTERS))
]


def marks_of(kind):
    """Return the marks of a combination: pairs are `extended`, all others `long`."""
    if kind in IN_EACH_RUN:
        return ()
    return pytest.mark.extended if kind in PAIRS else pytest.mark.long


KINDS = [
    pytest.param(*kind, marks=marks_of(kind))
    for kind in itertools.product(STALENESS, [0.0, 0.5], FILTERS, ["grpo", "remax"])
]


def complete(so_far, version, seed):
    """Complete some prompts in many tokens, some always right, and the others by seed."""
    number = int(so_far.ground_truth)
    if number % 5 == 0:
        return "no idea " * 8 if seed % 2 else so_far.ground_truth
    return so_far.ground_truth if number % 4 == 0 or seed % 2 else "no idea"


def settings_of(parts, staleness, oversampling, filtering, estimator):
    return STALENESS[staleness] | {
        "rollout": engine_of(parts, SplitEngine, complete, tokens_per_step=3),
        "hybrid_engine": False,
        "oversampling": oversampling,
        "max_carried_steps": MAX_CARRIED,
        **FILTERS[filtering],
        "algorithm": AlgorithmConfig(disable_kl=True, adv_estimator=estimator),
        "plan": plan_of(steps=STEPS),
        "save_freq": 1,
        "sampling": replace(SAMPLING, max_tokens=40),
    }


def check_rows(folder, staleness, oversampling, filtering):
    """Check how many groups each step learns from, which, and how old their tokens are."""
    rows = rollouts_of(folder)
    oldest = STALENESS[staleness]["max_staleness"]
    if oldest <= 1:
        oldest = max(oldest, MAX_CARRIED + 1 if oversampling else 0) + (filtering == "kept")
    for step in range(1, STEPS + 1):
        learned = rows[f"step_{step:06d}.jsonl"]
        assert len(learned) == PER_STEP * SAMPLING.n
        groups = [learned[i : i + SAMPLING.n] for i in range(0, len(learned), SAMPLING.n)]
        assert len({group[0]["prompt_id"] for group in groups}) == PER_STEP
        for group in groups:
            assert len({row["prompt_id"] for row in group}) == 1
            assert {row["finish_reason"] for row in group} <= {"stop", "length"}
            if filtering != "all":
                assert len({row["reward"] for row in group}) == 2
            for row in group:
                versions = row["policy_versions"] or [(row["policy_version"], row["num_tokens"])]
                assert 0 <= step - 1 - versions[-1][0] <= step - 1 - versions[0][0] <= oldest


@pytest.mark.parametrize(("staleness", "oversampling", "filtering", "estimator"), KINDS)
def test_settings_of_the_buffer_compose_also_in_a_run_that_resumes(
    parts, tmp_path, staleness, oversampling, filtering, estimator
):
    settings = settings_of(parts, staleness, oversampling, filtering, estimator)
    train_in(tmp_path / "cut", parts, stop_after=3, **settings)
    train_in(tmp_path / "cut", parts, resumes=True, **settings)
    check_rows(tmp_path / "cut", staleness, oversampling, filtering)
    if STALENESS[staleness]["max_staleness"] <= 1:
        train_in(tmp_path / "whole", parts, **settings)
        assert rollouts_of(tmp_path / "cut") == rollouts_of(tmp_path / "whole")
        assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
