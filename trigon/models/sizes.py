"""The size of a model: dimensions, parameters, and floating-point operations of a pass.

Dimensions come from the Hugging Face config. Numbers of parameters are exact: the model is created
on the meta device, which has no memory. Neither depends on what a run trains. Families whose
networks are not described here have parameters, but no dimensions, and no operations follow.

Operations: a multiply-add counts as two. Counted are the matrix products of linear
layers, and of attention for the pairs of tokens that attend to each other, so that causal attention
counts half a square. In linear attention the convolution counts, and for each token three products
with a state, as if tokens were read one by one. Not counted are norms, activations, rotary
embeddings, the interpolation of position embeddings, and recomputation, by gradient checkpointing
or within a kernel. Each prompt and each image of a group counts once, which is the work that packed
groups need.

The backward counts twice the forward: the gradients of the weights, and of the inputs. The first
layer of a vision tower has no gradient of its inputs, and a frozen tower has no backward. LoRA is
counted as if all weights were trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from trigon.config.schema import LoraConfig, TrainedModelConfig
from trigon.errors import ConfigError, ModelError
from trigon.models.attention import sliding_windows
from trigon.models.families import ModelFamily, family_of
from trigon.models.lora import adapter_widths
from trigon.types import Completion, Prompt, TrainSequence, pixels_of

if TYPE_CHECKING:
    from trigon.models.policy import Policy

# Dense bfloat16 TFLOP/s as the manufacturers state them. The patterns match whole names: other
# variants (PCIe, MIG slices) have other peaks.
_PEAKS = (
    (r"H100( 80GB HBM3)?|H200|H800( 80GB HBM3)?", 989.0),
    (r"A[18]00[- ](SXM4?|PCIE?|\d+GB)[-\w ]*", 312.0),
    (r"L40S", 362.0),
    (r"L20", 119.5),
    (r"GeForce RTX 4090", 165.0),
)

# -- dimensions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearDimensions:
    """The dimensions of the layers with gated linear attention.

    layers: number of these layers. key_heads: number of heads of queries and keys.
    heads: number of heads of values, each of which has a state [key_dim, value_dim].
    kernel: number of tokens that the convolution reads.
    """

    layers: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """The width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values, and of the output."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width of what the convolution reads."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """The values of a layer's state."""
        return self.heads * self.key_dim * self.value_dim

    def weights(self, width: int) -> int:
        """Return the weights of a layer's matrices; the convolution is none of them."""
        return width * (self.channels + 2 * self.heads + 2 * self.values)


@dataclass(frozen=True, slots=True)
class TextDimensions:
    """The dimensions of a decoder.

    layers: number of all layers. moe_layers: number of layers with experts instead of one MLP.
    linear: dimensions of the layers with linear attention; None if all have attention.
    windows: the sliding window of each layer that has attention, in tokens; None: unlimited.
    width: width of hidden states. heads, key_heads, head_dim: dimensions of attention.
    mlp: inner width of a dense MLP. expert_mlp: inner width of one expert.
    shared_mlp: inner width of the expert that all tokens use; 0 if there is none.
    experts: number of experts in a layer. experts_per_token: number that a token uses.
    outputs: outputs of the head: one for each token of the vocabulary, or one of a critic.
    normalizes_queries: whether the queries and keys of each head are normalized.
    gates_attention: whether attention has an output gate.
    scales_in_float32: whether norms multiply by their weight before they round.
    """

    layers: int
    moe_layers: int
    linear: LinearDimensions | None
    windows: tuple[int | None, ...]
    width: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int
    expert_mlp: int
    shared_mlp: int
    experts: int
    experts_per_token: int
    outputs: int
    normalizes_queries: bool
    gates_attention: bool
    scales_in_float32: bool

    @property
    def attention_layers(self) -> int:
        """The layers without linear attention."""
        return len(self.windows)

    @property
    def attention_weights(self) -> int:
        """The weights of a layer's attention, in its four matrices."""
        return self.width * self.head_dim * ((3 if self.gates_attention else 2) * self.heads + 2 * self.key_heads)

    @property
    def linear_weights(self) -> int:
        """The weights of a layer's linear attention, in its matrices; 0 if no layer has it."""
        return 0 if self.linear is None else self.linear.weights(self.width)

    @property
    def mixing_weights(self) -> int:
        """The weights of attention and of linear attention, in the matrices of all layers."""
        linear = 0 if self.linear is None else self.linear.layers * self.linear_weights
        return self.attention_layers * self.attention_weights + linear

    @property
    def largest_matrix(self) -> int:
        """The weights of the largest matrix, or stack of experts, of a layer."""
        experts = 2 * self.experts * self.expert_mlp if self.moe_layers else 0
        queries = (2 if self.gates_attention else 1) * self.heads * self.head_dim
        linear = 0 if self.linear is None else self.linear.channels
        return self.width * max(queries, linear, self.mlp, experts)

    @property
    def active_weights(self) -> int:
        """The weights of linear layers that each token is multiplied with."""
        moe = self.width * self.experts + self.experts_per_token * 3 * self.width * self.expert_mlp
        if self.shared_mlp:  # has a gate as well
            moe += 3 * self.width * self.shared_mlp + self.width
        dense = 3 * self.width * self.mlp
        return self.mixing_weights + self.moe_layers * moe + (self.layers - self.moe_layers) * dense


