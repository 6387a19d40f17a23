"""However many ranks learn together: the same metrics, log-probabilities, weights and checkpoints as one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from support.engines import (
    CLIPPED,
    CPU,
    FULL_KL_TERMS,
    KL_TERMS,
    TERMS,
    make_engine,
    make_rollouts,
    tensors_in,
    to_train,
    weights_of,
)
from support.ranks import RankProcesses
from trigon.algorithms.importance import Correction
from trigon.metrics import Metrics, merge, values
from trigon.models.families import family_named
from trigon.training.budget import Lengths, tune_engines
from trigon.training.fsdp import Sharding, TorchProcessGroup
from trigon.training.memory import HostMemory

FULL = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=False
)
HYBRID = replace(FULL, ranks_per_copy=2)  # of four ranks: two copies
GATHERED = replace(FULL, full_shard=False)
BFLOAT16 = replace(FULL, param_dtype=torch.bfloat16)
SEQ_KL_TERMS = replace(KL_TERMS, averaging="seq")
ALL_OF_THEM = replace(
    KL_TERMS,
    policy=replace(CLIPPED, kind="gspo"),
    averaging="seq_fixed",
    entropy_coefficient=0.1,
    correction=Correction("reject", "sequence", 0.3, 3.0),
)
ONE_GROUP = 40  # tokens in a row, where any two groups have more


@dataclass(frozen=True, slots=True)
class Lesson:
    """Three groups to learn from; 0 and 1 show an image, 2 is text alone. images: False for text in all.

    deal: for each rank, which groups are its own. broken: the group that has an infinite advantage.
    """

    deal: tuple[tuple[int, ...], ...]
    seed: int
    images: bool = True
    broken: int | None = None


# Text alone, then images on one rank alone, then a rank with nothing: some always have more micro-batches than others.
# With ONE_GROUP, the second lesson of four ranks has a pass that shows an image and then one that shows none.
ON_TWO = (
    Lesson(((1,), (2, 0)), seed=0, images=False),
    Lesson(((2,), (0, 1)), seed=20),
    Lesson(((), (1, 0, 2)), seed=40),
)
ON_FOUR = (
    Lesson(((1,), (2,), (), (0,)), seed=0, images=False),
    Lesson(((), (0, 2), (1,), ()), seed=20),
    Lesson(((2,), (), (1, 0), ()), seed=40),
)

# The same groups dealt out anew, so that a rank sees what only the other remembers.
DEALT_ANEW = (*ON_TWO, Lesson(((0, 2), (1,)), seed=20), Lesson(((0,), (1, 2)), seed=40))


def alone(lessons: Sequence[Lesson]) -> tuple[Lesson, ...]:
    """The same groups, all for one process."""
    return tuple(replace(lesson, deal=((0, 1, 2),)) for lesson in lessons)


# -- what runs on a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """To make an engine of a model, or load one, and to learn. options: make_engine's.

    saved: where to save the state once so many lessons were learned. measured: to find out first how many tokens a pass
    may take, which is ONE_GROUP.
    """

    model: Path
    lessons: tuple[Lesson, ...]
    sharding: Sharding | None
    options: Mapping[str, Any] = field(default_factory=dict)
    loaded: Path | None = None
    measured: bool = False
    saved: Mapping[int, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of it on one rank; tensors as safetensors. metrics: of each update.

    logprobs: by the lesson's seed, how often that came before, group and answer. names: of the weights, in their order.
    """

    metrics: tuple[Metrics, ...]
    logprobs: bytes
    names: tuple[str, ...]
    weights: bytes


