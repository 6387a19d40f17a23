"""Any number of ranks computes the updates of one process.

Metrics, log-probabilities, weights and checkpoints are compared.
"""

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
    CONFIG,
    CPU,
    FULL_KL,
    KL,
    make_engine,
    make_rollouts,
    tensors_in,
    to_train,
    weights_of,
    with_loss,
)
from support.oracle import has_no_gradient
from support.ranks import RankProcesses
from trigon.errors import NotFiniteError
from trigon.metrics import Metrics, merge, values
from trigon.models.families import family_named
from trigon.training.budget import Lengths, tune_engines
from trigon.training.device_memory import HostMemory
from trigon.training.fsdp import TorchProcessGroup
from trigon.training.parallel import Sharding

FULL = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=False
)
HYBRID = replace(FULL, ranks_per_copy=2)  # of four ranks: two copies
GATHERED = replace(FULL, full_shard=False)
BFLOAT16 = replace(FULL, param_dtype=torch.bfloat16)
SEQ_KL_LOSS = with_loss(KL, loss_avg_mode="seq")
ALL_LOSS = with_loss(
    KL,
    loss_type="gspo",
    loss_avg_mode="seq_fixed",
    entropy_coeff=0.1,
    mismatch_correction="reject",
    mismatch_level="sequence",
    mismatch_low=0.3,
    mismatch_high=3.0,
)
ONE_GROUP = 40  # token budget of a row that no two groups fit into


@dataclass(frozen=True, slots=True)
class Batch:
    """Three groups of one update: 0 and 1 have an image, 2 is text only.

    groups_of_rank: for each rank, the indices of its groups. seed: of the groups.
    images: False for text only in all groups. infinite: index of the group that has an infinite
    advantage.
    """

    groups_of_rank: tuple[tuple[int, ...], ...]
    seed: int
    images: bool = True
    infinite: int | None = None


# Text only, then images on one rank only, then a rank without groups: the numbers of micro-batches
# always differ. With ONE_GROUP, the second batch of four ranks has a pass with images and then one
# without.
ON_TWO = (
    Batch(((1,), (2, 0)), seed=0, images=False),
    Batch(((2,), (0, 1)), seed=20),
    Batch(((), (1, 0, 2)), seed=40),
)
ON_FOUR = (
    Batch(((1,), (2,), (), (0,)), seed=0, images=False),
    Batch(((), (0, 2), (1,), ()), seed=20),
    Batch(((2,), (), (1, 0), ()), seed=40),
)

# With sequence parallelism consecutive ranks have the same groups, and compute each row together.
TOGETHER = tuple(replace(batch, groups_of_rank=((2, 0, 1),) * 2) for batch in ON_TWO)
TWO_BY_TWO = tuple(
    replace(batch, groups_of_rank=(first, first, last, last))
    for batch in ON_TWO
    for first, last in [batch.groups_of_rank]
)

# The same groups on other ranks, so that a rank encodes images whose features only the other rank
# has cached.
REASSIGNED = (*ON_TWO, Batch(((0, 2), (1,)), seed=20), Batch(((0,), (1, 2)), seed=40))


