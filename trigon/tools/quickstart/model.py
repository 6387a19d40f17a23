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
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou answer questions about pictures.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
# The training text of the tokenizer. Frequent words become single tokens first, so many sentences
# are close to the prompts and completions of the tests; the others give tokens for ordinary
# English. A change changes all token ids.
_CORPUS = (
    (
        r"<think> </think> \boxed{0} \boxed{1} \boxed{2} \boxed{3} \boxed{4} \boxed{5} \boxed{6} \boxed{7} "
        r"\boxed{8} \boxed{9}"
    ),
    r"<think> I look at the drawing. </think> \boxed{12} <think> I see it in the picture. </think> \boxed{30}",
    r"First think between <think> and </think>, then give the final answer in \boxed{}. The answer is a number.",
    "system\nYou answer questions about pictures.",
    "user\nFirst come the picture and the question.",
    "assistant\nThen comes the answer. You are a helpful assistant.",
    "I look at the drawing and see that the answer is one, two, three, four, five, six, seven, eight, nine, ten.",
    "How many sides does the polygon in the drawing have? The polygon has three sides. How many corners can you see?",
    "At which mark of the ruler is the point P? The point lies on the line, between the first and the last mark.",
    "What is the measure of the angle in degrees? The angle between the two rays measures 30, 45, 60, 90, 120 degrees.",
    "Find the length of the side. Find x. Find the area of the shaded triangle, square, circle, rectangle or pentagon.",
    "What number does the dot stand on? Which segment of the figure is marked? Count the shapes in the image.",
    (
        "The question is about the picture, and the picture shows what the question does not say, so one has "
        "to look at it."
    ),
    "The radius of a circle is half of its diameter; a square has four equal sides and four right angles.",
    "If the sum of two angles is known, then the third angle of a triangle follows, for all three make a half turn.",
    "Reason step by step, check the result, and write down only what you are sure of. Put the result at the end.",
    "red green blue yellow black white left right top bottom above below inside outside near far small large",
    "We start from what is given, name what is wanted, and go from one to the other in steps that anyone can follow.",
    (
        "This is not the only way to do it, but it is short. Here is another: draw a line through the middle "
        "of the figure."
    ),
    "Please explain your answer in a few words. Let me think about it. Wait, that would be more than the whole.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, i))\n",
    "There were people who had been there before, and they could tell which of these things would work and which not.",
    (
        "Mathematics describes numbers, shapes, quantities and change; geometry, algebra, statistics and "
        "calculus are branches."
    ),
    (
        "Measure twice before cutting once. Estimate roughly, calculate carefully, compare, and round "
        "towards the nearest integer."
    ),
    (
        "Parallel lines never cross, perpendicular lines meet at ninety degrees, and a tangent touches its "
        "circle at a single point."
    ),
    (
        "Opposite edges of a parallelogram have equal lengths. A hexagon has six vertices, an octagon eight, "
        "a trapezoid only four."
    ),
    (
        "Colour, brightness, position, rotation, texture and size vary from image to image, so remembering "
        "pixels does not help."
    ),
    "Reinforcement learning rewards good samples and discourages bad ones until the policy improves during training.",
    "Yesterday morning several children walked along the river, picked flowers, watched birds and talked about school.",
    "Bread, butter, apples, cheese, coffee and fresh water were bought cheaply from the small market behind our house.",
    "Please write a short program which reads every file, counts its lines, sorts them by name and prints the totals.",
    (
        "import numpy as np\nclass Model:\n    def forward(self, x):\n        if x is None:\n            "
        "raise ValueError(x)\n"
    ),
)


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

    template = CHAT_TEMPLATE
    image_text = family.tiny.image_text
    if family.image_text is not None:
        image_text = family.image_text[0].format(**family.tiny.special_tokens)
    template = template.replace(_IMAGE_IN_TEMPLATE, image_text)
    special_tokens = dict(family.tiny.special_tokens)
    # The untrained tokenizer has Qwen's normalizer, pre-tokenizer and decoder, with which the
    # merges are learned.
    learner = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_ENTRIES - len(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(_CORPUS, trainer)
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
