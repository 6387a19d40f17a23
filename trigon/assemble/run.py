"""Runs a training from its configuration to the summary on the console.

Parts are opened in the order in which their errors are cheap: the reward function, the run folder
and the data before the models, the models before the rollout engine.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trigon.assemble.data import open_evaluator, open_stream, scan_datasets
from trigon.assemble.engines import Engines, open_engines, save_state, tune_plan
from trigon.assemble.memory import count_checkpoint_bytes, count_sizes, count_staged_bytes
from trigon.assemble.models import check_trained_critic
from trigon.assemble.options import make_sampling_params, needs_old_logprobs
from trigon.assemble.origin import KEY, Origin
from trigon.assemble.parts import Parts, check_environment, open_parts
from trigon.assemble.preflight import Opened, RunObjects, check_rewards
from trigon.assemble.start import StopSignals, TrainResult
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import VALIDATED_BY, Checkpoint, CheckpointStore, OnProgress, no_progress, open_checkpoint
from trigon.config.files import hub_names, local_sources
from trigon.config.load import ARGUMENTS, COMMAND_LINE, LoadedConfig, dump_config
from trigon.config.names import GROUP_ESTIMATORS
from trigon.config.paths import expand_path
from trigon.config.plan import Plan, describe_chosen, fill_batch_sizes, find_long_warmups, make_plan
from trigon.config.schema import Config
from trigon.data.stream import Prompts, PromptStream
from trigon.data.templates import write_date
from trigon.data.tokens import TokenTexts
from trigon.errors import CheckpointError
from trigon.loop import Checkpoints, Run, Stop, Validation, ValidationRun, train, validate_only
from trigon.metrics import Metrics
from trigon.models.hub import hub_endpoint, uses_modelscope
from trigon.models.load import Processors, most_image_pixels
from trigon.report.console import Console
from trigon.report.delivery import LoggedRun, Logger, make_loggers, open_loggers
from trigon.report.memory_growth import MemoryGrowth, MemoryMeter
from trigon.report.overview import describe_plan, suggest_next_steps
from trigon.report.reporter import Reporter
from trigon.report.run import CONFIG, LOCK
from trigon.report.run_folder import ImageStore, RunFolder
from trigon.report.watch import Watch
from trigon.rewards.pool import RewardPool
from trigon.rollout.buffer import RolloutBuffer
from trigon.rollout.continuous_buffer import ContinuousBuffer
from trigon.rollout.parity import ParityCheck
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.restart import RESTART
from trigon.rollout.step_buffer import StepBuffer
from trigon.system.hangs import FOLLOWS, START, HangWatch, Watchdog
from trigon.system.processes import Started
from trigon.system.secrets import mask
from trigon.system.temporary import remove_dead_folders
from trigon.training.checkpointing import read_updates
from trigon.training.train_groups import GroupPreparation
from trigon.training.updates import Updater


def run_training(
    loaded: LoadedConfig,
    opened: Opened,
    objects: RunObjects,
    *,
    stop: StopSignals,
    export_to: Path | None,
    loggers: Sequence[Logger],
    others: Sequence[Started],
) -> TrainResult:
    """Train from the beginning or from the last checkpoint, and print a summary.

    opened: datasets and reward workers. objects: what else is given as Python objects. stop: asked
    after each step whether to save a checkpoint and end the run. export_to: folder in which the
    last checkpoint is written as a Hugging Face model; None, or a stopped run: not exported.
    loggers: further ones than trainer.logger, which this function opens. others: processes that
    the watchdog of the run does not kill.
    Raises: TrigonError, before the models are loaded where possible.
    """
    config = loaded.config
    check_environment(config)
    remove_dead_folders()
    with ExitStack() as stack:
        # Again at the end: some processes of a run that was killed shortly before may end later.
        stack.callback(remove_dead_folders)
        folder = stack.enter_context(RunFolder(config.trainer.run_folder))
        console = Console(
            progress=not config.worker.rollout.disable_tqdm, step_lines="console" in config.trainer.logger
        )
        console.print(f"run folder: {folder.path}")
        hang_watch = stack.enter_context(open_hang_watch(config, folder.path, console, others))
        stop.use_hang_watch(hang_watch)
        for warning in (*loaded.warnings, *warn_of_moved_run(loaded)):
            console.warn(warning)
        store = open_store(config, folder, console, hang_watch.beat)
        checkpoint = choose_checkpoint(config, store, hang_watch.beat)
        origin = Origin(config, checkpoint, console.print)
        stack.callback(write_date, None)
        write_date(origin.date)
        origin.add_options(objects.reward, objects.val_reward)
        announce_downloads(config, console)
        origin.add_model()
        parts = open_parts(config, objects, folder.path, console.warn, stack)
        all_loggers = [*make_loggers(config.trainer.logger), *loggers]
        report = stack.enter_context(
            open_reporter(config, folder, console, parts.processors, all_loggers, checkpoint, hang_watch)
        )

        data = open_data(config, parts, opened, origin, report, console, stack)
        config, plan = data.config, data.plan
        if not config.trainer.val_only:
            store.check_space(count_checkpoint_bytes(config, parts.size))
        console.print("loading the model and starting the rollout engine")
        engines = open_engines(config, parts, plan, report, stack, shows_videos=data.shows_videos)
        if config.trainer.tunes_budgets_on(parts.device) and not config.trainer.val_only:
            image_pixels, resumes = most_image_pixels(parts.processors), checkpoint is not None
            plan = tune_plan(config, plan, engines, folder, report, console, image_pixels=image_pixels, resumes=resumes)
        report.overview(
            describe_plan(
                config,
                plan,
                num_val_prompts=None if data.validation is None else len(data.validation),
                device=engines.device,
                sizes=count_sizes(config, parts.size),
                has_reference=engines.reference is not None,
            )
        )
        if checkpoint is not None:
            action = "validating the weights of" if config.trainer.val_only else "resuming after"
            console.print(f"{action} step {checkpoint.step} from {checkpoint.folder}")
            warn_if_complete(config, plan, checkpoint, console)
        folder.record_start(dump_config(config), origin.describe_start())
        folder.write_local_sources(local_sources(config))

        # The garbage collector need not scan again what has been imported and built by now.
        stack.callback(gc.unfreeze)
        gc.freeze()
        validation = Validation(
            open_evaluator(config, data.validation, report), engines.rollout, opened.val_rewards or opened.rewards
        )
        if data.train is None:
            step = validate_only(ValidationRun(config, engines.trainer, validation, report, objects.hooks), checkpoint)
        else:
            parity = ParityCheck(config.parity_tolerance)
            preparation, updater = make_learning(config, plan, engines, report)
            run = Run(
                config=config,
                plan=plan,
                buffer=open_buffer(config, plan, data.train, engines.rollout, opened.rewards, report, parity),
                trainer=engines.trainer,
                critic=engines.critic,
                parity=parity,
                preparation=preparation,
                updater=updater,
                validation=validation,
                checkpoints=Checkpoints(
                    store,
                    partial(save_state, engines.trainer, config, parts.processors, engines.critic),
                    made_from={KEY: origin.state(), VALIDATED_BY: origin.validated_by()},
                ),
                report=report,
                stop=Stop(stop.requested, stop.deferred, stop.grace),
                hooks=objects.hooks,
                watch=stack.enter_context(open_watchers(config, plan, opened, parts)),
            )
            step = train(run, checkpoint)
        stopped = step < plan.total_steps
        last = last_checkpoint(folder, checkpoint, step)
        exported = None
        # A run that a hook has stopped is as its user wants it.
        if export_to is not None and last is not None and not (stopped and stop.requested()):
            with hang_watch.phase(EXPORT):
                exported = export_checkpoint(last, export_to, dtype=None)
        next_steps = suggest_next_steps(config, folder.path, last, exported, stopped=stopped)
        report.summary(exported=exported, next_steps=next_steps)
        return TrainResult(folder.path, step, stopped, last, exported)


@dataclass(frozen=True, slots=True)
class RunData:
    """The prompts of a run, and what follows from their number.

    config: with the sizes that follow from the data. train: None with trainer.val_only. validation:
    None without val_files.
    """

    config: Config
    plan: Plan
    train: PromptStream | None
    validation: Prompts | None
    shows_videos: bool


def open_data(
    config: Config,
    parts: Parts,
    opened: Opened,
    origin: Origin,
    report: Reporter,
    console: Console,
    stack: ExitStack,
) -> RunData:
    """Read the datasets, try rewards and episodes on first prompts, and plan the run.

    stack: closes the stream of training prompts. Raises: TrigonError.
    """

    def scan(specs: Sequence[str], weights: Sequence[float] = ()) -> Prompts:
        return scan_datasets(config, specs, weights, parts.builder, report, opened=opened.sources)

    data, stream, num_prompts = config.data, None, 0
    validation = scan(data.val_files) if data.val_files else None
    prompts = None if config.trainer.val_only else scan(data.train_files, data.train_weights)
    shows_videos = any(each is not None and each.shows_videos for each in (prompts, validation))
    if prompts is not None:
        parts.try_prompt(config, opened.rewards, prompts[0])
        if opened.val_rewards is not None and validation is not None:
            check_rewards(opened.val_rewards, validation[0])
        prompts = origin.number_prompts(prompts)
        num_prompts = prompts.prompts_per_epoch
    else:
        assert validation is not None, "val_only needs val_files"
        parts.try_prompt(config, opened.val_rewards or opened.rewards, validation[0])
    plan = make_plan(config, num_train_prompts=num_prompts)
    for warning in find_long_warmups(config, plan):
        console.warn(warning)
    if prompts is not None:
        config, chosen = fill_batch_sizes(config, num_prompts)
        if chosen:
            console.print(describe_chosen(chosen, num_prompts))
        stream = open_stream(config, prompts)
        stack.callback(stream.close)
    origin.add_data(config, stream, validation, plan)
    return RunData(config, plan, stream, validation, shows_videos)


def open_buffer(
    config: Config,
    plan: Plan,
    prompts: PromptStream,
    engine: RolloutEngine,
    rewards: RewardPool,
    report: Reporter,
    parity: ParityCheck,
) -> RolloutBuffer:
    """Return the buffer that gives each step its groups."""
    buffer = ContinuousBuffer if config.algorithm.samples_continuously else StepBuffer
    return buffer(prompts, engine, rewards, make_sampling_params(config), config, plan, report, parity)


def make_learning(config: Config, plan: Plan, engines: Engines, report: Reporter) -> tuple[GroupPreparation, Updater]:
    """Return what makes train groups of a step's groups, and what updates the models with them."""
    preparation = GroupPreparation(
        config.algorithm,
        engines.trainer,
        reference=engines.reference,
        critic=engines.critic,
        needs_old_logprobs=needs_old_logprobs(config, plan),
        phase=report.phase,
    )
    updater = Updater(
        plan,
        engines.trainer,
        engines.critic,
        report,
        engines.tracer,
        critic_warmup=config.critic_warmup,
        max_skipped=config.trainer.max_skipped_updates,
        traced_steps=config.trainer.profile_steps,
    )
    return preparation, updater


