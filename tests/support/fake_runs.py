"""Runs with fakes for the two engines and everything else real.

Data, reward workers, checkpoints and reports are those of a run.
"""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
import yaml
from torch import Tensor

from support.builders import make_builder
from support.models import processors_of
from support.options import with_short
from trigon.checkpoint.store import Checkpoint, CheckpointStore
from trigon.config.plan import Plan, make_plan
from trigon.config.schema import AlgorithmConfig, Config
from trigon.data.dataset import open_prompts
from trigon.data.stream import Prompts, PromptStream, mix
from trigon.data.tokens import TokenTexts
from trigon.loop import Checkpoints, Run, Stop, Validation, ValidationRun, train
from trigon.models.load import Processors
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import ImageStore, RunFolder
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import Evaluator
from trigon.rollout.continuous_buffer import ContinuousBuffer
from trigon.rollout.episodes import newest_draw
from trigon.rollout.fake import FakeEngine
from trigon.rollout.parity import ParityCheck
from trigon.rollout.step_buffer import StepBuffer
from trigon.system.stopping import Grace
from trigon.system.trace import LocalTracer, Tracer
from trigon.training.fake import FAKE_LOGPROB, FakeTrainEngine
from trigon.training.train_groups import GroupPreparation
from trigon.training.updates import Updater
from trigon.types import Prompt, RolloutGroup, SamplingParams, TrainGroup

NUM_PROMPTS, NUM_VALIDATION = 10, 3


SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, ignore_eos=False, seed=5)


ALGORITHM = AlgorithmConfig(disable_kl=True)


TIMING_KEYS = ("timing_s/", "timing_per_token_ms/", "perf/")


REWARD = """
REWARD_TYPE = "sequential"

def reward(reward_input):
    if "crash" in reward_input["response"]:
        raise ValueError("as asked")
    right = reward_input["response"] == reward_input["ground_truth"]
    return {"overall": 0.5 + right, "accuracy": float(right)}
"""


@dataclass
class Record:
    """What happened in a run, in order; the engines below write it."""

    events: list[str] = field(default_factory=list)
    learned: list[list[TrainGroup]] = field(default_factory=list)


Engine = TypeVar("Engine", bound=FakeEngine)


class RecordingEngine(FakeEngine):
    """A fake rollout engine that records when it is awake, and what it samples."""

    record = Record()

    @contextmanager
    def awake(self, weights, *, version):
        with super().awake(weights, version=version):
            self.record.events.append(f"awake {version}")
            yield
        self.record.events.append("asleep")

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        until_text = "" if until is None else f" until {until.num_groups}"
        self.record.events.append(f"sample {len(prompts)} for {newest_draw(prompts)}{until_text}")
        return super().generate(prompts, sampling, until=until, on_progress=on_progress, on_group=on_group)


class SplitEngine(RecordingEngine):
    """A recording engine that samples after awake(), too, as samplers on GPUs of their own."""

    @contextmanager
    def awake(self, weights, *, version):
        with super().awake(weights, version=version):
            yield
        self._awake = True


class RecordingTrainer(FakeTrainEngine):
    """A fake train engine that records the groups of each update."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def step(self, groups, outputs=None):
        self.record.events.append(f"learn from {len(groups)}")
        self.record.learned.append(list(groups))
        return super().step(groups, outputs)


class RecordingReporter(Reporter):
    """A reporter that records the names of phases."""

    phases: list[str]
    parts: Parts

    @contextmanager
    def phase(self, name, *, total=None):
        self.phases.append(name)
        with super().phase(name, total=total) as advance:
            yield advance


class ConstantReference:
    """A reference policy with one log-probability for every token."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def logprobs(self, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
        return [[torch.full((len(r.completion.token_ids),), self.logprob) for r in g.rollouts] for g in groups]


@dataclass(frozen=True)
class SharedParts:
    """What all runs of a test module share; immutable."""

    processors: Processors
    prompts: Prompts
    validation: Prompts
    rewards: RewardPool


