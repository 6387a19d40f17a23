"""What a plan says of a run: batches, operations, memory, seconds of a measured run, and disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from trigon.assemble.memory import GIB, Hardware, count_memory, size_of_model
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError, DataError, ModelError
from trigon.models.load import load_hf_config
from trigon.models.sizes import GroupLengths, dimensions_of, forward_flops, update_flops
from trigon.tools.cli.main import main
from trigon.tools.cli.plan import as_json, as_text
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.plan import GPUS, SHIPPED, find_place, open_model_config, plan, shipped_models

SETTINGS = {
    "data.train_files": ["hiyouga/geometry3k@train"],
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "data.rollout_batch_size": 512,
    "worker.actor.global_batch_size": 128,
    "worker.actor.model.model_path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "worker.rollout.n": 5,
    "worker.reward.reward_function": "math",
    "algorithm.use_kl_loss": True,
    "trainer.val_before_train": False,
    "trainer.total_epochs": 15,
}
LENGTHS = LengthOptions(prompt_tokens=434, image_tokens=324, response_tokens=290, num_prompts=2101)


def planned(changes=None, *, gpus="8xH100-80G", lengths=LENGTHS, **options):
    """Return the plan of GRPO on geometry3k with these changes."""
    config = with_options(Config(), {**SETTINGS, **(changes or {})})
    return plan(config, gpus=gpus, lengths=lengths, **options)


VL_7B = dimensions_of(load_hf_config(SHIPPED / "Qwen2.5-VL-7B-Instruct"))
OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}
LORA = {"worker.actor.model.lora.rank": 64}
MODEL = "worker.actor.model.model_path"
MOE = {MODEL: "Qwen/Qwen3-VL-30B-A3B-Instruct"}
MAZE = {"worker.rollout.environment": "games.mazes:Maze"}
MICRO = "worker.actor.micro_batch_size_per_device_for_update"
SEPARATE = {"worker.hybrid_engine": False, "worker.rollout.n_gpus_per_node": 4, "algorithm.max_staleness": 1}


@pytest.fixture(scope="module")
def geo3k():
    return planned()


# -- batches and operations ------------------------------------------------------------------------


def test_the_batches_of_a_step_by_hand(geo3k):
    steps, batches = geo3k.plan, geo3k.batches
    assert (batches.sampled, steps.updates_per_step, steps.prompts_per_update) == (2560, 4, 128)
    assert (steps.sequences_per_update, batches.sequences_per_gpu) == (640, 80)
    assert (batches.prompt_tokens, batches.response_tokens) == (512 * 434, 2560 * 290)
    assert (batches.sequence_tokens, batches.row_tokens) == (2560 * (434 + 290), 512 * (434 + 5 * 290))
    assert (steps.steps_per_epoch, geo3k.num_steps) == (4, 60)


def test_rows_are_those_of_the_token_budget():
    plan = planned({"trainer.auto_micro_batch": False, MICRO: 1})
    # A group of 434 + 5 * 290 = 1,884 tokens: two of the 16 groups of a GPU fit into 4,096 tokens.
    assert (plan.plan.tokens_per_update_pass, plan.batches.update_rows) == (4096, 8)
    assert plan.batches.score_rows == 64 * 1884 // (16 * 4096) + 1  # the default budget, 16 sequences


def test_a_measured_budget_is_the_largest_that_fits(geo3k):
    longest, hardware = 4096, Hardware("cuda", int(GPUS["H100-80G"] * GIB), None)
    config = with_options(
        Config(), {**SETTINGS, MODEL: str(SHIPPED / "Qwen2.5-VL-7B-Instruct"), "trainer.n_gpus_per_node": 8}
    )
    size, used = size_of_model(config), []
    assert geo3k.plan.tokens_per_update_pass % longest == 0
    for micro in (geo3k.plan.tokens_per_update_pass // longest, geo3k.plan.tokens_per_update_pass // longest + 1):
        memory = count_memory(with_options(config, {"trainer.auto_micro_batch": False, MICRO: micro}), size, hardware)
        used += [phase.expected for phase in memory.phases if phase.phase == "update"]
    assert used[0] <= 0.9 * hardware.device_bytes < used[1]
    assert geo3k.memory.phases == count_memory(config, size, hardware).phases  # those of the refusals


def test_operations_are_counted_as_the_metrics_count_them(geo3k):
    # 324 image tokens are 18 x 18, of 2 x 2 patches.
    group = GroupLengths(434, (290,) * 5, ((1, 36, 36),))
    forward = forward_flops(VL_7B, [group]).total
    assert geo3k.flops.update == 512 * update_flops(VL_7B, [group])
    assert geo3k.flops.old == geo3k.flops.reference == 512 * forward
    assert geo3k.flops.prefill + geo3k.flops.decode == 512 * forward
    assert geo3k.flops.prefill == 512 * forward_flops(VL_7B, [GroupLengths(434, grids=group.grids)]).total


@pytest.mark.extended
def test_options_change_the_work_of_their_phase(geo3k):
    flops = geo3k.flops
    twice = planned({"worker.actor.ppo_epochs": 2, "worker.rollout.enable_prefix_caching": False})
    assert twice.flops == replace(flops, update=2 * flops.update, prefill=5 * flops.prefill)
    filtered = planned({"algorithm.online_filtering": True, "data.mini_rollout_batch_size": 300})
    assert filtered.batches.sampled_prompts == 1200  # 512 / 0.5 = 1,024, in rounds of 300
    assert filtered.flops == replace(flops, prefill=flops.prefill * 1200 / 512, decode=flops.decode * 1200 / 512)
    kept = planned({"algorithm.online_filtering": True}, lengths=replace(LENGTHS, keep_rate=1.0))
    assert kept.batches.sampled_prompts == 512
    unneeded = planned({"algorithm.disable_kl": True, "worker.actor.global_batch_size": 512})
    assert (unneeded.flops.old, unneeded.flops.reference) == (0, 0)
    frozen = planned({"worker.actor.model.freeze_vision_tower": True}).flops
    assert frozen.update < flops.update
    assert frozen.old == flops.old


def test_observed_tokens_are_computed_but_neither_decoded_nor_scored(geo3k):
    made = planned(MAZE, lengths=replace(LENGTHS, observed_tokens=200, observed_image_tokens=64))
    # 64 image tokens are 8 x 8, of 2 x 2 patches.
    group = GroupLengths(434, (490,) * 5, ((1, 36, 36),), observed=1000, observed_grids=((1, 16, 16),) * 5)
    assert made.flops.update == 512 * update_flops(VL_7B, [group])
    assert made.flops.decode == geo3k.flops.decode
    sampling = made.flops.prefill + made.flops.decode
    assert sampling == 512 * forward_flops(VL_7B, [group]).total
    assert made.batches.row_tokens == 512 * (434 + 5 * 490)
    assert made.batches.sequence_tokens == geo3k.batches.sequence_tokens  # perf/total_num_tokens: no observed ones
    assert "without observed ones" in as_text(made, width=140)
    assert "observed" not in as_text(geo3k, width=140)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_run_that_does_not_fit_names_changes_with_which_it_fits():
    small = planned(gpus="4xA100-40G")
    assert (small.verdict, small.fits, len(small.remedies)) == ("does not fit", False, 3)
    fitting = next(each for each in small.remedies if each.fits and "trainer.n_gpus_per_node" not in each.changes)
    assert planned(fitting.changes, gpus="4xA100-40G").fits
    large = {MODEL: "Qwen/Qwen2.5-VL-72B-Instruct"}
    together = planned(large, gpus="8xA100-40G")
    assert not any(remedy.fits for remedy in together.remedies)
    assert len(together.combination) > 1
    assert planned({**large, **together.combination}, gpus="8xA100-40G").fits


@pytest.mark.extended
def test_a_share_of_the_gpu_that_cannot_hold_vllm_does_not_fit():
    small = planned(MOE, gpus="2x8xH100-80G")
    assert not small.fits
    ways = [dict(each) for each in small.memory.problem.remedies]
    assert ways == [{"worker.rollout.tensor_parallel_size": 2}, {"worker.rollout.gpu_memory_utilization": 0.8}]
    for change in ways:
        assert planned({**MOE, **change}, gpus="2x8xH100-80G").memory.problem is None
    assert planned({**MOE, **small.combination}, gpus="2x8xH100-80G").fits
    little = planned({"worker.rollout.gpu_memory_utilization": 0.1}, gpus="8xRTX4090-24G")
    # Not tensor_parallel_size=8, which 28 heads do not allow.
    assert little.memory.problem.remedies == ({"worker.rollout.gpu_memory_utilization": 0.7},)


def test_host_memory_is_a_limit_only_if_it_is_known(geo3k):
    assert geo3k.memory.hardware.host_bytes is None
    assert planned(OFFLOAD, host_memory=100 * GIB).verdict == "does not fit"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "gpus", "changes"),
    [
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "2x8xH100-80G", {"worker.rollout.tensor_parallel_size": 4}),
        ("Qwen/Qwen3-4B", "8xH100-80G", {"worker.actor.fsdp.fsdp_size": 4}),
        ("Qwen/Qwen3-VL-8B-Instruct", "2x8xA100-80G", {"worker.actor.fsdp.fsdp_size": 8, **LORA}),
        ("Qwen/Qwen2.5-3B-Instruct", "H200", {"worker.rollout.name": "transformers"}),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "4xH100-80G", {**SEPARATE, "algorithm.max_staleness": 4}),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "8xH100-80G", {"algorithm.adv_estimator": "gae"}),
    ],
    ids=["moe on two nodes", "text, hybrid", "lora, hybrid", "one", "separate pools", "critic"],
)
def test_every_kind_of_run_has_a_plan(model, gpus, changes):
    given = replace(LENGTHS, image_tokens=0, prompt_tokens=300) if "VL" not in model else LENGTHS
    made = planned({MODEL: model, **changes}, gpus=gpus, lengths=given)
    assert made.fits
    assert made.flops.total > 0
    assert (made.seconds, made.run_seconds, made.num_steps) == (None, None, 60)


def test_both_pools_of_workers_are_planned():
    made = planned({**SEPARATE, "worker.rollout.nnodes": 2}, gpus="4xH100-80G")
    assert made.num_devices == 12
    text = as_text(made, width=140)
    for part in ("4 x H100-80G (learners) and 2 nodes x 4 x H100-80G (samplers)", "each GPU of the learners"):
        assert part in text
    assert {phase["workers"] for phase in as_json(made)["memory"]} == {"learners", "samplers"}


# -- disk, validation ------------------------------------------------------------------------------


def test_disk_by_hand():
    disk = planned({"trainer.save_freq": 10, "trainer.save_limit": 3}).disk
    assert disk.checkpoint == pytest.approx(12 * 8_292_166_656, rel=1e-6)  # weights and two moments in float32
    assert (disk.kept, disk.checkpoints) == (4, 4 * disk.checkpoint)  # three, the best among them, one being written
    assert planned({"trainer.save_freq": 10}).disk.kept == 6
    assert planned({"trainer.save_model_only": True}).disk.checkpoint == 4 * 8_292_166_656
    assert planned(LORA).disk.checkpoint < 0.05 * disk.checkpoint


def test_validations_are_counted():
    changes = {"data.val_files": ["hiyouga/geometry3k@test"], "trainer.val_before_train": True, "trainer.val_freq": 20}
    made = planned(changes, lengths=replace(LENGTHS, num_val_prompts=601))
    assert made.num_validations == 4  # 0, 20, 40, 60
    changes["worker.rollout.val_override_config.n"] = 3
    written = planned(changes, lengths=replace(LENGTHS, num_val_prompts=601)).disk.validation_rollouts
    tokens = made.lengths.completion_tokens + 200
    assert written == 3 * round(601 * (600 + 5 * tokens) + 65 * 2 * made.lengths.response_tokens)
    assert planned({}).disk.validation_rollouts == 0


# -- seconds ---------------------------------------------------------------------------------------

MEASURED = {
    "timing_s/gen": 20.0,
    "timing_s/update_actor": 30.0,
    "timing_s/weights": 2.0,
    "timing_s/reward": 4.0,
    "timing_s/step": 60.0,
    "prompt_length/mean": 434.0,
    "response_length/mean": 290.0,
    "perf/total_num_tokens": 256.0 * 724,
    "actor/packed_tokens": 51.2 * 1884,
}
FEW = {"data.rollout_batch_size": 50, "worker.actor.global_batch_size": 50, "worker.rollout.n": 5}


@pytest.fixture
def finished(tmp_path):
    """Return a function that writes a run of 50 prompts x 5, whose first step is slow."""

    def write(changes=None, steps=3):
        given = {**SETTINGS, **FEW, "trainer.n_gpus_per_node": 8, "trainer.device": "auto", **(changes or {})}
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(with_options(Config(), given).model_dump(mode="json")))
        slow = {name: each * 9 if name.startswith("timing") else each for name, each in MEASURED.items()}
        metrics = [{"timing_s/validation": 100.0}, slow, *[MEASURED] * (steps - 1)]
        lines = [{"step": step, "metrics": each} for step, each in enumerate(metrics)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


def test_seconds_grow_with_the_work_of_each_phase(finished):
    changes = {"data.val_files": ["hiyouga/geometry3k@test"], "trainer.val_before_train": True, "trainer.val_freq": 30}
    made = planned(changes, measured=finished(), lengths=replace(LENGTHS, num_val_prompts=601))
    more = 512 / 50  # prompts, and therefore completions and sampled tokens
    update, scored = 30 * 512 / 51.2, 30 / 3 * 2560 / 256  # a forward is a third of an update
    expected = {"gen": 20 * more, "update_actor": update, "weights": 2, "reward": 4 * more}
    expected |= {"old": scored, "ref": scored}
    assert made.seconds == pytest.approx(expected)
    assert made.step_seconds == pytest.approx(sum(expected.values()))
    assert made.epoch_seconds == pytest.approx(4 * made.step_seconds)
    assert (made.validation_seconds, made.num_validations) == (100, 3)
    assert made.run_seconds == pytest.approx(60 * made.step_seconds + 300)
    assert "update_actor" in str(made)
    assert as_json(made)["seconds"]["run"] == made.run_seconds


@pytest.mark.parametrize(
    ("changes", "steps", "error", "fact"),
    [
        ({MODEL: "Qwen/Qwen3-4B"}, 3, ConfigError, "Qwen/Qwen3-4B"),
        ({"trainer.n_gpus_per_node": 4}, 3, ConfigError, "n_gpus_per_node"),
        (SEPARATE, 3, ConfigError, "worker.hybrid_engine=False"),
        ({}, 1, DataError, "1 training steps"),
    ],
)
def test_a_run_that_says_nothing_of_the_planned_one_is_refused(finished, changes, steps, error, fact):
    with pytest.raises(error, match=fact):
        planned(measured=finished(changes, steps))


def test_a_measured_run_may_name_the_model_otherwise_and_is_refused_with_unknown_options(finished, monkeypatch):
    run = finished({MODEL: str(SHIPPED / "Qwen2.5-VL-3B-Instruct")})
    monkeypatch.chdir(SHIPPED)
    made = planned({MODEL: "./Qwen2.5-VL-3B-Instruct"}, measured=run, lengths=LengthOptions())
    assert made.seconds is not None
    assert (made.lengths.mean_prompt, made.lengths.response_tokens) == (434, 290)  # of the run
    (run / "config.yaml").write_text("trainer: {max_stepz: 3}")
    with pytest.raises(DataError, match=r"config.yaml .*trainer.max_stepz"):
        planned(measured=run)


# -- devices, models, lengths ----------------------------------------------------------------------


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
    place = find_place(Config(trainer={"nnodes": 3, "n_gpus_per_node": 4}), text, None)
    assert (place.nodes, place.gpus_per_node, place.kind) == expected
    assert place.hardware.device_bytes == int(GPUS[place.kind] * GIB)


def test_shipped_models_need_no_network_and_others_can_be_given(tmp_path, monkeypatch):
    assert "Qwen/Qwen2.5-VL-7B-Instruct" in shipped_models()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"--model-config FILE.*Qwen/Qwen2.5-VL-7B-Instruct"):
        planned({MODEL: "Qwen/Qwen2.5-VL-7B"})
    file = tmp_path / "other.json"
    file.write_text((SHIPPED / "Qwen3-VL-4B-Instruct" / "config.json").read_text())
    assert planned({MODEL: "someone/model"}, model_config=file).parameters == 4_437_815_808
    with open_model_config("someone/model", SHIPPED / "Qwen3-4B") as folder:
        assert folder == SHIPPED / "Qwen3-4B"
    file.write_text("no JSON")
    with pytest.raises(ModelError, match=r"other\.json is no config\.json"):
        planned(model_config=file)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match="val_only"):
        plan(Config.model_validate({"trainer": {"val_only": True}}))
    assert planned({"trainer.nnodes": 4}, gpus="2x8xH100").num_devices == 16


# -- the command -----------------------------------------------------------------------------------

NO_KL = SETTINGS | {"algorithm.use_kl_loss": False, "algorithm.disable_kl": True}


@pytest.fixture
def run(capsys, tmp_path):
    """Return a function: exit status of the command, and what it prints to each stream."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(NO_KL))

    def call(*arguments):
        try:
            status = main(["plan", str(path), *arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_their_width_and_every_section_is_there(run, width):
    status, out, err = run("--gpus", "8xH100-80G", "--rows", "2101", "--width", str(width))
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    assert out.startswith("Qwen/Qwen2.5-VL-7B-Instruct on 8 x H100-80G: fits; ")
    for part in ("512 prompts x 5 = 2,560 completions", "each GPU", "PFLOP", "2,101 prompts, 4 steps", "60 steps"):
        assert part in out


def test_a_run_that_does_not_fit_ends_with_one_and_says_what_helps(run):
    status, out, _ = run("--gpus", "2xA100-40G", "worker.actor.global_batch_size=128", "--width", "80")
    assert status == 1
    assert out.startswith("Qwen/Qwen2.5-VL-7B-Instruct on 2 x A100-40G: does not fit; ")
    assert out.count(" GiB less") == 3
    assert max(len(line) for line in out.splitlines()) <= 80


def test_overrides_may_stand_before_and_after_flags_and_json_has_the_numbers(run):
    model = "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct"
    arguments = ("--json", "--gpus", "H200", "worker.rollout.n=4", "--response-length", "300", "trainer.max_steps=3")
    status, out, _ = run(*arguments, model)
    read = json.loads(out)
    assert (status, read["fits"], read["devices"], read["steps"]) == (0, True, "1 x H200-141G", 3)
    assert (read["batches"]["completions"], read["mean_tokens"]["response"]) == (4, 300)
    assert read["memory"][0]["parts_bytes"]


@pytest.mark.parametrize(
    ("expected", "arguments", "fact"),
    [
        (2, ["--max_steps", "3"], "trainer.max_steps=3"),
        (2, ["--gpus", "8xH10"], "H100-80G?"),
        (2, ["--gpus", "0xH100"], "8xH100-80G"),
        (2, ["--gpus", "8xTPU"], "A100-40G"),
        (2, ["--gpus", "2000xH100"], "2,000 GPUs on a node"),
        (2, ["worker.rollout.n=0"], "worker.rollout.n"),
        (2, ["worker.rollout.tensor_parallel_size=3"], "= 1 workers"),
        (2, ["--gpus", "8xH100-80G", "worker.rollout.tensor_parallel_size=3"], "= 8 workers"),
        (1, ["--gpus", "8xH100", "--model-config", "missing.json"], "--model-config missing.json"),
        (1, ["--gpus", "8xH100", "--measured", "missing"], "missing"),
    ],
)
def test_what_is_wrong_ends_with_one_message(run, expected, arguments, fact):
    status, out, err = run(*arguments)
    assert (status, out) == (expected, "")
    assert fact in err


def test_options_are_checked_for_the_given_gpus(run):
    sizes = ("worker.rollout.tensor_parallel_size=2", "worker.actor.ulysses_sequence_parallel_size=2")
    status, out, err = run(
        "--gpus", "8xH100-80G", *sizes, "worker.actor.fsdp.fsdp_size=4", "worker.actor.fsdp.enable_cpu_offload=true"
    )
    assert (status, err) == (0, "")
    assert "on 8 x H100-80G: fits" in out


def test_without_gpus_the_plan_is_for_this_machine(run):
    status, out, _ = run("trainer.device=cpu", "--host-memory", "64G")
    assert status == 1
    assert "CPU worker" in out
    assert "of 64.0 GiB" in out.replace("\n", " ")
