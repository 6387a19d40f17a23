"""Measuring token budgets: the fit, agreement between ranks, and no effect on training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from test_training_parallel import ThreadRanks

from support.critics import make_critic
from support.engines import FULL_KL, KL, make_engine, make_rollouts, to_train, weights_of, with_loss
from trigon.data.packing import tokens_of
from trigon.errors import ConfigError
from trigon.metrics import values
from trigon.models.load import load_processors, most_image_pixels
from trigon.training.budget import Budgets, Lengths, as_rollouts, dummy_group, tune_engines
from trigon.training.device_memory import HostMemory
from trigon.training.parallel import SingleProcess

GIB = 2**30
LENGTHS = Lengths(prompt_tokens=60, response_tokens=40, image_pixels=None, update_tokens=900, step_tokens=700)


class EmulatedMemory:
    """A device on which a pass takes peak(tokens) bytes. Satisfies Memory.

    passes: the number of tokens of each pass.
    """

    device_name = "Emulated"
    max_tokens: int | None = None

    def __init__(self, *, total: int, free: int, peak: Callable[[int], int]) -> None:
        self.total_bytes = total
        self._free = free
        self._peak = peak
        self.passes: list[int] = []

    def free_bytes(self) -> int:
        return self._free

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Record the pass without making it.

        The only sequence in the closure of the function is the list of groups.
        """
        [groups] = [cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, Sequence)]
        self.passes.append(sum(map(tokens_of, groups)))
        peak = self._peak(self.passes[-1])
        if peak > self._free:
            raise torch.OutOfMemoryError
        return peak


def budgets_on(memory, engine, lengths: Lengths = LENGTHS, *, ranks=None, known: Budgets | None = None) -> Budgets:
    return tune_engines(engine, None, memory, lengths, ranks or SingleProcess(), known=known)


@pytest.fixture(scope="module")
def engine(tiny_model):
    """Return an engine whose dummy group has 60 + 26 * 40 = 1100 tokens.

    26 completions fill a chunk of logits.
    """
    return make_engine(tiny_model("qwen2"))


# -- the fit, by hand ------------------------------------------------------------------------------

ENOUGH = replace(LENGTHS, update_tokens=10**9, step_tokens=10**9)


def test_a_pass_fills_the_free_memory_except_a_tenth_of_the_device(engine):
    # 5000 MB + 1 MB per token; 60,000 of 100,000 MB are free, of which the optimizer will take
    # some.
    memory = EmulatedMemory(total=100_000 << 20, free=60_000 << 20, peak=lambda tokens: (5000 + tokens) << 20)
    found = budgets_on(memory, engine, ENOUGH)
    optimizer = engine.optimizer_bytes / 2**20
    assert 0 < optimizer < 100
    assert found.update_tokens == found.experience_tokens == int(60_000 - optimizer - 10_000 - 5000) // 256 * 256
    assert found.update_bytes == pytest.approx((100_000 - 60_000 + optimizer + 5000 + found.update_tokens) * 2**20)
    assert (found.device, found.device_bytes) == ("Emulated", 100_000 << 20)
    # three passes, and one that verifies the fit; before those with gradient, one that allocates
    # the gradients
    verified = found.update_tokens // 1100 * 1100
    assert memory.passes == [100, 1100, 2140, 2200, verified, 1100, 2140, 2200, verified]


def test_every_token_counts_as_the_more_expensive_kind(engine):
    # 1100, 2140 and 2200 tokens take 1100, 2140 and 2400 MB: 1 MB per completion token, 260 / 60
    # per prompt token.
    peaks = {1100: 1100, 2140: 2140, 2200: 2400}
    memory = EmulatedMemory(total=50_000 << 20, free=50_000 << 20, peak=lambda tokens: peaks.get(tokens, 1) << 20)
    found = budgets_on(memory, engine, ENOUGH)
    assert found.update_tokens == int((45_000 - engine.optimizer_bytes / 2**20) * 60 / 260) // 256 * 256


def test_budgets_do_not_exceed_the_tokens_of_an_update_or_a_step(engine):
    memory = EmulatedMemory(total=100 * GIB, free=90 * GIB, peak=lambda tokens: tokens << 20)
    found = budgets_on(memory, engine)
    assert (found.update_tokens, found.experience_tokens) == (900, 700)
    memory.max_tokens = 300
    assert budgets_on(memory, engine).update_tokens == 300
    memory.max_tokens = 30
    assert budgets_on(memory, engine).update_tokens == LENGTHS.longest


