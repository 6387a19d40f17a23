"""Makes tiny model folders with random weights and all files of a published checkpoint.

Each family's file in trigon/models/families/ describes its tiny model. With it come a tokenizer,
image and video processors and a generation config. The same arguments give the same bytes,
independent of the global random state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trigon.models.families import ModelFamily, family_named
from trigon.models.load import auto_class, without_progress_bars
from trigon.models.weight_files import save_weights, set_default_mode
from trigon.tools.quickstart.tokenizer import train_tokenizer


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