@dataclass(frozen=True, slots=True)
class VisionDimensions:
    """The dimensions of a vision tower that takes patches.

    layers, width, heads: dimensions of its blocks. full_layers: number of blocks whose patches
    attend to all of an image; in the other blocks they attend within windows of `window` image
    tokens a side.
    mlp: inner width of the blocks' MLPs.
    is_gated: whether these MLPs have three matrices. out: width of an image token.
    merge: number of patches along each side of an image token.
    mergers: 1, and one more for each layer whose features the decoder gets (deepstack).
    values_per_patch: number of values over all channels and frames.
    """

    layers: int
    full_layers: int
    window: int
    width: int
    heads: int
    mlp: int
    is_gated: bool
    out: int
    merge: int
    mergers: int
    values_per_patch: int

    @property
    def block_weights(self) -> int:
        """The weights of one block, in its matrices."""
        return 4 * self.width**2 + (3 if self.is_gated else 2) * self.width * self.mlp


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model. vision: None without a vision tower."""

    text: TextDimensions
    vision: VisionDimensions | None


def dimensions_of(hf_config: Any, *, outputs: int | None = None) -> Dimensions | None:
    """Return the dimensions of a Hugging Face config; None for a family that is not counted.

    outputs: outputs of the head; None: one for each token of the vocabulary.
    """
    family = family_of(hf_config)
    if family.counted is None:
        return None
    vision = getattr(hf_config, "vision_config", None)
    return Dimensions(
        text=_text_dimensions(hf_config.get_text_config(), family, outputs=outputs),
        vision=None if vision is None else _vision_dimensions(vision, family),
    )


def head_dim(text: Any) -> int:
    """Return the dimension of an attention head, from the config of a text model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _text_dimensions(text: Any, family: ModelFamily, *, outputs: int | None = None) -> TextDimensions:
    """Return the dimensions of a decoder, from the config of a text model; see dimensions_of."""
    layers = int(text.num_hidden_layers)
    experts = int(getattr(text, "num_experts", None) or 0)
    moe_layers = 0
    if experts:
        dense, every = getattr(text, "mlp_only_layers", None) or (), getattr(text, "decoder_sparse_step", 1)
        moe_layers = sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
    return TextDimensions(
        layers=layers,
        moe_layers=moe_layers,
        linear=_linear_dimensions(text),
        windows=tuple(
            window
            for window, kind in zip(sliding_windows(text), _layer_types(text), strict=True)
            if kind != "linear_attention"
        ),
        width=text.hidden_size,
        heads=text.num_attention_heads,
        key_heads=text.num_key_value_heads,
        head_dim=head_dim(text),
        mlp=text.intermediate_size if moe_layers < layers else 0,
        expert_mlp=text.moe_intermediate_size if experts else 0,
        shared_mlp=(getattr(text, "shared_expert_intermediate_size", None) or 0) if experts else 0,
        experts=experts,
        experts_per_token=text.num_experts_per_tok if experts else 0,
        outputs=text.vocab_size if outputs is None else outputs,
        normalizes_queries=family.counted is not None and family.counted.normalizes_queries,
        # Families with linear attention also have attention with an output gate, and norms that
        # multiply by their weight before they round.
        gates_attention=bool(family.linear_attention),
        scales_in_float32=bool(family.linear_attention),
    )


