"""Makes tiny model folders with random weights and all files of a published checkpoint.

Each family's file in trigon/models/families/ describes its tiny model. With it come a tokenizer,
image and video processors and a generation config. The tokenizer is byte-level BPE with Qwen's
special tokens and chat layout, trained on a text that is built in. The same arguments give the same
bytes, independent of the global random state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trigon.models.families import ModelFamily, family_named
from trigon.models.load import auto_class, without_progress_bars
from trigon.models.weight_files import save_weights, set_default_mode

VOCAB_ENTRIES = 1024
# In Qwen's order. They are the last ids of the vocabulary.
_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_IMAGE_IN_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
TEXTS = Path(__file__).with_name("tokenizer_texts.json")
"""The training text of the tokenizer.

Frequent words become single tokens first, so many sentences are close to the prompts and
completions of the tests; the others give tokens for ordinary English. A change changes all token
ids.
"""


def make_tiny(
    folder: Path,
    *,
    model_type: str = "qwen2_5_vl",
    seed: int = 0,
    tie_word_embeddings: bool = False,
) -> Path:
    """Write a model folder with random float32 weights, and return it.

    The model has less than a million parameters. The folder is created if missing; existing files
    are overwritten. It loads with AutoConfig, AutoTokenizer, AutoProcessor and
    AutoModelForImageTextToText (AutoModelForCausalLM for the text families), and in vLLM.
    Raises: ModelError for an unknown model_type.
    """
    family = family_named(model_type)
    model_class = auto_class(family)
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(family)
    processor = tokenizer if family.tiny.processor is None else family.tiny.processor(tokenizer)
    processor.save_pretrained(folder)

    config = family.tiny.config(tokenizer)
    config.tie_word_embeddings = tie_word_embeddings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class.from_config(config, dtype=torch.float32)
        if family.tiny.initialize is not None:
            family.tiny.initialize(model)
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text
    )
    with without_progress_bars():
        model.save_pretrained(folder)
    set_default_mode(list(folder.glob("*.safetensors")))
    if not family.tiny.saves_published_names:
        _save_as_published(folder, model, family)
    return folder


def _save_as_published(folder: Path, model: Any, family: ModelFamily) -> None:
    """Write the weights again, with the names and shapes of published checkpoints."""
    tensors = {
        name: tensor.detach().contiguous()
        for parameter_name, parameter in model.named_parameters()
        for name, tensor in family.checkpoint_tensors(parameter_name, parameter)
    }
    save_weights(tensors, folder / "model.safetensors")


def train_tokenizer(family: ModelFamily) -> Any:
    """Return a Qwen2 tokenizer: 256 bytes, merges, special tokens, and those that a family adds.

    All but the last are VOCAB_ENTRIES.
    """
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    image_text = family.tiny.image_text
    if family.image_text is not None:
        image_text = family.image_text[0].format(**family.tiny.special_tokens)
    template = CHAT_TEMPLATE.read_text(encoding="utf-8").replace(_IMAGE_IN_TEMPLATE, image_text)
    special_tokens = dict(family.tiny.special_tokens)
    # The untrained tokenizer has Qwen's normalizer, pre-tokenizer and decoder, with which the
    # merges are learned.
    learner = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_ENTRIES - len(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(json.loads(TEXTS.read_text(encoding="utf-8")), trainer)
    learned = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        model_max_length=4096,
        chat_template=template,
        **({"extra_special_tokens": special_tokens} if special_tokens else {}),
    )
    tokens = (*_SPECIAL_TOKENS, *family.tiny.added_tokens)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    tokenizer.eos_token = "<|im_end|>"  # set in the constructor, it would get the first special id
    return tokenizer
