"""Errors of the attention kernels and of the log-probabilities against float64.

Of the output and of the worst gradient, at the shapes of a model. Shared by tests/gpu and
gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trigon.errors import ModelError
from trigon.models.attention import group_attention, window_attention
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.kernels import Kernel, resolve_kernel
from trigon.models.logprobs import token_logprobs
from trigon.types import GroupSpan

PROMPT_TOKENS, COMPLETIONS = 200, 5


@dataclass(frozen=True, slots=True)
class KernelError:
    """Relative errors of one kernel against float64 on the same inputs, by the Frobenius norm.

    what: "groups" (language model) or "images" (vision tower). gradient: the worst of query, key
    and value. unavailable: why the kernel cannot run here; then both errors are nan.
    """

    what: str
    kernel: Kernel
    output: float
    gradient: float
    unavailable: str = ""


def why_unavailable(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel cannot run here; None if it can."""
    try:
        resolve_kernel(kernel, device=device, dtype=dtype)
    except ModelError as error:
        return "needs CUDA" if device.type != "cuda" else str(error)
    return None


def kernel_errors(config: Any, device: torch.device, dtype: torch.dtype) -> list[KernelError]:
    """Return the errors of every kernel at the head counts and dimensions of a Qwen2.5-VL."""
    text, tower = config.get_text_config(), config.vision_config
    width, tower_width = text.hidden_size // text.num_attention_heads, tower.hidden_size // tower.num_heads
    generator = torch.Generator().manual_seed(0)
    spans, end = _random_spans(generator)
    windows = [64] * 12 + [32, 48, 16]
    starts = torch.tensor([0, *windows]).cumsum(0).int().to(device)

    def of_groups(kernel: Kernel, inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        return group_attention(query, key, value, AttentionMetadata(spans, device, kernel), scale=width**-0.5)

    def of_images(kernel: Kernel, inputs: list[Tensor]) -> Tensor:
        by: Literal["sdpa", "varlen", "flash"] = "sdpa" if kernel == "flex" else kernel
        query, key, value = inputs
        return window_attention(query, key, value, starts, scale=tower_width**-0.5, kernel=by)

    heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
    group_shapes = [(1, count, end, width) for count in heads]
    image_shapes = [(1, tower.num_heads, sum(windows), tower_width)] * 3
    group_kernels: tuple[Kernel, ...] = ("sdpa", "varlen", "flex", "flash")
    image_kernels: tuple[Kernel, ...] = ("sdpa", "varlen", "flash")
    return [
        *_errors("groups", of_groups, group_kernels, group_shapes, device, dtype, generator),
        *_errors("images", of_images, image_kernels, image_shapes, device, dtype, generator),
    ]


def _random_spans(generator: torch.Generator) -> tuple[list[GroupSpan], int]:
    """Return two groups of one row, and the length of the row."""
    spans, end = [], 0
    for _ in range(2):
        prompt, parts = (end, end := end + PROMPT_TOKENS), []
        for length in torch.randint(20, 120, (COMPLETIONS,), generator=generator).tolist():
            parts.append((end, end := end + length))
        spans.append(GroupSpan(prompt, tuple(parts)))
    return spans, end


def _errors(
    what: str,
    attend: Callable[[Kernel, list[Tensor]], Tensor],
    kernels: tuple[Kernel, ...],
    shapes: list[tuple[int, int, int, int]],
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[KernelError]:
    rounded = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = [each.double().to(device).requires_grad_() for each in rounded]
    expected = attend("sdpa", exact)
    expected_gradients = torch.autograd.grad(expected.pow(2).sum(), exact)
    errors = []
    for kernel in kernels:
        reason = why_unavailable(kernel, device, dtype)
        if reason is not None:
            errors.append(KernelError(what, kernel, float("nan"), float("nan"), reason))
            continue
        inputs = [each.to(device).requires_grad_() for each in rounded]
        output = attend(kernel, inputs)
        gradients = torch.autograd.grad(output.to(torch.promote_types(dtype, torch.float32)).pow(2).sum(), inputs)
        worst = max(relative_error(*pair) for pair in zip(gradients, expected_gradients, strict=True))
        errors.append(KernelError(what, kernel, relative_error(output, expected), worst))
    return errors


@dataclass(frozen=True, slots=True)
class LogprobErrors:
    """Errors of token_logprobs against float64 on the same inputs.

    logprobs, entropy: largest absolute difference, in nats. states, head_weight: relative errors of
    the gradients.
    """

    logprobs: float
    entropy: float
    states: float
    head_weight: float


def logprob_errors(
    *, num_tokens: int, width: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> LogprobErrors:
    """Return the errors of token_logprobs with a banned token and a temperature other than 1."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device)
    # Logits have a standard deviation of 2: some tokens are likely and most are not.
    weight = (2 * width**-0.5 * torch.randn(vocab_size, width, generator=generator)).to(dtype).to(device)
    targets = torch.randint(1, vocab_size, (num_tokens,), generator=generator).to(device)
    factors = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64).to(device)
    temperature, banned = 0.7, 0

    exact = [each.double().requires_grad_() for each in (states, weight)]
    logits = exact[0] @ exact[1].T / temperature
    logits[:, banned] = -torch.inf
    table = logits.log_softmax(1)
    expected = table.gather(1, targets[:, None])[:, 0]
    finite = table.masked_fill(table == -torch.inf, 0.0)
    expected_entropy = -(table.exp() * finite).sum(1)
    loss = (factors[0] * expected + factors[1] * expected_entropy).sum()
    expected_gradients = torch.autograd.grad(loss, exact)
    del logits, table, finite

    states.requires_grad_()
    weight.requires_grad_()
    result = token_logprobs(
        states, weight, targets, temperature=temperature, banned_token_ids=(banned,), entropy_gradient=True
    )
    measured = (factors[0].float() * result.logprobs + factors[1].float() * result.entropy).sum()
    of_states, of_weight = torch.autograd.grad(measured, [states, weight])
    return LogprobErrors(
        logprobs=float((result.logprobs.double() - expected).abs().max()),
        entropy=float((result.entropy.double() - expected_entropy).abs().max()),
        states=relative_error(of_states, expected_gradients[0]),
        head_weight=relative_error(of_weight, expected_gradients[1]),
    )


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return |result - expected| / |expected|."""
    return float((result.detach().double() - expected.detach()).norm() / expected.detach().norm())
