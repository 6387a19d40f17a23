"""Speed of one update of a packed group against a padded Hugging Face batch.

    python benchmarks/update.py

One prompt of 322 tokens, 256 of them an image, with 8 completions, on a random Qwen2.5-VL of 40 M
parameters, in float32 on one CPU thread. The padded side is transformers' own forward with SDPA,
right-padded, with logits of response tokens only. Prints for each response length the best seconds
of both, their ratio, and the largest difference of a log-probability and of a gradient (relative,
worst parameter), to verify that both compute the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from shared import SHORT, VOCABULARY, Figure, make_model, measure_and_print, table
from torch import Tensor

from trigon.models.families import family_of
from trigon.models.load import patch_model
from trigon.models.policy import Policy
from trigon.models.positions import completion_positions, prompt_positions
from trigon.types import GroupSpan, PackedGroups, Vision

PROMPT_TOKENS = SHORT.prompt
IMAGE_GRID = (1, 32, 32)  # patches, so 256 image tokens
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = range(VOCABULARY - 4, VOCABULARY)
SPECIAL = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
WARM_UP_TOKENS = 8
MIXED = [16, 50, 84, 119, 153, 187, 222, 256]
BARS = {"64": ([64] * 8, 3.5), "160": ([160] * 8, 2.3), "16 to 256": (MIXED, 0.0)}
"""Completion lengths of a group, and the target ratio; 0: the ratio of tokens, n (P + R) / (P + n
R).
"""


def make_group(completion_lengths: list[int], *, patch: int = 14) -> tuple[list[int], list[list[int]], Tensor, Tensor]:
    """Return a random group: (prompt, completions, pixel_values, grid_thw). patch: its side."""
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(0, VOCABULARY - 4, (length,), generator=generator).tolist()

    _, height, width = IMAGE_GRID
    image = [VISION_START, *[IMAGE_TOKEN] * (height * width // 4), VISION_END]
    prompt = text(8) + image + text(PROMPT_TOKENS - 8 - len(image))
    pixel_values = torch.randn(height * width, 3 * 2 * patch * patch, generator=generator)
    return prompt, [text(length) for length in completion_lengths], pixel_values, torch.tensor([IMAGE_GRID])


def packed_group(
    model: Any, prompt: list[int], completions: list[list[int]], pixel_values: Tensor, grid_thw: Tensor
) -> PackedGroups:
    """Pack one group into a row."""
    positions = prompt_positions(torch.tensor(prompt), grid_thw, family_of(model.config), model.config)
    spans, token_ids = [], list(prompt)
    for completion in completions:
        spans.append((len(token_ids), len(token_ids) + len(completion)))
        token_ids += completion
    return PackedGroups(
        token_ids=torch.tensor(token_ids),
        position_ids=torch.cat([positions, *(completion_positions(positions, len(c)) for c in completions)], 1),
        spans=(GroupSpan(prompt=(0, len(prompt)), completions=tuple(spans)),),
        visions=(Vision(pixel_values, grid_thw, hashes=()),),
    )


def padded_logprobs(
    model: Any, prompt: list[int], completions: list[list[int]], pixel_values: Tensor, grid_thw: Tensor
) -> Tensor:
    """Return the log-probabilities of all completions from one right-padded batch."""
    count, longest = len(completions), max(map(len, completions))
    token_ids = torch.zeros(count, len(prompt) + longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(token_ids)
    for row, completion in enumerate(completions):
        token_ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        attention_mask[row, : len(prompt) + len(completion)] = 1
    logits = model(
        input_ids=token_ids,
        attention_mask=attention_mask,
        pixel_values=pixel_values.repeat(count, 1),
        image_grid_thw=grid_thw.repeat(count, 1),
        mm_token_type_ids=(token_ids == IMAGE_TOKEN).int(),
        use_cache=False,
        logits_to_keep=torch.arange(len(prompt) - 1, len(prompt) + longest - 1),
    ).logits
    table = logits.log_softmax(-1).gather(2, token_ids[:, len(prompt) :, None])[..., 0]
    return torch.cat([table[row, : len(completion)] for row, completion in enumerate(completions)])


def run_once(model: Any, forward: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of one forward and backward, and the log-probabilities."""
    model.zero_grad()
    start = time.perf_counter()
    logprobs = forward()
    logprobs.mean().backward()
    return time.perf_counter() - start, logprobs.detach()


def compare(plain: Any, completion_lengths: list[int], repeats: int) -> dict[str, float]:
    """Return seconds of both, their ratio and their differences, for one group."""
    grouped = copy.deepcopy(plain)
    family = family_of(grouped.config)
    patch_model(grouped, family)
    policy = Policy(grouped, family, temperature=1.0, banned_token_ids=())

    def run_both(lengths: list[int]) -> tuple[tuple[float, Tensor], tuple[float, Tensor]]:
        group = make_group(lengths)
        packed = packed_group(grouped, *group)
        return run_once(grouped, lambda: policy(packed).logprobs), run_once(
            plain, lambda: padded_logprobs(plain, *group)
        )

    run_both([WARM_UP_TOKENS])
    seconds = []
    for _ in range(repeats):  # in turn, so that both run under the same conditions
        (packed_seconds, packed_logprobs), (padded_seconds, padded) = run_both(completion_lengths)
        seconds.append((packed_seconds, padded_seconds))
    gradients = zip(grouped.parameters(), plain.parameters(), strict=True)
    packed_best, padded_best = (min(side) for side in zip(*seconds, strict=True))
    return {
        "packed": packed_best,
        "padded": padded_best,
        "ratio": padded_best / packed_best,
        "logprob": float((packed_logprobs - padded).abs().max()),
        "gradient": max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in gradients),
    }


def measure(*, repeats: int) -> tuple[list[Figure], str]:
    """Return the figures of bar 1, and the table behind them."""
    model = make_model(VOCABULARY, SPECIAL)
    figures, rows = [], []
    for name, (lengths, target) in BARS.items():
        row = compare(model, lengths, repeats)
        mean = sum(lengths) / len(lengths)
        tokens = len(lengths) * (PROMPT_TOKENS + mean) / (PROMPT_TOKENS + sum(lengths))
        note = f"logprobs within {row['logprob']:.0e}, gradients {row['gradient']:.0e}; token ratio {tokens:.2f}"
        what = f"update, padded / packed, {name} response tokens"
        figures.append(Figure(1, what, row["ratio"], "x", at_least=target or round(tokens, 2), note=note))
        rows.append(
            (
                name,
                f"{row['padded']:.2f}",
                f"{row['packed']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['logprob']:.1e}",
                f"{row['gradient']:.1e}",
            )
        )
    header = ("response tokens", "padded, s", "packed, s", "ratio", "log-prob difference", "relative gradient error")
    size = (
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, prompt {PROMPT_TOKENS}, 8 completions:"
    )
    return figures, f"{size}\n\n{table(rows, header)}"


def main() -> None:
    """Measure and print."""
    measure_and_print(__doc__.splitlines()[0], measure)


if __name__ == "__main__":
    main()
