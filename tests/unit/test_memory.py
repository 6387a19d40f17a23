"""The memory of a run by arithmetic, and runs that are refused because they do not fit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import yaml

from support.engines import make_engine
from support.published import CONFIGS, configured
from trigon.assemble.memory import (
    GIB,
    Hardware,
    check_memory,
    count_memory,
    count_sizes,
    count_staged_bytes,
    find_remedies,
    size_of_model,
)
from trigon.assemble.remedies import find_remedies_in_pass
from trigon.config.options import with_options
from trigon.config.schema import Config, LoraConfig
from trigon.errors import ConfigError
from trigon.models.load import load_hf_config, load_model
from trigon.models.lora import add_lora
from trigon.models.sizes import require_tensor_parallel
from trigon.training.optim import state_bytes

PUBLISHED = {
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3.5-4B": 4_539_265_536,
    "Qwen3.5-9B": 9_409_813_744,
    "Qwen3.5-35B-A3B": 35_107_181_936,
}
"""The number of parameters of each published model."""

VL_7B = "Qwen2.5-VL-7B-Instruct"
WEIGHTS = PUBLISHED[VL_7B]
EIGHT = {"trainer.n_gpus_per_node": 8}
OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}
SEPARATE = {"worker.hybrid_engine": False, "worker.rollout.n_gpus_per_node": 4}
PATH = "worker.actor.model.model_path"
UTILIZATION = "worker.rollout.gpu_memory_utilization"
PARALLEL = "worker.rollout.tensor_parallel_size"
ACTIVATION_OFFLOAD = "worker.actor.model.enable_activation_offload"
H100 = Hardware("cuda", 80 * GIB, 2000 * GIB)


@cache
def size_of(path):
    """Return the sizes of a model, which are those of all its configurations."""
    return size_of_model(with_options(Config(), {PATH: path}))


def count(config, hardware=H100):
    return count_memory(config, size_of(config.worker.actor.model.model_path), hardware)


def parts_of(memory, phase, pool="GPU", workers="all"):
    found = [each for each in memory.phases if (each.phase, each.pool, each.workers) == (phase, pool, workers)]
    return {part.name: part.expected for part in found[0].parts} if found else {}


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_sizes_of_published_models_are_exact():
    assert {path.name: size_of_model(configured(path.name)).all.weights for path in CONFIGS.iterdir()} == PUBLISHED


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma3_text"])
@pytest.mark.parametrize("rank", [0, 4])
def test_sizes_are_those_of_the_model_that_is_trained(tiny_model, family, rank):
    folder = str(tiny_model(family))
    config = configured("Qwen3-4B", {PATH: folder, "worker.actor.model.lora.rank": rank})
    size, options = size_of_model(config), config.worker.actor.model
    model = load_model(folder, dtype=torch.float32, device="cpu")
    if rank:
        add_lora(model, LoraConfig(rank=rank, alpha=rank), seed=0)
    trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
    assert size.all.trained(options) + size.all.adapters(options) == trained
    assert size.all.weights + size.all.adapters(options) == sum(part.numel() for part in model.parameters())
    assert size.largest == max(part.numel() for part in model.parameters())


@pytest.mark.parametrize(("dtype", "strategy"), [("fp32", "adamw"), ("bf16", "adamw_bf16"), ("fp32", "adamw_bf16")])
@pytest.mark.parametrize("options", [{}, {"freeze": True}, {"lora_rank": 4}], ids=["all", "frozen tower", "lora"])
def test_weights_gradients_and_states_are_those_of_the_train_engine(tiny_model, dtype, strategy, options):
    folder = tiny_model("qwen2_5_vl")
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    engine = make_engine(folder, dtype=torch_dtype, strategy=strategy, **options)
    changes = {
        PATH: str(folder),
        "worker.actor.model.freeze_vision_tower": "freeze" in options,
        "worker.actor.model.lora.rank": options.get("lora_rank", 0),
        "worker.actor.fsdp.torch_dtype": dtype,
        "worker.actor.optim.strategy": strategy,
    }
    config = configured("Qwen3-4B", changes)
    size = size_of_model(config)
    parts = parts_of(count_memory(config, size, H100), "optimizer step")
    weights = list(engine.policy.model.parameters())
    trained = [part for part in weights if part.requires_grad]
    assert parts["weights"] == sum(part.nbytes for part in weights)
    assert parts["gradients"] == sum(part.nbytes for part in trained)
    assert parts["optimizer states"] == sum(state_bytes(part, strategy) for part in trained)
    sizes = count_sizes(config, size)
    assert (sizes.parameters, sizes.trainable) == tuple(
        sum(part.numel() for part in each) for each in (weights, trained)
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen2.5-VL-3B-Instruct", (1, 2, 4)),  # 16 heads in decoder and tower, whose MLPs have 3,420 columns
        ("Qwen2.5-VL-7B-Instruct", (1, 2, 4)),  # 28 heads, and 16 in the tower
        ("Qwen3-VL-30B-A3B-Instruct", (1, 2, 4, 8, 16)),
    ],
)
def test_sizes_of_tensor_parallelism_divide_heads_and_mlps_of_decoder_and_tower(name, sizes):
    hf_config = load_hf_config(CONFIGS / name)
    for size in range(1, 65):
        if size in sizes:
            require_tensor_parallel(hf_config, size, num_workers=64)
        else:
            with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, .*1 or 2 or 4"):
                require_tensor_parallel(hf_config, size, num_workers=64)


# -- phases ----------------------------------------------------------------------------------------


def test_the_memory_of_a_run_in_numbers():
    """A run of 8 prompts x 5 completions on eight GPUs with a KL term, in bytes, by phase."""
    changes = {**EIGHT, "algorithm.use_kl_loss": True, "data.rollout_batch_size": 512}
    memory = count(configured(VL_7B, changes), Hardware("cuda", int(79.6 * GIB), None))
    assert {f"{each.phase}, {each.pool}": each.expected for each in memory.phases} == {
        "start, GPU": 56501734666,
        "weight sync, GPU": 34440051200,
        "sampling, GPU": 65867643146,
        "log-probs, GPU": 18526702080,
        "update, GPU": 27698479104,
        "optimizer step, GPU": 18731816960,
        "save, GPU": 14585733632,
        "start, host": 17179869184,
        "sampling, host": 53494208512,
        "save, host": 153000208384,
    }
    eighth, parts = WEIGHTS // 8, parts_of(memory, "optimizer step")
    assert [parts[name] for name in ("weights", "gradients", "optimizer states")] == [
        4 * eighth,
        4 * eighth,
        8 * eighth,
    ]


@pytest.mark.extended
def test_an_offloaded_reference_is_on_a_gpu_only_where_one_worker_computes_with_it():
    """FSDP moves it unit by unit, in updates with the full KL too."""
    full_kl = {"algorithm.use_kl_loss": True, "algorithm.kl_penalty": "full"}
    for changes, in_update in (({"algorithm.use_kl_loss": True}, False), (full_kl, True)):
        for workers, phases in ((1, {"log-probs": True, "update": in_update}), (8, {})):
            config = configured(VL_7B, {**changes, "trainer.n_gpus_per_node": workers})
            assert config.worker.ref.fsdp.enable_cpu_offload
            memory = count(config)
            for phase in ("log-probs", "update"):
                reference = parts_of(memory, phase).get("reference model", 0)
                assert reference == (2 * WEIGHTS if phases.get(phase) else 0)


@pytest.mark.extended
def test_workers_with_a_copy_each_compute_in_the_format_that_fsdp_gathers():
    sharded, copies = (count(configured(VL_7B, {**EIGHT, "worker.actor.fsdp.fsdp_size": size})) for size in (-1, 1))
    in_pass = ("activations", "logits", "gradients of one layer", "layers gathered by FSDP")
    for phase in ("log-probs", "update"):
        one, other = parts_of(sharded, phase), parts_of(copies, phase)
        assert [one[name] for name in in_pass if name in one] == [other[name] for name in in_pass if name in one]
        assert "copies of weights" not in other
        assert other["weights"] == 8 * one["weights"]


# -- separate workers ------------------------------------------------------------------------------


@pytest.mark.extended
def test_learners_have_no_engine_and_samplers_nothing_else():
    four = {"trainer.n_gpus_per_node": 4}
    shared, apart = count(configured(VL_7B, four)), count(configured(VL_7B, {**four, **SEPARATE}))
    for phase in ("log-probs", "update", "optimizer step", "save"):
        parts = parts_of(shared, phase)
        del parts["CUDA graphs of vLLM"]
        assert parts_of(apart, phase, workers="learners") == parts
    assert not any("vLLM" in name for name in parts_of(apart, "start", workers="learners"))
    engine = {"vLLM's weights": 2 * WEIGHTS, "vLLM's KV cache and workspace": 48 * GIB - 2 * WEIGHTS}
    rest = {"CUDA graphs of vLLM": GIB, "CUDA context, NCCL": GIB}
    largest = 152_064 * 3584 * 2
    synced = {"largest tensor, gathered and converted": 3 * largest, "bucket of received tensors": 256 * 2**20}
    assert parts_of(apart, "start", workers="samplers") == engine | {"CUDA context, NCCL": GIB}
    assert parts_of(apart, "weight sync", workers="samplers") == engine | synced | rest
    assert parts_of(apart, "sampling", workers="samplers") == engine | rest
    divided = count(configured(VL_7B, {**SEPARATE, PARALLEL: 4}))
    assert parts_of(divided, "sampling", workers="samplers")["vLLM's weights"] == WEIGHTS // 2


# -- refusals --------------------------------------------------------------------------------------


def warned(config, hardware=H100):
    warnings: list[str] = []
    check_memory(config, size_of(config.worker.actor.model.model_path), hardware, warn=warnings.append)
    return warnings


@pytest.mark.extended(but=["hardware0"])
@pytest.mark.parametrize(
    ("name", "changes", "hardware", "facts"),
    [
        (
            VL_7B,
            OFFLOAD,
            H100,
            ["123.6 GiB during update", "80.0 GiB", "30.9 GiB  weights", "30.9 GiB  gradients", "61.8 GiB  optimizer"],
        ),
        (
            "Qwen2.5-VL-32B-Instruct",
            {**EIGHT, "worker.actor.offload.offload_optimizer": True, "worker.actor.fsdp.torch_dtype": "bf16"},
            Hardware("cuda", 141 * GIB, 64 * GIB),
            ["host of each machine"],
        ),
        (
            "Qwen2.5-VL-32B-Instruct",
            {**SEPARATE, "trainer.n_gpus_per_node": 32, UTILIZATION: 0.9},
            Hardware("cuda", 40 * GIB, 2000 * GIB),
            ["each GPU of the samplers", f"{PARALLEL}=2"],
        ),
        # All phases fit, but not vLLM's weights into its share.
        (
            "Qwen3-VL-30B-A3B-Instruct",
            {"trainer.nnodes": 4, **EIGHT},
            H100,
            ["48.0 GiB of each GPU", f"{UTILIZATION}=0.6", "58.2 GiB", f"{PARALLEL}=2 or {UTILIZATION}=0.8"],
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_the_arithmetic_and_what_helps(name, changes, hardware, facts):
    with pytest.raises(ConfigError) as refused:
        warned(configured(name, changes), hardware)
    for fact in (*facts, "trainer.check_memory=false"):
        assert fact in str(refused.value)


def test_tensor_parallelism_helps_a_run_that_samples_all_the_time_too():
    changes = {**SEPARATE, "trainer.n_gpus_per_node": 32, UTILIZATION: 0.9, "algorithm.max_staleness": 2}
    with pytest.raises(ConfigError, match=f"{PARALLEL}=2"):
        warned(configured("Qwen2.5-VL-32B-Instruct", changes), Hardware("cuda", 40 * GIB, 2000 * GIB))


@pytest.mark.extended
def test_remedies_are_the_same_arithmetic_with_the_change():
    config = configured(VL_7B)
    memory = count(config)
    worst = memory.worst(certain=True)
    remedies = find_remedies(config, size_of(config.worker.actor.model.model_path), memory, worst)
    assert len(remedies) == 3
    for remedy in remedies:
        changed = count(with_options(config, remedy.changes))
        [same] = [each for each in changed.phases if (each.phase, each.pool) == (worst.phase, worst.pool)]
        assert worst.certain - same.certain == remedy.saved_bytes > 0
        assert remedy.fits == (changed.worst(certain=True).certain <= 80 * GIB and changed.problem is None)
        if remedy.fits:
            warned(with_options(config, remedy.changes))


def test_a_run_near_the_limit_is_warned_and_not_refused(tiny_model):
    config = configured("Qwen2.5-VL-3B-Instruct", OFFLOAD)
    [warning] = warned(config, Hardware("cuda", 66 * GIB, 2000 * GIB))
    assert "update is expected to need 6" in warning
    assert warned(config, Hardware("cuda", 141 * GIB, 2000 * GIB)) == []
    assert warned(configured("Qwen2.5-VL-72B-Instruct", {"trainer.check_memory": False})) == []
    [warning] = warned(configured("Qwen3-4B", {PATH: str(tiny_model("gemma3_text"))}))
    assert "not counted" in warning


def test_a_save_copies_what_all_workers_of_a_machine_save():
    config = configured("Qwen2.5-1.5B-Instruct")
    size, weights = size_of_model(config), PUBLISHED["Qwen2.5-1.5B-Instruct"]

    def staged(**changes) -> int:
        return count_staged_bytes(with_options(config, changes), size)

    four, two_machines = {"trainer.n_gpus_per_node": 4}, {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2}
    rank = {"worker.actor.model.lora.rank": 8}
    assert staged() == staged(**four) == 2 * staged(**two_machines) == 12 * weights
    assert staged(**four, **{"worker.actor.fsdp.fsdp_size": 2}) == 2 * 12 * weights  # two copies
    assert staged(**four, **{"trainer.save_model_only": True}) == 4 * weights
    assert staged(**four, **rank) == 12 * size.all.adapters(with_options(config, rank).worker.actor.model)


# -- out of memory in a pass -----------------------------------------------------------------------

ROWS = {"trainer.auto_micro_batch": False, "worker.actor.micro_batch_size_per_device_for_update": 4}


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (ROWS, ["trainer.auto_micro_batch=true", "for_update=1", "enable_activation_offload=true"]),
        (
            {
                **EIGHT,
                "worker.actor.model.enable_gradient_checkpointing": False,
                "worker.actor.fsdp.enable_full_shard": False,
                "worker.actor.fsdp.fsdp_size": 2,
            },
            ["enable_gradient_checkpointing=true", "fsdp_size=-1", "enable_full_shard=true"],
        ),
        (
            {ACTIVATION_OFFLOAD: True, "worker.actor.model.lora.rank": 8},
            ["data.max_response_length", "trainer.n_gpus_per_node=2"],
        ),
        (
            {ACTIVATION_OFFLOAD: True, "worker.actor.fsdp.mp_param_dtype": "fp32"},
            ["data.max_response_length", "mp_param_dtype=bf16"],  # not wider than weights in bf16
        ),
    ],
)
def test_remedies_for_a_gpu_out_of_memory_are_options_that_the_run_does_not_have_yet(changes, first):
    config = configured("Qwen2.5-VL-3B-Instruct", changes)
    remedies = find_remedies_in_pass(config)
    assert len(remedies) >= len(first)
    for remedy, named in zip(remedies, first, strict=False):
        assert named in remedy
    critic = find_remedies_in_pass(with_options(config, {"algorithm.adv_estimator": "gae"}), model="critic")
    assert not any("worker.actor." in remedy for remedy in critic)
    for remedy in (*remedies, *critic, *find_remedies_in_pass(config, model="reference")):
        named = [each.partition("=") for each in remedy.split()]
        with_options(config, {name: yaml.safe_load(value) for name, _, value in named})
