"""Time and memory of forward and backward on a GPU, from padded batches to packed groups.

    python benchmarks/gpu.py                # Qwen2.5-VL-3B's shapes, random weights
    python benchmarks/gpu.py --model 7b
    python benchmarks/gpu.py --tiny         # a quick check, also on a CPU

Lengths are those of Geometry3K: prompts of about 450 tokens, 340 of them an image, and five
completions of about 275 tokens each. All variants do the same work: they score all completions and
accumulate their gradients, with gradient checkpointing except in one, and without an optimizer.

    padded                transformers with SDPA: a right-padded batch, each completion with its
                          own copy of prompt and image
    packed, sdpa          the same sequences in rows without padding, attention by SDPA
    packed, varlen        the language model's attention in one call for each layer
    + varlen for images   the vision tower's as well
    + shared prompts      a prompt and its image once for all its completions
    + chunked log-probs   no table of logits of a whole row
    no recomputation      the same without gradient checkpointing, which needs more memory
    with ..., + ...       chunked log-probs with other kernels, compiled modules, or liger-kernel

tokens/s counts each completion with its prompt, in every variant. MFU is the fraction of the GPU's
peak that is used for operations of the model (trigon/models/sizes.py): "shared" counts each prompt
and image once, "repeated" as often as the padded batch computes them, with logits at every token,
as published figures do. First each kernel is compared with float64; at the end of each line are the
differences of the log-probabilities from those of the first variant.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import kernel_errors
import torch
from random_models import COMPLETIONS, MODELS, lengths_of, make_groups, make_model
from torch import Tensor

from trigon.data.packing import by_group, pack_rollouts
from trigon.models.attention import WINDOW_ATTENTION, use_group_attention
from trigon.models.families import ModelFamily, family_of
from trigon.models.fused import compile_layers, use_liger
from trigon.models.kernels import Kernel
from trigon.models.policy import Policy
from trigon.models.positions import prompt_positions
from trigon.models.sizes import GroupLengths, dimensions_of, peak_tflops, update_flops
from trigon.models.vision_encoder import use_patch_projection
from trigon.types import Prompt, RolloutGroup

_COUNTINGS = ("shared", "repeated")
ONE_CHUNK = 1 << 30


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the table.

    kernel: of the language model; None for the padded batch. tower: kernel of the vision tower.
    chunk: rows of logits that are computed at a time; None: as many as in a run.
    checkpointing: recompute each layer in the backward.
    """

    name: str
    kernel: Kernel | None
    tower: Kernel = "sdpa"
    shared: bool = False
    chunk: int | None = ONE_CHUNK
    checkpointing: bool = True
    module_kernels: Literal["", "compiled", "liger"] = ""


