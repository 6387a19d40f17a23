"""What a request and the tokens that it samples are in vLLM's types.

Prompts go in as token ids and processed pixel values, so that vLLM's image processing never runs
and trainer and engine compute with the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import torch
from torch import Tensor

from trigon.errors import EngineError
from trigon.models.load import Processors
from trigon.models.tiles import patch_positions, to_images, to_tiles
from trigon.rollout.vllm.arguments import VllmSettings
from trigon.types import Prompt, SamplingParams, Vision

CHECK_VLLM = "Check that the installed vLLM is a version that Trigon supports (docs/developers/dependencies.md)"
"""The advice of errors about replies of vLLM, and about its weights."""

# vLLM raises a temperature between 0 and the lower bound to it, which the trainer would not
# reproduce, and rejects one above the upper bound.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


def check_sampling(sampling: SamplingParams) -> None:
    """Check that vLLM samples at this temperature. Raises: EngineError."""
    if not (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE):
        raise EngineError(
            f"vLLM cannot sample at a temperature of {sampling.temperature}. Choose 0, which is greedy, or a value "
            f"from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}."
        )


def check_prompt(
    prompt: Prompt, sampling: SamplingParams, settings: VllmSettings, processors: Processors, *, encoder_tokens: int
) -> None:
    """Check that a prompt fits what vLLM was started for.

    Args: encoder_tokens: tokens of one video for which vLLM's encoder cache has room.
    Raises: EngineError for too long a prompt, for too many images, and for too long a video.
    """
    needed = len(prompt.token_ids) + sampling.max_tokens
    if needed > settings.config.context_length:
        raise EngineError(
            f"{prompt.prompt_id}: its {len(prompt.token_ids)} tokens and a completion of up to {sampling.max_tokens} "
            f"need {needed} tokens, but worker.rollout.max_model_len is {settings.config.context_length}. Raise it, or "
            "shorten either."
        )
    vision = prompt.pixels()
    if vision is not None and vision.kind == "video":
        ranges = placeholder_ranges(prompt.prompt_id, prompt.token_ids, [vision], processors)
        longest = max(placeholder.length for placeholder in ranges)
        if longest > encoder_tokens:
            raise EngineError(
                f"{prompt.prompt_id}: a video of {longest} tokens does not fit in vLLM's encoder cache. Raise "
                f"worker.rollout.max_num_batched_tokens, which is {encoder_tokens}, to {longest}, or lower "
                "data.video_fps, data.max_video_frames or data.max_pixels."
            )
    num_images = len(vision.grid_thw) if vision is not None and vision.kind == "image" else 0
    if 0 < settings.limit_images < num_images:
        raise EngineError(
            f"{prompt.prompt_id}: it has {num_images} images, but worker.rollout.limit_images is "
            f"{settings.limit_images}. Raise it."
        )


def engine_input(name: str, token_ids: tuple[int, ...], visions: Sequence[Vision], processors: Processors) -> Any:
    """Return what vLLM's processor would return for these tokens, built from processed pixels.

    Args:
        name: the name of the prompt, for errors.
        visions: the images or videos whose placeholders are in token_ids, in order for each kind.
    Raises: EngineError if the placeholders do not match the images or videos.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    if not visions:
        return tokens_input(list(token_ids))
    from vllm.multimodal.inputs import MultiModalKwargsItems

    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    for vision in visions:
        items.setdefault(vision.kind, []).extend(_items(vision, processors))
        hashes.setdefault(vision.kind, []).extend(vision.hashes)
    ranges = {
        kind: placeholder_ranges(name, token_ids, [vision for vision in visions if vision.kind == kind], processors)
        for kind in items
    }
    return mm_input(list(token_ids), MultiModalKwargsItems(items), hashes, ranges)


