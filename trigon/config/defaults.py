"""Values of options that are null in schema.py: their defaults depend on the device or on options.

Each function returns the configured value, or the default where the option is null. Constants of
the run that no option changes are here too. Does not depend on torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trigon.config.batch_sizes import resolve_prompts_per_step
from trigon.config.names import CorrectionKind, DeviceType, Dtype, ObservationRole
from trigon.config.schema import Config
from trigon.system.resuming import SameCommand

# -- defaults that depend on the device -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """The defaults of options that are null in schema.py because they depend on the device.

    The metadata of a field names its option.
    """

    max_num_seqs: int = field(metadata={"option": "worker.rollout.max_num_seqs"})
    enable_chunked_prefill: bool = field(metadata={"option": "worker.rollout.enable_chunked_prefill"})
    auto_micro_batch: bool = field(metadata={"option": "trainer.auto_micro_batch"})


DEVICE_DEFAULTS: Mapping[DeviceType, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        # vLLM's own value for an engine that is started as Trigon starts it.
        max_num_seqs=128,
        # vLLM 0.32 fails there at a seeded request whose prompt it has split.
        enable_chunked_prefill=False,
        # The memory of a machine is seldom the limit, and a run that measures it takes longer.
        auto_micro_batch=False,
    ),
    "cuda": DeviceDefaults(
        # Decoding is limited by the bandwidth of the memory: one pass takes about as long for many
        # sequences as for few. vLLM's own value for offline sampling on a GPU of 70 GiB or more.
        max_num_seqs=1024,
        # vLLM warns that without it the engine may crash or give wrong results.
        enable_chunked_prefill=True,
        # FSDP gathers the weights for each pass, so that passes should be as large as fits.
        auto_micro_batch=True,
    ),
}


def options_by_device() -> dict[str, dict[DeviceType, Any]]:
    """Return the default on each device of every option whose default depends on it, by name."""
    return {
        each.metadata["option"]: {device: getattr(defaults, each.name) for device, defaults in DEVICE_DEFAULTS.items()}
        for each in fields(DeviceDefaults)
    }


def resolve_max_num_seqs(config: Config, device: DeviceType) -> int:
    """Return the maximum number of sequences that vLLM computes at a time."""
    return config.worker.rollout.max_num_seqs or DEVICE_DEFAULTS[device].max_num_seqs


def resolve_enable_chunked_prefill(config: Config, device: DeviceType) -> bool:
    """Return whether vLLM is asked to split long prompts over several batches."""
    configured = config.worker.rollout.enable_chunked_prefill
    return DEVICE_DEFAULTS[device].enable_chunked_prefill if configured is None else configured


def resolve_auto_micro_batch(config: Config, device: DeviceType) -> bool:
    """Return whether token budgets are measured before the first step."""
    configured = config.trainer.auto_micro_batch
    return DEVICE_DEFAULTS[device].auto_micro_batch if configured is None else configured


# -- defaults that depend on other options --------------------------------------------------------

WEIGHT_DTYPE: Dtype = "fp32"
"""Default of worker.actor.fsdp.torch_dtype without LoRA."""

REFERENCE_DTYPE: Dtype = "bf16"
"""Default of worker.ref.fsdp.torch_dtype."""

FP32_PARITY_TOLERANCE = 1e-3
"""Default of worker.rollout.parity_tolerance in nats where engine and trainer compute in float32.

They then agree to about 1e-5.
"""

LOW_PRECISION_PARITY_TOLERANCE = 0.1
"""Default of worker.rollout.parity_tolerance in nats where either computes in 16 bits.

Healthy runs stay near 0.01.
"""

PIXEL_CACHE_BYTES = 4 * 2**30
"""Host memory of each worker's cache of processed images, by which a step processes each once."""


def resolve_run_folder(config: Config) -> Path:
    """Return the folder of the run, which holds its checkpoints, metrics and rollouts.

    Default: checkpoints/project_name/experiment_name.
    """
    trainer = config.trainer
    return Path(trainer.save_checkpoint_path or Path("checkpoints") / trainer.project_name / trainer.experiment_name)


def resolve_same_command(config: Config) -> SameCommand:
    """Return which command goes on with the run, for messages."""
    trainer = config.trainer
    finds_last = trainer.find_last_checkpoint and trainer.load_checkpoint_path is None
    return SameCommand(resolve_run_folder(config), finds_last, saves_weights_only=trainer.save_model_only)


def resolve_weight_dtype(config: Config) -> Dtype:
    """Return the format in which the policy's weights are stored and updated.

    Default with LoRA, whose base model is not updated: the format of the forward pass, to which
    each pass would round the weights anyway.
    """
    fsdp, lora = config.worker.actor.fsdp, config.worker.actor.model.lora
    return fsdp.torch_dtype or (fsdp.mp_param_dtype if lora.rank > 0 else WEIGHT_DTYPE)


def resolve_reference_dtype(config: Config) -> Dtype:
    """Return the format in which the reference stores its weights and computes."""
    return config.worker.ref.fsdp.torch_dtype or REFERENCE_DTYPE


def resolve_parity_tolerance(config: Config) -> float:
    """Return the mean |log-probability difference| in nats above which the run stops.

    It compares rollout engine and trainer on the same tokens.
    """
    rollout, fsdp = config.worker.rollout, config.worker.actor.fsdp
    if rollout.parity_tolerance is not None:
        return rollout.parity_tolerance
    all_fp32 = rollout.dtype == fsdp.mp_param_dtype == resolve_weight_dtype(config) == "fp32"
    return FP32_PARITY_TOLERANCE if all_fp32 else LOW_PRECISION_PARITY_TOLERANCE


def resolve_cispo_cap(config: Config) -> float:
    """Return the largest weight that CISPO gives a token. Default: 1 + clip_ratio_high."""
    actor = config.worker.actor
    return 1.0 + actor.clip_ratio_high if actor.cispo_cap is None else actor.cispo_cap


def resolve_loss_fixed_length(config: Config) -> int:
    """Return the tokens by which loss_avg_mode=seq_fixed divides. Default: max_response_length."""
    return config.worker.actor.loss_fixed_length or config.data.max_response_length


def resolve_mismatch_correction(config: Config) -> Literal["off", CorrectionKind]:
    """Return the importance-sampling correction. Default: truncate where weights may be older."""
    configured = config.algorithm.mismatch_correction
    if configured is not None:
        return configured
    may_be_older = config.worker.rollout.oversampling > 0 or config.algorithm.max_staleness > 0
    return "truncate" if may_be_older else "off"


def resolve_observation_role(config: Config) -> ObservationRole:
    """Return the role of the messages with observations. Default: tool for tools, else user."""
    rollout = config.worker.rollout
    return rollout.observation_role or ("tool" if rollout.tools and rollout.environment is None else "user")


def resolve_val_before_train(config: Config) -> bool:
    """Return whether the run validates before its first step. Default: if there are val_files."""
    configured = config.trainer.val_before_train
    return bool(config.data.val_files) if configured is None else configured


def resolve_prompts_per_round(config: Config) -> int:
    """Return the prompts of a round of online filtering. Default: data.rollout_batch_size."""
    return config.data.mini_rollout_batch_size or resolve_prompts_per_step(config)
