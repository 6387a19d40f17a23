"""From a configuration to a finished run: opens each part in order, trains, and reports the end.

What fails cheaply fails first: reward function, run folder and data before the models, the models before the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from trigon.config.load import dump_config
from trigon.config.plan import make_plan, num_workers
from trigon.config.schema import Config
from trigon.loop import Run, train
from trigon.models.load import model_folder
from trigon.parity import ParityCheck
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.report.sinks import TrackerSettings, check_sinks, open_sinks
from trigon.rewards.pool import RewardPool

from trigon.build.auto_micro_batch import plan_with_budgets
from trigon.build.data import open_builder, open_evaluator, open_processors, open_stream, scan_datasets
from trigon.build.models import choose_device, choose_kernel
from trigon.build.engines import open_engines, save_state
from trigon.build.options import (
    advantage_settings,
    group_filter,
    initial_kl,
    intervals,
    kl_is_full,
    kl_is_in_reward,
    model_path,
    parity_tolerance,
    run_folder,
    sampling_params,
)
from trigon.build.workers import open_worker_group, open_workers
from trigon.report.summary import next_steps, planned


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
        report.overview(
            planned(
                config,
                plan,
                num_val_prompts=None if val_prompts is None else len(val_prompts),
                device=engines.device,
                sizes=engines.sizes,
                has_reference=engines.reference is not None,
            )
        )
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
                needs_old_logprobs=plan.updates_per_step > 1 or (kl_is_in_reward(config) and not kl_is_full(config)),
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


def choose_checkpoint(config: Config, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to go on from: the one that is named, or else the last of the run's folder, if wanted."""
    trainer = config.trainer
    if trainer.load_checkpoint_path is not None:
        return open_checkpoint(Path(trainer.load_checkpoint_path), resumable=True)
    return store.latest() if trainer.find_last_checkpoint else None


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
