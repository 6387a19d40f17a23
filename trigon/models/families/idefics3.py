"""Idefics 3 and SmolVLM: an image is rows and columns of tiles, and one tile that shows all of it.

Tokens between the tiles name their rows and columns.
"""

from __future__ import annotations

from typing import Any

import transformers  # its classes are imported on first use
from torch import Tensor

from trigon.models.families.family import ModelFamily
from trigon.models.families.tiny import INITIAL_STD, TILE_SIZE, TILE_VISION, TinyModel, text_options

_TILES_PER_SIDE = 3
_TILE_TOKENS = 4
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


def image_layout(run_tokens: int, rows: int, columns: int) -> list[str | int]:
    """Return where the tiles of an image are; see ModelFamily. Without rows it is one tile."""
    parts: list[str | int] = []
    before = ""
    for row in range(rows):
        for column in range(columns):
            parts += [f"{before}{_AROUND}{_place(row, column)}", run_tokens]
            before = ""
        before = "\n" if row + 1 < rows else "\n\n"
    return [*parts, f"{before}{_AROUND}{_WHOLE}", run_tokens, _AROUND]


def tile_features(model: Any, tiles: Tensor) -> Tensor:
    """Return the features of tiles, [tiles, tokens, D], by the parts of the vision tower.

    transformers (5.19) computes the positions of patches in the dtype of the pixels: of 26 patches,
    bfloat16 would give 10 the position of a neighbour. All patches of a tile are used, so that
    their positions are the rows of the table, in order.
    """
    tower = model.model.vision_model
    patches = tower.embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
    states = tower.encoder(inputs_embeds=patches + tower.embeddings.position_embedding.weight).last_hidden_state
    features: Tensor = model.model.connector(tower.post_layernorm(states))
    return features


def _place(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _config(kind: Any, tokenizer: Any) -> Any:
    return kind(
        text_config=transformers.LlamaConfig(**text_options(tokenizer)).to_dict(),
        vision_config={**TILE_VISION, "initializer_range": INITIAL_STD},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        scale_factor=2,
    )


def _idefics3(tokenizer: Any) -> Any:
    return _config(transformers.Idefics3Config, tokenizer)


def _smolvlm(tokenizer: Any) -> Any:
    return _config(transformers.SmolVLMConfig, tokenizer)


_SIZES = {"size": {"longest_edge": _TILES_PER_SIDE * TILE_SIZE}, "max_image_size": {"longest_edge": TILE_SIZE}}


def _idefics3_processor(tokenizer: Any) -> Any:
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(**_SIZES),
        tokenizer=tokenizer,
        image_seq_len=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


def _smolvlm_processor(tokenizer: Any) -> Any:
    """Return the processor. Raises: ImportError without num2words, which it needs for videos."""
    return transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(**_SIZES),
        tokenizer=tokenizer,
        video_processor=transformers.SmolVLMVideoProcessor(
            **_SIZES, video_sampling={"fps": 1, "max_frames": 8, "video_size": {"longest_edge": TILE_SIZE}}
        ),
        image_seq_len=_TILE_TOKENS,
        chat_template=tokenizer.chat_template,
    )


def _family(model_type: str, config: Any, processor: Any, *, engine_packages: tuple[str, ...] = ()) -> ModelFamily:
    places = (_place(row, column) for row in range(_TILES_PER_SIDE) for column in range(_TILES_PER_SIDE))
    return ModelFamily(
        model_type=model_type,
        tiny=TinyModel(
            config,
            processor,
            added_tokens=(_AROUND, "<image>", "<end_of_utterance>", _WHOLE, *places),
            image_text="<image>",
        ),
        language_path="model.text_model",
        vision_path="model.vision_model",
        vision_input="tiles",
        tower_type=f"{model_type}_vision",
        projector_path="model.connector",
        language_types=("llama",),
        vision_layers="encoder.layers",
        image_layout=image_layout,
        tile_features=tile_features,
        engine_packages=engine_packages,
    )


FAMILIES = (
    _family("idefics3", _idefics3, _idefics3_processor),
    _family("smolvlm", _smolvlm, _smolvlm_processor, engine_packages=("num2words",)),
)
