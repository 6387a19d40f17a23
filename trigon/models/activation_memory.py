"""The memory of a pass over a packed row by arithmetic: activations, logits, copies of weights.

Bytes are counted from the dimensions of a model and the lengths of a row, without weights and
without a device. The formulas list the tensors that autograd keeps for each layer, in the order of
its operations, and the largest temporaries beside them. Tests compare them with measured peaks on
the CPU. training/budget.py measures on the device instead.

A pass has a few moments at which it can need most; its peak is the largest of them:

    forward            all activations so far, and chunks of logits
    head, backward     all activations, chunks of logits, and the gradient of the head
    layer, backward    all activations, or with checkpointing the inputs of all layers and the
                       activations of one; and the gradients of a layer
    vision, backward   the same of the vision tower, after the layers of the decoder

Linear attention is counted on the CPU as linear_attention.gated_delta_rule computes it, and on a
GPU as flash-linear-attention does. Not counted are the workspaces of kernels and the fragmentation
of an allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trigon.models.activation_offload import DEVICE_INPUTS, host_bytes
from trigon.models.attention_metadata import RECURRENT_CHUNK, padded_length
from trigon.models.kernels import Kernel
from trigon.models.sizes import Dimensions, LinearDimensions, VisionDimensions

Moment = Literal["forward", "head, backward", "layer, backward", "vision, backward"]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The lengths of a row of equal groups, in tokens.

    groups: number of groups. completions: number of completions in a group.
    prompt, response: tokens of each group's prompt, and of each of its completions.
    patches: number of patches in the images of each group, before they are merged.
    image_patches: patches of the largest image, which a frozen vision tower encodes by itself.
    """

    groups: int
    prompt: int
    completions: int
    response: int
    patches: int = 0
    image_patches: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return self.groups * (self.prompt + self.completions * self.response)

    @property
    def targets(self) -> int:
        """The tokens whose log-probabilities are computed."""
        return self.groups * self.completions * self.response

    @property
    def completion_keys(self) -> int:
        """The keys of all completions, each with those of its prompt."""
        return self.groups * self.completions * (self.prompt + self.response)


