"""KL divergence of the policy from the reference, per token, and its adaptive coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from trigon.config.names import SampledKlEstimator

MAX_EXPONENT = 20.0
"""Above this, exp is continued by its tangent: it cannot overflow, and its gradient never vanishes.
"""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: SampledKlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) from each sampled token.

    Schulman, "Approximating KL divergence" (2020). kl is k1: unbiased, may be negative, and its
    expected gradient is zero. mse is k2. low_var_kl is k3: unbiased and never negative; GRPO uses
    it (arXiv:2402.03300, equation 4).
    Args: logprobs, ref_logprobs: [S] float32. Returns: [S] float32 with the gradient of logprobs.
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
            return _exp_with_tangent(-log_ratio) + log_ratio - 1.0
        case _:
            assert_never(estimator)


def _exp_with_tangent(x: Tensor) -> Tensor:
    """Return exp(x), continued by its tangent above MAX_EXPONENT."""
    tangent = math.exp(MAX_EXPONENT) * (1.0 + x - MAX_EXPONENT)
    return torch.where(x > MAX_EXPONENT, tangent, x.clamp(max=MAX_EXPONENT).exp())


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A KL coefficient that follows a target (arXiv:1909.08593, section 2.2).

    target: of the KL that updated gets, in nats.
    horizon: in completions; 0 keeps the coefficient fixed.
    """

    coefficient: float
    target: float
    horizon: float

    def updated(self, kl: float, num_sequences: int) -> AdaptiveKl:
        """Return the controller after a step.

        Args:
            kl: mean over the step's completions of each one's mean over its tokens, in nats.
            num_sequences: completions of the step.
        """
        if self.horizon == 0 or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKl(self.coefficient * (1.0 + error * num_sequences / self.horizon), self.target, self.horizon)
