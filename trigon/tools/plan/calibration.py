"""Timings of a finished run, from which the time of another one on the same machine is predicted.

Each phase has a factor: measured seconds, in the median over the steps, divided by those that the
plan of the run itself has. Phases that a plan does not count grow with the completions of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trigon.errors import DataError
from trigon.report.run import StepMetrics
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.timing import NOT_COUNTED, PHASES

_WARM_UP = 1
"""Steps at the beginning that are left out: they compile, allocate and fill caches."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run measured.

    seconds: of each phase, in the median. steps: that were used. lengths: means over them.
    learned_share: of the groups, those with a gradient.
    """

    seconds: Mapping[str, float]
    steps: int
    lengths: LengthOptions
    learned_share: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors of phases that are counted, and seconds per completion of those that are not.

    source: the run folder. lengths, learned_share: see Observed.
    """

    source: str
    factors: Mapping[str, float]
    per_completion: Mapping[str, float]
    lengths: LengthOptions
    learned_share: float

    def apply(self, seconds: Mapping[str, float], *, completions: int) -> dict[str, float]:
        """Return the seconds of the phases of another configuration.

        Log-probabilities that the calibrating run did not compute have the factor of its updates;
        another phase that it did not have keeps its uncalibrated seconds.
        """
        # Scoring is a part of what an update does.
        passes = self.factors.get("update_actor", 1.0)
        others = {"old": passes, "ref": passes}
        changed = {name: seconds[name] * self.factors.get(name, others.get(name, 1.0)) for name in PHASES}
        for name, each in self.per_completion.items():
            changed[name] = each * completions
        return changed


def observe(steps: Sequence[StepMetrics], folder: str, *, groups_per_step: int) -> Observed:
    """Return what a run measured, without its first step.

    groups_per_step: that it learned from, over all epochs of a step.

    Raises: DataError if it has no second step with timings.
    """
    trained = [each.metrics for each in steps if "timing_s/update_actor" in each.metrics]
    used = trained[_WARM_UP:]
    if not used:
        raise DataError(
            f"{folder} has {len(trained)} training steps in its metrics.jsonl, and a calibration needs two: the first "
            "one is a warm-up. Let it run longer, or name another run"
        )
    seconds = {name: median(each.get(f"timing_s/{name}", 0.0) for each in used) for name in PHASES}
    skipped = _mean(used, "actor/skipped_groups") or 0.0
    return Observed(
        seconds=seconds,
        steps=len(used),
        lengths=LengthOptions(
            prompt_tokens=_mean(used, "prompt_length/mean"),
            response_tokens=_mean(used, "response_length/mean"),
            keep_rate=_mean(used, "filter/kept_fraction"),
        ),
        learned_share=1.0 - skipped / groups_per_step,
    )


def _mean(steps: Sequence[Mapping[str, float]], key: str) -> float | None:
    found = [each[key] for each in steps if key in each]
    return sum(found) / len(found) if found else None


def calibrate(observed: Observed, predicted: Mapping[str, float], *, completions: int, source: str) -> Calibration:
    """Return the factors of a machine.

    predicted: the seconds of the phases of the run that was observed, by its plan.
    completions: of one of its steps.
    """
    counted = {name: observed.seconds[name] / predicted[name] for name in PHASES if predicted[name] > 0}
    return Calibration(
        source=source,
        factors={name: factor for name, factor in counted.items() if factor > 0},
        per_completion={name: observed.seconds[name] / completions for name in NOT_COUNTED},
        lengths=observed.lengths,
        learned_share=observed.learned_share,
    )