@contextmanager
def open_shared_parts(model: Path, folder: Path) -> Iterator[SharedParts]:
    processors = processors_of(model)
    builder = make_builder(processors, max_prompt_length=256)

    def prompts_of(name: str, numbers: range) -> Prompts:
        rows = [{"problem": f"What is {n} + 0?", "answer": str(n)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return mix([open_prompts(str(folder / f"{name}.jsonl"), builder, num_workers=1)])

    (folder / "reward.py").write_text(REWARD)
    rewards = RewardPool(
        find_reward(f"{folder / 'reward.py'}:reward", {}), num_workers=1, timeout_seconds=10, max_failed_fraction=0.5
    )
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield SharedParts(
            processors,
            prompts_of("train", range(10, 10 + NUM_PROMPTS)),
            prompts_of("validation", range(50, 50 + NUM_VALIDATION)),
            rewards,
        )
    finally:
        datasets.config.HF_DATASETS_CACHE = before
        rewards.close()


def sometimes_right(prompt: Prompt, version: int, seed: int) -> str:
    """Complete correctly for some seeds, and for more of them with each policy version."""
    return prompt.ground_truth if seed % 8 <= version else "no idea"


def sometimes_crashing(prompt: Prompt, version: int, seed: int) -> str:
    return "crash" if seed % 4 == 0 else sometimes_right(prompt, version, seed)


def plan_of(*, steps: int, per_step: int = 4, per_update: int = 4, epochs: int = 1):
    config = Config(
        data={"rollout_batch_size": per_step},
        worker={"actor": {"global_batch_size": per_update, "ppo_epochs": epochs}, "rollout": {"n": SAMPLING.n}},
        trainer={"max_steps": steps},
    )
    return make_plan(config, num_train_prompts=NUM_PROMPTS)


def engine_of(parts: SharedParts, kind: type[Engine], complete=sometimes_right, **options: Any) -> Engine:
    """Return a fake engine of this class with the trainer's log-probabilities."""
    stop = parts.processors.stop_token_ids[0]
    options = {"token_logprob": FAKE_LOGPROB} | options
    return kind(tokenizer=parts.processors.tokenizer, stop_token_id=stop, complete=complete, **options)


@contextmanager
def open_run(
    parts: SharedParts,
    folder: Path,
    *,
    complete=sometimes_right,
    token_logprob=FAKE_LOGPROB,
    tokens_per_step: int | None = None,
    critic_warmup: int = 0,
    max_skipped_updates: int = 3,
    traced_steps: Collection[int] = (),
    sampling: SamplingParams = SAMPLING,
    prompts: PromptStream | None = None,
    rewards: RewardPool | None = None,
    **changes: Any,
):
    """Yield a run that writes into the folder, and release the folder at the end.

    changes: fields of Parts and Run, and options.
    """
    with ExitStack() as stack:
        record = Record()
        options = {"token_logprob": token_logprob, "tokens_per_step": tokens_per_step}
        rollout = engine_of(parts, RecordingEngine, complete, **options)
        rollout.record = record
        trainer = RecordingTrainer(record)
        run_folder = stack.enter_context(RunFolder(folder))
        report = stack.enter_context(
            RecordingReporter(
                run_folder,
                Console(stream=io.StringIO(), progress=False),
                critic_warmup=critic_warmup,
                images=ImageStore(folder, max_side=64),
                token_texts=TokenTexts(parts.processors.tokenizer),
            )
        )
        report.phases = []
        stream = PromptStream(parts.prompts, batch_size=4, seed=3, shuffle=True, prefetch=True, num_workers=1)
        stack.callback(stream.close)
        own = Parts(
            prompts=stream if prompts is None else prompts,
            rewards=parts.rewards if rewards is None else rewards,
            evaluator=Evaluator(parts.validation, replace(SAMPLING, n=2), 2, 1, report.warn),
            rollout=rollout,
            trainer=trainer,
            report=report,
            sampling=sampling,
            critic_warmup=critic_warmup,
            max_skipped_updates=max_skipped_updates,
            traced_steps=traced_steps,
            tracer=LocalTracer(folder / "profile", rank=None),
            store=CheckpointStore(folder, keep=-1),
            save_state=partial(trainer.save_state, model_only=False),
        )
        yield assembled(own, changes)


@dataclass(frozen=True)
class Parts:
    """What a run is assembled from."""

    prompts: PromptStream
    rewards: RewardPool
    evaluator: Evaluator
    rollout: Any
    trainer: Any
    report: Any
    sampling: SamplingParams
    critic_warmup: int
    max_skipped_updates: int
    traced_steps: Collection[int]
    tracer: Tracer
    store: CheckpointStore
    save_state: Any
    plan: Plan = field(default_factory=lambda: plan_of(steps=3))
    critic: Any = None
    reference: Any = None
    algorithm: AlgorithmConfig = ALGORITHM
    needs_old_logprobs: bool = False
    grace: Grace = field(default_factory=Grace)
    should_stop: Callable[[], bool] = bool
    val_rewards: RewardPool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    of_run: Mapping[str, Any] = field(default_factory=dict)


def names_of(kind: type) -> list[str]:
    return [each.name for each in fields(kind)]


def assembled(parts: Parts, changes: Mapping[str, Any]) -> Run:
    """Return the run of parts with some changes: fields of Parts and Run, and options."""
    own, of_run, changed_options = {}, dict(parts.of_run), dict(parts.options)
    known = {name: target for kind, target in ((Run, of_run), (Parts, own)) for name in names_of(kind)}
    for name, value in changes.items():
        known.get(name, changed_options)[name] = value
    parts = replace(parts, **own, options=changed_options, of_run=of_run)
    sections = {"algorithm": parts.algorithm, "data": {"rollout_batch_size": parts.plan.prompts_per_step}}
    sections["trainer"] = {"rollout_tokens": 1, "critic_warmup": parts.critic_warmup}
    config = with_short(Config(**sections), changed_options)
    validates = config.validates_first or config.trainer.val_freq > 0 or config.trainer.val_only
    evaluator = parts.evaluator if validates else None
    parity = ParityCheck(1e-3)
    buffer_class = ContinuousBuffer if config.algorithm.samples_continuously else StepBuffer
    run = Run(
        config=config,
        plan=parts.plan,
        buffer=buffer_class(
            parts.prompts,
            parts.rollout,
            parts.rewards,
            replace(parts.sampling, with_baseline=parts.algorithm.adv_estimator == "remax"),
            config,
            parts.plan,
            parts.report,
            parity,
        ),
        trainer=parts.trainer,
        critic=parts.critic,
        parity=parity,
        preparation=GroupPreparation(
            parts.algorithm,
            parts.trainer,
            reference=parts.reference,
            critic=parts.critic,
            needs_old_logprobs=parts.needs_old_logprobs,
            phase=parts.report.phase,
        ),
        updater=Updater(
            parts.plan,
            parts.trainer,
            parts.critic,
            parts.report,
            parts.tracer,
            critic_warmup=parts.critic_warmup,
            max_skipped=parts.max_skipped_updates,
            traced_steps=parts.traced_steps,
        ),
        validation=Validation(evaluator, parts.rollout, parts.val_rewards or parts.rewards),
        checkpoints=Checkpoints(parts.store, parts.save_state),
        report=parts.report,
        stop=Stop(parts.should_stop, grace=parts.grace),
    )
    run = replace(run, **of_run)
    parts.report.parts = parts
    return run


def changed(run: Run, **changes: Any) -> Run:
    """Return a run without steps with other parts: fields of Parts and Run, and options."""
    return assembled(run.report.parts, changes)


def train_in(
    folder: Path, parts: SharedParts, *, resumes: bool = False, stop_after: int | None = None, **settings: Any
) -> Run:
    """Return the run that has trained in the folder, from its latest checkpoint if it resumes."""
    with open_run(parts, folder, **settings) as run:
        asked = itertools.count(1)
        stopping = {} if stop_after is None else {"should_stop": lambda: next(asked) == stop_after}
        last = train(changed(run, **stopping), latest_checkpoint(folder) if resumes else None)
        assert last == (run.plan.total_steps if stop_after is None else stop_after)
        return run


def validation_of(run: Run) -> ValidationRun:
    """Return the run that only validates with the parts of a run."""
    return ValidationRun(run.config, run.trainer, run.validation, run.report, run.hooks)


def prompts_of(run: Run) -> PromptStream:
    """Return the training prompts of a run."""
    return run.buffer._prompts


def record_of(run: Run) -> Record:
    return run.trainer.record


def lines_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step in metrics.jsonl, without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "a step has two lines"
    return {
        line["step"]: {key: value for key, value in line["metrics"].items() if not key.startswith(TIMING_KEYS)}
        for line in lines
    }


def rollouts_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "rollouts").iterdir())
    }