@pytest.mark.extended
def test_a_pass_that_takes_more_than_the_fit_is_made_smaller_until_it_fits(engine):
    def curved(tokens: int) -> int:
        return (tokens if tokens <= 2200 else tokens * 3 // 2) << 20

    memory = EmulatedMemory(total=20_000 << 20, free=20_000 << 20, peak=curved)
    found = budgets_on(memory, engine, ENOUGH)
    assert curved(found.update_tokens // 1100 * 1100) <= 18_000 << 20
    assert found.update_tokens > 9000


@pytest.mark.extended
@pytest.mark.parametrize("largest_pass", [100, 1100, 2140])
def test_the_budget_is_the_longest_sequence_if_larger_passes_run_out_of_memory(engine, largest_pass):
    memory = EmulatedMemory(total=4 * GIB, free=2 * GIB, peak=lambda tokens: GIB if tokens <= largest_pass else 3 * GIB)
    found = budgets_on(memory, engine, ENOUGH)
    assert found.update_tokens == 100


def test_the_longest_sequence_is_measured_by_itself_if_a_larger_group_leaves_no_reserve(engine):
    memory = EmulatedMemory(
        total=10 * GIB, free=2 * GIB, peak=lambda tokens: GIB // 2 if tokens <= 100 else 3 * GIB // 2
    )
    assert budgets_on(memory, engine, ENOUGH).update_tokens >= 100


@pytest.mark.extended
def test_a_device_without_memory_for_the_longest_sequence_raises_an_error_with_a_remedy(engine):
    memory = EmulatedMemory(total=10 * GIB, free=2 * GIB, peak=lambda tokens: tokens << 25)
    with pytest.raises(ConfigError, match=r"100 tokens.*more than there is.*Emulated.*enable_gradient_checkpointing"):
        budgets_on(memory, engine, ENOUGH)
    memory = EmulatedMemory(total=10 * GIB, free=3 * GIB // 2, peak=lambda tokens: tokens << 19)
    with pytest.raises(ConfigError, match=r"about 1\.\d\d GiB.*has 0\.\d\d GiB left.*lower data.max_prompt_length"):
        budgets_on(memory, engine, replace(ENOUGH, prompt_tokens=2000, response_tokens=1024))


def test_known_budgets_are_not_measured_again_on_a_device_of_the_same_kind(engine):
    known = Budgets(500, GIB, 600, GIB, "Emulated", 9 * GIB)
    memory = EmulatedMemory(total=10 * GIB, free=9 * GIB, peak=lambda tokens: tokens << 20)
    assert budgets_on(memory, engine, known=known) is known
    assert memory.passes == []
    assert budgets_on(memory, engine, known=replace(known, device="Another")) != known


# -- real passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_5_vl", "internvl", "llava_onevision", "gemma3"])
def test_a_dummy_group_has_the_maximum_lengths_and_as_many_images_as_fit(tiny_model, model_type):
    engine = make_engine(tiny_model(model_type))
    group = dummy_group(engine.policy, LENGTHS, num_completions=3)
    assert len(group.prompt.token_ids) == 60
    assert [len(part.token_ids) for part in group.sequences] == [40] * 3
    if model_type == "qwen2":
        assert group.prompt.vision is None
        return
    image = engine.policy.family.image_token_id(engine.policy.model.config)
    shown = group.prompt.token_ids.count(image)
    assert (
        shown == {"qwen2_5_vl": 49, "internvl": 44, "llava_onevision": 51, "gemma3": 44}[model_type]
    )  # 7 x 7; eleven tiles of 4 tokens, or three of 16 and a line end, each with a word
    small = replace(LENGTHS, image_pixels=28 * 28 * 9)
    assert (
        dummy_group(engine.policy, small, num_completions=3).prompt.token_ids.count(image)
        == {"qwen2_5_vl": 45, "internvl": 44, "llava_onevision": 51, "gemma3": 44}[model_type]
    )


@pytest.mark.parametrize(
    ("model_type", "most_tokens"),
    # The limits of the tiny models' processors; a tile of InternVL has four tokens.
    [("qwen2_5_vl", 64), ("glm4v", 64), ("mistral3", 64), ("gemma4", 70), ("internvl", 4)],
)
def test_the_images_of_a_dummy_group_are_as_large_as_the_processor_makes_them(tiny_model, model_type, most_tokens):
    folder = tiny_model(model_type)
    lengths = replace(LENGTHS, prompt_tokens=400, image_pixels=most_image_pixels(load_processors(str(folder))))
    policy = make_engine(folder).policy
    vision = dummy_group(policy, lengths, num_completions=1).prompt.vision
    counts = policy.family.count_image_tokens(policy.model.config, vision.grid_thw, ())
    assert most_tokens - 6 <= max(counts) <= most_tokens


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"freeze": True}, {"lora_rank": 2}, {"checkpointing": True}], ids=str)
def test_measuring_does_not_change_training(tiny_vlm, options):
    measured, configured = make_engine(tiny_vlm, **options), make_engine(tiny_vlm, **options)
    state = torch.random.get_rng_state()
    found = tune_engines(measured, None, HostMemory(shared_by=1), LENGTHS, SingleProcess(), known=None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in measured.policy.parameters())
    for each in (measured, configured):
        each.use_budgets(update_max_tokens=45, score_max_tokens=45)
    assert found.update_tokens == 900
    for seed in (0, 20):
        rollouts = make_rollouts(tiny_vlm, seed=seed)
        actual, expected = (
            torch.cat([t for group in one.logprobs(rollouts) for t in group]) for one in (measured, configured)
        )
        assert torch.equal(actual, expected)
        metrics = values(measured.step(to_train(rollouts)))
        assert metrics == values(configured.step(to_train(rollouts)))
        assert metrics["actor/micro_batches"] > 1  # rows are packed to the budgets
    actual, expected = weights_of(measured), weights_of(configured)
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.extended
def test_a_critic_has_budgets_of_its_own(tiny_model):
    engine, critic = make_engine(tiny_model("qwen2")), make_critic(tiny_model("qwen2"))
    lengths = replace(LENGTHS, critic_update_tokens=500)
    memory = HostMemory(shared_by=1)
    found = tune_engines(engine, None, memory, lengths, SingleProcess(), known=None, critic=critic)
    assert (found.update_tokens, found.experience_tokens) == (900, 700)
    assert (found.critic_update_tokens, found.critic_experience_tokens) == (500, 700)


