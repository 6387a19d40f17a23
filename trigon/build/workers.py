"""Starts a run's workers on Ray, and builds the engines that live in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from trigon.checkpoint.store import CheckpointStore
from trigon.config.options import read_text_option
from trigon.config.plan import workers_per_copy, Plan
from trigon.config.schema import Config
from trigon.models.hub import uses_modelscope
from trigon.models.load import model_folder
from trigon.report.reporter import Reporter
from trigon.report.run_folder import LOCK
from trigon.training.budget import Budgets, Lengths
from trigon.training.trace import FOLDER

if TYPE_CHECKING:
    from trigon.distributed.preflight import NodeReport
    from trigon.distributed.worker import WorkerEngines
    from trigon.distributed.worker_group import WorkerGroup
    from trigon.training.fsdp import TorchProcessGroup
from trigon.build.data import open_images, open_processors
from trigon.build.models import Place, open_models, set_determinism
from trigon.build.engines import Engines, check_space, open_rollout
from trigon.build.options import kl_is_full, loss_terms, model_path, needs_reference, run_folder


@contextmanager
def open_worker_group(config: Config, folder: Path) -> Iterator[WorkerGroup]:
    """Start the workers, on this machine or on a cluster that is there, and let them look around; end them afterwards.

    Raises: ConfigError if the cluster is too small, or a node lacks something.
    """
    from trigon.distributed.cluster import Layout, has_gpus, open_cluster, start_workers
    from trigon.distributed.preflight import check_node_reports
    from trigon.distributed.worker import Worker, ray_actor_class
    from trigon.distributed.worker_group import WorkerGroup

    trainer = config.trainer
    with open_cluster(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node):
        device: Literal["cpu", "cuda"] = (
            ("cuda" if has_gpus() else "cpu") if trainer.device == "auto" else trainer.device
        )
        layout = Layout(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node, device=device)
        with start_workers(layout, ray_actor_class(Worker)) as workers:
            worker_group = WorkerGroup(workers, device, deadline_seconds=trainer.worker_timeout_seconds)
            join = partial(join_ranks, as_workers_need(config), device, folder.absolute())
            check_node_reports(worker_group.call_all(Worker.join, join, phase="preflight"))
            yield worker_group


def as_workers_need(config: Config) -> Config:
    """Return the configuration for processes with another working folder, on other nodes: no path is relative, and
    what only the driver's disk holds is written out.
    """
    model, data = config.worker.actor.model, config.data

    def absolute(path: str | None) -> str | None:
        if path and uses_modelscope():  # of which processes on other nodes do not know
            return str(model_folder(path).absolute())
        return str(Path(path).expanduser().absolute()) if path and Path(path).expanduser().is_dir() else path

    elsewhere = {"model_path": absolute(model.model_path), "tokenizer_path": absolute(model.tokenizer_path)}
    actor = config.worker.actor.model_copy(update={"model": model.model_copy(update=elsewhere)})
    template = {"override_chat_template": read_text_option(data.override_chat_template)}
    return config.model_copy(
        update={
            "worker": config.worker.model_copy(update={"actor": actor}),
            "data": data.model_copy(update=template),
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
) -> Engines:
    """Let every worker load its part of the models and start its rollout engine."""
    from trigon.distributed.engines import WorkersReference, WorkersRolloutEngine, WorkersTracer, WorkersTrainEngine
    from trigon.distributed.worker import Worker
    from trigon.distributed.worker_group import DISK_SECONDS

    with report.phase("load model and start rollout engine"):
        build = partial(open_worker_engines, as_workers_need(config), plan, shows_videos)
        sizes = worker_group.call_all(Worker.open, build, phase="load", min_deadline_seconds=DISK_SECONDS)
    check_space(config, store, sizes)

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        num_sharing = config.trainer.n_gpus_per_node
        return worker_group.call_all(Worker.tune_micro_batch, lengths, known, num_sharing, phase="fit")[0]

    return Engines(
        device=describe_workers(config, worker_group),
        trainer=WorkersTrainEngine(worker_group, regularized=loss_terms(config).regularized),
        reference=WorkersReference(worker_group) if needs_reference(config) and not kl_is_full(config) else None,
        rollout=WorkersRolloutEngine(worker_group, tensor_parallel_size=config.worker.rollout.tensor_parallel_size),
        sizes=tuple(sizes),
        tracer=WorkersTracer(worker_group, run_folder(config).absolute() / FOLDER),
        tune_micro_batch=tune_micro_batch,
    )


def join_ranks(config: Config, device: str, folder: Path) -> tuple[TorchProcessGroup, NodeReport]:
    """Become one of the ranks: the first thing that runs in a worker."""
    from trigon.distributed.preflight import inspect_node
    from trigon.training.fsdp import TorchProcessGroup

    set_determinism(torch.device(device))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.trainer.n_gpus_per_node))
    # Longer than the driver's patience, which can say which rank is at fault.
    process_group = TorchProcessGroup.joined(
        torch.device(device), timeout_seconds=config.trainer.worker_timeout_seconds + 60
    )
    return process_group, inspect_node(process_group, model_path=model_path(config), run_folder=folder, marker=LOCK)


def open_worker_engines(
    config: Config, plan: Plan, shows_videos: bool, process_group: TorchProcessGroup
) -> WorkerEngines:
    """Build what one worker is made of; runs in the workers, all together."""
    from trigon.distributed.worker import WorkerEngines

    place = Place(process_group.device, process_group)
    processors = open_processors(config)
    trainer, reference = open_models(config, processors, plan, place)
    return WorkerEngines(
        trainer=trainer,
        reference=reference,
        rollout=open_rollout(config, processors, place, shows_videos=shows_videos),
        images=open_images(config, processors),
        replica_rank=process_group.rank % config.worker.rollout.tensor_parallel_size,
    )


def describe_workers(config: Config, worker_group: WorkerGroup) -> str:
    """Return what the workers are, as a person says it."""
    hosts = len({worker.host for worker in worker_group.workers})
    size, rollout = len(worker_group.workers), config.worker.rollout
    kind = "a GPU each" if worker_group.device == "cuda" else "on the CPU, since Ray sees no GPU"
    if worker_group.device == "cpu" and config.trainer.device == "cpu":
        kind = "on the CPU, as trainer.device says"
    replicas = size // rollout.tensor_parallel_size
    shards = workers_per_copy(config)
    return (
        f"{size} workers on {hosts} {'host' if hosts == 1 else 'hosts'}, {kind}; sampling: {replicas} x tensor "
        f"parallel {rollout.tensor_parallel_size}; training: {size // shards} x {shards} shards"
    )