def rows_by_step(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the rollouts that each step learned from."""
    return {int(name[5:11]): rows for name, rows in rollouts_of(folder).items() if name.startswith("step_")}


def runs_of(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the versions of a stored completion, each with its number of tokens."""
    return [tuple(run) for run in row["policy_versions"]] or [(row["policy_version"], row["num_tokens"])]


def check_ages(folder: Path, oldest: int) -> None:
    """Check that no token is older than this, and that the metrics say how old they are."""
    for step, rows in rows_by_step(folder).items():
        ages: Counter[int] = Counter()
        for row in rows:
            assert row["finish_reason"] in {"stop", "length"}
            assert sum(count for _, count in runs_of(row)) == row["num_tokens"]
            for version, count in runs_of(row):
                ages[step - 1 - version] += count
        assert 0 <= min(ages) <= max(ages) <= oldest
        line = lines_of(folder)[step]
        assert line["staleness/max"] == max(ages)
        assert abs(line["staleness/mean"] - sum(age * count for age, count in ages.items()) / ages.total()) < 1e-6


class StoppingReference:
    """Scores as another reference, and asks the run to stop in its fourth call."""

    def __init__(self, reference: Any, grace: Grace) -> None:
        self.reference, self.grace, self.calls = reference, grace, 0

    def logprobs(self, groups: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            self.grace.request(limited=True)
        return self.reference.logprobs(groups)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def latest_checkpoint(folder: Path) -> Checkpoint:
    checkpoint = CheckpointStore(folder, keep=-1).latest(resumable=True)
    assert checkpoint is not None
    return checkpoint


ALL_INTERVALS = {"val_before_train": True, "val_freq": 2, "save_freq": 2}


def full_settings(steps: int) -> dict[str, Any]:
    """A run whose checkpoints hold every kind of state.

    Two updates a step, and an adaptive KL in the reward.
    """
    return {
        "plan": plan_of(steps=steps, per_update=2),
        **ALL_INTERVALS,
        "needs_old_logprobs": True,
        "reference": ConstantReference(-1.5),
        "algorithm": AlgorithmConfig(kl_coef=0.1, kl_type="adaptive", kl_target=0.1, kl_horizon=100),
    }


def learned_rewards(folder: Path) -> list[list[float]]:
    """Return the rewards of each group that was learned from, in step order."""
    rows = [row for name, rows in rollouts_of(folder).items() if name.startswith("step") for row in rows]
    return [[row["reward"] for row in rows[i : i + 3]] for i in range(0, len(rows), 3)]


FILTER = {"online_filtering": True, "filter_key": "accuracy", "mini_rollout_batch_size": 4, "max_try_make_batch": 20}


def mixed_by_prompt(prompt: Prompt, version: int, seed: int) -> str:
    """Complete some prompts always wrongly, others always correctly, and the rest by seed."""
    match int(prompt.ground_truth) % 4:
        case 0:
            return "no idea"
        case 1:
            return prompt.ground_truth
        case _:
            return prompt.ground_truth if seed % 2 else "no idea"


def surplus_settings(steps: int) -> dict[str, Any]:
    kept = FILTER | {"mini_rollout_batch_size": 7, "filter_surplus": "keep"}
    return full_settings(steps) | kept | {"complete": mixed_by_prompt}


def config_text(values: dict[str, Any]) -> str:
    """Return the config.yaml of a run with these options, by dotted names, and the defaults.

    Nothing is checked, so that files and models need not exist.
    """
    tree = Config().model_dump()
    for name, value in values.items():
        *path, key = name.split(".")
        section = tree
        for part in path:
            section = section[part]
        assert key in section, name
        section[key] = value
    return yaml.safe_dump(tree, sort_keys=False)
