"""Grace: whether a step is finished after a request to stop, by hand."""

from __future__ import annotations

import pytest

from trigon.assemble.start import make_grace
from trigon.config.schema import Config
from trigon.system.grace import Grace, StepLeft

pytestmark = pytest.mark.faults


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def measured(seconds: float | None, *, sampling: float = 8.0, update: float = 2.0, save: float | None = 3.0):
    """Return a grace after one step of these times, in the second step, and its clock."""
    clock = Clock()
    grace = Grace(seconds, clock=clock)
    grace.save_seconds = save
    grace.begin_step(1)
    clock.now += sampling
    with grace.update():
        clock.now += update
    grace.begin_step(2)
    return grace, clock


def is_left(check) -> bool:
    try:
        check()
    except StepLeft:
        return True
    return False


@pytest.mark.parametrize(
    ("grace_seconds", "before", "after", "save", "left"),
    [
        # A step takes 10 s, 2 of them an update, and a save 3 s. before: seconds until the request.
        (13.1, 0.0, 0.0, 3.0, False),
        (12.9, 0.0, 0.0, 3.0, True),
        (6.0, 7.5, 0.0, 3.0, False),  # left: 2.5 s of the step and 3 s of the save
        (14.0, 0.0, 8.9, 3.0, False),  # a longer step: 5.1 s are left for the update and the save, which take 5
        (14.0, 0.0, 9.1, 3.0, True),
        (19.0, 0.0, 0.0, None, True),  # half of the time is for a save that was never measured
        (21.0, 0.0, 0.0, None, False),
    ],
)
def test_a_step_is_left_if_it_and_a_save_take_longer_than_the_grace(grace_seconds, before, after, save, left):
    grace, clock = measured(grace_seconds, save=save)
    clock.now += before
    text = grace.request(limited=True)
    assert f"trainer.grace_seconds={grace_seconds:g}" in text
    clock.now += after
    assert is_left(grace.check_step) == left
    if after == 0.0:
        assert ("stopping before the end of step 2" in text) == left


def test_the_first_step_is_left_since_nothing_is_lost_by_that():
    grace = Grace(1000.0)
    grace.begin_step(1)
    assert "how long step 1 takes is not known yet" in grace.request(limited=True)
    assert is_left(grace.check_step)


@pytest.mark.parametrize(("seconds", "limited"), [(None, True), (1.0, False), (1.0, None)])
def test_without_a_limit_and_after_ctrl_c_a_step_takes_as_long_as_it_needs(seconds, limited):
    grace, clock = measured(seconds)
    if limited is not None:  # None: there is no request
        assert grace.request(limited=limited) == "finishing and saving the current step"
    clock.now += 1000.0
    grace.check_step()
    grace.check_validation()


def test_an_update_that_has_begun_is_finished_and_the_message_says_what_remains_if_it_cannot_be():
    grace, _ = measured(0.5)
    grace.saved_step = 1
    with grace.update():
        assert grace.request(limited=True) == (
            "finishing the update of step 2 and saving; should the process be killed before that, the same command "
            "resumes after step 1"
        )
    assert grace.request(limited=True) == "saving step 2"


@pytest.mark.parametrize(
    ("started", "saved", "text"),
    [
        (0, 0, "the same command starts from the beginning"),
        (4, 4, "the same command resumes after step 4"),  # from trainer.load_checkpoint_path, as it started
        (4, 6, "the same command with trainer.load_checkpoint_path='/my runs/x/global_step_6' resumes after step 6"),
    ],
)
def test_a_command_that_does_not_find_the_last_checkpoint_is_given_the_option_that_names_it(started, saved, text):
    config = Config(trainer={"save_checkpoint_path": "/my runs/x", "find_last_checkpoint": False, "grace_seconds": 0.5})
    grace = make_grace(config)
    grace.started_step, grace.saved_step = started, saved
    grace.begin_step(saved + 1)
    with grace.update():
        assert grace.request(limited=True).endswith(f"should the process be killed before that, {text}")


def test_the_last_checkpoint_may_be_that_of_an_earlier_run():
    grace = Grace(1.0)
    grace.started_step = grace.saved_step = 4
    grace.note_saved(0, None)  # this run has saved none yet
    assert (grace.saved_step, grace.save_seconds) == (4, None)
    grace.note_saved(6, 2.5)
    assert (grace.saved_step, grace.save_seconds) == (6, 2.5)


@pytest.mark.parametrize(("seconds", "left"), [(10.0, True), (12.0, False)])
def test_a_validation_is_left_if_it_does_not_fit(seconds, left):
    grace, clock = measured(seconds)
    with grace.validation():
        clock.now += 8.0
    grace.request(limited=True)
    with grace.validation():
        assert is_left(grace.check_validation) == left
