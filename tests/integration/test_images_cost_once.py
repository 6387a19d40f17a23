"""A step processes each prompt's images once, for sampling, scoring and the update together."""

from __future__ import annotations

import pytest
import torch

from support.builders import make_builder, prompts_of
from support.engines import CONFIG, plan_for
from support.images import counting
from support.rollout import make_transformers_engine, make_vllm_engine
from trigon.data.stream import PromptStream
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.tools.quickstart.drawings import make_dataset
from trigon.training.device_memory import Placement
from trigon.training.local import LocalTrainEngine
from trigon.training.train_groups import build_train_groups
from trigon.types import Rollout, RolloutGroup, SamplingParams, Score

pytestmark = pytest.mark.extended


@pytest.mark.parametrize(
    ("engine_name", "n"),
    [pytest.param("vllm", 5, marks=pytest.mark.vllm), ("transformers", 2)],
)
def test_one_image_processor_call_for_each_prompt_of_a_step(engine_name, n, tiny_vlm, tmp_path):
    processors = counting(load_processors(str(tiny_vlm)))
    builder = make_builder(processors, max_prompt_length=128, limit_images=1)
    train_file, _ = make_dataset(tmp_path, num_train=6, num_validation=1, seed=0)
    prompts = prompts_of(str(train_file), builder)
    stream = PromptStream(prompts, batch_size=3, seed=0, shuffle=True, prefetch=False, num_workers=1)
    trainer = LocalTrainEngine(
        Policy(
            load_model(str(tiny_vlm), dtype=torch.float32, device="cpu"),
            processors.family,
            temperature=1.0,
            banned_token_ids=processors.banned_token_ids,
        ),
        CONFIG,
        plan_for(80),  # so that groups are split over several micro-batches
        Placement(device=torch.device("cpu"), compute_dtype=torch.float32),
    )
    if engine_name == "vllm":
        engine = make_vllm_engine(tiny_vlm, processors, max_model_len=160, max_num_batched_tokens=512)
    else:
        engine = make_transformers_engine(tiny_vlm, processors, max_model_len=160)
    sampling = SamplingParams(n=n, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=False, seed=0)
    before = processors.image_processor.calls
    prompts_of_step = stream.take(3)
    with engine.awake(trainer.weights(), version=0):
        completions = engine.generate(prompts_of_step, sampling)
    groups = [
        RolloutGroup(
            prompt,
            tuple(Rollout(completion, Score(float(i), {}, "ok", "")) for i, completion in enumerate(row)),
        )
        for prompt, row in zip(prompts_of_step, completions, strict=True)
    ]
    old = trainer.logprobs(groups)
    advantages = [[torch.ones(len(tokens)) for tokens in row] for row in old]
    trainer.step(build_train_groups(groups, advantages, torch.ones(len(groups), n, dtype=torch.bool), old=old, ref=old))
    assert processors.image_processor.calls - before == len(prompts_of_step)
    engine.close()
    stream.close()
