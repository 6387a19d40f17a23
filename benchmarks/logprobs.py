"""Memory and time of log-probabilities and entropies of 4,096 tokens over 151,936 words, forward and backward.

    python benchmarks/logprobs.py

Against the plain computation, which holds the whole table of logits. Float32, one CPU thread, states of 256 numbers.
Memory is the high-water mark of resident memory above what was held before, the gradients of states and weights
included.
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


def ours(states: Tensor, head: Tensor, targets: Tensor) -> Computed:
    """Compute a chunk of the table at a time."""
    said = token_logprobs(states, head, targets, temperature=1.0, banned_token_ids=(), entropy_gradient=True)
    return said.logprobs, said.entropy


def plain(states: Tensor, head: Tensor, targets: Tensor) -> Computed:
    """Compute the whole table."""
    table = (states @ head.T).log_softmax(1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)


def run(
    compute: Callable[[Tensor, Tensor, Tensor], Computed], inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float, list[Tensor]]:
    """Return seconds, peak bytes, and what came out: log-probabilities, entropies, both gradients."""
    states, head, targets = inputs
    states, head = states.clone().requires_grad_(), head.requires_grad_()
    head.grad = None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts anew
    start = time.perf_counter()
    logprobs, entropy = compute(states, head, targets)
    (logprobs.mean() + 0.1 * entropy.mean()).backward()
    seconds = time.perf_counter() - start
    peak = _memory("VmHWM") - before
    assert states.grad is not None
    assert head.grad is not None
    return seconds, peak, [logprobs.detach(), entropy.detach(), states.grad, head.grad]


def _memory(what: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(what):
            return 1024.0 * float(line.split()[1])
    raise RuntimeError(f"this system does not tell {what}")


def measure(*, repeats: int) -> list[Figure]:
    """Return the figures of bar 3, both sides in turn."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, generator=generator)
    head = 0.1 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    seconds: list[tuple[float, float]] = []
    peaks = [0.0, 0.0]
    apart = [0.0] * 4
    for _ in range(repeats):
        our_seconds, our_peak, our_results = run(ours, (states, head, targets))
        their_seconds, their_peak, their_results = run(plain, (states, head, targets))
        seconds.append((our_seconds, their_seconds))
        peaks = [max(peaks[0], our_peak), max(peaks[1], their_peak)]
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(our_results, their_results, strict=True)]
        del our_results, their_results
    best = [min(side) for side in zip(*seconds, strict=True)]
    size = f"{TOKENS:,} tokens x {VOCABULARY:,} words"
    return [
        Figure(3, f"peak memory, {size}", peaks[0] / 1e9, " GB", at_most=1.0, note=f"plain: {peaks[1] / 1e9:.1f} GB"),
        Figure(
            3,
            "plain seconds over ours, entropy and gradients included",
            best[1] / best[0],
            "x",
            at_least=1.0,
            note=f"{best[1]:.1f} s, {best[0]:.1f} s",
        ),
        Figure(3, "log-probabilities and entropies, relative difference", max(apart[:2]), ""),
        Figure(3, "gradients, relative difference", max(apart[2:]), "", at_most=5e-7),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side; the best counts (%(default)s)")
    torch.set_num_threads(1)
    print(figures_table(measure(repeats=parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