def learn(task: Task) -> Learned:
    """Score each lesson and make an update; with a KL term two, the second off-policy."""
    torch.use_deterministic_algorithms(True)
    rank = 0 if task.sharding is None else dist.get_rank()
    is_full = task.options.get("terms", TERMS).kl_estimator == "full"
    compared_with = task.model if is_full and "lora_rank" not in task.options else None
    engine = make_engine(task.model, sharding=task.sharding, compared_with=compared_with, **task.options)
    reference = engine.reference_without_adapters() if "lora_rank" in task.options else engine
    has_kl = task.options.get("terms", TERMS).kl_estimator is not None
    if task.measured:
        ranks = TorchProcessGroup(CPU)
        lengths = Lengths(30, ONE_GROUP - 30, image_pixels=None, update_tokens=ONE_GROUP, step_tokens=ONE_GROUP)
        tune_engines(engine, None, HostMemory(shared_by=ranks.size), lengths, ranks, known=None)
    if task.loaded is not None:
        engine.load_state(task.loaded)

    metrics: list[Metrics] = []
    said: dict[str, Tensor] = {}
    for number in range(len(task.lessons) + 1):
        if number in task.saved:
            engine.save_state(task.saved[number], model_only=False)()
        if number == len(task.lessons):
            break
        lesson = task.lessons[number]
        ours = lesson.deal[rank]
        times = sum(other.seed == lesson.seed for other in task.lessons[:number])
        groups = make_rollouts(task.model, seed=lesson.seed, images=lesson.images)
        rollouts = [groups[index] for index in ours]
        old = engine.logprobs(rollouts)
        for index, group in zip(ours, old, strict=True):
            said |= {f"{lesson.seed}/{times}/{index}/{answer}": logprobs for answer, logprobs in enumerate(group)}
        if has_kl:
            ref = [[1.05 * logprobs for logprobs in group] for group in reference.logprobs(rollouts)]
            train = to_train(rollouts, old=old, ref=ref)
        else:
            train = to_train(rollouts)
        if lesson.broken in ours:
            place = ours.index(lesson.broken)
            [train[place]] = to_train([rollouts[place]], advantages=(math.inf, -0.75, 0.25))
        metrics += [engine.step(train) for _ in range(2 if has_kl else 1)]
    weights = weights_of(engine)
    return Learned(tuple(metrics), save(said), tuple(weights), save(weights))


def learn_on_rank(task: Task) -> Learned:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return learn(task)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with RankProcesses(4, tmp_path_factory.mktemp("meetings")) as processes:
        yield processes


def run(processes: RankProcesses, task: Task) -> list[Learned]:
    """Return what came of a task on each of its ranks, or in this process alone."""
    for folder in task.saved.values():
        folder.mkdir(parents=True)
    if task.sharding is None:
        return [learn(task)]
    return processes.run(learn_on_rank, task, ranks=len(task.lessons[0].deal))


# -- how it is compared -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tolerance:
    """All relative, but logprobs. gradients, each_gradient: of first moments, in a row and of each tensor alone.

    Weights are compared in a row only: AdamW divides each gradient by its own size, so that rounding shows where one is
    nearly 0, as those of key biases are.
    """

    metrics: float
    logprobs: float
    weights: float
    gradients: float
    each_gradient: float


# Float32. Seen: metrics 2e-5 (the largest ratio; else 7e-6), logprobs 1.3e-5 of 7, weights 2e-6, gradients 1.3e-5, each
# 3e-5, all of them for qwen3_vl after six updates; before the first update log-probabilities are the same bit for bit.
CLOSE = Tolerance(metrics=5e-5, logprobs=5e-5, weights=1e-5, gradients=5e-5, each_gradient=1e-4)
# Where either computes in bfloat16. Seen: metrics 2e-2, logprobs 2.7e-2, weights 4e-3, gradients 1.4e-2.
ROUNDED = Tolerance(metrics=5e-2, logprobs=6e-2, weights=1e-2, gradients=4e-2, each_gradient=math.inf)


