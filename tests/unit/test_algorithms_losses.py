"""Every policy loss by hand: value, gradient and clip flags; and relations between the losses."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from trigon.algorithms.losses import policy_loss
from trigon.config.names import LOSS_OPTIONS, PolicyLossType
from trigon.config.schema import ActorConfig

KINDS = get_args(PolicyLossType)


def settings(kind="default", **others):
    return ActorConfig(loss_type=kind, **{"cispo_cap": 5.0, "tau_negative": 2.0, **others})


CLIPPED = settings()


def run(ratios, advantages, loss_settings, *, lengths=None, mask=None):
    """Return loss, gradient and PolicyLoss of tokens with the given ratios and sequence lengths."""
    lengths = [len(ratios)] if lengths is None else lengths
    logprobs = torch.tensor([math.log(ratio) - 1.0 for ratio in ratios], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.full((len(ratios),), -1.0),
        torch.tensor(advantages),
        loss_settings,
        loss_mask=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
    )
    result.loss.sum().backward()
    return result.loss.tolist(), logprobs.grad.tolist(), result


class RecordingConfig(ActorConfig):
    """Remembers which of its options are read."""

    def __getattribute__(self, name):
        if name in ActorConfig.model_fields:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_reads_the_options_that_it_is_said_to_read(kind):
    recording = RecordingConfig(loss_type=kind)
    READ.clear()
    run([1.5, 0.5], [1.0, -1.0], recording)
    assert {f"worker.actor.{name}" for name in READ - {"loss_type"}} == set(LOSS_OPTIONS[kind])


# -- default ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.2, 1.0, -1.2, -1.2),  # inside the bounds
        (1.5, 1.0, -1.3, 0.0),  # already more likely: clipped high
        (0.5, 1.0, -0.5, -0.5),  # good token less likely: never clipped
        (0.5, -1.0, 0.8, 0.0),  # bad token already unlikely: clipped low
        (2.0, -1.0, 2.0, 2.0),  # bad token more likely: full loss
        (5.0, -1.0, 3.0, 0.0),  # ... up to the dual bound
    ],
)
def test_default_by_hand(ratio, advantage, loss, gradient):
    got_loss, got_gradient, _ = run([ratio], [advantage], CLIPPED)
    assert got_loss == pytest.approx([loss], rel=1e-5)
    assert got_gradient == pytest.approx([gradient], rel=1e-5)


def test_clip_flags_mark_the_bound_that_applied():
    result = run([1.5, 1.2, 5.0, 2.0], [1.0, 1.0, -1.0, -1.0], CLIPPED)[2]
    assert result.clipped.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.dual_clipped.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_a_lower_bound_of_one_is_no_bound():
    loss, gradient, result = run([0.01], [-1.0], settings(clip_ratio_low=1.0))
    assert (loss, gradient) == (pytest.approx([0.01]), pytest.approx([0.01]))
    assert result.clipped.tolist() == [0.0]


# -- gspo ------------------------------------------------------------------------------------------


def test_gspo_by_hand():
    # a sequence of ratios 1.2 and 1 has the ratio sqrt(1.2); its gradient is shared by both tokens
    root = math.sqrt(1.2)
    loss, gradient, result = run([1.2, 1.0], [1.0, 1.0], settings("gspo"))
    assert loss == pytest.approx([-root, -root])
    assert gradient == pytest.approx([-root, -root])  # both losses contribute half
    assert result.ratio.tolist() == pytest.approx([root, root])


def test_gspo_clips_all_tokens_of_a_sequence():
    # ratios 2 and 1: sqrt(2) > 1.3 for the first sequence; 1.1 for the second
    loss, gradient, result = run([2.0, 1.0, 1.1], [1.0, 1.0, 1.0], settings("gspo"), lengths=[2, 1])
    assert loss == pytest.approx([-1.3, -1.3, -1.1])
    assert gradient == pytest.approx([0.0, 0.0, -1.1])
    assert result.clipped.tolist() == [1.0, 1.0, 0.0]


def test_a_sequence_ratio_uses_trainable_tokens_only():
    loss, gradient, _ = run([1.2, 100.0], [1.0, 1.0], settings("gspo"), mask=[1.0, 0.0])
    assert loss[0] == pytest.approx(-1.2)
    assert gradient[1] == 0.0


def test_gspo_token_has_the_sequences_ratio_and_the_tokens_gradient():
    root = math.sqrt(1.2)
    loss, gradient, _ = run([1.2, 1.0], [1.0, 3.0], settings("gspo_token"))
    assert loss == pytest.approx([-root, -3 * root])
    assert gradient == pytest.approx([-root, -3 * root])


# -- cispo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.0, 2.0, 1.0, 0.0),
        (2.0, 1.0, 2.0, 0.0),
        (7.0, 1.0, 5.0, 1.0),  # capped, and still learning
        (7.0, -1.0, 5.0, 1.0),  # the sign of the advantage does not matter
        (0.01, 1.0, 0.01, 0.0),  # no lower bound
    ],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    loss, gradient, result = run([ratio], [advantage], settings("cispo", clip_ratio_low=1.0))
    assert loss == pytest.approx([-advantage * weight * (math.log(ratio) - 1.0)], rel=1e-5)
    assert gradient == pytest.approx([-advantage * weight], rel=1e-5)
    assert result.clipped.tolist() == [clipped]
    assert result.dual_clipped is None


def test_cispo_has_easyr1s_lower_bound_if_configured():
    assert run([0.1], [1.0], settings("cispo", clip_ratio_low=0.0))[1] == pytest.approx([-1.0])
    assert run([0.1], [1.0], settings("cispo", clip_ratio_low=0.2))[1] == pytest.approx([-0.8])


# -- sapo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"),
    [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (0.5, 3.0, 1.0), (2.0, -1.0, 2.0), (0.5, -2.0, 2.0)],
)
def test_sapo_by_hand(ratio, advantage, tau):
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, gradient, result = run([ratio], [advantage], settings("sapo"))
    assert loss == pytest.approx([-advantage * 4 / tau * gate], rel=1e-5)
    assert gradient == pytest.approx([-advantage * 4 * gate * (1 - gate) * ratio], rel=1e-5)
    assert (result.clipped, result.dual_clipped) == (None, None)


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_policy_every_loss_has_the_plain_policy_gradient(kind, advantage):
    assert run([1.0, 1.0], [advantage] * 2, settings(kind, clip_ratio_low=0.2))[1] == pytest.approx([-advantage] * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_stay_finite_for_extreme_ratios(kind):
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.tensor([0.0, -1000.0]),
        torch.tensor([1.0, -1.0]),
        settings(kind),
        loss_mask=torch.ones(2),
        sequence_index=torch.tensor([0, 1]),
        num_sequences=2,
    )
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_advantage_has_zero_gradient(kind):
    assert run([0.5, 1.0, 3.0], [0.0] * 3, settings(kind))[1] == [0.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_depend_on_others_in_the_batch(kind):
    ratios, advantages, lengths = [0.9, 1.4, 1.2, 0.6, 2.0], [1.0, 1.0, -1.0, -1.0, -1.0], [2, 3]
    together = run(ratios, advantages, settings(kind), lengths=lengths)
    first, second = run(ratios[:2], advantages[:2], settings(kind)), run(ratios[2:], advantages[2:], settings(kind))
    assert together[0] == pytest.approx(first[0] + second[0])
    assert together[1] == pytest.approx(first[1] + second[1])
