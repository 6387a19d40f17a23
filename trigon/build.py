"""From a configuration to a run: the one place that knows every room, and the order in which they are opened.

What fails cheaply fails first: reward function, run folder and data before the models, the models before the engine.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, assert_never

import torch

from trigon.algorithms.importance import Correction
from trigon.algorithms.kl import AdaptiveKl
from trigon.algorithms.losses import LossSettings
from trigon.batch import GroupFilter
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import Checkpoint, CheckpointStore, Finish, open_checkpoint
from trigon.config.load import dump_config
from trigon.config.options import read_text_option
from trigon.config.plan import Plan, context_length, make_plan, num_workers, workers_per_copy
from trigon.config.schema import Config
from trigon.data.dataset import Prompts, PromptSet, open_prompts
from trigon.data.mixture import mixed
from trigon.data.processed import ProcessedImages
from trigon.data.prompts import PromptBuilder
from trigon.data.stream import PromptStream
from trigon.data.videos import FrameSampling
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.errors import ConfigError
from trigon.evaluate import Evaluator
from trigon.loop import Intervals, Run, train
from trigon.models.features import FeatureMemory
from trigon.models.fused import require_liger
from trigon.models.hub import uses_modelscope
from trigon.models.kernels import Kernel, resolve_kernel
from trigon.models.load import Processors, copy_side_files, load_model, load_processors, model_folder
from trigon.models.lora import LoraSettings, add_lora
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.parity import ParityCheck
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import LOCK, RunFolder
from trigon.report.sinks import TrackerSettings, check_sinks, open_sinks
from trigon.rewards.pool import RewardPool
from trigon.rollout.protocol import RolloutEngine
from trigon.train_groups import AdvantageSettings
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.local import LocalScorer, LocalTrainEngine, Sizes
from trigon.training.memory import memory_of
from trigon.training.optim import Schedule
from trigon.training.parallel import ProcessGroup, SingleProcess
from trigon.training.protocol import LogprobEngine, TrainEngine
from trigon.training.step import LossTerms
from trigon.training.trace import FOLDER, LocalTracer, Tracer
from trigon.types import SamplingParams

if TYPE_CHECKING:
    from trigon.distributed.preflight import NodeReport
    from trigon.distributed.worker import WorkerEngines
    from trigon.distributed.worker_group import WorkerGroup
    from trigon.training.fsdp import TorchProcessGroup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXACT_PARITY_TOLERANCE = 1e-3
"""Mean |log-prob difference| tolerated where both engines compute in float32; they agree to about 1e-5."""
ROUNDED_PARITY_TOLERANCE = 0.1
"""The same where either computes in 16 bits; healthy runs lie near 0.01."""
REMEMBERED_PIXEL_BYTES = 4 * 2**30
"""Host memory in which a worker remembers processed images, so that a step processes each of them once."""


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


def run_training(
    config: Config,
    *,
    warnings: Sequence[str],
    trackers: TrackerEnvironment,
    should_stop: Callable[[], bool],
    export_to: Path | None,
) -> None:
    """Train as configured, from the beginning or from where the last run stopped, and report the end.

    should_stop: asked after each step; True saves and ends the run. export_to: where to write the last checkpoint as a
    Hugging Face model; None: nowhere.
    Raises: TrigonError, before the slow parts are built where that is possible.
    """
    check_sinks(config.trainer.logger)
    if num_workers(config) == 1:
        choose_kernel(config, choose_device(config))  # refuses what is not there
    with ExitStack() as stack:
        rewards = open_rewards(config)
        stack.callback(rewards.close)
        folder = stack.enter_context(RunFolder(run_folder(config)))
        console = open_console(config)
        for warning in warnings:
            console.warn(warning)
        store = CheckpointStore(
            folder.path,
            keep=config.trainer.save_limit,
            background=config.trainer.save_in_background,
            warn=console.warn,
        )
        checkpoint = choose_checkpoint(config, store)
        processors = open_processors(config)
        worker_group = stack.enter_context(open_worker_group(config, folder.path)) if num_workers(config) > 1 else None
        rewards.ready()
        sinks = open_sinks(config.trainer.logger, tracker_settings(config, trackers, folder.path))
        report = stack.enter_context(Reporter(folder, console, sinks, num_devices=num_workers(config)))

        builder = open_builder(config, processors)
        val_prompts = (
            scan_datasets(config, config.data.val_files, (), builder, report) if config.data.val_files else None
        )
        train_prompts = scan_datasets(config, config.data.train_files, config.data.train_weights, builder, report)
        plan = make_plan(config, num_train_prompts=train_prompts.prompts_per_epoch)
        prompts = open_stream(config, train_prompts)
        stack.callback(prompts.close)
        videos = any(each.shows_videos for each in (train_prompts, val_prompts) if each is not None)
        engines = (
            open_engines(config, processors, plan, store, report, stack, shows_videos=videos)
            if worker_group is None
            else open_workers(config, plan, worker_group, store, report, shows_videos=videos)
        )
        if config.trainer.auto_micro_batch and not config.trainer.val_only:
            plan = plan_with_budgets(config, plan, engines, folder, report, console, resumes=checkpoint is not None)
        report.ledger(ledger(config, plan, val_prompts, engines))
        if checkpoint is not None:
            console.print(f"resuming after step {checkpoint.step} from {checkpoint.folder}")
        folder.write_config(dump_config(config))
        stack.callback(gc.unfreeze)
        gc.freeze()  # what has been imported and built stays, and need not be looked through again and again
        progress = train(
            Run(
                plan=plan,
                intervals=intervals(config, can_validate=val_prompts is not None),
                sampling=sampling_params(config),
                prompts=prompts,
                rollout=engines.rollout,
                rewards=rewards,
                trainer=engines.trainer,
                reference=engines.reference,
                group_filter=group_filter(config),
                advantage_settings=advantage_settings(config),
                kl=initial_kl(config),
                needs_old=plan.updates_per_step > 1 or (kl_is_in_reward(config) and not kl_is_full(config)),
                evaluator=open_evaluator(config, val_prompts, report),
                parity=ParityCheck(parity_tolerance(config)),
                store=store,
                save_state=partial(save_state, engines.trainer, model_folder(model_path(config)), config),
                report=report,
                traced_steps=frozenset(config.trainer.profile_steps),
                tracer=engines.tracer,
                should_stop=should_stop,
            ),
            checkpoint,
        )
        exported = None
        if export_to is not None and progress.step > 0:
            exported = export_checkpoint(folder.path / f"global_step_{progress.step}", export_to, dtype=None)
        report.summary(exported=exported, next_steps=next_steps(config, folder.path, exported, progress.step))


def run_folder(config: Config) -> Path:
    """Return the folder of a run: its checkpoints, metrics and rollouts."""
    trainer = config.trainer
    return Path(trainer.save_checkpoint_path or Path("checkpoints") / trainer.project_name / trainer.experiment_name)


def model_path(config: Config) -> str:
    """Return the model to start from; config/checks.py has refused a configuration without one."""
    path = config.worker.actor.model.model_path
    assert path is not None
    return path


def choose_device(config: Config) -> torch.device:
    """Return the device to train on. On the CPU, kernels are made deterministic: same seed, same numbers."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cuda, but torch sees no GPU here; set trainer.device=cpu, or install CUDA torch"
        )
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    set_determinism(device)
    return device


