"""The story, told with fakes for the two engines and with everything else real: data, graders, checkpoints, reports."""

from __future__ import annotations

import errno
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from support.builders import make_builder
from trigon.algorithms.kl import AdaptiveKl
from trigon.batch import GroupFilter
from trigon.checkpoint.store import Checkpoint, CheckpointStore
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.data.dataset import PromptSet, open_prompts
from trigon.data.stream import PromptStream
from trigon.errors import CheckpointError, DataError, ParityError, RewardError
from trigon.evaluate import Evaluator
from trigon.loop import Intervals, Run, count_tokens, is_due, train
from trigon.models.load import Processors, load_processors
from trigon.parity import ParityCheck
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.rewards.pool import RewardPool
from trigon.rollout.fake import FakeEngine
from trigon.train_groups import AdvantageSettings, kl_of_tokens, mean_over_tokens
from trigon.training.fake import FAKE_LOGPROB, FakeTrainEngine
from trigon.training.trace import LocalTracer
from trigon.types import Prompt, RolloutGroup, SamplingParams, TrainGroup

NUM_PROMPTS, NUM_VALIDATION = 10, 3
SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, ignore_eos=False, seed=5)
INTERVALS = Intervals(
    validate_first=False,
    validate_only=False,
    validate_every=0,
    validate_last=False,
    save_every=0,
    generations_shown=0,
)
CREDIT = AdvantageSettings(estimator="grpo", gamma=1.0, weights=None, kl_in_reward=None, mask_overlong=False)
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/")
REWARD = """
REWARD_TYPE = "sequential"

def reward(answer):
    if "crash" in answer["response"]:
        raise ValueError("as asked")
    right = answer["response"] == answer["ground_truth"]
    return {"overall": 0.5 + right, "accuracy": float(right)}
"""


@dataclass
class Story:
    """What happened, in order; the engines below write it."""

    events: list[str] = field(default_factory=list)
    learned: list[list[TrainGroup]] = field(default_factory=list)


class TellingEngine(FakeEngine):
    """A fake rollout engine that tells when it is awake, and for which step it samples how many prompts."""

    story = Story()

    @contextmanager
    def awake(self, weights, *, version):
        with super().awake(weights, version=version):
            self.story.events.append(f"awake {version}")
            yield
        self.story.events.append("asleep")

    def generate(self, prompts, sampling, *, step, on_progress=None, on_group=None):
        self.story.events.append(f"sample {len(prompts)} for {step}")
        return super().generate(prompts, sampling, step=step, on_progress=on_progress, on_group=on_group)


class TellingTrainer(FakeTrainEngine):
    """A fake train engine that keeps what it was given to learn from."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self.story = story

    def step(self, groups):
        self.story.events.append(f"learn from {len(groups)}")
        self.story.learned.append(list(groups))
        return super().step(groups)


class TellingReporter(Reporter):
    """A reporter that tells which phases were announced."""

    phases: list[str]

    @contextmanager
    def phase(self, name, *, total=None):
        self.phases.append(name)
        with super().phase(name, total=total) as advance:
            yield advance


class SteadyReference:
    """A reference policy that says the same of every token."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        return [[torch.full((len(r.completion.token_ids),), self.logprob) for r in g.rollouts] for g in groups]


@dataclass(frozen=True)
class Kit:
    """What all runs of a test module share; nothing in it changes."""

    processors: Processors
    prompts: PromptSet
    validation: PromptSet
    rewards: RewardPool


