"""The training loop with a critic: order of a step, warm-up, resume, skipped updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_runs import changed, lines_of, open_run, plan_of, record_of, rows_by_step
from trigon.config.plan import ModelPlan
from trigon.config.schema import AlgorithmConfig
from trigon.errors import NotFiniteError
from trigon.loop import Run, train
from trigon.metrics import Max, Mean, Sum
from trigon.training.fake import FakeCriticEngine, FakeTrainEngine
from trigon.training.protocol import SKIPPED_GRAD_NORM, TrunkCriticEngine

TWO_UPDATES = ModelPlan(2, 2, 4, 100, 0, 100, 100)
"""Two prompts in an update, and two passes over the four prompts of a step."""


def with_critic(run: Run, critic: FakeCriticEngine, *, steps: int = 3) -> Run:
    return changed(
        run,
        critic=critic,
        plan=replace(plan_of(steps=steps), critic=TWO_UPDATES),
        **({"save_freq": 1}),
        algorithm=AlgorithmConfig(disable_kl=True, adv_estimator="gae", lam=0.9),
    )


def test_the_policy_rests_in_the_first_steps_and_is_not_synced_as_new(parts, tmp_path):
    critic = FakeCriticEngine()
    with open_run(parts, tmp_path / "run", critic_warmup=2) as run:
        run = with_critic(run, critic, steps=4)
        run = changed(run, save_state=save_both(run, critic))
        train(run, None)
        assert (run.trainer.updates, critic.updates) == (2 * run.plan.updates_per_step, 16)
        # The step's own completions are compared, so that none are sampled for it.
        sampled = [event for event in record_of(run).events if event.startswith("sample")]
        assert sampled == [f"sample 4 for {step}" for step in (1, 2, 3, 4)]
    lines = {step: line for step, line in lines_of(tmp_path / "run").items() if step > 0}
    versions = [{row["policy_version"] for row in rows} for rows in rows_by_step(tmp_path / "run").values()]
    assert versions == [{0}, {0}, {0}, {3}]  # the policy is first updated in step 3
    assert [("actor/grad_norm" in line, line["critic/values/mean"]) for line in lines.values()] == [
        (False, 0.0),
        (False, 4.0),
        (True, 8.0),
        (True, 12.0),
    ]


def save_both(run: Run, critic: FakeCriticEngine):
    def save(folder: Path):
        writes = (
            run.trainer.save_state(folder, model_only=False),
            critic.save_state(folder.parent / "critic", model_only=False),
        )

        def write() -> None:
            for each in writes:
                each()

        return write

    return save


def test_a_resumed_run_continues_with_its_critic(parts, tmp_path):
    with open_run(parts, tmp_path / "run") as run:
        critic = FakeCriticEngine()
        run = with_critic(run, critic, steps=2)
        train(changed(run, save_state=save_both(run, critic)), None)
        last = run.checkpoints.store.latest()
    resumed = FakeCriticEngine()
    with open_run(parts, tmp_path / "other") as run:
        run = with_critic(run, resumed, steps=3)
        train(changed(run, save_state=save_both(run, resumed)), last)
    assert resumed.updates == 12
    assert lines_of(tmp_path / "other")[3]["critic/values/mean"] == 8.0


class FakeTrunkCritic(FakeCriticEngine):
    """A head on the trunk of a policy, whose step updates it too."""

    def __init__(self, trainer: FakeTrainEngine) -> None:
        super().__init__()
        self.trainer = trainer
        self.passes: list[str] = []

    def values(self, groups):
        self.passes.append("values")
        return super().values(groups)

    def logprobs_and_values(self, groups):
        self.passes.append("both")
        return self.trainer.logprobs(groups), super().values(groups)


@pytest.mark.parametrize(("needs_old", "passes"), [(True, ["both"] * 3), (False, ["values"] * 3)])
def test_a_critic_on_the_trunk_is_updated_alone_only_while_the_policy_rests(parts, tmp_path, needs_old, passes):
    with open_run(parts, tmp_path / "run", critic_warmup=2) as run:
        critic = FakeTrunkCritic(run.trainer)
        run = changed(with_critic(run, critic), needs_old_logprobs=needs_old)
        run = changed(run, save_state=save_both(run, critic))
        train(run, None)
        assert isinstance(critic, TrunkCriticEngine)
        assert critic.updates == 2 * run.plan.critic.updates_per_step
        assert run.trainer.updates == run.plan.updates_per_step
        assert critic.passes == passes


class NeverFinite(FakeCriticEngine):
    def step(self, groups, outputs=None):
        return {
            **super().step(groups, outputs),
            "critic/grad_norm": Mean(0.0, 0.0),
            "critic/lr": Mean(1e-3),
            "critic/skipped_updates": Sum(1.0),
            "critic/nonfinite_updates": Sum(1.0),
            SKIPPED_GRAD_NORM: Max(float("inf")),
        }


def test_a_critic_whose_gradients_are_not_finite_ends_the_run(parts, tmp_path):
    with open_run(parts, tmp_path / "run") as run:
        critic = NeverFinite()
        run = with_critic(run, critic)
        with pytest.raises(NotFiniteError, match=r"updates in a row are not finite.*worker\.critic\.optim\.lr"):
            train(changed(run, save_state=save_both(run, critic)), None)
        assert run.trainer.updates == 1  # of the first step; a minibatch counts once in a step
