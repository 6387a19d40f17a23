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

from collections.abc import Sequence
from dataclasses import dataclass

from trigon.models.activation_offload import DEVICE_INPUTS
from trigon.models.attention_metadata import RECURRENT_CHUNK, padded_length
from trigon.models.kernels import Kernel
from trigon.models.sizes import Dimensions, GroupLengths, LinearDimensions, TextDimensions, VisionDimensions
from trigon.models.transfer import host_bytes


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The memory of a pass at its peak, in bytes, beside the weights and accumulated gradients.

    activations: hidden states and what autograd keeps.
    logits: chunks of logits, and the head's gradient in float32.
    copies: copies of weights that autocast makes.
    gradients: gradients of weights and of activations, before they are added or freed.
    host: inputs of layers that are kept in host memory, which are not part of the total.
    """

    activations: int
    logits: int
    copies: int
    gradients: int
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts on the device."""
        return self.activations + self.logits + self.copies + self.gradients


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over a packed row: its model, its groups, and what is computed, and how.

    weight: bytes of a value of the weights that the layers use: as stored, or as FSDP gathers them.
    compute: the same of matrix products. If it is less than weight, autocast copies inputs and
        weights.
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

    model: Dimensions
    groups: Sequence[GroupLengths]
    weight: int
    compute: int
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

    def update_bytes(self) -> PassBytes:
        """Return the memory of a forward and backward, whose gradients exist already."""
        return max(self._update_moments(), key=lambda moment: moment.total)

    def score_bytes(self) -> PassBytes:
        """Return the memory of a forward without gradient."""
        width, inputs = self._text.width, self._row_inputs()
        states = inputs + self._tokens * width * self.weight
        # Weights that are not trained are copied for one product only.
        copies = self._weight_copies() if self.trains_weights else self._text.largest_matrix * self.compute
        copies = copies if self._autocasts else 0
        head = PassBytes(states + self._targets * width * self.weight, self._logits(), copies, 0)
        layer = PassBytes(states + self._layer_forward(), 0, copies, 0)
        vision = PassBytes(inputs + self._vision_forward(), 0, copies, 0)
        return max(head, layer, vision, key=lambda moment: moment.total)

    def _update_moments(self) -> list[PassBytes]:
        """Return the moments of an update at which its memory can be largest."""
        text = self._text
        inputs = self._row_inputs()
        layers = self._layer_inputs(DEVICE_INPUTS) if self.checkpointing else self._all_layers()
        vision = self._vision_kept() if self.trains_vision else self._vision_features()
        kept = inputs + layers + vision
        # Before the backward only the last layer's input is on the device, if they are offloaded.
        before = inputs + (self._layer_inputs(1) if self.checkpointing else layers) + vision
        host = self._offloaded_inputs()
        head_weight = text.outputs * text.width
        # The gradient of a tied head waits for the embedding's gradient, which comes last.
        waiting = head_weight * self.weight if self.tied and self.trains_weights else 0
        # In float32 the first norm keeps the input of the layer itself.
        shared = self._tokens * text.width * 4 if self.weight == 4 else 0
        one_layer = max(self._mixers()) + max(self._mlps()) - shared
        # The graph keeps the copies of weights, unless it is made again layer by layer.
        # Autocast keeps the copies of trained weights to the end of the forward in any case.
        forward_copies = 0 if self.checkpointing and not self.trains_weights else self._weight_copies()
        graph_copies = 0 if self.checkpointing else self._weight_copies()
        forward = PassBytes(before + self._head_states(), self._logits(), forward_copies, 0, host)
        head = PassBytes(before + self._head_states(), self._logits_backward(), graph_copies, 0, host)
        layer = PassBytes(
            kept + (one_layer if self.checkpointing else 0),
            0,
            self._layer_copies() if self.checkpointing else graph_copies,
            waiting + self._layer_gradients(),
            host,
        )
        moments = [forward, head, layer]
        if self._vision is not None and self.trains_vision:
            recomputed, gradients = self._recomputed_vision(self._vision), self._vision_gradients(self._vision)
            moments.append(PassBytes(inputs + vision + recomputed, 0, 0, waiting + gradients, host))
        return moments

    # -- the row --------------------------------------------------------------------------------

    @property
    def _text(self) -> TextDimensions:
        return self.model.text

    @property
    def _vision(self) -> VisionDimensions | None:
        """The dimensions of the vision tower, if the row has images."""
        return self.model.vision if self._patches else None

    @property
    def _autocasts(self) -> bool:
        """Whether autocast copies the inputs and the weights of matrix products.

        Embeddings are not cast: hidden states have the format of the weights.
        """
        return self.weight != self.compute

    @property
    def _tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    @property
    def _targets(self) -> int:
        """The tokens whose log-probabilities are computed."""
        return sum(group.sampled for group in self.groups)

    @property
    def _num_completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def _patches(self) -> int:
        """The patches of all images, before they are merged."""
        return sum(sum(group.patches) for group in self.groups)

    # -- the decoder ----------------------------------------------------------------------------

    def _row_inputs(self) -> int:
        """The rotary embeddings, which all layers share."""
        return self._tokens * 2 * self._text.head_dim * self.weight

    def _layer_inputs(self, offloading: int) -> int:
        """The inputs of layers on the device. offloading: how many if the others are offloaded."""
        layers = self._text.layers
        return (min(layers, offloading) if self.offloads else layers) * self._layer_input()

    def _layer_input(self) -> int:
        return self._tokens * self._text.width * self.weight

    def _offloaded_inputs(self) -> int:
        """The inputs of layers and of trained vision blocks in host memory."""
        vision = self._vision
        if not self.offloads:
            return 0
        host = self._text.layers * host_bytes(self._layer_input(), pinned=not self.on_cpu)
        if vision is not None and self.trains_vision:
            host += vision.layers * host_bytes(self._vision_input(vision), pinned=not self.on_cpu)
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
        dense = [self._mlp()] * (text.layers - text.moe_layers)
        return dense + ([self._moe()] * text.moe_layers if text.moe_layers else [])

    def _layer_kinds(self) -> tuple[bool, ...]:
        text = self._text
        return tuple(kind for kind, count in ((True, text.moe_layers), (False, text.layers - text.moe_layers)) if count)

    def _norm(self, width: int, inputs: int) -> int:
        """What a norm keeps per token, with its output as the input of this many matrix products.

        Its input in float32, the normalized input, and the output: once if all products share it,
        or a copy for each of them by autocast. Without gradients of weights only the first is kept.
        """
        outputs = inputs * self.compute if self._autocasts else self.compute
        normalized = 4 if self._text.scales_in_float32 else self.weight
        # Adapters keep the inputs of their layers as well.
        return width * (4 + outputs + (normalized if self.trains_weights else 0))

    def _attention(self) -> int:
        text, compute = self._text, self.compute
        queries, keys = text.heads * text.head_dim, text.key_heads * text.head_dim
        kept = self._tokens * self._norm(text.width, inputs=3)
        if text.normalizes_queries:  # their input in float32, and the normalized values
            kept += self._tokens * (queries + keys) * (4 + (4 if text.scales_in_float32 else compute))
        if text.gates_attention:  # the gate, and the output times it; in float32 the gate's logits are held as well
            kept += self._tokens * queries * (2 * compute + (4 if compute == 4 else 0))
        # Queries, keys and values, after rotation, and the output; one float32 per head.
        kept += self._tokens * (2 * queries * compute + 4 * text.heads)
        kept += self._kept_keys() * 2 * keys * compute
        # With sdpa the output is a copy, in the order of the row.
        return kept + (self._tokens * queries * compute if self.kernel == "sdpa" else 0)

    def _linear_attention(self, linear: LinearDimensions) -> int:
        """What autograd keeps of one layer's linear attention, see linear_attention.py."""
        compute = self.compute
        kept = self._tokens * self._norm(self._text.width, inputs=4)
        # The inputs of the convolution, with the history of each segment, and of its activation.
        histories = (len(self.groups) + self._num_completions) * (linear.kernel - 1)
        kept += (2 * self._tokens + histories) * linear.channels * compute
        kept += self._rule_on_cpu(linear) if self.on_cpu else self._rule_on_gpu(linear)
        # The output norm: its input, the activated gate and the gate in float32; the products.
        scaled = self.weight + (compute if self.trains_weights else 0)
        return kept + self._tokens * linear.values * (12 + scaled + compute)

    def _rule_on_cpu(self, linear: LinearDimensions) -> int:
        """In float32: tokens, padded, and a state for each chunk but the first of a prompt."""
        heads, chunk = linear.heads, RECURRENT_CHUNK
        segments = [padded_length(each) for group in self.groups for each in (group.prompt, *group.completions)]
        tokens = sum(segments)
        states = sum(-(-segment // chunk) for segment in segments) - len(self.groups)
        # Queries and keys before they are normalized. Of each head: both normalized, two products
        # of keys and beta, both with their decay, and what is read of a state; values, what is
        # written, and what is new; five matrices of a chunk; decays and beta.
        per_head = 7 * linear.key_dim + 3 * linear.value_dim + 5 * chunk + 6
        return 4 * (tokens * (2 * linear.keys + heads * per_head) + states * linear.state)

    def _rule_on_gpu(self, linear: LinearDimensions) -> int:
        """Inputs, a matrix of each chunk, the decay in float32, and first states of completions."""
        of_heads = linear.heads * ((RECURRENT_CHUNK + 1) * self.compute + 4)
        states = self._num_completions * linear.state * 4
        return self._tokens * (linear.channels * self.compute + of_heads) + states

    def _kept_keys(self) -> int:
        """The keys of each head that attention keeps, and as many values.

        All kernels except flex repeat the keys of the prompt for each completion.
        """
        # The keys of each completion, with the keys of its prompt.
        of_completions = sum(len(group.completions) * group.prompt + sum(group.completions) for group in self.groups)
        if self.kernel == "flex":
            return self._tokens
        if self.kernel != "sdpa":
            return sum(group.prompt for group in self.groups) + of_completions
        # The keys of prompts are views of all keys. On a GPU key heads are repeated for all query
        # heads.
        repeats = 1 if self.on_cpu else self._text.heads // self._text.key_heads
        return repeats * (self._tokens + of_completions)

    def _mlp(self) -> int:
        """Gate, its activation, the other factor, and their product; and the norm before."""
        return self._tokens * (self._norm(self._text.width, inputs=2) + 4 * self._text.mlp * self.compute)

    def _moe(self) -> int:
        """The same for each pair of a token and an expert; and each pair's input and output."""
        text, pairs = self._text, self._tokens * self._text.experts_per_token
        # The logits and the probabilities of the router, and the latter again for the load.
        router = text.experts * (12 if self.balances_experts else 8)
        kept = self._tokens * (self._norm(text.width, inputs=2) + router)
        # Autocast does not know the product of experts.
        kept += pairs * (2 * text.width + 4 * text.expert_mlp) * self.weight
        if text.shared_mlp:
            kept += self._tokens * (4 * text.shared_mlp + text.width) * self.compute
        return kept

    def _layer_gradients(self) -> int:
        """The largest gradients in the backward of a layer, which its MLP has."""
        text = self._text
        moments = []
        for is_moe in self._layer_kinds():
            inner, tokens, size = text.mlp, self._tokens, self.compute
            weight = text.width * inner * (self.weight + (self.compute if self._autocasts else 0))
            if is_moe:
                inner, tokens, size = text.expert_mlp, self._tokens * text.experts_per_token, self.weight
                weight = 2 * text.experts * text.width * inner * self.weight
            moments.append(
                tokens * 3 * inner * size
                + self._tokens * text.width * self.weight
                + (weight if self.trains_weights else 0)
            )
        return max(moments)

    def _layer_forward(self) -> int:
        """The largest temporaries of a layer's forward: of its MLP or its attention."""
        text, compute = self._text, self.compute
        moments = []
        for is_moe in self._layer_kinds():
            if is_moe:
                pairs = self._tokens * text.experts_per_token
                moments.append(pairs * max(3 * text.width, text.width + 3 * text.expert_mlp) * self.weight)
            else:
                moments.append(self._tokens * (text.width * self.weight + 3 * text.mlp * compute))
        queries, keys = text.heads * text.head_dim, text.key_heads * text.head_dim
        attention = self._tokens * (
            (queries + 2 * keys) * compute + (queries + keys) * self.weight + text.width * self.weight
        )
        attention += self._kept_keys() * 2 * keys * self.weight
        return max(*moments, attention, 0 if text.linear is None else self._linear_forward(text.linear))

    def _linear_forward(self, linear: LinearDimensions) -> int:
        """The largest temporaries of linear attention, without gradient."""
        compute = self.compute
        # The normalized states; what is projected, before and after the convolution; the gate.
        inputs = self._tokens * (self._text.width * self.weight + (2 * linear.channels + linear.values) * compute)
        if not self.on_cpu:
            return inputs + self._tokens * linear.values * compute
        # Inputs of the rule, as one row and in batches. In float32, of each head: queries and keys,
        # values, both sides and the solution of the system, three matrices of a chunk, outputs.
        tokens = sum(padded_length(each) for group in self.groups for each in group.completions)
        per_head = 4 * linear.key_dim + 5 * linear.value_dim + 3 * RECURRENT_CHUNK
        states = (len(self.groups) + 2 * self._num_completions) * linear.state
        return inputs + 2 * tokens * linear.channels * compute + 4 * (tokens * linear.heads * per_head + states)

    # -- copies of weights ------------------------------------------------------------------------

    def _weight_copies(self) -> int:
        """Copies by autocast of the matrices that are trained, kept to the end of the forward."""
        if not self._autocasts:
            return 0
        text, vision = self._text, self._vision
        weights = text.mixing_weights
        weights += 3 * text.width * ((text.layers - text.moe_layers) * text.mlp + text.moe_layers * text.shared_mlp)
        if vision is not None and self.trains_vision:
            weights += vision.layers * vision.block_weights
        return weights * self.compute

    def _layer_copies(self) -> int:
        """Copies of one layer's matrices, in the backward of a layer that is computed again."""
        if not self._autocasts:
            return 0
        text = self._text
        mlp = text.shared_mlp if text.moe_layers else text.mlp
        mixing = max(text.attention_weights if text.attention_layers else 0, text.linear_weights)
        return (mixing + 3 * text.width * mlp) * self.compute

    # -- logits ---------------------------------------------------------------------------------

    def _head_states(self) -> int:
        """The final norm, and the states that predict the targets."""
        text = self._text
        return self._tokens * text.width * (4 + 2 * self.weight) + self._targets * text.width * self.weight

    def _logits(self) -> int:
        """Chunks of logits in float32, and one in the format of the product; the head's copy."""
        text, chunk = self._text, min(self.chunk_rows, self._targets) * self._text.outputs
        buffers = 5 if self.full_kl else 2
        product = self.compute if self.compute < 4 else 0
        return chunk * (4 * buffers + product) + (text.outputs * text.width * self.compute if self._autocasts else 0)

    def _logits_backward(self) -> int:
        """The same, the gradient of the head in float32 and of one chunk, and of the states."""
        text, head = self._text, self._text.outputs * self._text.width
        gradients = self._targets * text.width * self.weight
        if self.trains_weights:
            gradients += head * 4 + (head * self.compute if self.compute < 4 else 0)
            gradients += head * self.weight if self.full_kl else 0
        return self._logits() + gradients

    # -- the vision tower -----------------------------------------------------------------------

    def _vision_kept(self) -> int:
        """What autograd keeps of the vision tower to the end of the decoder's backward."""
        vision = self._vision
        if vision is None:
            return 0
        patches = self._patches
        if self.checkpointing:
            blocks = 0 if self.offloads else vision.layers * self._vision_input(vision)
        else:
            blocks = vision.layers * self._vision_block(vision)
        # The pixels, which the first layer keeps for the gradient of its weight; and the mergers.
        first = 0
        if self.trains_weights:
            first = patches * vision.values_per_patch * self.compute
        merger = patches * vision.width * (4 + 4 * self.compute)
        return blocks + first + vision.mergers * merger + self._vision_features()

    def _vision_input(self, vision: VisionDimensions) -> int:
        return self._patches * vision.width * self.compute

    def _recomputed_vision(self, vision: VisionDimensions) -> int:
        """What the backward of a block needs beside what was kept, with checkpointing."""
        if not self.checkpointing:
            return 0
        offloaded = min(vision.layers, DEVICE_INPUTS) * self._vision_input(vision) if self.offloads else 0
        return self._vision_block(vision) + offloaded

    def _vision_block(self, vision: VisionDimensions) -> int:
        """What autograd keeps of one block."""
        patches, compute = self._patches, self.compute
        norms = 2 * vision.width * (4 + 2 * compute if vision.is_gated else 4 + compute)
        attention = 6 * vision.width * compute + 4 * vision.heads
        mlp = (4 if vision.is_gated else 2) * vision.mlp * compute
        return patches * (norms + attention + mlp)

    def _vision_features(self) -> int:
        """The features that the decoder gets, once for each merger."""
        vision = self._vision
        if vision is None:
            return 0
        return self._patches // vision.merge**2 * vision.out * vision.mergers * self.weight

    def _vision_gradients(self, vision: VisionDimensions) -> int:
        return self._patches * 3 * max(vision.mlp, vision.width) * self.compute

    def _vision_forward(self) -> int:
        """The largest temporaries of the vision tower, without gradient."""
        vision = self._vision
        if vision is None:
            return 0
        # A frozen tower encodes each image by itself.
        patches = self._patches if self.trains_vision else max(each for group in self.groups for each in group.patches)
        block = patches * (2 * vision.width * 4 + max(3 * vision.mlp, 8 * vision.width) * self.compute)
        # The pixels, as the host prepared them in float32, and in the format of the weights.
        prepared = 4 if self.on_cpu else 0
        converted = 0 if self.on_cpu and self.weight == 4 else self.weight
        pixels = patches * vision.values_per_patch * (prepared + converted)
        return block + pixels + self._vision_features()
