"""What every rollout engine promises, asked of the real ones: vLLM and transformers, with and without images."""

import io
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.builders import make_builder
from support.oracle import load_hugging_face, padded_logprobs
from trigon.errors import EngineError
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import completion_positions, prompt_positions
from trigon.rollout.transformers import TransformersEngine
from trigon.types import GroupSpan, PackedGroups, SamplingParams

# Many blocks of vLLM's cache, on any device: only whole ones can show that it is stale.
LONG = "How many sides does the polygon in the drawing have? " * 16
MAX_MODEL_LEN = 512
MAX_IMAGES = 3

SAMPLING = SamplingParams(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24, ignore_eos=False, seed=5)
WHOLE = replace(SAMPLING, ignore_eos=True)

SCENES = [
    ("vllm", "qwen2_5_vl", False),
    ("vllm", "qwen3_vl", True),
    ("vllm", "qwen2", True),
    ("transformers", "qwen2_5_vl", False),
    ("transformers", "qwen3_vl", True),
    ("transformers", "qwen2", False),
]


@dataclass
class Scene:
    """An engine, the policy whose weights it is given, and prompts for both."""

    engine: Any
    policy: Policy
    processors: Any
    prompts: list
    version: int = 0
    plain: Any = None

    def change_weights(self, scale=0.02):
        """Move every weight a little, as an update does, and number the result."""
        generator = torch.Generator().manual_seed(self.version)
        self.version += 1
        with torch.no_grad():
            for weight in self.policy.model.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))

    def awake(self):
        return self.engine.awake(self.policy.named_weights(), version=self.version)

    def generate(self, sampling=SAMPLING, prompts=None, step=1, **others):
        with self.awake():
            return self.engine.generate(self.prompts if prompts is None else prompts, sampling, step=step, **others)

    @torch.no_grad()
    def trainer_logprobs(self, prompt, completions, temperature):
        """Return what the packed policy says of the completions' tokens, one after another."""
        family, hf_config = self.processors.family, self.processors.hf_config
        ids = torch.tensor(prompt.token_ids)
        grid = None if prompt.vision is None else prompt.vision.grid_thw
        positions = prompt_positions(ids, grid, family, hf_config)
        lengths = [len(completion.token_ids) for completion in completions]
        ends = torch.tensor([len(ids), *lengths]).cumsum(0).tolist()
        self.policy.temperature = temperature
        packed = PackedGroups(
            token_ids=torch.cat([ids, *(torch.tensor(completion.token_ids) for completion in completions)]),
            position_ids=torch.cat([positions, *(completion_positions(positions, length) for length in lengths)], 1),
            spans=(GroupSpan((0, len(ids)), tuple(pairwise(ends))),),
            pixel_values=None if prompt.vision is None else prompt.vision.pixel_values,
            grid_thw=grid,
        )
        return self.policy(packed).logprobs

    def disagreement(self, sampling=SAMPLING):
        """Return the largest |log-probability difference| between engine and trainer over all samples."""
        answers = self.generate(sampling)
        return max(
            float((self.trainer_logprobs(prompt, row, sampling.temperature) - sampled(row)).abs().max())
            for prompt, row in zip(self.prompts, answers, strict=True)
        )

    def plain_model(self):
        """Return transformers' own model, with its own attention, on the policy's weights."""
        if self.plain is None:
            self.plain = load_hugging_face(Path(self.processors.tokenizer.name_or_path), torch.float32)
        self.plain.load_state_dict(self.policy.model.state_dict())
        return self.plain


def sampled(completions):
    return torch.tensor([logprob for completion in completions for logprob in completion.sampling_logprobs])


def png(seed, width, height):
    stream = io.BytesIO()
    noise = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "PNG")
    return stream.getvalue()


def make_prompts(processors):
    """Return short and long prompts with no, one and several images; two of them differ in nothing but the pixels."""
    builder = make_builder(processors, max_prompt_length=MAX_MODEL_LEN)
    rows = [("Find x.", []), (LONG, []), (LONG + "Count the shapes.", [])]
    if processors.family.has_vision:
        rows += [
            ("<image>Find x.", [png(0, 84, 84)]),
            (LONG + "<image>", [png(1, 112, 84)]),
            (LONG + "<image>", [png(2, 112, 84)]),
            ("<image>" + LONG + "<image> or <image>?", [png(3, 84, 84), png(4, 56, 140), png(0, 84, 84)]),
        ]
    return [
        builder.build({"problem": text, "answer": "", "images": images}, f"train:{number}")
        for number, (text, images) in enumerate(rows)
    ]


def scene_id(scene):
    name, model_type, tied = scene
    return f"{name}-{model_type}-{'tied' if tied else 'untied'}"