LOSSES = {"full kl": FULL_KL, "entropy": with_loss(entropy_coeff=0.1)}


@pytest.mark.extended
@pytest.mark.parametrize("config", LOSSES.values(), ids=LOSSES)
def test_a_pass_takes_the_same_memory_each_time_and_a_larger_one_grows_linearly(tiny_model, config):
    folder = tiny_model("qwen2")
    engine = make_engine(folder, config=config, compared_with=folder if config is FULL_KL else None)
    memory = HostMemory(shared_by=1)
    groups = [dummy_group(engine.policy, LENGTHS, num_completions=26)]
    with engine.dry_run_updates() as update:
        update(groups)
        one, again, two, four = (memory.peak_bytes(lambda n=n: update(groups * n)) for n in (1, 1, 2, 4))
    assert one == again
    # With several groups, pieces of equal length are joined, which copies them; with one group
    # nothing is copied. The memory is therefore linear from two groups on. The fit over one and two
    # groups is 4.6 % too low, which is less than the headroom, and a pass of the size of the budget
    # verifies it.
    assert 0.8 * 2 * (two - one) < four - two < 1.05 * 2 * (two - one)


@pytest.mark.parametrize(
    ("config", "scoring", "updating"),
    [(KL, 1, 1), (FULL_KL, 1, 2), (with_loss(FULL_KL, use_kl_loss=False), 2, 1)],
    ids=["sampled", "in the loss", "in the reward"],
)
def test_a_pass_is_measured_with_a_reference_only_where_the_run_needs_one(tiny_model, config, scoring, updating):
    """With LoRA the policy is its own reference: it then makes two passes."""
    passes = []
    engine = make_engine(tiny_model("qwen2"), config=config, lora_rank=4)
    engine.policy.layers()[0].register_forward_pre_hook(lambda layer, inputs: passes.append(layer))
    groups = [dummy_group(engine.policy, LENGTHS, num_completions=2)]
    engine.dry_run(as_rollouts(groups))
    assert len(passes) == scoring
    passes.clear()
    with engine.dry_run_updates() as update:
        update(groups)
        assert len(passes) == updating


def test_the_memory_of_a_pass_has_the_load_of_the_experts_if_the_loss_balances_it(tiny_model):
    folder, memory = tiny_model("qwen3_moe"), HostMemory(shared_by=1)
    peaks = []
    for coefficient in (0.0, 0.1):
        engine = make_engine(folder, config=with_loss(router_aux_loss_coef=coefficient))
        groups = [dummy_group(engine.policy, LENGTHS, num_completions=26)]
        with engine.dry_run_updates() as update:
            update(groups)
            peaks.append(memory.peak_bytes(lambda update=update, groups=groups: update(groups)))
        assert all(part.grad is None for part in engine.policy.parameters())
    tokens, experts = sum(map(tokens_of, groups)), engine.policy.num_experts
    assert peaks[1] - peaks[0] >= 4 * tokens * experts


@pytest.fixture
def on_two_ranks(tiny_model, engine):
    """Return a function that gives the budgets that two ranks find with their memories."""

    def measure(memories, lengths):
        barrier, board = threading.Barrier(2, timeout=30), {}
        ranks = [ThreadRanks(rank, 2, barrier, board) for rank in range(2)]
        engines = [engine, make_engine(tiny_model("qwen2"))]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(
                lambda memory, engine, rank: budgets_on(memory, engine, lengths, ranks=rank), memories, engines, ranks
            )
        assert first.update_tokens == second.update_tokens
        return first

    return measure


