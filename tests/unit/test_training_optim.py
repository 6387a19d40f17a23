"""The learning-rate schedule and the optimizers, by hand."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trigon.config.schema import OptimConfig
from trigon.training.device_memory import HostMemory
from trigon.training.optim import AdamWBf16, Schedule, empty_state, make_optimizer, move_states, update_bytes


def test_the_learning_rate_warms_up_and_falls_as_a_cosine_to_its_minimum():
    def rates(*updates, warmup_updates=0, total_updates=10, **options):
        schedule = Schedule(OptimConfig(lr=1.0, **options), warmup_updates, total_updates)
        return [schedule.learning_rate(update) for update in updates]

    assert rates(1, 2, 3, 4, 5, 6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(1) == [1.0]
    cosine = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
    expected = [1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.1 + 0.9 * 0.5, 0.1, 0.1]
    assert rates(1, 2, 3, 5, 9, total_updates=4, **cosine) == pytest.approx(expected)
    assert rates(1, 2, 3, 4, warmup_updates=2, total_updates=6, **cosine)[1:] == pytest.approx([1.0, *expected[:2]])


@pytest.mark.parametrize(("warmup_updates", "total_updates"), [(0, 1), (0, 7), (3, 7), (6, 7), (7, 7)])
def test_no_update_of_a_run_has_a_learning_rate_of_0(warmup_updates, total_updates):
    schedule = Schedule(OptimConfig(lr=1.0, lr_scheduler_type="cosine"), warmup_updates, total_updates)
    assert all(schedule.learning_rate(update) > 0.01 for update in range(1, total_updates + 1))


def test_only_matrices_have_weight_decay_and_frozen_parameters_are_not_in_the_optimizer():
    layer, frozen = nn.Linear(2, 2), nn.Parameter(torch.ones(2), requires_grad=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(1.0)
    optimizer = make_optimizer(
        [*layer.parameters(), frozen], OptimConfig(strategy="adamw", lr=0.1, betas=(0.9, 0.999), weight_decay=0.5)
    )
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(layer.weight.data, torch.full((2, 2), 0.95))
    torch.testing.assert_close(layer.bias.data, torch.ones(2))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_bf16_adamw_of_float32_parameters_equals_adamw_and_keeps_no_low_bits():
    target, trained = torch.linspace(-1, 1, 16).reshape(4, 4), {}
    for strategy in ("adamw_bf16", "adamw"):
        parameter = trained[strategy] = nn.Parameter(torch.zeros(4, 4))
        optimizer = adamw_of(parameter, strategy)
        for _ in range(20):
            parameter.grad = parameter.detach() - target
            optimizer.step()
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(trained["adamw_bf16"], trained["adamw"], rtol=1e-4, atol=1e-6)


def adamw_of(parameter, strategy="adamw"):
    return make_optimizer([parameter], OptimConfig(strategy=strategy, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_update_of_adamw_allocates_no_temporaries(device):
    memory = HostMemory(shared_by=1)
    with FakeTensorMode():  # of which no device has to exist
        parameter = nn.Parameter(torch.zeros(64, 64, device=device))
        optimizer = adamw_of(parameter)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert memory.peak_bytes(optimizer.step) == update_bytes([parameter], "adamw") == 0


def test_the_step_count_of_adamw_stays_on_the_device_of_the_fused_kernel_when_states_are_offloaded():
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(4, 4, device="cuda"))
        optimizer = adamw_of(parameter)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        on_gpu = {"step": "cuda", "exp_avg": "cuda", "exp_avg_sq": "cuda"}
        assert {key: value.device.type for key, value in optimizer.state[parameter].items()} == on_gpu
        move_states(optimizer, torch.device("cpu"))
        offloaded = {"step": "cuda", "exp_avg": "cpu", "exp_avg_sq": "cpu"}
        assert {key: value.device.type for key, value in optimizer.state[parameter].items()} == offloaded
        move_states(optimizer, torch.device("cuda:0"))
        assert {key: value.device.type for key, value in optimizer.state[parameter].items()} == on_gpu
        optimizer.step()


@pytest.mark.parametrize(("strategy", "step_device"), [("adamw", "meta"), ("adamw_bf16", "cpu")])
def test_the_step_count_of_a_loaded_state_is_on_the_device_that_reads_it(strategy, step_device):
    """The fused kernel of adamw reads it on the device of the parameter, here "meta" for a GPU."""
    state = empty_state(torch.empty(4, 4, device="meta"), strategy)
    devices = {key: value.device.type for key, value in state.items()}
    assert devices == {"step": step_device, "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_an_update_of_bf16_adamw_reads_no_number_from_the_device():
    """A tensor on "meta", here for a GPU, has no values: reading one raises."""
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"))
    optimizer = adamw_of(parameter, "adamw_bf16")
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    state = optimizer.state[parameter]
    assert {key for key, value in state.items() if value.device.type == "cpu"} == {"step"}
    assert float(state["step"]) == 2.0


@pytest.mark.extended(but=["shape1-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(37,), (8, 129), (3, 5, 7, 11), (0, 4)])
def test_slices_do_not_change_the_update_of_bf16_adamw_bit_for_bit(shape, dtype):
    def train(slice_values, *, transposed):
        generator = torch.Generator().manual_seed(0)

        def values():
            drawn = torch.randn(shape, generator=generator).to(dtype)
            return drawn.mT.contiguous().mT if transposed and len(shape) > 1 else drawn

        parameter = nn.Parameter(values())
        groups = [{"params": [parameter], "weight_decay": 0.01}]
        optimizer = AdamWBf16(groups, learning_rate=1e-3, betas=(0.9, 0.999), slice_values=slice_values)
        for _ in range(3):
            parameter.grad = values()
            optimizer.step()
        return {"weight": parameter.detach(), **optimizer.state[parameter]}

    at_once = train(2**24, transposed=False)
    for slice_values, transposed in ((1, False), (10, True), (100, False)):
        in_slices = train(slice_values, transposed=transposed)
        assert [key for key in at_once if not torch.equal(in_slices[key], at_once[key])] == []


def test_the_temporaries_of_bf16_adamw_are_those_of_one_slice():
    memory = HostMemory(shared_by=1)
    parameter = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    optimizer = adamw_of(parameter, "adamw_bf16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert memory.peak_bytes(optimizer.step) == update_bytes([parameter], "adamw_bf16") == 12 * 10_000
    sliced = AdamWBf16(optimizer.param_groups, learning_rate=1e-3, betas=(0.9, 0.999), slice_values=500)
    sliced.step()
    assert memory.peak_bytes(sliced.step) == 12 * 500
    with torch.device("meta"):  # of a layer of 72B
        assert update_bytes([torch.empty(152_064, 8_192)], "adamw_bf16") == 12 * 2**24


def start_weights():
    """Return 0 and numbers of both signs from 1e-30 to 100, in float32, that bfloat16 has too."""
    sizes = torch.logspace(-30, 2, 63)
    return torch.cat([torch.zeros(2), sizes, -sizes]).bfloat16().float().reshape(8, 16)


def gradients(updates):
    """Yield gradients with a direction, and noise, as in training."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(8, 16, generator=generator)
    for _ in range(updates):
        yield (direction + torch.randn(8, 16, generator=generator)).bfloat16()


