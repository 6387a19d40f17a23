"""How far the policy has gone from its reference, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

SampledKl = Literal["kl", "abs", "mse", "low_var_kl"]
"""Estimators that look at the sampled token alone."""

KlEstimator = Literal["kl", "abs", "mse", "low_var_kl", "full"]
"""full: no estimate, but the sum over the whole vocabulary, which models/logprobs.py computes."""

MAX_EXPONENT = 20.0
"""Above this, exp is continued by its tangent: it cannot overflow, and the gradient never vanishes."""


def _tangent_exp(x: Tensor) -> Tensor:
    """Return exp(x), continued by its tangent above MAX_EXPONENT."""
    tangent = math.exp(MAX_EXPONENT) * (1.0 + x - MAX_EXPONENT)
    return torch.where(x > MAX_EXPONENT, tangent, x.clamp(max=MAX_EXPONENT).exp())


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: SampledKl) -> Tensor:
    """Estimate KL(policy || reference) from the sampled tokens alone. All [S]; carries the gradient of logprobs.

    Schulman, "Approximating KL divergence" (2020): kl is k1 (unbiased, may be negative, and of zero expected gradient
    as a loss), mse is k2, low_var_kl is k3 (never negative, unbiased), which GRPO uses (arXiv:2402.03300, equation 4).
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "kl":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse":
            return 0.5 * log_ratio.square()
        case "low_var_kl":
            return _tangent_exp(-log_ratio) + log_ratio - 1.0
        case _:
            assert_never(estimator)


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A KL coefficient that follows a target (arXiv:1909.08593, section 2.2). A horizon of 0 keeps it fixed."""

    coefficient: float
    target: float
    horizon: float

    def updated(self, kl: float, num_sequences: int) -> AdaptiveKl:
        """Return the controller after a step of so many sequences, whose mean KL over all tokens was kl."""
        if self.horizon == 0 or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKl(self.coefficient * (1.0 + error * num_sequences / self.horizon), self.target, self.horizon)
