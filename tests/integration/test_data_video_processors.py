"""Prompts with videos equal those of the Hugging Face processors, in token ids and pixel values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.builders import make_builder
from support.images import counting
from support.oracle import load_hugging_face
from support.videos import make_video
from trigon.data.media_files import MediaSource
from trigon.data.media_processing import MediaProcessor
from trigon.data.videos import FrameSampling, open_video
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.distributed.messages import for_sampling, pack, unpack
from trigon.models.load import Processors, load_processors
from trigon.models.positions import completion_positions, positions_of
from trigon.system.torchvision_stub import declare_operators
from trigon.types import EncodedMedia, Prompt, Vision

pytestmark = pytest.mark.extended

MODELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
SAMPLING = FrameSampling(fps=2.0, max_frames=6)

# Sides are longer than the video lasts, since transformers continues text positions differently
# otherwise; temporal patches last full seconds, since transformers 5.16 truncates fractions.
SHORT = {"frames": 30, "fps": 10, "width": 280, "height": 224}


def row(problem: str, *videos: Any, **others: Any) -> dict[str, Any]:
    return {"problem": problem, "answer": "1", "videos": list(videos), **others}


def reference_inputs(folder: Path, processors: Processors, problem: list[dict[str, str]], videos: list[bytes]) -> Any:
    """Return the output of the transformers processor for the frames that Trigon samples."""
    declare_operators()
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(
        [{"role": "user", "content": problem}], tokenize=False, add_generation_prompt=True
    )
    sampled, metadata = [], []
    for video in videos:
        layout, frames = open_video(MediaSource(video, "", 10**6), SAMPLING)
        all_frames = open_video(MediaSource(video, "", 10**6), FrameSampling(1000.0, 768))[0]
        fps = 1 / (all_frames.seconds[1] - all_frames.seconds[0])
        indices = [round(second * fps) for second in layout.seconds]
        sampled.append(np.stack(list(frames)))
        metadata.append(VideoMetadata(len(all_frames.seconds), fps=round(fps), frames_indices=indices))
    return processor(
        text=[text],
        videos=sampled,
        video_metadata=metadata,
        do_sample_frames=False,
        videos_kwargs={"size": size_of(processors, sampled[0])},
        return_tensors="pt",
    )


def size_of(processors: Processors, frames: np.ndarray) -> dict[str, int]:
    """Return the pixel limits of an image for each frame, as an option of the video processor."""
    factor = len(frames) if processors.family.video == "timestamps" else 1
    limits = processors.image_processor.size
    return {edge: limits[edge] * factor for edge in ("shortest_edge", "longest_edge")}


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("clips", [(SHORT,), (SHORT, {**SHORT, "first": 5})], ids=["one", "two"])
def test_prompts_equal_those_of_transformers(
    tiny_model: Callable[..., Path], model_type: str, clips: tuple[dict[str, int], ...]
) -> None:
    folder = tiny_model(model_type)
    processors = load_processors(str(folder), max_pixels=280 * 280)
    videos = [make_video(**clip) for clip in clips]
    builder = make_builder(processors, max_prompt_length=2000, max_video_frames=6)
    one_row = row("See " + "<video>" * len(videos) + " and say.", *videos)
    prompt = builder.build(one_row, "train:0")
    assert builder.measure(one_row, "train:0")[0] == len(prompt.token_ids)
    assert builder.inspect(one_row, "train:0").token_ids == prompt.token_ids

    problem = [
        {"type": "text", "text": "See "},
        *[{"type": "video"}] * len(videos),
        {"type": "text", "text": " and say."},
    ]
    expected = reference_inputs(folder, processors, problem, videos)
    assert prompt.token_ids == tuple(expected["input_ids"][0].tolist())
    vision = prompt.pixels()
    assert vision is not None
    assert vision.kind == "video"
    assert torch.equal(vision.grid_thw, expected["video_grid_thw"])
    torch.testing.assert_close(vision.pixel_values, expected["pixel_values_videos"], rtol=0, atol=0)
    if "second_per_grid_ts" in expected:
        assert vision.temporal_patch_seconds == tuple(expected["second_per_grid_ts"].tolist())

    positions, shift = load_hugging_face(folder, torch.float32).model.get_rope_index(
        expected["input_ids"],
        mm_token_type_ids=expected["mm_token_type_ids"],
        video_grid_thw=expected["video_grid_thw"],
        second_per_grid_ts=expected.get("second_per_grid_ts"),
    )
    own_positions = positions_of(processors.family, processors.hf_config)(prompt)
    assert torch.equal(own_positions, positions[:, 0])
    assert completion_positions(own_positions, 1)[0, 0] == len(prompt.token_ids) + shift[0, 0]


def test_text_positions_continue_after_the_last_second_of_a_long_video(tiny_vlm: Path) -> None:
    """A video lasts longer than its sides are long: as in vLLM, see models/positions.py."""
    processors = load_processors(str(tiny_vlm))
    builder = make_builder(processors)
    prompt = builder.build(row("<video>", make_video(frames=40, fps=2, width=56, height=56)), "train:0")
    positions = positions_of(processors.family, processors.hf_config)(prompt)
    video = torch.tensor(prompt.token_ids) == processors.hf_config.video_token_id
    start = int(video.int().argmax())
    assert processors.hf_config.vision_config.tokens_per_second == 4
    assert positions[0, video].unique().tolist() == [start + 4 * second for second in range(20)]
    after = int(video.nonzero().max()) + 1
    assert positions[:, after].tolist() == [start + 4 * 19 + 1] * 3


@pytest.mark.parametrize("model_type", MODELS)
def test_prompts_sent_to_a_worker_get_the_same_pixel_values(tiny_model: Callable[..., Path], model_type: str) -> None:
    processors = counting(load_processors(str(tiny_model(model_type))))
    with_pixels = make_builder(processors, max_video_frames=6)
    with_files = make_builder(processors, max_video_frames=6, process_images=False)
    rows = [row("<video><video>?", make_video(), make_video(frames=5, first=2)), row("<video>?", make_video(fps=3))]
    sent = [with_files.build(each, f"train:{number}") for number, each in enumerate(rows)]
    assert processors.video_processor.calls == 0
    built = [with_pixels.build(each, f"train:{number}") for number, each in enumerate(rows)]
    num_pairs = processors.video_processor.calls
    assert [prompt.token_ids for prompt in sent] == [prompt.token_ids for prompt in built]
    assert [prompt.vision.kind for prompt in sent if isinstance(prompt.vision, EncodedMedia)] == ["video", "video"]

    images, videos = image_processor_of(processors), video_processor_of(processors)
    assert images is not None
    assert videos is not None
    media = MediaProcessor(
        images,
        max_image_pixels=10**6,
        num_workers=2,
        max_bytes=10**8,
        video_processor=videos,
        video_sampling=SAMPLING,
    )
    try:
        received = media.process(unpack(pack(for_sampling(sent, with_rows=False))))
        assert media.process(unpack(pack(for_sampling(sent, with_rows=False))))[0].vision is received[0].vision
    finally:
        media.close()
    assert processors.video_processor.calls == 2 * num_pairs
    for one, other in zip(built, received, strict=True):
        assert_same_vision(one, other)


def assert_same_vision(one: Prompt, other: Prompt) -> None:
    left, right = one.pixels(), other.pixels()
    assert isinstance(left, Vision)
    assert isinstance(right, Vision)
    assert torch.equal(left.pixel_values, right.pixel_values)
    assert torch.equal(left.grid_thw, right.grid_thw)
    assert (left.hashes, left.kind, left.temporal_patch_seconds) == (
        right.hashes,
        right.kind,
        right.temporal_patch_seconds,
    )


def test_the_same_frames_with_other_times_have_another_hash(tiny_vlm: Path) -> None:
    """Engines cache a video by its hash, and its keys and values depend on its times."""
    processor = video_processor_of(load_processors(str(tiny_vlm)))
    assert processor is not None
    video = make_video()  # encoded once: equal frames are not always encoded to equal bytes

    def process_with(seconds: float) -> Vision:
        layout, frames = open_video(MediaSource(video, "", 10**6), SAMPLING)
        return processor.process([(replace(layout, temporal_patch_seconds=seconds), frames)])

    slow, fast, again = process_with(2.0), process_with(1.0), process_with(2.0)
    assert torch.equal(slow.pixel_values, fast.pixel_values)
    assert slow.hashes == again.hashes != fast.hashes