def set_determinism(device: torch.device) -> None:
    """Make kernels deterministic on the CPU: same seed, same numbers."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before writing it, and filling it costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_checkpoint(config: Config, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to go on from: the one that is named, or else the last of the run's folder, if wanted."""
    trainer = config.trainer
    if trainer.load_checkpoint_path is not None:
        return open_checkpoint(Path(trainer.load_checkpoint_path), resumable=True)
    return store.latest() if trainer.find_last_checkpoint else None


# -- data ---------------------------------------------------------------------------------------------------------


def open_processors(config: Config) -> Processors:
    """Load tokenizer and image processor."""
    model, data = config.worker.actor.model, config.data
    return load_processors(
        model_path(config),
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=read_text_option(data.override_chat_template),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
    )


def open_builder(config: Config, processors: Processors) -> PromptBuilder:
    """Return what turns rows into prompts."""
    data = config.data
    return PromptBuilder(
        processors,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        image_key=data.image_key,
        image_dir=None if data.image_dir is None else Path(data.image_dir),
        format_prompt=data.format_prompt,
        system_prompt=data.system_prompt,
        max_prompt_length=data.max_prompt_length,
        max_image_pixels=data.max_image_pixels,
        limit_images=config.worker.rollout.limit_images,
        process_images=num_workers(config) == 1,  # several do so themselves
        video_key=data.video_key,
        video_sampling=video_sampling(config),
    )