def bf16_optimizer(parameter, learning_rate, weight_decay=0.0):
    return make_optimizer(
        [parameter], OptimConfig(strategy="adamw_bf16", lr=learning_rate, betas=(0.9, 0.999), weight_decay=weight_decay)
    )


def float32_weight(parameter, optimizer):
    """Return the weight that parameter and low bits are two halves of."""
    high, low = parameter.detach().view(torch.int16).int(), optimizer.state[parameter]["low_bits"].int()
    return ((high << 16) + low).view(torch.float32)


@pytest.mark.extended(but=["1e-06"])
@pytest.mark.parametrize("learning_rate", [1e-6, 1e-3])
def test_bf16_adamw_updates_weights_as_float32_bit_for_bit(learning_rate):
    exact = nn.Parameter(start_weights())
    parameter = nn.Parameter(start_weights().bfloat16())
    options = {"lr": learning_rate, "betas": (0.9, 0.999), "weight_decay": 0.01}
    reference = torch.optim.AdamW([exact], foreach=False, fused=False, **options)
    optimizer = bf16_optimizer(parameter, learning_rate, weight_decay=0.01)
    for update, gradient in enumerate(gradients(3000)):
        parameter.grad, exact.grad = gradient.clone(), gradient.float()
        optimizer.step()
        reference.step()
        first = reference.state[exact]["exp_avg"]
        first.copy_(first.bfloat16())  # the only state with less than float32
        if update % 100 == 99:
            assert torch.equal(float32_weight(parameter, optimizer), exact.detach()), update
    spacing = torch.maximum(exact.abs() * 2**-7, torch.tensor(1e-38))
    assert ((parameter.float() - exact).abs() <= spacing / 2).all()
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], reference.state[exact]["exp_avg_sq"])


def test_bf16_adamw_does_not_hide_a_weight_that_is_not_a_number():
    # This nan, which GPUs compute, would become -0.0 if its bits were rounded like those of a
    # number.
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = bf16_optimizer(parameter, 1e-3)
    for gradient in (torch.zeros(1), nan):
        parameter.grad = gradient.bfloat16()
        optimizer.step()
    assert parameter.isnan().all()
