"""Speed of an update with linear attention: completions that share a prompt, or repeat it.

    python benchmarks/linear_attention.py

One prompt of 322 tokens, 256 of them an image, with 8 completions of 64 tokens, on a random Qwen3.5
of 40 M parameters, in float32 on one CPU thread. Both sides are the same code on one packed row:
one group with 8 completions, or 8 groups with one completion each. Prints the best seconds of both,
their ratio, the largest difference of a log-probability and of a gradient (relative, worst
parameter), and the memory of the states that layers pass from a prompt to its completions.
"""

from __future__ import annotations

from typing import Any

import torch
from shared import SHORT, VOCABULARY, Figure, measure_and_print, table
from torch import Tensor
from update import SPECIAL, WARM_UP_TOKENS, make_group, packed_group, run_once

from trigon.models.families import family_of
from trigon.models.load import patch_model
from trigon.models.policy import Policy
from trigon.models.sizes import LinearDimensions, dimensions_of
from trigon.system.torchvision_stub import declare_operators
from trigon.types import GroupSpan, PackedGroups

PATCH = 16
LEAST_RATIO = 3.0


def make_model() -> Any:
    """Return a random Qwen3.5 with 40 M parameters.

    Its layers have the proportions of the 9B model: three of linear attention for one of attention,
    as many values as hidden states, half as many keys.
    """
    declare_operators()
    from transformers import AutoModelForImageTextToText, Qwen3_5Config

    text = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 512,
        "patch_size": PATCH,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, **SPECIAL)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def repeated(group: PackedGroups) -> PackedGroups:
    """Return a row in which each completion of a group is a group by itself."""
    [span] = group.spans
    start, end = span.prompt
    tokens, spans, length = [], [], 0
    for first, last in span.completions:
        prompt_end, own_end = length + end - start, length + end - start + last - first
        spans.append(GroupSpan(prompt=(length, prompt_end), completions=((prompt_end, own_end),)))
        tokens += [torch.arange(start, end), torch.arange(first, last)]
        length = own_end
    order = torch.cat(tokens)
    return PackedGroups(
        token_ids=group.token_ids[order],
        position_ids=group.position_ids[:, order],
        spans=tuple(spans),
        visions=group.visions * len(spans),
    )


def linear_dimensions(policy: Policy) -> LinearDimensions:
    """Return the dimensions of linear attention of a model that has it."""
    dimensions = dimensions_of(policy.model.config)
    assert dimensions is not None
    assert dimensions.text.linear is not None
    return dimensions.text.linear


def compare(model: Any, repeats: int) -> dict[str, float]:
    """Return seconds of both, their ratio, their differences, and the bytes of states."""
    family = family_of(model.config)
    patch_model(model, family)
    policy = Policy(model, family, temperature=1.0, banned_token_ids=())

    def run(row: PackedGroups) -> tuple[float, Tensor, list[Tensor]]:
        seconds, logprobs = run_once(model, lambda: policy(row).logprobs)
        return seconds, logprobs, [parameter.grad.clone() for parameter in model.parameters()]

    short = packed_group(model, *make_group([WARM_UP_TOKENS] * SHORT.n, patch=PATCH))
    row = packed_group(model, *make_group([SHORT.response] * SHORT.n, patch=PATCH))
    run(short)
    sides = [(run(row), run(repeated(row))) for _ in range(repeats)]  # in turn, under the same conditions
    (_, shared_logprobs, shared_gradients), (_, logprobs, gradients) = sides[-1]
    shared_best, best = (min(side[0] for side in each) for each in zip(*sides, strict=True))
    linear = linear_dimensions(policy)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shared": shared_best,
        "repeated": best,
        "ratio": best / shared_best,
        "logprob": float((shared_logprobs - logprobs).abs().max()),
        "gradient": max(float((a - b).norm() / b.norm()) for a, b in zip(shared_gradients, gradients, strict=True)),
        "states": 4 * linear.layers * linear.state * (1 + SHORT.n),
    }


def measure(*, repeats: int) -> tuple[list[Figure], str]:
    """Return the figures, and the table behind them."""
    row = compare(make_model(), repeats)
    tokens = SHORT.token_ratio
    note = f"logprobs within {row['logprob']:.0e}, gradients {row['gradient']:.0e}; token ratio {tokens:.2f}"
    what = f"update with linear attention, repeated / shared prompt, {SHORT.response} response tokens"
    figures = [
        Figure(8, what, row["ratio"], "x", at_least=LEAST_RATIO, note=note),
        Figure(8, "states that a group passes on, float32", row["states"] / 2**20, " MiB"),
    ]
    cells = (f"{row['repeated']:.2f}", f"{row['shared']:.2f}", f"{row['ratio']:.2f}")
    header = ("repeated, s", "shared, s", "ratio")
    size = f"{row['parameters'] / 1e6:.0f} M parameters, prompt {SHORT.prompt}, {SHORT.n} completions:"
    return figures, f"{size}\n\n{table([cells], header)}"


def main() -> None:
    """Measure and print."""
    measure_and_print(__doc__.splitlines()[0], measure)


if __name__ == "__main__":
    main()