@pytest.fixture(scope="module", params=SCENES, ids=scene_id)
def scene(request, tiny_model):
    name, model_type, tied = request.param
    folder = str(tiny_model(model_type, tie_word_embeddings=tied))
    # One token in twenty ends an answer, so that some stop and some are cut.
    processors = replace(load_processors(folder), stop_token_ids=tuple(range(0, 1000, 20)))
    policy = Policy(
        load_model(folder, dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    engine = open_engine(name, folder, processors)
    yield Scene(engine, policy, processors, make_prompts(processors))
    engine.close()


def open_engine(name, folder, processors):
    common = {
        "model_path": folder,
        "processors": processors,
        "device": "cpu",
        "dtype": torch.float32,
        "max_model_len": MAX_MODEL_LEN,
        "trust_remote_code": False,
        "override_config": {},
        "skip_special_tokens": True,
    }
    if name == "transformers":
        return TransformersEngine(**common)
    pytest.importorskip("vllm")
    from trigon.rollout.vllm import VllmEngine

    return VllmEngine(
        **common,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        limit_images=MAX_IMAGES,
        seed=0,
        disable_log_stats=True,
    )


def test_sampling_logprobs_are_the_trainers_before_and_after_weight_changes(scene):
    for _ in range(3):
        assert scene.disagreement() <= 1e-4
        scene.change_weights()


def test_sampling_logprobs_are_the_trainers_at_another_temperature(scene):
    assert scene.disagreement(replace(SAMPLING, temperature=0.7)) <= 1e-4


def test_old_weights_would_have_been_noticed(scene):
    answers = scene.generate()
    scene.change_weights()
    differences = [
        float((scene.trainer_logprobs(prompt, row, 1.0) - sampled(row)).abs().max())
        for prompt, row in zip(scene.prompts, answers, strict=True)
    ]
    assert min(differences) > 0.01


def test_the_same_call_gives_the_same_bits(scene):
    with scene.awake():
        first = scene.engine.generate(scene.prompts, SAMPLING, step=1)
        second = scene.engine.generate(scene.prompts, SAMPLING, step=1)
    assert first == second
    assert scene.generate() == first


def test_samples_differ_from_each_other_and_from_step_to_step(scene):
    first, second = scene.generate(WHOLE, step=1), scene.generate(WHOLE, step=2)
    texts = [completion.token_ids for answers in (first, second) for row in answers for completion in row]
    assert len(set(texts)) == len(texts)


def test_a_sample_does_not_depend_on_the_other_prompts_and_samples(scene):
    everything = scene.generate()
    alone = scene.generate(replace(SAMPLING, n=2), prompts=scene.prompts[2:3])
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in everything[2][:2]]
    backwards = scene.generate(prompts=scene.prompts[::-1])[::-1]
    assert [[c.token_ids for c in row] for row in backwards] == [[c.token_ids for c in row] for row in everything]


def test_answers_end_at_a_stop_token_or_at_the_limit(scene):
    completions = [completion for row in scene.generate() for completion in row]
    for completion in completions:
        *body, last = (token in scene.processors.stop_token_ids for token in completion.token_ids)
        assert not any(body)
        assert completion.finish_reason == ("stop" if last else "length")
        assert last or len(completion.token_ids) == SAMPLING.max_tokens
        assert len(completion.sampling_logprobs) == len(completion.token_ids)
        assert completion.policy_version == scene.version
        decoded = scene.processors.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.text == decoded
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_stop_tokens_can_be_ignored(scene):
    completions = [completion for row in scene.generate(WHOLE) for completion in row]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert {len(completion.token_ids) for completion in completions} == {SAMPLING.max_tokens}


def test_greedy_decoding_takes_the_likeliest_and_says_zero(scene):
    greedy = replace(WHOLE, n=1, temperature=0.0)
    for prompt, [completion] in zip(scene.prompts, scene.generate(greedy), strict=True):
        assert completion.sampling_logprobs == (0.0,) * SAMPLING.max_tokens
        likeliest = distributions(scene, prompt, completion, replace(WHOLE, temperature=1.0)).argmax(1)
        assert likeliest.tolist() == list(completion.token_ids)


CUTS = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.8, "temperature": 1.3}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_logprobs_are_of_the_truncated_distribution(scene, cut):
    sampling = replace(WHOLE, n=2, **cut)
    for prompt, row in zip(scene.prompts, scene.generate(sampling), strict=True):
        for completion in row:
            expected = distributions(scene, prompt, completion, sampling)
            expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(completion.sampling_logprobs), atol=1e-4)


