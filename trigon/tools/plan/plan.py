"""Plans a run before it starts: batches, memory, operations, time, bytes and disk.

It needs the configuration and the model's config.json: neither weights, nor a GPU, nor the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from trigon.assemble.data import NO_SOURCES
from trigon.assemble.memory_check import find_hardware
from trigon.config.checks import find_problems, raise_problems
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.data.sources import Source
from trigon.errors import ConfigError
from trigon.report.run import open_run
from trigon.system.cpus import count_usable_cpus
from trigon.tools.plan.calibration import Calibration, calibrate, observe
from trigon.tools.plan.hardware import CPU, Cluster, accelerator_named, parse_gpus
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.planner import Place, Planner
from trigon.tools.plan.result import RunPlan
from trigon.tools.plan.work import TRIGON, Trainer


def plan(
    config: Config,
    *,
    gpus: str | None = None,
    host_memory: int | None = None,
    model_config: Path | None = None,
    calibrate_with: Path | None = None,
    lengths: LengthOptions | None = None,
    download: bool = False,
    trainer: Trainer = TRIGON,
    opened: Mapping[str, Source] = NO_SOURCES,
) -> RunPlan:
    """Return the plan of a run.

    Args:
        gpus: the devices, such as 8xH100-80G, or 2x8xH100-80G for two nodes, which set
            trainer.n_gpus_per_node and trainer.nnodes; None: those of this machine. Workers that
            sample separately have the same kind, and the configured number.
        host_memory: bytes of each machine; None: this machine's without gpus, else not limited.
        model_config: a config.json, or its folder, in place of that of model_path.
        calibrate_with: the folder of a finished run on the same hardware, whose timings replace
            the assumed efficiencies, and whose lengths are used where the dataset has none.
        lengths: lengths that are known; see LengthOptions.
        download: read the tokenizer and the datasets from the hub if they are not on this machine.
        trainer: how the trainer computes; another one than Trigon's to compare with its figures.
        opened: the datasets that are Python objects, by what the configuration has for them.
    Raises: ConfigError, DataError or ModelError for what cannot be planned.
    """
    if config.trainer.val_only:
        raise ConfigError("trainer.val_only=true makes no training step; plan the run that trains")
    lengths = lengths or LengthOptions()
    place = _find_place(config, gpus, host_memory)
    config = _on(config, place)
    raise_problems(find_problems(config))
    calibration = None if calibrate_with is None else _calibration(calibrate_with, gpus, model_config, lengths)
    return Planner(
        config, place, model_config, lengths, calibration, download=download, trainer=trainer, opened=opened
    ).plan()


def _find_place(config: Config, gpus: str | None, host_memory: int | None) -> Place:
    trainer = config.trainer
    if gpus is not None:
        cluster = parse_gpus(gpus, nodes=trainer.nnodes, gpus_per_node=trainer.n_gpus_per_node)
        return Place(cluster, "cuda", host_memory)
    device = torch.device("cuda" if trainer.device != "cpu" and torch.cuda.is_available() else "cpu")
    if trainer.device == "cuda" and device.type == "cpu":
        raise ConfigError("trainer.device is cuda, and this machine has no GPU: name the GPUs, --gpus 8xH100-80G")
    found = find_hardware(device)
    if host_memory is None and found is not None:
        host_memory = found.host_bytes
    accelerator = CPU.of_cores(max(1, count_usable_cpus() // config.workers_per_machine))
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = accelerator_named(name)
        if known is None:
            raise ConfigError(f"the figures of {name} are not known: name a GPU like it, --gpus 8xH100-80G")
        accelerator = known
    cluster = Cluster(trainer.nnodes, trainer.n_gpus_per_node, accelerator)
    return Place(cluster, "cuda" if device.type == "cuda" else "cpu", host_memory)


def _on(config: Config, place: Place) -> Config:
    """Return the configuration with the devices of a place."""
    changes: dict[str, Any] = {
        "trainer.nnodes": place.cluster.nodes,
        "trainer.n_gpus_per_node": place.cluster.gpus_per_node,
    }
    if place.device == "cuda":
        changes["trainer.device"] = "cuda"
    return with_options(config, changes)


def _calibration(folder: Path, gpus: str | None, model_config: Path | None, given: LengthOptions) -> Calibration:
    """Return the factors of a finished run: its timings, divided by its own plan.

    The run's data need not be there any more, but its model's config.json.
    given: lengths of the plan, of which those of images and of observations hold for both.
    """
    run = open_run(folder)
    config = Config.model_validate(run.config())
    if not config.worker.hybrid_engine:
        raise ConfigError(
            f"{folder} has separate workers that sample and learn (worker.hybrid_engine=false), whose phases wait for "
            "each other; calibrate with a run of shared workers"
        )
    groups = config.prompts_per_step * config.worker.actor.ppo_epochs
    observed = observe(run.metrics(), str(folder), groups_per_step=groups)
    place = _find_place(config, gpus, None)
    own = replace(observed.lengths, num_prompts=groups, prompt_tokens=None)
    if given.prompt_tokens is not None or given.image_tokens is not None:  # else they are measured in its data
        own = replace(own, prompt_tokens=observed.lengths.prompt_tokens, image_tokens=given.image_tokens)
    if config.worker.rollout.has_episodes:  # its metrics count sampled tokens alone
        # It may have left less room for observations than the plan does.
        room = max(0, config.data.max_response_length - ceil(own.response_tokens or 1))
        tokens, images = given.observed_tokens, given.observed_image_tokens
        own = replace(
            own,
            observed_tokens=None if tokens is None else min(tokens, room),
            observed_image_tokens=None if images is None else min(images, room),
        )
    planner = Planner(_on(config, place), place, model_config, own, None, observed=observed.lengths)
    seconds, completions = planner.uncalibrated(learned_share=observed.learned_share)
    return calibrate(observed, seconds, completions=completions, source=str(folder))
