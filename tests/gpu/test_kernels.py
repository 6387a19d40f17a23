"""Attention kernels and log-probabilities are those of float64, forward and gradient."""

from __future__ import annotations

import pytest
import torch

from support.gpu import Figures, Machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

# Relative errors. bfloat16 rounds to 8 bits; a wrong mask or a wrong order gives errors near 1.
KERNELS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
LOGPROBS = {torch.bfloat16: 0.1, torch.float32: 1e-3}
"""Largest difference of a log-probability, in nats. Logits near 10 are rounded to 0.03."""


def kernels(machine: Machine, dtype: torch.dtype) -> Figures:
    from kernel_errors import kernel_errors
    from random_models import MODELS, model_config

    figures = Figures()
    config = model_config(MODELS["3b" if machine.on_gpu else "tiny"])
    for error in kernel_errors(config, torch.device(machine.device), dtype):
        name = f"{error.what} {error.kernel}"
        if error.unavailable:
            figures[name] = error.unavailable
            continue
        figures.at_most(f"{name}, output", error.output, KERNELS[dtype])
        figures.at_most(f"{name}, gradient", error.gradient, KERNELS[dtype])
    return figures


def logprobs(machine: Machine, dtype: torch.dtype) -> Figures:
    from kernel_errors import logprob_errors

    num_tokens, width, vocab_size = (1500, 2048, 151_936) if machine.on_gpu else (300, 128, 2048)
    device = torch.device(machine.device)
    errors = logprob_errors(num_tokens=num_tokens, width=width, vocab_size=vocab_size, device=device, dtype=dtype)
    figures = Figures()
    figures.at_most("log-probability", errors.logprobs, LOGPROBS[dtype])
    figures.at_most("entropy", errors.entropy, LOGPROBS[dtype])
    figures.at_most("gradient of states", errors.states, KERNELS[dtype])
    figures.at_most("gradient of head", errors.head_weight, KERNELS[dtype])
    return figures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("compare", [kernels, logprobs])
def test_what_a_gpu_computes_is_float64_up_to_rounding(measure, compare, dtype):
    measure(compare, dtype)
