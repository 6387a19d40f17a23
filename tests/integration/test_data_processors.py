"""Prompts equal those that the Hugging Face processor builds from the same messages and images."""

import pytest
import torch

from support.builders import make_builder
from support.images import encoded, noise
from trigon.models.load import load_processors

SYSTEM = "Be brief."


def part(text):
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}

CASES = [
    ("What is 1 + 1?", [], [part("What is 1 + 1?")]),
    ("<image>What is it?", [(56, 56)], [IMAGE, part("What is it?")]),
    (
        "Look: <image>\nand <image>. Alike?",
        [(300, 40), (17, 90)],
        [part("Look: "), IMAGE, part("\nand "), IMAGE, part(". Alike?")],
    ),
    ("<image><image><image>", [(1, 1), (500, 400), (64, 64)], [IMAGE, IMAGE, IMAGE]),
    ("Grüße, 数学, \U0001f600 <image> end ", [(80, 120)], [part("Grüße, 数学, \U0001f600 "), IMAGE, part(" end ")]),
]


@pytest.mark.extended(but=["qwen2_5_vl"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v"])
@pytest.mark.parametrize(("problem", "sizes", "content"), CASES)
@pytest.mark.parametrize("pixels", [None, (6_000, 20_000)])
def test_prompts_equal_those_of_the_hugging_face_processor(tiny_model, model_type, problem, sizes, content, pixels):
    folder = str(tiny_model(model_type))
    min_pixels, max_pixels = pixels or (None, None)
    # Also makes torchvision importable for transformers.
    processors = load_processors(folder, min_pixels=min_pixels, max_pixels=max_pixels)
    from transformers import AutoProcessor

    reference = AutoProcessor.from_pretrained(folder)
    if pixels is not None:
        frames = processors.family.frames_per_image
        reference.image_processor.size = {"shortest_edge": frames * min_pixels, "longest_edge": frames * max_pixels}
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    builder = make_builder(processors, system_prompt=SYSTEM, max_prompt_length=4096)
    row = {"problem": problem, "answer": "1", "images": [encoded(image, "PNG") for image in images]}
    prompt = builder.build(row, "train:0")
    assert builder.measure(row, "train:0")[0] == len(prompt.token_ids)

    messages = [{"role": "system", "content": [part(SYSTEM)]}, {"role": "user", "content": content}]
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = reference(text=[text], images=images or None, return_tensors="pt")
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    if images:
        assert torch.equal(prompt.vision.pixel_values, expected["pixel_values"])
        assert torch.equal(prompt.vision.grid_thw, expected["image_grid_thw"])
    else:
        assert prompt.vision is None
        assert "pixel_values" not in expected