VARIANTS = (
    Variant("padded", None),
    Variant("packed, sdpa", "sdpa"),
    Variant("packed, varlen", "varlen"),
    Variant("+ varlen for images", "varlen", "varlen"),
    Variant("+ shared prompts", "varlen", "varlen", shared=True),
    Variant("+ chunked log-probs", "varlen", "varlen", shared=True, chunk=None),
    Variant("no recomputation", "varlen", "varlen", shared=True, chunk=None, checkpointing=False),
    Variant("with sdpa", "sdpa", "sdpa", shared=True, chunk=None),
    Variant("with flex", "flex", "varlen", shared=True, chunk=None),
    Variant("with flash-attn", "flash", "flash", shared=True, chunk=None),
    # These modify the model, and so come last; the second replaces all forwards that the first
    # replaced.
    Variant("+ compiled modules", "varlen", "varlen", shared=True, chunk=None, module_kernels="compiled"),
    Variant("+ liger-kernel", "varlen", "varlen", shared=True, chunk=None, module_kernels="liger"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one variant.

    seconds: of the fastest run. peak_bytes: 0 on a CPU. logprobs: of all completions, concatenated.
    """

    seconds: float
    peak_bytes: int
    logprobs: Tensor


def packed_run(
    policy: Policy, groups: Sequence[RolloutGroup], *, shared: bool, row_tokens: int
) -> Callable[[], Tensor]:
    """Return a function that runs packed groups and returns their log-probabilities.

    It runs forward and backward.
    """
    config = policy.model.config

    def positions(prompt: Prompt) -> Tensor:
        pixels = prompt.pixels()
        grid = None if pixels is None else pixels.grid_thw
        return prompt_positions(torch.tensor(prompt.token_ids), grid, policy.family, config)

    units = list(groups)
    if not shared:
        units = [RolloutGroup(group.prompt, (one,)) for group in groups for one in group.rollouts]
    rows = pack_rollouts(units, max_tokens=row_tokens, positions=positions)

    def run() -> Tensor:
        scores = []
        for row in rows:
            logprobs = policy(row.packed).logprobs
            logprobs.mean().backward()
            scores.append(logprobs.detach())
        return torch.cat([one for group in by_group(rows, scores) for one in group]).cpu()

    return run


def padded_run(model: Any, groups: Sequence[RolloutGroup], *, row_tokens: int) -> Callable[[], Tensor]:
    """Return the same with transformers alone.

    Each batch has as many completions as fit into row_tokens with their padding.
    """
    device, dtype = model.device, model.dtype
    sequences = [(group.prompt, one.completion.token_ids) for group in groups for one in group.rollouts]
    batches: list[list[tuple[Prompt, tuple[int, ...]]]] = [[]]
    for prompt, completion in sequences:
        longest = max(len(p.token_ids) + len(a) for p, a in (*batches[-1], (prompt, completion)))
        if batches[-1] and (len(batches[-1]) + 1) * longest > row_tokens:
            batches.append([])
        batches[-1].append((prompt, completion))

    def score(batch: list[tuple[Prompt, tuple[int, ...]]]) -> list[Tensor]:
        longest = max(len(prompt.token_ids) + len(completion) for prompt, completion in batch)
        token_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(token_ids)
        for row, (prompt, completion) in enumerate(batch):
            tokens = torch.tensor(prompt.token_ids + completion)
            token_ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        first = min(len(prompt.token_ids) for prompt, _ in batch) - 1
        pixels = [prompt.pixels() for prompt, _ in batch]
        token_ids, mask = token_ids.to(device), mask.to(device)
        logits = model(
            input_ids=token_ids,
            attention_mask=mask,
            pixel_values=torch.cat([each.pixel_values for each in pixels if each is not None]).to(device, dtype),
            image_grid_thw=torch.cat([each.grid_thw for each in pixels if each is not None]).to(device),
            mm_token_type_ids=(token_ids == model.config.image_token_id).int(),
            use_cache=False,
            logits_to_keep=torch.arange(first, longest - 1, device=device),
        ).logits
        table = logits.float().log_softmax(-1).gather(2, token_ids[:, first + 1 :, None])[..., 0]
        starts = [len(prompt.token_ids) - 1 - first for prompt, _ in batch]
        return [table[row, start : start + len(batch[row][1])] for row, start in enumerate(starts)]

    def run() -> Tensor:
        scores = []
        for batch in batches:
            logprobs = torch.cat(score(batch))
            logprobs.mean().backward()
            scores.append(logprobs.detach())
        return torch.cat(scores).cpu()

    return run


def prepare(variant: Variant, model: Any, family: ModelFamily, groups: Sequence[RolloutGroup], row_tokens: int) -> Any:
    """Set up the model for a variant, and return the function that runs it."""
    language, tower = family.language_model(model), family.vision_tower(model)
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    assert tower is not None
    if variant.kernel is None:
        language.set_attn_implementation("sdpa")
        tower.config._attn_implementation = "sdpa"
        return padded_run(model, groups, row_tokens=row_tokens)
    use_group_attention(model, family, variant.kernel)
    use_patch_projection(model, family)
    tower.config._attn_implementation = WINDOW_ATTENTION[variant.tower]
    policy = Policy(model, family, temperature=1.0, banned_token_ids=(), logprob_chunk=variant.chunk)
    match variant.module_kernels:
        case "compiled":
            compile_layers(policy.layers())
        case "liger":
            use_liger(policy.model)
    return packed_run(policy, groups, shared=variant.shared, row_tokens=row_tokens)


def measure(model: Any, run: Callable[[], Tensor], repeats: int) -> Measured:
    """Run once to warm up, then time several runs."""
    on_gpu = model.device.type == "cuda"
    model.zero_grad(set_to_none=True)
    logprobs = run()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Measured(min(seconds), torch.cuda.max_memory_allocated() if on_gpu else 0, logprobs)


def profile_of(run: Callable[[], Tensor], device: torch.device) -> str:
    """Return a table of the operations of one run that take most of the time of the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60))