def _linear_dimensions(text: Any) -> LinearDimensions | None:
    layers = sum(kind == "linear_attention" for kind in _layer_types(text))
    if not layers:
        return None
    return LinearDimensions(
        layers=layers,
        key_heads=text.linear_num_key_heads,
        heads=text.linear_num_value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        kernel=text.linear_conv_kernel_dim,
    )


def _vision_dimensions(vision: Any, family: ModelFamily) -> VisionDimensions:
    """Return the dimensions of a vision tower that takes patches, from its config."""
    widths = family.vision_widths(vision)
    full_layers, window = vision.depth, 0
    if hasattr(vision, "fullatt_block_indexes"):  # Qwen2.5-VL
        full_layers = len(vision.fullatt_block_indexes)
        window = vision.window_size // vision.patch_size // vision.spatial_merge_size
    return VisionDimensions(
        layers=vision.depth,
        full_layers=full_layers,
        window=window,
        width=widths.width,
        heads=vision.num_heads,
        mlp=widths.mlp,
        is_gated=family.counted is not None and family.counted.gates_vision_mlp,
        out=widths.out,
        merge=vision.spatial_merge_size,
        mergers=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        values_per_patch=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )


# -- parameters ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitSize:
    """The number of weights in a part of a model.

    text, vision: weights of the decoder, and of what only images use. unused: weights that no pass
    uses and no run trains. text_adapters, vision_adapters: weights of LoRA's adapters of the same
    layers, for each rank.
    """

    text: int
    vision: int
    unused: int
    text_adapters: int
    vision_adapters: int

    @property
    def weights(self) -> int:
        """The weights of the model itself, without adapters."""
        return self.text + self.vision + self.unused

    def adapters(self, model: TrainedModelConfig) -> int:
        """Return the weights of the adapters that these options add, in float32."""
        return model.lora.rank * (self.text_adapters + (0 if model.freeze_vision_tower else self.vision_adapters))

    def trained(self, model: TrainedModelConfig) -> int:
        """Return the weights of the model itself that these options train: none with LoRA."""
        return 0 if model.lora.rank > 0 else self.text + (0 if model.freeze_vision_tower else self.vision)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a policy, whatever the run trains of it.

    model_type: model_type of its config.
    layers: sizes of the units that FSDP gathers one by one: decoder layers, vision blocks, mergers,
        and an embedding for the layers.
    head, embedding: sizes of these two units; None if they share a weight.
    root: size of everything else, and of a weight that head and embedding share.
    largest: number of weights in the largest tensor. width: width of hidden states.
    key_values: number of keys and values that a token has in the KV cache, over all layers.
    key_heads: number of key heads in a layer, the least of any.
    tensor_parallel_sizes: numbers of GPUs that can hold one copy of the model in vLLM together.
    dimensions: None for a family whose operations are not counted.
    counts_passes: whether the memory of its passes is counted.
    critic: sizes of the run's critic, if it is a model of its own.
    """

    model_type: str
    layers: tuple[UnitSize, ...]
    head: UnitSize | None
    embedding: UnitSize | None
    root: UnitSize
    largest: int
    width: int
    key_values: int
    key_heads: int
    tensor_parallel_sizes: tuple[int, ...]
    dimensions: Dimensions | None
    counts_passes: bool
    critic: ModelSize | None = None

    @property
    def units(self) -> tuple[UnitSize, ...]:
        """The sizes of all units."""
        return tuple(unit for unit in (*self.layers, self.head, self.embedding, self.root) if unit is not None)

    @property
    def all(self) -> UnitSize:
        """The sum over all units."""
        return UnitSize(*map(sum, zip(*map(astuple, self.units), strict=True)))

    def trains_vision(self, model: TrainedModelConfig) -> bool:
        """Return whether the vision tower has gradients with these options."""
        trained = self.all.vision if model.lora.rank == 0 else self.all.vision_adapters
        return trained > 0 and not model.freeze_vision_tower


def model_size(policy: Policy, lora: LoraConfig) -> ModelSize:
    """Return the sizes of a policy without adapters, on any device.

    lora: selects the layers of adapters, which are counted and not added: that would take seconds.
    Raises: ModelError if it has a rank, and does not fit the model.
    """
    config = policy.model.config
    text = config.get_text_config()
    counted = policy.family.counted
    units = [*policy.layers(), *policy.mergers(), *policy.layer_embeddings()]
    ends = [] if policy.has_tied_head else [policy.head, policy.embedding]
    in_units = {parameter for unit in (*units, *ends) for parameter in unit.parameters()}
    vision = set(policy.family.vision_parameters(policy.model))
    size_of = partial(_unit_size, vision=vision, adapters=_adapters(policy, lora))
    return ModelSize(
        model_type=str(config.model_type),
        layers=tuple(size_of(unit.parameters()) for unit in units),
        head=None if policy.has_tied_head else size_of(policy.head.parameters()),
        embedding=None if policy.has_tied_head else size_of(policy.embedding.parameters()),
        root=size_of(part for part in policy.parameters() if part not in in_units),
        largest=max(parameter.numel() for parameter in policy.parameters()),
        width=text.hidden_size,
        key_values=key_values(text),
        key_heads=min(config.num_key_value_heads for config in layer_configs(text)),
        tensor_parallel_sizes=tensor_parallel_sizes(config),
        dimensions=dimensions_of(config, outputs=policy.num_outputs),
        counts_passes=counted is not None and counted.counts_passes,
    )


def _adapters(policy: Policy, lora: LoraConfig) -> dict[nn.Parameter, int]:
    """Return the weights for each rank of the adapter of each weight that has one."""
    try:
        widths = adapter_widths(policy.model, lora)
    except ModelError:
        if lora.rank > 0:
            raise
        return {}  # the run does not use these settings
    return {policy.model.get_submodule(name).weight: width for name, width in widths.items()}


def _unit_size(
    parameters: Iterable[nn.Parameter], *, vision: Set[nn.Parameter], adapters: Mapping[nn.Parameter, int]
) -> UnitSize:
    text = of_vision = unused = text_adapters = vision_adapters = 0
    for parameter in parameters:
        number, width = parameter.numel(), adapters.get(parameter, 0)
        if parameter in vision:
            of_vision, vision_adapters = of_vision + number, vision_adapters + width
        elif parameter.requires_grad:
            text, text_adapters = text + number, text_adapters + width
        else:
            unused += number
    return UnitSize(text, of_vision, unused, text_adapters, vision_adapters)


def layer_configs(text: Any) -> list[Any]:
    """Return the config of each decoder layer; in Gemma 4 heads differ between layers."""
    number = text.num_hidden_layers
    if getattr(text, "is_heterogeneous", False):
        return [text.per_layer_config[layer] for layer in range(number)]
    return [text] * number


def key_values(text: Any) -> int:
    """Return the number of keys and values that a token has, over all layers that keep any.

    Layers of linear attention keep none, nor do those that use the keys of an earlier layer.
    """
    kinds = _layer_types(text)
    keeping = len(kinds) - getattr(text, "num_kv_shared_layers", 0)
    return sum(
        2 * layer.num_key_value_heads * head_dim(layer)
        for kind, layer in zip(kinds[:keeping], layer_configs(text)[:keeping], strict=True)
        if kind != "linear_attention"
    )


def _layer_types(text: Any) -> list[str]:
    return list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)


# -- tensor parallelism ----------------------------------------------------------------------------
#
# Tensor parallelism divides attention heads and the inner widths of MLPs, in the decoder and in the
# vision tower. vLLM 0.32 asserts that nothing remains, after minutes in which other things load.


def tensor_parallel_sizes(hf_config: Any) -> tuple[int, ...]:
    """Return every number of GPUs that divides the model in vLLM, ascending; 1 is the first."""
    heads = int(hf_config.get_text_config().num_attention_heads)
    return tuple(size for size in range(1, heads + 1) if not any(_indivisible(hf_config, size)))


def require_tensor_parallel(hf_config: Any, size: int, *, num_workers: int) -> None:
    """Raise ConfigError unless size GPUs can hold a copy of the model together.

    num_workers: number of workers that sample, which the sizes in the message divide too.
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
    family, config = family_of(hf_config), hf_config.get_text_config()
    key_heads = {int(layer.num_key_value_heads) for layer in layer_configs(config)}
    if getattr(config, "is_heterogeneous", False):
        divided = [(config.num_attention_heads, "attention heads"), (config.intermediate_size, "columns in an MLP")]
    else:
        text = _text_dimensions(config, family)
        divided = [
            (text.heads, "attention heads"),
            (text.mlp if text.moe_layers < text.layers else 0, "columns in an MLP"),
            (text.expert_mlp, "columns in an expert"),
            (text.shared_mlp, "columns in the expert of all tokens"),
        ]
    vision = getattr(hf_config, "vision_config", None)
    if vision is not None:
        if not family.takes_patches:
            heads, mlp = vision.num_attention_heads, vision.intermediate_size
        else:
            dimensions = _vision_dimensions(vision, family)
            heads, mlp = dimensions.heads, dimensions.mlp
        if family.divides_vision_heads:
            divided.append((heads, "attention heads in its vision tower"))
        divided.append((mlp, "columns in an MLP of its vision tower"))
    yield from (f"{number:,} {name}" for number, name in divided if number % size)
    yield from (  # GPUs hold fewer key heads several times
        f"{number} key heads" for number in sorted(key_heads) if number % size and size % number
    )
    linear = getattr(config, "linear_num_key_heads", 0)
    if linear % size:
        yield f"{linear} key heads of linear attention"