def on_one(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return the same batches for a single process."""
    return tuple(replace(batch, groups_of_rank=((0, 1, 2),)) for batch in batches)


# -- what runs on a rank ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """Make an engine of a model, and train it on batches. options: of make_engine.

    loaded: state to load first. measured: measure the token budgets first, which gives ONE_GROUP.
    saved: folders for the state, by the number of batches before the save.
    """

    model: Path
    batches: tuple[Batch, ...]
    sharding: Sharding | None
    options: Mapping[str, Any] = field(default_factory=dict)
    loaded: Path | None = None
    measured: bool = False
    saved: Mapping[int, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a task on one rank; tensors are encoded as safetensors.

    metrics: of each update. logprobs: by seed of the batch, number of earlier batches with this
    seed, group and completion. names: of the weights, in order.
    """

    metrics: tuple[Metrics, ...]
    logprobs: bytes
    names: tuple[str, ...]
    weights: bytes


def train(task: Task) -> Result:
    """Score each batch and make an update.

    With a KL term two updates are made, the second of which is off-policy.
    """
    torch.use_deterministic_algorithms(True)
    rank = 0 if task.sharding is None else dist.get_rank()
    is_full = task.options.get("config", CONFIG).algorithm.kl_in_loss == "full"
    compared_with = task.model if is_full and "lora_rank" not in task.options else None
    engine = make_engine(task.model, sharding=task.sharding, compared_with=compared_with, **task.options)
    reference = engine.reference_without_adapters() if "lora_rank" in task.options else engine
    has_kl = task.options.get("config", CONFIG).algorithm.kl_in_loss is not None
    if task.measured:
        ranks = TorchProcessGroup(CPU)
        lengths = Lengths(30, ONE_GROUP - 30, image_pixels=None, update_tokens=ONE_GROUP, step_tokens=ONE_GROUP)
        tune_engines(engine, None, HostMemory(shared_by=ranks.size), lengths, ranks, known=None)
    if task.loaded is not None:
        engine.load_state(task.loaded)

    metrics: list[Metrics] = []
    logprobs: dict[str, Tensor] = {}
    for number in range(len(task.batches) + 1):
        if number in task.saved:
            engine.save_state(task.saved[number], model_only=False)()
        if number == len(task.batches):
            break
        batch = task.batches[number]
        indices = batch.groups_of_rank[rank]
        times = sum(other.seed == batch.seed for other in task.batches[:number])
        groups = make_rollouts(task.model, seed=batch.seed, images=batch.images)
        rollouts = [groups[index] for index in indices]
        old = engine.logprobs(rollouts)
        for index, group in zip(indices, old, strict=True):
            logprobs |= {
                f"{batch.seed}/{times}/{index}/{completion}": tokens for completion, tokens in enumerate(group)
            }
        if has_kl:
            ref = [[1.05 * tokens for tokens in group] for group in reference.logprobs(rollouts)]
            train_groups = to_train(rollouts, old=old, ref=ref)
        else:
            train_groups = to_train(rollouts)
        if batch.infinite in indices:
            position = indices.index(batch.infinite)
            [train_groups[position]] = to_train([rollouts[position]], advantages=(math.inf, -0.75, 0.25))
        metrics += [engine.step(train_groups) for _ in range(2 if has_kl else 1)]
    weights = weights_of(engine)
    return Result(tuple(metrics), save(logprobs), tuple(weights), save(weights))


def train_on_rank(task: Task) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(task)


def run(processes: RankProcesses, task: Task) -> list[Result]:
    """Return the results of a task on each of its ranks, or of this process."""
    for folder in task.saved.values():
        folder.mkdir(parents=True)
    if task.sharding is None:
        return [train(task)]
    return processes.run(train_on_rank, task, ranks=len(task.batches[0].groups_of_rank))


# -- comparisons -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum errors, all relative except logprobs.

    gradients, each_gradient: of the first moments, over all tensors together and of each tensor.
    weights: over all tensors together only, since AdamW divides each gradient by its magnitude,
    which amplifies rounding errors where it is close to 0 (key biases).
    """

    metrics: float
    logprobs: float
    weights: float
    gradients: float
    each_gradient: float


# Float32. Measured: metrics 2e-5 (ratio_max; otherwise 7e-6), logprobs 1.3e-5 of 7, weights 2e-6,
# gradients 1.3e-5, each gradient 3e-5, all for qwen3_vl after six updates. Before the first update
# log-probabilities are bit-identical.
FLOAT32_ERRORS = Tolerance(metrics=5e-5, logprobs=5e-5, weights=1e-5, gradients=5e-5, each_gradient=1e-4)
# Computation in bfloat16. Measured: metrics 2e-2, logprobs 2.7e-2, weights 4e-3, gradients 1.4e-2.
BFLOAT16_ERRORS = Tolerance(metrics=5e-2, logprobs=6e-2, weights=1e-2, gradients=4e-2, each_gradient=math.inf)


def assert_metrics_close(many: Sequence[Metrics], one: Sequence[Metrics], tolerance: float) -> None:
    """Compare the merged metrics of several ranks with those of one process."""
    actual, expected = ({k: v for k, v in values(merge(*m)).items() if k not in ROW_METRICS} for m in (many, one))
    assert actual == pytest.approx(expected, rel=tolerance, abs=max(1e-6, tolerance / 100), nan_ok=True)


# How groups are packed, and which features are cached, differs between ranks.
ROW_METRICS = ("actor/micro_batches", "actor/packed_tokens", "actor/packing_fill", "actor/vision_cached_fraction")


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    first, second = (torch.cat([tensor.flatten().float() for tensor in tensors]) for tensors in (actual, expected))
    return float((first - second).norm() / second.norm())


def assert_results_close(many: Sequence[Result], one: Result, tolerance: Tolerance) -> None:
    """Compare the results of all ranks with those of one process.

    Metrics of each update, log-probabilities before it, and the final weights, which are the same
    on all ranks.
    """
    for number, metrics in enumerate(one.metrics):
        assert_metrics_close([result.metrics[number] for result in many], [metrics], tolerance.metrics)
    logprobs: dict[str, Tensor] = {}
    for result in many:
        logprobs |= load(result.logprobs)
    expected = load(one.logprobs)
    assert logprobs.keys() == expected.keys()
    assert max(float((logprobs[key] - expected[key]).abs().max()) for key in logprobs) < tolerance.logprobs
    assert {(result.names, result.weights) for result in many} == {(one.names, many[0].weights)}
    weights, expected = load(many[0].weights), load(one.weights)
    assert all(weights[name].shape == expected[name].shape for name in one.names)
    assert (
        relative_error([weights[name] for name in one.names], [expected[name] for name in one.names])
        < tolerance.weights
    )


def assert_states_close(actual: Path, expected: Path, tolerance: Tolerance) -> None:
    """Compare saved states.

    JSON files, names, shapes and dtypes are equal, weights and first moments close.
    """
    for name in files_of(expected):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()
    assert folders_of(actual) == folders_of(expected)
    for name in folders_of(expected):
        first, second = tensors_in(actual / name), tensors_in(expected / name)
        assert {k: (t.shape, t.dtype) for k, t in first.items()} == {k: (t.shape, t.dtype) for k, t in second.items()}
        if name != "optimizer":
            assert relative_error(list(first.values()), list(second.values())) < tolerance.weights
            continue
        assert all(torch.equal(first[key], second[key]) for key in second if key.endswith("/step"))
        moments = [key for key in second if key.endswith("/exp_avg")]
        assert relative_error([first[key] for key in moments], [second[key] for key in moments]) < tolerance.gradients
        zeros = [key for key in moments if has_no_gradient(key.removesuffix("/exp_avg"))]
        assert all(max(first[key].norm(), second[key].norm()) < 1e-6 for key in zeros)
        others = (key for key in moments if key not in zeros)
        assert max(relative_error([first[key]], [second[key]]) for key in others) < tolerance.each_gradient


def assert_states_equal(actual: Path, expected: Path) -> None:
    """Compare saved states bit for bit."""
    assert files_of(actual) == files_of(expected)
    assert folders_of(actual) == folders_of(expected)
    assert all((actual / name).read_bytes() == (expected / name).read_bytes() for name in files_of(actual))
    for name in folders_of(actual):
        first, second = tensors_in(actual / name), tensors_in(expected / name)
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == []


def files_of(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if path.is_file())


def folders_of(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if path.is_dir())


# -- training --------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.long(cases=["llava-2"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava"])
def test_weights_without_a_gradient_keep_their_bits_under_weight_decay(
    processes, tiny_model, tmp_path, model_type, ranks
):
    """A batch of text does not change a trained tower, nor any batch the last layer of LLaVA's."""
    both = ((0, 2), (1,)) if ranks == 2 else ((0, 1, 2),)
    images, text = Batch(both, seed=20), Batch(both, seed=0, images=False)
    saved = {number: tmp_path / str(number) for number in (0, 1, 3)}
    sharding = FULL if ranks == 2 else None
    run(processes, Task(tiny_model(model_type), (images, text, text), sharding, {"max_tokens": ONE_GROUP}, saved=saved))
    start, shown, unshown = (tensors_in(saved[number] / "weights") for number in (0, 1, 3))

    def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
        return {name for name in before if not torch.equal(before[name], after[name])}

    tower = {name for name in start if "visual" in name or "vision_tower" in name}
    untrained = {name for name in tower if ".layers.2." in name or "post_layernorm" in name}
    assert bool(untrained) == (model_type == "llava")
    assert moved(start, shown) == start.keys() - untrained
    changed = moved(shown, unshown)
    assert changed
    assert not changed & tower


VL, TIED, TEXT = ("qwen2_5_vl", False), ("qwen3_vl", True), ("qwen2", False)
MOE, TILES, LINEAR = ("qwen3_vl_moe", False), ("internvl", False), ("qwen3_5", False)
TWO_RANKS = {"sequence_parallel_size": 2}
LORA = {"lora_rank": 2, "max_tokens": ONE_GROUP}
ROUTER = {"config": with_loss(router_aux_loss_coef=1.0)}
BF16_WEIGHTS = {"strategy": "adamw_bf16", "dtype": torch.bfloat16, "max_tokens": ONE_GROUP}


@pytest.mark.extended(but=["vision on 2"])
@pytest.mark.long(
    but=[
        "frozen tower",
        "full kl, lora",
        "gspo, entropy, rejection",
        "linear attention on 2",
        "router loss on 2",
        "rows on 2 of 4, hybrid",
        "rows on 2, lora, frozen tower",
        "text on 2",
        "vision on 2",
    ]
)
@pytest.mark.parametrize(
    ("model", "batches", "sharding", "options"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "vision on 2": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "vision on 4": (VL, ON_FOUR, FULL, {"config": SEQ_KL_LOSS}),
            "tied on 2": (TIED, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "config": SEQ_KL_LOSS}),
            "tied on 4, hybrid": (TIED, ON_FOUR, HYBRID, {"max_tokens": ONE_GROUP}),
            "text on 2": (TEXT, ON_TWO, FULL, {"config": SEQ_KL_LOSS}),
            "gspo, entropy, rejection": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "config": ALL_LOSS}),
            "full kl on 4": (VL, ON_FOUR, FULL, {"max_tokens": ONE_GROUP, "config": FULL_KL}),
            "full kl, lora": (VL, ON_TWO, FULL, LORA | {"config": FULL_KL}),
            "text on 4": (TEXT, ON_FOUR, FULL, {"max_tokens": ONE_GROUP}),
            "moe on 2": (MOE, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "router loss on 2": (MOE, ON_TWO, FULL, ROUTER | {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "linear attention on 2": (LINEAR, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "tiles on 2": (TILES, ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "gemma 3 on 2": (("gemma3", True), ON_TWO, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "gemma 4 on 2": (("gemma4", True), ON_TWO, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "mistral 3 on 2": (("mistral3", False), ON_TWO, FULL, {"max_tokens": ONE_GROUP}),
            "layers kept gathered": (VL, ON_TWO, GATHERED, {"max_tokens": ONE_GROUP}),
            "checkpointing": (VL, ON_TWO, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True}),
            "frozen tower": (VL, REASSIGNED, FULL, {"max_tokens": ONE_GROUP, "freeze": True}),
            "frozen tower, deepstack, small cache": (
                TIED,
                REASSIGNED,
                FULL,
                {"freeze": True, "vision_cache_bytes": 9000, "config": FULL_KL},
            ),
            "lora": (VL, ON_TWO, FULL, LORA | {"config": KL}),
            "lora, hybrid": (VL, ON_FOUR, HYBRID, LORA),
            "lora, tied, checkpointing": (TIED, ON_TWO, FULL, LORA | {"checkpointing": True}),
            "rows on 2": (VL, TOGETHER, FULL, {"max_tokens": ONE_GROUP, "checkpointing": True} | TWO_RANKS),
            "rows on 2 of 4, hybrid": (VL, TWO_BY_TWO, HYBRID, {"config": SEQ_KL_LOSS} | TWO_RANKS),
            "rows on 2 of 4, gspo": (TIED, TWO_BY_TWO, FULL, {"max_tokens": ONE_GROUP, "config": ALL_LOSS} | TWO_RANKS),
            "rows on 2, full kl": (VL, TOGETHER, FULL, {"config": FULL_KL} | TWO_RANKS),
            "rows on 2, lora, full kl": (TIED, TOGETHER, FULL, LORA | {"config": FULL_KL} | TWO_RANKS),
            "rows on 2 of 4, frozen tower": (TIED, TWO_BY_TWO, FULL, {"freeze": True} | TWO_RANKS),
            "rows on 2, lora, frozen tower": (VL, TOGETHER, GATHERED, LORA | {"freeze": True} | TWO_RANKS),
            "rows on 2, moe": (MOE, TOGETHER, FULL, {"max_tokens": ONE_GROUP} | TWO_RANKS),
            "rows on 2, router loss": (MOE, TOGETHER, FULL, ROUTER | {"max_tokens": ONE_GROUP} | TWO_RANKS),
            "rows on 2, tiles": (TILES, TOGETHER, FULL, TWO_RANKS),
            "lora, frozen tower, gathered": (TIED, ON_TWO, GATHERED, LORA | {"freeze": True}),
        }.items()
    ],
)
def test_ranks_compute_the_updates_of_one_process(processes, tiny_model, tmp_path, model, batches, sharding, options):
    folder = tiny_model(model[0], tie_word_embeddings=model[1])
    many = run(processes, Task(folder, batches, sharding, options, saved={len(batches): tmp_path / "many"}))
    [one] = run(processes, Task(folder, on_one(batches), None, options, saved={len(batches): tmp_path / "one"}))
    assert_results_close(many, one, FLOAT32_ERRORS)
    assert_states_close(tmp_path / "many", tmp_path / "one", FLOAT32_ERRORS)
    if "lora_rank" not in options:
        weights, family = load(many[0].weights), family_named(model[0])
        stored = {
            name: part
            for saved_name, tensor in tensors_in(tmp_path / "many" / "weights").items()
            for name, part in family.checkpoint_tensors(saved_name, tensor)
        }
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], stored[name]) for name in weights)


