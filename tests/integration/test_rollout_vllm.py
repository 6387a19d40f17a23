"""Behaviour of VllmEngine alone: the state of its process, and its checks of weights and images."""

import json
import logging
import os
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.rollout import drawn, handle_of, make_vllm_engine, runs_with
from trigon.errors import EngineError, ParityError
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.vllm import process
from trigon.rollout.vllm.weight_check import read_sums, sum_values
from trigon.system.trace import DecodeTracer
from trigon.types import LocalWeights, Prompt, SamplingParams, Vision

pytestmark = [pytest.mark.vllm, pytest.mark.extended]

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
TRACED_STEP = 99


def weights_of(folder, processors):
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    return dict(Policy(model, processors.family, temperature=1.0, banned_token_ids=()).named_weights())


def process_state():
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
    """Return images of 6 x 6 patches, 9 tokens each."""
    pixels = torch.randn(36 * images, 1176, generator=torch.Generator().manual_seed(seed))
    return Vision(pixels, torch.tensor([[1, 6, 6]] * images), tuple(f"{seed}.{image}" for image in range(images)))


@pytest.fixture(scope="module")
def processors(tiny_vlm):
    return load_processors(str(tiny_vlm))


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Return the folder of traces of TRACED_STEP."""
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def started(tiny_vlm, processors, traces):
    """Return the engine, the trainer's weights, and the keys of process_state that changed."""
    before = process_state()
    engine = make_vllm_engine(tiny_vlm, processors, tracer=DecodeTracer(traces, rank=None, steps=(TRACED_STEP,)))
    after = process_state()
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
    """Return two prompts that differ only in their images, and one without images."""
    start, end = processors.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    pad = processors.family.image_token_id(processors.hf_config)
    question = processors.tokenizer("Which number does the dot stand on? " * 4)["input_ids"]
    return [
        Prompt("train:0", (start, *[pad] * 9, end, *question), vision(0), "", None, {}, ()),
        Prompt("train:1", (start, *[pad] * 9, end, *question), vision(1), "", None, {}, ()),
        Prompt("train:2", tuple(question), None, "", None, {}, ()),
    ]


def test_starting_on_a_machine_with_several_gpus_touches_only_the_one_in_use(monkeypatch):
    states, restored = iter((torch.zeros(1), torch.ones(1))), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: next(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((device, state.item())))
    with process.preserve_process_state():
        torch.manual_seed(7)
    assert restored == [(3, 0.0)]