@contextmanager
def open_kit(model: Path, folder: Path) -> Iterator[Kit]:
    processors = load_processors(str(model))
    builder = make_builder(processors, max_prompt_length=256)

    def prompts_of(name: str, numbers: range) -> PromptSet:
        rows = [{"problem": f"What is {n} + 0?", "answer": str(n)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return open_prompts(
            str(folder / f"{name}.jsonl"),
            builder,
            filter_overlong_prompts=False,
            max_bad_row_fraction=0.0,
            num_workers=1,
        )

    (folder / "reward.py").write_text(REWARD)
    rewards = RewardPool(
        f"{folder / 'reward.py'}:reward", kwargs={}, num_workers=1, timeout_seconds=10, max_failed_fraction=0.5
    )
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield Kit(
            processors,
            prompts_of("train", range(10, 10 + NUM_PROMPTS)),
            prompts_of("validation", range(50, 50 + NUM_VALIDATION)),
            rewards,
        )
    finally:
        datasets.config.HF_DATASETS_CACHE = before
        rewards.close()


@pytest.fixture(scope="module")
def kit(tiny_model, tmp_path_factory):
    with open_kit(tiny_model("qwen2"), tmp_path_factory.mktemp("kit")) as kit:
        yield kit


def right_at_times(prompt: Prompt, version: int, seed: int) -> str:
    """Answer right for some seeds, for more of them as the policy grows older."""
    return prompt.ground_truth if seed % 8 <= version else "no idea"


def crash_at_times(prompt: Prompt, version: int, seed: int) -> str:
    return "crash" if seed % 4 == 0 else right_at_times(prompt, version, seed)


def plan_of(*, steps: int, per_step: int = 4, per_update: int = 4, epochs: int = 1):
    config = Config(
        data={"rollout_batch_size": per_step},
        worker={"actor": {"global_batch_size": per_update, "ppo_epochs": epochs}, "rollout": {"n": SAMPLING.n}},
        trainer={"max_steps": steps},
    )
    return make_plan(config, num_train_prompts=NUM_PROMPTS)


@contextmanager
def open_run(kit: Kit, folder: Path, *, complete=right_at_times, token_logprob=FAKE_LOGPROB, **changes: Any):
    """Yield a run into the folder, and release the folder at the end, as a process that ends does."""
    with ExitStack() as stack:
        story = Story()
        rollout = TellingEngine(
            tokenizer=kit.processors.tokenizer,
            stop_token_id=kit.processors.stop_token_ids[0],
            complete=complete,
            token_logprob=token_logprob,
        )
        rollout.story = story
        trainer = TellingTrainer(story)
        run_folder = stack.enter_context(RunFolder(folder))
        report = stack.enter_context(TellingReporter(run_folder, Console(stream=io.StringIO(), progress=False)))
        report.phases = []
        stream = PromptStream(kit.prompts, batch_size=4, seed=3, shuffle=True, prefetch=True, num_workers=1)
        stack.callback(stream.close)
        validation_sampling = replace(SAMPLING, n=2)
        run = Run(
            plan=plan_of(steps=3),
            intervals=INTERVALS,
            sampling=SAMPLING,
            prompts=stream,
            rollout=rollout,
            rewards=kit.rewards,
            trainer=trainer,
            reference=None,
            group_filter=None,
            advantage_settings=CREDIT,
            kl=AdaptiveKl(coefficient=0.0, target=0.1, horizon=0.0),
            needs_old_logprobs=False,
            evaluator=Evaluator(kit.validation, validation_sampling, 2, 1, report.warn),
            parity=ParityCheck(1e-3),
            store=CheckpointStore(folder, keep=-1),
            save_state=partial(trainer.save_state, model_only=False),
            report=report,
            traced_steps=frozenset(),
            tracer=LocalTracer(folder / "profile", rank=None),
            should_stop=lambda: False,
        )
        yield replace(run, **changes)


def told(run: Run) -> Story:
    return run.trainer.story


def lines_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return what metrics.jsonl says of each step, but for what was measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "a step has two lines"
    return {
        line["step"]: {key: value for key, value in line["metrics"].items() if not key.startswith(MEASURED)}
        for line in lines
    }


def rollouts_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "rollouts").iterdir())
    }


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def newest(folder: Path) -> Checkpoint:
    checkpoint = CheckpointStore(folder, keep=-1).latest(resumable=True)
    assert checkpoint is not None
    return checkpoint


# -- order --------------------------------------------------------------------------------------------------------


def test_a_step_samples_under_the_weights_of_the_step_before_and_then_learns(kit, tmp_path):
    with open_run(kit, tmp_path) as run:
        progress = train(run, None)
        assert progress.step == 3
        assert told(run).events == [
            *("awake 0", "sample 4 for 1", "asleep", "learn from 4"),
            *("awake 1", "sample 4 for 2", "asleep", "learn from 4"),
            *("awake 2", "sample 4 for 3", "asleep", "learn from 4"),
        ]
        assert run.report.phases == [
            *("weights", "data", "gen", "reward", "parity", "update_actor") * 3,
            "save_checkpoint",
        ]
    versions = {name: {row["policy_version"] for row in rows} for name, rows in rollouts_of(tmp_path).items()}
    assert versions == {"step_000001.jsonl": {0}, "step_000002.jsonl": {1}, "step_000003.jsonl": {2}}
    assert {len(rows) for rows in rollouts_of(tmp_path).values()} == {12}


def test_old_and_reference_logprobs_come_before_the_first_update(kit, tmp_path):
    with open_run(
        kit,
        tmp_path,
        plan=plan_of(steps=1),
        needs_old_logprobs=True,
        reference=SteadyReference(-1.5),
        should_stop=lambda: True,
    ) as run:
        train(run, None)
        assert run.report.phases[4:] == ["parity", "old", "ref", "update_actor", "save_checkpoint"]
        [[group, *_]] = told(run).learned
    for sequence in group.sequences:
        assert sequence.old_logprobs.tolist() == [-1.0] * len(sequence.token_ids)
        assert sequence.ref_logprobs.tolist() == [-1.5] * len(sequence.token_ids)
        assert sequence.sampling_logprobs.tolist() == [-1.0] * len(sequence.token_ids)


