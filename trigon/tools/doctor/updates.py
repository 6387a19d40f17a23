"""An update of a random model: its speed, its memory, and how often it waits for the GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trigon.assemble.data import open_processors
from trigon.assemble.models import DevicePlacement, choose_device, open_models
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.models.activations import PassFormat, PassOptions, RowLengths, update_bytes
from trigon.models.attention import configured_kernel
from trigon.models.sizes import dimensions_of
from trigon.tools.doctor.random_models import COMPLETIONS, MODELS, make_groups, write_model
from trigon.tools.doctor.result import Findings, Setting, Tolerances, bytes_text
from trigon.training.dry_run import dummy_group
from trigon.training.host_waits import host_waits
from trigon.training.local import LocalTrainEngine
from trigon.training.memory import memory_of
from trigon.training.parallel import SingleProcess
from trigon.types import RolloutGroup, TrainGroup, TrainSequence

LAYERS = 4
FEW, MANY = 2, 8
"""Micro-batches of the two updates that are compared; one group is a micro-batch."""
PASS_TOLERANCE = 0.15
"""Relative error of the computed memory of a pass."""
MORE_WAITS = 2
"""Additional waits of the update with MANY micro-batches that are accepted."""
SHOWN_PLACES = 12


def measure_updates(setting: Setting) -> Findings:
    """See training.check_update."""
    on_gpu = setting.device == "cuda"
    compared = Tolerances(setting)
    device = torch.device(setting.device)
    trainer = open_trainer(setting)
    groups = make_groups(trainer.policy.model.config, MANY, 1.0 if on_gpu else 0.1, seed=0)
    train_groups = to_train(groups)
    longest = max(len(g.prompt.token_ids) + sum(len(r.completion.token_ids) for r in g.rollouts) for g in groups)
    trainer.use_budgets(update_max_tokens=longest, score_max_tokens=longest)
    _compare_pass(compared, trainer, device)
    trainer.step(train_groups)  # makes the optimizer's states, and compiles kernels
    seconds, peaks = [], []
    for count in (FEW, MANY):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        metrics = trainer.step(train_groups[:count])
        if on_gpu:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
        seconds.append(time.monotonic() - start)
        compared.figures[f"micro-batches of {count} groups"] = f"{metrics['actor/micro_batches'].value:.0f}"
        compared.figures[f"seconds with {count} groups"] = f"{seconds[-1]:.3f}"
    tokens = metrics["actor/packed_tokens"].value
    compared.figures["tokens/s, prompts once"] = f"{tokens / seconds[-1]:.0f}"
    if not on_gpu:
        return compared.findings(notes=("waits and memory are measured on a GPU only",))
    sizes = trainer.sizes()
    resident = sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes
    compared.figures["peak memory"] = f"{bytes_text(max(peaks))}, {bytes_text(resident)} without activations"
    few, many = (host_waits(partial(trainer.step, train_groups[:count])) for count in (FEW, MANY))
    compared.figures[f"waits with {FEW} micro-batches"] = str(len(few))
    compared.at_most(f"additional waits with {MANY}", float(len(many) - len(few)), MORE_WAITS)
    places = Counter(many)
    text = "\n".join(f"{count:>4} x {place}" for place, count in places.most_common(SHOWN_PLACES))
    return compared.findings(text=f"waits of an update of {MANY} micro-batches:\n{text}")


def _compare_pass(compared: Tolerances, trainer: LocalTrainEngine, device: torch.device) -> None:
    """Compare the memory of an update pass over one group with the arithmetic of activations.py."""
    policy = trainer.policy
    config, family = policy.model.config, policy.family
    dimensions = dimensions_of(config)
    assert dimensions is not None, "the family of the random model is counted"
    prompt, response, image_tokens = (450, 275, 340) if device.type == "cuda" else (100, 40, 64)
    pixels = image_tokens * (family.patch_size(config) * family.spatial_merge(config)) ** 2
    group = dummy_group(
        policy, prompt_tokens=prompt, response_tokens=response, image_pixels=pixels, num_completions=COMPLETIONS
    )
    vision = group.prompt.pixels()
    assert vision is not None
    patches = vision.grid_thw.prod(1).tolist()
    with trainer.dry_run_updates() as dry_run:
        dry_run([group])  # the gradients that the second pass adds to
        measured = memory_of(device, shared_by=1).peak_bytes(partial(dry_run, [group]))
    bytes_per_value = policy.model.dtype.itemsize
    computed = update_bytes(
        dimensions,
        RowLengths(1, prompt, COMPLETIONS, response, patches=sum(patches), image_patches=max(patches)),
        PassFormat(weight=bytes_per_value, compute=bytes_per_value),
        PassOptions(
            checkpointing=True,
            trains_weights=True,
            trains_vision=True,
            kernel=configured_kernel(family.language_model(policy.model).config),
            chunk_rows=policy.logprob_chunk,
            tied=config.tie_word_embeddings,
            on_cpu=device.type == "cpu",
        ),
    ).total
    compared.figures["memory of a pass"] = f"{bytes_text(measured)}, computed {bytes_text(computed)}"
    compared.at_most("error of the computed memory", abs(measured - computed) / measured, PASS_TOLERANCE)


def open_trainer(setting: Setting) -> LocalTrainEngine:
    """Load a Qwen2.5-VL-3B with few layers in bfloat16, with its optimizer, as a run does.

    On the CPU a tiny model.
    """
    on_gpu = setting.device == "cuda"
    folder = write_model(
        Path(setting.folder) / "models" / "qwen2_5_vl_few_layers",
        MODELS["3b" if on_gpu else "tiny"],
        torch.device(setting.device),
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
            "trainer": {"device": setting.device},
        }
    )
    place = DevicePlacement(choose_device(config), SingleProcess())
    trainer, _ = open_models(config, open_processors(config), make_plan(config, num_train_prompts=MANY), place)
    return trainer


def to_train(groups: Sequence[RolloutGroup]) -> list[TrainGroup]:
    """Return the groups with an advantage for each completion."""
    return [
        TrainGroup(
            group.prompt,
            tuple(
                TrainSequence(
                    token_ids=rollout.completion.token_ids,
                    loss_mask=torch.ones(length),
                    advantages=torch.full((length,), 1.0 if index % 2 else -1.0),
                    sampling_logprobs=torch.full((length,), -1.0),
                    old_logprobs=None,
                    ref_logprobs=None,
                )
                for index, rollout in enumerate(group.rollouts)
                for length in [len(rollout.completion.token_ids)]
            ),
        )
        for group in groups
    ]
