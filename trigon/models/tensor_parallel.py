"""Which numbers of GPUs can hold one copy of a model in vLLM, by its Hugging Face config.

Tensor parallelism divides attention heads and the inner widths of MLPs, in the decoder and in the
vision tower. vLLM 0.32 asserts that nothing remains, after minutes in which other things load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trigon.errors import ConfigError
from trigon.models.dimensions import TextDimensions, text_dimensions, vision_dimensions
from trigon.models.families import family_of


def tensor_parallel_sizes(hf_config: Any) -> tuple[int, ...]:
    """Return every size that divides the model, ascending; 1 is the first."""
    heads = int(hf_config.get_text_config().num_attention_heads)
    return tuple(size for size in range(1, heads + 1) if not any(_indivisible(hf_config, size)))


def require_tensor_parallel(hf_config: Any, size: int, *, num_workers: int) -> None:
    """Raise ConfigError unless size GPUs can hold a copy of the model together.

    num_workers: that sample, which the sizes that the message names divide too.
    """
    problem = next(_indivisible(hf_config, size), None)
    if problem is None:
        return
    sizes = [each for each in tensor_parallel_sizes(hf_config) if num_workers % each == 0]
    raise ConfigError(
        f"worker.rollout.tensor_parallel_size is {size}, but the {hf_config.model_type} model has {problem}, which it "
        f"cannot divide; set it to {' or '.join(map(str, sizes))}"
    )


def _indivisible(hf_config: Any, size: int) -> Iterator[str]:
    """Yield the parts that this number of GPUs cannot divide, as text."""
    text = text_dimensions(hf_config.get_text_config())
    divided = [*_of_decoder(text), *_of_tower(hf_config)]
    yield from (f"{number:,} {name}" for number, name in divided if number % size)
    if text.key_heads % size and size % text.key_heads:  # GPUs hold fewer key heads several times
        yield f"{text.key_heads} key heads"
    linear = getattr(hf_config.get_text_config(), "linear_num_key_heads", 0)
    if linear % size:
        yield f"{linear} key heads of linear attention"


def _of_decoder(text: TextDimensions) -> Iterator[tuple[int, str]]:
    yield text.heads, "attention heads"
    if text.moe_layers < text.layers:
        yield text.mlp, "columns in an MLP"
    yield text.expert_mlp, "columns in an expert"
    yield text.shared_mlp, "columns in the expert of all tokens"


def _of_tower(hf_config: Any) -> Iterator[tuple[int, str]]:
    vision = getattr(hf_config, "vision_config", None)
    if vision is None:
        return
    family = family_of(hf_config)
    if family.tiles:
        heads, mlp = vision.num_attention_heads, vision.intermediate_size
    else:
        dimensions = vision_dimensions(hf_config.model_type, vision)
        heads, mlp = dimensions.heads, dimensions.mlp
    if family.tile_tower != "internvl_vision":  # whose attention each GPU computes in full
        yield heads, "attention heads in its vision tower"
    yield mlp, "columns in an MLP of its vision tower"