def test_without_need_there_are_no_old_and_no_reference_logprobs(kit, tmp_path):
    with open_run(kit, tmp_path, plan=plan_of(steps=1)) as run:
        train(run, None)
        sequences = [sequence for group in told(run).learned[0] for sequence in group.sequences]
    assert {(sequence.old_logprobs, sequence.ref_logprobs) for sequence in sequences} == {(None, None)}


def test_every_epoch_over_the_rollouts_makes_an_update_of_each_mini_batch(kit, tmp_path):
    plan = plan_of(steps=2, per_update=2, epochs=3)
    with open_run(kit, tmp_path, plan=plan, needs_old_logprobs=True) as run:
        train(run, None)
        assert run.trainer.updates == plan.total_updates == 12
        first = [[group.prompt.prompt_id for group in batch] for batch in told(run).learned[:6]]
    assert first == [first[0], first[1]] * 3
    assert first[0] + first[1] == [row["prompt_id"] for row in rollouts_of(tmp_path)["step_000001.jsonl"][::3]]


def test_each_answer_trains_with_the_advantage_of_its_own_reward(kit, tmp_path):
    with open_run(
        kit, tmp_path, plan=plan_of(steps=1), complete=lambda p, v, s: p.ground_truth if s % 2 else "no"
    ) as run:
        train(run, None)
        [groups] = told(run).learned
    rows = iter(rollouts_of(tmp_path)["step_000001.jsonl"])
    mixed = 0
    for group in groups:
        rewards = [next(rows)["reward"] for _ in group.sequences]
        for reward, sequence in zip(rewards, group.sequences, strict=True):
            advantages = set(sequence.advantages.tolist())
            assert len(advantages) == 1
            [advantage] = advantages
            if len(set(rewards)) == 1:
                assert advantage == 0.0
            else:
                mixed += 1
                assert (advantage > 0) == (reward == 1.5)
            assert sequence.loss_mask.tolist() == [1.0] * len(sequence.token_ids)
    assert mixed > 0, "no group had both right and wrong answers: the test shows nothing"


# -- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "validated", "saved"),
    [
        (INTERVALS, [], [5]),
        (replace(INTERVALS, save_every=2), [], [2, 4, 5]),
        (replace(INTERVALS, save_every=5), [], [5]),
        (replace(INTERVALS, validate_first=True, validate_last=True), [0, 5], [5]),
        (replace(INTERVALS, validate_first=True, validate_every=2, validate_last=True), [0, 2, 4, 5], [5]),
        (replace(INTERVALS, validate_every=5, validate_last=True, save_every=3), [5], [3, 5]),
    ],
    ids=["never", "save every 2", "save every 5", "before and after", "every 2", "both at the last"],
)
def test_the_intervals_is_kept(kit, tmp_path, intervals, validated, saved):
    with open_run(kit, tmp_path, plan=plan_of(steps=5), intervals=intervals) as run:
        train(run, None)
    lines = lines_of(tmp_path)
    assert sorted(lines) == ([0] if 0 in validated else []) + [1, 2, 3, 4, 5]
    assert [step for step in lines if "val/reward_score" in lines[step]] == validated
    files = [name for name in rollouts_of(tmp_path) if name.startswith("validation")]
    assert files == [f"validation_{step:06d}.jsonl" for step in validated]
    assert saved_steps(tmp_path) == saved


def test_validation_sees_the_weights_after_its_step_and_its_score_is_kept_with_them(kit, tmp_path):
    intervals = replace(INTERVALS, validate_first=True, validate_every=2, save_every=1)
    with open_run(kit, tmp_path, plan=plan_of(steps=3), intervals=intervals) as run:
        train(run, None)
    rollouts = rollouts_of(tmp_path)
    for step in (0, 2):
        rows = rollouts[f"validation_{step:06d}.jsonl"]
        assert {row["policy_version"] for row in rows} == {step}
        assert [row["prompt_id"] for row in rows[::2]] == [kit.validation[i].prompt_id for i in range(3)]
        score = sum(row["reward"] for row in rows) / 6
        assert lines_of(tmp_path)[step]["val/reward_score"] == pytest.approx(score)
    scores = {
        step: json.loads((tmp_path / f"global_step_{step}" / "progress.json").read_text())["val_reward_score"]
        for step in (1, 2, 3)
    }
    assert scores == {1: None, 2: pytest.approx(lines_of(tmp_path)[2]["val/reward_score"]), 3: None}


