"""What is particular to vLLM: it shares a process with the trainer, and might take weights or images wrongly."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from trigon.errors import EngineError
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.vllm import VllmEngine
from trigon.types import Prompt, SamplingParams, Vision

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)


def open_engine(folder, processors, **changes):
    wishes = {
        "model_path": str(folder),
        "processors": processors,
        "device": "cpu",
        "dtype": torch.float32,
        "max_model_len": 256,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "limit_images": 1,
        "trust_remote_code": False,
        "override_config": {},
        "skip_special_tokens": True,
        "seed": 0,
        "disable_log_stats": True,
    }
    return VllmEngine(**(wishes | changes))


def weights_of(folder, processors):
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    return dict(Policy(model, processors.family, temperature=1.0, banned_token_ids=()).named_weights())


def state_of_the_process():
    python, (name, keys, *rest) = random.getstate(), np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": python,
        "numpy": (name, keys.tolist(), rest),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "LD_PRELOAD": os.environ.get("LD_PRELOAD"),
        "directory": os.getcwd(),
    }


def vision(seed, images=1):
    """Return pixels for images of 6 x 6 patches, which make 9 tokens each."""
    pixels = torch.randn(36 * images, 1176, generator=torch.Generator().manual_seed(seed))
    return Vision(pixels, torch.tensor([[1, 6, 6]] * images), tuple(f"{seed}.{image}" for image in range(images)))


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return load_processors(str(tiny_vlm))


@pytest.fixture(scope="module")
def started(tiny_vlm, processors):
    """Return the engine, the trainer's weights, and what starting changed in the process."""
    before = state_of_the_process()
    engine = open_engine(tiny_vlm, processors)
    after = state_of_the_process()
    yield engine, weights_of(tiny_vlm, processors), {name for name in before if before[name] != after[name]}
    engine.close()


@pytest.fixture
def engine(started):
    return started[0]


@pytest.fixture
def weights(started):
    return started[1]


@pytest.fixture(scope="module")
def prompts(processors):
    """Return prompts that differ by their images alone, and one without any."""
    start, end = processors.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    pad = processors.family.image_token_id(processors.hf_config)
    question = processors.tokenizer("Which number does the dot stand on? " * 4)["input_ids"]
    return [
        Prompt("train:0", (start, *[pad] * 9, end, *question), vision(0), "", None, {}, ()),
        Prompt("train:1", (start, *[pad] * 9, end, *question), vision(1), "", None, {}, ()),
        Prompt("train:2", tuple(question), None, "", None, {}, ()),
    ]


def test_starting_leaves_the_process_as_it_was(started):
    assert started[2] == set()


def test_sampling_leaves_the_random_numbers_of_the_process_alone(engine, weights, prompts):
    before = state_of_the_process()
    with engine.awake(iter(weights.items()), version=0):
        engine.generate(prompts, SAMPLING, step=1)
    assert state_of_the_process() == before


def test_images_are_never_processed_again(engine, weights, prompts, processors, monkeypatch):
    calls = []
    kind = type(processors.image_processor)
    monkeypatch.setattr(kind, "preprocess", lambda *args, **kwargs: calls.append(args))
    with engine.awake(iter(weights.items()), version=0):
        engine.generate(prompts, SAMPLING, step=1)
    assert calls == []


def test_the_same_words_behind_other_images_are_answered_otherwise(engine, weights, prompts):
    same_name = [replace(prompts[0], prompt_id="x"), replace(prompts[1], prompt_id="x")]
    with engine.awake(iter(weights.items()), version=0):
        first, second = engine.generate(same_name, SAMPLING, step=1)
    assert all(a.sampling_logprobs[0] != b.sampling_logprobs[0] for a, b in zip(first, second, strict=True))