# -- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """The lengths of a group in tokens; of a prompt alone, without completions.

    grids: (time, height, width) of each image or video of the prompt, in patches.
    observed: how many tokens of the completions together were observed, and have no logits.
    observed_grids: the grid of each image in the completions.
    """

    prompt: int
    completions: tuple[int, ...] = ()
    grids: tuple[tuple[int, int, int], ...] = ()
    observed: int = 0
    observed_grids: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, prompt: Prompt, completions: Sequence[Completion | TrainSequence]) -> GroupLengths:
        """Return the lengths of a group. completions: the completions of this prompt."""
        lengths = tuple(len(completion.token_ids) for completion in completions)
        num_sampled = sum(end - start for completion in completions for start, end in completion.sampled)
        return cls(
            prompt=len(prompt.token_ids),
            completions=lengths,
            grids=_grids(prompt),
            observed=sum(lengths) - num_sampled,
            observed_grids=tuple(grid for completion in completions for grid in _grids(completion)),
        )

    @property
    def tokens(self) -> int:
        """The tokens of the group, with its prompt once."""
        return self.prompt + sum(self.completions)

    @property
    def sampled(self) -> int:
        """The tokens of the completions that were sampled, which have logits."""
        return sum(self.completions) - self.observed

    @property
    def patches(self) -> tuple[int, ...]:
        """The patches of each image or video, of the prompt and of the completions."""
        return tuple(time * rows * columns for time, rows, columns in (*self.grids, *self.observed_grids))


@dataclass(frozen=True, slots=True)
class Flops:
    """The floating-point operations of a forward, by part of the model.

    linear: the linear layers of the decoder. attention: its attention, and its linear attention
    without linear layers. head: the logits.
    vision: the vision tower without its first layer. patch_embedding: that first layer.
    """

    linear: int
    attention: int
    head: int
    vision: int
    patch_embedding: int

    @property
    def total(self) -> int:
        """The sum over all parts."""
        return self.linear + self.attention + self.head + self.vision + self.patch_embedding


def forward_flops(dimensions: Dimensions, groups: Sequence[GroupLengths]) -> Flops:
    """Return the operations of a forward over groups."""
    text, vision = dimensions.text, dimensions.vision
    tokens = pairs = logits = blocks = patch_embedding = 0
    for group in groups:
        prompt, lengths = group.prompt, group.completions
        spans = [(0, prompt), *((prompt, prompt + length) for length in lengths)]
        logits += group.sampled
        tokens += group.tokens
        pairs += sum(_attended_pairs(start, end, window) for window in text.windows for start, end in spans)
        if grids := (*group.grids, *group.observed_grids):
            assert vision is not None, "a text model has no images"
            of_blocks, of_patch_embedding = _vision_flops(vision, grids)
            blocks += of_blocks
            patch_embedding += of_patch_embedding
    return Flops(
        linear=2 * tokens * text.active_weights,
        attention=4 * pairs * text.heads * text.head_dim + tokens * _recurrence_flops(text.linear),
        head=2 * logits * text.width * text.outputs,
        vision=blocks,
        patch_embedding=patch_embedding,
    )


def update_flops(dimensions: Dimensions, groups: Sequence[GroupLengths], *, trains_vision: bool = True) -> int:
    """Return the operations of an update over groups: of a forward and a backward.

    trains_vision: False for a frozen vision tower.
    """
    forward = forward_flops(dimensions, groups)
    backward = 2 * (forward.linear + forward.attention + forward.head)
    if trains_vision:
        backward += 2 * forward.vision + forward.patch_embedding
    return forward.total + backward


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s, dense and in bfloat16; None if it is not known."""
    name = device_name.removeprefix("NVIDIA ")
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, name) and "MIG" not in name:
            return peak
    return None


