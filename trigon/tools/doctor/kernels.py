"""The checks of kernels and log-probabilities against float64."""

from __future__ import annotations

from trigon.tools.doctor.result import Findings, Setting, Tolerances

# Relative errors. bfloat16 rounds to 8 bits; a wrong mask or a wrong order gives errors near 1.
KERNEL_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
LOGPROB_TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}
"""Largest difference of a log-probability, in nats. Logits near 10 are rounded to 0.03."""


def check_kernels(setting: Setting) -> Findings:
    """Compare every attention kernel with float64, forward and gradient."""
    import torch

    from trigon.tools.doctor.kernel_errors import kernel_errors
    from trigon.tools.doctor.random_models import MODELS, model_config

    device = torch.device(setting.device)
    config = model_config(MODELS["3b" if setting.device == "cuda" else "tiny"])
    compared = Tolerances(setting)
    unavailable: dict[str, str] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for error in kernel_errors(config, device, dtype):
            label = f"{error.what} {error.kernel} {name}"
            if error.unavailable:
                if dtype == torch.bfloat16:  # in float32 only sdpa and flex exist
                    unavailable[error.kernel] = error.unavailable
                continue
            compared.at_most(f"{label}, output", error.output, KERNEL_TOLERANCE[name])
            compared.at_most(f"{label}, gradient", error.gradient, KERNEL_TOLERANCE[name])
    return compared.findings(notes=tuple(f"{kernel}: {reason}" for kernel, reason in unavailable.items()))


def check_logprobs(setting: Setting) -> Findings:
    """Compare log-probabilities, entropies and their gradients with float64."""
    import torch

    from trigon.tools.doctor.kernel_errors import logprob_errors

    on_gpu = setting.device == "cuda"
    compared = Tolerances(setting)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        errors = logprob_errors(
            num_tokens=1500 if on_gpu else 300,
            width=2048 if on_gpu else 128,
            vocab_size=151_936 if on_gpu else 2048,
            device=torch.device(setting.device),
            dtype=dtype,
        )
        compared.at_most(f"{name}, log-probability", errors.logprobs, LOGPROB_TOLERANCE[name])
        compared.at_most(f"{name}, entropy", errors.entropy, LOGPROB_TOLERANCE[name])
        compared.at_most(f"{name}, gradient of states", errors.states, KERNEL_TOLERANCE[name])
        compared.at_most(f"{name}, gradient of head", errors.head_weight, KERNEL_TOLERANCE[name])
    return compared.findings()