def assert_metrics_alike(many: Sequence[Metrics], one: Sequence[Metrics], tolerance: float) -> None:
    """Of several ranks merged, against those of one process. How groups were laid out in rows is each rank's own."""
    ours, theirs = ({k: v for k, v in values(merge(*metrics)).items() if k not in ROWS} for metrics in (many, one))
    assert ours == pytest.approx(theirs, rel=tolerance, abs=max(1e-6, tolerance / 100), nan_ok=True)


# So is what it remembers.
ROWS = ("actor/micro_batches", "actor/packed_tokens", "actor/packing_fill", "actor/vision_remembered")


def error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    first, second = (torch.cat([tensor.flatten().float() for tensor in tensors]) for tensors in (ours, theirs))
    return float((first - second).norm() / second.norm())


def assert_learned_alike(many: Sequence[Learned], one: Learned, tolerance: Tolerance) -> None:
    """Same metrics of each update, same log-probabilities before, same weights after, whole and equal on all ranks."""
    for number, metrics in enumerate(one.metrics):
        assert_metrics_alike([learned.metrics[number] for learned in many], [metrics], tolerance.metrics)
    said: dict[str, Tensor] = {}
    for learned in many:
        said |= load(learned.logprobs)
    expected = load(one.logprobs)
    assert said.keys() == expected.keys()
    assert max(float((said[key] - expected[key]).abs().max()) for key in said) < tolerance.logprobs
    assert {(learned.names, learned.weights) for learned in many} == {(one.names, many[0].weights)}
    weights, expected = load(many[0].weights), load(one.weights)
    assert all(weights[name].shape == expected[name].shape for name in one.names)
    assert error([weights[name] for name in one.names], [expected[name] for name in one.names]) < tolerance.weights


def assert_states_alike(ours: Path, theirs: Path, tolerance: Tolerance) -> None:
    """Same names, shapes and dtypes on disk; close weights and first moments; what is no tensor is equal."""
    for name in files_of(theirs):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert folders_of(ours) == folders_of(theirs)
    for name in folders_of(theirs):
        tensors, expected = tensors_in(ours / name), tensors_in(theirs / name)
        assert {k: (t.shape, t.dtype) for k, t in tensors.items()} == {
            k: (t.shape, t.dtype) for k, t in expected.items()
        }
        if name != "optimizer":
            assert error(list(tensors.values()), list(expected.values())) < tolerance.weights
            continue
        assert all(torch.equal(tensors[key], expected[key]) for key in expected if key.endswith("/step"))
        moments = [key for key in expected if key.endswith("/exp_avg")]
        assert error([tensors[key] for key in moments], [expected[key] for key in moments]) < tolerance.gradients
        assert max(error([tensors[key]], [expected[key]]) for key in moments) < tolerance.each_gradient


def assert_states_equal(ours: Path, theirs: Path) -> None:
    """Bit for bit."""
    assert files_of(ours) == files_of(theirs)
    assert folders_of(ours) == folders_of(theirs)
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in files_of(ours))
    for name in folders_of(ours):
        tensors, expected = tensors_in(ours / name), tensors_in(theirs / name)
        assert tensors.keys() == expected.keys()
        assert [key for key in tensors if not torch.equal(tensors[key], expected[key])] == []


def files_of(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if path.is_file())


def folders_of(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if path.is_dir())


# -- learning -----------------------------------------------------------------------------------------------------

VL, TIED, TEXT = ("qwen2_5_vl", False), ("qwen3_vl", True), ("qwen2", False)
EXPERTS, TILES = ("qwen3_vl_moe", False), ("internvl", False)
LORA = {"lora_rank": 2, "max_tokens": ONE_GROUP}
BF16_WEIGHTS = {"strategy": "adamw_bf16", "dtype": torch.bfloat16, "max_tokens": ONE_GROUP}


