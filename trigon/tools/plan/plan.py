"""Plans a run before it starts: batches, memory, operations and disk.

It needs the configuration and the model's config.json: neither weights, nor a GPU, nor the network.
It has seconds only from a finished run (work.py).
"""

from __future__ import annotations

import re
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trigon.assemble.data import NO_SOURCES
from trigon.assemble.memory import (
    GIB,
    TIGHT,
    Hardware,
    Phase,
    Remedy,
    RunMemory,
    count_checkpoint_bytes,
    count_checkpoints,
    count_memory,
    find_hardware,
    find_remedies,
    size_of_model,
)
from trigon.assemble.options import make_validation_sampling_params, needs_old_logprobs
from trigon.assemble.remedies import Changes
from trigon.config.checks import find_problems, raise_problems
from trigon.config.names import DeviceType
from trigon.config.options import with_options
from trigon.config.paths import local_path
from trigon.config.plan import Plan, make_plan
from trigon.config.schema import Config
from trigon.data.sources import Source
from trigon.errors import ConfigError, ModelError
from trigon.models.hub import hub_endpoint, uses_modelscope
from trigon.models.sizes import ModelSize
from trigon.system.files import read_json_object
from trigon.system.temporary import private_folder
from trigon.system.terminal import did_you_mean, nearest
from trigon.tools.plan.lengths import LengthOptions, Lengths, find_lengths
from trigon.tools.plan.work import (
    Batches,
    MeasuredRun,
    StepFlops,
    count_flops,
    make_batches,
    project_seconds,
    read_measured,
)
from trigon.training.budget import HEADROOM

SHIPPED = Path(__file__).parent / "model_configs"
"""A folder with a config.json for each of the models that plans are made for most often."""

_OWNER = "Qwen"

GPUS: Mapping[str, float] = {
    "A100-40G": 39.4,
    "A100-80G": 79.2,
    "A800-80G": 79.2,
    "H100-80G": 79.6,
    "H800-80G": 79.6,
    "H200-141G": 139.8,
    "L20-48G": 44.5,
    "L40S-48G": 44.5,
    "RTX4090-24G": 23.6,
}
"""GiB that torch finds on a GPU, by its name. A name without its memory means the largest."""

KEEP_RATE = 0.5
"""Assumed share of the groups that online filtering keeps."""

