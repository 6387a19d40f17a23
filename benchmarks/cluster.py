"""Simulates clusters of 8 to 512 GPUs that sample and learn in turn, at the same time, or group by
group, and prints what they reach: time of a step, tokens a second, utilisation, age of tokens.

    python benchmarks/cluster.py [--plot docs/cluster.svg]

Needs no GPU, and a few minutes of one core. No cluster was measured: times of GPUs come from
cluster_times.py (specification figures and assumed efficiencies), those of the driver from
benchmarks/scale.py. The simulation is in simulation.py and cluster_modes.py; cluster_runs.py
compares it with real runs on this machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster_modes import MODES, Hardware, Mode, Outcome, simulate
from cluster_times import LINK_SHARE, NETWORK_RATE, ClusterTimes
from shared import table
from simulation import LongTail, SamplingTimes, draw_groups

from trigon.config.options import with_options
from trigon.models.dtypes import DTYPES
from trigon.tools.plan.call import load_planned
from trigon.tools.plan.lengths import LengthOptions

GPUS = (8, 32, 128, 512)
GPUS_PER_NODE = 8
STEPS = 4
WARM_UP = {"in turn": 1, "pipeline": 2, "oversampling": 6, "streamed": 6, "partial": 6}
"""Steps that are not counted: in turn all steps are alike after the first one."""
LEARNERS_STEP = 4  # learners come in this many GPUs, each a shard of the model at least
SPLIT_AT = 32  # GPUs for which the pools are chosen; their shares are the same for all numbers
MOST_PLANNED = 16  # GPUs whose update is planned; more of them divide the same work by their number
GROUP_SECONDS = 1e-3
"""Of the driver, for each group: docs/performance.md has 0.5 to 0.6 ms, for short completions."""
DRIVER_COSTS = (1e-3, 10e-3)
COLOCATED, CONTINUE = MODES[0], MODES[-1]
LONGEST_OF = 4096
DEFAULT_LENGTHS = LongTail.with_longest(1000, ratio=8, of=LONGEST_OF)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained. prompt, image: tokens of a prompt, and those of its image among them.

    prompts_per_gpu: of a step; it grows with the cluster. fixed_prompts: of a step where it does
    not grow.
    """

    model: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    gpu: str = "H100-80G"
    prompt: int = 450
    image: int = 340
    completions: int = 8
    lengths: LongTail = DEFAULT_LENGTHS
    prompts_per_gpu: int = 16
    fixed_prompts: int = 512
    max_sequences: int = 256


@dataclass(frozen=True, slots=True)
class Simulated:
    """One line of a table. learners: GPUs of the learning pool; all of them, if colocated."""

    mode: Mode
    gpus: int
    learners: int
    outcome: Outcome

    @property
    def tokens_per_gpu(self) -> float:
        """Sampled tokens that were learned from, for each second and GPU."""
        return self.outcome.tokens_per_second / self.gpus


# -- times --


