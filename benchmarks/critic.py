"""What a critic costs beside the policy, and how PPO with a critic learns beside GRPO.

    python benchmarks/critic.py cost
    python benchmarks/critic.py learning --seeds 0 1 2 3

cost: one update of a group of 8 completions of 64 tokens, with a prompt of 322 tokens of which 256
are an image, on a random Qwen2.5-VL of 40 M parameters, in float32 on one CPU thread: seconds, and
peak memory of the update without weights and optimizer states, of policy and critic, and what a
critic on the policy's trunk (worker.critic.share_trunk) adds to an update of the policy. All
include AdamW. The best of several repeats counts.

learning: the quickstart with grpo and n = 8, gae and n = 8, the same with a shared trunk, and gae
and n = 1, from the same model with the same number of completions in each step, so that n = 1 has
eight times as many prompts. --variants: some of them.
Prints the reward of the last steps, its standard deviation over seeds, and the explained variance
of the critic at the start and the end, and plots all curves. --mixed: half of the drawings are
blank, so that prompts differ in how often a completion is correct, which a critic can learn.
--small: a few steps of one seed, to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from learning import LAST_STEPS, mean_and_spread, plot, train_variants, values_of
from shared import SHORT, VOCABULARY, Figure, figures_table, table

VARIANTS = {
    "grpo, n = 8": ("algorithm.adv_estimator=grpo",),
    "gae, n = 8": ("algorithm.adv_estimator=gae", "worker.critic.global_batch_size=16"),
    "gae, shared trunk, n = 8": ("algorithm.adv_estimator=gae", "worker.critic.share_trunk=true"),
    "gae, n = 1": (
        "algorithm.adv_estimator=gae",
        "worker.rollout.n=1",
        "data.rollout_batch_size=128",
        "worker.actor.global_batch_size=128",
        "worker.critic.global_batch_size=128",
    ),
}
CRITIC = (
    "worker.actor.optim.lr=3e-4",  # with the 1e-3 of GRPO the reward of PPO falls again after 80 steps
    "algorithm.lam=0.95",
    "algorithm.lam_critic=1",
    "trainer.critic_warmup=10",
    "worker.critic.optim.lr=1e-3",
    "worker.critic.optim.weight_decay=0",
)
CRITICS_MODEL = (
    "worker.critic.fsdp.torch_dtype=fp32",
    "worker.critic.fsdp.mp_param_dtype=fp32",
    "worker.critic.model.enable_gradient_checkpointing=false",
)
BLANK_WEIGHT = f"data.train_weights=[1,{2048 / 192}]"  # as many blank drawings as others


def measure_cost(*, repeats: int) -> list[Figure]:
    """Return the seconds and the memory of updates of policy and critic, as ratios."""
    import torch
    from shared import make_model
    from update import SPECIAL, make_group

    from trigon.config.options import with_options
    from trigon.config.plan import ModelPlan
    from trigon.config.schema import Config
    from trigon.models.families import family_of
    from trigon.models.load import patch_model
    from trigon.models.policy import Policy
    from trigon.models.value import ActorCritic, ValueModel
    from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
    from trigon.training.device_memory import HostMemory, Placement
    from trigon.training.local import LocalTrainEngine
    from trigon.types import Prompt, TrainGroup, TrainSequence, Vision

    prompt, completions, pixels, grid = make_group([SHORT.response] * SHORT.n)
    ones = torch.ones(SHORT.response)
    group = TrainGroup(
        Prompt("0", tuple(prompt), Vision(pixels, grid, hashes=()), "", None, {}, ()),
        tuple(
            TrainSequence(
                tuple(tokens), ones, ones * (-1) ** index, -ones, None, None, values=0 * ones, returns=ones * index
            )
            for index, tokens in enumerate(completions)
        ),
    )

    optim = {"lr": 1e-5, "weight_decay": 0.0}
    trunk = {"share_trunk": True, "vf_coef": 0.1}
    config = Config(worker={"actor": {"optim": optim}, "critic": {"optim": optim}})
    gae = with_options(config, {"algorithm.adv_estimator": "gae"})
    plan = ModelPlan(total_updates=100, tokens_per_update_pass=100_000, tokens_per_experience_pass=100_000)
    place = Placement(torch.device("cpu"), torch.float32)
    updates: dict[str, Callable[[], object]] = {}
    for name in ("policy", "critic", "both on one trunk"):
        model = make_model(VOCABULARY, SPECIAL)
        family = family_of(model.config)
        patch_model(model, family)
        if name == "policy":
            policy = Policy(model, family, temperature=1.0, banned_token_ids=())
            engine = LocalTrainEngine(policy, config, plan, place)
        elif name == "critic":
            value_model = ValueModel(model, family, temperature=1.0, banned_token_ids=())
            engine = LocalCriticEngine(value_model, gae, plan, place)
        else:
            both = ActorCritic(model, family, temperature=1.0, banned_token_ids=())
            shared = with_options(gae, {f"worker.critic.{name}": value for name, value in trunk.items()})
            engine = LocalTrainEngine(both, shared, plan, place)
            LocalTrunkCritic(both, shared, plan, place, trainer=engine)
        updates[name] = lambda engine=engine: engine.step([group])  # type: ignore[misc]
    memory = HostMemory(shared_by=1)
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for update in updates.values():
        update()  # makes the optimizer states
    for _ in range(repeats):  # in turn, so that all see the same machine
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - start)
    for name, update in updates.items():
        peaks[name] = memory.peak_bytes(update)
    what = "n = 8, 322 prompt and 64 response tokens"
    figures = []
    for quantity, measured, shown in (
        ("seconds", seconds, "{:.2f} s"),
        ("peak memory", {name: peak / 2**20 for name, peak in peaks.items()}, "{:,.0f} MiB"),
    ):
        of_policy = measured["policy"]
        added = measured["both on one trunk"] - of_policy
        for compared, value, limit, others in (
            ("critic / policy", measured["critic"] / of_policy, 1.0, measured["critic"]),
            ("what a critic on one trunk adds / policy", added / of_policy, 0.3, measured["both on one trunk"]),
        ):
            note = f"{shown.format(others)}, {shown.format(of_policy)}"
            figures.append(
                Figure(19, f"{quantity} of an update, {compared}, {what}", value, "x", at_most=limit, note=note)
            )
    return figures


def options_of(variant: str, seed: int, made: Path, *, mixed: bool) -> list[str]:
    """Return the options of a run. mixed: half of the drawings are blank."""
    of_critic = CRITIC if "gae" in variant else ()
    of_critic += CRITICS_MODEL if of_critic and "shared" not in variant else ()
    return [*VARIANTS[variant], *of_critic, *(_mixed_data(made, seed) if mixed else ())]


def _mixed_data(made: Path, seed: int) -> tuple[str, str]:
    """Return the options of data of which half are blank; makes them as the quickstart does."""
    if not (made / "model").is_dir():
        command = [sys.executable, "-m", "trigon", "tiny", str(made), "--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    data = made.absolute() / "data"
    files = f"data.train_files=[{data / 'train.parquet'},{data / 'validation_blank.parquet'}]"
    return files, BLANK_WEIGHT


def learning_table(runs: dict[str, list[Path]]) -> str:
    """Return what each variant has learned, as a table."""
    rows = []
    for name, folders in runs.items():
        rewards = [values_of(folder, "reward/overall") for folder in folders]
        first = statistics.fmean(statistics.fmean(run[:5]) for run in rewards)
        last = mean_and_spread([statistics.fmean(run[-LAST_STEPS:]) for run in rewards])
        explained = [values_of(folder, "critic/vf_explained_var") for folder in folders]
        variance = [
            f"{statistics.fmean(statistics.fmean(run[part]) for run in explained):.2f}" if all(explained) else ""
            for part in (slice(5), slice(-LAST_STEPS, None))
        ]
        rows.append((name, f"{first:.3f}", *last, *variance))
    header = (
        "",
        "reward, first 5 steps",
        f"last {LAST_STEPS} steps",
        "std over seeds",
        "explained variance, first",
        "last",
    )
    return table(rows, header)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cost", "learning"])
    parser.add_argument("--repeats", type=int, default=5, help="cost: updates of each; the best counts (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="learning: (%(default)s)")
    parser.add_argument("--folder", type=Path, help="learning: of all runs; default: a temporary one")
    parser.add_argument("--plot", type=Path, help="learning: a figure (.png, .svg) or its numbers (.csv)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="learning: default: all")
    parser.add_argument("--mixed", action="store_true", help="learning: half of the drawings are blank")
    parser.add_argument("--small", action="store_true", help="one repeat; a few steps of one seed")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="learning: options of all runs")
    chosen = parser.parse_intermixed_args()
    if chosen.what == "cost":
        import torch

        torch.set_num_threads(1)
        print(figures_table(measure_cost(repeats=1 if chosen.small else chosen.repeats)))
        return
    small = ["trainer.max_steps=3", "trainer.critic_warmup=1", "trainer.val_freq=-1"] if chosen.small else []
    with tempfile.TemporaryDirectory(prefix="critic-") as temporary:
        folder = chosen.folder or Path(temporary)
        seeds = chosen.seeds[:1] if chosen.small else chosen.seeds

        def options(variant: str, seed: int, made: Path) -> list[str]:
            return [*options_of(variant, seed, made, mixed=chosen.mixed), *small, *chosen.overrides]

        runs = train_variants(folder, seeds, chosen.variants, options)
        print(learning_table(runs))
        if chosen.plot is not None:
            plot(runs, chosen.plot, "reward/overall", "critic/vf_explained_var")


if __name__ == "__main__":
    main()
