"""The work of a step: completions, rows, tokens, operations, and the seconds of a finished run.

The counts are the ones that a run reports: rows are packed by the same function, and operations are
counted by trigon/models/sizes.py, which also gives actor/model_tflops of the metrics.

Seconds come from a finished run of the same model on as many devices, in proportion to the work of
each phase: sampling grows with the sampled tokens, log-probabilities with the tokens of
sequences, updates with the tokens of rows, rewards and the rest with the completions; a weight sync
takes as long as it took. Nothing is known of hardware: without such a run there are no seconds. A
batch that fills the devices better than the run's batch is faster than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean, median

from pydantic import ValidationError

from trigon.assemble.options import needs_old_logprobs
from trigon.config.paths import local_path
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.packing import row_lengths
from trigon.distributed.balance import partition_balanced
from trigon.errors import ConfigError, DataError
from trigon.models.sizes import ModelSize, forward_flops, update_flops
from trigon.report.run import CONFIG, open_run
from trigon.tools.plan.lengths import LengthOptions, Lengths

_NO_PHASES = ("step", "validation", "save_checkpoint")
"""Keys of timing_s/ that are no phase of a step."""

_WARM_UP = 1
"""Steps at the beginning that are left out: they compile, allocate and fill caches."""

_FORWARD_SHARE = 1 / 3  # of an update: log-probabilities that the run did not compute


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a step. "Each GPU" is the rank that has most; on the CPU, a worker.

    prompts: prompts that the step learns from. sampled_prompts: all sampled prompts, including the
    ones that online filtering rejects.
    completions: completions of a prompt. sampled: completions of a step.
    sequences_per_gpu: sequences of an update on each GPU.
    update_rows, score_rows: forward passes of each GPU in an update, whose gradients accumulate,
        and in one scoring of the step's completions.
    prompt_tokens: tokens of the step's prompts, each once. response_tokens: tokens of its
        completions that are sampled. observed_tokens: tokens that completions observe.
    sequence_tokens: tokens of its sequences, each with its prompt and without what it observes, as
        perf/total_num_tokens.
    row_tokens: tokens of all rows of all updates, observed ones included, as actor/packed_tokens.
    """

    prompts: int
    sampled_prompts: int
    completions: int
    sampled: int
    sequences_per_gpu: int
    update_rows: int
    score_rows: int
    prompt_tokens: float
    response_tokens: float
    observed_tokens: float
    sequence_tokens: float
    row_tokens: float


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of a step, over all devices.

    prefill, decode: operations of sampling; observations belong to prefill.
    old, reference: operations of log-probabilities; 0 where they are not needed.
    update: forward and backward, as actor/model_tflops counts.
    """

    prefill: float
    decode: float
    old: float
    reference: float
    update: float

    @property
    def total(self) -> float:
        """The sum over the phases."""
        return self.prefill + self.decode + self.old + self.reference + self.update


def make_batches(config: Config, plan: Plan, lengths: Lengths, *, keep_rate: float) -> Batches:
    """Return the batches of a step.

    keep_rate: share of the groups that online filtering keeps; unused without it.
    """
    n, prompts = config.group_size, plan.prompts_per_step
    sampled_prompts = prompts
    if config.algorithm.online_filtering:
        per_round = config.prompts_per_round
        sampled_prompts = ceil(prompts / keep_rate / per_round) * per_round
    update_rows, packed = _rows(config, lengths, plan.prompts_per_update, plan.tokens_per_update_pass)
    score_rows, _ = _rows(config, lengths, prompts, plan.tokens_per_experience_pass)
    # A group that is split over rows has its prompt in each of them.
    repeated = packed / sum(group.tokens for group in lengths.groups(plan.prompts_per_update, n))
    mean_group = lengths.mean_prompt + n * lengths.completion_tokens
    observed_tokens = prompts * n * float(round(lengths.observed_tokens))
    response_tokens = prompts * n * float(lengths.completion_tokens) - observed_tokens
    return Batches(
        prompts=prompts,
        sampled_prompts=sampled_prompts,
        completions=n,
        sampled=sampled_prompts * n,
        sequences_per_gpu=ceil(plan.sequences_per_update / config.num_shares),
        update_rows=update_rows,
        score_rows=score_rows,
        prompt_tokens=prompts * lengths.mean_prompt,
        response_tokens=response_tokens,
        observed_tokens=observed_tokens,
        sequence_tokens=prompts * n * lengths.mean_prompt + response_tokens,
        row_tokens=prompts * mean_group * repeated * plan.epochs_per_step,
    )


def _rows(config: Config, lengths: Lengths, num_groups: int, budget: int) -> tuple[int, int]:
    """Return the rows of the rank that has most, and the tokens of all rows of all ranks."""
    shares, groups = config.num_shares, lengths.groups(num_groups, config.group_size)
    parts = partition_balanced([group.tokens for group in groups], shares) if shares > 1 else [range(len(groups))]
    packed = [
        row_lengths([(groups[index].prompt, groups[index].completions) for index in part], max_tokens=budget)
        for part in parts
    ]
    return max(map(len, packed)), sum(map(sum, packed))


def count_flops(config: Config, plan: Plan, size: ModelSize, lengths: Lengths, batches: Batches) -> StepFlops | None:
    """Return the operations of a step; None for a family that is not counted.

    Exact for the mean step of an epoch in which all measured prompts are drawn equally often.
    """
    dimensions = size.dimensions
    if dimensions is None:
        return None
    measured = len(lengths.prompts)
    groups = lengths.groups(measured, batches.completions)
    unobserving = replace(lengths, observed_tokens=0.0, observed_grids=()).groups(measured, batches.completions)
    forward, turns = forward_flops(dimensions, groups), forward_flops(dimensions, unobserving)
    update = update_flops(dimensions, groups, trains_vision=size.trains_vision(config.worker.actor.model))
    prompts = forward_flops(dimensions, lengths.groups(measured, 0))
    learned, drawn = batches.prompts / measured, batches.sampled_prompts / measured
    repeats = 1 if config.worker.rollout.enable_prefix_caching else batches.completions
    return StepFlops(
        prefill=(prompts.total * repeats + forward.total - turns.total) * drawn,
        decode=(turns.total - prompts.total) * drawn,
        old=forward.total * learned if needs_old_logprobs(config, plan) else 0.0,
        reference=forward.total * learned if config.needs_reference else 0.0,
        update=update * learned * plan.epochs_per_step,
    )


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a finished run measured.

    folder: folder of the run. phase_seconds: medians over the steps, by the names of timing_s/.
    validation_seconds: median; None if the run did not validate. lengths: means over the steps.
    completions, sampled_tokens, sequence_tokens, row_tokens: work of a step, in the mean.
    epochs: passes over the data of a step.
    """

    folder: str
    phase_seconds: Mapping[str, float]
    validation_seconds: float | None
    lengths: LengthOptions
    completions: float
    sampled_tokens: float
    sequence_tokens: float
    row_tokens: float
    epochs: int