def _items(vision: Vision, processors: Processors) -> Sequence[Any]:
    """Return the vLLM MultiModalKwargsItem of each image or video, with views of its pixels."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    kind, family, hf_config = vision.kind, processors.family, processors.hf_config
    tensors: dict[str, torch.Tensor | list[torch.Tensor]]
    if family.tile_assembly is not None:
        tiles = to_tiles(vision.pixel_values, vision.grid_thw, family.patch_size(hf_config))
        tensors = {
            "pixel_values": list(torch.split(tiles, vision.grid_thw[:, 0].tolist())),
            "image_sizes": torch.tensor(vision.original_sizes).flip(1),  # (height, width)
        }
        fields = {
            "pixel_values": MultiModalFieldConfig.batched(kind),
            "image_sizes": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
        }
    elif family.tiles:
        num_tiles = vision.grid_thw[:, 0]
        tensors = {
            "pixel_values": to_tiles(vision.pixel_values, vision.grid_thw, family.patch_size(hf_config)),
            "image_num_patches": num_tiles,
            "num_patches": num_tiles,  # the name of Gemma 3 and Idefics 3
            "image_token_id": torch.tensor(family.image_token_id(hf_config)),
        }
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(kind, num_tiles),
            "image_num_patches": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
            "num_patches": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
            "image_token_id": MultiModalFieldConfig.shared(kind, len(num_tiles), keep_on_cpu=True),
        }
        if family.image_layout is not None:  # Idefics 3, whose tiles are full
            side = family.patches_per_side(hf_config) * family.patch_size(hf_config)
            tensors["pixel_attention_mask"] = torch.ones(int(num_tiles.sum()), side, side, dtype=torch.bool)
            fields["pixel_attention_mask"] = MultiModalFieldConfig.flat_from_sizes(kind, num_tiles)
    elif family.vision_input == "pooled":  # not padded: vLLM encodes images with equal numbers of patches together
        tensors = {
            "pixel_values": list(torch.split(vision.pixel_values, vision.grid_thw.prod(dim=1).tolist())),
            "pixel_position_ids": [patch_positions(grid[None])[0] for grid in vision.grid_thw],
        }
        fields = {name: MultiModalFieldConfig.batched(kind) for name in tensors}
    elif family.vision_input == "images":
        tensors = {"pixel_values": to_images(vision.pixel_values, vision.grid_thw, family.patch_size(hf_config))}
        fields = {"pixel_values": MultiModalFieldConfig.batched(kind)}
    else:
        pixel_values = {"image": "pixel_values", "video": "pixel_values_videos"}[kind]
        tensors = {pixel_values: vision.pixel_values, f"{kind}_grid_thw": vision.grid_thw}
        fields = {
            pixel_values: MultiModalFieldConfig.flat_from_sizes(kind, vision.grid_thw.prod(-1)),
            f"{kind}_grid_thw": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
        }
    if family.video == "seconds" and kind == "video":
        # float64, in which vLLM computes positions from it, so that they equal the positions of
        # models/positions.py.
        tensors["second_per_grid_ts"] = torch.tensor(vision.temporal_patch_seconds, dtype=torch.float64)
        fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    items: Sequence[Any] = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[kind]
    return items


def placeholder_ranges(
    name: str, token_ids: Sequence[int], visions: Sequence[Vision], processors: Processors
) -> list[Any]:
    """Return the vLLM PlaceholderRange of each image or video, all of one kind.

    The placeholders of an image are not contiguous in a family that has an image_layout, nor are
    the placeholders of a video where a family writes its times as text. The range then ends at the
    last placeholder, and has a mask of the tokens that are placeholders. It starts at the first
    placeholder of an image, and one token before the first placeholder of a video, where vLLM looks
    for the first temporal patch.
    Args: name: the name of the prompt, for errors. visions: at least one.
    Raises: EngineError if the placeholders do not match the images or videos.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    family, hf_config, kind = processors.family, processors.hf_config, visions[0].kind
    match kind:
        case "image":
            placeholder_id = family.image_token_id(hf_config)
        case "video":
            placeholder_id = family.video_token_id(hf_config)
        case _:
            assert_never(kind)
    is_placeholder = torch.tensor(token_ids) == placeholder_id
    found = is_placeholder.nonzero()[:, 0]
    lengths = [
        length
        for vision in visions
        for length in family.count_image_tokens(hf_config, vision.grid_thw, vision.original_sizes)
    ]
    has_times = family.video == "timestamps" and kind == "video"
    has_gaps = has_times or (family.image_layout is not None and kind == "image")
    ranges = []
    if len(found) == sum(lengths):
        for indices in torch.split(found, lengths):
            start, end = int(indices[0]) - has_times, int(indices[-1]) + 1
            if not has_gaps and end - start != len(indices):
                break
            mask = is_placeholder[start:end] if has_gaps else None
            ranges.append(PlaceholderRange(start, end - start, is_embed=mask))
    if len(ranges) < len(lengths):
        raise EngineError(
            f"{name}: {len(found)} {kind} placeholders do not match {kind}s of {lengths} tokens. Expand placeholders "
            "when a prompt is built, and do not truncate them."
        )
    return ranges