def warn_of_moved_run(loaded: LoadedConfig) -> list[str]:
    """Return a warning if the configuration is another run folder's, as after it was moved."""
    path, folder = loaded.path, loaded.config.trainer.run_folder
    names = [f"trainer.{name}" for name in ("save_checkpoint_path", "project_name", "experiment_name")]
    is_chosen = any(loaded.sources.get(name) in (COMMAND_LINE, ARGUMENTS) for name in names)
    if path is None or is_chosen or path.name != CONFIG or not (path.parent / LOCK).exists():
        return []
    if path.parent.resolve() == folder.resolve():
        return []
    return [
        f"{path} is the configuration of the run in {path.parent}, and this run writes into {folder}; to continue the "
        f"run in {path.parent}, which was moved or copied, add trainer.save_checkpoint_path={path.parent}"
    ]


def warn_if_complete(config: Config, plan: Plan, checkpoint: Checkpoint, console: Console) -> None:
    """Warn that a run resumes after its last step, and makes none."""
    if not config.trainer.val_only and checkpoint.step >= plan.total_steps:
        console.warn(
            f"this run has made its {plan.total_steps:,} steps already, and makes none now; raise trainer.max_steps or "
            "trainer.total_epochs to continue it, or set another trainer.experiment_name to start a new run"
        )