@cache
def times_of(workload: Workload, gpus: int, prompts: int) -> ClusterTimes:
    """Return the times of a run on this many GPUs with this many prompts a step.

    One update with all of them, without KL, so that no other log-probabilities are needed.
    """
    nodes = max(1, gpus // GPUS_PER_NODE)
    assert gpus % nodes == 0, f"{gpus} GPUs are not whole nodes"
    options = [
        "data.train_files=hiyouga/geometry3k@train",  # not read: lengths are given
        f"data.max_prompt_length={workload.prompt}",
        f"data.max_response_length={workload.lengths.limit}",
        f"data.rollout_batch_size={prompts}",
        f"worker.actor.global_batch_size={prompts}",
        f"worker.actor.model.model_path={workload.model}",
        f"worker.rollout.n={workload.completions}",
        f"worker.rollout.max_num_seqs={workload.max_sequences}",
        "algorithm.disable_kl=true",
        "trainer.max_steps=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
    ]
    devices = {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": gpus // nodes,
        "trainer.device": "cuda",
        "worker.actor.fsdp.fsdp_size": math.gcd(gpus, GPUS_PER_NODE),
    }
    config = with_options(load_planned(None, options).config, devices)
    lengths = LengthOptions(
        prompt_tokens=workload.prompt,
        image_tokens=workload.image,
        response_tokens=workload.lengths.mean,
        num_prompts=prompts,
    )
    return ClusterTimes(config, workload.gpu, lengths, max_sequences=workload.max_sequences)


def make_hardware(
    workload: Workload, mode: Mode, gpus: int, learners: int, *, group_seconds: float = GROUP_SECONDS
) -> Hardware:
    """Return what the parts of a cluster take, by the arithmetic of cluster_times.py.

    Raises: ValueError if the model does not fit into the learners' memory.
    """
    planned = learners
    if learners > MOST_PLANNED:
        planned = GPUS_PER_NODE if learners % GPUS_PER_NODE == 0 else LEARNERS_STEP
    times = times_of(workload, planned, workload.prompts_per_gpu * planned)
    made = times.plan
    if not made.fits:
        raise ValueError(f"{workload.model} does not fit into {learners} x {workload.gpu}")
    sync = times.sync_seconds
    if mode.separate:
        # One broadcast, over the network: each sampler gets all weights.
        sync = made.parameters * DTYPES["bf16"].itemsize / (NETWORK_RATE * LINK_SHARE)
    return Hardware(
        replicas=gpus - learners if mode.separate else gpus,
        sampling=SamplingTimes(times.decode_step, times.max_sequences, times.prompt_seconds, times.token_seconds),
        learn_token=times.update_seconds / made.batches.row_tokens * planned / learners,
        sync_seconds=sync,
        group_seconds=group_seconds,
    )


# -- simulations --


def run(
    workload: Workload, mode: Mode, gpus: int, learners: int, prompts: int, *, group_seconds: float = GROUP_SECONDS
) -> Simulated:
    """Return what a cluster reaches."""
    outcome = simulate(
        mode,
        make_hardware(workload, mode, gpus, learners, group_seconds=group_seconds),
        draw_groups(workload.lengths, workload.completions, seed=0),
        groups_per_step=prompts,
        prompt=workload.prompt,
        steps=STEPS,
        warm_up=WARM_UP[mode.kind],
    )
    return Simulated(mode, gpus, learners, outcome)


def best_share(workload: Workload, mode: Mode) -> float:
    """Return the share of GPUs that learn with which a mode reaches most tokens a second."""
    if not mode.separate:
        return 1.0
    prompts = workload.prompts_per_gpu * SPLIT_AT
    tried = [run(workload, mode, SPLIT_AT, each, prompts) for each in range(LEARNERS_STEP, SPLIT_AT, LEARNERS_STEP)]
    return max(tried, key=_tokens_per_gpu).learners / SPLIT_AT


def _tokens_per_gpu(simulated: Simulated) -> float:
    return simulated.tokens_per_gpu


def num_learners(share: float, gpus: int) -> int:
    """Return the learners among this many GPUs, in whole steps, so that samplers are left."""
    if share == 1.0:
        return gpus
    return min(gpus - LEARNERS_STEP, max(LEARNERS_STEP, LEARNERS_STEP * round(share * gpus / LEARNERS_STEP)))


# -- tables and plot --


def outcomes_table(simulated: Sequence[Simulated]) -> str:
    """Return a table of all that was simulated, in their order."""
    rows = []
    for each in simulated:
        found, baseline = each.outcome, _baseline(simulated, each.gpus)
        rows.append(
            (
                each.gpus,
                each.mode.name,
                "all" if not each.mode.separate else f"{each.gpus - each.learners} + {each.learners}",
                f"{found.step_seconds:.1f}",
                f"{each.tokens_per_gpu:,.0f}",
                f"{each.tokens_per_gpu / baseline.tokens_per_gpu:.2f}",
                f"{found.sampling:.0%}",
                f"{found.running:.0f}",
                f"{found.learning:.0%}",
                f"{found.driver:.1%}",
                f"{found.mean_age:.2f}",
                found.max_age,
                found.dropped,
            )
        )
    header = (
        "GPUs",
        "mode",
        "samplers + learners",
        "s/step",
        "tokens/s/GPU",
        "relative",
        "sampling",
        "sequences",
        "learning",
        "driver",
        "mean age",
        "max age",
        "dropped",
    )
    return table(rows, header)


def _baseline(simulated: Sequence[Simulated], gpus: int) -> Simulated:
    return next(each for each in simulated if each.mode is COLOCATED and each.gpus == gpus)


def fixed_table(simulated: Sequence[Simulated]) -> str:
    """Return seconds of a step by mode and number of GPUs."""
    numbers = sorted({each.gpus for each in simulated})
    rows = []
    for mode in MODES:
        of_mode = {each.gpus: each.outcome.step_seconds for each in simulated if each.mode is mode}
        rows.append((mode.name, *(f"{of_mode[gpus]:.1f}" for gpus in numbers)))
    return table(rows, ("mode", *(f"{gpus} GPUs" for gpus in numbers)))


def ages_table(simulated: Sequence[Simulated]) -> str:
    """Return the shares of tokens by age."""
    oldest = max(each.outcome.max_age for each in simulated)
    rows = [(each.mode.name, *(f"{share:.1%}" for share in _shares(each.outcome, oldest))) for each in simulated]
    return table(rows, ("mode", *(f"age {age}" for age in range(oldest + 1))))


def _shares(outcome: Outcome, oldest: int) -> list[float]:
    total = sum(outcome.ages.values())
    return [outcome.ages.get(age, 0.0) / total for age in range(oldest + 1)]


def driver_table(by_cost: Mapping[float, Sequence[Simulated]]) -> str:
    """Return the driver's share of the time, and seconds of a step, by its cost for each group."""
    rows = [
        (
            f"{1000 * cost:g} ms",
            each.mode.name,
            each.gpus,
            f"{each.outcome.driver:.1%}",
            f"{each.outcome.step_seconds:.1f}",
        )
        for cost, simulated in by_cost.items()
        for each in simulated
    ]
    return table(rows, ("driver, for each group", "mode", "GPUs", "driver works", "s/step"))


def draw(
    file: Path,
    growing: Sequence[Simulated],
    fixed: Sequence[Simulated],
    by_cost: Mapping[float, Sequence[Simulated]],
    ages_at: int,
) -> None:
    """Draw tokens a second, seconds of a step with a fixed batch, ages, and the driver's share."""
    import matplotlib
    import matplotlib.pyplot as plt

    from trigon.tools.plot.figure import COLOURS

    matplotlib.rcParams |= {"svg.hashsalt": "trigon", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.4))
    for axis, simulated, label in (
        (axes[0][0], growing, "tokens a second, each GPU"),
        (axes[0][1], fixed, "seconds of a step"),
    ):
        for mode, colour in zip(MODES, COLOURS, strict=False):
            of_mode = [each for each in simulated if each.mode is mode]
            heights = [each.tokens_per_gpu if simulated is growing else each.outcome.step_seconds for each in of_mode]
            axis.plot([each.gpus for each in of_mode], heights, marker="o", markersize=4, color=colour, label=mode.name)
        axis.set(xscale="log", xlabel="GPUs", ylabel=label, ylim=(0, None), xticks=GPUS, xticklabels=GPUS)
        axis.minorticks_off()
    axes[0][0].set_title("batch grows with the GPUs", loc="left")
    axes[0][1].set_title("same batch for any number of GPUs", loc="left")
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    of_gpus = [each for each in growing if each.gpus == ages_at]
    oldest = max(each.outcome.max_age for each in of_gpus)
    left = [0.0] * len(of_gpus)
    for age in range(oldest + 1):
        widths = [_shares(each.outcome, oldest)[age] for each in of_gpus]
        axes[1][0].barh([each.mode.name for each in of_gpus], widths, left=left, color=COLOURS[age], label=f"{age}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes[1][0].invert_yaxis()
    axes[1][0].set(xlabel="share of tokens", xlim=(0, 1))
    axes[1][0].set_title(f"age of tokens, {ages_at} GPUs", loc="left")
    axes[1][0].legend(frameon=False, fontsize=8, loc="lower left", title="age")
    dashes = {COLOCATED: "--", CONTINUE: "-"}
    for (cost, simulated), colour in zip(by_cost.items(), COLOURS, strict=False):
        for mode, dash in dashes.items():
            of_mode = [each for each in simulated if each.mode is mode]
            axes[1][1].plot(
                [each.gpus for each in of_mode],
                [each.outcome.driver for each in of_mode],
                dash,
                marker="o",
                markersize=4,
                color=colour,
                label=f"{1000 * cost:g} ms, {mode.name}",
            )
    axes[1][1].set(xscale="log", xlabel="GPUs", ylabel="share of the time", ylim=(0, 1.02), xticks=GPUS)
    axes[1][1].set_xticklabels(GPUS)
    axes[1][1].minorticks_off()
    axes[1][1].set_title("driver works, by its cost for each group", loc="left")
    axes[1][1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def measure(workload: Workload, *, plot: Path | None, numbers: Sequence[int] = GPUS) -> str:
    """Return all tables; draw the plot, if one is wanted."""
    shares = {mode: best_share(workload, mode) for mode in MODES}

    def simulated(mode: Mode, gpus: int, prompts: int, group_seconds: float = GROUP_SECONDS) -> Simulated:
        found = run(workload, mode, gpus, num_learners(shares[mode], gpus), prompts, group_seconds=group_seconds)
        print(f"{gpus} GPUs, {mode.name}, {prompts} prompts: {found.outcome.step_seconds:.1f} s", file=sys.stderr)
        return found

    per_gpu = workload.prompts_per_gpu
    growing = [simulated(mode, gpus, per_gpu * gpus) for gpus in numbers for mode in MODES]
    fixed = [simulated(mode, gpus, workload.fixed_prompts) for gpus in numbers for mode in MODES]
    by_cost = {
        cost: [
            next(each for each in growing if (each.mode, each.gpus) == (mode, gpus))
            if cost == GROUP_SECONDS
            else simulated(mode, gpus, per_gpu * gpus, cost)
            for mode in (COLOCATED, CONTINUE)
            for gpus in numbers
        ]
        for cost in DRIVER_COSTS
    }
    ages_at = numbers[-2] if len(numbers) > 1 else numbers[-1]
    if plot is not None:
        draw(plot, growing, fixed, by_cost, ages_at)
    hardware = make_hardware(workload, COLOCATED, GPUS_PER_NODE, GPUS_PER_NODE)
    separate = make_hardware(workload, CONTINUE, GPUS_PER_NODE, LEARNERS_STEP)
    steps = ", ".join(f"{1000 * hardware.sampling.decode_step(each):.1f} ms for {each}" for each in (1, 32, 128, 256))
    lengths = workload.lengths
    return "\n\n".join(
        [
            f"{workload.model}, {workload.gpu}; prompts of {workload.prompt} tokens, {workload.image} of an image; "
            f"n = {workload.completions}; completions: median {lengths.median:g}, mean {lengths.mean:.0f}, "
            f"at most {lengths.limit}",
            f"decoding step: {steps} sequences; prompt {1000 * hardware.sampling.prompt_seconds:.1f} ms; "
            f"update {1e6 * GPUS_PER_NODE * hardware.learn_token:.0f} GPU-microseconds a token; weight sync "
            f"{hardware.sync_seconds:.2f} s colocated, {separate.sync_seconds:.2f} s separate",
            f"{per_gpu} prompts a step for each GPU:",
            outcomes_table(growing),
            f"Seconds of a step of {workload.fixed_prompts:,} prompts:",
            fixed_table(fixed),
            f"Tokens by age, {ages_at} GPUs:",
            ages_table([each for each in growing if each.gpus == ages_at]),
            "The driver:",
            driver_table(by_cost),
        ]
    )


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS), help="sizes of the cluster")
    parser.add_argument("--plot", type=Path, help="draw the plots into this file as well")
    parser.add_argument("--median", type=int, default=1000, help="median tokens of a completion")
    parser.add_argument("--ratio", type=float, default=8.0, help="longest completion of 4,096, in medians")
    arguments = parser.parse_args()
    workload = Workload(lengths=LongTail.with_longest(arguments.median, ratio=arguments.ratio, of=LONGEST_OF))
    print(measure(workload, plot=arguments.plot, numbers=arguments.gpus))


if __name__ == "__main__":
    main()