def test_val_only_validates_the_checkpoint_it_is_given_and_touches_nothing_else(kit, tmp_path):
    with open_run(kit, tmp_path, plan=plan_of(steps=4), intervals=replace(INTERVALS, save_every=2)) as run:
        train(run, None)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    checkpoint = newest(tmp_path)
    with open_run(kit, tmp_path, intervals=replace(INTERVALS, validate_only=True)) as run:
        assert train(run, checkpoint).step == 4
        assert run.trainer.updates == 4
        assert told(run).learned == []
        assert told(run).events == ["awake 4", "sample 2 for 0", "sample 1 for 0", "asleep"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert saved_steps(tmp_path) == [2, 4]
    assert {row["policy_version"] for row in rollouts_of(tmp_path)["validation_000004.jsonl"]} == {4}


# -- stopping and going on ----------------------------------------------------------------------------------------

EVERYTHING = replace(INTERVALS, validate_first=True, validate_every=2, validate_last=True, save_every=2)


def settings(steps: int) -> dict[str, Any]:
    """A run with everything that a checkpoint must remember: two updates a step, and an adaptive KL in the reward."""
    return {
        "plan": plan_of(steps=steps, per_update=2),
        "intervals": EVERYTHING,
        "needs_old_logprobs": True,
        "reference": SteadyReference(-1.5),
        "advantage_settings": replace(CREDIT, kl_in_reward="kl"),
        "kl": AdaptiveKl(coefficient=0.1, target=0.1, horizon=100.0),
    }


@pytest.fixture(scope="module")
def uninterrupted(kit, tmp_path_factory):
    """Return the folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with open_run(kit, folder, **settings(6)) as run:
        train(run, None)
    return folder


def test_a_stop_request_ends_after_the_step_in_hand_saves_and_resumes_as_if_nothing_had_happened(
    kit, tmp_path, uninterrupted
):
    with open_run(kit, tmp_path, **settings(6)) as run:
        asked = iter([False, False, True])
        assert train(replace(run, should_stop=lambda: next(asked)), None).step == 3
    assert saved_steps(tmp_path) == [2, 3]
    assert sorted(lines_of(tmp_path)) == [0, 1, 2, 3]

    with open_run(kit, tmp_path, **settings(6)) as run:
        assert train(run, newest(tmp_path)).step == 6
        assert run.trainer.updates == 12
        assert told(run).events[0] == "awake 3"
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)
    assert saved_steps(tmp_path) == [2, 3, 4, 6]


def test_a_run_that_died_between_two_saves_repeats_what_was_lost(kit, tmp_path, uninterrupted):
    def die_in_step_4(prompt: Prompt, version: int, seed: int) -> str:
        if version == 3:
            raise RuntimeError("the machine is gone")
        return right_at_times(prompt, version, seed)

    with (
        open_run(kit, tmp_path, complete=die_in_step_4, **settings(6)) as run,
        pytest.raises(RuntimeError, match="gone"),
    ):
        train(run, None)
    assert saved_steps(tmp_path) == [2]
    assert sorted(lines_of(tmp_path)) == [0, 1, 2, 3]

    with open_run(kit, tmp_path, **settings(6)) as run:
        train(run, newest(tmp_path))
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)


def test_a_longer_run_goes_on_where_a_shorter_one_ended(kit, tmp_path, uninterrupted):
    with open_run(kit, tmp_path, **settings(4)) as run:
        train(run, None)
    with open_run(kit, tmp_path, **settings(6)) as run:
        train(run, newest(tmp_path))
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)


def test_a_run_that_is_done_is_left_as_it_is(kit, tmp_path):
    with open_run(kit, tmp_path) as run:
        train(run, None)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open_run(kit, tmp_path) as run:
        assert train(run, newest(tmp_path)).step == 3
        assert told(run).events == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(kit, tmp_path, uninterrupted):
    with open_run(kit, tmp_path, **settings(4)) as run:
        train(run, None)
    store = CheckpointStore(tmp_path, keep=-1, warn=lambda text: None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "global_step_4").rename(tmp_path / "elsewhere" / "global_step_4")
    older = newest(tmp_path)
    (tmp_path / "elsewhere" / "global_step_4").rename(tmp_path / "global_step_4")
    assert older.step == 2

    with open_run(kit, tmp_path, **(settings(6) | {"store": store})) as run:
        train(run, older)
    assert (tmp_path / "set_aside" / "global_step_4").is_dir()
    assert saved_steps(tmp_path) == [2, 4, 6]
    assert lines_of(tmp_path) == lines_of(uninterrupted)


def test_a_checkpoint_of_the_fake_engine_can_be_resumed_like_a_real_one(kit, tmp_path):
    with open_run(kit, tmp_path) as run:
        train(run, None)
    assert CheckpointStore(tmp_path, keep=-1).latest(resumable=True).step == 3


def test_a_run_that_saves_in_the_background_ends_with_its_last_checkpoint_in_place(kit, tmp_path, uninterrupted):
    with open_run(kit, tmp_path, **settings(6)) as run:
        train(replace(run, store=CheckpointStore(tmp_path, keep=-1, background=True)), None)
        assert saved_steps(tmp_path) == saved_steps(uninterrupted)
    assert newest(tmp_path).step == 6
    assert newest(tmp_path).progress == newest(uninterrupted).progress


def test_a_run_whose_save_failed_in_the_background_learns_of_it(kit, tmp_path):
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run(kit, tmp_path, **settings(6)) as run:
        run = replace(run, store=CheckpointStore(tmp_path, keep=-1, background=True), save_state=lambda folder: fail)
        with pytest.raises(CheckpointError, match=r"the disk became full while .*global_step_2"):
            train(run, None)
    assert saved_steps(tmp_path) == []


# -- rewards ------------------------------------------------------------------------------------------------------


def test_an_answer_that_was_not_graded_neither_trains_nor_counts(kit, tmp_path):
    with open_run(kit, tmp_path, plan=plan_of(steps=1), complete=crash_at_times) as run:
        train(run, None)
        [groups] = told(run).learned
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    failed = [row["outcome"] == "failed" for row in rows]
    assert 0 < sum(failed) < 6, "the seeds must give some failures, and not too many"
    sequences = [sequence for group in groups for sequence in group.sequences]
    for is_failed, sequence in zip(failed, sequences, strict=True):
        assert sequence.loss_mask.tolist() == [0.0 if is_failed else 1.0] * len(sequence.token_ids)
        assert not is_failed or sequence.advantages.tolist() == [0.0] * len(sequence.token_ids)

    rewards = [row["reward"] for row in rows if row["outcome"] == "ok"]
    [line] = lines_of(tmp_path).values()
    assert line["grader/failed"] == sum(failed)
    assert line["critic/score/mean"] == line["reward/overall"] == pytest.approx(sum(rewards) / len(rewards))
    assert line["critic/score/min"] == min(rewards) == 0.5
    assert line["reward/accuracy"] == pytest.approx(sum(r == 1.5 for r in rewards) / len(rewards))


def test_an_answer_that_was_not_graded_does_not_count_among_the_rewards(kit, tmp_path):
    with open_run(kit, tmp_path, plan=plan_of(steps=1), complete=crash_at_times) as run:
        train(run, None)
    [line] = lines_of(tmp_path).values()
    assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"])
    assert line["critic/rewards/min"] == line["critic/score/min"] == 0.5


def test_a_kl_in_the_reward_is_subtracted_before_advantages_are_made(kit, tmp_path):
    changes = settings(1) | {"kl": AdaptiveKl(coefficient=0.1, target=0.1, horizon=0.0), "intervals": INTERVALS}
    with open_run(kit, tmp_path, **changes) as run:
        assert train(run, None).kl.coefficient == 0.1
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    [line] = lines_of(tmp_path).values()
    assert line["actor/kl_penalty"] == pytest.approx(0.5)  # -1.0 - (-1.5), of every token
    assert line["actor/kl_coef"] == pytest.approx(0.1)
    penalized = [row["reward"] - 0.1 * 0.5 * row["num_tokens"] for row in rows]
    assert line["critic/rewards/mean"] == pytest.approx(sum(penalized) / 12)
    assert line["critic/rewards/max"] == pytest.approx(max(penalized))
    assert line["critic/score/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 12)


def test_an_adaptive_kl_coefficient_moves_by_its_error_at_every_step(uninterrupted):
    # The KL, 0.5, is far above its target, 0.1: the error is cut at 0.2; 12 answers a step, a horizon of 100.
    expected = [0.1 * (1 + 0.2 * 12 / 100) ** step for step in range(6)]
    lines = lines_of(uninterrupted)
    assert [lines[step]["actor/kl_coef"] for step in range(1, 7)] == pytest.approx(expected)
    assert newest(uninterrupted).progress["kl_coefficient"] == pytest.approx(0.1 * 1.024**6)


def test_a_fixed_kl_coefficient_that_was_changed_before_resuming_is_the_one_that_counts(kit, tmp_path):
    with open_run(kit, tmp_path, kl=AdaptiveKl(coefficient=0.1, target=0.1, horizon=0.0)) as run:
        train(run, None)
    with open_run(kit, tmp_path, plan=plan_of(steps=4), kl=AdaptiveKl(0.2, 0.1, 0.0)) as run:
        assert train(run, newest(tmp_path)).kl.coefficient == 0.2


def test_kl_is_told_token_by_token_and_averaged_over_all():
    ours = [[torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]]
    theirs = [[torch.tensor([-1.5, -2.0]), torch.tensor([-2.0])]]
    kl = kl_of_tokens([], "kl", FakeTrainEngine(), old=ours, ref=theirs)
    assert [[tokens.tolist() for tokens in row] for row in kl] == [[[0.5, 0.0], [-1.0]]]
    mean = mean_over_tokens(kl)
    assert (mean.total, mean.count) == (-0.5, 3.0)


# -- algorithms ---------------------------------------------------------------------------------------------------


def learned_rewards(run: Run, folder: Path) -> list[list[float]]:
    """Return the rewards of each group that was learned from, step by step."""
    rows = [row for rows in rollouts_of(folder).values() for row in rows]
    return [[row["reward"] for row in rows[i : i + 3]] for i in range(0, len(rows), 3)]


SELECTION = GroupFilter(key="accuracy", low=0.01, high=0.99, prompts_per_round=4, max_rounds=20, keep_surplus=False)


def mixed_at_times(prompt: Prompt, version: int, seed: int) -> str:
    """Answer some prompts always wrong, others always right, and the rest now and then."""
    match int(prompt.ground_truth) % 4:
        case 0:
            return "no idea"
        case 1:
            return prompt.ground_truth
        case _:
            return prompt.ground_truth if seed % 2 else "no idea"


def test_groups_that_teach_nothing_are_replaced_by_others(kit, tmp_path):
    with open_run(kit, tmp_path, group_filter=SELECTION, complete=mixed_at_times) as run:
        train(run, None)
        events = [event for event in told(run).events if event.startswith(("sample", "learn"))]
        assert {event for event in events if event.startswith("learn")} == {"learn from 4"}
        assert sum(event.startswith("sample") for event in events) > 3
    assert all(len(set(rewards)) == 2 for rewards in learned_rewards(run, tmp_path))
    for step, line in lines_of(tmp_path).items():
        rounds = events.count(f"sample 4 for {step}")
        assert line["filter/rounds"] == rounds
        shares = [line[f"filter/{name}_fraction"] for name in ("kept", "low", "high")]
        assert sum(shares) == pytest.approx(1.0)
        assert shares[1] > 0 or shares[2] > 0
        # What was sampled is described whole; what is learned from, by itself.
        assert line["group/all_wrong_fraction"] == pytest.approx(line["filter/low_fraction"])


def test_a_round_that_finds_nothing_counts_as_a_try(kit, tmp_path):
    with (
        open_run(kit, tmp_path, group_filter=replace(SELECTION, max_rounds=3), complete=lambda p, v, s: "no") as run,
        pytest.raises(DataError, match=r"0 of 4 groups in 3 rounds.*100% of those sampled were at or below"),
    ):
        train(run, None)
    assert told(run).events.count("sample 4 for 1") == 3


def test_a_step_that_finds_too_few_groups_learns_from_those_it_has(kit, tmp_path):
    group_filter = replace(SELECTION, max_rounds=1)
    with open_run(kit, tmp_path, plan=plan_of(steps=2), group_filter=group_filter, complete=mixed_at_times) as run:
        train(run, None)
        learned = [len(groups) for groups in told(run).learned]
    assert 0 < min(learned) < 4
    assert [line["filter/groups"] for line in lines_of(tmp_path).values()] == learned


def test_a_key_that_no_reply_has_is_named_with_the_nearest(kit, tmp_path):
    with (
        open_run(kit, tmp_path, group_filter=replace(SELECTION, key="acuracy")) as run,
        pytest.raises(RewardError, match=r"filter_key=acuracy.*only accuracy, overall; did you mean accuracy"),
    ):
        train(run, None)


def test_a_step_that_comes_to_the_end_of_the_data_asks_its_prompts_anew(kit, tmp_path):
    # Of 10 prompts about half are worth learning from: a step of 8 draws some of them twice, to be answered anew.
    with open_run(
        kit, tmp_path, plan=plan_of(steps=1, per_step=8, per_update=8), group_filter=SELECTION, complete=mixed_at_times
    ) as run:
        train(run, None)
    names = [row["prompt_id"] for row in rollouts_of(tmp_path)["step_000001.jsonl"][::3]]
    assert len(set(names)) == len(names) == 8
    assert any("#2" in name for name in names)


def test_bounds_are_those_that_a_reward_function_returns(kit, tmp_path):
    # Each answer is worth 0.5 exactly, or in part 0.1, which float32 cannot hold.
    reward = "def main(answer: dict):\n    return {'overall': 0.1}\n"
    (tmp_path / "tenth.py").write_text(reward)
    rewards = RewardPool(
        f"{tmp_path / 'tenth.py'}:main", kwargs={}, num_workers=1, timeout_seconds=10, max_failed_fraction=0.5
    )
    group_filter = replace(SELECTION, key="overall", low=0.1, max_rounds=1)
    with (
        open_run(kit, tmp_path / "run", group_filter=group_filter, rewards=rewards) as run,
        pytest.raises(DataError, match="100% of those sampled were at or below"),
    ):
        train(run, None)
    rewards.close()


def test_a_surplus_never_grows_older_than_a_step(kit, tmp_path):
    group_filter = replace(SELECTION, low=-1.0, high=2.0, prompts_per_round=10, keep_surplus=True)
    with open_run(kit, tmp_path, plan=plan_of(steps=4), group_filter=group_filter) as run:
        train(run, None)
    for step in range(1, 5):
        rows = rollouts_of(tmp_path)[f"step_{step:06d}.jsonl"]
        assert {step - 1 - row["policy_version"] for row in rows} <= {0, 1}
    assert lines_of(tmp_path)[1]["filter/dropped_groups"] == 2.0  # 10 found, 4 learned from, 4 kept


def test_what_was_kept_is_dropped_where_the_run_that_goes_on_cannot_use_it(kit, tmp_path):
    def saved(folder: Path) -> Checkpoint:
        with open_run(kit, folder, **keeping(6)) as run:
            train(replace(run, should_stop=lambda: True), None)
        assert newest(folder).progress["surplus"] != []
        return newest(folder)

    checkpoint = saved(tmp_path / "other n")
    changed = keeping(6) | {"sampling": replace(SAMPLING, n=2), "plan": plan_of(steps=2, per_update=2)}
    with open_run(kit, tmp_path / "other n", **changed) as run:
        train(run, checkpoint)
        assert {len(group.sequences) for groups in told(run).learned for group in groups} == {2}

    checkpoint = saved(tmp_path / "unfiltered")
    with open_run(kit, tmp_path / "unfiltered", **(keeping(2) | {"group_filter": None})) as run:
        train(run, checkpoint)
    rows = rollouts_of(tmp_path / "unfiltered")["step_000002.jsonl"]
    assert {row["policy_version"] for row in rows} == {1}


def keeping(steps: int) -> dict[str, Any]:
    group_filter = replace(SELECTION, prompts_per_round=7, keep_surplus=True)
    return settings(steps) | {"group_filter": group_filter, "complete": mixed_at_times}


def test_a_surplus_is_used_in_the_next_step_also_after_an_interruption(kit, tmp_path):
    with open_run(kit, tmp_path / "whole", **keeping(6)) as run:
        train(run, None)
    whole = rollouts_of(tmp_path / "whole")
    ages = [step - 1 - row["policy_version"] for step in range(1, 7) for row in whole[f"step_{step:06d}.jsonl"]]
    assert set(ages) == {0, 1}, "no group was kept: the test shows nothing"

    with open_run(kit, tmp_path / "cut", **keeping(6)) as run:
        asked = iter([False, False, False, True])
        train(replace(run, should_stop=lambda: next(asked)), None)
    assert newest(tmp_path / "cut").progress["surplus"] != []
    with open_run(kit, tmp_path / "cut", **keeping(6)) as run:
        train(run, newest(tmp_path / "cut"))
    assert rollouts_of(tmp_path / "cut") == whole
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")


def test_answers_that_were_cut_do_not_train_but_count_in_their_group(kit, tmp_path):
    with open_run(
        kit,
        tmp_path,
        plan=plan_of(steps=1),
        advantage_settings=replace(CREDIT, mask_overlong=True),
        complete=lambda p, v, s: "no idea at all whatever it may be" if s % 2 else p.ground_truth,
    ) as run:
        train(run, None)
        [groups] = told(run).learned
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    sequences = [sequence for group in groups for sequence in group.sequences]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row, sequence in zip(rows, sequences, strict=True):
        assert set(sequence.loss_mask.tolist()) == {float(row["finish_reason"] == "stop")}
    mixed = [group for group in groups if len({float(s.advantages[0]) for s in group.sequences}) > 1]
    assert mixed, "the cut answers' rewards count, so some groups have something to compare"


def test_remax_compares_with_a_greedy_answer(kit, tmp_path):
    with open_run(
        kit,
        tmp_path,
        plan=plan_of(steps=1),
        advantage_settings=replace(CREDIT, estimator="remax"),
        complete=mixed_at_times,
    ) as run:
        train(run, None)
        assert told(run).events[:3] == ["awake 0", "sample 4 for 1", "sample 4 for 1"]
        [groups] = told(run).learned
    # The fake's greedy answer has the seed of its one sample; its reward is 0.5 or 1.5, and so is every answer's.
    for group, rewards in zip(groups, learned_rewards(run, tmp_path), strict=True):
        firsts = [float(sequence.advantages[0]) for sequence in group.sequences]
        baselines = {reward - first for reward, first in zip(rewards, firsts, strict=True)}
        assert len(baselines) == 1
        assert baselines <= {0.5, 1.5}


def test_an_answer_without_a_baseline_does_not_train(kit, tmp_path):
    class NoGreedy(TellingEngine):
        def generate(self, prompts, sampling, *, step, on_progress=None, on_group=None):
            def left(number, row):
                return [] if sampling.temperature == 0 and number == 1 else row

            def hear(number, row):
                on_group(number, left(number, row))

            answers = super().generate(prompts, sampling, step=step, on_progress=on_progress, on_group=hear)
            return [left(number, row) for number, row in enumerate(answers)]

    rollout = NoGreedy(
        tokenizer=kit.processors.tokenizer,
        stop_token_id=kit.processors.stop_token_ids[0],
        complete=mixed_at_times,
        token_logprob=FAKE_LOGPROB,
    )
    advantage_settings = replace(CREDIT, estimator="remax")
    with open_run(kit, tmp_path, plan=plan_of(steps=1), advantage_settings=advantage_settings, rollout=rollout) as run:
        train(run, None)
        [groups] = told(run).learned
    trains = [{float(sequence.loss_mask[0]) for sequence in group.sequences} for group in groups]
    assert trains == [{1.0}, {0.0}, {1.0}, {1.0}]
    assert lines_of(tmp_path)[1]["grader/baselines_missing"] == 1.0


def test_gdpo_asks_for_the_parts_it_is_to_weigh(kit, tmp_path):
    advantage_settings = replace(CREDIT, estimator="gdpo", weights={"beauty": 1.0})
    with (
        open_run(kit, tmp_path, advantage_settings=advantage_settings) as run,
        pytest.raises(RewardError, match=r"lack beauty \(found: acc"),
    ):
        train(run, None)


def test_the_full_kl_is_asked_of_the_trainer(kit, tmp_path):
    advantage_settings = replace(CREDIT, kl_in_reward="full")
    kl = AdaptiveKl(coefficient=0.1, target=0.1, horizon=0.0)
    with open_run(kit, tmp_path, plan=plan_of(steps=1), advantage_settings=advantage_settings, kl=kl) as run:
        train(run, None)
        assert run.report.phases[4:] == ["parity", "ref", "update_actor", "save_checkpoint"]
    assert lines_of(tmp_path)[1]["actor/kl_penalty"] == 0.0  # as the fake says


def test_chosen_steps_leave_a_trace_with_their_phases(kit, tmp_path):
    with open_run(kit, tmp_path, traced_steps=frozenset({2, 3, 9})) as run:
        train(run, None)
    traces = {path.name: path for path in (tmp_path / "profile").iterdir()}
    assert sorted(traces) == ["step_000002.json.gz", "step_000003.json.gz"]
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(traces["step_000002.json.gz"].read_bytes()))["traceEvents"]
    }
    assert {"phase gen", "phase reward", "phase update_actor"} <= names


def test_a_traced_step_that_is_the_last_by_request_leaves_its_trace(kit, tmp_path):
    with open_run(kit, tmp_path, traced_steps=frozenset({1}), should_stop=lambda: True) as run:
        assert train(run, None).step == 1
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_000001.json.gz"]


# -- guards and counts --------------------------------------------------------------------------------------------


def test_nothing_is_learned_from_an_engine_with_other_weights(kit, tmp_path):
    with open_run(kit, tmp_path, token_logprob=-1.5) as run:
        with pytest.raises(ParityError, match=r"0\.5.*policy version 0|policy version 0.*0\.5"):
            train(run, None)
        assert run.trainer.updates == 0
    assert saved_steps(tmp_path) == []


def test_a_damaged_position_of_the_data_is_refused(kit, tmp_path):
    with open_run(kit, tmp_path) as run:
        train(run, None)
    checkpoint = newest(tmp_path)
    other = {**checkpoint.progress, "prompts": {**checkpoint.progress["prompts"], "seed": 99}}
    with open_run(kit, tmp_path) as run, pytest.raises(CheckpointError, match="seed"):
        train(run, replace(checkpoint, progress=other))


def test_tokens_are_counted_with_and_without_prompts(kit, tmp_path):
    with open_run(kit, tmp_path, plan=plan_of(steps=1)) as run:
        train(run, None)
        [groups] = told(run).learned
    lengths = [len(sequence.token_ids) for group in groups for sequence in group.sequences]
    prompts = sum(len(group.prompt.token_ids) * 3 for group in groups)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())["metrics"]
    assert line["perf/total_num_tokens"] == sum(lengths) + prompts
    assert line["response_length/mean"] == pytest.approx(sum(lengths) / 12)
    assert count_tokens([]) == 0


@pytest.mark.parametrize(
    ("step", "every", "due"), [(1, 1, True), (4, 2, True), (3, 2, False), (2, 4, False), (5, 0, False)]
)
def test_a_frequency_of_zero_is_never(step, every, due):
    assert is_due(step, every) == due
