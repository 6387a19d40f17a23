"""What a plan says of a run: batches, operations, memory, time, bytes and disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from published_steps import ROWS, predict, table
from support.plans import LENGTHS, planned
from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError, ModelError
from trigon.models.load import load_hf_config
from trigon.models.sizes import GroupLengths, forward_flops, update_flops
from trigon.tools.plan.hardware import ACCELERATORS, parse_gpus
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.model import SHIPPED, open_model_config, shipped_models
from trigon.tools.plan.plan import plan

HF_CONFIG = load_hf_config(SHIPPED / "Qwen2.5-VL-7B-Instruct")
OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}
FROZEN = {"worker.actor.model.freeze_vision_tower": True}
LORA = {"worker.actor.model.lora.rank": 64}
MODEL = "worker.actor.model.model_path"


@pytest.fixture(scope="module")
def geo3k():
    return planned()


# -- batches ---------------------------------------------------------------------------------------


def test_the_batches_of_a_step_by_hand(geo3k):
    ledger = geo3k.ledger
    assert (ledger.sampled, ledger.learned, ledger.updates) == (2560, 2560, 4)
    assert (ledger.prompts_per_update, ledger.sequences_per_update, ledger.sequences_per_gpu) == (128, 640, 80)
    assert ledger.prompt_tokens == 512 * 434
    assert ledger.response_tokens == 2560 * 290
    assert ledger.sequence_tokens == 2560 * (434 + 290)
    assert ledger.row_tokens == 512 * (434 + 5 * 290)
    assert (geo3k.plan.steps_per_epoch, geo3k.num_steps) == (4, 60)


def test_rows_are_those_of_the_token_budget():
    changes = {"trainer.auto_micro_batch": False, "worker.actor.micro_batch_size_per_device_for_update": 1}
    ledger = planned(changes).ledger
    # A group of 434 + 5 * 290 = 1,884 tokens: two of the 16 groups of a GPU fit into 4,096 tokens.
    assert (ledger.update_budget, ledger.update_rows) == (4096, 8)
    assert ledger.score_rows == 64 * 1884 // (16 * 4096) + 1  # the default budget, 16 sequences


def test_a_measured_budget_is_the_largest_that_fits(geo3k):
    longest = 4096
    assert geo3k.ledger.update_budget % longest == 0
    config = with_options(Config(), {MODEL: str(SHIPPED / "Qwen2.5-VL-7B-Instruct"), "trainer.n_gpus_per_node": 8})
    size = size_of_model(config)
    hardware = Hardware("cuda", ACCELERATORS["H100-80G"].memory_bytes, GIB)
    used = []
    for micro in (geo3k.ledger.update_budget // longest, geo3k.ledger.update_budget // longest + 1):
        changes = {
            "data.max_prompt_length": 2048,
            "data.max_response_length": 2048,
            "worker.rollout.n": 5,
            "trainer.auto_micro_batch": False,
            "worker.actor.micro_batch_size_per_device_for_update": micro,
        }
        memory = count_memory(with_options(config, changes), size, hardware)
        used += [phase.expected for phase in memory.phases if phase.phase == "update"]
    assert used[0] <= 0.9 * hardware.device_bytes < used[1]


def test_epochs_over_a_step_multiply_its_updates_and_their_work(geo3k):
    twice = planned({"worker.actor.ppo_epochs": 2})
    assert twice.ledger.updates == 2 * geo3k.ledger.updates
    assert twice.flops.update == 2 * geo3k.flops.update
    assert twice.flops.reference == geo3k.flops.reference


def test_online_filtering_samples_more_in_whole_rounds_and_learns_from_as_many(geo3k):
    filtered = planned({"algorithm.online_filtering": True, "data.mini_rollout_batch_size": 300})
    assert filtered.ledger.sampled_prompts == 1200  # 512 / 0.5 = 1,024, in rounds of 300
    assert filtered.ledger.learned == 2560
    assert filtered.flops.update == geo3k.flops.update
    assert filtered.flops.prefill == pytest.approx(geo3k.flops.prefill * 1200 / 512)
    assert any("keeps 50% of the groups: assumed" in each for each in filtered.assumptions)
    changes = {"algorithm.online_filtering": True}
    assert planned(changes, lengths=replace(LENGTHS, keep_rate=1.0)).ledger.sampled_prompts == 512


# -- operations ------------------------------------------------------------------------------------


def test_operations_are_counted_as_the_metrics_count_them(geo3k):
    # 324 image tokens are 18 x 18, of 2 x 2 patches.
    group = GroupLengths(434, (290,) * 5, ((1, 36, 36),))
    forward = forward_flops(HF_CONFIG, [group], "shared").total
    assert geo3k.flops.update == 512 * update_flops(HF_CONFIG, [group], "shared")
    assert geo3k.flops.old == geo3k.flops.reference == 512 * forward
    assert geo3k.flops.prefill + geo3k.flops.decode == 512 * forward
    assert geo3k.flops.prefill == 512 * forward_flops(HF_CONFIG, [replace(group, completions=())], "shared").total


MAZE = {"worker.rollout.environment": "games.mazes:Maze"}


def test_observed_tokens_are_computed_but_neither_decoded_nor_scored(geo3k):
    lengths = replace(LENGTHS, observed_tokens=200, observed_image_tokens=64)
    made = planned(MAZE, lengths=lengths)
    # 64 image tokens are 8 x 8, of 2 x 2 patches.
    group = GroupLengths(434, (490,) * 5, ((1, 36, 36),), observed=1000, observed_grids=((1, 16, 16),) * 5)
    assert made.flops.update == 512 * update_flops(HF_CONFIG, [group], "shared")
    assert made.flops.decode == geo3k.flops.decode
    sampling = made.flops.prefill + made.flops.decode
    assert sampling == 512 * forward_flops(HF_CONFIG, [group], "shared").total
    assert made.ledger.row_tokens == 512 * (434 + 5 * 490)
    assert made.ledger.sequence_tokens == geo3k.ledger.sequence_tokens  # perf/total_num_tokens: no observed ones
    assert (made.lengths.response_tokens, made.lengths.longest_response) == (290, 2048 - 200)
    assert made.time.phases["update_actor"] > geo3k.time.phases["update_actor"]
    said = "\n".join(made.assumptions)
    assert "observations: given, with images of 64 tokens, counted as one image; the time of environments" in said


def test_what_is_not_known_of_turns_is_said(geo3k):
    made = planned(MAZE)
    assert made.flops == geo3k.flops
    said = "\n".join(made.assumptions)
    assert "observations: counted as sampled tokens, without images (--observed-length)" in said
    assert "observations" not in "\n".join(geo3k.assumptions)
    with pytest.raises(
        ConfigError, match=r"observed tokens are given, and completions have one turn: set worker\.roll"
    ):
        planned(lengths=replace(LENGTHS, observed_tokens=200))
    assumed = planned(MAZE, lengths=LengthOptions(observed_tokens=500)).lengths
    assert (assumed.response_tokens, assumed.completion_tokens) == (774, 1274)
    many = planned(MAZE, lengths=LengthOptions(observed_tokens=1500))
    assert (many.lengths.response_tokens, many.lengths.longest_response) == (274, 548)
    assert "assumed: half of what observations leave of data.max_response_length" in "\n".join(many.assumptions)
    images = planned(MAZE, lengths=LengthOptions(observed_image_tokens=300)).lengths
    assert (images.observed_tokens, images.response_tokens) == (300, 874)
    assert len(images.observed_grids) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"response_tokens": 2049},
            r"has 2,049 sampled tokens \(--response-length\), but at most .*_length=2048 tokens",
        ),
        ({"response_tokens": 549, "observed_tokens": 1500}, "has 549 sampled .* and 1,500 observed .*, but at most"),
        ({"response_tokens": 549, "observed_image_tokens": 1500}, "and 1,500 observed"),
        ({"observed_tokens": 2048}, "observes 2,048 tokens .*leaves none to sample, .*raise data.max_response_length"),
    ],
)
def test_given_tokens_that_no_completion_has_room_for_are_an_error(given, message):
    with pytest.raises(ConfigError, match=message):
        planned(MAZE, lengths=LengthOptions(**given))
    assert (
        planned(MAZE, lengths=LengthOptions(response_tokens=548, observed_tokens=1500)).lengths.response_tokens == 548
    )


def test_the_table_says_which_tokens_are_without_observed_ones(geo3k):
    from trigon.tools.plan.tables import as_text

    observing = planned(MAZE, lengths=replace(LENGTHS, observed_tokens=200))
    assert "without observed ones" not in as_text(geo3k, width=160)
    assert "of sequences, without observed ones; " in as_text(observing, width=160)


def test_log_probabilities_that_no_term_needs_cost_nothing():
    flops = planned({"algorithm.disable_kl": True, "worker.actor.global_batch_size": 512}).flops
    assert (flops.old, flops.reference) == (0, 0)


def test_gradient_checkpointing_computes_the_forward_again_and_lora_no_gradients_of_weights(geo3k):
    forward = geo3k.flops.old
    assert geo3k.flops.computed == geo3k.flops.update + forward
    plain = planned({"worker.actor.model.enable_gradient_checkpointing": False}).flops
    assert plain.computed == plain.update
    lora = planned(LORA).flops
    assert lora.computed < geo3k.flops.computed - 0.9 * forward
    frozen = planned(FROZEN).flops
    assert frozen.update < geo3k.flops.update
    assert frozen.old == forward


def test_prompts_are_computed_for_each_completion_without_the_prefix_cache(geo3k):
    assert planned({"worker.rollout.enable_prefix_caching": False}).flops.prefill == 5 * geo3k.flops.prefill


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_that_of_the_refusals_at_the_start(geo3k):
    changes = {
        "data.max_prompt_length": 2048,
        "data.max_response_length": 2048,
        "worker.rollout.n": 5,
        "algorithm.use_kl_loss": True,
        "trainer.n_gpus_per_node": 8,
        MODEL: str(SHIPPED / "Qwen2.5-VL-7B-Instruct"),
    }
    config = with_options(Config(), changes)
    hardware = Hardware("cuda", ACCELERATORS["H100-80G"].memory_bytes, 2**60)
    assert geo3k.memory.phases == count_memory(config, size_of_model(config), hardware).phases
    assert geo3k.verdict == "fits"


def test_a_run_that_does_not_fit_names_three_changes_and_no_time():
    small = planned(gpus="4xA100-40G")
    assert small.verdict == "does not fit"
    assert not small.fits
    assert len(small.remedies) == 3
    assert small.time is None
    for remedy in small.remedies:
        if remedy.fits and "trainer.n_gpus_per_node" not in remedy.changes:
            assert planned(remedy.changes, gpus="4xA100-40G").fits


def test_changes_are_combined_where_none_alone_is_enough():
    large = planned({MODEL: "Qwen/Qwen2.5-VL-72B-Instruct"}, gpus="8xA100-40G")
    assert not any(remedy.fits for remedy in large.remedies)
    assert len(large.combination) > 1
    changed = planned({MODEL: "Qwen/Qwen2.5-VL-72B-Instruct", **large.combination}, gpus="8xA100-40G")
    assert changed.fits


def test_a_share_of_the_gpu_that_cannot_hold_vllm_does_not_fit():
    moe = {MODEL: "Qwen/Qwen3-VL-30B-A3B-Instruct"}
    small = planned(moe, gpus="2x8xH100-80G")
    assert not small.fits
    assert "set worker.rollout.tensor_parallel_size=2 or worker.rollout.gpu_memory_utilization=0.8" in small.problem
    for change in ({"worker.rollout.tensor_parallel_size": 2}, {"worker.rollout.gpu_memory_utilization": 0.8}):
        assert planned({**moe, **change}, gpus="2x8xH100-80G").problem is None


def test_advice_names_no_tensor_parallelism_that_the_heads_do_not_allow():
    made = planned({"worker.rollout.gpu_memory_utilization": 0.1}, gpus="8xRTX4090-24G")
    assert "worker.rollout.gpu_memory_utilization=0.7" in made.problem
    assert "tensor_parallel_size" not in made.problem  # 8, which 28 heads do not allow


def test_host_memory_is_a_limit_only_if_it_is_known(geo3k):
    assert not geo3k.knows_host_memory
    assert planned(OFFLOAD, host_memory=100 * GIB).verdict == "does not fit"


# -- time ------------------------------------------------------------------------------------------


def test_phases_follow_the_hardware(geo3k):
    h200, a100 = planned(gpus="8xH200"), planned(gpus="8xA100-80G")
    assert h200.time.phases["gen"] < geo3k.time.phases["gen"] < a100.time.phases["gen"]
    assert geo3k.time.phases["update_actor"] < a100.time.phases["update_actor"]
    assert 0.2 < geo3k.update_mfu < 0.35  # never above the assumed efficiency of passes


@pytest.mark.parametrize(
    ("changes", "phase", "direction"),
    [
        ({"worker.actor.ppo_epochs": 2}, "update_actor", "longer"),
        ({"algorithm.disable_kl": True}, "ref", "shorter"),
        ({"worker.rollout.ignore_eos": True}, "gen", "longer"),
        (LORA, "update_actor", "shorter"),
        (FROZEN, "update_actor", "shorter"),
        (OFFLOAD, "update_actor", "longer"),
        ({"algorithm.online_filtering": True}, "gen", "longer"),
    ],
)
def test_options_change_the_time_of_their_phase(geo3k, changes, phase, direction):
    before, after = geo3k.time.phases[phase], planned(changes).time.phases[phase]
    assert after > before if direction == "longer" else after < before


def test_without_nvlink_gathering_weights_takes_longer_than_computing():
    changes = {"trainer.auto_micro_batch": False, "worker.actor.micro_batch_size_per_device_for_update": 1}
    linked, unlinked = planned(changes), planned(changes, gpus="8xL40S-48G")
    assert unlinked.moved.gathers == linked.moved.gathers
    gathering = unlinked.moved.gathers * 16 / 17 / (32e9 * 0.7)  # but for the two scorings
    assert unlinked.time.phases["update_actor"] > 0.8 * gathering


@pytest.mark.parametrize(
    ("model", "gpus", "changes"),
    [
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "2x8xH100-80G", {"worker.rollout.tensor_parallel_size": 4}),
        ("Qwen/Qwen3-4B", "8xH100-80G", {"worker.actor.fsdp.fsdp_size": 4}),
        ("Qwen/Qwen3-VL-8B-Instruct", "2x8xA100-80G", {"worker.actor.fsdp.fsdp_size": 8, **LORA}),
        ("Qwen/Qwen2.5-3B-Instruct", "H200", {"worker.rollout.name": "transformers"}),
    ],
    ids=["moe on two nodes", "text, hybrid", "lora, hybrid", "one"],
)
def test_every_kind_of_run_has_a_plan(model, gpus, changes):
    given = replace(LENGTHS, image_tokens=0, prompt_tokens=300) if "VL" not in model else LENGTHS
    made = planned({MODEL: model, **changes}, gpus=gpus, lengths=given)
    assert made.fits
    assert made.time.total > 1
    assert made.run_seconds == pytest.approx(60 * made.time.total)
    assert made.moved.gathers > 0 or made.num_devices == 1
    if "fsdp_size" in str(changes):
        ranks = changes["worker.actor.fsdp.fsdp_size"]
        assert made.moved.weight_sync == pytest.approx(_base(made) * 2 * (ranks - 1) / ranks)


def _base(made):
    """Return the weights without adapters."""
    return made.parameters - (made.trained_parameters if made.trained_parameters < made.parameters else 0)


@pytest.mark.extended
def test_the_published_steps_of_easyr1_are_predicted_within_a_factor():
    dense = [row for row in ROWS if "A3B" not in row.model]
    assert len(dense) == 6
    for row in dense:
        predicted = predict(row).time.total
        assert row.seconds / 2.1 < predicted < 2.1 * row.seconds, row
    # EasyR1's own MFU of its MoE runs is below 2 %: its experts run one after the other.
    for row in set(ROWS) - set(dense):
        assert predict(row).time.total < row.seconds / 10


# -- disk, validation ------------------------------------------------------------------------------


def test_disk_by_hand():
    disk = planned({"trainer.save_freq": 10, "trainer.save_limit": 3}).disk
    assert disk.checkpoint == pytest.approx(12 * 8_292_166_656, rel=1e-6)  # weights and two moments in float32
    assert (disk.kept, disk.checkpoints) == (4, 4 * disk.checkpoint)  # the newest three and the best
    assert planned({"trainer.save_freq": 10}).disk.kept == 6
    assert planned({"trainer.save_model_only": True}).disk.checkpoint == 4 * 8_292_166_656
    assert planned(LORA).disk.checkpoint < 0.05 * disk.checkpoint


def test_validations_count_towards_the_run():
    lengths = replace(LENGTHS, num_val_prompts=601)
    changes = {"data.val_files": ["hiyouga/geometry3k@test"], "trainer.val_before_train": True, "trainer.val_freq": 20}
    made = planned(changes, lengths=lengths)
    assert made.num_validations == 4  # before, after 20, 40 and 60 steps
    assert made.run_seconds == pytest.approx(60 * made.time.total + 4 * made.validation_seconds)
    assert made.validation_seconds > 0


# -- hardware, models, lengths ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100-80G", (1, 8, "H100-80G")),
        ("2x8xA100-40GB", (2, 8, "A100-40G")),
        ("h200", (3, 4, "H200-141G")),
        ("4xA100", (1, 4, "A100-80G")),
        ("2x4090", (1, 2, "RTX4090-24G")),
        ("1xRTX 4090", (1, 1, "RTX4090-24G")),
    ],
)
def test_gpus_are_read_as_people_write_them(text, expected):
    cluster = parse_gpus(text, nodes=3, gpus_per_node=4)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.accelerator.name) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH10", "did you mean H100-80G"),
        ("0xH100", "cannot read"),
        ("", "cannot read"),
        ("8xTPU", "known are A100-40G"),
    ],
)
def test_gpus_that_are_not_known_are_told_with_those_that_are(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_gpus(text, nodes=1, gpus_per_node=1)


def test_gpus_set_the_workers_of_the_configuration():
    made = planned({"trainer.nnodes": 4}, gpus="2x8xH100")
    assert made.num_devices == 16
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        planned({"worker.rollout.tensor_parallel_size": 3}, gpus="8xH100")


def test_shipped_models_need_no_network_and_others_can_be_given(tmp_path, monkeypatch):
    assert "Qwen/Qwen2.5-VL-7B-Instruct" in shipped_models()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"--model-config FILE.*Qwen/Qwen2.5-VL-7B-Instruct"):
        planned({MODEL: "Qwen/Qwen2.5-VL-7B"})
    file = tmp_path / "other.json"
    file.write_text((SHIPPED / "Qwen3-VL-4B-Instruct" / "config.json").read_text())
    made = planned({MODEL: "someone/model"}, model_config=file)
    assert made.parameters == 4_437_815_808
    with open_model_config("someone/model", SHIPPED / "Qwen3-4B") as folder:
        assert folder == SHIPPED / "Qwen3-4B"
    with pytest.raises(ModelError, match="is not a file"):
        planned(model_config=tmp_path / "missing.json")


def test_lengths_that_are_not_known_are_assumed_and_said():
    made = planned(lengths=LengthOptions())
    said = "\n".join(made.assumptions)
    assert "one image of 262,144 pixels and 128 tokens of text" in said
    assert "half of data.max_response_length" in said
    assert (made.num_prompts, made.num_steps, made.epoch_seconds, made.run_seconds) == (None, None, None, None)
    assert planned({"trainer.max_steps": 7}, lengths=LengthOptions()).num_steps == 7


def test_a_run_that_only_validates_is_not_planned():
    with pytest.raises(ConfigError, match="val_only"):
        plan(Config.model_validate({"trainer": {"val_only": True}}))


def test_the_page_has_the_table_of_published_steps():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert table() in page, "run: python scripts/published_steps.py, and put its table into docs/plan.md"
    for name, each in ACCELERATORS.items():
        assert f"| `{name}` |" in page
        assert each.source in page


def test_results_can_be_written_as_json(geo3k):
    from trigon.tools.plan.tables import as_json

    read = json.loads(json.dumps(as_json(geo3k)))
    assert read["fits"] is True
    assert read["batches"]["sampled"] == 2560
    assert read["seconds"]["step"] == pytest.approx(geo3k.time.total)
    assert read["memory"][0]["parts_bytes"]
