"""Loading a policy's weights into vLLM: checks, repacking on the CPU, and cache resets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from trigon.config.names import DeviceType
from trigon.errors import EngineError, RolloutError, TrigonError
from trigon.models.load import Processors
from trigon.rollout.vllm.weight_check import WeightCheck, compare, gather_ranks
from trigon.types import LocalWeights, NamedTensors


def load_weights(
    llm_engine: Any,
    weights: LocalWeights,
    processors: Processors,
    *,
    expected_names: frozenset[str],
    device: DeviceType,
    version: int,
    check_values: bool,
) -> None:
    """Replace vLLM's weights.

    After an error the model is neither the old one nor the new one, and some of its layers have no
    storage.
    Args:
        llm_engine: the vllm.LLMEngine, awake.
        expected_names: canonical_names of the checkpoint that vLLM was started from.
        version: the policy version; for messages only.
        check_values: compare checksums of all parameters with the trainer's; see weight_check.py.
    Raises: RolloutError if vLLM fails, which it also does for another shape; EngineError if a
    tensor is missing, unexpected or repeated; ParityError if a checksum differs.
    """
    names: list[str] = []
    [model] = llm_engine.apply_model(itself)
    source = weights.read(common_dtype(model))
    family = processors.family
    # A tower of tiles may return the features of an earlier layer; vLLM leaves out the later
    # layers.
    tower = family.checkpoint_name(f"{family.vision_path}.") if family.tiles else None
    check = WeightCheck(model, device, left_out=tower)

    def read_tensors() -> NamedTensors:
        for name, tensor in source:
            names.append(name)
            yield name, tensor.detach()

    # reload_weights, not model.load_weights: the latter fails half-way on the CPU, where linear
    # layers are packed after loading, and leaves a mixture of two models (measured with 0.32).
    try:
        with check.observe(read_tensors()) if check_values else nullcontext(read_tensors()) as tensors:
            llm_engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    except TrigonError:
        raise
    except Exception as error:  # vLLM's weight loaders raise errors of many types
        last = names[-1] if names else "none"
        for _ in source:  # each tensor is gathered from all ranks, which wait for this one
            pass
        raise RolloutError(
            f"vLLM could not load the weights of policy version {version}; the last tensor that it read is {last}: "
            f"{type(error).__name__}: {error}. If a new engine fails too, check that trainer and rollout engine load "
            "the same model_path."
        ) from error
    check_names(names, expected_names, processors)
    if check_values:
        compare(gather_ranks(check.result()), version=version)
    if device == "cpu":
        llm_engine.apply_model(repack_heads)
        llm_engine.apply_model(repack_experts)


def common_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of all parameters of vLLM's model; None if they differ.

    If some are in float32, they have to receive weights that were not rounded. Parameters that the
    CPU build has packed, which are empty, are not counted.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.numel()}
    return dtypes.pop() if len(dtypes) == 1 else None


def reset_caches(llm_engine: Any) -> None:
    """Clear vLLM's prefix cache and encoder cache; vLLM keeps them when the weights change.

    Raises: RolloutError if vLLM does not clear them. Stale entries shift log-probabilities by 0.5
    and more (measured).
    """
    if not llm_engine.reset_prefix_cache():
        raise RolloutError("vLLM did not reset its prefix cache: a request still holds blocks. Start a new engine.")
    # LLMEngine's method, not the worker's: with the latter the scheduler keeps entries that the
    # worker has dropped.
    llm_engine.reset_encoder_cache()


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of all tensors in a model folder.

    Raises: EngineError if it has no *.safetensors file.
    """
    from safetensors import safe_open

    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.extend(tensors.keys())
    if not names:
        raise EngineError(f"{folder} has no *.safetensors file. Convert the model's weights to safetensors first.")
    return names


def canonical_names(names: Iterable[str], processors: Processors) -> frozenset[str]:
    """Return checkpoint names in transformers' current spelling, without optional ones.

    Optional are rotary frequencies, the output head where it is tied to the embedding, and what the
    family or the model does not use.
    """
    family, tied = processors.family, getattr(processors.hf_config, "tie_word_embeddings", False)
    optional = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
    used = (name for name in names if not name.endswith(optional) and not family.is_unused(name, processors.hf_config))
    return frozenset(family.checkpoint_name(name) for name in used)


def check_names(names: Sequence[str], expected_names: frozenset[str], processors: Processors) -> None:
    """Check that vLLM was given the tensors of the checkpoint that it was started from, each once.

    vLLM itself ignores some unknown names, and leaves a part of a layer uninitialised if one of its
    tensors is missing.
    Raises: EngineError.
    """
    loaded_names = canonical_names(names, processors)
    missing, unexpected = sorted(expected_names - loaded_names), sorted(loaded_names - expected_names)
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if missing or unexpected or repeated:
        raise EngineError(
            "The trainer's weights are not those of the checkpoint that vLLM was started from: "
            f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, "
            f"{len(repeated)} repeated {repeated[:3]}. Trainer and rollout engine must load the same model_path."
        )


def itself(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model unchanged: an argument of vLLM's apply_model."""
    return model


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the weights of output heads again.

    Not public in 0.32: on the CPU a head computes with a packed copy of its weights. A reload
    renews the copy only if the head has tensors of its own; a tied head, which shares the
    embedding's, would keep the old weights without an error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def repack_experts(model: torch.nn.Module) -> None:
    """Pack the stacked weights of MoE layers again.

    Not public in 0.32: on the CPU an MoE layer packs its weights at the first load. A reload leaves
    them unpacked while the kernel still expects packed ones: log-probabilities are then wrong by
    0.5 and more (measured), without an error.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