def test_starting_and_sampling_change_neither_the_process_nor_call_the_image_processor(
    started, weights, prompts, processors, monkeypatch
):
    engine, _, changed = started
    assert changed == set()
    assert runs_with(engine) == ("v1", False, False)
    config = engine._llm_engine.vllm_config
    blocks_each = -(-256 // config.cache_config.block_size)
    assert config.cache_config.num_gpu_blocks > config.scheduler_config.max_num_seqs * blocks_each
    assert config.cache_config.kv_cache_memory_bytes < 2**30
    calls = []
    monkeypatch.setattr(type(processors.image_processor), "preprocess", lambda *args, **kwargs: calls.append(args))
    before = process_state()
    with engine.awake(handle_of(weights), version=0):
        engine.generate(prompts, SAMPLING)
    assert process_state() == before
    assert calls == []


def with_placeholders(prompt, change):
    ids = prompt.token_ids
    changed = {
        "one too few": ids[:5] + ids[6:],
        "one too many": (*ids, ids[1]),
        "not contiguous": ids[:5] + ids[-1:] + ids[5:],
        "none": ids[12:],
    }
    return replace(prompt, token_ids=changed[change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((each, "placeholders do not match") for each in ("one too few", "one too many", "not contiguous", "none")),
        ("two images", r"train:0: it has 2 images"),
        (0.001, "temperature"),
        (2.1, "temperature"),
    ],
)
def test_what_cannot_be_sampled_raises_and_leaves_the_engine_usable(engine, weights, prompts, change, message):
    wrong, sampling = prompts[0], SAMPLING
    if change == "two images":
        wrong = replace(wrong, token_ids=wrong.token_ids * 2, vision=vision(0, images=2))
    elif isinstance(change, float):
        sampling = replace(SAMPLING, temperature=change)
    else:
        wrong = with_placeholders(wrong, change)
    with engine.awake(handle_of(weights), version=0):
        with pytest.raises(EngineError, match=message):
            engine.generate([wrong], sampling)
        with pytest.raises(EngineError, match="awake with the weights of policy version 0"):
            engine.awake(handle_of(weights), version=1).__enter__()
        assert len(engine.generate(prompts, SAMPLING)) == 3


def test_a_trace_has_the_decode_steps_after_the_prompts_and_changes_no_token(engine, weights, prompts, traces):
    short = replace(SAMPLING, max_tokens=4)
    with engine.awake(handle_of(weights), version=0):
        traced, again = (engine.generate(drawn(prompts, TRACED_STEP), short) for _ in range(2))
    assert traced == again
    [trace] = traces.iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    # The step that computes the prompts samples the first of four tokens.
    assert [event.get("name") for event in events].count("decode step") == 3
    assert any(event.get("name", "").startswith("aten::") for event in events)


def test_completions_of_a_group_share_the_full_blocks_of_a_short_prompt(engine, weights, prompts, monkeypatch):
    step, shared = engine._llm_engine.step, {}

    def recording_step():
        outputs = step()
        shared.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(engine._llm_engine, "step", recording_step)
    with engine.awake(handle_of(weights), version=0):
        engine.generate(prompts, SAMPLING)
    for row, prompt in enumerate(prompts):
        full_blocks = 32 * ((len(prompt.token_ids) - 1) // 32)
        assert full_blocks > 0
        assert [shared[f"{row}.{sample}.0.1"] for sample in range(SAMPLING.n)] == [0, full_blocks, full_blocks]


def test_more_requests_than_run_at_a_time(engine, weights, prompts):
    many = [replace(prompts[number % 3], prompt_id=str(number)) for number in range(150)]
    with engine.awake(handle_of(weights), version=0):
        completions = engine.generate(many, SAMPLING)
        last = engine.generate(many[-1:], SAMPLING)
    assert [[c.token_ids for c in row] for row in completions[-1:]] == [[c.token_ids for c in row] for row in last]
    assert {len(row) for row in completions} == {3}


@pytest.fixture(scope="module")
def small(tiny_model, prompts):
    """Return a model's folder, processors and weights, and what an engine samples from it."""
    folder = tiny_model("qwen2", tie_word_embeddings=True)
    processors = load_processors(str(folder))
    weights = weights_of(folder, processors)
    engine = make_vllm_engine(folder, processors)
    with engine.awake(handle_of(weights), version=0):
        sampled = engine.generate(prompts[2:], SAMPLING)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"), engine.awake(handle_of(weights), version=0):
        pass
    return folder, processors, weights, sampled


def with_a_missing_tensor(weights):
    return ((name, tensor) for name, tensor in weights.items() if "layers.1.self_attn.k_proj.weight" not in name)


def with_an_unknown_tensor(weights):
    yield from weights.items()
    yield "model.layers.1.self_attn.o_proj.bias", torch.zeros(128)  # the layer has no bias; vLLM ignores it


def with_other_shapes(weights):
    return ((name, tensor[..., :-1]) for name, tensor in weights.items())


def with_a_repeated_tensor(weights):
    yield from weights.items()
    yield from list(weights.items())[:1]


def with_an_error(weights):
    yield from list(weights.items())[:5]
    raise EngineError("the trainer died")


@pytest.mark.long(cases=["with_an_unknown_tensor", "with_a_repeated_tensor"])
@pytest.mark.parametrize(
    ("read", "message"),
    [
        (with_a_missing_tensor, r"1 missing \['model.layers.1.self_attn.k_proj.weight'\]"),
        (with_an_unknown_tensor, r"1 unexpected \['model.layers.1.self_attn.o_proj.bias'\]"),
        (with_a_repeated_tensor, "1 repeated"),
        (with_other_shapes, "could not load the weights of policy version 1"),
        (with_an_error, "the trainer died"),
    ],
)
def test_a_new_engine_gives_the_same_bits_and_wrong_weights_raise_and_make_it_unusable(small, prompts, read, message):
    folder, processors, weights, sampled = small
    engine = make_vllm_engine(folder, processors)
    try:
        with engine.awake(handle_of(weights), version=0):
            assert engine.generate(prompts[2:], SAMPLING) == sampled
        wrong = LocalWeights(lambda dtype=None: read(weights))
        with pytest.raises(EngineError, match=message), engine.awake(wrong, version=1):
            pass
        with pytest.raises(EngineError, match="did not finish"), engine.awake(handle_of(weights), version=2):
            pass
        with pytest.raises(EngineError, match="did not finish"):
            engine.generate(prompts[2:], SAMPLING)
    finally:
        engine.close()


def keep_an_old_norm(monkeypatch):
    """Make vLLM keep the old values of the last norm."""
    from vllm.model_executor.model_loader.reload import layerwise

    copy = layerwise._copy_and_restore_kernel_tensors

    def copy_other_layers(layer, info):
        if type(layer).__name__ == "RMSNorm" and layer in last_norms:
            layerwise._place_kernel_tensors(layer, info)
        else:
            copy(layer, info)

    last_norms = []
    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", copy_other_layers)
    return lambda model: last_norms.append(model.model.norm)


def load_a_wrong_key(monkeypatch):
    """Make vLLM load keys that differ in the last bit of one value from those that it was given."""
    from vllm.model_executor.parameter import _ColumnvLLMParameter

    load = _ColumnvLLMParameter.load_qkv_weight

    def load_with_an_error(parameter, loaded_weight, **kwargs):
        if kwargs["shard_id"] == "k":
            loaded_weight = loaded_weight.clone()
            values = loaded_weight.view(-1)
            largest = values.argmax()
            values[largest] = torch.nextafter(values[largest], torch.tensor(torch.inf))
        load(parameter, loaded_weight, **kwargs)

    monkeypatch.setattr(_ColumnvLLMParameter, "load_qkv_weight", load_with_an_error)
    return lambda model: None


@pytest.mark.parametrize(
    ("defect", "parameter"),
    [
        (keep_an_old_norm, r"1 differ \(model\.norm\.weight"),
        (load_a_wrong_key, r"2 differ \(model\.layers\.0\.self_attn"),
    ],
)
def test_parameters_that_are_not_the_trainers_weights_raise(small, monkeypatch, defect, parameter):
    folder, processors, weights, _ = small
    changed = {name: weight + 1e-6 * torch.sign(weight) for name, weight in weights.items()}
    engine = make_vllm_engine(folder, processors, weight_check_freq=2)
    try:
        with engine.awake(handle_of(weights), version=0):
            pass
        engine._llm_engine.apply_model(defect(monkeypatch))
        with engine.awake(handle_of(changed), version=1):  # not compared: not a multiple of weight_check_freq
            pass
        with pytest.raises(ParityError, match=parameter), engine.awake(handle_of(changed), version=2):
            pass
        with pytest.raises(EngineError, match="did not finish"), engine.awake(handle_of(weights), version=4):
            pass
    finally:
        engine.close()


def test_weights_are_read_in_the_dtype_of_vllm_with_the_same_completions(small, prompts):
    """The checksums of all parameters are compared at each load."""
    folder, processors, *_ = small
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=())
    dtypes = []

    def read(dtype=None):
        dtypes.append(dtype)
        return policy.named_weights(dtype)

    engine = make_vllm_engine(folder, processors, dtype="bf16")
    try:
        with engine.awake(LocalWeights(read), version=0):
            rounded = engine.generate(prompts[2:], SAMPLING)
        with engine.awake(LocalWeights(lambda dtype=None: policy.named_weights()), version=1):
            exact = engine.generate(prompts[2:], SAMPLING)
    finally:
        engine.close()
    assert dtypes == [torch.bfloat16]
    assert [[replace(each, policy_version=1) for each in group] for group in rounded] == exact


def test_a_checkpoint_may_hold_a_tied_head_and_old_names(tiny_model, tmp_path, prompts):
    """Published folders name tensors differently from what save_pretrained writes today."""
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
    engine = make_vllm_engine(folder, processors)
    weights = weights_of(folder, processors)
    with engine.awake(handle_of(weights), version=0):
        assert len(engine.generate(prompts, SAMPLING)) == 3
    engine.close()


def test_a_vllm_that_is_built_for_another_device_raises(tiny_model, monkeypatch):
    folder = tiny_model("qwen2")
    switches = {
        "VLLM_ALLREDUCE_USE_SYMM_MEM": None,
        "VLLM_ALLREDUCE_USE_FLASHINFER": "1",  # what the user has set stays
        "VLLM_USE_FLASHINFER_SAMPLER": None,
        "VLLM_LOGGING_LEVEL": None,
        "TRITON_PRINT_AUTOTUNING": None,
    }
    for name, value in switches.items():
        monkeypatch.setenv(name, value or "")  # restores it after the test
        if value is None:
            monkeypatch.delenv(name)
    with pytest.raises(EngineError, match=r"built for cpu, but the rollout engine is to run on cuda"):
        make_vllm_engine(folder, load_processors(str(folder)), device="cuda")
    assert [os.environ[name] for name in switches] == ["0", "1", "0", "WARNING", "0"]


@pytest.mark.parametrize(("level", "is_shown"), [("WARNING", False), ("INFO", True)])
def test_warnings_that_users_cannot_act_on_are_off_after_a_start_on_a_gpu(monkeypatch, level, is_shown):
    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)

    class LLMEngine:
        @classmethod
        def from_engine_args(cls, arguments):
            # What vLLM's LLMEngine does first.
            configure_logging(LoggingConfig(log_level=level))
            return cls()

    vllm = SimpleNamespace(LLMEngine=LLMEngine, EngineArgs=dict)
    monkeypatch.setattr(process, "import_vllm", lambda device: vllm)
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    names = ["vllm", *process._QUIET_ON_GPU]
    levels = [logging.getLogger(name).level for name in names]
    try:
        process.start_llm_engine({"tensor_parallel_size": 1, "dtype": torch.bfloat16}, device="cuda", architectures=())
        # It warns at every sync of a tied head.
        assert reload_logger.isEnabledFor(logging.WARNING) == is_shown
        assert logging.getLogger("vllm.v1.worker.gpu_worker").isEnabledFor(logging.WARNING)
    finally:
        configure_logging(LoggingConfig())
        for name, before in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(before)


