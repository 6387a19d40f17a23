"""Time and memory of log-probabilities and entropies, in chunks and from the full table of logits.

    python benchmarks/logprobs.py

For 4,096 tokens and a vocabulary of 151,936, forward and backward, in float32 on one CPU thread,
with states of width 256. Memory is the peak of resident memory above that before the computation,
with the gradients of states and weights.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from shared import Figure, figures_table
from torch import Tensor

from trigon.models.logprobs import token_logprobs

TOKENS, VOCABULARY, WIDTH = 4096, 151_936, 256

Computed = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, [TOKENS] each."""


def chunked(states: Tensor, head: Tensor, targets: Tensor) -> Computed:
    """Compute the table in chunks."""
    scores = token_logprobs(states, head, targets, temperature=1.0, banned_token_ids=(), entropy_gradient=True)
    return scores.logprobs, scores.entropy


def full_table(states: Tensor, head: Tensor, targets: Tensor) -> Computed:
    """Compute the full table."""
    table = (states @ head.T).log_softmax(1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)


def run(
    compute: Callable[[Tensor, Tensor, Tensor], Computed], inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float, list[Tensor]]:
    """Return seconds, peak bytes, and [log-probabilities, entropies, both gradients]."""
    states, head, targets = inputs
    states, head = states.clone().requires_grad_(), head.requires_grad_()
    head.grad = None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak of resident memory
    start = time.perf_counter()
    logprobs, entropy = compute(states, head, targets)
    (logprobs.mean() + 0.1 * entropy.mean()).backward()
    seconds = time.perf_counter() - start
    peak = _memory("VmHWM") - before
    assert states.grad is not None
    assert head.grad is not None
    return seconds, peak, [logprobs.detach(), entropy.detach(), states.grad, head.grad]


def _memory(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return 1024.0 * float(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(*, repeats: int) -> list[Figure]:
    """Return the figures of bar 3, measured on both sides in turn."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, generator=generator)
    head = 0.1 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    seconds: list[tuple[float, float]] = []
    peaks = [0.0, 0.0]
    differences = [0.0] * 4
    for _ in range(repeats):
        chunked_seconds, chunked_peak, chunked_results = run(chunked, (states, head, targets))
        full_seconds, full_peak, full_results = run(full_table, (states, head, targets))
        seconds.append((chunked_seconds, full_seconds))
        peaks = [max(peaks[0], chunked_peak), max(peaks[1], full_peak)]
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(chunked_results, full_results, strict=True)]
        del chunked_results, full_results
    best = [min(side) for side in zip(*seconds, strict=True)]
    size = f"{TOKENS:,} tokens x vocabulary {VOCABULARY:,}"
    return [
        Figure(
            3, f"peak memory, {size}", peaks[0] / 1e9, " GB", at_most=1.0, note=f"full table: {peaks[1] / 1e9:.1f} GB"
        ),
        Figure(
            3,
            "seconds, full table / chunked, with entropy and gradients",
            best[1] / best[0],
            "x",
            at_least=1.0,
            note=f"{best[1]:.1f} s, {best[0]:.1f} s",
        ),
        Figure(3, "log-probabilities and entropies, relative difference", max(differences[:2]), ""),
        Figure(3, "gradients, relative difference", max(differences[2:]), "", at_most=5e-7),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side; the best counts (%(default)s)")
    torch.set_num_threads(1)
    print(figures_table(measure(repeats=parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