def why_unavailable(variant: Variant, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a variant cannot run here; None if it can."""
    if variant.module_kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "needs liger-kernel" if device.type == "cuda" else "needs CUDA"
    for kernel in {variant.kernel or "sdpa", variant.tower}:
        reason = kernel_errors.why_unavailable(kernel, device, dtype)
        if reason is not None:
            return reason
    return None


def print_kernel_errors(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Print the relative errors of each kernel against float64.

    Of the output, and of the worst of the three gradients.
    """
    print(f"\nerror against float64, in {str(dtype).removeprefix('torch.')}        output    gradient")
    for error in kernel_errors.kernel_errors(config, device, dtype):
        name = f"  {error.what} {error.kernel:<28}"
        print(
            f"{name}    {error.unavailable}"
            if error.unavailable
            else f"{name} {error.output:9.1e}   {error.gradient:9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("3b", "7b"), default="3b")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and short rows, to check that everything runs"
    )
    parser.add_argument("--groups", type=int, help="prompts, each with 5 completions (16; 4 with --tiny)")
    parser.add_argument("--row-tokens", type=int, help="tokens of a packed row, or of a padded batch (8192; 400)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each variant; the fastest counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--profile", metavar="NAME", help="show the operations that take most of the time of this line of the table"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        choices=[variant.name for variant in VARIANTS],
        help="only these lines of the table, in its order",
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("this machine has no GPU; --tiny runs on the CPU")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row_tokens = arguments.row_tokens or (400 if arguments.tiny else 8192)
    name = "tiny" if arguments.tiny else arguments.model

    model = make_model(MODELS[name], device, dtype)
    family = family_of(model.config)
    family.language_model(model).config.use_cache = False
    model.train()
    groups = make_groups(
        model.config, arguments.groups or (4 if arguments.tiny else 16), 0.1 if arguments.tiny else 1.0, arguments.seed
    )
    lengths = lengths_of(groups)
    tokens = sum(group.prompt + completion for group in lengths for completion in group.completions)
    once = sum(group.prompt + sum(group.completions) for group in lengths)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    peak = peak_tflops(gpu)
    # Each completion with a prompt of its own, which has logits as well: -prompt tokens lack them.
    repeated = [
        GroupLengths(each.prompt, (completion,), each.grids, observed=-each.prompt)
        for each in lengths
        for completion in each.completions
    ]
    dimensions = dimensions_of(model.config)
    assert dimensions is not None, "the family of the random models is counted"
    flops = {name: update_flops(dimensions, each) for name, each in zip(_COUNTINGS, (lengths, repeated), strict=True)}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters / 1e6:.0f} M parameters on {gpu}, torch {torch.__version__}")
    print(f"{len(groups)} prompts x {COMPLETIONS} completions, {tokens} tokens, {once} with each prompt once")
    print(f"an update: {', '.join(f'{(each or 0) / 1e12:.3g} TFLOP {name}' for name, each in flops.items())}")
    print(f"rows of {row_tokens} tokens; peak {f'{peak:g} TFLOP/s' if peak else 'unknown, so no MFU'}")
    print_kernel_errors(model.config, device, dtype)
    print(
        f"\n{'':<22}{'seconds':>9}{'tokens/s':>10}{'MFU shared':>12}{'repeated':>10}{'peak GiB':>10}{'|logp diff|':>13}"
    )
    reference: Tensor | None = None
    profile = ""
    for variant in VARIANTS:
        if arguments.variants and variant.name not in arguments.variants:
            continue
        reason = why_unavailable(variant, device, dtype)
        if reason is not None:
            print(f"{variant.name:<22}  {reason}")
            continue
        try:
            measured = measure(model, prepare(variant, model, family, groups, row_tokens), arguments.repeats)
        except torch.cuda.OutOfMemoryError:
            print(f"{variant.name:<22}  out of memory: lower --row-tokens")
            gc.collect()
            torch.cuda.empty_cache()
            continue
        reference = measured.logprobs if reference is None else reference
        shares = [
            f"{100 * each / 1e12 / measured.seconds / peak:.1f} %" if peak and each else "-" for each in flops.values()
        ]
        memory = f"{measured.peak_bytes / 2**30:.1f}" if measured.peak_bytes else "-"
        difference = float((measured.logprobs - reference).abs().mean())
        print(
            f"{variant.name:<22}{measured.seconds:>9.3f}{tokens / measured.seconds:>10.0f}{shares[0]:>12}"
            f"{shares[1]:>10}{memory:>10}{difference:>13.1e}"
        )
        if variant.name == arguments.profile:
            profile = profile_of(prepare(variant, model, family, groups, row_tokens), device)
    if profile:
        print(f"\n{arguments.profile}, one update:\n{profile}")


if __name__ == "__main__":
    main()
