"""The policy: a language model, with or without a vision tower, that scores packed rows.

It runs the parts of a transformers model on a packed row: embeddings, the vision tower once for
each image or video, the decoder layers, and the head. It also names the weights as checkpoints do.
All weights are used within forward, so that the policy can be sharded. This module does not depend
on losses or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.metrics import Max, Metric, Sum
from trigon.models.attention import configured_kernel
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.families import ModelFamily
from trigon.models.features import VisionFeatureCache, VisionFeatures
from trigon.models.flops import GroupLengths, peak_tflops, update_flops
from trigon.models.fused import compile_parts, use_liger
from trigon.models.head import LogprobHead, use_logprob_head
from trigon.models.logprobs import Predictions, rows_per_chunk, target_and_source_positions
from trigon.models.lora import adapter_tensors, adapters_of, merged_weight
from trigon.models.tiles import to_tiles
from trigon.models.transfer import concatenated, to_device
from trigon.models.vision_inputs import tower_inputs
from trigon.types import NamedTensors, PackedGroups, TokenLogprobs, TrainGroup, Vision


class Policy(nn.Module):
    """Scores packed rows under a model that `load_model` returned.

    Args:
        temperature: of sampling; logits are divided by it.
        banned_token_ids: tokens that are never sampled, and are excluded from the distribution.
        logprob_chunk: rows of logits computed at a time; None for logprobs.rows_per_chunk of the
            device that computes.
    """

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
        use_logprob_head(model)
        self._logprob_chunk = logprob_chunk
        if family.deepstack:
            family.language_model(model)._deepstack_process = _add_deepstack
        self._feature_cache: VisionFeatureCache | None = None
        self._all_reduce_max: Callable[[int], int] = int

    def forward(
        self,
        packed: PackedGroups,
        *,
        entropy_gradient: bool = False,
        run_dummy_vision: bool = False,
        against: Predictions | None = None,
        states_only: bool = False,
    ) -> TokenLogprobs | Predictions:
        """Return the log-probability and entropy of a row's S sampled tokens.

        Whatever follows from the row alone is computed on the host, from which it is copied without
        waiting: nothing here makes the host wait for a GPU.

        Args:
            packed: on the CPU.
            entropy_gradient: whether gradient flows through the entropy.
            run_dummy_vision: if the row has no images, run the vision tower on an empty image, with
                no effect on the result. A tower that is sharded over ranks has to run on all of
                them.
            against: a reference's predictions of these tokens, to compute the KL as well.
            states_only: return the factors of the logits instead (see predictions).
        Returns: the TokenLogprobs of token_logprobs, on the model's device; or the Predictions.
        Raises: ModelError if the images do not match the placeholder tokens of the row.
        """
        language = self.family.language_model(self.model)
        device = computing_device(language.embed_tokens.weight)
        embeddings = language.embed_tokens(to_device(packed.token_ids, device))[None]
        deepstack_arguments: dict[str, Any] = {}
        if packed.visions:
            encode = self._encode_together if self._feature_cache is None else self._encode_each
            features, deepstack_features = encode(packed.visions)
            placeholders = torch.tensor(self.family.placeholder_token_ids(self.model.config))
            places = torch.isin(packed.token_ids, placeholders).nonzero().flatten()
            if len(places) != len(features):
                count = sum(len(vision.grid_thw) for vision in packed.visions)
                raise ModelError(
                    f"A packed row has {len(places)} placeholder tokens, but its {count} images and videos give "
                    f"{len(features)} features. Build prompts and images with the same processor."
                )
            places = to_device(places, device)
            # By positions: a mask would have to be read to know how many features its gradient has.
            embeddings = embeddings.index_copy(1, places, features.to(embeddings.dtype)[None])
            if self.family.deepstack:
                deepstack_arguments = {
                    "visual_pos_masks": places,  # for _add_deepstack
                    "deepstack_visual_embeds": deepstack_features,
                }
        elif run_dummy_vision and self._feature_cache is not None:
            self._encode_dummy(self._all_reduce_max(0))
        elif run_dummy_vision and self.family.has_vision:
            features, deepstack_features = self._encode_vision(*self._empty_image())
            embeddings = embeddings + 0.0 * sum(part.sum() for part in (features, *deepstack_features))
        position_ids = to_device(packed.position_ids, device)
        states = language(
            inputs_embeds=embeddings,
            position_ids=position_ids[:, None] if self.family.rope == "mrope" else position_ids,
            use_cache=False,
            attention_metadata=AttentionMetadata(packed.spans, device, configured_kernel(language.config)),
            **deepstack_arguments,
        ).last_hidden_state[0]
        targets, sources = target_and_source_positions(packed.spans)
        predicting: Tensor = states[to_device(sources, device)]
        if states_only:
            return Predictions(predicting, self.head.full_weight())
        logprobs, entropy, kl = self.head.token_logprobs(
            predicting,
            to_device(packed.token_ids[targets], device),
            temperature=self.temperature,
            banned_token_ids=self.banned_token_ids,
            entropy_gradient=entropy_gradient,
            against=against,
            chunk_tokens=self._logprob_chunk,
        )
        return TokenLogprobs(logprobs=logprobs, entropy=entropy, kl=kl)

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
        """Return the modules that turn features of patches into embeddings; empty for tiles."""
        tower = self.family.vision_tower(self.model)
        if tower is None or self.family.tiles:
            return []
        return [tower.merger, *(tower.deepstack_merger_list if self.family.deepstack else ())]

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
    def has_tied_head(self) -> bool:
        """Whether the head has the weight of the embedding."""
        return self.head.weight is self.embedding.weight

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward instead of keeping its activations.

        Sets train mode, as transformers requires.
        """
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()

    def compile_layers(self) -> None:
        """Compile the norms and MLPs of each layer; see fused.compile_parts."""
        for layer in self.layers():
            compile_parts(layer)

    def use_liger_kernel(self) -> None:
        """Use liger-kernel for norms and MLPs; see fused.use_liger."""
        use_liger(self.model)

    def freeze_vision_tower(self) -> None:
        """Freeze the vision tower with its merger or projector and their adapters, if there is one.

        If called before add_lora, the tower gets no adapters, which is faster.
        """
        for module in self.family.vision_modules(self.model):
            module.requires_grad_(False)

    @property
    def has_frozen_vision(self) -> bool:
        """Whether there is a vision tower without trainable parameters, adapters included."""
        parameters = [part for module in self.family.vision_modules(self.model) for part in module.parameters()]
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
        self._feature_cache = cache
        self._all_reduce_max = all_reduce_max

    def clear_features(self) -> None:
        """Clear the feature cache, after the weights of the vision tower have changed."""
        if self._feature_cache is not None:
            self._feature_cache.clear()

    @property
    def has_adapters(self) -> bool:
        """Whether the model has LoRA adapters."""
        return bool(adapters_of(self.model))

    def update_work(self, groups: Sequence[TrainGroup]) -> dict[str, Metric]:
        """Return metrics: the operations of an update on these groups, and the peak of the GPU.

        See flops.py; prompts and images count once. Empty for a family that is not counted, and
        without the peak on a device whose peak is not known.
        """
        tower = self.family.vision_tower(self.model)
        flops = update_flops(
            self.model.config,
            [GroupLengths.of(group.prompt, group.sequences) for group in groups],
            "shared",
            trains_vision=tower is not None and any(parameter.requires_grad for parameter in tower.parameters()),
        )
        if flops is None:
            return {}
        metrics: dict[str, Metric] = {"actor/model_tflops": Sum(flops / 1e12)}
        device = computing_device(self.family.language_model(self.model).embed_tokens.weight)
        peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return metrics if peak is None else metrics | {"perf/peak_tflops": Max(peak)}

    def named_weights(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """Iterate over all weights as published checkpoints store them, without a tied head.

        Adapters are merged into the weights of their layers, in float32, and rounded once. Tensors
        are full: a sharded one is gathered, by all ranks together, on the device that computes,
        when it is yielded. Others are views of the parameters if they have their dtype; those of
        experts are not contiguous.

        Args:
            dtype: to which wider tensors are rounded, before they are gathered unless an adapter is
                merged into them. None: each has the dtype of its parameter.
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

    def saved_tensors(self) -> NamedTensors:
        """Iterate over the parameters of a training checkpoint, without gathering shards.

        Without LoRA these are all weights under their names in a checkpoint, with experts stacked;
        with LoRA the adapters alone, under peft's names.
        """
        if self.has_adapters:
            yield from adapter_tensors(self.model)
            return
        for name, parameter in self.model.named_parameters():
            yield self.family.checkpoint_name(name), parameter

    @torch.no_grad()
    def load_named_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights, named and stored as by named_weights, into the model.

        Raises: ModelError, before anything is changed, if a name or shape does not match or the
        model has adapters.
        """
        if self.has_adapters:
            raise ModelError(
                "Merged weights cannot be loaded into a model with LoRA adapters, whose effect would count twice. Load "
                "them into a model without LoRA, or copy adapters into saved_tensors."
            )
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

    def _encode_together(self, visions: Sequence[Vision]) -> tuple[Tensor, list[Tensor]]:
        """Run the vision tower on all images and videos of a row; see _encode_vision."""
        device = computing_device(self.family.language_model(self.model).embed_tokens.weight)
        grid_thw = torch.cat([vision.grid_thw for vision in visions])
        pixels = self._tower_pixels(concatenated([vision.pixel_values for vision in visions], device), grid_thw)
        return self._run_tower(pixels, grid_thw)

    def _encode_vision(self, pixel_values: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the vision tower on images and videos.

        Args: pixel_values: [patches, values], grid_thw: [images and videos, 3], both on the CPU.
        Returns: features [tokens, D], and with deepstack [tokens, D] for each of the first layers.
        """
        return self._run_tower(self._tower_pixels(pixel_values, grid_thw), grid_thw)

    def _tower_pixels(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Return pixels as the vision tower takes them, on its device and in its dtype."""
        tower: Any = self.family.vision_tower(self.model)
        if self.family.tiles:
            pixel_values = to_tiles(pixel_values, grid_thw, self.family.patch_size(self.model.config))
        return to_device(pixel_values, tower.device).to(tower.dtype)

    def _run_tower(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features of images and videos, given their pixels; see _encode_vision."""
        tower: Any = self.family.vision_tower(self.model)
        if self.family.tiles:
            return self.family.image_features(self.model, pixels), []
        output = tower(pixels, grid_thw=grid_thw, **tower_inputs(tower, grid_thw))
        return output.pooler_output, output.deepstack_features if self.family.deepstack else []

    @torch.no_grad()
    def _encode_each(self, visions: Sequence[Vision]) -> tuple[Tensor, list[Tensor]]:
        """Return the same as _encode_together; each image is encoded by itself, or looked up.

        Nothing is cached if their hashes are unknown.
        """
        assert self._feature_cache is not None
        tower: Any = self.family.vision_tower(self.model)
        grid_thw = torch.cat([vision.grid_thw for vision in visions])
        hashes = tuple(key for vision in visions for key in vision.hashes)
        parts = [
            part
            for vision in visions
            for part in torch.split(vision.pixel_values, vision.grid_thw.prod(dim=1).tolist())
        ]
        features = self._feature_cache.lookup(hashes, tower.device)
        keys = hashes or tuple(map(str, range(len(parts))))
        misses = {key: index for index, key in enumerate(keys) if key not in features}  # duplicates once
        # Before the tower runs: other ranks may have fewer images to encode.
        runs = self._all_reduce_max(len(misses))
        for key, index in misses.items():
            tokens, deepstack = self._encode_vision(parts[index], grid_thw[index : index + 1])
            features[key] = VisionFeatures(tokens, tuple(deepstack))
            if hashes:
                self._feature_cache.store(key, features[key])
        self._encode_dummy(runs - len(misses))
        return torch.cat([features[key].tokens for key in keys]), [
            torch.cat(layer) for layer in zip(*(features[key].deepstack for key in keys), strict=True)
        ]

    @torch.no_grad()
    def _encode_dummy(self, times: int) -> None:
        """Run the vision tower on an empty image this many times.

        As often as the rank with most images runs it.
        """
        for _ in range(times):
            self._encode_vision(*self._empty_image())

    def _empty_image(self) -> tuple[Tensor, Tensor]:
        side = self.family.patches_per_side(self.model.config)
        values = self.family.values_per_patch(self.model.config)
        return torch.zeros(side * side, values), torch.tensor([[1, side, side]])


def _add_deepstack(hidden_states: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add deepstack features to the hidden states of their placeholder tokens.

    In place of the method of transformers, which takes a mask, and has to read from the device how
    many tokens it selects, in the forward and in the backward of each layer.
    Args: hidden_states: [B, T, D]. places: the positions of the placeholders, [M] int64, counted
    over all rows; or the mask, [B, T] bool, of a forward that transformers makes itself.
    features: [M, D].
    """
    positions = places.flatten().nonzero().flatten() if places.dtype == torch.bool else places
    added = hidden_states.flatten(0, 1).index_add(0, positions, features.to(hidden_states))
    return added.view_as(hidden_states)


def computing_device(weight: Tensor) -> torch.device:
    """Return the device on which a weight is used.

    That of a shard may be another one: with CPU offloading it is on the CPU until it is gathered.
    """
    mesh = getattr(weight, "device_mesh", None)  # of a DTensor, see full_tensor
    return weight.device if mesh is None or mesh.device_type == weight.device.type else torch.device(mesh.device_type)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or gathered by all ranks together if it is sharded (a DTensor)."""
    # A DTensor is recognized by its method, so that this module does not import torch.distributed.
    # Shards that are kept on the CPU would be gathered over the network of the hosts.
    sharded: Any = tensor if hasattr(tensor, "full_tensor") else None
    return tensor if sharded is None else sharded.to(computing_device(tensor)).full_tensor()
