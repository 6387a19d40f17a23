"""From a configuration to a run: the one place that knows every room, and the order in which they are opened.

What can fail cheaply fails first: the reward function, the run folder and the data before the models, the models before the engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trigon.algorithms.kl import AdaptiveKl
from trigon.checkpoint.store import Checkpoint, CheckpointStore
from trigon.config.load import dump_config
from trigon.config.options import read_text_option
from trigon.config.plan import Plan, make_plan
from trigon.config.schema import Config, DataConfig, RolloutConfig
from trigon.data.dataset import PromptSet, PromptStream, open_prompts
from trigon.data.prompts import PromptBuilder
from trigon.errors import ConfigError
from trigon.evaluate import Evaluator
from trigon.loop import Rhythm, Run
from trigon.models.load import Processors, copy_side_files, load_model, load_processors, model_folder
from trigon.models.policy import Policy
from trigon.models.positions import prompt_positions
from trigon.parity import ParityCheck
from trigon.report.reporter import Reporter
from trigon.rewards.pool import RewardPool
from trigon.rollout.protocol import RolloutEngine
from trigon.training.local import LocalScorer, LocalTrainEngine
from trigon.training.optim import Schedule
from trigon.training.protocol import TrainEngine
from trigon.training.step import LossTerms, Positions
from trigon.types import Prompt, SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXACT_PARITY_TOLERANCE = 1e-3
"""Mean |log-prob difference| tolerated where both engines compute in float32; they agree to about 1e-5."""
ROUNDED_PARITY_TOLERANCE = 0.1
"""The same where either computes in 16 bits; healthy runs lie near 0.01."""


def run_folder(config: Config) -> Path:
    """Return the folder of a run: its checkpoints, metrics and rollouts."""
    trainer = config.trainer
    return Path(trainer.save_checkpoint_path or Path("checkpoints") / trainer.project_name / trainer.experiment_name)


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


def choose_device(config: Config) -> torch.device:
    """Return the device to train on. On the CPU, kernels are made deterministic: same seed, same numbers."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch sees no GPU here; set trainer.device=cpu, or install CUDA torch"
        )
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory before writing it
    return device


def run_training(
    config: Config,
    *,
    warnings: Sequence[str],
    should_stop: Callable[[], bool],
    export_to: Path | None,
) -> None:
    """Train as configured, from an empty folder or from where the last run stopped, and report the end.

    should_stop: asked after each step; True saves and ends the run. export_to: where to write the last checkpoint as a Hugging Face
    model; None: nowhere.
    Raises: TrigonError, before the slow parts are built where that is possible.
    """
    with ExitStack() as stack:
        device = choose_device(config)
        folder = stack.enter_context(RunFolder(run_folder(config)))
        report = stack.enter_context(Reporter(folder, open_console(config), open_sinks(config, folder)))
        for warning in warnings:
            report.warn(warning)
        rewards = open_rewards(config)
        stack.callback(rewards.close)
        store = CheckpointStore(folder.path, keep=config.trainer.save_limit, warn=report.warn)
        checkpoint = choose_checkpoint(config, store)

        processors = open_processors(config)
        builder = open_builder(config, processors)
        train_prompts = look_at_data(config, config.data.train_files, builder, report)
        val_prompts = look_at_data(config, config.data.val_files, builder, report) if config.data.val_files else None
        plan = make_plan(config, num_train_prompts=len(train_prompts))
        prompts = PromptStream(
            train_prompts,
            batch_size=config.data.rollout_batch_size,
            seed=config.data.seed,
            shuffle=config.data.shuffle,
            prefetch=True,
            num_workers=data_workers(config),
        )
        stack.callback(prompts.close)
        rewards.ready()

        with report.phase("load_model"):
            trainer = open_trainer(config, processors, plan, device)
            stack.callback(trainer.close)
            reference = open_reference(config, processors, plan, device)
        with report.phase("load_rollout"):
            rollout = open_rollout(config, processors, device)
            stack.callback(rollout.close)
        report.ledger(ledger_rows(config, plan, trainer, device))
        folder.write_config(dump_config(config))
        run = Run(
            plan=plan,
            rhythm=Rhythm(
                validate_first=config.trainer.val_before_train and val_prompts is not None,
                validate_only=config.trainer.val_only,
                validate_every=max(config.trainer.val_freq, 0),
                save_every=max(config.trainer.save_freq, 0),
                log_generations=config.trainer.val_generations_to_log,
            ),
            sampling=sampling_params(config),
            prompts=prompts,
            rollout=rollout,
            rewards=rewards,
            trainer=trainer,
            reference=reference,
            kl_in_reward=config.algorithm.kl_penalty
            if reference is not None and not config.algorithm.use_kl_loss
            else None,
            kl=initial_kl(config),
            needs_old=plan.updates_per_step > 1 or (reference is not None and not config.algorithm.use_kl_loss),
            evaluator=Evaluator(val_prompts, validation_sampling_params(config), config.data.val_batch_size),
            parity=ParityCheck(parity_tolerance(config)),
            store=store,
            save_state=partial(save_engine, trainer, config),
            report=report,
            should_stop=should_stop,
        )
        train(run, checkpoint)