def video_sampling(config: Config) -> FrameSampling:
    """Return which frames of a video are shown."""
    return FrameSampling(fps=config.data.video_fps, max_frames=config.data.max_video_frames)


def data_workers(config: Config) -> int:
    """Return how many threads build prompts: as configured, but no more than there are cores."""
    return min(config.data.filter_overlong_prompts_workers, os.cpu_count() or 1)


def scan_datasets(
    config: Config, specs: Sequence[str], weights: Sequence[float], builder: PromptBuilder, report: Reporter
) -> Prompts:
    """Open datasets as one, look at every row of each, and say what was set aside."""
    return mixed([scan_dataset(config, spec, builder, report) for spec in specs], weights)


def scan_dataset(config: Config, spec: str, builder: PromptBuilder, report: Reporter) -> PromptSet:
    """Open a dataset, look at every row of it, and say what was set aside."""
    data = config.data
    with report.phase(f"look at {spec}") as advance:
        done = 0

        def on_progress(rows_done: int, rows: int) -> None:
            nonlocal done
            advance(rows_done - done)
            done = rows_done

        prompts = open_prompts(
            spec,
            builder,
            filter_overlong_prompts=data.filter_overlong_prompts,
            max_bad_row_fraction=data.max_bad_row_fraction,
            num_workers=data_workers(config),
            on_progress=on_progress,
        )
    for reason, count in prompts.report.items():
        report.warn(f"{spec}: {count} of {prompts.num_rows} rows set aside ({reason}): {prompts.examples[reason][0]}")
    return prompts


def open_stream(config: Config, prompts: Prompts) -> PromptStream:
    """Return the order in which training draws prompts."""
    data = config.data
    return PromptStream(
        prompts,
        batch_size=data.rollout_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        prefetch=True,
        num_workers=data_workers(config),
    )


def open_evaluator(config: Config, prompts: Prompts | None, report: Reporter) -> Evaluator | None:
    """Return what validates, or None where there are no validation prompts."""
    if prompts is None:
        return None
    at_a_time = config.data.val_batch_size
    return Evaluator(
        prompts,
        validation_sampling_params(config),
        prompts_per_call=at_a_time if at_a_time > 0 else len(prompts),
        num_workers=data_workers(config),
        warn=report.warn,
    )


# -- engines ------------------------------------------------------------------------------------------------------


