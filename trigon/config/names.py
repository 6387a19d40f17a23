"""The names that a configuration chooses between, one type alias per set.

Every layer imports them from here. Code that iterates over a set uses `typing.get_args`. This
module imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

DeviceType = Literal["cpu", "cuda"]
"""The kind of a device: torch.device.type. Some defaults depend on it (config/schema.py)."""

AdvantageEstimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "dr_grpo",
    "grpo_batch",
    "reinforce_plus_plus_baseline",
    "opo",
    "gdpo",
]
"""How rewards become advantages (algorithms/advantages.py)."""

Estimator = Literal[AdvantageEstimator, "gae"]
"""All estimators; gae needs a critic (algorithms/advantages.py)."""

SINGLE_COMPLETION_ESTIMATORS: tuple[AdvantageEstimator, ...] = ("reinforce_plus_plus", "remax")
"""Estimators that do not compare completions of a group, so that one per prompt suffices."""

GROUP_ESTIMATORS: tuple[AdvantageEstimator, ...] = tuple(
    name for name in get_args(AdvantageEstimator) if name not in (*SINGLE_COMPLETION_ESTIMATORS, "gdpo")
)
"""Estimators by which a group of equal rewards has no advantage: all that compare the completions
of a group, but for gdpo, which compares the parts of the rewards."""

PolicyLossType = Literal["default", "gspo", "gspo_token", "cispo", "sapo"]
"""The policy loss of a token (algorithms/losses.py)."""

_LOW, _HIGH, _DUAL = (f"worker.actor.clip_ratio_{bound}" for bound in ("low", "high", "dual"))

LOSS_OPTIONS: Mapping[PolicyLossType, tuple[str, ...]] = {
    "default": (_LOW, _HIGH, _DUAL),
    "gspo": (_LOW, _HIGH, _DUAL),
    "gspo_token": (_LOW, _HIGH, _DUAL),
    "cispo": (_LOW, _HIGH, "worker.actor.cispo_cap"),
    "sapo": ("worker.actor.tau_positive", "worker.actor.tau_negative"),
}
"""The options that each policy loss reads; they have no effect with the others."""

LossAveraging = Literal["token", "seq", "seq_fixed"]
"""How token losses become one loss (algorithms/reduce.py)."""

SampledKlEstimator = Literal["kl", "abs", "mse", "low_var_kl"]
"""KL estimators that need the log-probability of the sampled token only (algorithms/losses.py)."""

KlEstimator = Literal[SampledKlEstimator, "full"]
"""full: the exact KL, a sum over the whole vocabulary (models/logprobs.py)."""

CorrectionKind = Literal["truncate", "mask", "reject"]
"""How importance weights correct the train-inference mismatch (algorithms/losses.py)."""

CorrectionLevel = Literal["token", "sequence"]
"""Whether an importance weight is computed per token or per completion."""

OptimizerStrategy = Literal["adamw", "adamw_bf16"]
"""The optimizer (training/optim.py)."""

LearningRateSchedule = Literal["constant", "cosine"]
"""The learning rate after warm-up (training/optim.py)."""

LOGGERS = tuple(sorted(file.stem for file in (Path(__file__).parents[1] / "report" / "loggers").glob("[a-z]*.py")))
"""The loggers besides the console and the run folder; each is a file."""

if TYPE_CHECKING:
    Sink = str
else:
    Sink = Literal["console", "file", *LOGGERS]

WatchLevel = Literal["off", "warn", "stop"]
"""What is done when a rule of the watchers finds something (report/watch.py)."""

WatchRule = Literal[
    "loss", "kl", "entropy", "length", "equal_rewards", "reward_failures", "mismatch", "validation", "critic", "memory"
]
"""A rule of the watchers."""

Dtype = Literal["fp32", "bf16", "fp16"]
"""A floating-point format; models/dtypes.py has the torch dtypes."""

DTYPE_ALIASES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Longer names that are accepted as well."""

ToolFormat = Literal["hermes", "llama3_json", "qwen3_xml"]
"""How a model writes the call of a tool."""

ObservationRole = Literal["user", "tool"]
"""The role of the messages in which a model sees what an environment or a tool returned."""

BUILT_IN_TOOLS: tuple[str, ...] = ("crop", "python")
"""The tools that need no file."""

ShippedReward = Literal["math", "r1v", "dapo", "counting", "geoqa", "vqa", "android_gui", "environment"]
"""Reward functions in rewards/verifiers, which need no file."""

SHIPPED_REWARDS: tuple[str, ...] = get_args(ShippedReward)
