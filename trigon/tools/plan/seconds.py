"""The seconds of a run, as a finished run of the same model on as many devices measured them.

Every phase grows with its work: sampling with the sampled tokens, log-probabilities with the tokens
of sequences, updates with the tokens of rows, rewards and the rest with the completions; a weight
sync takes as long as it took. Nothing is known of hardware: without such a run there are no
seconds. A batch that fills the devices better than that of the run is faster than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median

from trigon.config.schema import Config
from trigon.errors import ConfigError, DataError
from trigon.report.run import open_run
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.work import Batches

_NO_PHASES = ("step", "validation", "save_checkpoint")
"""Keys of timing_s/ that are no phase of a step."""

_WARM_UP = 1
"""Steps at the beginning that are left out: they compile, allocate and fill caches."""

_FORWARD_SHARE = 1 / 3  # of an update: log-probabilities that the run did not compute


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

    Raises: DataError if it has no second training step; ConfigError if it had another model, other
    numbers of workers, or separate ones, whose phases wait for each other.
    """
    run = open_run(folder)
    config = Config.model_validate(run.config())
    for name, ours, theirs in (
        ("worker.actor.model.model_path", *(each.worker.actor.model.model_path for each in (planned, config))),
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