def open_store(
    config: Config, folder: RunFolder, console: Console, on_progress: OnProgress = no_progress
) -> CheckpointStore:
    """Return the store of the checkpoints in the run folder. on_progress: see CheckpointStore."""
    trainer = config.trainer
    return CheckpointStore(
        folder.path,
        keep=trainer.save_limit,
        background=trainer.save_in_background,
        warn=console.warn,
        on_progress=on_progress,
    )


def choose_checkpoint(
    config: Config, store: CheckpointStore, on_progress: OnProgress = no_progress
) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start from the beginning.

    It is trainer.load_checkpoint_path, or the last one of the run folder with find_last_checkpoint.
    on_progress: called for each file that is verified.
    Raises: CheckpointError, also if it belongs to a run with LoRA and this one has none, or the
    other way round.
    """
    trainer = config.trainer
    checkpoint: Checkpoint | None
    if trainer.load_checkpoint_path is not None:
        path = expand_path(trainer.load_checkpoint_path)
        checkpoint = open_checkpoint(path, resumable=not trainer.val_only, on_progress=on_progress)
    else:
        checkpoint = store.latest(resumable=not trainer.val_only) if trainer.find_last_checkpoint else None
    if checkpoint is not None and not trainer.val_only:
        progress = checkpoint.progress
        if "buffer" not in progress or any("skipped" not in each for each in progress["prompts"]["datasets"]):
            raise CheckpointError(
                f"{checkpoint.folder} was saved by an earlier version of Trigon, and this one cannot read its position "
                "in the data; export its model (trigon export) and start a new run from it, or continue with that "
                "version"
            )
        check_trained_parts(config, checkpoint)
    return checkpoint


def last_checkpoint(folder: RunFolder, resumed: Checkpoint | None, step: int) -> Path | None:
    """Return the folder of the checkpoint of a run's last step; None before the first step.

    If no step was left, it is the checkpoint from which the run resumed, perhaps of another run.
    """
    if step == 0:
        return None
    if resumed is not None and resumed.step == step:
        return resumed.folder
    return folder.path / f"global_step_{step}"


def check_trained_parts(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint's weights are not those that the run trains.

    The train engine would find it too, after the models are loaded.
    """
    actor = config.worker.actor
    read_updates(checkpoint.actor, lora_rank=actor.model.lora.rank, strategy=actor.optim.strategy)
    if config.has_critic and checkpoint.critic is not None:
        check_trained_critic(config, checkpoint.critic)