@pytest.mark.parametrize(
    ("model", "lessons", "sharding", "options"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "vision on 2": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "vision on 4": (VL, ON_FOUR, FULL, {"terms": SEQ_KL_TERMS}),
            "tied on 2": (TIED, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "terms": SEQ_KL_TERMS}),
            "tied on 4, hybrid": (TIED, ON_FOUR, HYBRID, {"max_tokens": ONE_GROUP}),
            "text on 2": (TEXT, ON_TWO, FULL, {"terms": SEQ_KL_TERMS}),
            "gspo, entropy, rejection": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "terms": ALL_OF_THEM}),
            "full kl on 4": (VL, ON_FOUR, FULL, {"max_tokens": ONE_GROUP, "terms": FULL_KL_TERMS}),
            "full kl, lora": (VL, ON_TWO, FULL, LORA | {"terms": FULL_KL_TERMS}),
            "text on 4": (TEXT, ON_FOUR, FULL, {"max_tokens": ONE_GROUP}),
            "experts on 2": (EXPERTS, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "tiles on 2": (TILES, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "layers kept gathered": (VL, ON_TWO, GATHERED, {"max_tokens": ONE_GROUP}),
            "checkpointing": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "frozen tower": (VL, DEALT_ANEW, FULL, {"max_tokens": ONE_GROUP, "freeze": True}),
            "frozen tower, deepstack, forgetful": (
                TIED,
                DEALT_ANEW,
                FULL,
                {"freeze": True, "vision_cache_bytes": 9000, "terms": FULL_KL_TERMS},
            ),
            "lora": (VL, ON_TWO, FULL, LORA | {"terms": KL_TERMS}),
            "lora, hybrid": (VL, ON_FOUR, HYBRID, LORA),
            "lora, tied, checkpointing": (TIED, ON_TWO, FULL, LORA | {"checkpointing": True}),
            "lora, frozen tower, gathered": (TIED, ON_TWO, GATHERED, LORA | {"freeze": True}),
        }.items()
    ],
)
def test_ranks_learn_what_one_process_learns(processes, tiny_model, tmp_path, model, lessons, sharding, options):
    folder = tiny_model(model[0], tie_word_embeddings=model[1])
    many = run(processes, Task(folder, lessons, sharding, options, saved={len(lessons): tmp_path / "many"}))
    [one] = run(processes, Task(folder, alone(lessons), None, options, saved={len(lessons): tmp_path / "one"}))
    assert_learned_alike(many, one, CLOSE)
    assert_states_alike(tmp_path / "many", tmp_path / "one", CLOSE)
    if "lora_rank" not in options:
        weights, family = load(many[0].weights), family_named(model[0])
        stored = {
            name: part
            for saved_name, tensor in tensors_in(tmp_path / "many" / "weights").items()
            for name, part in family.checkpoint_tensors(saved_name, tensor)
        }
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], stored[name]) for name in weights)


