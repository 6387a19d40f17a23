"""A PromptBuilder with default arguments for tests."""

from __future__ import annotations

from typing import Any

from trigon.data.prompts import PromptBuilder
from trigon.models.load import Processors

DEFAULTS: dict[str, Any] = {
    "prompt_key": "problem",
    "answer_key": "answer",
    "image_key": "images",
    "image_dir": None,
    "format_prompt": None,
    "system_prompt": None,
    "max_prompt_length": 512,
    "max_image_pixels": 1_000_000,
    "limit_images": 0,
}


def make_builder(processors: Processors, **changes: Any) -> PromptBuilder:
    """Return a builder for the columns problem, answer, images and videos."""
    return PromptBuilder(processors, **(DEFAULTS | changes))