@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "TRITON"])
def test_the_layouts_of_moe_weights_on_a_gpu_keep_their_checksums(engine, monkeypatch, backend):
    """vLLM's own conversions, with arbitrary permutations in the place of FlashInfer's."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    def permutation(_, expert, *args, **kwargs):
        return torch.randperm(expert.shape[0], generator=torch.Generator().manual_seed(0))

    names = ("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache")
    core = SimpleNamespace(**dict.fromkeys(names, permutation))
    for module in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core"):
        monkeypatch.setitem(sys.modules, module, core)
    num_experts, hidden, intermediate = 3, 128, 192  # FlashInfer pads 192 to 256
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator, dtype=torch.bfloat16)
    down = torch.randn(num_experts, hidden, intermediate, generator=generator, dtype=torch.bfloat16)
    expected = [checksum(up), checksum(down)]
    config = SimpleNamespace(
        is_act_and_mul=True,
        intermediate_size_per_partition=intermediate,
        intermediate_size_per_partition_unpadded=intermediate,
    )
    converted = unquantized.convert_to_unquantized_kernel_format(
        unquantized.UnquantizedMoeBackend[backend], config, up.clone(), down.clone()
    )
    if backend == "FLASHINFER_TRTLLM":
        assert converted[0].shape == (num_experts, 512, hidden)
    if backend != "TRITON":
        assert not torch.equal(converted[0], up)
    for values, before in zip(converted, expected, strict=True):
        assert checksum(values).equals(before)


def checksum(tensor):
    return read_sums({"": (sum_values(tensor), tensor.numel())})[""]
