"""Critics on tiny real models, and groups for them to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from support.engines import CONFIG, CPU, ONE_ROW, make_engine, plan_for, to_train
from support.models import processors_of
from trigon.config.options import with_options
from trigon.config.schema import Config, LoraConfig
from trigon.models.features import VisionFeatureCache
from trigon.models.load import load_model
from trigon.models.lora import add_lora
from trigon.models.value import ActorCritic, ValueModel
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.device_memory import Placement
from trigon.training.fsdp import TorchProcessGroup, open_sharded
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import Sharding, SingleProcess
from trigon.types import RolloutGroup, TrainGroup


def critic_config(*, averaging: str = "token", strategy: str = "adamw", trunk: float | None = None) -> Config:
    """Return the configuration of a run with a critic. trunk: its coefficient on a shared trunk."""
    options: dict[str, object] = {
        "algorithm.adv_estimator": "gae",
        "worker.critic.loss_avg_mode": averaging,
        "worker.critic.optim.strategy": strategy,
    }
    if trunk is not None:
        options |= {"worker.critic.share_trunk": True, "worker.critic.vf_coef": trunk}
    return with_options(CONFIG, options)


def make_value_model(
    folder: Path,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    head_seed: int | None = 0,
    freeze: bool = False,
) -> ValueModel:
    """Return the value model of a model folder. head_seed: of a random head; None: zeros."""
    loaded = load_model(str(folder), dtype=dtype, device=device)
    model = ValueModel(loaded, processors_of(folder).family, temperature=1.0, banned_token_ids=())
    if freeze:
        model.freeze_vision_tower()
    if lora_rank:
        add_lora(model.model, LoraConfig(rank=lora_rank, alpha=2 * lora_rank), seed=0)
        model.train_head()
    if head_seed is not None and device.type != "meta":
        set_head(model.model.lm_head, head_seed)
    return model


def set_head(head: torch.nn.Linear, seed: int) -> None:
    """Make the weights of a head random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.5)


def make_critic(
    folder: Path,
    *,
    max_tokens: int = ONE_ROW,
    sharding: Sharding | None = None,
    dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    strategy: str = "adamw",
    averaging: str = "token",
    offload: bool = False,
    freeze: bool = False,
    ranks_per_row: int = 1,
    features: VisionFeatureCache | None = None,
    before_use: Callable[[], object] = lambda: None,
) -> LocalCriticEngine:
    """Return the critic of a model folder; with sharding, one rank of the default process group."""

    def make(device: torch.device, *, as_stored: bool = False) -> ValueModel:
        return make_value_model(folder, device=device, dtype=dtype, lora_rank=lora_rank, freeze=freeze)

    process_group = SingleProcess() if sharding is None else TorchProcessGroup(CPU)
    model = make(CPU) if sharding is None else open_sharded(make, process_group, sharding, CPU)
    if isinstance(process_group, TorchProcessGroup) and ranks_per_row > 1:
        model.use_row_ranks(process_group.row_ranks(ranks_per_row))
    return LocalCriticEngine(
        model,
        with_options(
            critic_config(averaging=averaging, strategy=strategy), {"worker.critic.model.lora.rank": lora_rank}
        ),
        plan_for(max_tokens),
        Placement(
            device=CPU,
            compute_dtype=dtype if sharding is None else None,
            offload_params=offload,
            offload_optimizer=offload,
            process_group=process_group,
        ),
        features=(features or VisionFeatureCache(2**20)) if freeze else None,
        before_use=before_use,
    )


def make_trunk(
    folder: Path,
    *,
    coefficient: float = 0.5,
    head_seed: int | None = 0,
    averaging: str = "token",
    sharding: Sharding | None = None,
    max_tokens: int = ONE_ROW,
    **options: object,
) -> tuple[LocalTrainEngine, LocalTrunkCritic]:
    """Return the engine of a policy with a value head, and the critic that is this head.

    coefficient: of the value loss in the trunk's gradient. options: of make_engine.
    """
    config = critic_config(averaging=averaging, trunk=coefficient)
    trainer = make_engine(
        folder,
        config=config,
        model_class=ActorCritic,
        prepare=lambda policy: None if head_seed is None else set_head(policy.value_head, head_seed),
        sharding=sharding,
        max_tokens=max_tokens,
        **options,
    )
    critic = LocalTrunkCritic(
        trainer.policy,
        config,
        plan_for(max_tokens),
        Placement(
            device=CPU,
            compute_dtype=torch.float32 if sharding is None else None,
            process_group=SingleProcess() if sharding is None else TorchProcessGroup(CPU),
        ),
        trainer=trainer,
    )
    return trainer, critic


def to_learn(rollouts: Sequence[RolloutGroup], *, masked: Sequence[tuple[int, int]] = ()) -> list[TrainGroup]:
    """Return the groups with values of 0 before the update, and a return for each completion."""
    return [
        replace(
            group,
            sequences=tuple(
                replace(
                    sequence,
                    values=torch.zeros_like(sequence.advantages),
                    returns=torch.linspace(-1.0, index + 0.5, len(sequence.advantages)),
                )
                for index, sequence in enumerate(group.sequences)
            ),
        )
        for group in to_train(rollouts, masked=masked)
    ]


def flat(values: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return all numbers of all completions."""
    return torch.cat([each for group in values for each in group])