_MOST_CHANGES = 6  # that are combined
_ROLLOUT_BYTES = 600  # of a line in rollouts/, without its texts
_TEXT_BYTES = 5  # of a token
_PROMPT_TOKENS = 200  # of a prompt, whose text has no images
_TOKEN_RECORD_BYTES = 65  # of a token whose numbers are stored (trainer.rollout_tokens)

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is planned to run.

    kind: name of the devices, for people. hardware: the memory of each.
    """

    nodes: int
    gpus_per_node: int
    kind: str
    hardware: Hardware

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} x {self.kind}"


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a run writes.

    checkpoint: bytes of one. kept: the most checkpoints that are on the disk at a time.
    rollouts, validation_rollouts: bytes that a step and a validation add to the rollout files,
        without images.
    """

    checkpoint: int
    kept: int
    rollouts: int
    validation_rollouts: int

    @property
    def checkpoints(self) -> int:
        """The bytes of all checkpoints that are on the disk at a time."""
        return self.kept * self.checkpoint


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do and need.

    devices: the devices of all workers, as text.
    parameters, trained_parameters: number of weights of the model, adapters included.
    plan: steps and updates. num_prompts: usable training prompts; None: unknown, so that epochs
        are too. num_steps: steps of the run; None if they depend on an unknown number of prompts.
    num_validations: validations of the run. lengths: lengths of prompts and
        completions.
    batches, flops: what a step has. flops: None for a family whose operations are not counted.
    memory: the memory of each phase, on each GPU and on a machine.
    verdict: "does not fit" if a phase needs more than there is, "tight" above 95 % of it.
    remedies: changes that help most, if it does not fit. combination: several changes with which
        it fits; None if none were found.
    seconds: seconds of the phases of a step, and validation_seconds: of a validation, in proportion
        to a finished run; None without one, or if the run does not fit.
    disk: what the run writes. assumptions: the assumptions of the figures, one sentence each.
    """

    model: str
    device: DeviceType
    devices: str
    num_devices: int
    parameters: int
    trained_parameters: int
    plan: Plan
    num_prompts: int | None
    num_steps: int | None
    num_validations: int
    lengths: Lengths
    batches: Batches
    flops: StepFlops | None
    memory: RunMemory
    verdict: Verdict
    remedies: tuple[Remedy, ...]
    combination: Changes | None
    seconds: Mapping[str, float] | None
    validation_seconds: float | None
    disk: Disk
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        from trigon.tools.cli.plan import as_text

        return as_text(self)

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory that is there."""
        return self.verdict != "does not fit"

    @property
    def step_seconds(self) -> float | None:
        """The seconds of a step, without validation and checkpoints; None if not known."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def epoch_seconds(self) -> float | None:
        """The seconds of an epoch, without validation and checkpoints; None if not known."""
        if self.step_seconds is None or self.num_prompts is None:
            return None
        return self.step_seconds * self.plan.steps_per_epoch

    @property
    def run_seconds(self) -> float | None:
        """The seconds of all steps and validations, without start and checkpoints."""
        if self.step_seconds is None or self.num_steps is None:
            return None
        return self.step_seconds * self.num_steps + (self.validation_seconds or 0.0) * self.num_validations


def plan(
    config: Config,
    *,
    gpus: str | None = None,
    host_memory: int | None = None,
    model_config: Path | None = None,
    measured: Path | None = None,
    lengths: LengthOptions | None = None,
    download: bool = False,
    opened: Mapping[str, Source] = NO_SOURCES,
) -> RunPlan:
    """Return the plan of a run.

    Args:
        gpus: the devices, such as 8xH100-80G, or 2x8xH100-80G for two nodes, which set
            trainer.n_gpus_per_node and trainer.nnodes; None: the devices of this machine. Workers
            that sample separately have the same kind, and the configured number.
        host_memory: bytes of each machine; None: this machine's without gpus, else not limited.
        model_config: a config.json, or its folder, in place of model_path's.
        measured: the folder of a finished run of the same model on as many devices, from which
            seconds follow, and whose lengths are used where the dataset has none.
        lengths: lengths that are known; see LengthOptions.
        download: read the tokenizer and the datasets from the hub if they are not on this machine.
        opened: the datasets that are Python objects, by what the configuration has for them.
    Raises: ConfigError, DataError or ModelError for what cannot be planned.
    """
    if config.trainer.val_only:
        raise ConfigError("trainer.val_only=true makes no training step; plan the run that trains")
    given, place = lengths or LengthOptions(), find_place(config, gpus, host_memory)
    on_place: dict[str, Any] = {"trainer.nnodes": place.nodes, "trainer.n_gpus_per_node": place.gpus_per_node}
    hardware = place.hardware
    if hardware.device == "cuda":
        on_place["trainer.device"] = "cuda"
    config = with_options(config, on_place)
    raise_problems(find_problems(config))
    run = None if measured is None else read_measured(measured, config)
    trained = config.worker.actor.model
    with open_model_config(trained.model_path or "", model_config) as folder:
        sized = with_options(config, {"worker.actor.model.model_path": str(folder)})
        if config.critic_model_path is not None:
            with open_model_config(config.critic_model_path, None) as own:
                sized = with_options(sized, {"worker.critic.model.model_path": str(own)})
        size = size_of_model(sized)
        memory = count_memory(sized, size, hardware)
        verdict = _judge(memory)
        remedies, combination = _find_changes(sized, size, memory)
        micro_batches = {}
        if config.trainer.tunes_budgets_on(hardware.device):
            micro_batches = _estimate_micro_batches(sized, size, hardware)
    known = find_lengths(
        config,
        None if size.dimensions is None else size.dimensions.vision,
        given,
        measured=None if run is None else run.lengths,
        download=download,
        opened=opened,
    )
    knows_steps = bool(known.num_prompts or config.trainer.max_steps)
    # A warm-up cannot be too long for a number of steps that is not known.
    warmup = {} if knows_steps else {"trainer.critic_warmup": 0}
    steps = make_plan(
        with_options(config, {**micro_batches, **warmup}),
        num_train_prompts=known.num_prompts or config.prompts_per_step,
    )
    num_steps = steps.total_steps if knows_steps else None
    keep_rate = given.keep_rate or (None if run is None else run.lengths.keep_rate) or KEEP_RATE
    batches = make_batches(config, steps, known, keep_rate=keep_rate)
    seconds = None
    if run is not None and verdict != "does not fit":
        scores = {"scores_old": needs_old_logprobs(config, steps), "scores_reference": config.needs_reference}
        seconds = project_seconds(run, batches, **scores)
    return RunPlan(
        model=trained.model_path or "",
        device=hardware.device,
        devices=_describe_devices(config, place),
        num_devices=config.num_devices,
        parameters=size.all.weights + size.all.adapters(trained),
        trained_parameters=size.all.trained(trained) + size.all.adapters(trained),
        plan=steps,
        num_prompts=known.num_prompts,
        num_steps=num_steps,
        num_validations=_num_validations(config, known, num_steps or 0),
        lengths=known,
        batches=batches,
        flops=count_flops(config, steps, size, known, batches),
        memory=memory,
        verdict=verdict,
        remedies=remedies,
        combination=combination,
        seconds=seconds,
        validation_seconds=None if seconds is None or run is None else run.validation_seconds,
        disk=Disk(
            checkpoint=count_checkpoint_bytes(sized, size),
            kept=1 if num_steps is None else count_checkpoints(config, total_steps=num_steps),
            rollouts=_rollout_bytes(config, known, batches.sampled_prompts, batches.completions),
            validation_rollouts=_rollout_bytes(
                config, known, known.num_val_prompts or 0, make_validation_sampling_params(config).n
            ),
        ),
        assumptions=(*known.sources, *_assumptions(config, place, given, run, keep_rate)),
    )


# -- the model -----------------------------------------------------------------------------------


def shipped_models() -> list[str]:
    """Return the hub ids whose config.json is part of the package."""
    return [f"{_OWNER}/{folder.name}" for folder in sorted(SHIPPED.iterdir()) if folder.is_dir()]


@contextmanager
def open_model_config(model_path: str, model_config: Path | None) -> Iterator[Path]:
    """Yield a folder with the config.json of a model.

    Args:
        model_path: a folder, or a hub id.
        model_config: a config.json, or a folder with one, that is used instead.
    Raises: ModelError if there is none, or if it cannot be downloaded.
    """
    if model_config is None:
        yield _config_folder(model_path)
        return
    file = model_config / "config.json" if model_config.is_dir() else model_config
    if not file.is_file():
        raise ModelError(f"--model-config {model_config} is not a file: give a model's config.json, or its folder")
    try:
        read_json_object(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model-config {model_config} is no config.json of a model: {error}") from error
    if file.name == "config.json":
        yield file.parent
        return
    with private_folder() as folder:
        shutil.copyfile(file, folder / "config.json")  # transformers reads this name only
        yield folder


def _config_folder(model_path: str) -> Path:
    folder = local_path(model_path)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json; a plan needs no more of a model, see --model-config")
        return folder
    if model_path in shipped_models():
        return SHIPPED / model_path.partition("/")[2]
    return _download_config(model_path)


def _download_config(model_path: str) -> Path:
    if uses_modelscope():
        raise ModelError(
            f"a plan reads no config.json from ModelScope: download that of {model_path!r}, and give it with "
            "--model-config FILE"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_path, "config.json")).parent
    except (OSError, ValueError) as error:  # the base classes of the hub's errors
        raise ModelError(
            f"the config.json of {model_path!r} could not be downloaded from {hub_endpoint()}: "
            f"{' '.join(str(error).split())[:300]}\nGive the file with --model-config FILE, or use one of the models "
            f"whose configuration is part of Trigon: {', '.join(shipped_models())}"
            f"{did_you_mean(model_path, shipped_models())}"
        ) from error


# -- devices ---------------------------------------------------------------------------------------


def find_place(config: Config, gpus: str | None, host_memory: int | None) -> Place:
    """Return the devices that a text names, as 8xH100-80G, or 2x8xA100-40G; None: this machine's.

    Raises: ConfigError for an unknown GPU, with the nearest known one.
    """
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if gpus is not None:
        written = re.fullmatch(r"(?:([1-9]\d{0,3})[xX*])?(?:([1-9]\d{0,3})[xX*])?([A-Za-z][\w -]*|4090)", gpus.strip())
        if written is None:
            raise ConfigError(f"cannot read the GPUs {gpus!r}: write 8xH100-80G, or 2x8xH100-80G for two nodes")
        if counts := [int(count) for count in written.groups()[:2] if count is not None]:
            nodes, per_node = (1, *counts)[-2:]
            if per_node > 1024:
                raise ConfigError(f"{gpus!r} has {per_node:,} GPUs on a node; write 2x8xH100-80G for two nodes of 8")
        kind = _find_gpu(written[3])
        return Place(nodes, per_node, kind, Hardware("cuda", int(GPUS[kind] * GIB), host_memory))
    device = torch.device("cuda" if config.trainer.device != "cpu" and torch.cuda.is_available() else "cpu")
    if config.trainer.device == "cuda" and device.type == "cpu":
        raise ConfigError("trainer.device is cuda, and this machine has no GPU: name the GPUs, --gpus 8xH100-80G")
    found = find_hardware(device)
    kind = "CPU worker" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Place(nodes, per_node, kind, found if host_memory is None else replace(found, host_bytes=host_memory))


def _find_gpu(text: str) -> str:
    """Return the GPU of a name: H100-80G, h100, A100-80GB, RTX 4090, 4090."""
    name = re.sub(r"[ _]", "-", text.upper()).removesuffix("B").replace("GEFORCE-", "").replace("RTX-", "RTX")
    name = f"RTX{name}" if name.startswith("4090") else name
    matching = [each for each in GPUS if name in (each, each.partition("-")[0])]
    if not matching:
        short = {each.partition("-")[0]: each for each in GPUS}
        near = nearest(name.partition("-")[0], short)
        hint = "" if near is None else f"; did you mean {short[near]}?"
        raise ConfigError(
            f"unknown GPU {text!r}{hint}\nknown are {', '.join(GPUS)}; one of the same memory has the same plan"
        )
    return max(matching, key=lambda each: GPUS[each])


def _describe_devices(config: Config, place: Place) -> str:
    rollout = config.worker.rollout
    if config.worker.hybrid_engine:
        return str(place)
    samplers = replace(place, nodes=rollout.nnodes, gpus_per_node=rollout.n_gpus_per_node)
    return f"{place} (learners) and {samplers} (samplers)"


# -- memory ----------------------------------------------------------------------------------------


def _judge(memory: RunMemory) -> Verdict:
    if not memory.fits(certain=False):
        return "does not fit"
    return "tight" if memory.fraction(memory.worst(certain=False), certain=False) > TIGHT else "fits"


def _find_changes(config: Config, size: ModelSize, memory: RunMemory) -> tuple[tuple[Remedy, ...], Changes | None]:
    """Return the changes that help most alone, and several together with which the run fits.

    Each of the latter is the one that helps most after those before it; None if there are none, or
    none are needed.
    """
    worst = memory.worst(certain=False)
    overflows = memory.fraction(worst, certain=False) > 1
    remedies = find_remedies(config, size, memory, worst, certain=False) if overflows else []
    changes: dict[str, Any] = dict(memory.problem.remedies[0]) if memory.problem and memory.problem.remedies else {}
    for _ in range(_MOST_CHANGES + 1):
        changed_config = with_options(config, changes)
        changed = count_memory(changed_config, size, memory.hardware)
        if changed.fits(certain=False):
            return tuple(remedies), changes or None
        found = find_remedies(changed_config, size, changed, changed.worst(certain=False), certain=False)
        if not found:
            break
        changes |= found[0].changes
    return tuple(remedies), None


def _estimate_micro_batches(config: Config, size: ModelSize, hardware: Hardware) -> dict[str, int]:
    """Return the options of the most sequences of a row, in an update and in a scoring.

    They are the most that fit by the arithmetic of memory, with the reserve of a run, which
    measures its token budgets instead.
    """
    sequences = config.prompts_per_update * config.group_size
    most = max(1, -(-sequences // config.num_workers))

    def find_most(key: str, phase: Phase) -> int:
        def overflows(micro: int) -> bool:
            changed = with_options(config, {key: micro, "trainer.auto_micro_batch": False})
            memory = count_memory(changed, size, hardware)
            return any(
                memory.fraction(each, certain=False) > (1 - HEADROOM if each.pool == "GPU" else 1)
                for each in memory.phases
                if each.phase == phase
            )

        return max(1, bisect_left(range(1, most + 1), True, key=overflows))

    section = "worker.actor.micro_batch_size_per_device_for"
    return {
        f"{section}_update": find_most(f"{section}_update", "update"),
        f"{section}_experience": find_most(f"{section}_experience", "log-probs"),
    }


# -- the run ---------------------------------------------------------------------------------------


def _num_validations(config: Config, lengths: Lengths, steps: int) -> int:
    trainer = config.trainer
    if not config.data.val_files or not lengths.num_val_prompts:
        return 0
    every = steps // trainer.val_freq if trainer.val_freq > 0 else 0
    ends_on_one = every > 0 and steps % trainer.val_freq == 0
    return int(config.validates_first) + every + (0 if ends_on_one else 1)


def _rollout_bytes(config: Config, lengths: Lengths, prompts: int, completions: int) -> int:
    """Return the bytes of a rollouts file of these prompts: a line for each completion."""
    tokens = lengths.completion_tokens + min(_PROMPT_TOKENS, lengths.mean_prompt)
    recorded = min(config.trainer.rollout_tokens, prompts) * completions * lengths.response_tokens
    return round(prompts * completions * (_ROLLOUT_BYTES + _TEXT_BYTES * tokens) + _TOKEN_RECORD_BYTES * recorded)


def _assumptions(
    config: Config, place: Place, given: LengthOptions, run: MeasuredRun | None, keep_rate: float
) -> list[str]:
    """Return what the figures rest on, but for lengths."""
    lines = []
    if config.trainer.tunes_budgets_on(place.hardware.device):
        lines.append("token budgets: estimated; the run measures them before its first step (trainer.auto_micro_batch)")
    if config.algorithm.online_filtering:
        source = "given" if given.keep_rate is not None else "assumed (--keep-rate)"
        if given.keep_rate is None and run is not None and run.lengths.keep_rate is not None:
            source = "as in the run that was measured"
        lines.append(f"online filtering keeps {keep_rate:.0%} of the groups: {source}")
    if not config.learns_without_advantage:
        lines.append("every group has a gradient: groups with equal rewards are skipped, and make updates faster")
    if config.has_critic:
        critic = "the critic, a head of the policy," if config.shares_trunk else "the critic"
        lines.append(f"{critic} counts in memory and checkpoints, not in operations")
    if place.hardware.device == "cpu" and config.trainer.device == "auto":
        lines.append("devices: this machine has no GPU; name those of the run with --gpus 8xH100-80G")
    if place.hardware.host_bytes is None:
        lines.append("host memory: not known, so that it is not a limit (--host-memory)")
    if run is None:
        lines.append("seconds: not known without a finished run (--measured RUN)")
    else:
        lines.append(f"seconds: those of {run.folder}, in proportion to the work of each phase")
    return lines
