"""Builds the engines that run in the workers, and those of the driver that call them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

from trigon.assemble.critic import open_critic
from trigon.assemble.data import open_images, open_processors
from trigon.assemble.engines import Engines, check_space, open_engines, open_rollout
from trigon.assemble.episodes import EpisodeParts, open_episodes
from trigon.assemble.models import DevicePlacement, open_models
from trigon.assemble.pools import Pool, Workers, config_for_workers, place_pools
from trigon.checkpoint.store import CheckpointStore
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.environments.pool import EnvironmentPool
from trigon.models.load import Processors
from trigon.report.reporter import Reporter
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import RestartingEngine
from trigon.system.trace import FOLDER, DecodeTracer
from trigon.training.budget import Budgets, Lengths
from trigon.training.parallel import SingleProcess

if TYPE_CHECKING:
    from trigon.distributed.worker import Opened, WorkerEngines
    from trigon.distributed.worker_group import WorkerGroup
    from trigon.training.fsdp import TorchProcessGroup


class MakeDecodeTracer(Protocol):
    """Makes the tracer of a worker's rollout engine."""

    def __call__(self, *, rank: int) -> DecodeTracer: ...


def open_run_engines(
    config: Config,
    processors: Processors,
    plan: Plan,
    workers: Workers | None,
    store: CheckpointStore,
    report: Reporter,
    stack: ExitStack,
    *,
    shows_videos: bool,
    episodes: tuple[EpisodeParts, EnvironmentPool] | None,
) -> Engines:
    """Open the engines of a run in its workers, or in this process if it has none.

    stack, shows_videos, episodes: see open_engines.
    """
    if workers is None:
        return open_engines(
            config, processors, plan, store, report, stack, shows_videos=shows_videos, episodes=episodes
        )
    parts = None if episodes is None else episodes[0]
    return open_workers(config, plan, workers, store, report, shows_videos=shows_videos, episodes=parts)


