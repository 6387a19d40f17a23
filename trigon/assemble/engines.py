"""Opens the train engine, the reference and the rollout engine of a run in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, assert_never

import torch

from trigon.assemble.critic import open_critic
from trigon.assemble.data import open_images
from trigon.assemble.episodes import EpisodeParts, open_episodes
from trigon.assemble.models import DevicePlacement, choose_device, open_models
from trigon.assemble.options import model_path, recorded_settings
from trigon.checkpoint.export import RUN_SETTINGS
from trigon.checkpoint.store import CheckpointStore, Finish
from trigon.config.plan import Plan
from trigon.config.schema import Config, TrainedConfig
from trigon.environments.pool import EnvironmentPool
from trigon.errors import ConfigError
from trigon.models.dtypes import DTYPES
from trigon.models.load import Processors, copy_side_files, model_folder, pixel_limits, write_side_files
from trigon.report.reporter import Reporter
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import RestartableEngine, RestartingEngine
from trigon.system.files import write_json
from trigon.system.installation import install_command
from trigon.system.machine import count_usable_cpus
from trigon.system.trace import FOLDER, DecodeTracer, LocalTracer, Tracer
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.device_memory import host_memory_for, memory_of
from trigon.training.parallel import SingleProcess
from trigon.training.protocol import CriticEngine, LogprobEngine, Sizes, TrainEngine, TunableEngine


class TuneMicroBatch(Protocol):
    """Sets and returns token budgets; see trigon.training.budget.tune_engines.

    known: budgets of an earlier run, returned unchanged if every rank's device is of the same kind.
    None: measure.
    """

    def __call__(self, lengths: Lengths, known: Budgets | None) -> Budgets: ...


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run, in this process or in the workers.

    device: description for the console. reference: None where the loop needs no log-probabilities
    of it. sizes: of each rank's shard, by rank; one entry for a single process. tune_micro_batch:
    measures token budgets. critic: None but for the estimator gae. critic_sizes: as sizes.
    """

    device: str
    trainer: TrainEngine
    reference: LogprobEngine | None
    rollout: RolloutEngine
    sizes: tuple[Sizes, ...]
    tracer: Tracer
    tune_micro_batch: TuneMicroBatch
    critic: CriticEngine | None = None
    critic_sizes: tuple[Sizes, ...] = ()


def open_engines(
    config: Config,
    processors: Processors,
    plan: Plan,
    store: CheckpointStore,
    report: Reporter,
    stack: ExitStack,
    *,
    shows_videos: bool,
    episodes: tuple[EpisodeParts, EnvironmentPool] | None = None,
) -> Engines:
    """Load the models and start the rollout engine in this process.

    stack: closes them. shows_videos: some prompts contain videos. episodes: see find_episodes.
    """
    place = DevicePlacement(choose_device(config), SingleProcess())
    # torch's default does not know the CPU limit of a container; OMP_NUM_THREADS may be lower.
    torch.set_num_threads(min(torch.get_num_threads(), count_usable_cpus()))
    with report.phase("load model"):
        # Without episodes, prompts have pixel values, and completions observe nothing.
        images = None if episodes is None else open_images(config, processors)
        load_pixels = list if images is None else images.process_groups
        trainer, reference = open_models(config, processors, plan, place, load_pixels=load_pixels)
        stack.callback(trainer.close)
        critic = open_critic(config, processors, plan, place, trainer, load_pixels=load_pixels)
        critic_sizes = () if critic is None else (critic.sizes(),)
        check_space(config, store, (trainer.sizes(),), critic_sizes)
    with report.phase("start rollout engine"):
        settings = None if episodes is None else open_episodes(config, processors, *episodes, images)
        if settings is not None:
            settings = replace(settings, media=images)  # a Worker tells its images of steps itself
        folder = config.trainer.run_folder / FOLDER
        decode_tracer = DecodeTracer(folder, rank=None, steps=config.trainer.profile_steps)
        rollout = open_rollout(
            config, processors, place, trainer, shows_videos=shows_videos, episodes=settings, tracer=decode_tracer
        )
        if isinstance(rollout, RestartableEngine):
            rollout = RestartingEngine(
                rollout,
                warn=report.warn,
                same_command=config.trainer.same_command,
                phase=report.phase,
                before_restart=trainer.offload,
            )
        stack.callback(rollout.close)
    tracer = LocalTracer(folder, rank=None)

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        memory = memory_of(place.device, shared_by=1)
        return tune_engines(
            trainer,
            reference,
            memory,
            lengths,
            place.process_group,
            known=known,
            critic=critic,
            host_bytes=host_memory_for(place.device, shared_by=1),
        )

    return Engines(
        str(place.device),
        trainer,
        reference,
        rollout,
        (trainer.sizes(),),
        tracer,
        tune_micro_batch,
        critic,
        critic_sizes,
    )