@pytest.mark.long
@pytest.mark.parametrize(
    ("batches", "sharding", "options"),
    [
        pytest.param(ON_TWO, FULL, {"freeze": True, "lora_rank": 2, "config": FULL_KL}, id="frozen, lora, full kl"),
        pytest.param(ON_FOUR, HYBRID, {}, id="on 4, hybrid"),
    ],
)
def test_measured_token_budgets_give_the_same_updates_as_configured_ones_bit_for_bit(
    processes, tiny_vlm, batches, sharding, options
):
    options = options | {"logprob_chunk": 100}  # so that the passes that are measured are short
    measured = run(processes, Task(tiny_vlm, batches, sharding, options, measured=True))
    configured = run(processes, Task(tiny_vlm, batches, sharding, options | {"max_tokens": ONE_GROUP}))
    assert measured == configured


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compute_dtype": torch.bfloat16, "max_tokens": ONE_GROUP}, id="float32 weights"),
        pytest.param(BF16_WEIGHTS, id="bfloat16 weights"),
        pytest.param(LORA | {"dtype": torch.bfloat16}, id="lora on bfloat16 weights"),
    ],
)
def test_in_bfloat16_ranks_compute_the_updates_of_one_process_within_rounding_errors(
    processes, tiny_vlm, tmp_path, options
):
    many = run(processes, Task(tiny_vlm, ON_TWO, BFLOAT16, options, saved={3: tmp_path / "many"}))
    [one] = run(processes, Task(tiny_vlm, on_one(ON_TWO), None, options, saved={3: tmp_path / "one"}))
    assert_results_close(many, one, BFLOAT16_ERRORS)
    assert_states_close(tmp_path / "many", tmp_path / "one", BFLOAT16_ERRORS)
    assert sum(metrics["actor/skipped_updates"].value for result in many for metrics in result.metrics) == 0.0


