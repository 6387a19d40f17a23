"""Opens the engines that learn and those that sample, in this process or in workers.

Also measures token budgets on the device (trainer.auto_micro_batch), and writes what the engines
save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch

from trigon.assemble.data import open_images, open_processors
from trigon.assemble.episodes import open_episodes
from trigon.assemble.models import DevicePlacement, choose_device, device_type, open_models
from trigon.assemble.options import model_path, recorded_settings
from trigon.assemble.parts import Parts, require_vllm
from trigon.assemble.pools import Pool, Workers, config_for_workers, place_pools
from trigon.checkpoint.export import RUN_SETTINGS
from trigon.checkpoint.store import Finish
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.templates import write_date, written_date
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings
from trigon.models.dtypes import DTYPES
from trigon.models.load import Processors, copy_side_files, model_folder, pixel_limits, write_side_files
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import Restartable, RestartingEngine
from trigon.system.files import write_json
from trigon.system.machine import count_usable_cpus
from trigon.system.secrets import mask
from trigon.system.terminal import format_bytes
from trigon.system.trace import FOLDER, DecodeTracer, LocalTracer, Tracer
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.device_memory import host_memory_for, memory_of
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import SingleProcess
from trigon.training.protocol import CriticEngine, LogprobEngine, TrainEngine

if TYPE_CHECKING:
    from trigon.distributed.worker import WorkerEngines
    from trigon.distributed.worker_group import Call, WorkerGroup
    from trigon.training.fsdp import TorchProcessGroup


TuneMicroBatch = Callable[[Lengths, Budgets | None], Budgets]
"""Sets and returns token budgets; see trigon.training.budget.tune_engines.

The second argument has the budgets of an earlier run, which are returned unchanged if the device of
every rank is of the same kind. None: the budgets are measured.
"""


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run, in this process or in the workers.

    device: description for the console. reference: None where the loop needs none of its
    log-probabilities. tune_micro_batch: measures token budgets. critic: None except for the
    estimator gae.
    """

    device: str
    trainer: TrainEngine
    reference: LogprobEngine | None
    rollout: RolloutEngine
    tracer: Tracer
    tune_micro_batch: TuneMicroBatch
    critic: CriticEngine | None = None