def open_rollout(
    config: Config,
    processors: Processors,
    place: DevicePlacement,
    trainer: TunableEngine | None,
    *,
    shows_videos: bool,
    episodes: EpisodeSettings | None = None,
    tracer: DecodeTracer | None = None,
) -> RolloutEngine:
    """Start the rollout engine. episodes: None: completions of one turn, or another rank decides.

    tracer: of decode steps; None: no traces.
    trainer: the train engine on the same device; None: the device is the engine's alone. What it
    offloads leaves the device first: vLLM takes a share of all of its memory when it starts, not of
    what is left.
    Raises: ConfigError if vLLM is configured and not installed.
    """
    if trainer is not None:
        trainer.offload()
    rollout, model, device = config.worker.rollout, config.worker.actor.model, place.device
    match rollout.name:
        case "vllm":
            if importlib.util.find_spec("vllm") is None:
                raise ConfigError(
                    f"worker.rollout.name is vllm, which is not installed: run {install_command('gpu')} (without a "
                    "GPU: cpu instead of gpu), or set worker.rollout.name=transformers, which is slow"
                )
            from trigon.rollout.vllm import VllmEngine, VllmSettings

            settings = VllmSettings(
                config,
                model_folder(model_path(config)),
                place.device_type,
                tensor_parallel_size=(
                    None if isinstance(place.process_group, SingleProcess) else rollout.tensor_parallel_size
                ),
                shows_videos=shows_videos,
                stays_awake=trainer is None,
            )
            return VllmEngine(settings, processors, episodes, tracer=tracer)
        case "transformers":
            from trigon.rollout.transformers import TransformersEngine

            return TransformersEngine(
                model_path=model_path(config),
                processors=processors,
                device=device,
                dtype=DTYPES[rollout.dtype],
                max_model_len=config.context_length,
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
                skip_special_tokens=config.worker.reward.skip_special_tokens,
                records_experts=config.worker.actor.replays_routing,
                episodes=episodes,
                tracer=tracer,
            )
        case _:
            assert_never(rollout.name)


def save_state(
    trainer: TrainEngine,
    config: Config,
    processors: Processors,
    critic: CriticEngine | None,
    folder: Path,
) -> Finish:
    """Write the state of the train engine, with the model's configuration and processors.

    They are as the run uses them. critic: writes its state into the folder "critic" beside this
    one. Returns: the function that finishes the write.
    """
    model, data = config.worker.actor.model, config.data
    write_side_files(
        model_folder(model_path(config)),
        folder / "huggingface",
        processors,
        sets_limits=data.min_pixels is not None or data.max_pixels is not None,
        sets_chat_template=data.override_chat_template is not None,
        tokenizer=None if model.tokenizer_path is None else model_folder(model.tokenizer_path),
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    settings = recorded_settings(config, pixel_limits=pixel_limits(processors))
    write_json(folder / RUN_SETTINGS, settings, ensure_ascii=False)
    model_only = config.trainer.save_model_only
    finish = trainer.save_state(folder, model_only=model_only)
    if critic is None:
        return finish
    of_critic = folder.parent / "critic"
    path = config.critic.model.model_path
    assert path is not None
    copy_side_files(model_folder(path), of_critic / "huggingface")
    finish_critic = critic.save_state(of_critic, model_only=model_only)

    def finish_both() -> None:
        finish()
        finish_critic()

    return finish_both


def check_space(
    config: Config, store: CheckpointStore, sizes: Sequence[Sizes], critic_sizes: Sequence[Sizes] = ()
) -> None:
    """Raise CheckpointError if the disk has no space for one checkpoint.

    sizes, critic_sizes: of each rank's part.
    """
    if config.trainer.val_only:
        return
    copies = len(sizes) // config.workers_per_copy
    needed = sum(saved_bytes(config, config.worker.actor, each) for each in sizes) // copies
    if critic_sizes:
        copies = len(critic_sizes) // config.workers_per_copy_of(config.critic)
        needed += sum(saved_bytes(config, config.critic, each) for each in critic_sizes) // copies
    store.check_space(needed)


def staged_bytes(config: Config, sizes: Sequence[Sizes], critic_sizes: Sequence[Sizes] = ()) -> int:
    """Return the host memory into which a save copies the state, on the machine that needs most.

    sizes, critic_sizes: of each rank's part. The ranks of a machine follow each other.
    """
    per_machine = config.trainer.n_gpus_per_node
    staged = [saved_bytes(config, config.worker.actor, each) for each in sizes]
    if critic_sizes:
        own = [saved_bytes(config, config.critic, each) for each in critic_sizes]
        staged = [sum(each) for each in zip(staged, own, strict=True)]
    return max(sum(staged[first : first + per_machine]) for first in range(0, len(staged), per_machine))


def saved_bytes(config: Config, section: TrainedConfig, size: Sizes) -> int:
    """Return what a rank saves of a model: weights or adapters, and the optimizer states."""
    weights = size.gradient_bytes if section.model.lora.rank > 0 else size.weight_bytes
    return weights + (0 if config.trainer.save_model_only else size.optimizer_bytes)
