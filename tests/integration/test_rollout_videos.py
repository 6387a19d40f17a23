"""Videos in both rollout engines: what they sampled is as likely to the trainer, and they see the very same frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.builders import make_builder
from support.videos import make_video
from trigon.data.packing import by_group, pack_rollouts
from trigon.data.videos import FrameSampling
from trigon.errors import EngineError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.rollout.transformers import TransformersEngine
from trigon.rollout.vllm import VllmEngine
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

MAX_MODEL_LEN = 512
SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
SCENES = [(engine, model) for engine in ("vllm", "transformers") for model in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")]


@dataclass
class Scene:
    engine: Any
    policy: Policy
    processors: Processors
    prompts: list[Prompt]

    def generate(self, prompts: list[Prompt]) -> list[list[Completion]]:
        with self.engine.awake(self.policy.named_weights(), version=0):
            found: list[list[Completion]] = self.engine.generate(prompts, SAMPLING, step=1)
        return found

    @torch.no_grad()
    def disagreement(self, prompts: list[Prompt], answers: list[list[Completion]]) -> float:
        """Return the largest |log-probability difference| between engine and trainer, all packed together."""
        score = Score(0.0, {}, "ok", "")
        groups = [
            RolloutGroup(prompt, tuple(Rollout(answer, score) for answer in row))
            for prompt, row in zip(prompts, answers, strict=True)
        ]
        rows = pack_rollouts(
            groups, max_tokens=700, positions=positions_of(self.processors.family, self.processors.hf_config)
        )
        ours = by_group(rows, [self.policy(row.packed).logprobs for row in rows])
        return max(
            float((logprobs - torch.tensor(answer.sampling_logprobs)).abs().max())
            for group, row in zip(ours, answers, strict=True)
            for logprobs, answer in zip(group, row, strict=True)
        )


@pytest.fixture(scope="module", params=SCENES, ids="-".join)
def scene(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Scene]:
    name, model_type = request.param
    folder = str(tiny_model(model_type))
    processors = load_processors(folder)
    common: dict[str, Any] = {
        "model_path": folder,
        "processors": processors,
        "device": "cpu",
        "dtype": torch.float32,
        "max_model_len": MAX_MODEL_LEN,
        "trust_remote_code": False,
        "override_config": {},
        "skip_special_tokens": True,
    }
    engine: Any
    if name == "vllm":
        engine = VllmEngine(
            shows_videos=True,
            **common,
            max_num_batched_tokens=MAX_MODEL_LEN,
            gpu_memory_utilization=0.5,
            enforce_eager=True,
            enable_chunked_prefill=False,
            enable_prefix_caching=True,
            limit_images=1,  # says nothing about videos
            seed=0,
            disable_log_stats=True,
        )
    else:
        engine = TransformersEngine(**common)
    policy = Policy(
        load_model(folder, dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=SAMPLING.temperature,
        banned_token_ids=processors.banned_token_ids,
    )
    builder = make_builder(processors, video_sampling=FrameSampling(fps=2.0, max_frames=20))
    rows = [
        ("<video>How many?", [make_video()]),
        ("Which of <video> and <video>?", [make_video(frames=30, fps=7), make_video(frames=5, fps=3, first=4)]),
        ("Find x.", []),
        # A long video of small frames, behind whose last moment the text goes on; it fills blocks of vLLM's cache.
        ("<video>What then?", [make_video(frames=60, fps=5, width=56, height=56)]),
        ("<video>What then?", [make_video(frames=60, fps=6, width=56, height=56)]),
    ]
    prompts = [
        builder.build({"problem": text, "answer": "", "videos": videos}, f"train:{number}")
        for number, (text, videos) in enumerate(rows)
    ]
    yield Scene(engine, policy, processors, prompts)
    engine.close()


def test_engine_and_trainer_agree_about_videos(scene: Scene) -> None:
    assert scene.disagreement(scene.prompts, scene.generate(scene.prompts)) < 1e-4


def test_images_and_videos_share_a_batch(scene: Scene) -> None:
    from test_rollout_engines import png

    pictured = make_builder(scene.processors).build(
        {"problem": "<image>Find x.", "answer": "", "images": [png(0, 84, 84)]}, "train:9"
    )
    prompts = [scene.prompts[0], pictured, scene.prompts[1]]
    assert scene.disagreement(prompts, scene.generate(prompts)) < 1e-4


def test_the_answer_depends_on_the_frames(scene: Scene) -> None:
    """Else nothing here would notice a blind engine."""
    prompt = scene.prompts[0]
    vision = prompt.pixels()
    assert vision is not None
    other = replace(vision, pixel_values=-vision.pixel_values, hashes=("another",))
    seen = scene.generate([prompt])[0]
    blind = scene.disagreement([replace(prompt, vision=other)], [seen])
    assert blind > 1e-2


def test_the_pace_of_a_video_matters_to_both(scene: Scene) -> None:
    """Qwen2.5-VL tells time by positions alone."""
    if scene.processors.family.video != "seconds":
        pytest.skip("this family tells time as text")
    prompt = scene.prompts[3]
    vision = prompt.pixels()
    assert vision is not None
    slower = replace(prompt, vision=replace(vision, temporal_patch_seconds=(3.3,), hashes=("slower",)))
    answers = scene.generate([slower])
    assert scene.disagreement([slower], answers) < 1e-4
    assert scene.disagreement([prompt], answers) > 1e-3


def test_placeholders_that_are_not_the_videos_are_refused(scene: Scene) -> None:
    if not isinstance(scene.engine, VllmEngine):
        pytest.skip("the trainer's own check stands there")
    prompt = scene.prompts[0]
    token = scene.processors.hf_config.video_token_id
    cut = replace(prompt, token_ids=tuple(each for each in prompt.token_ids if each != token))
    with pytest.raises(EngineError, match="0 video placeholders do not match videos of"):
        scene.generate([cut])
    assert scene.disagreement([prompt], scene.generate([prompt])) < 1e-4


def test_a_video_that_vllm_has_no_room_for_is_refused(scene: Scene) -> None:
    if not isinstance(scene.engine, VllmEngine):
        pytest.skip("only vLLM has a cache for it")
    room, scene.engine._encoder_tokens = scene.engine._encoder_tokens, 20
    try:
        with pytest.raises(EngineError, match=r"worker\.rollout\.max_num_batched_tokens, which is 20"):
            scene.generate([scene.prompts[3]])
    finally:
        scene.engine._encoder_tokens = room
