"""The padded Hugging Face forward, and random prompts and groups.

The packed forward must equal the padded one, which repeats the prompt and its images for every
completion. Of trigon it uses only the types: transformers computes positions, masks, image features
and logits, with gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from trigon.data.packing import PackedRow, by_group, pack_rollouts
from trigon.data.vision import image_processor_of
from trigon.models.load import Processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.system.torchvision_stub import declare_operators
from trigon.types import Completion, ImageSizes, Prompt, Rollout, RolloutGroup, Score, Turn, Vision

SPLITTING_OPTIONS = ("crop_to_patches", "do_image_splitting")
"""The options of image processors that cut an image into several tiles."""

NESTED_TILES = ("idefics3", "smolvlm")
"""Models that take tiles as [batch, tiles of each sequence, 3, height, width]."""

TILE_MODELS = ("internvl", "llava", "llava_onevision", "gemma3", *NESTED_TILES)
"""Models that take tiles."""


def load_hugging_face(folder: Path, dtype: torch.dtype):
    """Return the transformers model of a folder, with its own SDPA attention."""
    declare_operators()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_vision = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def padded_logits(model, prompt: Prompt, completions: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the logits that predict the tokens of each completion, [N, longest R, V].

    The batch is padded on the right to [N, T]. With a head of one output they are values.
    """
    longest = max(len(completion) for completion in completions)
    start = len(prompt.token_ids)
    token_ids = torch.zeros(len(completions), start + longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(token_ids)
    for row, completion in enumerate(completions):
        sequence = torch.tensor(prompt.token_ids + completion)
        token_ids[row, : len(sequence)] = sequence
        attention_mask[row, : len(sequence)] = 1
    media = {} if prompt.vision is None else media_arguments(model, token_ids, [prompt.vision] * len(completions))
    logits: Tensor = model(
        input_ids=token_ids,
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(start - 1, start + longest - 1),
        **media,
    ).logits
    return logits


def padded_logprobs(
    model,
    prompt: Prompt,
    completions: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    banned_token_ids: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy), each [sum of R]: the tokens of all completions, concatenated.

    All logits [N, R, V] are in memory at once.
    """
    logits = padded_logits(model, prompt, completions) / temperature
    if banned_token_ids:
        logits[..., list(banned_token_ids)] = -1e30
    table = logits.log_softmax(-1)
    logprobs, entropy = [], []
    for row, completion in enumerate(completions):
        logprobs.append(table[row, range(len(completion)), list(completion)])
        entropy.append(-(table[row] * table[row].exp()).sum(-1)[: len(completion)])
    return torch.cat(logprobs), torch.cat(entropy)


def padded_episode(
    model, prompt: Prompt, completion: Completion, *, temperature: float, banned_token_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy) of the sampled tokens of a completion with observations, [S] each.

    The prompt's media and the completion's images go into one forward of the whole sequence.
    """
    token_ids = torch.tensor([prompt.token_ids + completion.token_ids])
    start = len(prompt.token_ids)
    media = media_arguments(model, token_ids, [each for each in (prompt.vision, completion.vision) if each is not None])
    logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False, **media).logits[0]
    logits = logits / temperature
    if banned_token_ids:
        logits[..., list(banned_token_ids)] = -1e30
    table = logits.log_softmax(-1)
    positions = torch.tensor([start + t for turn in completion.turns for t in range(turn.start, turn.end)])
    logprobs = table[positions - 1, token_ids[0, positions]]
    entropy = -(table[positions - 1] * table[positions - 1].exp()).sum(-1)
    return logprobs, entropy


def has_no_gradient(name: str) -> bool:
    """Return whether the gradient of a parameter is zero but for rounding.

    Without rotary positions a key's bias shifts all attention logits of a token alike.
    """
    return ("vision_tower." in name or "vision_model." in name) and name.endswith("k_proj.bias")


def _token_types(model, token_ids: Tensor) -> dict[str, Tensor]:
    """Return the argument by which transformers knows the tokens of images, in Gemma 3 and 4."""
    names = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    if model.config.model_type not in names:
        return {}
    return {names[model.config.model_type]: (token_ids == model.config.image_token_id).int()}


