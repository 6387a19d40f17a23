"""The texts before and after a run."""

from dataclasses import replace
from pathlib import Path

from trigon.config.schema import Config
from trigon.report.overview import suggest_next_steps
from trigon.report.watch import Alarm, describe_stop
from trigon.system.stopping import WEIGHTS_ONLY, Grace
from trigon.training.updates import describe_continuation


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


def test_after_a_validation_the_command_that_trains_is_suggested_with_the_data_only_if_it_has_none():
    def suggestion(files):
        config = Config(trainer={"val_only": True}, data={"train_files": files})
        return suggest_next_steps(config, Path("/runs/x"), None, None, stopped=False)[-1]

    assert suggestion(()).endswith("trainer.val_only=false and data.train_files")
    assert suggestion(("a.jsonl",)).endswith("trainer.val_only=false")


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
        command.from_last("continues from the last checkpoint"),  # of workers that die, hangs and engines that fail
        while_updating,
        suggest_next_steps(config, last.parent, last, None, stopped=True)[0],
        suggest_next_steps(config, last.parent, last, None, stopped=False)[-1],
        describe_continuation(last, command),
        describe_stop(7, alarm, last, command),
        describe_stop(7, replace(alarm, saves=True), None, command),
    ]
    for text in texts:
        assert WEIGHTS_ONLY in text
        assert not any(word in text for word in ("same command", "resumes", "continues", "resume from"))