def read_measured(folder: Path, planned: Config) -> MeasuredRun:
    """Return what a run measured, without its first step.

    Raises: DataError if it has no second training step, or options that this version does not know;
    ConfigError if it had another model, other numbers of workers, or separate ones, whose phases
    wait for each other.
    """
    run = open_run(folder)
    try:
        config = Config.model_validate(run.config())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(
            f"{run.path / CONFIG} is not the configuration of a run of this version of trigon: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    for name, ours, theirs in (
        ("worker.actor.model.model_path", _place(planned, {}), _place(config, run.local_sources() or {})),
        ("trainer.n_gpus_per_node x trainer.nnodes", planned.num_workers, config.num_workers),
        ("worker.hybrid_engine", *(each.worker.hybrid_engine for each in (planned, config))),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{folder} has {name}={theirs}, and the plan {ours}: its seconds say nothing of this run; name a run "
                "of the same model on as many GPUs"
            )
    if not config.worker.hybrid_engine:
        raise ConfigError(
            f"{folder} has separate workers that sample and learn (worker.hybrid_engine=false), whose phases wait for "
            "each other: no seconds of a plan follow from them"
        )
    steps = [step.metrics for step in run.metrics()]
    trained = [step for step in steps if "timing_s/update_actor" in step]
    used = trained[_WARM_UP:]
    if not used:
        raise DataError(
            f"{folder} has {len(trained)} training steps in its metrics.jsonl, and seconds need two: the first one is "
            "a warm-up. Let it run longer, or name another run"
        )
    names = dict.fromkeys(key.removeprefix("timing_s/") for step in used for key in step if key.startswith("timing_s/"))
    for name in _NO_PHASES:
        names.pop(name, None)
    validations = [step["timing_s/validation"] for step in steps if "timing_s/validation" in step]
    kept = _mean(used, "filter/kept_fraction")
    completions = config.prompts_per_step * config.group_size
    prompt, response = (_mean(used, f"{name}_length/mean") or 0.0 for name in ("prompt", "response"))
    sequence_tokens = _mean(used, "perf/total_num_tokens") or max(1.0, completions * (prompt + response))
    return MeasuredRun(
        folder=str(folder),
        phase_seconds={name: median(step.get(f"timing_s/{name}", 0.0) for step in used) for name in names},
        validation_seconds=median(validations) if validations else None,
        lengths=LengthOptions(prompt_tokens=prompt or None, response_tokens=response or None, keep_rate=kept),
        completions=completions / (kept or 1.0),
        sampled_tokens=max(1.0, completions * response / (kept or 1.0)),
        sequence_tokens=sequence_tokens,
        row_tokens=_mean(used, "actor/packed_tokens") or sequence_tokens,
        epochs=config.worker.actor.ppo_epochs,
    )


def _place(config: Config, sources: Mapping[str, str]) -> str | None:
    """Return where a run's model is, however its path is written. sources: its local sources."""
    text = config.worker.actor.model.model_path
    path = None if text is None else sources.get(text) or local_path(text)
    return text if path is None else str(Path(path).resolve())


def _mean(steps: Sequence[Mapping[str, float]], key: str) -> float | None:
    found = [step[key] for step in steps if isfinite(step.get(key, float("nan")))]
    return fmean(found) if found else None


def project_seconds(
    run: MeasuredRun, batches: Batches, *, scores_old: bool, scores_reference: bool
) -> dict[str, float]:
    """Return the seconds of each phase of a step, in proportion to its work."""
    updates = batches.row_tokens / run.row_tokens
    sequences = batches.sequence_tokens / run.sequence_tokens
    sampled = batches.response_tokens * batches.sampled_prompts / batches.prompts / run.sampled_tokens
    completions = batches.sampled / run.completions
    growth = dict.fromkeys(("old", "ref", "values"), sequences) | {"weights": 1.0, "gen": sampled}
    growth |= {"update_actor": updates, "update_critic": updates}
    seconds = {name: each * growth.get(name, completions) for name, each in run.phase_seconds.items()}
    for name, is_needed in (("old", scores_old), ("ref", scores_reference)):
        if not is_needed:
            seconds[name] = 0.0
        elif not seconds.get(name):
            seconds[name] = _FORWARD_SHARE * run.phase_seconds["update_actor"] / run.epochs * sequences
    return seconds