def media_arguments(model, token_ids: Tensor, visions: Sequence[Vision]) -> dict[str, Tensor]:
    """Return the arguments of a transformers model for the images and videos of a batch, in order.

    token_ids: [N, T].
    """
    media: dict[str, Tensor] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        of_kind = [vision for vision in visions if vision.kind == kind]
        if not of_kind:
            continue
        media[name] = torch.cat([vision.pixel_values for vision in of_kind])
        media[f"{kind}_grid_thw"] = torch.cat([vision.grid_thw for vision in of_kind])
        if kind == "video" and hasattr(model.config.vision_config, "tokens_per_second"):
            media["second_per_grid_ts"] = torch.tensor(
                [seconds for vision in of_kind for seconds in vision.temporal_patch_seconds]
            )
    if not media:
        return {}
    if model.config.model_type == "mistral3":
        return _as_padded_images(media["pixel_values"], media["image_grid_thw"])
    if model.config.model_type == "gemma4":
        return _as_padded_patches(media["pixel_values"], media["image_grid_thw"]) | _token_types(model, token_ids)
    if model.config.model_type in TILE_MODELS:
        tiles = _as_tiles(media["pixel_values"])
        nested = model.config.model_type in NESTED_TILES
        media = {"pixel_values": tiles[None] if nested else tiles} | _token_types(model, token_ids)
        sizes = [(height, width) for vision in visions for width, height in vision.original_sizes]
        return media | ({"image_sizes": torch.tensor(sizes)} if sizes else {})
    is_image, is_video = (token_ids == model.config.image_token_id, token_ids == model.config.video_token_id)
    return media | {"mm_token_type_ids": is_image.int() + 2 * is_video.int()}


