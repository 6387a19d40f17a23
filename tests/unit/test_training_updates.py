"""Updates skipped because their gradients are not finite: a warning, and too many end the run."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
import torch

from support.fake_runs import (
    RecordingTrainer,
    changed,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    saved_steps,
    validation_of,
)
from trigon.errors import NotFiniteError
from trigon.loop import train, validate_only
from trigon.metrics import Max, Mean, Sum
from trigon.report.console import Console
from trigon.training.protocol import SKIPPED_GRAD_NORM
from trigon.training.updates import RecentUpdates, describe_skipped
from trigon.types import Prompt, TrainGroup, TrainSequence

pytestmark = pytest.mark.faults

MADE = {"actor/skipped_updates": Sum(0.0), "actor/nonfinite_updates": Sum(0.0), "actor/grad_norm": Mean(2.0)}
EMPTY = MADE | {"actor/skipped_updates": Sum(1.0)}
SKIPPED = {
    "actor/skipped_updates": Sum(1.0),
    "actor/nonfinite_updates": Sum(1.0),
    "actor/grad_norm": Mean(0.0, 0.0),
    "actor/lr": Mean(1e-6),
    SKIPPED_GRAD_NORM: Max(math.inf),
}


def after(outcomes, limit=3):
    """Return the recent updates: one for each letter, made, empty or skipped."""
    recent = RecentUpdates()
    for letter in outcomes:
        recent = recent.after({"m": MADE, "e": EMPTY, "s": SKIPPED}[letter], limit=limit)
    return recent


@pytest.mark.parametrize(
    ("outcomes", "in_a_row", "in_window"),
    [("", 0, 0), ("mm", 0, 0), ("ms", 1, 1), ("sm", 0, 1), ("ssmss", 2, 4), ("sess", 3, 3), ("smes", 1, 2)],
)
def test_updates_with_nothing_to_learn_from_neither_count_nor_end_a_row(outcomes, in_a_row, in_window):
    recent = after(outcomes)
    assert (recent.num_in_a_row, recent.num_in_window) == (in_a_row, in_window)


@pytest.mark.parametrize(
    ("outcomes", "limit", "problem"),
    [
        ("mss", 3, None),
        ("msss", 3, "the gradients of 3 updates in a row are not finite"),
        ("ms", 1, "the gradients of 1 updates in a row"),
        ("sm" * 10, 3, None),
        ("ss" + "ms" * 9, 3, "the gradients of 11 of the last 20 updates are not finite"),
        ("ss" + "ms" * 9, 0, None),
        ("s" * 40, 0, None),
        ("s" * 30, 25, "the gradients of 25 updates in a row"),  # a row may be longer than the window
    ],
)
def test_a_row_and_a_share_of_skipped_updates_end_the_run(outcomes, limit, problem):
    if problem is None:
        after(outcomes, limit).require_progress("x", limit=limit)
        return
    with pytest.raises(NotFiniteError) as caught:
        after(outcomes, limit).require_progress("a cause", limit=limit)
    assert str(caught.value).startswith(problem)
    assert "The last one: a cause. Gradient norms of the last updates: " in str(caught.value)


def train_group(**changes):
    values = {
        "loss_mask": torch.tensor([1.0, 1.0, 0.0]),
        "advantages": torch.tensor([0.5, -2.0, math.inf]),
        "sampling_logprobs": torch.tensor([-1.0, -1.0, -1.0]),
        "old_logprobs": None,
        "ref_logprobs": None,
    }
    return TrainGroup(
        Prompt("train:1", (1,), None, "", "", {}, ()), (TrainSequence(token_ids=(5, 6, 7), **(values | changes)),)
    )


NAN_LOSS = {"actor/pg_loss": Mean(math.nan)}


@pytest.mark.parametrize(
    ("changes", "metrics", "facts"),
    [
        ({}, {}, ("largest |advantage| 2;", "the backward pass overflowed")),
        # With a shared trunk, the critic's gradient is that of the policy.
        ({}, {"critic/grad_norm": Mean(math.nan), "critic/vf_loss": Mean(0.5)}, ("the backward pass overflowed",)),
        ({}, NAN_LOSS, ("the policy's outputs are not", "actor/pg_loss")),
        (
            {"ref_logprobs": torch.tensor([-1.0, math.nan, math.nan])},
            NAN_LOSS,
            ("1 of 2 log-probabilities of the reference",),
        ),
        ({"advantages": torch.tensor([math.inf, 1.0, 1.0])}, {}, ("1 of 2 advantages",)),
    ],
)
def test_the_message_says_what_was_not_finite_of_the_tokens_that_are_learned_from(changes, metrics, facts):
    message = describe_skipped([train_group(**changes)], SKIPPED | metrics)
    for fact in ("gradient norm inf, learning rate 1e-06", *facts):
        assert fact in message


class SkippingTrainer(RecordingTrainer):
    """A trainer whose gradients of these updates, counted from 1, are not finite."""

    skipped: frozenset[int] = frozenset()

    def step(self, groups, outputs=None):
        metrics = super().step(groups, outputs)
        return metrics | SKIPPED if self.updates in self.skipped else metrics


def skipping(run, *updates):
    run.trainer.__class__ = SkippingTrainer
    run.trainer.skipped = frozenset(updates)
    return run


SAVING = {"plan": plan_of(steps=6), **{"save_freq": 2}}


def test_three_in_a_row_end_the_run_with_the_cause_and_the_checkpoint_to_go_on_from(parts, tmp_path):
    stream = io.StringIO()
    with open_run(parts, tmp_path, **SAVING) as run:
        run.report._console = Console(stream=stream, progress=False)
        skipping(run, 1, 3, 4, 5)
        with pytest.raises(NotFiniteError) as caught:
            train(run, None)
    message, printed = str(caught.value), stream.getvalue()
    for part in (
        "the gradients of 3 updates in a row are not finite",
        "trainer.max_skipped_updates=3",
        "gradient norm inf, learning rate 1e-06",
        "Gradient norms of the last updates: skipped, 1, skipped, skipped, skipped",
        f"The last checkpoint, {tmp_path / 'global_step_4'}, holds finite values: the same command continues from "
        "it with a lower worker.actor.optim.lr and trainer.accept_changes=worker.actor.optim.lr",
        "trainer.load_checkpoint_path=",
    ):
        assert part in message
    assert saved_steps(tmp_path) == [2, 4]
    assert "warning: update 1 of step 1 is skipped, since its gradient is not finite (1 in a row): gradient" in printed
    assert "warning: update 1 of step 5 is skipped, since its gradient is not finite (3 in a row): gradient" in printed
    shown = [
        line.split()[0]
        for line in printed.splitlines()
        if re.match(r" *(\d+/6 |updates skipped, not finite: 1$)", line)
    ]
    assert shown == ["1/6", "updates", "2/6", "3/6", "updates", "4/6", "updates"]
    assert [lines_of(tmp_path)[step]["actor/nonfinite_updates"] for step in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert SKIPPED_GRAD_NORM not in lines_of(tmp_path)[1]


@pytest.mark.parametrize(
    ("minibatches", "skipped", "norms"),
    [
        (1, (1, 2, 3), (None,)),  # a rare batch, in all epochs
        (1, (2, 3), (1.0, None)),
        (2, (1, 3, 5), (None, 1.0, 1.0, 1.0)),
        (2, (1, 2, 3, 4), (None, None, 1.0, 1.0)),
    ],
)
def test_a_minibatch_counts_once_in_a_step_with_several_epochs(parts, tmp_path, minibatches, skipped, norms):
    plan = plan_of(steps=1)
    plan = replace(plan, epochs_per_step=3, prompts_per_update=plan.prompts_per_step // minibatches)
    with open_run(parts, tmp_path, plan=plan) as run:
        run = skipping(run, *skipped)
        train(run, None)
    assert tuple(run.updater.state()["recent_actor_grad_norms"]) == norms
    assert lines_of(tmp_path)[1]["actor/nonfinite_updates"] == len(skipped)


def test_minibatches_of_other_steps_count_with_several_epochs_too(parts, tmp_path):
    plan = plan_of(steps=6)
    plan = replace(plan, epochs_per_step=3, prompts_per_update=plan.prompts_per_step)
    with open_run(parts, tmp_path, plan=plan) as run, pytest.raises(NotFiniteError, match="3 updates in a row"):
        train(skipping(run, *range(1, 19)), None)
    assert sorted(lines_of(tmp_path)) == [1, 2]


def test_the_row_continues_in_a_resumed_run(parts, tmp_path):
    with open_run(parts, tmp_path, **SAVING) as run:
        asked = iter([False, True])
        assert train(changed(skipping(run, 1, 2), should_stop=lambda: next(asked)), None) == 2
    with open_run(parts, tmp_path, **SAVING) as run, pytest.raises(NotFiniteError, match="3 updates in a row"):
        train(skipping(run, 3), latest_checkpoint(tmp_path))
    with open_run(parts, tmp_path, **SAVING) as run:
        assert train(skipping(run, 4, 5), latest_checkpoint(tmp_path)) == 6


def test_a_run_without_a_checkpoint_says_to_start_again(parts, tmp_path):
    message = r"No checkpoint was saved before\. Start again with a lower"
    with open_run(parts, tmp_path, max_skipped_updates=1) as run, pytest.raises(NotFiniteError, match=message):
        train(skipping(run, 1), None)
    assert saved_steps(tmp_path) == []


class FailingTrainer(RecordingTrainer):
    """A trainer whose weights are found not to be finite."""

    def weights(self):
        raise NotFiniteError("the weights after 7 updates hold nan")


def test_a_run_that_only_validates_does_not_advise_to_train_otherwise(parts, tmp_path):
    with open_run(parts, tmp_path, val_only=True) as run:
        run.trainer.__class__ = FailingTrainer
        with pytest.raises(NotFiniteError, match=r"hold nan\.\nNothing was trained: the weights of") as caught:
            validate_only(validation_of(run), None)
    assert "optim.lr" not in str(caught.value)


def test_a_command_that_does_not_find_the_last_checkpoint_is_told_its_name(parts, tmp_path):
    settings = {**SAVING, "save_checkpoint_path": str(tmp_path), "find_last_checkpoint": False}
    with open_run(parts, tmp_path, **settings) as run, pytest.raises(NotFiniteError) as caught:
        train(skipping(run, 3, 4, 5), None)
    named = f"the same command with trainer.load_checkpoint_path={tmp_path / 'global_step_4'} continues from it"
    assert f"holds finite values: {named} with a lower worker.actor.optim.lr" in str(caught.value)
