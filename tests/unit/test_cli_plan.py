"""`trigon plan`: what it prints, and its exit status."""

from __future__ import annotations

import json

import pytest

from trigon.tools.cli.main import main

YAML = """\
data:
  train_files: hiyouga/geometry3k@train
  max_prompt_length: 2048
  max_response_length: 2048
algorithm:
  disable_kl: true
worker:
  actor:
    model:
      model_path: Qwen/Qwen2.5-VL-7B-Instruct
  rollout:
    n: 5
  reward:
    reward_function: math
trainer:
  val_before_train: false
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return str(path)


def run(capsys, *arguments):
    """Return the exit status of the command, and what it prints to each stream."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_their_width_and_every_section_is_there(capsys, file, width):
    status, out, err = run(capsys, file, "--gpus", "8xH100-80G", "--rows", "2101", "--width", str(width))
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    assert out.startswith("Qwen/Qwen2.5-VL-7B-Instruct on 8 x H100-80G: fits; ")
    for part in (
        "Batches of a step",
        "512 prompts x 5 = 2,560 completions",
        "Memory",
        "each GPU",
        "Work and time of a step",
        "PFLOP",
        "2,101 prompts, 4 steps, ",
        "60 steps, 60 updates, ",
        "Moved and written",
        "gathered by each GPU in a step",
        "This rests on",
        "--response-length",
    ):
        assert part in out


def test_a_run_that_does_not_fit_ends_with_one_and_says_what_helps(capsys, file):
    arguments = (file, "--gpus", "2xA100-40G", "worker.actor.global_batch_size=128", "--width", "80")
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert "does not fit; the fullest phase, update, needs" in out.replace("\n", " ")
    assert out.count(" GiB less") == 3
    assert "not predicted, since the run does not fit" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_overrides_may_stand_before_and_after_flags_and_json_has_the_numbers(capsys, file):
    arguments = ("--json", "--gpus", "H200", "worker.rollout.n=4", "--response-length", "300", "trainer.max_steps=3")
    model = "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct"
    status, out, _ = run(capsys, file, *arguments, model)
    assert status == 0
    read = json.loads(out)
    assert read["batches"]["completions"] == 4
    assert read["steps"] == 3
    assert read["lengths"]["mean_response_tokens"] == 300
    assert read["devices"] == "1 x H200-141G"
    assert read["seconds"]["run"] == pytest.approx(3 * read["seconds"]["step"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_steps", "3"], "trainer.max_steps=3"),
        (["--rows", "0"], "not a number above 0"),
        (["--keep-rate", "1.5"], "not a share"),
        (["--host-memory", "much"], "not a size"),
    ],
)
def test_wrong_usage_ends_with_two_and_a_hint(capsys, file, arguments, message):
    status, out, err = run(capsys, file, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("expected", "arguments", "message"),
    [
        (2, ["--gpus", "8xH10"], "unknown GPU 'H10'; did you mean H100-80G?"),
        (2, ["worker.rollout.n=0"], "worker.rollout.n"),
        (1, ["--gpus", "8xH100", "--model-config", "missing.json"], "--model-config missing.json is not a file"),
        (1, ["--calibrate", "missing"], "there is no run at missing"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_message(capsys, file, expected, arguments, message):
    status, out, err = run(capsys, file, *arguments)
    assert (status, out) == (expected, "")
    assert message in err


@pytest.mark.parametrize(
    "option",
    [
        "worker.rollout.tensor_parallel_size=2",
        "worker.actor.ulysses_sequence_parallel_size=2",
        "worker.actor.fsdp.fsdp_size=4",
        "worker.actor.fsdp.enable_cpu_offload=true",
    ],
)
def test_options_are_checked_for_the_given_gpus(capsys, file, option):
    status, out, err = run(capsys, file, "--gpus", "8xH100-80G", option)
    assert (status, err) == (0, "")
    assert "on 8 x H100-80G: fits" in out


@pytest.mark.parametrize("gpus", [(), ("--gpus", "8xH100-80G")])
def test_sizes_that_do_not_divide_the_gpus_of_the_plan_are_refused(capsys, file, gpus):
    status, out, err = run(capsys, file, *gpus, "worker.rollout.tensor_parallel_size=3")
    assert (status, out) == (2, "")
    assert "worker.rollout.tensor_parallel_size is 3" in err
    assert f"= {8 if gpus else 1} workers" in err


def test_advice_of_a_plan_can_be_followed(capsys, file):
    model = "worker.actor.model.model_path=Qwen/Qwen3-VL-30B-A3B-Instruct"
    arguments = (file, "--gpus", "2x8xH100-80G", model)
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert "worker.rollout.tensor_parallel_size=2" in out.replace("\n", " ")
    status, _, err = run(capsys, *arguments, "worker.rollout.tensor_parallel_size=2")
    assert (status, err) == (0, "")


def test_without_gpus_the_plan_is_for_this_machine(capsys, file):
    model = "worker.actor.model.model_path=Qwen/Qwen2.5-VL-72B-Instruct"
    status, out, _ = run(capsys, file, model, "trainer.device=cpu", "--host-memory", "64G")
    assert status == 1
    assert "CPU core" in out
    assert "of 64.0 GiB of a machine's memory" in out.replace("\n", " ")