def test_answers_share_all_but_the_last_block_of_even_a_short_prompt(engine, weights, prompts, monkeypatch):
    step, shared = engine._engine.step, {}

    def watched_step():
        outputs = step()
        shared.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(engine._engine, "step", watched_step)
    with engine.awake(iter(weights.items()), version=0):
        engine.generate(prompts, SAMPLING, step=1)
    for row, prompt in enumerate(prompts):
        whole_blocks = 32 * ((len(prompt.token_ids) - 1) // 32)
        assert whole_blocks > 0
        assert [shared[f"{row}.{sample}.1"] for sample in range(SAMPLING.n)] == [0, whole_blocks, whole_blocks]


def test_many_more_requests_than_run_at_once(engine, weights, prompts):
    many = [replace(prompts[number % 3], prompt_id=str(number)) for number in range(150)]
    with engine.awake(iter(weights.items()), version=0):
        everything = engine.generate(many, SAMPLING, step=1)
        last = engine.generate(many[-1:], SAMPLING, step=1)
    assert [[c.token_ids for c in row] for row in everything[-1:]] == [[c.token_ids for c in row] for row in last]
    assert {len(row) for row in everything} == {3}


def test_its_cache_holds_all_sequences_that_it_runs_at_once_and_is_no_gigabyte(engine):
    config = engine._engine.vllm_config
    blocks = config.cache_config.num_gpu_blocks
    each = -(-256 // config.cache_config.block_size)
    assert blocks > config.scheduler_config.max_num_seqs * each
    assert config.cache_config.kv_cache_memory_bytes < 2**30


def giving_up(engine, monkeypatch, *, prompt, times):
    """Let vLLM report this prompt's first requests to finish, so many of them, as failed for a reason of its own."""
    step, left = engine._engine.step, times

    def failing_step():
        nonlocal left
        outputs = step()
        for output in outputs:
            if left and output.finished and output.request_id.startswith(f"{prompt}."):
                output.outputs[0].finish_reason = "error"
                left -= 1
        return outputs

    monkeypatch.setattr(engine._engine, "step", failing_step)


def test_a_request_that_vllm_gives_up_is_tried_again_and_leaves_no_trace(engine, weights, prompts, monkeypatch):
    with engine.awake(iter(weights.items()), version=0):
        untroubled = engine.generate(prompts, SAMPLING, step=1)
        giving_up(engine, monkeypatch, prompt=1, times=3)
        again = engine.generate(prompts, SAMPLING, step=1)
    ids = [[completion.token_ids for completion in row] for row in untroubled]
    assert [[completion.token_ids for completion in row] for row in again] == ids


def test_a_prompt_whose_request_fails_twice_comes_back_empty_and_the_others_whole(
    engine, weights, prompts, monkeypatch
):
    with engine.awake(iter(weights.items()), version=0):
        giving_up(engine, monkeypatch, prompt=1, times=100)
        heard = []
        rows = engine.generate(prompts, SAMPLING, step=1, on_group=lambda *group: heard.append(group))
        assert [len(row) for row in rows] == [3, 0, 3]
        assert len(heard) == 3
        assert dict(heard) == dict(enumerate(rows))
        monkeypatch.undo()
        assert [len(row) for row in engine.generate(prompts, SAMPLING, step=1)] == [3, 3, 3]


def test_another_version_has_to_wait_until_it_sleeps(engine, weights):
    with (
        engine.awake(iter(weights.items()), version=0),
        pytest.raises(EngineError, match="awake with the weights of step 0"),
        engine.awake(iter(weights.items()), version=1),
    ):
        pass


@pytest.mark.parametrize("temperature", [0.001, 2.1])
def test_a_temperature_that_vllm_would_change_or_refuse(engine, weights, prompts, temperature):
    with engine.awake(iter(weights.items()), version=0), pytest.raises(EngineError, match="temperature"):
        engine.generate(prompts, replace(SAMPLING, temperature=temperature), step=1)


def test_too_many_images(engine, weights, prompts):
    two = replace(prompts[0], token_ids=prompts[0].token_ids * 2, vision=vision(0, images=2))
    with engine.awake(iter(weights.items()), version=0), pytest.raises(EngineError, match=r"train:0: it has 2 images"):
        engine.generate([two], SAMPLING, step=1)


WRONG_PLACEHOLDERS = {
    "one too few": lambda ids: ids[:5] + ids[6:],
    "one too many": lambda ids: (*ids, ids[1]),
    "interrupted": lambda ids: ids[:5] + ids[-1:] + ids[5:],
    "none at all": lambda ids: ids[12:],
}


@pytest.mark.parametrize("token_ids", WRONG_PLACEHOLDERS.values(), ids=WRONG_PLACEHOLDERS.keys())
def test_placeholders_must_be_those_of_the_images(engine, weights, prompts, token_ids):
    wrong = replace(prompts[0], token_ids=token_ids(prompts[0].token_ids))
    with engine.awake(iter(weights.items()), version=0):
        with pytest.raises(EngineError, match=r"train:0: \d+ image placeholders do not match images of \[9\] tokens"):
            engine.generate([wrong], SAMPLING, step=1)
        assert len(engine.generate(prompts, SAMPLING, step=1)) == 3  # nothing of it was left behind


def test_a_fresh_engine_repeats_every_bit_and_a_closed_one_refuses(tiny_model, prompts):
    folder = tiny_model("qwen2", tie_word_embeddings=True)
    processors = load_processors(str(folder))
    weights = weights_of(folder, processors)
    answers = []
    for _ in range(2):
        engine = open_engine(folder, processors)
        with engine.awake(iter(weights.items()), version=0):
            answers.append(engine.generate(prompts[2:], SAMPLING, step=1))
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="closed"), engine.awake(iter(weights.items()), version=0):
            pass
    assert answers[0] == answers[1]


def missing(weights):
    return ((name, tensor) for name, tensor in weights.items() if "layers.1.self_attn.k_proj.weight" not in name)


def unknown(weights):
    yield from weights.items()
    yield "model.layers.1.self_attn.o_proj.bias", torch.zeros(128)  # has none, which vLLM would pass over in silence


def misshapen(weights):
    return ((name, tensor[..., :-1]) for name, tensor in weights.items())


def twice(weights):
    yield from weights.items()
    yield from list(weights.items())[:1]


def broken_off(weights):
    yield from list(weights.items())[:5]
    raise EngineError("the trainer died")


@pytest.mark.parametrize(
    ("handed_over", "complaint"),
    [
        (missing, r"1 missing \['model.layers.1.self_attn.k_proj.weight'\]"),
        (unknown, r"1 unexpected \['model.layers.1.self_attn.o_proj.bias'\]"),
        (twice, "1 repeated"),
        (misshapen, "could not take the weights of step 1"),
        (broken_off, "the trainer died"),
    ],
)
def test_wrong_weights_are_noticed_and_spoil_the_engine(tiny_model, prompts, handed_over, complaint):
    folder = tiny_model("qwen2", tie_word_embeddings=True)
    processors = load_processors(str(folder))
    weights = weights_of(folder, processors)
    engine = open_engine(folder, processors)
    try:
        with engine.awake(iter(weights.items()), version=0):
            engine.generate(prompts[2:], SAMPLING, step=1)
        with pytest.raises(EngineError, match=complaint), engine.awake(handed_over(weights), version=1):
            pass
        with pytest.raises(EngineError, match="did not finish"), engine.awake(iter(weights.items()), version=2):
            pass
        with pytest.raises(EngineError, match="did not finish"):
            engine.generate(prompts[2:], SAMPLING, step=1)
    finally:
        engine.close()


def test_a_checkpoint_may_hold_a_tied_head_and_old_names(tiny_model, tmp_path, prompts):
    """Published folders differ from what save_pretrained writes today; the weights of both are the same."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "published"
    shutil.copytree(tiny_model("qwen2_5_vl", tie_word_embeddings=True), folder)
    stored = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else f"model.{name}": tensor
        for name, tensor in stored.items()
    }
    renamed["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    processors = load_processors(str(folder))
    engine = open_engine(folder, processors)
    weights = weights_of(folder, processors)
    with engine.awake(iter(weights.items()), version=0):
        assert len(engine.generate(prompts, SAMPLING, step=1)) == 3
    engine.close()


def test_it_says_so_when_the_installed_vllm_is_for_another_device(tiny_model):
    folder = tiny_model("qwen2")
    with pytest.raises(EngineError, match=r"built for cpu, but the rollout engine is to run on cuda"):
        open_engine(folder, load_processors(str(folder)), device="cuda")
