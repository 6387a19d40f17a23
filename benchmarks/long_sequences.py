"""The memory of a pass over one row, against its length and the ranks that compute it together.

    python benchmarks/long_sequences.py [--lengths 4096 8192] [--ranks 1 2 4] [--plot FILE.svg]

One row with a prompt full of images and four completions of 128 tokens, on the tiny Qwen3-VL with
gradient checkpointing, in float32, on gloo ranks of one thread each. Memory is counted tensor by
tensor (trigon/training/device_memory.py), so that it does not depend on what else the machine
computes; seconds do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from trigon.data.packing import pack_train
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.models.sequence_parallel import RowRanks
from trigon.tools.quickstart.model import make_tiny
from trigon.training.budget import Lengths, dummy_group
from trigon.training.device_memory import HostMemory

COMPLETIONS, RESPONSE = 4, 128
IMAGE_PIXELS = 512 * 512  # 256 tokens each
SHORT = 1024


def compute(rank: int, ranks: int, lengths: Sequence[int], folder: str) -> None:
    """Write the peak of each length in bytes, and its seconds, into a file of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks)
    processors = load_processors(f"{folder}/model")
    policy = Policy(
        load_model(f"{folder}/model", dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    policy.enable_gradient_checkpointing()
    if ranks > 1:
        policy.use_row_ranks(RowRanks(rank, ranks, dist.group.WORLD))
    make_pass(policy, processors, SHORT)()  # allocates the gradients
    lines = []
    for length in lengths:
        measured = make_pass(policy, processors, length)
        dist.barrier()
        start = time.perf_counter()
        peak = HostMemory(shared_by=1).peak_bytes(measured)
        lines.append(f"{peak} {time.perf_counter() - start}")
    Path(folder, f"{ranks}-{rank}").write_text("\n".join(lines), encoding="ascii")
    dist.destroy_process_group()


def make_pass(policy: Policy, processors: Processors, length: int) -> Callable[[], None]:
    """Return a forward and backward over one row of this length."""
    lengths = Lengths(length - COMPLETIONS * RESPONSE, RESPONSE, IMAGE_PIXELS, 0, 0)
    group = dummy_group(policy, lengths, num_completions=COMPLETIONS)
    positions = positions_of(processors.family, processors.hf_config)
    [batch] = pack_train([group], max_tokens=length, positions=positions)
    assert len(batch.packed.token_ids) == length

    def run() -> None:
        policy(batch.packed).logprobs.sum().backward()

    return run


def measure(ranks: int, lengths: Sequence[int], folder: str) -> list[tuple[float, float]]:
    """Return, for each length, the largest peak of a rank in MiB, and the slowest's seconds."""
    processes.spawn(compute, (ranks, lengths, folder), nprocs=ranks)
    of_ranks = [Path(folder, f"{ranks}-{rank}").read_text(encoding="ascii").split("\n") for rank in range(ranks)]
    by_length = [[tuple(map(float, line.split())) for line in lines] for lines in zip(*of_ranks, strict=True)]
    return [(max(peak for peak, _ in each) / 2**20, max(seconds for _, seconds in each)) for each in by_length]


def plot(file: Path, lengths: Sequence[int], measured: dict[int, list[tuple[float, float]]]) -> None:
    """Draw the peaks into an SVG file."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "trigon"
    figure, axis = plt.subplots(figsize=(6, 3.4))
    for ranks, results in measured.items():
        axis.plot(lengths, [peak for peak, _ in results], marker="o", label=f"{ranks} rank{'s' * (ranks > 1)}")
    axis.set(xlabel="tokens of the row", ylabel="peak of a rank, MiB", ylim=(0, None), xlim=(0, None))
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--plot", type=Path, help="draw them into this file as well")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("tokens | ranks | peak of a rank, MiB | seconds")
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder, "model"), model_type="qwen3_vl")
        measured = {ranks: measure(ranks, chosen.lengths, folder) for ranks in chosen.ranks}
    for index, length in enumerate(chosen.lengths):
        for ranks, results in measured.items():
            peak, seconds = results[index]
            print(f"{length:,} | {ranks} | {peak:,.0f} | {seconds:,.1f}")
    if chosen.plot is not None:
        plot(chosen.plot, chosen.lengths, measured)


if __name__ == "__main__":
    main()
