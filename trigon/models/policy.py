"""The policy: a language model, with or without a vision tower, that says how likely each completion token was.

Knows how the parts of a transformers model are put together for a packed row: embeddings, the vision tower once for
each image or video, the decoder stack, the head; and the names of its weights in a checkpoint. Refuses to know losses,
engines, and devices other than that of its weights. Whatever touches a weight happens inside forward, so that it can be
sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.metrics import Max, Metric, Sum
from trigon.models.attention import RowPlan, kernel_of
from trigon.models.families import Family
from trigon.models.features import FeatureMemory, Features
from trigon.models.flops import GroupLengths, peak_tflops, update_flops
from trigon.models.fused import compile_parts, use_liger
from trigon.models.logprobs import Predictions, rows_of_chunk, shifted, token_logprobs
from trigon.models.lora import adapter_tensors, adapters_of, merged_weight
from trigon.models.tiles import to_tiles
from trigon.types import NamedTensors, PackedGroups, TokenLogprobs, TrainGroup


class Policy(nn.Module):
    """Scores packed rows under a model that `load_model` returned.

    temperature: the sampling temperature, by which logits are divided. banned_token_ids: the tokens that are never
    sampled, and so have no share of the distribution. logprob_chunk: rows of logits held at once; None: see
    rows_of_chunk.
    """

    def __init__(
        self,
        model: Any,
        family: Family,
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
        self.logprob_chunk = logprob_chunk or rows_of_chunk(model.lm_head.weight.shape[0])
        self._features: FeatureMemory | None = None
        self._most: Callable[[int], int] = int

    def forward(
        self,
        packed: PackedGroups,
        *,
        entropy_gradient: bool = False,
        run_dummy_vision: bool = False,
        against: Predictions | None = None,
        states_only: bool = False,
    ) -> TokenLogprobs | Tensor:
        """Return log-probability and entropy of the row's S completion tokens, on the model's device.

        against: another model's predictions of these tokens, from which the KL is wanted too. states_only: return no
        more than the states [S, D] that predict these tokens (see predictions).
        touch_vision: run the vision tower on an empty image, times zero, when the row has none: where the tower is
        sharded over ranks, all of them have to run it together.
        Raises: ModelError if the images do not match the row's placeholder tokens.
        """
        language = self.family.language_model(self.model)
        device = language.embed_tokens.weight.device
        token_ids = packed.token_ids.to(device)
        embeddings = language.embed_tokens(token_ids)[None]
        deepstack: dict[str, Any] = {}
        if packed.pixel_values is not None and packed.grid_thw is not None:
            if self._features is None:
                features, layered = self._encode_vision(packed.pixel_values, packed.grid_thw)
            else:
                features, layered = self._encode_each(packed.pixel_values, packed.grid_thw, packed.vision_hashes)
            config = self.model.config
            here = torch.isin(token_ids, torch.tensor(self.family.placeholder_token_ids(config), device=device))
            here = here[None]
            if int(here.sum()) != len(features):
                raise ModelError(
                    f"A packed row has {int(here.sum())} placeholder tokens, but its {len(packed.grid_thw)} images and "
                    f"videos give {len(features)} features. Build prompts and images with the same processor."
                )
            embeddings = embeddings.masked_scatter(here[..., None], features.to(embeddings.dtype))
            if self.family.deepstack:
                deepstack = {"visual_pos_masks": here, "deepstack_visual_embeds": layered}
        elif run_dummy_vision and self._features is not None:
            self._encode_dummy(self._most(0))
        elif run_dummy_vision and self.family.has_vision:
            features, layered = self._encode_vision(*self._empty_image())
            embeddings = embeddings + 0.0 * sum(part.sum() for part in (features, *layered))
        position_ids = packed.position_ids.to(device)
        states = language(
            inputs_embeds=embeddings,
            position_ids=position_ids[:, None] if self.family.rope == "mrope" else position_ids,
            use_cache=False,
            group_plan=RowPlan(packed.spans, device, kernel_of(language.config)),
            **deepstack,
        ).last_hidden_state[0]
        targets, sources = (positions.to(device) for positions in shifted(packed.spans))
        predicting: Tensor = states[sources]
        if states_only:
            return predicting
        return token_logprobs(
            predicting,
            self.model.lm_head.weight,
            token_ids[targets],
            temperature=self.temperature,
            banned_token_ids=self.banned_token_ids,
            chunk_tokens=self.logprob_chunk,
            entropy_gradient=entropy_gradient,
            against=against,
        )

    @torch.no_grad()
    def predictions(self, packed: PackedGroups, *, run_dummy_vision: bool = False) -> Predictions:
        """Return what this policy predicts of the row's completion tokens, for another one to be compared with.

        Called, like a forward, by all ranks at once.
        """
        states = self(packed, run_dummy_vision=run_dummy_vision, states_only=True)
        return Predictions(states, full_tensor(self.model.lm_head.weight.detach()))

    def layers(self) -> list[nn.Module]:
        """Return the parts that a sharded policy gathers one after the other: decoder layers and vision blocks."""
        tower = self.family.vision_tower(self.model)
        blocks = () if tower is None else tower.get_submodule(self.family.vision_layers)
        return [*self.family.language_model(self.model).layers, *blocks]

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward instead of keeping its activations. Sets train mode, which it needs."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()

    def compile_layers(self) -> None:
        """Compile the norms and MLPs of each layer, for rows of any length; see fused.compile_parts."""
        for layer in self.layers():
            compile_parts(layer)

    def use_liger_kernel(self) -> None:
        """See fused.use_liger."""
        use_liger(self.model)

    def freeze_vision_tower(self) -> None:
        """Keep the vision tower, its merger or projector and adapters, out of training. Nothing for a text family.

        Frozen before add_lora, it gets no adapters at all, which is faster.
        """
        for module in self.family.vision_modules(self.model):
            module.requires_grad_(False)

    @property
    def has_frozen_vision(self) -> bool:
        """Whether there is a vision tower of which nothing trains, adapters included."""
        parameters = [part for module in self.family.vision_modules(self.model) for part in module.parameters()]
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def remember_features(self, memory: FeatureMemory, *, most: Callable[[int], int]) -> None:
        """From now on take what the vision tower makes of an image or video from the memory, if it is there.

        For a tower that never changes. Each image or video is then seen by itself, remembered or not, so that its
        features, bit for bit, depend on nothing else.
        most: returns the largest of a number on any rank. It is asked in every pass with touch_vision, since all ranks
        have to run a sharded tower equally often; those that are to see less look at empty images.
        """
        self._features = memory
        self._most = most

    def forget_features(self) -> None:
        """Forget what the vision tower made of images and videos, since it has other weights now."""
        if self._features is not None:
            self._features.forget()

    @property
    def has_adapters(self) -> bool:
        """Whether the model was given LoRA's adapters."""
        return bool(adapters_of(self.model))

    def update_work(self, groups: Sequence[TrainGroup]) -> dict[str, Metric]:
        """Return how much an update on these groups computes (flops.py, honest), and what this GPU can do at most.

        Nothing for a family that is not counted; no peak on a device whose peak is not known.
        """
        tower = self.family.vision_tower(self.model)
        flops = update_flops(
            self.model.config,
            [_lengths_of(group) for group in groups],
            "honest",
            vision_learns=tower is not None and any(parameter.requires_grad for parameter in tower.parameters()),
        )
        if flops is None:
            return {}
        work: dict[str, Metric] = {"actor/model_tflops": Sum(flops / 1e12)}
        device = self.family.language_model(self.model).embed_tokens.weight.device
        peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return work if peak is None else work | {"perf/peak_tflops": Max(peak)}

    def named_weights(self) -> NamedTensors:
        """Iterate over all weights as published checkpoints hold them; a tied head is left out.

        Adapters come merged into the weights beside which they learn, in these weights' dtype. Tensors are whole: a
        sharded one is gathered, by all ranks at once, when its turn comes. Otherwise they are views of what the model
        holds; those of experts are not contiguous.
        """
        adapters = adapters_of(self.model)
        own = {half for adapter in adapters.values() for half in (adapter.lora_a, adapter.lora_b)}
        for name, parameter in self.model.named_parameters():
            if parameter in own:
                continue
            weight = full_tensor(parameter.detach())
            name = name.replace(".base_layer.", ".")  # where peft keeps what it adapts
            adapter = adapters.get(name.removesuffix(".weight"))
            if adapter is not None:
                lora_a, lora_b = full_tensor(adapter.lora_a.detach()), full_tensor(adapter.lora_b.detach())
                weight = merged_weight(weight, lora_a, lora_b, adapter.scaling)
            yield from self.family.checkpoint_tensors(name, weight)

    def saved_tensors(self) -> NamedTensors:
        """Iterate over the live parameters that a checkpoint has to hold, sharded ones as they are.

        All weights under their names in a checkpoint, stacked experts as they are; with LoRA the adapters alone, under
        peft's names.
        """
        if self.has_adapters:
            yield from adapter_tensors(self.model)
            return
        for name, parameter in self.model.named_parameters():
            yield self.family.checkpoint_name(name), parameter

    @torch.no_grad()
    def load_named_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy in what named_weights gave.

        Raises: ModelError, with nothing changed, unless all names and shapes match and there are no adapters.
        """
        if self.has_adapters:
            raise ModelError(
                "Merged weights cannot be loaded below LoRA's adapters, which would count twice. Load them into a "
                "model without LoRA, or copy adapters into saved_tensors."
            )
        own = dict(self.named_weights())
        wrong = [
            *(f"{name} is missing" for name in own.keys() - weights.keys()),
            *(f"{name} is unknown" for name in weights.keys() - own.keys()),
            *(
                f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
                for name in own.keys() & weights.keys()
                if weights[name].shape != own[name].shape
            ),
        ]
        if wrong:
            raise ModelError(
                f"These weights belong to another model: {'; '.join(sorted(wrong)[:3])} ({len(wrong)} differences in "
                "all). Load what named_weights gave for the same config."
            )
        for name, weight in own.items():
            weight.copy_(weights[name])
        self.forget_features()

    def _encode_vision(self, pixel_values: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features of all images and videos, [their tokens, D], and with deepstack as many for each of the first
        layers.
        """
        tower: Any = self.family.vision_tower(self.model)
        if self.family.tiles:
            tiles = to_tiles(pixel_values, grid_thw, self.family.patch_size(self.model.config))
            return self.family.image_features(self.model, tiles.to(tower.device).to(tower.dtype)), []
        seen = tower(pixel_values.to(tower.device).to(tower.dtype), grid_thw=grid_thw.to(tower.device))
        return seen.pooler_output, seen.deepstack_features if self.family.deepstack else []

    @torch.no_grad()
    def _encode_each(
        self, pixel_values: Tensor, grid_thw: Tensor, hashes: Sequence[str]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what _see does, of each image and video as if it were the only one, or from memory."""
        assert self._features is not None
        tower: Any = self.family.vision_tower(self.model)
        parts = torch.split(pixel_values, grid_thw.prod(dim=1).tolist())
        known = self._features.recall(hashes, tower.device)
        keys = hashes or tuple(map(str, range(len(parts))))
        unseen = {key: index for index, key in enumerate(keys) if key not in known}  # of equal ones, one
        most = self._most(len(unseen))  # before the tower runs, which the other ranks may do less often
        for key, index in unseen.items():
            tokens, layered = self._encode_vision(parts[index], grid_thw[index : index + 1])
            known[key] = Features(tokens, tuple(layered))
            if hashes:
                self._features.remember(key, known[key])
        self._encode_dummy(most - len(unseen))
        return torch.cat([known[key].tokens for key in keys]), [
            torch.cat(layer) for layer in zip(*(known[key].layered for key in keys), strict=True)
        ]

    @torch.no_grad()
    def _encode_dummy(self, times: int) -> None:
        """Run the vision tower on an empty image so many times, while other ranks see theirs."""
        for _ in range(times):
            self._encode_vision(*self._empty_image())

    def _empty_image(self) -> tuple[Tensor, Tensor]:
        side = self.family.patches_per_side(self.model.config)
        values = self.family.values_per_patch(self.model.config)
        return torch.zeros(side * side, values), torch.tensor([[1, side, side]])


def _lengths_of(group: TrainGroup) -> GroupLengths:
    pixels = group.prompt.pixels()
    return GroupLengths(
        prompt=len(group.prompt.token_ids),
        completions=tuple(len(sequence.token_ids) for sequence in group.sequences),
        grids=()
        if pixels is None
        else tuple((time, height, width) for time, height, width in pixels.grid_thw.tolist()),
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor as one piece: itself, or if it is sharded (a DTensor), gathered by all ranks at once."""
    # Told apart by its method, so that torch.distributed need not be known here.
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