@pytest.mark.parametrize(
    ("lessons", "sharding", "options"),
    [
        pytest.param(
            ON_TWO, FULL, {"freeze": True, "lora_rank": 2, "terms": FULL_KL_TERMS}, id="frozen, lora, full kl"
        ),
        pytest.param(ON_FOUR, HYBRID, {}, id="on 4, hybrid"),
    ],
)
def test_ranks_that_measured_their_memory_learn_as_those_that_were_told_bit_for_bit(
    processes, tiny_vlm, lessons, sharding, options
):
    options = options | {"logprob_chunk": 100}  # so that the passes that are measured are short
    measured = run(processes, Task(tiny_vlm, lessons, sharding, options, measured=True))
    told = run(processes, Task(tiny_vlm, lessons, sharding, options | {"max_tokens": ONE_GROUP}))
    assert measured == told


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compute_dtype": torch.bfloat16, "max_tokens": ONE_GROUP}, id="float32 weights"),
        pytest.param(BF16_WEIGHTS, id="bfloat16 weights"),
        pytest.param(LORA | {"dtype": torch.bfloat16}, id="lora on bfloat16 weights"),
    ],
)
def test_ranks_that_compute_in_bfloat16_learn_what_one_process_does_within_rounding(
    processes, tiny_vlm, tmp_path, options
):
    many = run(processes, Task(tiny_vlm, ON_TWO, BFLOAT16, options, saved={3: tmp_path / "many"}))
    [one] = run(processes, Task(tiny_vlm, alone(ON_TWO), None, options, saved={3: tmp_path / "one"}))
    assert_learned_alike(many, one, ROUNDED)
    assert_states_alike(tmp_path / "many", tmp_path / "one", ROUNDED)
    assert sum(metrics["actor/skipped_updates"].value for learned in many for metrics in learned.metrics) == 0.0


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all_and_is_counted_once(processes, tiny_vlm):
    first, broken, last = ON_TWO[0], replace(ON_TWO[1], broken=1), ON_TWO[2]
    options = {"max_tokens": ONE_GROUP, "warmup_updates": 8}
    many = run(processes, Task(tiny_vlm, (first, broken, last), FULL, options))
    [one] = run(processes, Task(tiny_vlm, alone((first, broken, last)), None, options))
    assert_learned_alike(many, one, CLOSE)
    merged = [merge(*(learned.metrics[number] for learned in many)) for number in range(3)]
    assert [metrics["actor/skipped_updates"].value for metrics in merged] == [0.0, 1.0, 0.0]
    assert math.isnan(merged[1]["actor/grad_norm"].value)
    spared = run(processes, Task(tiny_vlm, (first, last), FULL, options))
    assert many[0].weights == spared[0].weights
    assert values(many[1].metrics[2]) == values(spared[1].metrics[1])


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writers", "readers", "options", "done", "tolerance"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "2, read by 1 and 4": ((ON_TWO, FULL), [(alone(ON_TWO), None), (ON_FOUR, FULL)], {}, 2, CLOSE),
            "hybrid, read by 1 and 2": ((ON_FOUR, HYBRID), [(alone(ON_TWO), None), (ON_TWO, FULL)], {}, 2, CLOSE),
            "1, read by 2": ((alone(ON_TWO), None), [(ON_TWO, GATHERED)], {}, 1, CLOSE),
            "lora on 2, read by 1 and hybrid": (
                (ON_TWO, FULL),
                [(alone(ON_TWO), None), (ON_FOUR, HYBRID)],
                LORA,
                2,
                CLOSE,
            ),
            "bfloat16 on 2, read by 2 and 1": (
                (ON_TWO, BFLOAT16),
                [(ON_TWO, BFLOAT16), (alone(ON_TWO), None)],
                BF16_WEIGHTS,
                2,
                ROUNDED,
            ),
        }.items()
    ],
)
def test_what_some_ranks_saved_any_other_number_goes_on_with(
    processes, tiny_vlm, tmp_path, writers, readers, options, done, tolerance
):
    """done: lessons before saving; after the first, which is text alone, the vision tower has no optimizer state."""
    lessons, sharding = writers
    middle, end = tmp_path / "middle", tmp_path / "end"
    uninterrupted = run(processes, Task(tiny_vlm, lessons, sharding, options, saved={done: middle, 3: end}))
    for number, (lessons, sharding) in enumerate(readers):
        again, other_end = tmp_path / f"again-{number}", tmp_path / f"end-{number}"
        rest = lessons[done:]
        saved = {0: again, len(rest): other_end}
        resumed = run(processes, Task(tiny_vlm, rest, sharding, options, loaded=middle, saved=saved))
        assert_states_equal(again, middle)
        assert_states_alike(other_end, end, tolerance)
        for back in range(1, len(rest) + 1):
            ours, theirs = ([learned.metrics[-back] for learned in ranks] for ranks in (resumed, uninterrupted))
            assert_metrics_alike(ours, theirs, tolerance.metrics)
        if len(resumed) == len(uninterrupted) and (lessons, sharding) == writers:
            assert_states_equal(other_end, end)
