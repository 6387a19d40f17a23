"""The training loop with a critic: order of a step, warm-up, resume, skipped updates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_runs import ADVANTAGES, INTERVALS, changed, lines_of, open_run, open_shared_parts, plan_of, record_of
from trigon.algorithms.gae import GaeSettings
from trigon.config.plan import CriticPlan
from trigon.errors import NotFiniteError
from trigon.loop import Run, train
from trigon.metrics import Max, Mean, Sum
from trigon.training.fake import FakeCriticEngine, FakeTrainEngine
from trigon.training.protocol import SKIPPED_GRAD_NORM, TrunkCriticEngine

TWO_UPDATES = CriticPlan(2, 2, 4, 100, 0, 100, 100)
"""Two prompts in an update, and two passes over the four prompts of a step."""


@pytest.fixture(scope="module")
def kit(tiny_model, tmp_path_factory: pytest.TempPathFactory):
    with open_shared_parts(tiny_model("qwen2"), tmp_path_factory.mktemp("kit")) as parts:
        yield parts


def with_critic(run: Run, critic: FakeCriticEngine, *, steps: int = 3) -> Run:
    return changed(
        run,
        critic=critic,
        plan=replace(plan_of(steps=steps), critic=TWO_UPDATES),
        intervals=replace(INTERVALS, save_every=1),
        advantage_settings=replace(ADVANTAGES, estimator="gae", gae=GaeSettings(lam=0.9)),
    )


def test_the_policy_rests_in_the_first_steps_and_is_not_synced_as_new(kit, tmp_path):
    critic = FakeCriticEngine()
    with open_run(kit, tmp_path / "run", critic_warmup=2) as run:
        run = with_critic(run, critic)
        run = changed(run, save_state=save_both(run, critic))
        train(run, None)
        assert (run.trainer.updates, critic.updates) == (run.plan.updates_per_step, 12)
        # The step's own completions are compared, so that none are sampled for it.
        sampled = [event for event in record_of(run).events if event.startswith("sample")]
        assert sampled == ["sample 4 for 1", "sample 4 for 2", "sample 4 for 3"]
    lines = {step: line for step, line in lines_of(tmp_path / "run").items() if step > 0}
    assert [("actor/grad_norm" in line, line["critic/values/mean"]) for line in lines.values()] == [
        (False, 0.0),
        (False, 4.0),
        (True, 8.0),
    ]


def test_rollouts_name_the_step_whose_weights_sampled_them(kit, tmp_path):
    critic = FakeCriticEngine()
    with open_run(kit, tmp_path / "run", critic_warmup=2) as run:
        run = with_critic(run, critic, steps=5)
        train(changed(run, save_state=save_both(run, critic)), None)
    # The policy is first updated in step 3, so that all steps up to it have its first weights.
    versions = {}
    for step in range(1, 6):
        lines = (tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        versions[step] = {json.loads(line)["policy_version"] for line in lines}
    assert versions == {1: {0}, 2: {0}, 3: {0}, 4: {3}, 5: {4}}


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


def test_a_resumed_run_continues_with_its_critic(kit, tmp_path):
    with open_run(kit, tmp_path / "run") as run:
        critic = FakeCriticEngine()
        run = with_critic(run, critic, steps=2)
        train(changed(run, save_state=save_both(run, critic)), None)
        last = run.checkpoints.store.latest()
    resumed = FakeCriticEngine()
    with open_run(kit, tmp_path / "other") as run:
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
def test_a_critic_on_the_trunk_is_updated_alone_only_while_the_policy_rests(kit, tmp_path, needs_old, passes):
    with open_run(kit, tmp_path / "run", critic_warmup=2) as run:
        critic = FakeTrunkCritic(run.trainer)
        run = changed(with_critic(run, critic), needs_old_logprobs=needs_old)
        run = changed(run, save_state=save_both(run, critic))
        train(run, None)
        assert isinstance(critic, TrunkCriticEngine)
        assert critic.updates == 2 * run.plan.critic.updates_per_step
        assert run.trainer.updates == run.plan.updates_per_step
        assert critic.passes == passes


class NeverFinite(FakeCriticEngine):
    def step(self, groups):
        return {
            **super().step(groups),
            "critic/grad_norm": Mean(0.0, 0.0),
            "critic/lr": Mean(1e-3),
            "critic/skipped_updates": Sum(1.0),
            "critic/nonfinite_updates": Sum(1.0),
            SKIPPED_GRAD_NORM: Max(float("inf")),
        }


def test_a_critic_whose_gradients_are_not_finite_ends_the_run(kit, tmp_path):
    with open_run(kit, tmp_path / "run") as run:
        critic = NeverFinite()
        run = with_critic(run, critic)
        with pytest.raises(NotFiniteError, match=r"updates in a row are not finite.*worker\.critic\.optim\.lr"):
            train(changed(run, save_state=save_both(run, critic)), None)
        assert run.trainer.updates == 1  # of the first step; a minibatch counts once in a step
