"""Measured memory of optimizers and updates is what is computed; the host waits for no GPU."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from support.engines import to_train
from support.gpu import Figures, Machine, host_waits
from trigon.assemble.data import open_processors
from trigon.assemble.models import DevicePlacement, choose_device, open_models
from trigon.config.plan import make_plan
from trigon.config.schema import Config, OptimConfig
from trigon.models.activation_memory import Pass
from trigon.models.attention import configured_kernel
from trigon.models.sizes import GroupLengths, dimensions_of
from trigon.system.terminal import format_bytes
from trigon.training import optim
from trigon.training.budget import Lengths, dummy_group
from trigon.training.device_memory import memory_of
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import SingleProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

OPTIMIZER_TOLERANCE = 0.05
"""Relative error of computed bytes: the allocator rounds up; each tensor has a step count."""
PASS_TOLERANCE = 0.15
"""Relative error of the computed memory of a pass."""
LAYERS = 4
FEW, MANY = 2, 8
"""Micro-batches of the two updates that are compared; one group is a micro-batch."""
MORE_WAITS = 2
"""Additional waits of the update with MANY micro-batches that are accepted."""


def optimizer_memory(machine: Machine, strategy: str) -> Figures:
    """Measure states and temporaries on a few layers and the embedding of Qwen2.5-VL-3B."""
    from random_models import MODELS

    device = torch.device(machine.device)
    shape = MODELS["3b" if machine.on_gpu else "tiny"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    layer = [(width, width), (width, inner), (inner, width), (width,)]
    dtype = torch.bfloat16 if strategy == "adamw_bf16" else torch.float32
    # The largest comes last: its temporaries are then added to the states of all others.
    sizes = [*(layer * 4), (shape["vocab_size"], width)]
    parameters = [nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = optim.make_optimizer(parameters, OptimConfig(strategy=strategy, lr=1e-3))
    states = sum(optim.state_bytes(parameter, strategy) for parameter in parameters)
    temporaries = optim.update_bytes(parameters, strategy)
    memory = memory_of(device, shared_by=1)
    first, second = memory.peak_bytes(optimizer.step), memory.peak_bytes(optimizer.step)
    figures = Figures()
    figures["first update"] = f"{format_bytes(first)}, computed {format_bytes(states + temporaries)}"
    figures["further updates"] = f"{format_bytes(second)}, computed {format_bytes(temporaries)}"
    error = abs(first - (states + temporaries)) / (states + temporaries)
    figures.at_most("error of the first", error, OPTIMIZER_TOLERANCE)
    # Relative to the weights, since computed bytes may be 0.
    weights = sum(parameter.nbytes for parameter in parameters)
    figures.at_most("error of the others", abs(second - temporaries) / weights, OPTIMIZER_TOLERANCE)
    return figures


@pytest.mark.parametrize("strategy", ["adamw", "adamw_bf16"])
def test_the_memory_of_an_optimizer_is_what_is_computed(measure, strategy):
    measure(optimizer_memory, strategy)


def update(machine: Machine) -> Figures:
    """Measure updates of few and of many micro-batches.

    The host waits about equally often in both: a wait in each micro-batch leaves the GPU idle.
    """
    from random_models import make_groups

    figures = Figures()
    trainer = open_trainer(machine)
    groups = make_groups(trainer.policy.model.config, MANY, 1.0 if machine.on_gpu else 0.1, seed=0)
    train_groups = to_train(groups, advantages=(1.0, -1.0, 1.0, -1.0, 1.0))
    longest = max(len(g.prompt.token_ids) + sum(len(r.completion.token_ids) for r in g.rollouts) for g in groups)
    trainer.use_budgets(update_max_tokens=longest, score_max_tokens=longest)
    compare_pass(figures, trainer, torch.device(machine.device))
    trainer.step(train_groups)  # makes the optimizer's states, and compiles kernels
    for count in (FEW, MANY):
        if machine.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        metrics = trainer.step(train_groups[:count])
        if machine.on_gpu:
            torch.cuda.synchronize()
            figures[f"peak memory with {count} groups"] = format_bytes(torch.cuda.max_memory_allocated())
        seconds = time.monotonic() - start
        figures[f"tokens/s with {count} groups"] = f"{metrics['actor/packed_tokens'].value / seconds:.0f}"
    if machine.on_gpu:
        few, many = (host_waits(partial(trainer.step, train_groups[:count])) for count in (FEW, MANY))
        places = Counter(many).most_common(12)
        figures[f"waits with {MANY} micro-batches"] = "; ".join(f"{count} x {place}" for place, count in places)
        figures.at_most(f"waits more than with {FEW}", float(len(many) - len(few)), MORE_WAITS)
    return figures


def test_an_update_has_the_computed_memory_and_no_wait_for_each_micro_batch(measure):
    measure(update)


def compare_pass(figures: Figures, trainer: LocalTrainEngine, device: torch.device) -> None:
    """Compare the memory of an update pass over one group with the arithmetic of activations.py."""
    policy = trainer.policy
    config, family = policy.model.config, policy.family
    dimensions = dimensions_of(config)
    assert dimensions is not None, "the family of the random model is counted"
    prompt, response, image_tokens = (450, 275, 340) if device.type == "cuda" else (100, 40, 64)
    pixels = image_tokens * (family.patch_size(config) * family.spatial_merge(config)) ** 2
    group = dummy_group(policy, Lengths(prompt, response, pixels, 0, 0), num_completions=5)
    with trainer.dry_run_updates() as dry_run:
        dry_run([group])  # the gradients that the second pass adds to
        measured = memory_of(device, shared_by=1).peak_bytes(partial(dry_run, [group]))
    bytes_per_value = policy.model.dtype.itemsize
    computed = (
        Pass(
            model=dimensions,
            groups=[GroupLengths.of(group.prompt, group.sequences)],
            weight=bytes_per_value,
            compute=bytes_per_value,
            checkpointing=True,
            trains_weights=True,
            trains_vision=True,
            kernel=configured_kernel(family.language_model(policy.model).config),
            chunk_rows=policy.logprob_chunk,
            tied=config.tie_word_embeddings,
            on_cpu=device.type == "cpu",
        )
        .update_bytes()
        .total
    )
    figures["memory of a pass"] = f"{format_bytes(measured)}, computed {format_bytes(computed)}"
    figures.at_most("error of the computed memory", abs(measured - computed) / measured, PASS_TOLERANCE)


def open_trainer(machine: Machine) -> LocalTrainEngine:
    """Load a Qwen2.5-VL-3B with few layers in bfloat16, with its optimizer, as a run does.

    On the CPU a tiny model.
    """
    from random_models import MODELS, write_model

    folder = write_model(
        machine.folder / "qwen2_5_vl_few_layers",
        MODELS["3b" if machine.on_gpu else "tiny"],
        torch.device(machine.device),
        torch.bfloat16,
        max_layers=LAYERS,
    )
    actor: dict[str, Any] = {
        "model": {"model_path": str(folder)},
        "fsdp": {"torch_dtype": "bf16", "mp_param_dtype": "bf16"},
        "optim": {"strategy": "adamw_bf16"},
        "global_batch_size": MANY,
    }
    config = Config.model_validate(
        {
            "data": {"max_prompt_length": 1024, "max_response_length": 1024, "rollout_batch_size": MANY},
            "algorithm": {"disable_kl": True},
            "worker": {"actor": actor},
            "trainer": {"device": machine.device},
        }
    )
    place = DevicePlacement(choose_device(config), SingleProcess())
    trainer, *_ = open_models(config, open_processors(config), make_plan(config, num_train_prompts=MANY), place)
    return trainer
