"""PromptBuilders and datasets with default arguments for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from support.images import encoded
from trigon.config.schema import DataConfig
from trigon.data.dataset import open_prompts
from trigon.data.prompts import PromptBuilder
from trigon.data.stream import Prompts, mix
from trigon.models.load import Processors
from trigon.types import Prompt

DEFAULTS: dict[str, Any] = {
    "prompt_key": "problem",
    "max_prompt_length": 512,
    "max_image_pixels": 1_000_000,
    "max_bad_row_fraction": 0.0,
}


def make_builder(processors: Processors, **changes: Any) -> PromptBuilder:
    """Return a builder for the columns problem, answer, images and videos.

    changes: options of the section data, and arguments of PromptBuilder.
    """
    data = {name: value for name, value in changes.items() if name in DataConfig.model_fields}
    arguments = {name: value for name, value in changes.items() if name not in data}
    return PromptBuilder(processors, DataConfig(**(DEFAULTS | data)), **arguments)


def prompt_and_inputs(
    folder: Path, processors: Processors, problem: str, images: Sequence[Image.Image]
) -> tuple[Prompt, Any]:
    """Return the prompt of a question, and the inputs that the model's own processor makes of it.

    Fails unless both have the same tokens, as many as the builder counts beforehand.
    """
    from transformers import AutoProcessor

    builder = make_builder(processors, system_prompt="Be brief.", max_prompt_length=4096)
    row = {"problem": problem, "answer": "1", "images": [encoded(image, "PNG") for image in images]}
    prompt = builder.build(row, "train:0")
    assert builder.measure(row, "train:0")[0] == len(prompt.token_ids)

    hugging_face = AutoProcessor.from_pretrained(folder)
    content: list[dict[str, str]] = []
    for number, text in enumerate(problem.split("<image>")):
        content += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": content},
    ]
    text = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = hugging_face(text=[text], images=[*images] or None, return_tensors="pt")
    assert list(prompt.token_ids) == inputs["input_ids"][0].tolist()
    return prompt, inputs


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write a file of JSON lines, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(specs: str | Sequence[str], builder: PromptBuilder, weights: Sequence[float] = ()) -> Prompts:
    """Return the prompts of one or several datasets."""
    each = [specs] if isinstance(specs, str) else specs
    return mix([open_prompts(spec, builder, num_workers=1) for spec in each], weights)