def _grids(part: Prompt | Completion | TrainSequence) -> tuple[tuple[int, int, int], ...]:
    pixels = pixels_of(part)
    return () if pixels is None else tuple((time, rows, columns) for time, rows, columns in pixels.grid_thw.tolist())


def _recurrence_flops(linear: LinearDimensions | None) -> int:
    """Return the operations of all linear attention for a token, beside its matrices.

    A state is multiplied by the key, gets an outer product added, and is multiplied by the query.
    """
    return 0 if linear is None else linear.layers * (2 * linear.kernel * linear.channels + 6 * linear.state)


def _attended_pairs(start: int, end: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of queries at positions start to end.

    A query attends to min(position + 1, window) keys.
    """
    if window is None:
        window = end
    limited = min(max(window, start), end)  # the first position that the window limits
    return (limited * (limited + 1) - start * (start + 1)) // 2 + (end - limited) * window


def _vision_flops(vision: VisionDimensions, grids: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the operations of a vision tower: in blocks and mergers, and in its first layer."""
    merge, width = vision.merge, vision.width
    patches = sum(time * height * columns for time, height, columns in grids)
    merged = width * merge**2
    pairs = vision.full_layers * sum(time * (height * columns) ** 2 for time, height, columns in grids)
    if vision.full_layers < vision.layers:
        pairs += (vision.layers - vision.full_layers) * sum(
            time
            * merge**4
            * _sum_of_squares(height // merge, vision.window)
            * _sum_of_squares(columns // merge, vision.window)
            for time, height, columns in grids
        )
    blocks = 2 * patches * vision.layers * vision.block_weights + 4 * pairs * width
    merging = vision.mergers * 2 * (patches // merge**2) * (merged**2 + merged * vision.out)
    return blocks + merging, 2 * patches * vision.values_per_patch * width


def _sum_of_squares(length: int, window: int) -> int:
    """Return the sum of the squared lengths of the windows of a length; the last may be shorter."""
    return length // window * window**2 + (length % window) ** 2