def open_engines(
    config: Config, parts: Parts, plan: Plan, report: Reporter, stack: ExitStack, *, shows_videos: bool
) -> Engines:
    """Load the models and start the rollout engine, in workers or, without any, in this process.

    stack: closes them. shows_videos: some prompts contain videos.
    """
    processors, episodes = parts.processors, parts.episodes
    if parts.workers is not None:
        return open_workers(config, plan, parts.workers, report, shows_videos=shows_videos, episodes=episodes)
    place = DevicePlacement(choose_device(config), SingleProcess())
    # torch's default does not know the CPU limit of a container; OMP_NUM_THREADS may be lower.
    torch.set_num_threads(min(torch.get_num_threads(), count_usable_cpus()))
    with report.phase("load model"):
        # Without episodes, prompts have pixel values, and completions observe nothing.
        images = None if episodes is None else open_images(config, processors)
        trainer, reference, critic = open_models(config, processors, plan, place, images)
    with report.phase("start rollout engine"):
        settings = None
        if episodes is not None:
            opened = open_episodes(config, processors, episodes, images, schemas=episodes.schemas)
            settings = replace(opened, media=images)  # a Worker tells its images of steps itself
        folder = config.trainer.run_folder / FOLDER
        decode_tracer = DecodeTracer(folder, rank=None, steps=config.trainer.profile_steps)
        rollout = open_rollout(
            config, processors, place, trainer, shows_videos=shows_videos, episodes=settings, tracer=decode_tracer
        )
        if isinstance(rollout, Restartable):
            restart = partial(restart_beside, trainer, rollout)
            same_command = config.trainer.same_command
            rollout = RestartingEngine(
                rollout, restart, warn=report.warn, same_command=same_command, phase=report.phase
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

    return Engines(str(place.device), trainer, reference, rollout, tracer, tune_micro_batch, critic)


def open_rollout(
    config: Config,
    processors: Processors,
    place: DevicePlacement,
    trainer: LocalTrainEngine | None,
    *,
    shows_videos: bool,
    episodes: EpisodeSettings | None = None,
    tracer: DecodeTracer | None = None,
) -> RolloutEngine:
    """Start the rollout engine. episodes: None: completions of one turn, or another rank decides.

    tracer: traces the decode steps; None: no traces.
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
            require_vllm()
            from trigon.rollout.vllm import VllmEngine, VllmSettings

            settings = VllmSettings(
                config,
                model_folder(model_path(config)),
                device_type(place.device),
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


def restart_beside(trainer: LocalTrainEngine, rollout: Restartable) -> None:
    """Start a rollout engine again, after its trainer on the same device has left the memory."""
    trainer.offload()
    rollout.restart()


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
    write_json(folder / RUN_SETTINGS, settings)
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


# -- the engines in workers ------------------------------------------------------------------------


def open_workers(
    config: Config,
    plan: Plan,
    workers: Workers,
    report: Reporter,
    *,
    shows_videos: bool,
    episodes: EnvironmentPool | None,
) -> Engines:
    """Load the shards of the models in the workers, and start their rollout engines."""
    from trigon.distributed.engines import (
        WorkersCritic,
        WorkersReference,
        WorkersTracer,
        WorkersTrainEngine,
        WorkersTrunkCritic,
    )
    from trigon.distributed.worker import Worker
    from trigon.distributed.worker_group import DISK_SECONDS

    learners, pools = workers.learners, place_pools(config)
    traces = config.trainer.run_folder.absolute() / FOLDER
    config_of_workers = config_for_workers(config)
    environments, schemas = (None, ()) if episodes is None else (episodes.settings, episodes.schemas)

    def open_group(group: WorkerGroup, pool: Pool) -> Call[None]:
        opening = WorkerOpening(
            config_of_workers, plan, pool, group.role, traces, shows_videos, environments, schemas, written_date()
        )
        return group.call(Worker.open, opening.open_engines, phase="load", min_deadline_seconds=DISK_SECONDS)

    with report.phase("load model and start rollout engine"):
        learning = open_group(learners, pools[0])
        if workers.samplers is not None:  # both pools at the same time
            workers.samplers.open(lambda group: open_group(group, pools[1]))
        learning.result()
    ranks_per_row = config.worker.actor.ulysses_sequence_parallel_size
    has_reference = config.needs_reference and not config.has_full_kl
    critic_class = WorkersTrunkCritic if config.shares_trunk else WorkersCritic

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        num_sharing = config.workers_per_machine
        return learners.call(Worker.tune_micro_batch, lengths, known, num_sharing, phase="fit").result()[0]

    return Engines(
        device=describe_workers(config, workers),
        trainer=WorkersTrainEngine(learners, regularized=config.learns_without_advantage, ranks_per_row=ranks_per_row),
        reference=WorkersReference(learners, ranks_per_row=ranks_per_row) if has_reference else None,
        rollout=open_workers_rollout(config, workers, report, sends_rows=episodes is not None),
        tracer=WorkersTracer(learners, traces),
        tune_micro_batch=tune_micro_batch,
        critic=critic_class(learners, ranks_per_row=ranks_per_row) if config.has_critic else None,
    )


def open_workers_rollout(config: Config, workers: Workers, report: Reporter, *, sends_rows: bool) -> RolloutEngine:
    """Return the rollout engine of the workers, which is started again once if it fails.

    In a pool of its own, a replica that fails is replaced. Otherwise not with tensor parallelism:
    when one rank of a replica fails, the others wait for it in a collective operation, and cannot
    start again.
    """
    from trigon.distributed.rollout_engine import LearnerReplicas, WorkersRolloutEngine
    from trigon.distributed.samplers import SamplerReplicas

    rollout = config.worker.rollout
    if workers.samplers is not None:
        samplers = SamplerReplicas(
            workers.learners,
            workers.samplers,
            loopback=workers.loopback,
            phase=report.phase,
            shares_homes=config.algorithm.max_staleness == 0,
        )
        return WorkersRolloutEngine(samplers, sends_rows=sends_rows)
    learners = LearnerReplicas(workers.learners, replica_size=rollout.tensor_parallel_size)
    engine = WorkersRolloutEngine(learners, sends_rows=sends_rows)
    if rollout.name != "vllm" or rollout.tensor_parallel_size > 1:
        return engine
    return RestartingEngine(
        engine,
        learners.restart,
        warn=report.warn,
        same_command=config.trainer.same_command,
        phase=report.phase,
    )


@dataclass(frozen=True, slots=True)
class WorkerOpening:
    """What the engines of the workers of a pool are built from; sent to each of them.

    config: as config_for_workers returns it. role: of the worker group. traces: the folder of
    traces. environments: the code of the environment or the tools, with its limits; None:
    completions have one turn. schemas: descriptions of the tools, for the chat template. date: see
    templates.write_date.
    """

    config: Config
    plan: Plan
    pool: Pool
    role: str
    traces: Path
    shows_videos: bool
    environments: EnvironmentSettings | None
    schemas: Sequence[Mapping[str, Any]]
    date: str | None

    def open_engines(self, process_group: TorchProcessGroup) -> WorkerEngines:
        """Build the engines of one worker. Runs in all workers of the pool at the same time."""
        from trigon.distributed.worker import WorkerEngines

        write_date(self.date)
        config, pool = self.config, self.pool
        # A single learner does not shard the model, for which the group of several would ask.
        learns_alone = pool.learns and process_group.size == 1
        ranks_per_row = config.worker.actor.ulysses_sequence_parallel_size if pool.learns else 1
        row_ranks = process_group.row_ranks(ranks_per_row) if ranks_per_row > 1 else None
        place = DevicePlacement(process_group.device, SingleProcess() if learns_alone else process_group, row_ranks)
        processors = open_processors(config)
        images = open_images(config, processors)
        trainer, reference, critic, rollout, environments, settings = None, None, None, None, None, None
        if pool.learns:
            trainer, reference, critic = open_models(config, processors, self.plan, place, images)
        replica_rank = process_group.rank % config.worker.rollout.tensor_parallel_size
        if pool.samples and self.environments is not None and replica_rank == 0:  # the others repeat what it samples
            environments = EnvironmentPool(self.environments)  # Worker.close_environments ends it
            environments.ready()
            settings = open_episodes(config, processors, environments, images, schemas=self.schemas)
        if pool.samples:
            tracer = DecodeTracer(
                self.traces,
                rank=process_group.rank,
                steps=config.trainer.profile_steps,
                pool=self.role.replace(" ", "_"),
            )
            rollout = open_rollout(
                config,
                processors,
                place,
                trainer,
                shows_videos=self.shows_videos,
                episodes=settings,
                tracer=tracer,
            )
        return WorkerEngines(
            trainer=trainer,
            reference=reference,
            rollout=rollout,
            images=images,
            replica_rank=replica_rank,
            environments=environments,
            critic=critic,
        )


def describe_workers(config: Config, workers: Workers) -> str:
    """Return a description of the workers for the console."""
    learners, samplers, rollout = workers.learners, workers.samplers, config.worker.rollout
    groups = [learners, *([] if samplers is None else (replica.workers for replica in samplers.alive))]
    hosts = len({worker.host for group in groups for worker in group.workers})
    size = sum(len(group.workers) for group in groups)
    kind = "a GPU each" if workers.device == "cuda" else "on the CPU, since Ray finds no GPU"
    if workers.device == "cpu" and config.trainer.device == "cpu":
        kind = "on the CPU, as trainer.device is set"
    replicas = len(learners.workers) // rollout.tensor_parallel_size if samplers is None else samplers.size
    shards, together = config.workers_per_copy, config.worker.actor.ulysses_sequence_parallel_size
    rows = f", {together} workers for each row" if together > 1 else ""
    return (
        f"{size} workers on {hosts} {'host' if hosts == 1 else 'hosts'}, {kind}; sampling: {replicas} x tensor "
        f"parallel {rollout.tensor_parallel_size}; training: {len(learners.workers) // shards} x {shards} "
        f"shards{rows}"
    )


# -- token budgets that are measured ---------------------------------------------------------------


def tune_plan(
    config: Config,
    plan: Plan,
    engines: Engines,
    folder: RunFolder,
    report: Reporter,
    console: Console,
    *,
    image_pixels: int | None,
    resumes: bool,
) -> Plan:
    """Return the plan with token budgets that fill the device's memory.

    The budgets are stored in the run folder and reused while make_budget_key returns the same: a
    run that is resumed with other budgets packs other rows, which changes the last bits of its
    numbers. image_pixels: see Lengths.
    resumes: the run continues from a checkpoint; new budgets are then warned about.
    """
    if config.trainer.auto_micro_batch is None:
        console.print(
            "trainer.auto_micro_batch is on by default on a GPU: worker.actor.micro_batch_size_per_device_for_update "
            "and micro_batch_size_per_device_for_experience are not used; trainer.auto_micro_batch=false uses them"
        )
    lengths = make_lengths(config, plan, image_pixels=image_pixels)
    # Through JSON, as the stored key has gone through it.
    budget_key = json.loads(json.dumps(make_budget_key(config, lengths)))
    stored, known = folder.read_budgets(), None
    if stored is not None and stored.keys() == {"budgets", "measured_for"} and stored["measured_for"] == budget_key:
        known = Budgets(**stored["budgets"])
    with report.phase("measure memory"):
        budgets = engines.tune_micro_batch(lengths, known)
    if budgets != known:
        folder.write_budgets({"budgets": asdict(budgets), "measured_for": budget_key})
        if resumes:
            report.warn(
                "token budgets were measured again, so the numbers may differ in their last bits from the numbers "
                "of the run so far"
            )
    console.print(
        f"auto micro-batch: {budgets.update_tokens:,} tokens per update pass ({format_bytes(budgets.update_bytes)} of "
        f"{format_bytes(budgets.device_bytes)}), {budgets.experience_tokens:,} per pass without gradient "
        f"({format_bytes(budgets.experience_bytes)}){', reused from the run folder' if budgets == known else ''}"
    )
    critic = plan.critic
    if config.has_critic:
        console.print(
            f"auto micro-batch of the critic: {budgets.critic_update_tokens:,} tokens per update pass, "
            f"{budgets.critic_experience_tokens:,} per pass without gradient"
        )
        critic = replace(
            critic,
            tokens_per_update_pass=budgets.critic_update_tokens,
            tokens_per_experience_pass=budgets.critic_experience_tokens,
        )
    return replace(
        plan,
        tokens_per_update_pass=budgets.update_tokens,
        tokens_per_experience_pass=budgets.experience_tokens,
        critic=critic,
    )


def make_lengths(config: Config, plan: Plan, *, image_pixels: int | None) -> Lengths:
    """Return the largest lengths that the groups of a run can have. image_pixels: see Lengths."""
    data = config.data
    group_tokens = data.max_prompt_length + config.group_size * data.max_response_length
    return Lengths(
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        image_pixels=image_pixels,
        update_tokens=plan.prompts_per_update * group_tokens,
        step_tokens=plan.prompts_per_step * group_tokens,
        critic_update_tokens=plan.critic.prompts_per_update * group_tokens if config.has_critic else 0,
    )


def make_budget_key(config: Config, lengths: Lengths) -> dict[str, object]:
    """Return everything that the memory of a pass depends on, except the device."""
    actor = config.worker.actor
    return {
        "model": model_path(config),
        "workers": config.num_workers,
        "workers_per_row": actor.ulysses_sequence_parallel_size,
        "lengths": asdict(lengths),
        "loss": [
            actor.loss_type,
            config.algorithm.kl_in_loss,
            actor.entropy_coeff > 0,
            actor.router_aux_loss_coef > 0,
            config.mismatch_correction,
        ],
        "strategy": actor.optim.strategy,
        "actor.model": mask("worker.actor.model", actor.model.model_dump(exclude={"vision_cache_gb"})),
        "actor.fsdp": actor.fsdp.model_dump(),
        "actor.offload": actor.offload.model_dump(),
        "ref": config.worker.ref.model_dump() if config.needs_reference else None,
        "critic": mask("worker.critic", config.worker.critic.model_dump()) if config.has_critic else None,
    }
