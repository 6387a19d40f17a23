"""The texts before and after a run."""

from dataclasses import replace
from pathlib import Path

from trigon.config.schema import Config
<<<<<<< HEAD
from trigon.report.summary import suggest_next_steps
from trigon.report.watch import Alarm, describe_stop
from trigon.system.grace import Grace
from trigon.system.resuming import WEIGHTS_ONLY
=======
from trigon.report.summary import describe_plan, suggest_next_steps
from trigon.report.watch import Alarm, describe_stop
from trigon.system.grace import Grace
from trigon.system.resuming import WEIGHTS_ONLY
from trigon.system.terminal import format_bytes
from trigon.training.local import Sizes
>>>>>>> 02090ece (An image that a program has opened is decoded with the formats and the errors of every other one)
from trigon.training.updates import how_to_go_on


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
<<<<<<< HEAD
=======


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
def test_bytes_are_shown_in_mib_below_a_tenth_of_a_gib(num_bytes, text):
    assert format_bytes(num_bytes) == text
>>>>>>> 02090ece (An image that a program has opened is decoded with the formats and the errors of every other one)