def open_rewards(config: Config) -> RewardPool:
    """Start the grader processes."""
    reward = config.worker.reward
    assert reward.reward_function is not None
    return RewardPool(
        reward.reward_function,
        kwargs=reward.reward_function_kwargs,
        num_workers=reward.num_cpus,
        timeout_seconds=reward.timeout_seconds,
        max_failed_fraction=reward.max_failed_fraction,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines are opened: on a device, alone or as one of several ranks."""

    device: torch.device
    process_group: ProcessGroup

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.process_group.size == 1


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


def choose_kernel(config: Config, device: torch.device) -> Kernel:
    """Return by which kernel the run's models attend on this device.

    Raises: ModelError if it cannot run there, or liger-kernel is wanted and cannot; ConfigError if that is to be
    compiled besides.
    """
    actor = config.worker.actor
    if actor.model.use_liger_kernel:
        if actor.model.compile_layers:
            raise ConfigError(
                "worker.actor.model.use_liger_kernel and compile_layers change the same norms and MLPs; set one of them"
            )
        require_liger(device)
    return resolve_kernel(actor.model.attention_kernel, device=device, dtype=DTYPES[actor.fsdp.mp_param_dtype])


def open_policy(
    config: Config, processors: Processors, kernel: Kernel, dtype: torch.dtype, device: torch.device | str
) -> Policy:
    """Load the model's weights, or on "meta" none, and make them a policy."""
    model = config.worker.actor.model
    policy = Policy(
        load_model(
            model_path(config),
            dtype=dtype,
            device=device,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            attention_kernel=kernel,
        ),
        processors.family,
        temperature=config.worker.rollout.temperature,
        banned_token_ids=processors.banned_token_ids,
    )
    if model.use_liger_kernel:
        policy.use_liger_kernel()
    if model.compile_layers:
        policy.compile_layers()
    return policy


def open_trained_policy(config: Config, processors: Processors, kernel: Kernel, device: torch.device | str) -> Policy:
    """Load the policy as it is to be trained: what is frozen, what is adapted, what is computed again."""
    actor = config.worker.actor
    policy = open_policy(config, processors, kernel, DTYPES[actor.fsdp.torch_dtype or "fp32"], device)
    if actor.model.freeze_vision_tower:
        policy.freeze_vision_tower()
    if actor.model.lora.rank > 0:
        add_lora(policy.model, lora_settings(config), seed=config.worker.rollout.seed)
    if actor.model.enable_gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy


def open_placed(
    config: Config,
    make_policy: Callable[[torch.device], Policy],
    place: Place,
    *,
    full_shard: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> Policy:
    """Return a policy where it belongs: whole where there is one rank, with cpu_offload on the CPU; else sharded."""
    if place.is_alone:
        return make_policy(torch.device("cpu") if cpu_offload else place.device)
    from trigon.training.fsdp import Sharding, open_sharded

    sharding = Sharding(
        full_shard=full_shard,
        ranks_per_copy=workers_per_copy(config),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
    )
    return open_sharded(make_policy, place.process_group, sharding, place.device)


def lora_settings(config: Config) -> LoraSettings:
    """Return which adapters are trained."""
    lora = config.worker.actor.model.lora
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
    )


def open_models(
    config: Config, processors: Processors, plan: Plan, place: Place
) -> tuple[LocalTrainEngine, LogprobEngine | None]:
    """Return the policy's engine, and the reference's where the loop asks for its log-probabilities.

    With LoRA the reference is the policy without its adapters. Where whole distributions are compared, the policy's
    engine does so by itself, and the loop never sees the reference.
    """
    adapted = config.worker.actor.model.lora.rank > 0
    scorer = open_reference(config, processors, plan, place) if needs_reference(config) and not adapted else None
    trainer = open_trainer(config, processors, plan, place, scorer)
    if not needs_reference(config) or kl_is_full(config):
        return trainer, None
    return trainer, trainer.reference_without_adapters() if adapted else scorer


def open_trainer(
    config: Config, processors: Processors, plan: Plan, place: Place, reference: LocalScorer | None
) -> LocalTrainEngine:
    """Load the policy, sharded where there are several ranks, and make its optimizer."""
    actor = config.worker.actor
    compute_dtype = DTYPES[actor.fsdp.mp_param_dtype]
    policy = open_placed(
        config,
        partial(open_trained_policy, config, processors, choose_kernel(config, place.device)),
        place,
        full_shard=actor.fsdp.enable_full_shard,
        param_dtype=compute_dtype,
        reduce_dtype=DTYPES[actor.fsdp.mp_reduce_dtype],
        cpu_offload=actor.fsdp.enable_cpu_offload and place.device.type != "cpu",
    )
    # What is offloaded always need not be moved.
    moves = place.device.type != "cpu" and not actor.fsdp.enable_cpu_offload
    return LocalTrainEngine(
        policy,
        terms=loss_terms(config),
        strategy=actor.optim.strategy,
        schedule=Schedule(
            peak=actor.optim.lr,
            shape=actor.optim.lr_scheduler_type,
            warmup_updates=plan.warmup_updates,
            total_updates=plan.total_updates,
            min_ratio=actor.optim.min_lr_ratio or 0.0,
        ),
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        positions=positions_of(processors.family, processors.hf_config),
        update_max_tokens=plan.tokens_per_update_pass,
        score_max_tokens=plan.tokens_per_experience_pass,
        device=place.device,
        compute_dtype=compute_dtype if place.is_alone else None,
        offload_params=actor.offload.offload_params and moves,
        offload_optimizer=actor.offload.offload_optimizer and moves,
        process_group=place.process_group,
        reference=reference if kl_is_full(config) else None,
        features=feature_memory(config, shared=reference is not None) if policy.has_frozen_vision else None,
    )


def feature_memory(config: Config, *, shared: bool) -> FeatureMemory:
    """Return what remembers a frozen vision tower's features. shared: by policy and reference, who have one each."""
    max_bytes = int(config.worker.actor.model.vision_cache_gb * 2**30)
    return FeatureMemory(max_bytes // 2 if shared else max_bytes)


def open_reference(config: Config, processors: Processors, plan: Plan, place: Place) -> LocalScorer:
    """Load the reference policy."""
    ref = config.worker.ref
    dtype = DTYPES[ref.fsdp.torch_dtype or "bf16"]
    offload = (ref.fsdp.enable_cpu_offload or ref.offload.offload_params) and place.device.type != "cpu"
    policy = open_placed(
        config,
        partial(open_policy, config, processors, choose_kernel(config, place.device), dtype),
        place,
        full_shard=ref.fsdp.enable_full_shard,
        param_dtype=dtype,
        reduce_dtype=dtype,
        cpu_offload=offload,
    )
    return LocalScorer(
        policy,
        positions=positions_of(processors.family, processors.hf_config),
        max_tokens=plan.tokens_per_experience_pass,
        device=place.device,
        compute_dtype=dtype if place.is_alone else None,
        offload_params=offload and place.is_alone,
        process_group=place.process_group,
        # As the policy sees images, so that the two agree bit for bit where their weights do.
        features=(
            feature_memory(config, shared=True)
            if config.worker.actor.model.freeze_vision_tower and processors.family.has_vision
            else None
        ),
    )


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


def plan_with_budgets(
    config: Config,
    plan: Plan,
    engines: Engines,
    folder: RunFolder,
    report: Reporter,
    console: Console,
    *,
    resumes: bool,
) -> Plan:
    """Return the plan with as many tokens in a pass as the device has memory for.

    What was measured is kept in the run folder, and holds for as long as nothing changes that it depends on: other
    budgets would pack other rows, and change the last bits of a run that goes on.
    """
    lengths = lengths_of(config, plan)
    found, known = folder.read_budgets(), None
    measured_for = json.loads(json.dumps(budget_cache_key(config, lengths)))  # as it comes back from the file
    if found is not None and found.keys() == {"budgets", "measured_for"} and found["measured_for"] == measured_for:
        known = Budgets(**found["budgets"])
    with report.phase("measure memory"):
        budgets = engines.tune_micro_batch(lengths, known)
    if budgets != known:
        folder.write_budgets({"budgets": asdict(budgets), "measured_for": measured_for})
        if resumes:
            report.warn("token budgets were measured anew, so that rounding differs from that of the run so far")
    console.print(
        f"auto micro-batch: {budgets.update_tokens:,} tokens an update pass ({readable(budgets.update_bytes)} of "
        f"{readable(budgets.device_bytes)}), {budgets.experience_tokens:,} a pass without gradient "
        f"({readable(budgets.experience_bytes)}){', as measured before' if budgets == known else ''}"
    )
    return replace(
        plan, tokens_per_update_pass=budgets.update_tokens, tokens_per_experience_pass=budgets.experience_tokens
    )


def lengths_of(config: Config, plan: Plan) -> Lengths:
    """Return what the groups of a run have at most."""
    data = config.data
    group = data.max_prompt_length + config.worker.rollout.n * data.max_response_length
    return Lengths(
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        image_pixels=data.max_pixels,
        update_tokens=plan.prompts_per_update * group,
        step_tokens=plan.prompts_per_step * group,
    )


def budget_cache_key(config: Config, lengths: Lengths) -> dict[str, object]:
    """Return what the memory of a pass depends on, besides the device."""
    actor = config.worker.actor
    return {
        "model": model_path(config),
        "workers": num_workers(config),
        "lengths": asdict(lengths),
        "terms": asdict(loss_terms(config)),
        "strategy": actor.optim.strategy,
        "actor.model": actor.model.model_dump(exclude={"vision_cache_gb"}),
        "actor.fsdp": actor.fsdp.model_dump(),
        "actor.offload": actor.offload.model_dump(),
        "ref": config.worker.ref.model_dump() if needs_reference(config) else None,
    }


def check_space(config: Config, store: CheckpointStore, sizes: Sequence[Sizes]) -> None:
    """Refuse a disk on which not even one checkpoint fits."""
    adapted = config.worker.actor.model.lora.rank > 0
    copies = len(sizes) // workers_per_copy(config)
    weights = sum(each.gradient_bytes if adapted else each.weight_bytes for each in sizes)
    optimizer = 0 if config.trainer.save_model_only else sum(each.optimizer_bytes for each in sizes)
    store.check_space((weights + optimizer) // copies)


# -- several workers ----------------------------------------------------------------------------------------------


@contextmanager
def open_worker_group(config: Config, folder: Path) -> Iterator[WorkerGroup]:
    """Start the workers, on this machine or on a cluster that is there, and let them look around; end them afterwards.

    Raises: ConfigError if the cluster is too small, or a node lacks something.
    """
    from trigon.distributed.cluster import Layout, cluster, has_gpus, workers
    from trigon.distributed.preflight import check_node_reports
    from trigon.distributed.worker import Worker, actor_of
    from trigon.distributed.worker_group import WorkerGroup

    trainer = config.trainer
    with cluster(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node):
        device: Literal["cpu", "cuda"] = (
            ("cuda" if has_gpus() else "cpu") if trainer.device == "auto" else trainer.device
        )
        layout = Layout(nodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node, device=device)
        with workers(layout, actor_of(Worker)) as placed:
            worker_group = WorkerGroup(placed, device, deadline_seconds=trainer.worker_timeout_seconds)
            join = partial(join_ranks, as_workers_need(config), device, folder.absolute())
            check_node_reports(worker_group.call_all(lambda actor, _: actor.join.remote(join), phase="preflight"))
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
    from trigon.distributed.worker_group import DISK_SECONDS

    with report.phase("load model and start rollout engine"):
        build = partial(open_worker_engines, as_workers_need(config), plan, shows_videos)
        sizes = worker_group.call_all(
            lambda actor, _: actor.open.remote(build), phase="load", at_least_seconds=DISK_SECONDS
        )
    check_space(config, store, sizes)

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        shared_by = config.trainer.n_gpus_per_node
        found: list[Budgets] = worker_group.call_all(
            lambda actor, _: actor.tune_micro_batch.remote(lengths, known, shared_by), phase="fit"
        )
        return found[0]

    return Engines(
        device=described(config, worker_group),
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


def open_images(config: Config, processors: Processors) -> ProcessedImages | None:
    """Return what gives a worker's prompts their pixels; None for a model without vision."""
    image_processor = image_processor_of(processors)
    if image_processor is None:
        return None
    return ProcessedImages(
        image_processor,
        max_image_pixels=config.data.max_image_pixels,
        num_workers=max(1, data_workers(config) // config.trainer.n_gpus_per_node),
        max_bytes=REMEMBERED_PIXEL_BYTES,
        video_processor=video_processor_of(processors),
        video_sampling=video_sampling(config),
    )


# -- algorithm ----------------------------------------------------------------------------------------------------


def needs_reference(config: Config) -> bool:
    """Tell whether any term needs a reference policy: a KL with a coefficient of 0 is none."""
    return not config.algorithm.disable_kl and config.algorithm.kl_coef > 0


def kl_is_in_reward(config: Config) -> bool:
    """Tell whether the KL is taken from the reward, rather than added to the loss."""
    return needs_reference(config) and not config.algorithm.use_kl_loss


def kl_is_full(config: Config) -> bool:
    """Tell whether the KL is that of whole distributions, which log-probabilities of sampled tokens cannot give."""
    return needs_reference(config) and config.algorithm.kl_penalty == "full"


def loss_terms(config: Config) -> LossTerms:
    """Return which loss an update minimises."""
    actor, algorithm = config.worker.actor, config.algorithm
    return LossTerms(
        policy=LossSettings(
            kind=actor.loss_type,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
            clip_dual=actor.clip_ratio_dual,
            cap=1.0 + actor.clip_ratio_high if actor.cispo_cap is None else actor.cispo_cap,
            tau_positive=actor.tau_positive,
            tau_negative=actor.tau_negative,
        ),
        averaging=actor.loss_avg_mode,
        fixed_length=actor.loss_fixed_length or config.data.max_response_length,
        kl_estimator=algorithm.kl_penalty if needs_reference(config) and algorithm.use_kl_loss else None,
        kl_coefficient=algorithm.kl_coef,
        entropy_coefficient=actor.entropy_coeff,
        correction=correction(config),
    )


def correction(config: Config) -> Correction | None:
    """Return what is done where engine and trainer disagree."""
    algorithm = config.algorithm
    if algorithm.mismatch_correction == "off":
        return None
    return Correction(
        kind=algorithm.mismatch_correction,
        level=algorithm.mismatch_level,
        low=algorithm.mismatch_low,
        high=algorithm.mismatch_high,
    )


def group_filter(config: Config) -> GroupFilter | None:
    """Return which groups are learned from; None: all."""
    algorithm, data = config.algorithm, config.data
    if not algorithm.online_filtering:
        return None
    return GroupFilter(
        key=algorithm.filter_key,
        low=algorithm.filter_low,
        high=algorithm.filter_high,
        prompts_per_round=data.mini_rollout_batch_size or data.rollout_batch_size,
        max_rounds=max(0, config.trainer.max_try_make_batch),
        keep_surplus=algorithm.filter_surplus == "keep",
    )


def advantage_settings(config: Config) -> AdvantageSettings:
    """Return how rewards become advantages."""
    algorithm = config.algorithm
    return AdvantageSettings(
        estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        weights=algorithm.reward_weights or None,
        kl_in_reward=algorithm.kl_penalty if kl_is_in_reward(config) else None,
        mask_overlong=algorithm.overlong_filtering,
    )


def initial_kl(config: Config) -> AdaptiveKl:
    """Return the coefficient of a KL in the reward, fixed or adaptive."""
    algorithm = config.algorithm
    horizon = algorithm.kl_horizon if algorithm.kl_type == "adaptive" else 0.0
    return AdaptiveKl(coefficient=algorithm.kl_coef, target=algorithm.kl_target, horizon=horizon)


def parity_tolerance(config: Config) -> float:
    """Return how far rollout engine and trainer may differ before the run stops."""
    rollout, fsdp = config.worker.rollout, config.worker.actor.fsdp
    if rollout.parity_tolerance is not None:
        return rollout.parity_tolerance
    exact = rollout.dtype == fsdp.mp_param_dtype == (fsdp.torch_dtype or "fp32") == "fp32"
    return EXACT_PARITY_TOLERANCE if exact else ROUNDED_PARITY_TOLERANCE


def sampling_params(config: Config) -> SamplingParams:
    """Return how training samples."""
    rollout = config.worker.rollout
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
    )


def validation_sampling_params(config: Config) -> SamplingParams:
    """Return how validation samples: as training, but for what val_override_config says."""
    override = config.worker.rollout.val_override_config
    training = sampling_params(config)
    return SamplingParams(
        n=training.n if override.n is None else override.n,
        temperature=training.temperature if override.temperature is None else override.temperature,
        top_p=training.top_p if override.top_p is None else override.top_p,
        top_k=training.top_k if override.top_k is None else override.top_k,
        max_tokens=training.max_tokens if override.max_tokens is None else override.max_tokens,
        ignore_eos=training.ignore_eos if override.ignore_eos is None else override.ignore_eos,
        seed=training.seed if override.seed is None else override.seed,
    )


def intervals(config: Config, *, can_validate: bool) -> Intervals:
    """Return when to validate, save and show answers."""
    trainer = config.trainer
    return Intervals(
        validate_first=trainer.val_before_train and can_validate,
        validate_only=trainer.val_only,
        validate_every=max(trainer.val_freq, 0) if can_validate else 0,
        validate_last=can_validate,
        save_every=max(trainer.save_freq, 0),
        generations_shown=trainer.val_generations_to_log,
    )


# -- report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrackerEnvironment:
    """What the environment says about trackers; see TrackerSettings."""

    tensorboard_dir: Path | None
    swanlab_dir: Path | None
    swanlab_mode: str | None
    swanlab_api_key: str | None


def tracker_settings(config: Config, environment: TrackerEnvironment, folder: Path) -> TrackerSettings:
    """Return what trackers are told."""
    return TrackerSettings(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        config=config.model_dump(),
        folder=folder,
        tensorboard_dir=environment.tensorboard_dir,
        swanlab_dir=environment.swanlab_dir,
        swanlab_mode=environment.swanlab_mode,
        swanlab_api_key=environment.swanlab_api_key,
    )


def open_console(config: Config) -> Console:
    """Return the screen."""
    return Console(progress=not config.worker.rollout.disable_tqdm, step_lines="console" in config.trainer.logger)


def ledger(config: Config, plan: Plan, val_prompts: Prompts | None, engines: Engines) -> list[tuple[str, str]]:
    """Return what the run will do, as (what, how much):

    the arithmetic that people otherwise do by hand, and get wrong.
    """
    n = config.worker.rollout.n
    sizes = engines.sizes[0]
    each = " on each worker" if len(engines.sizes) > 1 else ""
    return [
        ("device", engines.device),
        (
            "training prompts",
            f"{plan.num_train_prompts:,}, {plan.steps_per_epoch * plan.prompts_per_step:,} of them in an epoch",
        ),
        ("validation prompts", f"{len(val_prompts):,}" if val_prompts is not None else "none"),
        ("steps", f"{plan.total_steps:,} ({plan.steps_per_epoch:,} an epoch)"),
        ("a step samples", f"{plan.prompts_per_step:,} prompts x {n} = {plan.sequences_per_step:,} answers"),
        (
            "a step learns",
            f"in {plan.updates_per_step:,} updates of {plan.prompts_per_update:,} prompts x {n} = "
            f"{plan.sequences_per_update:,} answers",
        ),
        (
            "an update runs",
            f"in micro-batches of at most {plan.tokens_per_update_pass:,} tokens{each}, prompts counted once",
        ),
        ("a step's tokens", f"at most {plan.max_tokens_per_step:,}, prompts counted once"),
        ("reference policy", "none" if engines.reference is None else "yes"),
        ("parameters", f"{sizes.parameters:,}, {sizes.trainable:,} of them trained"),
        (
            "memory",
            f"weights {readable(sizes.weight_bytes)}, gradients {readable(sizes.gradient_bytes)}, optimizer "
            f"{readable(sizes.optimizer_bytes)}{each}; activations and rollout engine not counted",
        ),
    ]


def described(config: Config, worker_group: WorkerGroup) -> str:
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


def readable(num_bytes: int) -> str:
    """Return a number of bytes as a person says it: "3.3 MiB", "7.0 GiB"."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


def next_steps(config: Config, folder: Path, exported: Path | None, step: int) -> list[str]:
    """Return what to try after a run."""
    steps = [f"read what the model says: {folder / 'rollouts'}/*.jsonl"]
    if exported is None and step > 0:
        steps.append(f"export it: trigon export {folder}")
    steps.append("go on: the same command with a larger trainer.max_steps or trainer.total_epochs resumes")
    return steps