@dataclass(frozen=True, slots=True)
class PassFormat:
    """The number formats of a pass, in bytes per value.

    weight: format of the weights that the layers use: as stored, or as FSDP gathers them.
    compute: format of matrix products. If it is less than weight, autocast copies inputs and
        weights.
    """

    weight: int
    compute: int

    @property
    def autocasts(self) -> bool:
        """Whether autocast copies the inputs and the weights of matrix products."""
        return self.weight != self.compute


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What a pass computes, and how.

    checkpointing: whether the activations of a layer are computed again in the backward.
    trains_weights: False for LoRA, where only adapters have gradients.
    trains_vision: whether the vision tower has gradients, of weights or of adapters. If not, it
        runs one image at a time and keeps nothing.
    kernel: attention kernel of the decoder.
    chunk_rows: number of rows of logits that are computed at a time.
    tied: whether the head is the embedding.
    on_cpu: whether there is no GPU: sdpa then takes fewer key heads than query heads, pixels are
        not copied, and functions of torch compute linear attention.
    full_kl: whether the KL from a reference is computed over the whole vocabulary.
    offloads: whether the inputs of checkpointed layers are in host memory; see activation_offload.
    balances_experts: whether the loss has a term for the load of the experts.
    """

    checkpointing: bool
    trains_weights: bool
    trains_vision: bool
    kernel: Kernel
    chunk_rows: int
    tied: bool
    on_cpu: bool
    full_kl: bool = False
    offloads: bool = False
    balances_experts: bool = False


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The memory of a pass at its peak, in bytes, beside the weights and accumulated gradients.

    moment: when the peak is. activations: hidden states and what autograd keeps.
    logits: chunks of logits, and the head's gradient in float32.
    copies: copies of weights that autocast makes.
    gradients: gradients of weights and of activations, before they are added or freed.
    host: inputs of layers that are kept in host memory, which are not part of the total.
    """

    moment: Moment
    activations: int
    logits: int
    copies: int
    gradients: int
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts on the device."""
        return self.activations + self.logits + self.copies + self.gradients


def update_bytes(model: Dimensions, row: RowLengths, formats: PassFormat, options: PassOptions) -> PassBytes:
    """Return the memory of a forward and backward over a row, whose gradients exist already."""
    return max(_Pass(model, row, formats, options).update_moments(), key=lambda moment: moment.total)


def score_bytes(model: Dimensions, row: RowLengths, formats: PassFormat, options: PassOptions) -> PassBytes:
    """Return the memory of a forward without gradient over a row."""
    return _Pass(model, row, formats, options).score_moment()


class _Pass:
    """Counts the bytes of a pass."""

    def __init__(self, model: Dimensions, row: RowLengths, formats: PassFormat, options: PassOptions) -> None:
        self._text = model.text
        self._vision = model.vision if row.patches else None
        self._row = row
        self._options = options
        self._compute = formats.compute
        self._autocasts = formats.autocasts
        # Embeddings are not cast: hidden states have the format of the weights.
        self._state = formats.weight

    def update_moments(self) -> list[PassBytes]:
        """Return the moments of an update at which its memory can be largest."""
        options, text = self._options, self._text
        inputs = self._row_inputs()
        layers = self._layer_inputs(DEVICE_INPUTS) if options.checkpointing else self._all_layers()
        vision = self._vision_kept() if options.trains_vision else self._vision_features()
        kept = inputs + layers + vision
        # Before the backward only the last layer's input is on the device, if they are offloaded.
        before = inputs + (self._layer_inputs(1) if options.checkpointing else layers) + vision
        host = self._offloaded_inputs()
        head_weight = text.vocabulary * text.width
        # The gradient of a tied head waits for that of the embedding, which comes last.
        waiting = head_weight * self._state if options.tied and options.trains_weights else 0
        # In float32 the first norm keeps the input of the layer itself.
        shared = self._row.tokens * text.width * 4 if self._state == 4 else 0
        one_layer = max(self._mixers()) + max(self._mlps()) - shared
        # The graph keeps the copies of weights, unless it is made again layer by layer.
        # Autocast keeps those of trained weights to the end of the forward in any case.
        forward_copies = 0 if options.checkpointing and not options.trains_weights else self._weight_copies()
        graph_copies = 0 if options.checkpointing else self._weight_copies()
        moments = [
            PassBytes("forward", before + self._head_states(), self._logits(), forward_copies, 0, host),
            PassBytes("head, backward", before + self._head_states(), self._logits_backward(), graph_copies, 0, host),
            PassBytes(
                "layer, backward",
                kept + (one_layer if options.checkpointing else 0),
                0,
                self._layer_copies() if options.checkpointing else graph_copies,
                waiting + self._layer_gradients(),
                host,
            ),
        ]
        if self._vision is not None and options.trains_vision:
            moments.append(
                PassBytes(
                    "vision, backward",
                    inputs + vision + self._recomputed_vision(self._vision),
                    0,
                    0,
                    waiting + self._vision_gradients(self._vision),
                    host,
                )
            )
        return moments

    def score_moment(self) -> PassBytes:
        """Return the moment of a pass without gradient at which its memory is largest."""
        row, width = self._row, self._text.width
        inputs = self._row_inputs()
        states = inputs + row.tokens * width * self._state
        # Weights that are not trained are copied for one product only.
        copies = self._weight_copies() if self._options.trains_weights else self._text.largest_matrix * self._compute
        copies = copies if self._autocasts else 0
        head = PassBytes("forward", states + row.targets * width * self._state, self._logits(), copies, 0)
        layer = PassBytes("forward", states + self._layer_forward(), 0, copies, 0)
        vision = PassBytes("forward", inputs + self._vision_forward(), 0, copies, 0)
        return max(head, layer, vision, key=lambda moment: moment.total)

    # -- the decoder ----------------------------------------------------------------------------

    def _row_inputs(self) -> int:
        """The rotary embeddings, which all layers share."""
        return self._row.tokens * 2 * self._text.head_dim * self._state

    def _layer_inputs(self, offloading: int) -> int:
        """The inputs of layers on the device. offloading: how many if the others are offloaded."""
        layers = self._text.layers
        return (min(layers, offloading) if self._options.offloads else layers) * self._layer_input()

    def _layer_input(self) -> int:
        return self._row.tokens * self._text.width * self._state

    def _offloaded_inputs(self) -> int:
        """The inputs of layers and of trained vision blocks in host memory."""
        options, vision = self._options, self._vision
        if not options.offloads:
            return 0
        host = self._text.layers * host_bytes(self._layer_input(), pinned=not options.on_cpu)
        if vision is not None and options.trains_vision:
            host += vision.layers * host_bytes(self._vision_input(vision), pinned=not options.on_cpu)
        return host

    def _all_layers(self) -> int:
        """What autograd keeps of all decoder layers."""
        return sum(self._mixers()) + sum(self._mlps())

    def _mixers(self) -> list[int]:
        """What autograd keeps of the attention, or linear attention, of each layer."""
        text = self._text
        linear = [] if text.linear is None else [self._linear_attention(text.linear)] * text.linear.layers
        return linear + [self._attention()] * text.attention_layers

    def _mlps(self) -> list[int]:
        """What autograd keeps of the MLP, or experts, of each layer."""
        text = self._text
        dense = [self._mlp(text.mlp, self._row.tokens)] * (text.layers - text.moe_layers)
        return dense + ([self._moe()] * text.moe_layers if text.moe_layers else [])

    def _layer_kinds(self) -> tuple[bool, ...]:
        text = self._text
        return tuple(kind for kind, count in ((True, text.moe_layers), (False, text.layers - text.moe_layers)) if count)

    def _norm(self, width: int, inputs: int) -> int:
        """What a norm keeps per token, with its output as the input of so many matrix products.

        Its input in float32, the normalized input, and the output: once if all products share it,
        or a copy for each of them by autocast. Without gradients of weights only the first is kept.
        """
        outputs = inputs * self._compute if self._autocasts else self._compute
        normalized = 4 if self._text.scales_in_float32 else self._state
        # Adapters keep the inputs of their layers as well.
        return width * (4 + outputs + (normalized if self._options.trains_weights else 0))

    def _attention(self) -> int:
        row, text, compute = self._row, self._text, self._compute
        queries, keys = text.heads * text.head_dim, text.key_heads * text.head_dim
        kept = row.tokens * self._norm(text.width, inputs=3)
        if text.normalizes_queries:  # their input in float32, and the normalized values
            kept += row.tokens * (queries + keys) * (4 + (4 if text.scales_in_float32 else compute))
        if text.gates_attention:  # the gate, and the output times it; in float32 the gate's logits are held as well
            kept += row.tokens * queries * (2 * compute + (4 if compute == 4 else 0))
        # Queries, keys and values, after rotation, and the output; one float32 per head.
        kept += row.tokens * (2 * queries * compute + 4 * text.heads)
        kept += self._kept_keys() * 2 * keys * compute
        # With sdpa the output is a copy, in the order of the row.
        return kept + (row.tokens * queries * compute if self._options.kernel == "sdpa" else 0)

    def _linear_attention(self, linear: LinearDimensions) -> int:
        """What autograd keeps of one layer's linear attention, see linear_attention.py."""
        row, compute = self._row, self._compute
        kept = row.tokens * self._norm(self._text.width, inputs=4)
        # The inputs of the convolution, with the history of each segment, and of its activation.
        histories = row.groups * (1 + row.completions) * (linear.kernel - 1)
        kept += (2 * row.tokens + histories) * linear.channels * compute
        kept += self._rule_on_cpu(linear) if self._options.on_cpu else self._rule_on_gpu(linear)
        # The output norm: its input, the activated gate and the gate in float32; the products.
        scaled = self._state + (compute if self._options.trains_weights else 0)
        return kept + row.tokens * linear.values * (12 + scaled + compute)

    def _rule_on_cpu(self, linear: LinearDimensions) -> int:
        """In float32: tokens, padded, and a state for each chunk but the first of a prompt."""
        row, heads, chunk = self._row, linear.heads, RECURRENT_CHUNK
        prompt, response = padded_length(row.prompt), padded_length(row.response)
        tokens = row.groups * (prompt + row.completions * response)
        states = row.groups * (-(-prompt // chunk) - 1 + row.completions * -(-response // chunk))
        # Queries and keys before they are normalized. Of each head: both normalized, two products
        # of keys and beta, both with their decay, and what is read of a state; values, what is
        # written, and what is new; five matrices of a chunk; decays and beta.
        per_head = 7 * linear.key_dim + 3 * linear.value_dim + 5 * chunk + 6
        return 4 * (tokens * (2 * linear.keys + heads * per_head) + states * linear.state)

    def _rule_on_gpu(self, linear: LinearDimensions) -> int:
        """Inputs, a matrix of each chunk, the decay in float32, and first states of completions."""
        row = self._row
        of_heads = linear.heads * ((RECURRENT_CHUNK + 1) * self._compute + 4)
        states = row.groups * row.completions * linear.state * 4
        return row.tokens * (linear.channels * self._compute + of_heads) + states

    def _kept_keys(self) -> int:
        """The keys of each head that attention keeps, and as many values.

        All kernels except flex repeat those of the prompt for each completion.
        """
        row, kernel = self._row, self._options.kernel
        if kernel == "flex":
            return row.tokens
        if kernel != "sdpa":
            return row.groups * row.prompt + row.completion_keys
        # Those of prompts are views of all. On a GPU key heads are repeated for all query heads.
        repeats = 1 if self._options.on_cpu else self._text.heads // self._text.key_heads
        return repeats * (row.tokens + row.completion_keys)

    def _mlp(self, inner: int, tokens: int) -> int:
        """Gate, its activation, the other factor, and their product; and the norm before."""
        return tokens * (self._norm(self._text.width, inputs=2) + 4 * inner * self._compute)

    def _moe(self) -> int:
        """The same for each pair of a token and an expert; and each pair's input and output."""
        text, pairs = self._text, self._row.tokens * self._text.experts_per_token
        # The logits and the probabilities of the router, and the latter again for the load.
        router = text.experts * (12 if self._options.balances_experts else 8)
        kept = self._row.tokens * (self._norm(text.width, inputs=2) + router)
        # Autocast does not know the product of experts.
        kept += pairs * (2 * text.width + 4 * text.expert_mlp) * self._state
        if text.shared_mlp:
            kept += self._row.tokens * (4 * text.shared_mlp + text.width) * self._compute
        return kept

    def _layer_gradients(self) -> int:
        """The largest gradients in the backward of a layer: those of its MLP."""
        row, text = self._row, self._text
        moments = []
        for is_moe in self._layer_kinds():
            inner, tokens, size = text.mlp, row.tokens, self._compute
            weight = text.width * inner * (self._state + (self._compute if self._autocasts else 0))
            if is_moe:
                inner, tokens, size = text.expert_mlp, row.tokens * text.experts_per_token, self._state
                weight = 2 * text.experts * text.width * inner * self._state
            moments.append(
                tokens * 3 * inner * size
                + row.tokens * text.width * self._state
                + (weight if self._options.trains_weights else 0)
            )
        return max(moments)

    def _layer_forward(self) -> int:
        """The largest temporaries of a layer's forward: of its MLP or its attention."""
        row, text, compute = self._row, self._text, self._compute
        moments = []
        for is_moe in self._layer_kinds():
            if is_moe:
                pairs = row.tokens * text.experts_per_token
                moments.append(pairs * max(3 * text.width, text.width + 3 * text.expert_mlp) * self._state)
            else:
                moments.append(row.tokens * (text.width * self._state + 3 * text.mlp * compute))
        queries, keys = text.heads * text.head_dim, text.key_heads * text.head_dim
        attention = row.tokens * (
            (queries + 2 * keys) * compute + (queries + keys) * self._state + text.width * self._state
        )
        attention += self._kept_keys() * 2 * keys * self._state
        return max(*moments, attention, 0 if text.linear is None else self._linear_forward(text.linear))

    def _linear_forward(self, linear: LinearDimensions) -> int:
        """The largest temporaries of linear attention, without gradient."""
        row, compute = self._row, self._compute
        # The normalized states; what is projected, before and after the convolution; the gate.
        inputs = row.tokens * (self._text.width * self._state + (2 * linear.channels + linear.values) * compute)
        if not self._options.on_cpu:
            return inputs + row.tokens * linear.values * compute
        # Inputs of the rule, as one row and in batches. In float32, of each head: queries and keys,
        # values, both sides and the solution of the system, three matrices of a chunk, outputs.
        tokens = row.groups * row.completions * padded_length(row.response)
        per_head = 4 * linear.key_dim + 5 * linear.value_dim + 3 * RECURRENT_CHUNK
        states = row.groups * (1 + 2 * row.completions) * linear.state
        return inputs + 2 * tokens * linear.channels * compute + 4 * (tokens * linear.heads * per_head + states)

    # -- copies of weights ------------------------------------------------------------------------

    def _weight_copies(self) -> int:
        """Copies by autocast of the matrices that are trained, kept to the end of the forward."""
        if not self._autocasts:
            return 0
        text, vision = self._text, self._vision
        weights = text.mixing_weights
        weights += 3 * text.width * ((text.layers - text.moe_layers) * text.mlp + text.moe_layers * text.shared_mlp)
        if vision is not None and self._options.trains_vision:
            weights += vision.layers * vision.block_weights
        return weights * self._compute

    def _layer_copies(self) -> int:
        """Copies of one layer's matrices, in the backward of a layer that is computed again."""
        if not self._autocasts:
            return 0
        text = self._text
        mlp = text.shared_mlp if text.moe_layers else text.mlp
        mixing = max(text.attention_weights if text.attention_layers else 0, text.linear_weights)
        return (mixing + 3 * text.width * mlp) * self._compute

    # -- logits ---------------------------------------------------------------------------------

    def _head_states(self) -> int:
        """The final norm, and the states that predict the targets."""
        row, text = self._row, self._text
        return row.tokens * text.width * (4 + 2 * self._state) + row.targets * text.width * self._state

    def _logits(self) -> int:
        """Chunks of logits in float32, and one in the format of the product; the head's copy."""
        text, chunk = self._text, min(self._options.chunk_rows, self._row.targets) * self._text.vocabulary
        buffers = 5 if self._options.full_kl else 2
        product = self._compute if self._compute < 4 else 0
        return chunk * (4 * buffers + product) + (
            text.vocabulary * text.width * self._compute if self._autocasts else 0
        )

    def _logits_backward(self) -> int:
        """The same, the gradient of the head in float32 and of one chunk, and of the states."""
        text, head = self._text, self._text.vocabulary * self._text.width
        gradients = self._row.targets * text.width * self._state
        if self._options.trains_weights:
            gradients += head * 4 + (head * self._compute if self._compute < 4 else 0)
            gradients += head * self._state if self._options.full_kl else 0
        return self._logits() + gradients

    # -- the vision tower -----------------------------------------------------------------------

    def _vision_kept(self) -> int:
        """What autograd keeps of the vision tower to the end of the decoder's backward."""
        vision = self._vision
        if vision is None:
            return 0
        patches = self._row.groups * self._row.patches
        if self._options.checkpointing:
            blocks = 0 if self._options.offloads else vision.layers * self._vision_input(vision)
        else:
            blocks = vision.layers * self._vision_block(vision)
        # The pixels, which the first layer keeps for the gradient of its weight; and the mergers.
        first = 0
        if self._options.trains_weights:
            first = patches * vision.values_per_patch * self._compute
        merger = patches * vision.width * (4 + 4 * self._compute)
        return blocks + first + vision.mergers * merger + self._vision_features()

    def _vision_input(self, vision: VisionDimensions) -> int:
        return self._row.groups * self._row.patches * vision.width * self._compute

    def _recomputed_vision(self, vision: VisionDimensions) -> int:
        """What the backward of a block needs beside what was kept, with checkpointing."""
        if not self._options.checkpointing:
            return 0
        offloaded = min(vision.layers, DEVICE_INPUTS) * self._vision_input(vision) if self._options.offloads else 0
        return self._vision_block(vision) + offloaded

    def _vision_block(self, vision: VisionDimensions) -> int:
        """What autograd keeps of one block."""
        patches, compute = self._row.groups * self._row.patches, self._compute
        norms = 2 * vision.width * (4 + 2 * compute if vision.is_gated else 4 + compute)
        attention = 6 * vision.width * compute + 4 * vision.heads
        mlp = (4 if vision.is_gated else 2) * vision.mlp * compute
        return patches * (norms + attention + mlp)

    def _vision_features(self) -> int:
        """The features that the decoder gets, once for each merger."""
        vision = self._vision
        if vision is None:
            return 0
        return self._row.groups * self._row.patches // vision.merge**2 * vision.out * vision.mergers * self._state

    def _vision_gradients(self, vision: VisionDimensions) -> int:
        return self._row.groups * self._row.patches * 3 * max(vision.mlp, vision.width) * self._compute

    def _vision_forward(self) -> int:
        """The largest temporaries of the vision tower, without gradient."""
        vision = self._vision
        if vision is None:
            return 0
        patches = self._row.groups * self._row.patches if self._options.trains_vision else self._row.image_patches
        block = patches * (2 * vision.width * 4 + max(3 * vision.mlp, 8 * vision.width) * self._compute)
        # The pixels, as the host prepared them in float32, and in the format of the weights.
        prepared = 4 if self._options.on_cpu else 0
        converted = 0 if self._options.on_cpu and self._state == 4 else self._state
        pixels = patches * vision.values_per_patch * (prepared + converted)
        return block + pixels + self._vision_features()
