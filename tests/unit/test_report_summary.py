"""The texts before and after a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.report.summary import describe_plan, format_bytes, suggest_next_steps
from trigon.report.watch import Alarm, describe_stop
from trigon.system.grace import Grace
from trigon.system.resuming import WEIGHTS_ONLY
from trigon.training.local import Sizes
from trigon.training.updates import how_to_go_on


def test_an_export_is_suggested_if_there_is_an_unexported_checkpoint():
    def suggestions(checkpoint, exported, folder="/runs/x"):
        return suggest_next_steps(Config(), Path(folder), checkpoint, exported, stopped=False)

    here, elsewhere = Path("/runs/x/global_step_5"), Path("/runs/y/global_step_5")
    assert "export the model: trigon export /runs/x" in suggestions(here, None)
    assert "export the model: trigon export /runs/y/global_step_5" in suggestions(elsewhere, None)
    quoted = suggestions(Path("/my runs/x/global_step_5"), None, "/my runs/x")
    assert "export the model: trigon export '/my runs/x'" in quoted
    assert "export" not in " ".join(suggestions(here, Path("/model")))
    assert "export" not in " ".join(suggestions(None, None))
    assert "trainer.max_steps" in suggestions(here, None)[-1]


def test_after_a_validation_alone_more_steps_are_not_suggested():
    config = Config(trainer={"val_only": True})
    suggestions = " ".join(suggest_next_steps(config, Path("/runs/x"), None, None, stopped=False))
    assert "trainer.val_only=false" in suggestions
    assert "max_steps" not in suggestions


def test_after_a_stop_the_command_that_resumes_is_suggested():
    def suggestion(**trainer):
        last = Path("/runs/x/global_step_5")
        return suggest_next_steps(Config(trainer=trainer), Path("/runs/x"), last, None, stopped=True)[0]

    assert suggestion() == "continue: the same command resumes after step 5"
    elsewhere = (
        "continue: the same command with trainer.load_checkpoint_path=/runs/x/global_step_5 resumes after step 5"
    )
    assert suggestion(find_last_checkpoint=False) == elsewhere
    assert suggestion(load_checkpoint_path="/runs/other/global_step_2") == elsewhere


@pytest.mark.parametrize(
    ("trainer", "finds_last"),
    [
        ({}, True),
        ({"find_last_checkpoint": False}, False),
        ({"load_checkpoint_path": "/runs/y/global_step_2"}, False),
    ],
)
def test_all_messages_have_the_command_that_finds_the_last_checkpoint(trainer, finds_last):
    command = Config(trainer={"save_checkpoint_path": "/runs/x", **trainer}).trainer.same_command
    option = "" if finds_last else " with trainer.load_checkpoint_path=/runs/x/global_step_"
    assert command.from_last("goes on") == f"the same command{option and f'{option}...'} goes on"
    assert command.from_step(7, "goes on") == f"the same command{option and f'{option}7'} goes on"


def test_no_message_says_that_a_run_resumes_from_weights_alone():
    config = Config(trainer={"save_checkpoint_path": "/runs/x", "save_model_only": True})
    command, last = config.trainer.same_command, Path("/runs/x/global_step_5")
    grace = Grace(1.0, command)
    grace.saved_step = 5
    grace.begin_step(6)
    with grace.update():
        while_updating = grace.request(limited=True)
    alarm = Alarm("loss", 6, "it explodes", is_new=True, stops=True)
    texts = [
        command.from_last("goes on from the last checkpoint"),  # of workers that die, hangs and engines that fail
        while_updating,
        suggest_next_steps(config, last.parent, last, None, stopped=True)[0],
        suggest_next_steps(config, last.parent, last, None, stopped=False)[-1],
        how_to_go_on(last, command, validates_only=False),
        describe_stop(7, alarm, last, command),
        describe_stop(7, replace(alarm, saves=True), None, command),
    ]
    for text in texts:
        assert WEIGHTS_ONLY in text
        assert not any(word in text for word in ("same command", "resumes", "goes on", "resume from"))


def test_the_overview_has_the_arithmetic_of_a_step():
    config = Config(
        data={"rollout_batch_size": 8, "max_prompt_length": 100, "max_response_length": 50},
        worker={"actor": {"global_batch_size": 4, "micro_batch_size_per_device_for_update": 2}, "rollout": {"n": 5}},
        trainer={"total_epochs": 3},
    )
    plan = make_plan(config, num_train_prompts=20)
    sizes = (Sizes(parameters=1000, trainable=10, weight_bytes=2**20, gradient_bytes=0, optimizer_bytes=2**31),) * 2
    rows = describe_plan(config, plan, num_val_prompts=7, device="2 workers", sizes=sizes, has_reference=False)
    assert dict(rows) == {
        "device": "2 workers",
        "training prompts": "20, 16 of them per epoch",
        "validation prompts": "7",
        "steps": "6 (2 per epoch)",
        "sampled per step": "8 prompts x 5 = 40 completions",
        "updates per step": "2, each of 4 prompts x 5 = 20 completions",
        "micro-batches of an update": "at most 300 tokens on each worker, prompts counted once",
        "tokens per step": "at most 2,800, prompts counted once",
        "reference policy": "none",
        "parameters": "1,000, 10 of them trained",
        "memory": (
            "weights 1.0 MiB, gradients 0.0 MiB, optimizer 2.0 GiB on each worker; activations and rollout engine not "
            "counted"
        ),
    }


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.0 MiB"), (3_460_301, "3.3 MiB"), (7 * 2**30, "7.0 GiB"), (2**40, "1,024.0 GiB")]
)
def test_bytes_are_shown_in_mib_below_one_gib(num_bytes, text):
    assert format_bytes(num_bytes) == text