def open_reporter(
    config: Config,
    folder: RunFolder,
    console: Console,
    processors: Processors,
    loggers: Sequence[Logger],
    checkpoint: Checkpoint | None,
    hang_watch: HangWatch | None = None,
) -> Reporter:
    """Open the loggers, and return the reporter.

    checkpoint: where the run resumes from, if it does.
    """
    for place in open_loggers(loggers, describe_run(config, folder.path, checkpoint)):
        console.print(f"logging to {place}")
    trainer = config.trainer
    return Reporter(
        folder,
        console,
        loggers,
        num_devices=config.num_devices,
        critic_warmup=config.critic_warmup,
        images=ImageStore(folder.path, max_side=trainer.saved_image_side) if trainer.save_images else None,
        token_texts=TokenTexts(processors.tokenizer),
        watch=hang_watch,
    )


def describe_run(config: Config, folder: Path, checkpoint: Checkpoint | None) -> LoggedRun:
    """Return the description of the run for the loggers.

    folder: the run folder. checkpoint: the one that the run resumes from, if any.
    """
    first_step = 0 if checkpoint is None else checkpoint.step + 1
    return LoggedRun(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        config=mask("", config.model_dump(mode="json")),
        folder=folder,
        first_step=None if config.trainer.val_only else first_step,
    )