def _as_padded_images(patches: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
    """Return patches of 14 x 14 pixels as the arguments of a model that takes whole images."""
    sizes = 14 * grid_thw[:, 1:]
    images = torch.zeros(len(sizes), 3, *sizes.amax(0).tolist())
    remaining = iter(patches.view(-1, 3, 14, 14))
    for image, (height, width) in zip(images, sizes.tolist(), strict=True):
        for top in range(0, height, 14):
            for left in range(0, width, 14):
                image[:, top : top + 14, left : left + 14] = next(remaining)
    return {"pixel_values": images, "image_sizes": sizes}


def _as_padded_patches(patches: Tensor, grid_thw: Tensor) -> dict[str, Tensor]:
    """Return patches as the arguments of a model that takes a padded batch of them."""
    sizes = grid_thw.prod(1).tolist()
    padded = torch.zeros(len(sizes), max(sizes), patches.shape[1])
    places = torch.full((len(sizes), max(sizes), 2), -1)
    for image, (part, (_, rows, columns)) in enumerate(zip(patches.split(sizes), grid_thw.tolist(), strict=True)):
        padded[image, : len(part)] = part
        of_image = [(column, row) for row in range(rows) for column in range(columns)]
        places[image, : len(part)] = torch.tensor(of_image)
    return {"pixel_values": padded, "image_position_ids": places}


def _as_tiles(patches: Tensor) -> Tensor:
    """Return the patches of a model with a vision tower of tiles as [tiles, 3, height, width]."""
    size, side = 14, 4  # those of the tiny models
    tiles = patches.view(-1, side, side, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(-1, 3, side * size, side * size)


def make_episode(
    processors: Processors, turns: Sequence[tuple[Sequence[tuple[int, int]] | None, int]], *, seed: int
) -> Completion:
    """Return a completion of random words that observed random words and images.

    turns: of each, the (height, width) in patches of the images that it observes before it samples,
    None if it observes nothing; and how many tokens it samples.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    made, visions = [], []
    for index, (grids, length) in enumerate(turns):
        if grids is not None:
            observed = make_prompt(processors, grids, seed=1000 * seed + index, words_before=3)
            token_ids += observed.token_ids
            visions += [] if observed.vision is None else [observed.vision]
        made.append(Turn(len(token_ids), len(token_ids) + length, ""))
        token_ids += random_words(length, generator)
    vision = None
    if visions:
        vision = Vision(
            torch.cat([each.pixel_values for each in visions]),
            torch.cat([each.grid_thw for each in visions]),
            tuple(key for each in visions for key in each.hashes),
            original_sizes=tuple(size for each in visions for size in each.original_sizes),
        )
    sampled = sum(length for _, length in turns)
    return Completion(tuple(token_ids), (0.0,) * sampled, "stop", "", 0, turns=tuple(made), vision=vision)


def make_prompt(
    processors: Processors,
    grids: Sequence[tuple[int, int]],
    *,
    seed: int,
    words_before: int = 6,
    words_after_image: int = 3,
) -> Prompt:
    """Return a prompt of random words and images of random pixels, with words in between.

    grids: (height, width) of each image, in patches.
    words_after_image: after each image. If 0, families without m-RoPE, which do not need them, have
    no tokens around an image either.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids = random_words(words_before, generator)
    vision = None
    if grids:
        family, config = processors.family, processors.hf_config
        side = family.patches_per_side(config)
        # For a vision tower of tiles, a grid becomes a number of tiles; 1 if the processor does not
        # split images. A family that puts tiles together has an image of this size.
        splits_images = any(hasattr(processors.image_processor, each) for each in SPLITTING_OPTIONS)
        sizes = [
            (height // side if splits_images else 1, side, side) if family.tiles else (1, height, width)
            for height, width in grids
        ]
        original_sizes: ImageSizes = ()
        if family.tile_assembly is not None:
            images = image_processor_of(processors)
            assert images is not None
            original_sizes = tuple((14 * width, 14 * height) for height, width in grids)
            sizes = [images.grid(*size) for size in original_sizes]
        begin, end = processors.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        counts = family.count_image_tokens(config, torch.tensor(sizes), original_sizes)
        for (time, height, width), count in zip(sizes, counts, strict=True):
            merge = family.spatial_merge(config)
            placeholders = [family.image_token_id(config)] * count
            if family.image_layout is not None:
                if family.tiles:
                    parts = family.image_layout(height * width // merge**2, time - 1, 1)
                else:
                    parts = family.image_layout(width // merge, height // merge, 1)
                encode = processors.tokenizer.encode
                runs = [encode(part) if isinstance(part, str) else placeholders[:part] for part in parts]
                placeholders = list(chain(*runs))
            # Where the tokens of an image attend to each other, adjacent ones would be one image.
            bare = family.rope == "1d" and words_after_image == 0 and family.image_layers == "none"
            token_ids += placeholders if bare else [begin, *placeholders, end]
            token_ids += random_words(words_after_image, generator)
        patches = sum(time * height * width for time, height, width in sizes)
        vision = Vision(
            pixel_values=torch.randn(patches, family.values_per_patch(config), generator=generator),
            grid_thw=torch.tensor(sizes),
            hashes=tuple(f"{seed}/{index}" for index in range(len(grids))),
            original_sizes=original_sizes,
        )
    return Prompt(
        prompt_id=f"test:{seed}",
        token_ids=tuple(token_ids),
        vision=vision,
        text="",
        ground_truth=None,
        row={},
        image_refs=tuple("" for _ in grids),
    )


def make_video_prompt(processors: Processors, grid: tuple[int, int, int], *, seconds: float, seed: int) -> Prompt:
    """Return a prompt of random words and a video of random pixels.

    grid: (time, height, width) in patches. seconds: covered by each of its temporal patches.
    """
    generator = torch.Generator().manual_seed(seed)
    family, config = processors.family, processors.hf_config
    begin, end = processors.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    time, height, width = grid
    tokens = [family.video_token_id(config)] * (height * width // family.spatial_merge(config) ** 2)
    token_ids = random_words(4, generator)
    if family.video == "timestamps":
        for _ in range(time):
            token_ids += [*random_words(2, generator), begin, *tokens, end]
    else:
        token_ids += [begin, *tokens * time, end]
    return Prompt(
        prompt_id=f"test:{seed}",
        token_ids=(*token_ids, *random_words(2, generator)),
        vision=Vision(
            pixel_values=torch.randn(time * height * width, family.values_per_patch(config), generator=generator),
            grid_thw=torch.tensor([grid]),
            hashes=(f"{seed}/video",),
            kind="video",
            temporal_patch_seconds=(seconds,),
        ),
        text="",
        ground_truth=None,
        row={},
        image_refs=(),
    )


def make_group(prompt: Prompt, lengths: Sequence[int], *, seed: int) -> RolloutGroup:
    """Return a prompt with a random completion of each length."""
    generator = torch.Generator().manual_seed(seed)
    return group_of(prompt, [tuple(random_words(length, generator)) for length in lengths])


def group_of(prompt: Prompt, completions: Sequence[tuple[int, ...]]) -> RolloutGroup:
    """Return a prompt with these completions."""
    score = Score(overall=0.0, parts={}, outcome="ok", error="")
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                completion=Completion(
                    token_ids=token_ids,
                    sampling_logprobs=(0.0,) * len(token_ids),
                    finish_reason="stop",
                    text="",
                    policy_version=0,
                ),
                score=score,
            )
            for token_ids in completions
        ),
    )


def random_words(count: int, generator: torch.Generator) -> list[int]:
    """Return random token ids below the special tokens of every tiny vocabulary."""
    return torch.randint(0, 900, (count,), generator=generator).tolist()


def pack_groups(
    processors: Processors, groups: Sequence[RolloutGroup], *, max_tokens: int = 1_000_000
) -> list[PackedRow]:
    """Return the packed rows of groups; one row unless max_tokens is less than they have."""
    positions = positions_of(processors.family, processors.hf_config)
    return pack_rollouts(groups, max_tokens=max_tokens, positions=positions)


def packed_logprobs(
    policy: Policy, processors: Processors, groups: Sequence[RolloutGroup], *, max_tokens: int = 1_000_000
) -> list[list[Tensor]]:
    """Return the policy's log-probabilities of each completion of each group: float32 [S] each."""
    rows = pack_groups(processors, groups, max_tokens=max_tokens)
    return by_group(rows, [policy(row.packed).logprobs for row in rows])


def concatenated(logprobs: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the log-probabilities of all completions of all groups in one tensor."""
    return torch.cat([values for group in logprobs for values in group])
