"""Grace: whether a step is finished after a request to stop, by hand."""

from __future__ import annotations

import pytest

from trigon.config.schema import Config
from trigon.system.stopping import Grace, StepLeft

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
    assert f"trainer.grace_seconds={grace_seconds:g}" in grace.request(limited=True)
    clock.now += after
    assert is_left(grace.check_step) == left


def test_the_first_step_is_left_since_nothing_is_lost_by_that():
    grace = Grace(1000.0)
    grace.begin_step(1)
    grace.request(limited=True)
    assert is_left(grace.check_step)


@pytest.mark.parametrize(("seconds", "limited"), [(None, True), (1.0, False), (1.0, None)])
def test_without_a_limit_and_after_ctrl_c_a_step_takes_as_long_as_it_needs(seconds, limited):
    grace, clock = measured(seconds)
    if limited is not None:  # None: there is no request
        grace.request(limited=limited)
    clock.now += 1000.0
    grace.check_step()
    grace.check_validation()


@pytest.mark.parametrize(
    ("started", "saved", "text"),
    [
        (0, 0, "the same command starts from the beginning"),
        (4, 4, "the same command resumes after step 4"),  # from trainer.load_checkpoint_path, as it started
        (4, 6, "the same command with trainer.load_checkpoint_path='/my runs/x/global_step_6' resumes after step 6"),
    ],
)
def test_a_command_that_does_not_find_the_last_checkpoint_is_given_the_option_that_names_it(started, saved, text):
    trainer = Config(trainer={"save_checkpoint_path": "/my runs/x", "find_last_checkpoint": False}).trainer
    grace = Grace(0.5, trainer.same_command)
    grace.started_step, grace.saved_step = started, saved
    grace.begin_step(saved + 1)
    with grace.update():
        assert grace.request(limited=True).endswith(f"should the process be killed before that, {text}")


@pytest.mark.parametrize(("seconds", "left"), [(10.0, True), (12.0, False)])
def test_a_validation_is_left_if_it_does_not_fit(seconds, left):
    grace, clock = measured(seconds)
    with grace.validation():
        clock.now += 8.0
    grace.request(limited=True)
    with grace.validation():
        assert is_left(grace.check_validation) == left