def open_workers(
    config: Config,
    plan: Plan,
    workers: Workers,
    store: CheckpointStore,
    report: Reporter,
    *,
    shows_videos: bool,
    episodes: EpisodeParts | None = None,
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

    learners = workers.learners
    open_group = partial(open_in_group, config, plan, shows_videos, episodes)
    with report.phase("load model and start rollout engine"):
        opened = open_pools(workers, place_pools(config), open_group)
    sizes = tuple(own for own, _ in opened)
    critic_sizes = tuple(of_critic for _, of_critic in opened if of_critic is not None)
    check_space(config, store, sizes, critic_sizes)
    ranks_per_row = config.worker.actor.ulysses_sequence_parallel_size
    has_reference = config.needs_reference and not config.has_full_kl
    critic_class = WorkersTrunkCritic if config.shares_trunk else WorkersCritic

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        num_sharing = config.workers_per_machine
        return learners.call_all(Worker.tune_micro_batch, lengths, known, num_sharing, phase="fit")[0]

    return Engines(
        device=describe_workers(config, workers),
        trainer=WorkersTrainEngine(learners, regularized=config.learns_without_advantage, ranks_per_row=ranks_per_row),
        reference=WorkersReference(learners, ranks_per_row=ranks_per_row) if has_reference else None,
        rollout=open_workers_rollout(config, workers, report, sends_rows=episodes is not None),
        sizes=sizes,
        tracer=WorkersTracer(learners, config.trainer.run_folder.absolute() / FOLDER),
        tune_micro_batch=tune_micro_batch,
        critic=critic_class(learners, ranks_per_row=ranks_per_row) if config.has_critic else None,
        critic_sizes=critic_sizes,
    )


def open_pools(
    workers: Workers, pools: tuple[Pool, ...], open_group: Callable[[Pool, WorkerGroup], list[Opened | None]]
) -> list[Opened]:
    """Build the engines of all pools at the same time. Returns: the sizes of the learners' models.

    open_group: builds those of a group of workers of a pool.
    """
    if workers.samplers is None:
        opened = open_group(pools[0], workers.learners)
    else:
        learning = workers.samplers.submit_one(partial(open_group, pools[0], workers.learners))
        workers.samplers.open(partial(open_group, pools[1]))
        opened = learning.result()
    return [sizes for sizes in opened if sizes is not None]


def open_in_group(
    config: Config, plan: Plan, shows_videos: bool, episodes: EpisodeParts | None, pool: Pool, group: WorkerGroup
) -> list[Opened | None]:
    """Build the engines of a group of workers of a pool. Returns: the sizes of their models."""
    from trigon.distributed.worker import Worker
    from trigon.distributed.worker_group import DISK_SECONDS

    traces = config.trainer.run_folder.absolute() / FOLDER
    make_tracer = partial(DecodeTracer, traces, steps=config.trainer.profile_steps, pool=group.role.replace(" ", "_"))
    build = partial(open_worker_engines, config_for_workers(config), plan, shows_videos, episodes, pool, make_tracer)
    return group.call_all(Worker.open, build, phase="load", min_deadline_seconds=DISK_SECONDS)


def open_workers_rollout(config: Config, workers: Workers, report: Reporter, *, sends_rows: bool) -> RolloutEngine:
    """Return the rollout engine of the workers, which is started anew once if it fails.

    In a pool of its own, a replica that fails is replaced. Otherwise not with tensor parallelism:
    when one rank of a replica fails, the others wait for it in a collective operation, and cannot
    be told to start anew.
    """
    from trigon.distributed.engines import WorkersRolloutEngine
    from trigon.distributed.sampler_engine import SamplersRolloutEngine

    rollout = config.worker.rollout
    if workers.samplers is not None:
        workers.samplers.phase = report.phase
        return SamplersRolloutEngine(
            workers.learners,
            workers.samplers,
            loopback=workers.loopback,
            sends_rows=sends_rows,
            shares_homes=config.algorithm.max_staleness == 0,
        )
    engine = WorkersRolloutEngine(
        workers.learners, tensor_parallel_size=rollout.tensor_parallel_size, sends_rows=sends_rows
    )
    if rollout.name == "vllm" and rollout.tensor_parallel_size == 1:
        return RestartingEngine(engine, warn=report.warn, same_command=config.trainer.same_command, phase=report.phase)
    return engine


def open_worker_engines(
    config: Config,
    plan: Plan,
    shows_videos: bool,
    episodes: EpisodeParts | None,
    pool: Pool,
    make_tracer: MakeDecodeTracer,
    process_group: TorchProcessGroup,
) -> WorkerEngines:
    """Build the engines of one worker of a pool. Runs in all its workers at the same time."""
    from trigon.distributed.worker import WorkerEngines

    # A single learner does not shard the model, for which the group of several would ask.
    learns_alone = pool.learns and process_group.size == 1
    ranks_per_row = config.worker.actor.ulysses_sequence_parallel_size if pool.learns else 1
    row_ranks = process_group.row_ranks(ranks_per_row) if ranks_per_row > 1 else None
    place = DevicePlacement(process_group.device, SingleProcess() if learns_alone else process_group, row_ranks)
    processors = open_processors(config)
    images = open_images(config, processors)
    load_pixels = list if images is None else images.process_groups
    trainer, reference, critic, rollout, settings = None, None, None, None, None
    if pool.learns:
        trainer, reference = open_models(config, processors, plan, place, load_pixels=load_pixels)
        critic = open_critic(config, processors, plan, place, trainer, load_pixels=load_pixels)
    replica_rank = process_group.rank % config.worker.rollout.tensor_parallel_size
    if pool.samples and episodes is not None and replica_rank == 0:  # the other ranks repeat what it samples
        environments = EnvironmentPool(episodes.code)  # ends with this process
        environments.ready()
        settings = open_episodes(config, processors, episodes, environments, images)
    if pool.samples:
        rollout = open_rollout(
            config,
            processors,
            place,
            trainer,
            shows_videos=shows_videos,
            episodes=settings,
            tracer=make_tracer(rank=process_group.rank),
        )
    return WorkerEngines(
        trainer=trainer,
        reference=reference,
        rollout=rollout,
        images=images,
        replica_rank=replica_rank,
        has_episodes=settings is not None,
        critic=critic,
    )


def describe_workers(config: Config, workers: Workers) -> str:
    """Return a description of the workers for the console."""
    learners, samplers, rollout = workers.learners, workers.samplers, config.worker.rollout
    groups = [learners, *([] if samplers is None else filter(None, samplers.groups))]
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
