"""Rollout engine and trainer receive the same pixel values, processed once per prompt."""

import hashlib

import datasets
import torch

from support.builders import make_builder, prompts_of
from support.images import png
from trigon.data.packing import pack_rollouts
from trigon.data.stream import PromptStream
from trigon.models.load import load_processors
from trigon.models.positions import prompt_positions
from trigon.types import Completion, Rollout, RolloutGroup, Score

NUM_COMPLETIONS = 5


def sampled(prompt):
    """Return a group as a rollout engine returns it, with the prompt object that it received."""
    completion = Completion((5, 6), (0.0, 0.0), "stop", "", 0)
    rollout = Rollout(completion, Score(1.0, {"overall": 1.0}, "ok", ""))
    return RolloutGroup(prompt, (rollout,) * NUM_COMPLETIONS)


def content_hashes(pixel_values, grid_thw):
    """Return the SHA-256 of grid and pixel values of each image."""
    parts = pixel_values.split(grid_thw.prod(dim=1).tolist())
    pairs = zip(grid_thw, parts, strict=True)
    return [hashlib.sha256(grid.numpy().tobytes() + part.numpy().tobytes()).hexdigest() for grid, part in pairs]


def test_rollout_and_trainer_receive_identical_pixel_values(tiny_vlm, tmp_path):
    processors = load_processors(str(tiny_vlm))
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    images = [[png(60 + 9 * i + j, 70, seed=10 * i + j) for j in range(i % 3)] for i in range(6)]
    rows = {
        "images": [[{"bytes": data, "path": None} for data in several] for several in images],
        "problem": ["<image>" * len(several) + "What is it?" for several in images],
        "answer": ["1"] * len(images),
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    builder = make_builder(processors)
    prompt_set = prompts_of(str(tmp_path / "train.parquet"), builder)
    stream = PromptStream(prompt_set, batch_size=6, seed=1, shuffle=True, prefetch=False, num_workers=2)
    prompts = stream.take(6)
    stream.close()
    assert builder.image_processor.calls == 4  # for the four prompts with images, for any n

    rollout_hashes = [name for prompt in prompts if prompt.vision is not None for name in prompt.vision.hashes]
    assert len(set(rollout_hashes)) == 6

    def positions(prompt):
        grid = None if prompt.vision is None else prompt.vision.grid_thw
        ids = torch.tensor(prompt.token_ids)
        return prompt_positions(ids, grid, processors.family, processors.hf_config)

    (row,) = pack_rollouts([sampled(prompt) for prompt in prompts], max_tokens=100_000, positions=positions)
    hashes = [content_hashes(vision.pixel_values, vision.grid_thw) for vision in row.packed.visions]
    assert [name for of_prompt in hashes for name in of_prompt] == rollout_hashes
    assert builder.image_processor.calls == 4
