"""Train engines on tiny real models, and groups to train on.

Engines run in a single process or as one of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from support.models import processors_of
from support.options import with_short
from support.oracle import make_group, make_prompt
from trigon.config.options import with_options
from trigon.config.plan import ModelPlan
from trigon.config.schema import Config, LoraConfig
from trigon.models.features import VisionFeatureCache
from trigon.models.kernels import Kernel
from trigon.models.load import load_model
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.models.weight_files import stored_dtype
from trigon.training.device_memory import Placement
from trigon.training.fsdp import MakePolicy, TorchProcessGroup, open_sharded
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import Sharding, SingleProcess
from trigon.training.scorer import LocalScorer
from trigon.training.state import ShardedFiles
from trigon.types import RolloutGroup, TrainGroup, TrainSequence

ONE_ROW = 1_000_000
CPU = torch.device("cpu")
OPTIM = {"lr": 1e-3}
CONFIG = Config(data={"max_response_length": 16}, worker={"actor": {"optim": OPTIM}, "critic": {"optim": OPTIM}})


def with_loss(config: Config = CONFIG, /, **options: object) -> Config:
    """Return a configuration with options of algorithm and worker.actor, by their last names."""
    return with_short(config, options)


FULL_KL = with_loss(use_kl_loss=True, kl_penalty="full", kl_coef=0.3)
KL = with_loss(use_kl_loss=True, kl_penalty="low_var_kl", kl_coef=0.1)


def plan_for(max_tokens: int, *, warmup_updates: int = 0) -> ModelPlan:
    """Return the plan of a model. max_tokens: of every packed row."""
    return ModelPlan(
        total_updates=100,
        warmup_updates=warmup_updates,
        tokens_per_update_pass=max_tokens,
        tokens_per_experience_pass=max_tokens,
    )


def make_engine(
    folder: Path,
    *,
    config: Config = CONFIG,
    strategy: str = "adamw",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    max_tokens: int = ONE_ROW,
    freeze: bool = False,
    checkpointing: bool = False,
    offloads_activations: bool = False,
    warmup_updates: int = 0,
    lora_rank: int = 0,
    sharding: Sharding | None = None,
    compared_with: Path | None = None,
    vision_cache_bytes: int = 2**20,
    logprob_chunk: int = 1024,
    offload: bool = False,
    sequence_parallel_size: int = 1,
    kernel: Kernel = "sdpa",
    model_class: type[Policy] = Policy,
    prepare: Callable[[Policy], object] = lambda policy: None,
) -> LocalTrainEngine:
    """Return the engine of a model folder.

    Args:
        dtype: of the weights.
        compute_dtype: of the forward pass; None for dtype. With sharding it is
        sharding.param_dtype.
        sharding: None for a single process; otherwise this process is a rank of the default process
        group.
        compared_with: model folder of the reference of the full KL.
        vision_cache_bytes: size of the feature cache, for a frozen vision tower.
        offloads_activations: keep the inputs of checkpointed layers in host memory.
        offload: move weights and optimizer states to the CPU while they are not in use.
        sequence_parallel_size: consecutive ranks that compute every row together.
        prepare: called with the policy when it has weights.
    """
    processors = processors_of(folder)

    def open_policy(folder: Path, device: torch.device, *, as_stored: bool = False) -> Policy:
        stored = stored_dtype(folder) if as_stored else None
        return model_class(
            load_model(str(folder), dtype=dtype if stored is None else stored, device=device, attention_kernel=kernel),
            processors.family,
            temperature=0.7,
            banned_token_ids=processors.banned_token_ids,
            logprob_chunk=logprob_chunk,
        )

    def make_policy(device: torch.device, *, as_stored: bool = False) -> Policy:
        policy = open_policy(folder, device, as_stored=as_stored)
        if freeze:
            policy.freeze_vision_tower()
        if lora_rank:
            add_lora(policy.model, LoraConfig(rank=lora_rank, alpha=2 * lora_rank), seed=0)
        if checkpointing or offloads_activations:
            policy.enable_gradient_checkpointing(offload=offloads_activations)
        if device.type != "meta":
            prepare(policy)
        return policy

    process_group = SingleProcess() if sharding is None else TorchProcessGroup(CPU)

    ranks = None
    if isinstance(process_group, TorchProcessGroup) and sequence_parallel_size > 1:
        ranks = process_group.row_ranks(sequence_parallel_size)

    def place(make: MakePolicy) -> Policy:
        policy = make(CPU) if sharding is None else open_sharded(make, process_group, sharding, CPU)
        if ranks is not None:
            policy.use_row_ranks(ranks)
        return policy

    placement = Placement(
        device=CPU,
        compute_dtype=(compute_dtype or dtype) if sharding is None else None,
        offload_params=offload,
        offload_optimizer=offload,
        process_group=process_group,
    )
    reference = None
    if compared_with is not None:
        reference = LocalScorer(place(partial(open_policy, compared_with)), placement, max_tokens=max_tokens)
    policy = place(make_policy)
    return LocalTrainEngine(
        policy,
        with_options(config, {"worker.actor.optim.strategy": strategy, "worker.actor.model.lora.rank": lora_rank}),
        plan_for(max_tokens, warmup_updates=warmup_updates),
        placement,
        reference=reference,
        features=VisionFeatureCache(vision_cache_bytes) if policy.has_frozen_vision else None,
    )


def make_rollouts(folder: Path, *, seed: int = 0, images: bool = True) -> list[RolloutGroup]:
    """Return three groups of three completions.

    Two prompts have an image each, the third is text only.
    images: False for text only in all groups, as for a family without vision.
    """
    processors = processors_of(folder)
    has_images = images and processors.family.has_vision
    return [
        make_group(make_prompt(processors, [(4, 6)] if has_images else [], seed=seed + 1), [3, 7, 1], seed=seed + 11),
        make_group(make_prompt(processors, [(4, 4)] if has_images else [], seed=seed + 2), [5, 2, 4], seed=seed + 12),
        make_group(make_prompt(processors, [], seed=seed + 3), [6, 3, 2], seed=seed + 13),
    ]


def to_train(
    rollouts: Sequence[RolloutGroup],
    *,
    advantages: Sequence[float] = (1.0, -0.75, 0.25),
    masked: Sequence[tuple[int, int]] = (),
    old: Sequence[Sequence[Tensor]] | None = None,
    ref: Sequence[Sequence[Tensor]] | None = None,
) -> list[TrainGroup]:
    """Return the groups with advantages[i] for completion i.

    masked: (group, completion) without trainable tokens.
    """
    return [
        TrainGroup(
            group.prompt,
            tuple(
                TrainSequence(
                    token_ids=rollout.completion.token_ids,
                    loss_mask=torch.full((length,), float((g, i) not in masked)),
                    advantages=torch.full((length,), advantages[i]),
                    sampling_logprobs=torch.full((length,), -6.5),
                    old_logprobs=None if old is None else old[g][i],
                    ref_logprobs=None if ref is None else ref[g][i],
                    routed_experts=rollout.completion.routed_experts,
                )
                for i, rollout in enumerate(group.rollouts)
                for length in [len(rollout.completion.token_ids)]
            ),
        )
        for g, group in enumerate(rollouts)
    ]


def weights_of(engine: LocalTrainEngine) -> dict[str, Tensor]:
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in engine.weights().read()}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the full tensors of a folder that any number of ranks wrote."""
    files = ShardedFiles(folder)
    return {name: files.read(name) for name in files.tensors}