def announce_downloads(config: Config, console: Console) -> None:
    """Say which hub models and datasets are read from, before the first attempt to reach a hub.

    A client that cannot reach its hub tries again for half a minute, without a word.
    """
    names = hub_names(config)
    if names and not uses_modelscope():
        console.print(
            f"reading {', '.join(names)} from {hub_endpoint()}, or from the local cache; if that cannot be reached, "
            "set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use the cache only"
        )


# -- what watches a run ----------------------------------------------------------------------------

SLOW_SECONDS = 3600.0
"""The least limit of the start, of loading and of saving, as of the calls of workers."""

EXPORT = "export"
"""The phase of the export after the last step. It has no limit, since it reports no progress."""

_STARTING = (START, "scan ", "load model", "start rollout engine", "measure memory")
_SLOW = (*_STARTING, RESTART, "save_checkpoint")
_WORKERS_SECONDS = 60.0  # longer than the deadlines of calls, whose errors name the rank
_MIN_UNWIND_SECONDS, _MAX_UNWIND_SECONDS = 10.0, 120.0


@contextmanager
def open_watchers(config: Config, plan: Plan, opened: Opened, parts: Parts) -> Iterator[Watch]:
    """Yield the rules of a run, which measure the memory of all of its processes in the context."""
    watch, workers = config.trainer.watch, parts.workers
    rewards = [pool for pool in (opened.rewards, opened.val_rewards) if pool is not None]
    save_gb = count_staged_bytes(config, parts.size) / 2**30
    object_store: Callable[[], Metrics] = dict
    if workers is not None and watch.level != "off" and "memory" not in watch.ignore:
        from trigon.distributed.cluster import object_store_metrics as object_store  # asks Ray in each step
    with MemoryMeter(
        reward_workers=lambda: [pid for pool in rewards for pid in pool.process_ids],
        workers=tuple if workers is None else workers.local_process_ids,
        object_store=object_store,
    ) as meter:
        yield Watch(
            watch,
            groups_compared=config.group_size > 1 and config.algorithm.adv_estimator in GROUP_ESTIMATORS,
            completions_end=not config.worker.rollout.ignore_eos,
            memory=MemoryGrowth(plan.total_steps, num_workers=config.workers_per_machine, save_gb=save_gb),
            meter=meter,
        )


def open_hang_watch(config: Config, folder: Path, console: Console, others: Sequence[Started] = ()) -> HangWatch:
    """Start the watchdog of a run. folder: the run folder. others: as for Watchdog."""
    if not hasattr(os, "memfd_create"):  # not Linux
        console.warn("this system has no memory files: trainer.worker_timeout_seconds is for calls of workers only")
        return HangWatch()
    limit = config.trainer.worker_timeout_seconds
    return Watchdog(
        folder,
        partial(limit_of, config, bool(hub_names(config))),
        option="trainer.worker_timeout_seconds",
        unwind_seconds=min(max(limit, _MIN_UNWIND_SECONDS), _MAX_UNWIND_SECONDS),
        same_command=config.trainer.same_command,
        others=others,
    )


def limit_of(config: Config, reads_hub: bool, name: str) -> float | None:
    """Return the seconds without progress after which a phase hangs; None: no limit.

    What follows a phase has the limit of the phase; after an export, the limit of a step.
    reads_hub: a download has no limit.
    """
    if name == EXPORT:
        return None
    name = name.removeprefix(FOLLOWS)
    if reads_hub and name.startswith(_STARTING):
        return None
    limit = config.trainer.worker_timeout_seconds
    limit = max(limit, SLOW_SECONDS) if name.startswith(_SLOW) else limit
    return limit + (_WORKERS_SECONDS if config.has_workers else 0.0)