def vllm_sampling_params(
    sampling: SamplingParams,
    processors: Processors,
    *,
    max_tokens: int,
    seed: int,
    stop: Sequence[str] = (),
    num_recorded: int | None = None,
) -> Any:
    """Return the vllm.SamplingParams of one request, which samples one turn.

    stop: as in TurnRequest; vLLM decodes tokens only to find these. num_recorded: as there; None if
    vLLM does not record experts.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        # One request for each completion: with n > 1 vLLM would use the seeds seed, seed + 1, ...
        n=1,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        # All stop tokens are given explicitly; vLLM adds none from the model's config.
        ignore_eos=True,
        stop_token_ids=[] if sampling.ignore_eos else list(processors.stop_token_ids),
        # Minus infinity bans a token, before temperature, top-k and top-p. Only the HTTP server
        # limits the bias.
        logit_bias=dict.fromkeys(processors.banned_token_ids, float("-inf")),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(stop),
        stop=list(stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **({} if num_recorded is None else {"routed_experts_prompt_start": num_recorded}),
    )


def recorded_experts(output: Any, name: str, *, num_tokens: int, num_experts: int) -> Tensor:
    """Return the experts that a finished vllm.CompletionOutput has used: [tokens, layers, k] int16.

    Args:
        name: the name of the prompt, for errors. num_tokens: the number of
            tokens that must have experts. num_experts: the number of experts of a layer.
    Raises: EngineError if vLLM has not returned them.
    """
    experts = None if output.routed_experts is None else torch.from_numpy(output.routed_experts.astype("int16"))
    if experts is None or experts.ndim != 3 or len(experts) != num_tokens or not bool((experts < num_experts).all()):
        shape = "nothing" if experts is None else f"experts of shape {list(experts.shape)}"
        raise EngineError(
            f"{name}: worker.actor.router_replay needs the experts of {num_tokens} tokens, below {num_experts}, and "
            f"vLLM returned {shape}. {CHECK_VLLM}, or set worker.actor.router_replay=disabled."
        )
    return experts


def sampled_tokens(
    output: Any, name: str, sampling: SamplingParams, processors: Processors
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the tokens of a vllm.CompletionOutput and their log-probabilities, 0 if greedy.

    name: the name of the prompt, for errors.
    Raises: EngineError if there is not one log-probability per token, and for a banned token.
    """
    token_ids = tuple(output.token_ids)
    logprobs = tuple(output.logprobs.logprobs)
    if len(logprobs) != len(token_ids):
        raise EngineError(
            f"{name}: vLLM returned {len(token_ids)} tokens with {len(logprobs)} log-probabilities. {CHECK_VLLM}."
        )
    banned = set(token_ids).intersection(processors.banned_token_ids)
    if banned:
        raise EngineError(f"{name}: vLLM sampled the banned media tokens {sorted(banned)}. {CHECK_VLLM}.")
    return token_ids, logprobs if sampling.temperature > 0 else (0.0,) * len(token_ids)
