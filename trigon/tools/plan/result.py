"""What a plan says of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trigon.assemble.memory_check import Remedy
from trigon.assemble.memory_table import RunMemory
from trigon.config.names import DeviceType
from trigon.config.plan import Plan
from trigon.tools.plan.lengths import Lengths
from trigon.tools.plan.timing import StepBytes, StepTime
from trigon.tools.plan.work import Ledger, StepFlops

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a run writes. checkpoint: one. checkpoints: of them kept, and the bytes of all.

    rollouts: of a step.
    """

    checkpoint: int
    kept: int
    rollouts: int

    @property
    def checkpoints(self) -> int:
        """The bytes of all checkpoints that are kept."""
        return self.kept * self.checkpoint


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Workers that only learn or only sample. busy: seconds of a step, weight sync included.

    devices: for people. num_devices: of them. replicas: of the rollout engine; 0 of learners. busy,
    idle_fraction: None if the time of a step is not known.
    """

    workers: Literal["learners", "samplers"]
    devices: str
    num_devices: int
    replicas: int
    busy: float | None
    idle_fraction: float | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do and need.

    model: its path. devices: for people. num_devices: of all workers, num_learners: of those that
    learn. pools: learners and samplers, if they are separate.
    parameters, trained_parameters: of the model.
    plan: steps and updates; see num_prompts. num_prompts: usable training prompts; None: unknown,
    so that epochs are too. num_steps: of the run; None if the number of prompts decides it and is
    not known. lengths, ledger: of prompts, completions, and a step.
    memory: by phase, of each GPU and of a machine. verdict: "does not fit" if a phase needs more
    than there is, "tight" above 95 % of it. remedies: changes that help most, if it does not fit;
    problem: why vLLM cannot start with its share of the GPU, if it cannot.
    combination: several with which it fits; None if none was found.
    sent_bytes: between driver and workers in a step, without images; 0 with one worker.
    flops, time, moved: of a step; None for a family whose operations are not counted. time: None as
    well for a run that does not fit.
    validation_seconds: of one validation; 0 without. num_validations: of the run.
    disk: what it writes. assumptions: what the figures rest on, one sentence each.
    """

    model: str
    devices: str
    num_devices: int
    num_learners: int
    pools: tuple[PoolPlan, ...]
    device: DeviceType
    peak_flops: float
    parameters: int
    trained_parameters: int
    plan: Plan
    num_prompts: int | None
    num_steps: int | None
    lengths: Lengths
    ledger: Ledger
    memory: RunMemory
    knows_host_memory: bool
    verdict: Verdict
    problem: str | None
    remedies: tuple[Remedy, ...]
    combination: Mapping[str, Any] | None
    flops: StepFlops | None
    time: StepTime | None
    moved: StepBytes | None
    validation_seconds: float
    num_validations: int
    sent_bytes: int
    disk: Disk
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory that is there."""
        return self.verdict != "does not fit"

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of sequences for each second and device, as perf/throughput; None if unknown."""
        return None if self.time is None else self.ledger.sequence_tokens / self.time.total / self.num_devices

    @property
    def update_mfu(self) -> float | None:
        """The model FLOPs utilization of the updates, as perf/mfu_actor; None if unknown."""
        if self.time is None or self.flops is None:
            return None
        return self.flops.update / (self.time.phases["update_actor"] * self.num_learners * self.peak_flops)

    @property
    def epoch_seconds(self) -> float | None:
        """The seconds of an epoch, without validation and checkpoints; None if not known."""
        if self.time is None or self.num_prompts is None:
            return None
        return self.time.total * self.plan.steps_per_epoch

    @property
    def run_seconds(self) -> float | None:
        """The seconds of all steps and validations, without start and checkpoints."""
        if self.time is None or self.num_steps is None:
            return None
        return self.time.total * self.num_steps + self.validation_seconds * self.num_validations
