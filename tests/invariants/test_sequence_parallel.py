"""Ranks that compute a row together get the log-probabilities and the gradients of one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from support.engines import ONE_ROW, make_engine, make_rollouts, to_train, with_loss
from support.models import processors_of
from trigon.algorithms.reduce import count_denominators
from trigon.data.packing import by_owner, pack_train
from trigon.models.policy import Policy, full_tensor
from trigon.models.positions import positions_of
from trigon.training.parallel import Sharding
from trigon.training.step import PolicyLoss
from trigon.types import RoutedExperts, TrainGroup

pytestmark = pytest.mark.extended

FULL = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=False
)
ENTROPY_LOSS = with_loss(entropy_coeff=0.1)
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Task:
    """Score groups, and compute the gradient of an update on them.

    rows: the groups of each row, one row for each share of ranks. ranks_per_row: 1: this process.
    """

    model: Path
    rows: tuple[tuple[int, ...], ...]
    ranks_per_row: int
    images: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.rows) * self.ranks_per_row


def compute(task: Task) -> bytes:
    """Return log-probabilities, entropies and gradients by name, as safetensors."""
    torch.use_deterministic_algorithms(True)
    is_split = task.ranks_per_row > 1
    engine = make_engine(
        task.model,
        sharding=FULL if is_split else None,
        sequence_parallel_size=task.ranks_per_row,
        config=ENTROPY_LOSS,
        **task.options,
    )
    processors = processors_of(task.model)
    rollouts = make_rollouts(task.model, images=task.images)
    groups = to_train(rollouts)
    if engine.policy.num_experts:
        engine.policy.replays_routing = True
        groups = [with_experts(engine.policy, group, seed) for seed, group in enumerate(groups)]
    denominators = count_denominators(part.loss_mask for group in groups for part in group.sequences)
    result: dict[str, Tensor] = {}
    for row in [task.rows[dist.get_rank() // task.ranks_per_row]] if is_split else task.rows:
        [batch] = pack_train(
            [groups[index] for index in row],
            max_tokens=ONE_ROW,
            positions=positions_of(processors.family, processors.hf_config),
        )
        recorded: list[Tensor] = []
        PolicyLoss(engine.policy, ENTROPY_LOSS, nullcontext, reference=None).backward(
            batch,
            denominators,
            run_dummy_vision=task.images,
            gradient_scale=float(task.ranks) if is_split else 1.0,
            recorded=recorded,
        )
        for name, tokens in zip(("logprobs", "entropy"), recorded[0], strict=True):
            for (place, number), own in by_owner([batch], [tokens]).items():
                result[f"{name}/{row[place]}/{number}"] = own.clone()
    for name, parameter in engine.policy.named_parameters():
        if parameter.grad is not None:
            result[f"gradient/{name}"] = full_tensor(parameter.grad).contiguous()
    return save(result)


def with_experts(policy: Policy, group: TrainGroup, seed: int) -> TrainGroup:
    """Return a group with random experts as the record of a rollout engine."""
    config, generator = policy.model.config.get_text_config(), torch.Generator().manual_seed(seed)

    def choose(num_tokens: int) -> Tensor:
        scores = torch.rand(num_tokens, config.num_hidden_layers, config.num_experts, generator=generator)
        return scores.topk(config.num_experts_per_tok).indices.short()

    prompt = choose(len(group.prompt.token_ids))
    sequences = (
        replace(part, routed_experts=RoutedExperts(prompt, choose(len(part.token_ids)))) for part in group.sequences
    )
    return replace(group, sequences=tuple(sequences))


# The models have four heads and two key heads, each of which two of four ranks need.
TWO = ((2, 0, 1),)  # all groups in one row
FOUR = ((2,), (0, 1))  # two ranks for each of two rows, one of which has no images
LORA = {"lora_rank": 2, "freeze": True}


@pytest.mark.long(cases=["qwen2_5_vl, two rows of 2, lora, frozen tower", "qwen3_vl on 4, lora, offloaded inputs"])
@pytest.mark.parametrize(
    ("model", "rows", "ranks_per_row", "options"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "qwen2_5_vl on 2": ("qwen2_5_vl", TWO, 2, {"checkpointing": True}),
            "qwen2_5_vl on 4, fewer key heads": ("qwen2_5_vl", TWO, 4, {}),
            "qwen2_5_vl, two rows of 2, lora, frozen tower": ("qwen2_5_vl", FOUR, 2, LORA),
            "qwen3_vl on 2, frozen tower": ("qwen3_vl", TWO, 2, {"freeze": True}),
            "qwen3_vl, two rows of 2": ("qwen3_vl", FOUR, 2, {}),
            "qwen3_vl on 4, lora, offloaded inputs": (
                "qwen3_vl",
                TWO,
                4,
                {"lora_rank": 2, "offloads_activations": True},
            ),
            "llava_onevision on 2": ("llava_onevision", TWO, 2, {}),
            "qwen3_5 on 2": ("qwen3_5", TWO, 2, {"checkpointing": True}),
            "qwen3_5, two rows of 2, lora, frozen tower": ("qwen3_5", FOUR, 2, LORA),
            "qwen3_next on 2, router replay": ("qwen3_next", TWO, 2, {"checkpointing": True}),
            "qwen3_vl_moe on 2, router replay": ("qwen3_vl_moe", TWO, 2, {}),
            "gemma3 on 2": ("gemma3", TWO, 2, {"checkpointing": True}),
            "gemma3, two rows of 2, lora, frozen tower": ("gemma3", FOUR, 2, LORA),
            "gemma4 on 2": ("gemma4", TWO, 2, {"checkpointing": True}),
            "gemma4, two rows of 2, lora, frozen tower": ("gemma4", FOUR, 2, LORA),
            "mistral3 on 2": ("mistral3", TWO, 2, {}),
            "idefics3 on 2": ("idefics3", TWO, 2, {}),
            "qwen3 on 2": ("qwen3", TWO, 2, {}),
            "qwen3 on 4": ("qwen3", TWO, 4, {"checkpointing": True}),
        }.items()
    ],
)
def test_ranks_that_compute_a_row_together_get_what_one_process_gets(
    processes, tiny_model, model, rows, ranks_per_row, options
):
    task = Task(tiny_model(model), rows, ranks_per_row, images=model not in ("qwen3", "qwen3_next"), options=options)
    results = [load(result) for result in processes.run(compute, task, ranks=task.ranks)]
    expected = load(compute(replace(task, ranks_per_row=1)))
    actual = {name: tensor for result in results for name, tensor in result.items()}
    assert actual.keys() == expected.keys()
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name.startswith("gradient/"))
    for result in results:  # every rank of a row has the results of the complete row
        for name, tensor in result.items():
            scale = largest if name.startswith("gradient/") else 1.0
            assert (tensor - expected[name]).abs().max() <= TOLERANCE * scale, name
