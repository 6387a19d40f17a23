"""The policy: a language model, with or without a vision tower, that scores packed rows.

It runs the parts of a transformers model on a packed row: embeddings, the vision tower once for
each image or video, the decoder layers, and the head. It also names the weights as checkpoints do.
All weights are used within forward, so that the policy can be sharded. This module does not depend
on losses or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trigon.errors import ModelError
from trigon.metrics import Max, Metric, Sum
from trigon.models.activation_offload import ActivationOffload
from trigon.models.attention import configured_kernel
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.families import ModelFamily
from trigon.models.features import VisionFeatureCache
from trigon.models.logprobs import (
    LogprobHead,
    Predictions,
    rows_per_chunk,
    target_and_source_positions,
    use_logprob_head,
)
from trigon.models.lora import adapter_tensors, adapters_of, merged_weight
from trigon.models.routing import RouterLoad, RowRouting
from trigon.models.sequence_parallel import (
    RowRanks,
    RowSlice,
    complete_results,
    require_divisible_heads,
    slice_of,
    sum_over_row,
)
from trigon.models.sizes import GroupLengths, dimensions_of, peak_tflops, update_flops
from trigon.models.transfer import to_device
from trigon.models.vision_encoder import VisionEncoder, add_deepstack
from trigon.models.weight_files import stored_buffers, stored_tensors
from trigon.types import NO_RECORD, NamedTensors, PackedGroups, TokenLogprobs, TrainGroup


class Policy(nn.Module):
    """Scores packed rows under a model that `load_model` returned.

    Args:
        temperature: the sampling temperature; logits are divided by it.
        banned_token_ids: tokens that are never sampled, and are excluded from the distribution.
        logprob_chunk: rows of logits computed at a time; None for logprobs.rows_per_chunk of the
            device that computes.

    row_ranks: the ranks that compute every row together; None if each computes its own.
    replays_routing: let each token use the experts that the rollout engine has recorded for it, see
        PackedGroups.routed_experts. The routers still compute their weights.
    """

    head_methods: ClassVar[tuple[str, ...]] = ("token_logprobs", "full_weight")
    """The methods of the head, besides forward, that use its weight."""
    row_methods: ClassVar[tuple[str, ...]] = ("router_assignments",)
    """The methods, besides forward, that compute a row."""
    head_dtype: ClassVar[torch.dtype | None] = None
    """The dtype in which a sharded head is gathered; None: the dtype of the other weights."""
    num_outputs: ClassVar[int | None] = None
    """The outputs of the head; None: one for each token of the vocabulary."""

    def __init__(
        self,
        model: Any,
        family: ModelFamily,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        logprob_chunk: int | None = None,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ModelError(f"Log-probabilities need a sampling temperature above 0, not {temperature}.")
        self.model = model
        self.family = family
        self.temperature = temperature
        self.banned_token_ids = tuple(banned_token_ids)
        self._use_head(model)
        self._logprob_chunk = logprob_chunk
        self._logit_cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        if family.deepstack:
            family.language_model(model)._deepstack_process = add_deepstack
        self._vision = VisionEncoder(model, family)
        self.row_ranks: RowRanks | None = None
        self.replays_routing = False
        self._offload: ActivationOffload | None = None

    def forward(
        self,
        packed: PackedGroups,
        *,
        entropy_gradient: bool = False,
        run_dummy_vision: bool = False,
        against: Predictions | None = None,
        states_only: bool = False,
        router_load: bool = False,
    ) -> TokenLogprobs | Predictions:
        """Return the log-probability and entropy of a row's S sampled tokens.

        Whatever follows from the row alone is computed on the host, from which it is copied without
        waiting: nothing here makes the host wait for a GPU.

        Args:
            packed: the row, on the CPU.
            entropy_gradient: whether gradient flows through the entropy.
            run_dummy_vision: if the row has no images, run the vision tower on an empty image, with
                no effect on the result. A tower that is sharded over ranks has to run on all of
                them.
            against: a reference's predictions of these tokens, to compute the KL as well; with
                sequence parallelism the predictions of this rank's slice.
            states_only: return the factors of the logits instead (see predictions).
            router_load: return TokenLogprobs.router_probabilities too.
        Returns: the TokenLogprobs of token_logprobs, on the model's device; or the Predictions.
        Raises: ModelError if the images do not match the placeholder tokens of the row.
        """
        load = RouterLoad() if router_load else None
        states, row = self.row_states(packed, run_dummy_vision=run_dummy_vision, load=load)
        if states_only:
            _, sources = target_and_source_positions(packed.spans)
            predicting, _ = self.states_at(sources, states, row)
            return Predictions(predicting, self.head.full_weight())
        return self.score_states(states, row, packed, entropy_gradient=entropy_gradient, against=against, load=load)

    def states_at(self, places: Tensor, states: Tensor, row: RowSlice) -> tuple[Tensor, Tensor]:
        """Return the states at the places of a row that this rank holds, and which places these
        are.

        Args: places: [S] positions of the row, on the CPU. states, row: results of row_states.
        Returns: [M, D], and the [M] indices in places, on the CPU.
        """
        held = row.held(places)
        return states[to_device(places[held] - row.start, states.device)], held

    def score_states(
        self,
        states: Tensor,
        row: RowSlice,
        packed: PackedGroups,
        *,
        entropy_gradient: bool = False,
        against: Predictions | None = None,
        load: RouterLoad | None = None,
    ) -> TokenLogprobs:
        """Return what forward does, given the states, and perhaps the load, of row_states."""
        targets, sources = target_and_source_positions(packed.spans)
        predicting, held = self.states_at(sources, states, row)
        logprobs, entropy, kl = self.head.token_logprobs(
            predicting,
            to_device(packed.token_ids[targets[held]], states.device),
            temperature=self.temperature,
            banned_token_ids=self.banned_token_ids,
            entropy_gradient=entropy_gradient,
            against=against,
            logit_cap=self._logit_cap,
            chunk_tokens=self._logprob_chunk,
        )
        if self.row_ranks is not None:
            columns = [logprobs, entropy] if kl is None else [logprobs, entropy, kl]
            logprobs, entropy, *kls = self.of_row(columns, held, len(targets))
            kl = kls[0] if kls else None
        return TokenLogprobs(
            logprobs=logprobs,
            entropy=entropy,
            kl=kl,
            router_probabilities=None if load is None else self._over_layers(load.probabilities),
        )

    @torch.no_grad()
    def router_assignments(self, packed: PackedGroups, *, run_dummy_vision: bool = False) -> Tensor:
        """Return how many tokens of a row use each expert, over all MoE layers: [E] float32.

        Each prompt counts once. Collective, like forward.
        """
        load = RouterLoad()
        self.row_states(packed, run_dummy_vision=run_dummy_vision, load=load)
        return self._over_layers(load.assignments)

    def _over_layers(self, sums: Mapping[int, Tensor]) -> Tensor:
        """Return the sum over the layers, and over the ranks of a row."""
        return sum_over_row(torch.stack([*sums.values()]).sum(0), self.row_ranks)

    def of_row(self, columns: Sequence[Tensor], held: Tensor, num_tokens: int) -> list[Tensor]:
        """Return the values of all tokens of a row, given the values of this rank's slice.

        Args:
            columns: [M] each, with the gradient that their results will have on this rank alone.
            held: [M], their indices in the results, on the CPU. num_tokens: the number of
                results.
        """
        if self.row_ranks is None:
            return [*columns]
        stacked = torch.stack([*columns])
        results = complete_results(stacked, to_device(held, stacked.device), num_tokens, self.row_ranks)
        return [column.clone() for column in results]  # FSDP warns of views

    def row_states(
        self, packed: PackedGroups, *, run_dummy_vision: bool, load: RouterLoad | None = None
    ) -> tuple[Tensor, RowSlice]:
        """Return the last hidden states of this rank's slice of a row, [T, D]; see forward.

        load: receives the load of the experts, from this rank's slice.
        """
        language, ranks = self.family.language_model(self.model), self.row_ranks
        device = computing_device(language.embed_tokens.weight)
        row = slice_of(packed, ranks)
        embeddings = language.embed_tokens(to_device(row.token_ids, device))[None]
        layer_arguments: dict[str, Any] = {}
        if packed.visions:
            features, host_places = self._vision.encode_row(packed, row, embeddings, ranks)
            tokens, *deepstack = torch.split(features, embeddings.shape[-1], 1)
            places = to_device(host_places, device)
            # By positions: a mask would have to be read to know how many features its gradient has.
            embeddings = embeddings.index_copy(1, places, tokens.to(embeddings.dtype)[None])
            if self.family.deepstack:
                layer_arguments = {
                    "visual_pos_masks": places,  # for add_deepstack
                    "deepstack_visual_embeds": deepstack,
                }
        elif run_dummy_vision:
            embeddings = self._vision.run_without_images(embeddings)
        if getattr(language, "hidden_size_per_layer_input", 0):
            text_ids = row.token_ids
            if self.family.has_vision:  # as in the forward of transformers
                placeholders = torch.tensor(self.family.placeholder_token_ids(self.model.config))
                text_ids = text_ids.masked_fill(torch.isin(text_ids, placeholders), language.config.pad_token_id)
            layer_arguments["per_layer_inputs"] = language.get_per_layer_inputs(to_device(text_ids, device), None)
        position_ids = to_device(row.position_ids, device)
        states: Tensor = language(
            inputs_embeds=embeddings,
            position_ids=position_ids[:, None] if self.family.rope == "mrope" else position_ids,
            use_cache=False,
            attention_metadata=AttentionMetadata(
                packed.spans,
                device,
                configured_kernel(language.config),
                image_tokens=self._vision.image_tokens(packed),
                image_layers=self.family.image_layers_of(self.model.config),
                row_ranks=ranks,
                routing=self._row_routing(packed, row, load, device),
            ),
            **layer_arguments,
        ).last_hidden_state[0]
        return states, row

    def _row_routing(
        self, packed: PackedGroups, row: RowSlice, load: RouterLoad | None, device: torch.device
    ) -> RowRouting | None:
        """Return what the pass asks of the routers; None if nothing."""
        end = row.start + len(row.token_ids)  # with padding
        recorded = None
        if self.replays_routing and packed.routed_experts is not None:
            padding = (0, 0, 0, 0, 0, max(0, end - len(packed.token_ids)))
            padded = functional.pad(packed.routed_experts, padding, value=NO_RECORD)
            recorded = to_device(padded[row.start : end], device).long()
        if load is None and recorded is None:
            return None
        counted = torch.zeros(end)
        counted[: len(packed.token_ids)] = 1.0
        for span in packed.spans:
            if span.repeats_prompt:
                counted[slice(*span.prompt)] = 0.0
        return RowRouting(recorded=recorded, counted=to_device(counted[row.start :], device), load=load)

    _use_head = staticmethod(use_logprob_head)

    @torch.no_grad()
    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool = False) -> Predictions:
        """Return the predictions of the row's sampled tokens, as a reference for another policy.

        Collective: like forward, it has to be called on all ranks. The weight of a sharded head is
        valid until the policy is resharded.
        """
        outputs: Predictions = self(packed, run_dummy_vision=run_dummy_vision, states_only=True)
        return outputs

    @property
    def logprob_chunk(self) -> int:
        """The number of rows of logits that are computed at a time on the device of the weights."""
        weight = self.model.lm_head.weight
        return self._logprob_chunk or rows_per_chunk(weight.shape[0], computing_device(weight).type)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, then the vision blocks."""
        tower = self.family.vision_tower(self.model)
        blocks = () if tower is None else tower.get_submodule(self.family.vision_layers)
        return [*self.family.language_model(self.model).layers, *blocks]

    def mergers(self) -> list[nn.Module]:
        """Return the modules of a tower that make embeddings of the features of patches, if any."""
        tower = self.family.vision_tower(self.model)
        if tower is None or not self.family.takes_patches:
            return []
        return [tower.merger, *(tower.deepstack_merger_list if self.family.deepstack else ())]

    def layer_embeddings(self) -> list[nn.Module]:
        """Return the embedding of which each decoder layer gets a part, if there is one."""
        language = self.family.language_model(self.model)
        return [language.embed_tokens_per_layer] if hasattr(language, "embed_tokens_per_layer") else []

    @property
    def embedding(self) -> nn.Module:
        """The embedding of tokens."""
        embedding: nn.Module = self.family.language_model(self.model).embed_tokens
        return embedding

    @property
    def head(self) -> LogprobHead:
        """The head."""
        head: LogprobHead = self.model.lm_head
        return head

    @property
    def num_experts(self) -> int:
        """The experts of an MoE layer; 0 without such layers."""
        return int(getattr(self.model.config.get_text_config(), "num_experts", None) or 0)

    @property
    def experts_per_token(self) -> int:
        """The experts of an MoE layer that a token uses; 0 without such layers."""
        return int(getattr(self.model.config.get_text_config(), "num_experts_per_tok", None) or 0)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head has the weight of the embedding."""
        return self.head.weight is self.embedding.weight

    def enable_gradient_checkpointing(self, *, offload: bool = False) -> None:
        """Recompute each layer in the backward instead of keeping its activations.

        Sets train mode, as transformers requires.

        Args:
            offload: keep the inputs of the layers in host memory; see activation_offload.py.
        """
        options = {"use_reentrant": False}
        if hasattr(self.model, "activation_checkpointing_enable"):  # transformers 5.24, which warns of the older name
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if offload:
            self._offload = ActivationOffload()
            self._offload.checkpoint_layers(self.layers())
        self.train()

    @property
    def offloaded_bytes(self) -> int:
        """The most bytes of the inputs of layers that a pass had in host memory so far."""
        return 0 if self._offload is None else self._offload.most_bytes

    def forget_offloaded_bytes(self) -> None:
        """Begin again to measure offloaded_bytes."""
        if self._offload is not None:
            self._offload.most_bytes = 0

    def freeze_vision_tower(self) -> None:
        """Freeze the vision tower with its merger or projector and their adapters, if there is one.

        If called before add_lora, the tower gets no adapters, which is faster.
        """
        for parameter in self.family.vision_parameters(self.model):
            parameter.requires_grad_(False)

    @property
    def has_frozen_vision(self) -> bool:
        """Whether there is a vision tower without trainable parameters, adapters included."""
        parameters = self.family.vision_parameters(self.model)
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def use_feature_cache(self, cache: VisionFeatureCache, *, all_reduce_max: Callable[[int], int]) -> None:
        """Reuse the outputs of a frozen vision tower for images and videos that are in the cache.

        From now on each image or video is encoded by itself, cached or not, so that its features
        are bit for bit the same in every row.

        Args:
            all_reduce_max: returns the maximum of a number over all ranks. A sharded tower has to
                run equally often on all ranks: in every pass with run_dummy_vision, ranks with
                fewer images to encode run it on empty images.
        """
        self._vision = VisionEncoder(self.model, self.family, cache=cache, all_reduce_max=all_reduce_max)

    def use_row_ranks(self, ranks: RowRanks) -> None:
        """Compute every row together with other ranks, which have to call forward with the same.

        Raises: ConfigError if the attention of the model cannot be split over this many ranks.
        """
        config = self.family.language_model(self.model).config
        require_divisible_heads(config, ranks.size, model_type=self.family.model_type, num_workers=ranks.size)
        self.row_ranks = ranks

    @contextmanager
    def own_routing(self) -> Iterator[None]:
        """Let the routers choose the experts of all tokens within this context."""
        replays, self.replays_routing = self.replays_routing, False
        try:
            yield
        finally:
            self.replays_routing = replays

    def clear_features(self) -> None:
        """Clear the feature cache, after the weights of the vision tower have changed."""
        self._vision.clear_features()

    @property
    def has_adapters(self) -> bool:
        """Whether the model has LoRA adapters."""
        return bool(adapters_of(self.model))

    def update_work(self, groups: Sequence[TrainGroup], *, name: str = "actor") -> dict[str, Metric]:
        """Return metrics: the operations of an update on these groups, and the peak of the GPU.

        See sizes.py; prompts and images count once. Empty for a family that is not counted, and
        without the peak on a device whose peak is not known. name: prefix of the former.
        """
        dimensions = dimensions_of(self.model.config, outputs=self.num_outputs)
        if dimensions is None:
            return {}
        tower = self.family.vision_tower(self.model)
        flops = update_flops(
            dimensions,
            [GroupLengths.of(group.prompt, group.sequences) for group in groups],
            trains_vision=tower is not None and any(parameter.requires_grad for parameter in tower.parameters()),
        )
        metrics: dict[str, Metric] = {f"{name}/model_tflops": Sum(flops / 1e12)}
        device = computing_device(self.family.language_model(self.model).embed_tokens.weight)
        peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return metrics if peak is None else metrics | {"perf/peak_tflops": Max(peak)}

    def named_weights(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """Iterate over all weights as published checkpoints store them, without a tied head.

        With them come the buffers that checkpoints have; no update changes them.

        Adapters are merged into the weights of their layers, in float32, and rounded once. Tensors
        are full: a sharded one is gathered, by all ranks together, on the device that computes,
        when it is yielded. Others are views of the parameters if they have their dtype; the
        views of experts are not contiguous.

        Args:
            dtype: the dtype to which wider tensors are rounded, before they are gathered unless an
                adapter is merged into them. None: each has the dtype of its parameter.
        """
        adapters = adapters_of(self.model)
        adapter_parameters = {part for adapter in adapters.values() for part in (adapter.lora_a, adapter.lora_b)}
        for name, parameter in self.model.named_parameters():
            if parameter in adapter_parameters:
                continue
            weight = parameter.detach()
            name = name.replace(".base_layer.", ".")  # peft moves the weight of an adapted layer there
            adapter = adapters.get(name.removesuffix(".weight"))
            if adapter is None:
                is_wider = dtype is not None and weight.dtype.itemsize > dtype.itemsize
                weight = full_tensor(weight.to(dtype) if is_wider else weight)
            else:
                lora_a, lora_b = full_tensor(adapter.lora_a.detach()), full_tensor(adapter.lora_b.detach())
                weight = merged_weight(full_tensor(weight), lora_a, lora_b, adapter.scaling, dtype=dtype)
            yield from self.family.checkpoint_tensors(name, weight)
        for name, buffer in stored_buffers(self.model):
            is_wider = dtype is not None and buffer.dtype.itemsize > dtype.itemsize
            yield self.family.checkpoint_name(name), buffer.to(dtype) if is_wider else buffer

    def saved_tensors(self) -> NamedTensors:
        """Iterate over the tensors of a training checkpoint, without gathering shards.

        Without LoRA these are all weights, and the buffers that checkpoints have, under their names
        in a checkpoint, with experts stacked; with LoRA the adapters alone, under peft's names.
        """
        if self.has_adapters:
            yield from adapter_tensors(self.model)
            return
        for name, tensor in stored_tensors(self.model):
            yield self.family.checkpoint_name(name), tensor

    @torch.no_grad()
    def load_named_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights, named and stored as by named_weights, into the model.

        The model must have no adapters.
        Raises: ModelError, before anything is changed, if a name or shape does not match.
        """
        assert not self.has_adapters, "the effect of the adapters would count twice"
        own = dict(self.named_weights())
        differences = [
            *(f"{name} is missing" for name in own.keys() - weights.keys()),
            *(f"{name} is unexpected" for name in weights.keys() - own.keys()),
            *(
                f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
                for name in own.keys() & weights.keys()
                if weights[name].shape != own[name].shape
            ),
        ]
        if differences:
            raise ModelError(
                f"These weights do not fit the model: {'; '.join(sorted(differences)[:3])} ({len(differences)} "
                "differences in total). Load weights of a model with the same config."
            )
        for name, weight in own.items():
            weight.copy_(weights[name])
        self.clear_features()


def computing_device(weight: Tensor) -> torch.device:
    """Return the device on which a weight is used.

    A shard may be on another device: with CPU offloading it is on the CPU until it is gathered.
    """
    mesh = getattr(weight, "device_mesh", None)  # of a DTensor, see full_tensor
    return weight.device if mesh is None or mesh.device_type == weight.device.type else torch.device(mesh.device_type)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or gathered by all ranks together if it is sharded (a DTensor)."""
    # A DTensor is recognized by its method, so that this module does not import torch.distributed.
    # Shards that are kept on the CPU would be gathered over the network of the hosts.
    sharded: Any = tensor if hasattr(tensor, "full_tensor") else None
    return tensor if sharded is None else sharded.to(computing_device(tensor)).full_tensor()
