"""Starts a run's workers on Ray, and builds the engines that run in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from trigon.build.data import open_images, open_processors
from trigon.build.engines import Engines, check_space, open_rollout
from trigon.build.episodes import EpisodeParts, open_episodes
from trigon.build.memory_table import Hardware
from trigon.build.models import DevicePlacement, open_models, set_determinism
from trigon.build.options import kl_is_full, make_loss_terms, model_path, needs_reference
from trigon.checkpoint.store import CheckpointStore
from trigon.config.defaults import resolve_run_folder, resolve_same_command
from trigon.config.paths import local_path, read_template
from trigon.config.plan import Plan, workers_per_copy
from trigon.config.schema import Config
from trigon.data.images import ignore_pillow_warnings
from trigon.environments.pool import EnvironmentPool
from trigon.models.hub import uses_modelscope
from trigon.models.load import model_folder
from trigon.report.reporter import Reporter
from trigon.report.run_folder import LOCK
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import RestartingEngine
from trigon.system.cpus import count_usable_cpus
from trigon.system.watchdog import FILE as HANG_STACKS
from trigon.training.budget import Budgets, Lengths
from trigon.training.trace import FOLDER

if TYPE_CHECKING:
    from trigon.distributed.preflight import NodeReport
    from trigon.distributed.worker import WorkerEngines
    from trigon.distributed.worker_group import WorkerGroup
    from trigon.training.fsdp import Rendezvous, TorchProcessGroup

JOIN_PHASE = "preflight (connecting the ranks; see docs/multi-node.md, network problems)"
"""The name of the first call in errors, where a rank that hangs is a problem of the network."""

COLLECTIVE_GRACE_SECONDS = 60
"""Seconds that a rank waits longer than the driver, whose error names the rank at fault."""


@contextmanager
def open_worker_group(
    config: Config, folder: Path, check_hardware: Callable[[Hardware], object], warn: Callable[[str], object]
) -> Iterator[WorkerGroup]:
    """Start the workers here or on a Ray cluster, check their nodes, and end them on exit.

    check_hardware: called with the smallest device and the smallest node, if their memory is known.
    warn: called with a warning if Ray requires no token.
    Raises: ConfigError if the cluster is too small, or a node lacks a file or package.
    """
    from trigon.distributed.cluster import Layout, has_gpus, open_cluster, start_workers
    from trigon.distributed.preflight import check_node_reports, find_token_warning
    from trigon.distributed.rendezvous import JOIN_SECONDS
    from trigon.distributed.worker import Worker, ray_actor_class
    from trigon.distributed.worker_group import WorkerGroup

    trainer = config.trainer
    with open_cluster(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node) as run_name:
        device: Literal["cpu", "cuda"] = (
            ("cuda" if has_gpus() else "cpu") if trainer.device == "auto" else trainer.device
        )
        layout = Layout(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node, device=device)
        with start_workers(layout, ray_actor_class(Worker), run_name) as workers:
            worker_group = WorkerGroup(
                workers,
                device,
                deadline_seconds=trainer.worker_timeout_seconds,
                stacks_file=folder / HANG_STACKS,
                same_command=resolve_same_command(config),
            )
            join = partial(join_ranks, config_for_workers(config), device, folder.absolute())
            reports = worker_group.call_all(Worker.join, join, phase=JOIN_PHASE, max_deadline_seconds=JOIN_SECONDS)
            check_node_reports(reports)
            if (warning := find_token_warning(reports)) is not None:
                warn(warning)
            if (hardware := smallest_hardware(device, reports)) is not None:
                check_hardware(hardware)
            yield worker_group


def smallest_hardware(device: Literal["cpu", "cuda"], reports: Sequence[NodeReport]) -> Hardware | None:
    """Return the smallest device and the smallest node of all ranks; None if it is not known."""
    host_bytes = [report.host_bytes for report in reports if report.host_bytes is not None]
    if not host_bytes:
        return None
    return Hardware(device, min(report.device_bytes for report in reports), min(host_bytes))


def config_for_workers(config: Config) -> Config:
    """Return the configuration for processes on other nodes, with other working folders.

    Model paths become absolute, and a chat template that is a file of the driver is replaced by its
    text. The arguments of the reward function, which may be secrets, stay with the driver.
    """
    model, data = config.worker.actor.model, config.data

    def absolute(path: str | None) -> str | None:
        if path and uses_modelscope():  # a setting of this process alone
            return str(model_folder(path).absolute())
        local = local_path(path) if path else None
        return path if local is None else str(local.absolute())

    model_paths = {"model_path": absolute(model.model_path), "tokenizer_path": absolute(model.tokenizer_path)}
    actor = config.worker.actor.model_copy(update={"model": model.model_copy(update=model_paths)})
    reward = config.worker.reward.model_copy(
        update={"reward_function": None, "reward_function_kwargs": {}, "val_reward_function": None}
    )
    chat_template = {"override_chat_template": read_template(data.override_chat_template)}
    return config.model_copy(
        update={
            "worker": config.worker.model_copy(update={"actor": actor, "reward": reward}),
            "data": data.model_copy(update=chat_template),
        }
    )


def open_workers(
    config: Config,
    plan: Plan,
    worker_group: WorkerGroup,
    store: CheckpointStore,
    report: Reporter,
    *,
    shows_videos: bool,
    episodes: EpisodeParts | None = None,
) -> Engines:
    """Load the shards of the models in the workers, and start their rollout engines."""
    from trigon.distributed.engines import WorkersReference, WorkersTracer, WorkersTrainEngine
    from trigon.distributed.worker import Worker
    from trigon.distributed.worker_group import DISK_SECONDS

    with report.phase("load model and start rollout engine"):
        build = partial(open_worker_engines, config_for_workers(config), plan, shows_videos, episodes)
        sizes = worker_group.call_all(Worker.open, build, phase="load", min_deadline_seconds=DISK_SECONDS)
    check_space(config, store, sizes)

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        num_sharing = config.trainer.n_gpus_per_node
        return worker_group.call_all(Worker.tune_micro_batch, lengths, known, num_sharing, phase="fit")[0]

    return Engines(
        device=describe_workers(config, worker_group),
        trainer=WorkersTrainEngine(worker_group, regularized=make_loss_terms(config).regularized),
        reference=WorkersReference(worker_group) if needs_reference(config) and not kl_is_full(config) else None,
        rollout=open_workers_rollout(config, worker_group, report, sends_rows=episodes is not None),
        sizes=tuple(sizes),
        tracer=WorkersTracer(worker_group, resolve_run_folder(config).absolute() / FOLDER),
        tune_micro_batch=tune_micro_batch,
    )


def open_workers_rollout(
    config: Config, worker_group: WorkerGroup, report: Reporter, *, sends_rows: bool
) -> RolloutEngine:
    """Return the rollout engine of the workers, which is started anew once if it fails.

    Not with tensor parallelism: when one rank of a replica fails, the others wait for it in a
    collective operation, and cannot be told to start anew.
    """
    from trigon.distributed.engines import WorkersRolloutEngine

    rollout = config.worker.rollout
    engine = WorkersRolloutEngine(
        worker_group, tensor_parallel_size=rollout.tensor_parallel_size, sends_rows=sends_rows
    )
    if rollout.name == "vllm" and rollout.tensor_parallel_size == 1:
        return RestartingEngine(engine, warn=report.warn, same_command=resolve_same_command(config), phase=report.phase)
    return engine


def join_ranks(
    config: Config, device: str, folder: Path, rendezvous: Rendezvous
) -> tuple[TorchProcessGroup, NodeReport]:
    """Join the process group, and return it with a report on the node. Runs first in each worker.

    folder: the run folder, which all nodes must share.
    Raises: ConfigError if device is "cuda" and torch cannot use the GPU.
    """
    from trigon.distributed.preflight import inspect_node, require_gpu
    from trigon.training.fsdp import TorchProcessGroup

    rollout = config.worker.rollout
    require_gpu(device, free_fraction=rollout.gpu_memory_utilization if rollout.name == "vllm" else 0.0)
    ignore_pillow_warnings()
    set_determinism(torch.device(device))
    torch.set_num_threads(max(1, count_usable_cpus() // config.trainer.n_gpus_per_node))
    process_group = TorchProcessGroup.joined(
        torch.device(device), rendezvous, timeout_seconds=collective_timeout_seconds(config)
    )
    return process_group, inspect_node(process_group, model_path=model_path(config), run_folder=folder, marker=LOCK)


def collective_timeout_seconds(config: Config) -> float:
    """Return how long a rank waits for the other ranks in a collective call.

    It exceeds every deadline of the driver: loading and saving may take longer than other calls.
    """
    from trigon.distributed.worker_group import DISK_SECONDS

    return max(config.trainer.worker_timeout_seconds, DISK_SECONDS) + COLLECTIVE_GRACE_SECONDS


def open_worker_engines(
    config: Config, plan: Plan, shows_videos: bool, episodes: EpisodeParts | None, process_group: TorchProcessGroup
) -> WorkerEngines:
    """Build the engines of one worker. Runs in all workers at the same time."""
    from trigon.distributed.worker import WorkerEngines

    place = DevicePlacement(process_group.device, process_group)
    processors = open_processors(config)
    images = open_images(config, processors)
    trainer, reference = open_models(
        config, processors, plan, place, load_pixels=list if images is None else images.process_groups
    )
    settings = None
    if episodes is not None:
        pool = EnvironmentPool(episodes.code)  # ends with this process
        pool.ready()
        settings = open_episodes(config, processors, episodes, pool, images)
    return WorkerEngines(
        trainer=trainer,
        reference=reference,
        rollout=open_rollout(config, processors, place, trainer, shows_videos=shows_videos, episodes=settings),
        images=images,
        replica_rank=process_group.rank % config.worker.rollout.tensor_parallel_size,
        has_episodes=episodes is not None,
    )


def describe_workers(config: Config, worker_group: WorkerGroup) -> str:
    """Return a description of the workers for the console."""
    hosts = len({worker.host for worker in worker_group.workers})
    size, rollout = len(worker_group.workers), config.worker.rollout
    kind = "a GPU each" if worker_group.device == "cuda" else "on the CPU, since Ray finds no GPU"
    if worker_group.device == "cpu" and config.trainer.device == "cpu":
        kind = "on the CPU, as trainer.device is set"
    replicas = size // rollout.tensor_parallel_size
    shards = workers_per_copy(config)
    return (
        f"{size} workers on {hosts} {'host' if hosts == 1 else 'hosts'}, {kind}; sampling: {replicas} x tensor "
        f"parallel {rollout.tensor_parallel_size}; training: {size // shards} x {shards} shards"
    )
