"""Plans and memory of separate workers that learn and sample, by hand and beside shared ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.plans import planned
from support.published import configured
from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.assemble.memory_check import check_memory
from trigon.config.options import with_options
from trigon.errors import ConfigError
from trigon.tools.plan.tables import as_json, as_text

PARAMETERS = 8_292_166_656  # of Qwen2.5-VL-7B
SEPARATE = {"worker.hybrid_engine": False, "worker.rollout.n_gpus_per_node": 4}
AHEAD = {**SEPARATE, "algorithm.max_staleness": 1}
TWO_MACHINES = {"worker.rollout.nnodes": 2, "worker.rollout.n_gpus_per_node": 8}
FOUR = "4xH100-80G"
H100 = Hardware("cuda", 80 * GIB, 2000 * GIB)
ON_CPU = Hardware("cpu", 0, 64 * GIB)
SECONDS = {"weights": 0.0708203, "gen": 26.6957171, "old": 5.2543378, "ref": 5.3468843, "update_actor": 21.448637}
BYTES = {
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
FIXED = {"trainer.auto_micro_batch": False, "algorithm.mismatch_correction": "off"}  # equal rows and passes


@pytest.fixture(scope="module")
def shared():
    return planned(FIXED, gpus=FOUR)


@pytest.fixture(scope="module")
def in_turns():
    return planned({**SEPARATE, **FIXED}, gpus=FOUR)


@pytest.fixture(scope="module")
def ahead():
    return planned({**AHEAD, **FIXED}, gpus=FOUR)


def phases_of(memory, pool="GPU"):
    return {
        (each.workers, each.phase): {part.name: part.expected for part in each.parts}
        for each in memory.phases
        if each.pool == pool
    }


# -- memory ----------------------------------------------------------------------------------------


def test_learners_have_no_engine_and_samplers_nothing_else(shared, in_turns):
    phases = phases_of(in_turns.memory)
    learners = {phase: parts for (workers, phase), parts in phases.items() if workers == "learners"}
    samplers = {phase: parts for (workers, phase), parts in phases.items() if workers == "samplers"}
    assert list(learners) == ["start", "weight sync", "log-probs", "update", "optimizer step", "save"]
    assert list(samplers) == ["start", "weight sync", "sampling"]
    assert not any("vLLM" in name for parts in learners.values() for name in parts)
    together = phases_of(shared.memory)
    for phase in ("log-probs", "update", "optimizer step", "save"):
        parts = dict(together["all", phase])
        del parts["CUDA graphs of vLLM"]
        assert learners[phase] == parts
    share = int(0.6 * in_turns.memory.hardware.device_bytes)
    engine = {"vLLM's weights": 2 * PARAMETERS, "vLLM's KV cache and workspace": share - 2 * PARAMETERS}
    rest = {"CUDA graphs of vLLM": GIB, "CUDA context, NCCL": GIB}
    assert samplers["sampling"] == engine | rest
    largest = 152_064 * 3584 * 2
    synced = {"largest tensor, gathered and converted": 3 * largest, "bucket of received tensors": 256 * 2**20}
    assert samplers["weight sync"] == engine | synced | rest
    assert samplers["start"] == engine | {"CUDA context, NCCL": GIB}


def test_the_weights_of_samplers_are_divided_by_their_tensor_parallel_size():
    config = configured("Qwen2.5-VL-7B-Instruct", {**SEPARATE, "worker.rollout.tensor_parallel_size": 4})
    phases = phases_of(count_memory(config, size_of_model(config), H100))
    assert phases["samplers", "sampling"]["vLLM's weights"] == PARAMETERS // 2
    assert phases["learners", "update"]["weights"] == 4 * PARAMETERS  # one learner


def test_host_memory_is_added_where_both_pools_may_be_on_one_machine():
    config = configured("Qwen2.5-7B-Instruct", SEPARATE | {"trainer.n_gpus_per_node": 2})
    size = size_of_model(config)
    one = phases_of(count_memory(config, size, H100), "host")
    assert {workers for workers, _ in one} == {"all"}
    assert one["all", "save"]["processes"] == 2 * 2 * GIB
    assert one["all", "save"]["workers that sample"] == 4 * 2 * GIB
    two = phases_of(count_memory(with_options(config, TWO_MACHINES), size, H100), "host")
    assert "workers that sample" not in two["learners", "save"]
    assert two["samplers", "sampling"] == {"processes": 8 * 2 * GIB}


def test_samplers_that_stream_hold_the_pixels_of_all_groups_that_may_be_outstanding():
    streamed = {**SEPARATE, **TWO_MACHINES, "algorithm.max_staleness": 4, "data.rollout_batch_size": 512}
    config = configured("Qwen2.5-VL-7B-Instruct", streamed)
    size = size_of_model(config)
    held = phases_of(count_memory(config, size, H100), "host")["samplers", "sampling"]
    of_prompt = 4 * config.data.max_prompt_length * 1176 * 4  # patches of a token, values of a patch
    assert held["images of prompts being sampled"] == 8 * 5 * 512 // 16 * of_prompt
    one = count_memory(with_options(config, {"algorithm.max_staleness": 1}), size, H100)
    caches = phases_of(one, "host")["samplers", "sampling"]["caches of images"]
    assert held["caches of images"] == caches
    assert "images of prompts being sampled" not in phases_of(one, "host")["samplers", "sampling"]


def test_on_the_cpu_samplers_have_weights_and_a_cache_in_host_memory():
    config = configured("Qwen2.5-3B-Instruct", SEPARATE | {"trainer.n_gpus_per_node": 2})
    memory = count_memory(config, size_of_model(config), ON_CPU)
    phases = phases_of(memory, "host")
    parts = phases["all", "update"]
    weights = 4 * 2 * 3_085_938_688
    assert parts["workers that sample"] == weights + 4 * (1 + 2) * GIB
    assert not {"rollout engine's weights", "vLLM's KV cache"} & parts.keys()
    [update] = [phase for phase in memory.phases if phase.phase == "update"]
    assert [part.certain for part in update.parts if part.name == "workers that sample"] == [weights]


@pytest.mark.extended
def test_a_run_whose_samplers_do_not_fit_is_refused_with_what_helps_them():
    changes = SEPARATE | {"trainer.n_gpus_per_node": 32, "worker.rollout.gpu_memory_utilization": 0.9}
    config = configured("Qwen2.5-VL-32B-Instruct", changes)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, Hardware("cuda", 40 * GIB, 2000 * GIB), warn=print)
    message = str(caught.value)
    assert "on each GPU of the samplers" in message
    assert "worker.rollout.tensor_parallel_size=2" in message
    assert "n_gpus_per_node" not in message  # of the learners
    with pytest.raises(ConfigError, match="on each GPU of the samplers") as caught:
        check_memory(
            with_options(config, {"algorithm.max_staleness": 2}), Hardware("cuda", 40 * GIB, 2000 * GIB), warn=print
        )
    assert "tensor_parallel_size" not in str(caught.value)  # refused with max_staleness above 1


# -- time ------------------------------------------------------------------------------------------


def test_each_pool_takes_the_times_of_as_many_shared_workers(shared, in_turns, ahead):
    for made in (in_turns, ahead):
        for phase in ("gen", "old", "ref", "update_actor"):
            assert made.time.phases[phase] == pytest.approx(shared.time.phases[phase])


def test_without_a_batch_in_advance_the_pools_wait_for_each_other(in_turns):
    phases = in_turns.time.phases
    assert in_turns.time.total == pytest.approx(sum(phases.values()))
    learners, samplers = in_turns.pools
    working = phases["old"] + phases["ref"] + phases["update_actor"]
    assert learners.busy == pytest.approx(phases["weights"] + working)
    assert samplers.busy == pytest.approx(phases["weights"] + phases["gen"])
    assert learners.idle_fraction == pytest.approx(phases["gen"] / in_turns.time.total)
    assert samplers.idle_fraction == pytest.approx(working / in_turns.time.total)


def test_with_one_a_step_takes_as_long_as_the_slower_pool(ahead):
    phases = ahead.time.phases
    working = phases["old"] + phases["ref"] + phases["update_actor"]
    assert ahead.time.total == pytest.approx(phases["weights"] + max(working, phases["gen"]))
    assert min(pool.idle_fraction for pool in ahead.pools) == pytest.approx(0)
    assert ahead.run_seconds == pytest.approx(60 * ahead.time.total)


def test_more_samplers_sample_faster_and_change_nothing_for_the_learners(ahead):
    more = planned({**AHEAD, **FIXED, "worker.rollout.n_gpus_per_node": 16}, gpus=FOUR)
    assert more.time.phases["gen"] < ahead.time.phases["gen"]
    for phase in ("old", "ref", "update_actor"):
        assert more.time.phases[phase] == ahead.time.phases[phase]
    assert more.num_devices == 20


def test_weights_are_gathered_while_they_are_sent(in_turns):
    assert in_turns.moved.sent == 2 * PARAMETERS
    read = 3 * 2 * PARAMETERS / (0.6 * 3.35e12)
    # 4 + 4 GPUs may be those of one machine, whose link is faster than three quarters are gathered.
    assert in_turns.time.phases["weights"] == pytest.approx(2 * PARAMETERS / (0.7 * 450e9) + read)
    apart = planned({**SEPARATE, **TWO_MACHINES, **FIXED}, gpus=FOUR)
    assert apart.time.phases["weights"] == pytest.approx(2 * PARAMETERS / (0.7 * 50e9) + read)
    assert any("network between nodes: 400 Gbit/s" in each for each in apart.assumptions)
    assert not any("network between nodes" in each for each in in_turns.assumptions)


def test_throughput_counts_all_devices_and_the_utilization_those_that_learn(shared, ahead):
    assert ahead.tokens_per_second == pytest.approx(ahead.ledger.sequence_tokens / ahead.time.total / 8)
    assert ahead.update_mfu == pytest.approx(shared.update_mfu)


# -- what is said ----------------------------------------------------------------------------------


def test_the_tables_show_both_pools(ahead):
    text = as_text(ahead, width=140)
    assert "on 4 x H100-80G (learners) and 4 x H100-80G (samplers): fits" in text
    assert "each GPU of learners" in text
    assert "each GPU of samplers" in text
    assert "4 x H100-80G, model, optimizer, no vLLM; busy" in text
    assert "4 x H100-80G, 4 replicas of vLLM; busy" in text
    assert "at the same time, one batch in advance" in text
    assert not any("not counted" in each for each in ahead.assumptions)
    made = json.loads(json.dumps(as_json(ahead)))
    assert [(pool["workers"], pool["num_devices"], pool["replicas"]) for pool in made["pools"]] == [
        ("learners", 4, 0),
        ("samplers", 4, 4),
    ]
    assert made["seconds"]["sampling_overlaps_learning"] is True
    assert {phase["workers"] for phase in made["memory"]} == {"all", "learners", "samplers"}


@pytest.mark.parametrize(("partial", "cost"), [("continue", "prefills"), ("finish", "samplers that idle")])
def test_a_plan_says_what_it_does_not_count_of_a_run_that_samples_all_the_time(ahead, partial, cost):
    made = planned({**AHEAD, **FIXED, "algorithm.max_staleness": 4, "worker.rollout.partial": partial}, gpus=FOUR)
    assert made.time == replace(ahead.time, steps_ahead=4)
    assert "at the same time, up to 4 steps in advance" in as_text(made, width=140)
    [said] = [each for each in made.assumptions if each.startswith("not counted")]
    assert cost in said


def test_a_plan_of_shared_workers_has_no_pools(shared):
    assert shared.pools == ()
    assert shared.num_devices == shared.num_learners == 4
    assert {phase.workers for phase in shared.memory.phases} == {"all"}
    assert "learners" not in as_text(shared)
    assert shared.moved.sent == 0


def test_the_plan_of_shared_workers_in_numbers():
    """As it was before separate pools were planned."""
    made = planned()
    assert made.time.phases == pytest.approx(
        {**dict.fromkeys(("data", "reward", "parity", "other"), 0.0)} | SECONDS, rel=1e-6
    )
    assert {f"{each.phase}, {each.pool}": each.expected for each in made.memory.phases} == BYTES