def test_the_rank_with_the_least_memory_determines_the_budget_of_all(on_two_ranks, engine):
    memories = [EmulatedMemory(total=80 * GIB, free=free * GIB, peak=lambda tokens: tokens << 20) for free in (60, 30)]
    found = on_two_ranks(memories, ENOUGH)
    assert memories[0].passes == memories[1].passes
    assert found.update_tokens == budgets_on(memories[1], engine, ENOUGH).update_tokens


@pytest.mark.parametrize(
    ("peak", "passes"),
    [
        # 2140 tokens would take 2.1 of 2 GiB; 100 allocate the gradients, and 1100 are measured.
        pytest.param(lambda tokens: tokens << 20, [100, 1100, 2, 1100, 2], id="grows with the row"),
        # 2140 tokens take less than 2 * 1110 MB, since all passes have 1000 MB in common.
        pytest.param(
            lambda tokens: (1000 << 20) + (tokens << 17), [100, 1100, 2, 2140, 2200, 1100, 2, 2140, 2200], id="fixed"
        ),
    ],
)
def test_a_pass_that_may_not_fit_on_one_rank_is_made_by_none(on_two_ranks, peak, passes):
    """A rank that runs out of memory within a pass would leave the others waiting in it."""
    memories = [EmulatedMemory(total=4 * GIB, free=free * GIB, peak=peak) for free in (4, 2)]
    on_two_ranks(memories, replace(ENOUGH, update_tokens=3000, step_tokens=3000))
    assert [memory.passes for memory in memories] == [passes] * 2


def test_a_rank_without_memory_for_a_pass_raises_an_error_with_a_remedy(engine):
    class FirstOfTwo(SingleProcess):
        size = 2

    memory = EmulatedMemory(total=10 * GIB, free=GIB, peak=lambda tokens: tokens << 20)
    with pytest.raises(ConfigError, match=r"1,100 tokens ran out of memory on Emulated.*enable_gradient_checkpointing"):
        budgets_on(memory, engine, ENOUGH, ranks=FirstOfTwo())


# -- memory ----------------------------------------------------------------------------------------


def test_ranks_on_one_host_have_equal_shares_of_its_memory_which_has_to_be_readable(tmp_path):
    full, half = HostMemory(shared_by=1), HostMemory(shared_by=2)
    assert half.total_bytes == full.total_bytes // 2
    assert 0 < full.free_bytes() <= full.total_bytes
    with pytest.raises(ConfigError, match=r"auto_micro_batch.*/proc/meminfo.*set it to false"):
        HostMemory(shared_by=1, root=tmp_path / "absent")


def test_ranks_share_the_memory_of_their_container(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{2 * GIB}\n")
    memory = HostMemory(shared_by=2, root=tmp_path)
    assert (memory.total_bytes, memory.free_bytes()) == (4 * GIB, 3 * GIB)


def test_tensors_are_counted_until_they_are_freed_but_not_views_and_existing_tensors():
    weight = torch.ones(1000, requires_grad=True)
    weight.grad = torch.zeros(1000)

    def work() -> None:
        for _ in range(3):
            first = torch.zeros(1000)  # 4000 bytes, and 4000 of the one before, until that is freed; a view adds none
            first.view(10, 100)[2:].add_(1.0)
            weight.detach()[5:].clone()  # 3980, freed at once
        # 4000 for the product, freed at once, 4 for the sum, 4 for its gradient, 4000 for the
        # gradient of weight
        (weight * first).sum().backward()

    assert HostMemory(shared_by=1).peak_bytes(work) == 8_008


@pytest.mark.extended
def test_offloaded_activations_are_limited_by_the_host_memory(tiny_model):
    lengths = replace(LENGTHS, update_tokens=100_000)
    # Two layers of width 128 in float32; pinned memory takes up to four times as much.
    per_token = 4 * (2 * 128 * 4)

    def measured(host_bytes: int | None, known: Budgets | None = None) -> Budgets:
        engine, memory = make_engine(tiny_model("qwen2"), offloads_activations=True), HostMemory(shared_by=1)
        return tune_engines(engine, None, memory, lengths, SingleProcess(), known=known, host_bytes=host_bytes)

    found = measured(2700 * per_token)
    assert found.update_tokens == 1350  # half of it
    assert found.host_bytes == 1350 * per_token
    assert measured(2500 * per_token, found) is found  # a little less is free than in the run before
    assert measured(2000 * per_token, found).update_tokens == 1000
    with pytest.raises(ConfigError, match=r"100 tokens, take up to .* host memory.*enable_activation_offload=false"):
        measured(190 * per_token)