@torch.no_grad()
def distributions(scene, prompt, completion, sampling):
    """Return [R, V]: the log-probabilities from which each token was drawn, by the book, one row at a time."""
    plain = scene.plain_model()
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    images = {}
    if prompt.vision is not None:
        images = {
            "pixel_values": prompt.vision.pixel_values,
            "image_grid_thw": prompt.vision.grid_thw,
            "mm_token_type_ids": (ids == plain.config.image_token_id).int(),
        }
    logits = plain(input_ids=ids, use_cache=False, **images).logits[0, len(prompt.token_ids) - 1 : -1]
    logits[:, list(scene.processors.banned_token_ids)] = -torch.inf
    rows = []
    for row in logits / sampling.temperature:
        order = row.argsort(descending=True).tolist()
        kept = order[: sampling.top_k] if sampling.top_k > 0 else order
        probabilities = row[kept].softmax(0).tolist()
        mass, count = 0.0, 0
        while count < len(kept) and mass < sampling.top_p:
            mass += probabilities[count]
            count += 1
        cut = torch.full_like(row, -torch.inf)
        cut[kept[:count]] = row[kept[:count]]
        rows.append(cut.log_softmax(0))
    return torch.stack(rows)


def test_media_tokens_are_never_sampled_however_likely(scene):
    banned = list(scene.processors.banned_token_ids)
    if not banned:
        pytest.skip("a text model has none")
    head = scene.policy.model.get_output_embeddings().weight
    kept = head.detach().clone()
    with torch.no_grad():
        head[banned] = 20 * torch.randn(len(banned), head.shape[1], generator=torch.Generator().manual_seed(0))
    scene.version += 1
    answers = scene.generate()
    for prompt, row in zip(scene.prompts, answers, strict=True):
        assert not {token for completion in row for token in completion.token_ids}.intersection(banned)
        assert float((scene.trainer_logprobs(prompt, row, 1.0) - sampled(row)).abs().max()) <= 1e-4
        with torch.no_grad():
            unmasked, _ = padded_logprobs(
                scene.plain_model(), prompt, [c.token_ids for c in row], temperature=1.0, banned_token_ids=()
            )
        assert float(unmasked.exp().median()) < 1e-6  # what would have been left to all the others
    with torch.no_grad():
        head.copy_(kept)
    scene.version += 1


def test_progress_counts_every_completion_once(scene):
    heard = []
    scene.generate(on_progress=heard.append)
    assert sum(heard) == len(scene.prompts) * SAMPLING.n
    assert min(heard) > 0


def test_each_group_is_handed_over_once_as_soon_as_it_is_there(scene):
    heard, counted = [], []

    def on_group(index, row):
        heard.append((index, row))
        if len(heard) == 1:
            assert sum(counted) < len(scene.prompts) * SAMPLING.n  # others are still being sampled

    answers = scene.generate(on_progress=counted.append, on_group=on_group)
    assert len(heard) == len(scene.prompts)
    assert dict(heard) == dict(enumerate(answers))
    assert scene.generate() == answers  # to listen changes nothing


def test_no_prompts_no_completions(scene):
    assert scene.generate(prompts=[]) == []


def test_weights_of_the_version_that_is_held_are_not_read_again(scene):
    with scene.awake():
        pass

    def unread():
        raise AssertionError("read again")
        yield

    with scene.engine.awake(unread(), version=scene.version):
        scene.engine.generate(scene.prompts[:1], SAMPLING, step=1)
        with scene.engine.awake(unread(), version=scene.version):
            pass
        scene.engine.generate(scene.prompts[:1], SAMPLING, step=1)  # leaving the inner one changes nothing


def test_a_sleeping_engine_refuses(scene):
    with pytest.raises(EngineError, match="sleeps"):
        scene.engine.generate(scene.prompts, SAMPLING, step=1)


def test_it_sleeps_again_after_an_error(scene):
    with pytest.raises(ZeroDivisionError), scene.awake():
        _ = 1 / 0
    with pytest.raises(EngineError, match="sleeps"):
        scene.engine.generate(scene.prompts, SAMPLING, step=1)
    assert scene.disagreement() <= 1e-4


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named(scene):
    with pytest.raises(EngineError, match=r"train:1: .* worker.rollout.max_model_len is 512"):
        scene.generate(replace(SAMPLING, max_tokens=MAX_MODEL_LEN - len(scene.prompts[0].token_ids)))


@pytest.mark.parametrize("listener", ["on_progress", "on_group"])
def test_an_interrupted_call_leaves_nothing_behind(scene, listener):
    def interrupt(*_):
        raise KeyboardInterrupt

    expected = scene.generate()
    with scene.awake():
        with pytest.raises(KeyboardInterrupt):
            scene.engine.generate(scene.prompts, SAMPLING, step=2, **{listener: interrupt})
        assert scene.engine.generate(scene.prompts, SAMPLING, step=1) == expected