@pytest.mark.extended
@pytest.mark.faults
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all_and_is_counted_once(processes, tiny_vlm):
    first, infinite, last = ON_TWO[0], replace(ON_TWO[1], infinite=1), ON_TWO[2]
    options = {"max_tokens": ONE_GROUP, "warmup_updates": 8}
    many = run(processes, Task(tiny_vlm, (first, infinite, last), FULL, options))
    [one] = run(processes, Task(tiny_vlm, on_one((first, infinite, last)), None, options))
    assert_results_close(many, one, FLOAT32_ERRORS)
    merged = [merge(*(result.metrics[number] for result in many)) for number in range(3)]
    assert [metrics["actor/skipped_updates"].value for metrics in merged] == [0.0, 1.0, 0.0]
    assert [metrics["actor/nonfinite_updates"].value for metrics in merged] == [0.0, 1.0, 0.0]
    assert math.isnan(merged[1]["actor/grad_norm"].value)
    without = run(processes, Task(tiny_vlm, (first, last), FULL, options))
    assert many[0].weights == without[0].weights
    assert values(many[1].metrics[2]) == values(without[1].metrics[1])


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Set a value of this rank's part of a tensor to nan, and try to save and to sync the weights.

    moments: of an optimizer state instead of a weight.
    """

    model: Path
    folder: Path
    rank: int
    moments: bool


def use_poisoned(task: Poisoned) -> list[str]:
    engine = make_engine(task.model, sharding=FULL, max_tokens=ONE_GROUP)
    rollouts = make_rollouts(task.model)
    engine.step(to_train(rollouts))
    parameter = next(iter(engine.policy.parameters()))
    if dist.get_rank() == task.rank:
        tensor = engine._trained.optimizer.state[parameter]["exp_avg"] if task.moments else parameter
        tensor.detach().to_local().view(-1)[0] = math.nan
    messages = []
    for use in (engine.weights, lambda: engine.save_state(task.folder, model_only=False)):
        try:
            use()
        except NotFiniteError as error:
            messages.append(str(error))
    return messages


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("moments", [False, True], ids=["weight", "moment"])
def test_a_value_that_is_not_finite_on_one_rank_is_neither_saved_nor_sampled_from_by_any(
    processes, tiny_vlm, tmp_path, moments
):
    first, second = processes.run(use_poisoned, Poisoned(tiny_vlm, tmp_path, 1, moments), ranks=2)
    assert first == second
    assert len(first) == (1 if moments else 2)
    assert all("after 1 updates hold nan or infinity, in 1 of " in message for message in first)
    assert list(tmp_path.iterdir()) == []


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.long(but=["1, read by 2", "2, read by 1 and 4"])
@pytest.mark.faults
@pytest.mark.parametrize(
    ("writers", "readers", "options", "done", "tolerance"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "2, read by 1 and 4": ((ON_TWO, FULL), [(on_one(ON_TWO), None), (ON_FOUR, FULL)], {}, 2, FLOAT32_ERRORS),
            "hybrid, read by 1 and 2": (
                (ON_FOUR, HYBRID),
                [(on_one(ON_TWO), None), (ON_TWO, FULL)],
                {},
                2,
                FLOAT32_ERRORS,
            ),
            "1, read by 2": ((on_one(ON_TWO), None), [(ON_TWO, GATHERED)], {}, 1, FLOAT32_ERRORS),
            "lora on 2, read by 1 and hybrid": (
                (ON_TWO, FULL),
                [(on_one(ON_TWO), None), (ON_FOUR, HYBRID)],
                LORA,
                2,
                FLOAT32_ERRORS,
            ),
            "bfloat16 on 2, read by 2 and 1": (
                (ON_TWO, BFLOAT16),
                [(ON_TWO, BFLOAT16), (on_one(ON_TWO), None)],
                BF16_WEIGHTS,
                2,
                BFLOAT16_ERRORS,
            ),
        }.items()
    ],
)
def test_any_number_of_ranks_resumes_what_any_number_saved(
    processes, tiny_vlm, tmp_path, writers, readers, options, done, tolerance
):
    """done: number of batches before the save.

    The first batch is text only: after it the vision tower has no optimizer state.
    """
    batches, sharding = writers
    middle, end = tmp_path / "middle", tmp_path / "end"
    uninterrupted = run(processes, Task(tiny_vlm, batches, sharding, options, saved={done: middle, 3: end}))
    for number, (batches, sharding) in enumerate(readers):
        copy, other_end = tmp_path / f"copy-{number}", tmp_path / f"end-{number}"
        remaining = batches[done:]
        saved = {0: copy, len(remaining): other_end}
        resumed = run(processes, Task(tiny_vlm, remaining, sharding, options, loaded=middle, saved=saved))
        assert_states_equal(copy, middle)
        assert_states_close(other_end, end, tolerance)
        for back in range(1, len(remaining) + 1):
            actual, expected = ([result.metrics[-back] for result in ranks] for ranks in (resumed, uninterrupted))
            assert_metrics_close(actual, expected, tolerance.metrics)
        if len(resumed) == len(uninterrupted) and (batches, sharding) == writers:
            assert_states_equal(other_end, end)
