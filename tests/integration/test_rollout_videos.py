"""Videos in both rollout engines: log-probabilities equal the trainer's on the same frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.builders import make_builder
from support.images import png
from support.oracle import packed_logprobs
from support.rollout import make_transformers_engine, make_vllm_engine
from support.videos import make_video
from trigon.errors import EngineError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.vllm import VllmEngine
from trigon.types import Completion, LocalWeights, Prompt, Rollout, RolloutGroup, SamplingParams, Score

pytestmark = pytest.mark.extended

MAX_MODEL_LEN = 512
SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
SCENES = [
    ("vllm", "qwen2_5_vl"),
    ("vllm", "qwen3_vl"),
    ("transformers", "qwen2_5_vl"),
    pytest.param(("vllm", "qwen2_vl"), marks=pytest.mark.long),
    pytest.param(("transformers", "qwen2_vl"), marks=pytest.mark.long),
    pytest.param(("transformers", "qwen3_vl"), marks=pytest.mark.long),
    pytest.param(("transformers", "qwen3_5"), marks=pytest.mark.long),
]


@dataclass
class Scene:
    engine: Any
    policy: Policy
    processors: Processors
    prompts: list[Prompt]

    def generate(self, prompts: list[Prompt]) -> list[list[Completion]]:
        with self.engine.awake(LocalWeights(self.policy.named_weights), version=0):
            completions: list[list[Completion]] = self.engine.generate(prompts, SAMPLING)
        return completions

    @torch.no_grad()
    def max_difference(self, prompts: list[Prompt], completions: list[list[Completion]]) -> float:
        """Return the largest |log-probability difference| between engine and packed trainer."""
        score = Score(0.0, {}, "ok", "")
        groups = [
            RolloutGroup(prompt, tuple(Rollout(completion, score) for completion in row))
            for prompt, row in zip(prompts, completions, strict=True)
        ]
        trainer_logprobs = packed_logprobs(self.policy, self.processors, groups, max_tokens=700)
        return max(
            float((logprobs - torch.tensor(completion.sampling_logprobs)).abs().max())
            for group, row in zip(trainer_logprobs, completions, strict=True)
            for logprobs, completion in zip(group, row, strict=True)
        )


@pytest.fixture(scope="module", params=SCENES, ids="-".join)
def scene(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Scene]:
    name, model_type = request.param
    folder = str(tiny_model(model_type))
    processors = load_processors(folder)
    engine: Any
    if name == "vllm":
        engine = make_vllm_engine(
            folder, processors, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_MODEL_LEN, shows_videos=True
        )  # limit_images, which is 1, does not apply to videos
    else:
        engine = make_transformers_engine(folder, processors, max_model_len=MAX_MODEL_LEN)
    policy = Policy(
        load_model(folder, dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=SAMPLING.temperature,
        banned_token_ids=processors.banned_token_ids,
    )
    builder = make_builder(processors, max_video_frames=20)
    rows = [
        ("<video>How many?", [make_video()]),
        ("Which of <video> and <video>?", [make_video(frames=30, fps=7), make_video(frames=5, fps=3, first=4)]),
        ("Find x.", []),
        # A long video of small frames, followed by text; it fills several blocks of vLLM's KV
        # cache.
        ("<video>What then?", [make_video(frames=60, fps=5, width=56, height=56)]),
        ("<video>What then?", [make_video(frames=60, fps=6, width=56, height=56)]),
        # One frame, three, and 0.4 seconds.
        ("<video>?", [make_video(frames=1)]),
        ("<video>?", [make_video(frames=3, fps=1)]),
        ("<video>?", [make_video(frames=10, fps=25)]),
    ]
    prompts = [
        builder.build({"problem": text, "answer": "", "videos": videos}, f"train:{number}")
        for number, (text, videos) in enumerate(rows)
    ]
    yield Scene(engine, policy, processors, prompts)
    engine.close()


@pytest.mark.vllm(cases=["vllm"])
def test_sampling_logprobs_equal_the_trainers_for_videos(scene: Scene) -> None:
    assert scene.max_difference(scene.prompts, scene.generate(scene.prompts)) < 1e-4


@pytest.mark.vllm(cases=["vllm"])
def test_sampling_logprobs_equal_the_trainers_for_images_and_videos_in_one_batch(scene: Scene) -> None:
    image_prompt = make_builder(scene.processors).build(
        {"problem": "<image>Find x.", "answer": "", "images": [png(84, 84)]}, "train:9"
    )
    prompts = [scene.prompts[0], image_prompt, scene.prompts[1]]
    assert scene.max_difference(prompts, scene.generate(prompts)) < 1e-4


@pytest.mark.vllm(cases=["vllm"])
def test_log_probabilities_depend_on_the_frames(scene: Scene) -> None:
    """So the other tests would detect an engine that ignores them."""
    prompt = scene.prompts[0]
    vision = prompt.pixels()
    assert vision is not None
    other = replace(vision, pixel_values=-vision.pixel_values, hashes=("another",))
    completions = scene.generate([prompt])
    assert scene.max_difference([replace(prompt, vision=other)], completions) > 1e-2


@pytest.mark.vllm(cases=["vllm"])
def test_the_frame_rate_of_a_video_changes_the_log_probabilities_of_engine_and_trainer(scene: Scene) -> None:
    """Qwen2.5-VL encodes a video's times in its positions only."""
    if scene.processors.family.video != "seconds":
        pytest.skip("this family writes times as text, or not at all")
    prompt = scene.prompts[3]
    vision = prompt.pixels()
    assert vision is not None
    slower = replace(prompt, vision=replace(vision, temporal_patch_seconds=(3.3,), hashes=("slower",)))
    completions = scene.generate([slower])
    assert scene.max_difference([slower], completions) < 1e-4
    assert scene.max_difference([prompt], completions) > 1e-3


@pytest.mark.vllm(cases=["vllm"])
def test_placeholders_that_do_not_match_the_videos_raise(scene: Scene) -> None:
    if not isinstance(scene.engine, VllmEngine):
        pytest.skip("the model of transformers has a check of its own")
    prompt = scene.prompts[0]
    token = scene.processors.hf_config.video_token_id
    cut = replace(prompt, token_ids=tuple(each for each in prompt.token_ids if each != token))
    with pytest.raises(EngineError, match="0 video placeholders do not match videos of"):
        scene.generate([cut])
    assert scene.max_difference([prompt], scene.generate([prompt])) < 1e-4


@pytest.mark.vllm(cases=["vllm"])
def test_a_video_larger_than_the_encoder_cache_raises(scene: Scene) -> None:
    if not isinstance(scene.engine, VllmEngine):
        pytest.skip("only vLLM has an encoder cache")
    encoder_tokens, scene.engine._encoder_tokens = scene.engine._encoder_tokens, 20
    try:
        with pytest.raises(EngineError, match=r"worker\.rollout\.max_num_batched_tokens, which is 20"):
            scene.generate([scene.prompts[3]])
    finally:
        scene.engine._encoder_tokens = encoder_tokens
