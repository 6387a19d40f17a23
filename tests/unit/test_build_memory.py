"""The memory of a run by arithmetic, and runs that are refused because they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from trigon.assemble.memory_remedies import (
    find_remedies_of_critic,
    find_remedies_of_policy,
    find_remedies_of_reference,
)

from support.engines import make_engine
from support.published import CONFIGS, configured
from trigon.assemble.engines import staged_bytes
from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.assemble.memory_check import MemoryCounter, check_memory, find_hardware, find_remedies
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.load import load_hf_config, load_model
from trigon.models.lora import LoraSettings, add_lora
from trigon.models.sizes import require_tensor_parallel
from trigon.system.host_memory import count_total_bytes
from trigon.training.protocol import Sizes

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
}
"""The number of parameters of each published model."""

OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}
H100 = Hardware("cuda", 80 * GIB, 2000 * GIB)


def count(config, hardware=H100):
    return count_memory(config, size_of_model(config), hardware)


def parts_of(memory, phase, pool="GPU"):
    [found] = [each for each in memory.phases if (each.phase, each.pool) == (phase, pool)]
    return {part.name: part.expected for part in found.parts}


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_of_published_models_are_exact(name):
    assert size_of_model(configured(name)).all.trained == PUBLISHED[name]
    assert {path.name for path in CONFIGS.iterdir()} == PUBLISHED.keys()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "internvl", "gemma3_text"])
@pytest.mark.parametrize("rank", [0, 4])
def test_sizes_are_those_of_the_model_that_is_trained(tiny_model, family, rank):
    folder = tiny_model(family)
    changes = {"worker.actor.model.model_path": str(folder), "worker.actor.model.lora.rank": rank}
    size = size_of_model(with_options(configured("Qwen3-4B"), changes))
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    if rank:
        add_lora(model, LoraSettings(rank, rank, "all-linear", None), seed=0)
    trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
    frozen = sum(part.numel() for part in model.parameters() if not part.requires_grad)
    assert (size.all.trained + size.all.adapters, size.all.frozen) == (trained, frozen)
    assert size.has_adapters == (rank > 0)
    assert size.largest == max(part.numel() for part in model.parameters())


@pytest.mark.parametrize(("dtype", "strategy"), [("fp32", "adamw"), ("bf16", "adamw_bf16")])
@pytest.mark.parametrize("freeze", [False, True])
def test_weights_gradients_and_states_are_those_of_the_train_engine(tiny_model, dtype, strategy, freeze):
    folder = tiny_model("qwen2_5_vl")
    sizes = make_engine(
        folder, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16, strategy=strategy, freeze=freeze
    ).sizes()
    config = configured(
        "Qwen3-4B",
        {
            "worker.actor.model.model_path": str(folder),
            "worker.actor.model.freeze_vision_tower": freeze,
            "worker.actor.fsdp.torch_dtype": dtype,
            "worker.actor.optim.strategy": strategy,
        },
    )
    parts = parts_of(count(config), "update")
    assert parts["weights"] == sizes.weight_bytes
    assert parts["gradients"] == sizes.gradient_bytes
    assert parts["optimizer states"] == sizes.optimizer_bytes


# -- phases ----------------------------------------------------------------------------------------


def test_each_of_eight_ranks_has_an_eighth_of_sixteen_bytes_a_weight():
    parts = parts_of(count(configured("Qwen2.5-VL-7B-Instruct", {"trainer.n_gpus_per_node": 8})), "optimizer step")
    eighth = PUBLISHED["Qwen2.5-VL-7B-Instruct"] // 8
    assert [parts[name] for name in ("weights", "gradients", "optimizer states")] == [
        4 * eighth,
        4 * eighth,
        8 * eighth,
    ]


def test_offloaded_parts_are_in_host_memory_while_completions_are_sampled():
    on_gpu, offloaded = (
        count(configured("Qwen2.5-VL-7B-Instruct", {"trainer.n_gpus_per_node": 4, **each})) for each in ({}, OFFLOAD)
    )
    states = 8 * PUBLISHED["Qwen2.5-VL-7B-Instruct"] // 4
    assert parts_of(on_gpu, "sampling")["optimizer states"] == states
    assert parts_of(offloaded, "sampling").keys() & {"weights", "optimizer states"} == set()
    assert parts_of(offloaded, "sampling", "host")["optimizer states"] == 4 * states
    assert parts_of(offloaded, "update")["optimizer states"] == states


def test_vllm_has_a_share_of_the_gpu_with_its_weights_over_the_tensor_parallel_ranks():
    changes = {"trainer.n_gpus_per_node": 8, "worker.rollout.gpu_memory_utilization": 0.5}
    for parallel in (1, 4):
        config = configured("Qwen2.5-VL-7B-Instruct", {**changes, "worker.rollout.tensor_parallel_size": parallel})
        parts = parts_of(count(config), "sampling")
        weights = -(-2 * PUBLISHED["Qwen2.5-VL-7B-Instruct"] // parallel)
        assert parts["vLLM's weights"] == weights
        assert parts["vLLM's KV cache and workspace"] == 40 * GIB - weights


def test_a_longer_row_and_no_checkpointing_need_more():
    config = configured("Qwen2.5-VL-7B-Instruct", {"trainer.n_gpus_per_node": 8})
    activations = [
        parts_of(count(with_options(config, changes)), "update")["activations"]
        for changes in (
            {},
            {"worker.actor.micro_batch_size_per_device_for_update": 8, "trainer.auto_micro_batch": False},
            {"worker.actor.model.enable_gradient_checkpointing": False},
        )
    ]
    assert activations[0] < activations[1] < 9 * activations[0]
    assert activations[2] > 4 * activations[0]


def test_offloaded_inputs_of_layers_are_in_host_memory_during_an_update():
    config = configured("Qwen2.5-7B-Instruct", {"trainer.n_gpus_per_node": 8, "trainer.auto_micro_batch": True})
    kept, offloaded = (
        count(with_options(config, {"worker.actor.model.enable_activation_offload": offloads}))
        for offloads in (False, True)
    )
    tokens = config.data.max_prompt_length + config.data.max_response_length
    each = tokens * 3584 * 2
    saved = parts_of(kept, "update")["activations"] - parts_of(offloaded, "update")["activations"]
    # At the peak, while logits are computed, the input of the last of 28 layers is on the device.
    assert saved == 27 * each
    pinned = 2 ** (each - 1).bit_length()
    assert parts_of(offloaded, "update", "host")["inputs of layers"] == 8 * 28 * pinned
    assert [each.phase for each in kept.phases if each.pool == "host"] == ["start", "sampling", "save"]


@pytest.mark.parametrize(
    ("response", "kept", "offloaded", "host"), [(30_720, 13.0, 7.3, 56.0), (63_488, 26.1, 14.7, 112.0)]
)
def test_what_the_page_on_long_sequences_says_of_offloaded_inputs(response, kept, offloaded, host):
    changes = {
        "trainer.n_gpus_per_node": 8,
        "trainer.auto_micro_batch": True,
        "worker.actor.model.freeze_vision_tower": True,
        "data.max_prompt_length": 2048,
        "data.max_response_length": response,
    }
    config = configured("Qwen2.5-VL-7B-Instruct", changes)
    memory = [
        count(with_options(config, {"worker.actor.model.enable_activation_offload": offloads}))
        for offloads in (False, True)
    ]
    activations = [round(parts_of(each, "update")["activations"] / GIB, 1) for each in memory]
    assert activations == [kept, offloaded]
    assert parts_of(memory[1], "update", "host")["inputs of layers"] == host * GIB


def test_the_table_names_every_phase_and_part():
    table = count(configured("Qwen2.5-VL-7B-Instruct", {"trainer.n_gpus_per_node": 8})).table()
    for name in (
        "start, GPU",
        "weight sync",
        "sampling, host",
        "log-probs",
        "update",
        "save, host",
        "optimizer states",
    ):
        assert name in table


# -- refusals --------------------------------------------------------------------------------------


def warned(config, hardware=H100):
    warnings: list[str] = []
    check_memory(config, hardware, warn=warnings.append)
    return warnings


def test_a_7b_model_on_one_gpu_is_refused_with_the_arithmetic_and_what_helps():
    config = configured("Qwen2.5-VL-7B-Instruct", OFFLOAD)
    with pytest.raises(ConfigError) as refused:
        warned(config)
    message = str(refused.value)
    assert "needs at least 123.6 GiB during update, and there are 80.0 GiB (on each GPU)" in message
    for line in ("30.9 GiB  weights", "30.9 GiB  gradients", "61.8 GiB  optimizer states"):
        assert line in message
    assert "worker.actor.model.lora.rank=64: " in message
    assert message.count(" less") == 3
    assert "trainer.check_memory=false" in message


def test_what_helps_is_the_same_arithmetic_with_the_change():
    config = configured("Qwen2.5-VL-7B-Instruct")
    memory = count(config)
    worst = memory.worst(certain=True)
    remedies = find_remedies(config, memory, worst, MemoryCounter(config, H100, size_of_model(config)).count)
    assert len(remedies) == 3
    for remedy in remedies:
        changed = count(with_options(config, remedy.changes))
        [same] = [each for each in changed.phases if (each.phase, each.pool) == (worst.phase, worst.pool)]
        assert worst.certain - same.certain == remedy.saved_bytes > 0
        limit = changed.worst(certain=True)
        assert remedy.fits == (limit.certain <= 80 * GIB)
        if remedy.fits:
            warned(with_options(config, remedy.changes))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen2.5-VL-3B-Instruct", (1, 2, 4)),  # 16 heads in decoder and tower, whose MLPs have 3,420 columns
        ("Qwen2.5-VL-7B-Instruct", (1, 2, 4)),  # 28 heads, and 16 in the tower
        ("Qwen2.5-VL-32B-Instruct", (1, 2, 4, 8)),  # 40 heads
        ("Qwen2.5-VL-72B-Instruct", (1, 2, 4, 8, 16)),
        ("Qwen2.5-7B-Instruct", (1, 2, 4)),  # 28 heads, but 18,944 columns
        ("Qwen3-VL-30B-A3B-Instruct", (1, 2, 4, 8, 16)),
    ],
)
def test_sizes_of_tensor_parallelism_divide_heads_and_mlps_of_decoder_and_tower(name, sizes):
    hf_config = load_hf_config(CONFIGS / name)
    for size in range(1, 65):
        if size in sizes:
            require_tensor_parallel(hf_config, size, num_workers=64)
        else:
            with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, .*set it to 1 or 2 or 4"):
                require_tensor_parallel(hf_config, size, num_workers=64)


@pytest.mark.parametrize("option", ["rollout.tensor_parallel_size", "actor.ulysses_sequence_parallel_size"])
def test_heads_that_the_workers_cannot_divide_are_refused_with_the_sizes_that_can(option):
    config = configured("Qwen2.5-VL-7B-Instruct", {"trainer.n_gpus_per_node": 8, f"worker.{option}": 8})
    with pytest.raises(ConfigError, match=rf"{option} is 8, .* 28 attention heads.*set it to 1 or 2 or 4$"):
        size_of_model(config)


def test_a_run_near_the_limit_is_warned_and_not_refused():
    config = configured("Qwen2.5-VL-3B-Instruct", OFFLOAD)
    [warning] = warned(config, Hardware("cuda", 66 * GIB, 2000 * GIB))
    assert warning.startswith("memory is tight: update is expected to need 6")
    assert warned(config, Hardware("cuda", 141 * GIB, 2000 * GIB)) == []


def test_a_share_of_vllm_that_the_trainer_occupies_is_refused():
    config = configured(
        "Qwen2.5-VL-3B-Instruct", {"worker.rollout.gpu_memory_utilization": 0.9, "trainer.n_gpus_per_node": 1}
    )
    with pytest.raises(ConfigError, match=r"during sampling.*(?s:.*)offload_optimizer=true: \d\d\.\d GiB less"):
        warned(config)


def test_host_memory_is_shared_by_the_workers_of_a_machine():
    changes = {"trainer.n_gpus_per_node": 8, "worker.actor.offload.offload_optimizer": True}
    config = configured("Qwen2.5-VL-32B-Instruct", {**changes, "worker.actor.fsdp.torch_dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"host memory of a machine, for all of its workers"):
        warned(config, Hardware("cuda", 141 * GIB, 64 * GIB))


def test_a_family_whose_passes_are_not_counted_is_announced(tiny_model):
    config = configured("Qwen3-4B", {"worker.actor.model.model_path": str(tiny_model("gemma3_text"))})
    [warning] = warned(config)
    assert "activations of this model's family are not counted" in warning


def test_the_check_can_be_turned_off():
    assert warned(configured("Qwen2.5-VL-72B-Instruct", {"trainer.check_memory": False})) == []


def test_a_model_that_this_machine_cannot_hold_is_refused(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2"), folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | {"hidden_size": 2**17, "intermediate_size": 2**20}))
    config = configured("Qwen3-4B", {"worker.actor.model.model_path": str(folder)})
    hardware = find_hardware(torch.device("cpu"))
    assert hardware is not None
    with pytest.raises(ConfigError, match=r"(?s)needs at least .* during update, and there are .*rollout engine's"):
        warned(config, hardware)


@pytest.mark.parametrize(
    ("memberships", "file", "text"),
    [("0::/job/task\n", "job/memory.max", "1000"), ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "1000")],
)
def test_host_memory_is_what_the_control_group_allows(tmp_path, memberships, file, text):
    (tmp_path / "cgroup").write_text(memberships)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    paths = {
        "meminfo": tmp_path / "meminfo",
        "memberships": tmp_path / "cgroup",
        "mount": tmp_path / "mount",
    }
    assert count_total_bytes(**paths) == 102_400
    limit: Path = tmp_path / "mount" / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n" if file.endswith("max") else "9223372036854771712\n")
    assert count_total_bytes(**paths) == 102_400
    limit.write_text(f"{text}\n")
    assert count_total_bytes(**paths) == 1000
    assert count_total_bytes(**{**paths, "meminfo": tmp_path / "absent"}) is None


def test_a_save_copies_what_all_workers_of_a_machine_save():
    ranks = [
        Sizes(parameters=9, trainable=9, weight_bytes=100 + rank, gradient_bytes=10, optimizer_bytes=1000)
        for rank in range(4)
    ]

    def staged(*, rank: int = 0, **trainer) -> int:
        config = Config(trainer=trainer, worker={"actor": {"model": {"lora": {"rank": rank}}}})
        return staged_bytes(config, ranks[: config.trainer.n_gpus_per_node * config.trainer.nnodes])

    assert staged() == 1100
    assert staged(n_gpus_per_node=4) == 4 * 1100 + 6
    assert staged(n_gpus_per_node=2, nnodes=2) == 2 * 1100 + 5  # of the second machine
    assert staged(n_gpus_per_node=4, rank=8) == 4 * 1010
    assert staged(n_gpus_per_node=4, save_model_only=True) == 406


# -- out of memory in a pass -----------------------------------------------------------------------

ROWS = {"trainer.auto_micro_batch": False, "worker.actor.micro_batch_size_per_device_for_update": 4}


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({**ROWS}, ["trainer.auto_micro_batch=true", "for_update=1", "enable_activation_offload=true"]),
        ({}, ["enable_activation_offload=true", "data.max_response_length (now 2,048)", "adamw_bf16"]),
        (
            {
                "worker.actor.model.enable_gradient_checkpointing": False,
                "worker.actor.fsdp.enable_full_shard": False,
                "worker.actor.fsdp.fsdp_size": 2,
                "trainer.n_gpus_per_node": 8,
            },
            ["enable_gradient_checkpointing=true", "fsdp_size=-1", "enable_full_shard=true"],
        ),
        (
            {"worker.actor.model.enable_activation_offload": True, "worker.actor.model.lora.rank": 8},
            ["data.max_response_length", "more workers"],
        ),
    ],
)
def test_remedies_for_a_gpu_out_of_memory_are_those_that_the_run_does_not_have_yet(changes, first):
    remedies = find_remedies_of_policy(configured("Qwen2.5-VL-3B-Instruct", changes))
    for remedy, named in zip(remedies, first, strict=False):
        assert named in remedy
    assert len(remedies) >= len(first)
    critic = find_remedies_of_critic(configured("Qwen2.5-VL-3B-Instruct", {"algorithm.adv_estimator": "gae"}))
    assert not any("worker.actor." in remedy for remedy in critic)


def test_remedies_are_options_that_a_run_accepts():
    for changes in ({}, ROWS):
        config = configured("Qwen2.5-VL-3B-Instruct", changes)
        for remedy in (*find_remedies_of_policy(config), *find_remedies_of_reference(config)):
            named = [each.partition("=") for each in remedy.partition(": ")[0].split() if "=" in each]
            with_options(config, {name: yaml.safe_load(value) for name, _, value in named})
