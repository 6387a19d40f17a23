"""Offloading of the inputs of checkpointed layers: unchanged gradients, and what is kept where."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.engines import make_engine, make_rollouts, to_train, weights_of
from support.tensors import assert_equal_tensors
from trigon.metrics import values
from trigon.models import activation_offload
from trigon.models.activation_offload import DEVICE_INPUTS, ActivationOffload
from trigon.models.families import supported_model_types
from trigon.models.policy import Policy


class Inputs:
    """The inputs that are saved, in the order of the forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[weakref.ref[activation_offload._SavedInput]] = []
        original = activation_offload._SavedInput.__init__

        def init(saved, *arguments):
            original(saved, *arguments)
            self.saved.append(weakref.ref(saved))

        monkeypatch.setattr(activation_offload._SavedInput, "__init__", init)

    def on_device(self) -> list[int]:
        """Return the indices of those that are on the device."""
        found = [(index, reference()) for index, reference in enumerate(self.saved)]
        return [index for index, saved in found if saved is not None and saved._on_device is not None]

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.saved)


@pytest.fixture
def inputs(monkeypatch) -> Inputs:
    return Inputs(monkeypatch)


def language_layers(policy: Policy) -> list[nn.Module]:
    return [*policy.family.language_model(policy.model).layers]


LORA, FROZEN = {"lora_rank": 2}, {"freeze": True}
CASES = {f"all-{family}": (family, {}) for family in supported_model_types()} | {
    "lora-qwen2_5_vl": ("qwen2_5_vl", LORA),
    "frozen-qwen2_5_vl": ("qwen2_5_vl", FROZEN),
    "lora-frozen-qwen3_vl_moe": ("qwen3_vl_moe", LORA | FROZEN),
    "lora-qwen3": ("qwen3", LORA),
}


@pytest.mark.extended(but=["all-qwen2_5_vl"])
@pytest.mark.long(but=["all-qwen2_5_vl", "lora-qwen2_5_vl", "all-qwen3_5", "all-gemma4", "lora-frozen-qwen3_vl_moe"])
@pytest.mark.parametrize(("model_type", "options"), CASES.values(), ids=CASES)
def test_updates_are_the_same_bit_for_bit(tiny_model, inputs, model_type, options):
    folder = tiny_model(model_type)
    groups = to_train(make_rollouts(folder))
    kept = make_engine(folder, checkpointing=True, max_tokens=45, **options)
    offloaded = make_engine(folder, offloads_activations=True, max_tokens=45, **options)
    for _ in range(2):
        assert values(kept.step(groups)) == values(offloaded.step(groups))
    assert_equal_tensors(weights_of(kept), weights_of(offloaded))
    layers = offloaded.policy.layers() if "freeze" not in options else language_layers(offloaded.policy)
    assert len(inputs.saved) % len(layers) == 0 or model_type == "llava"  # the last block of its tower is not used
    assert len(inputs.saved) > 0
    assert inputs.alive() == 0


class Doubled(nn.Linear):
    """A layer that keeps more than its input."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).sin().exp()


def through(layers: list[nn.Module], states: Tensor, offload: ActivationOffload | None) -> Tensor:
    for layer in layers:
        states = layer(states) if offload is None else offload.checkpoint(layer, states)
    return states


@pytest.fixture
def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Doubled(3, 3) for _ in range(5)]


def test_an_input_comes_back_while_the_layer_above_computes(inputs, layers):
    on_device: list[list[int]] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: on_device.append(inputs.on_device()))
    states = through(layers, torch.randn(2, 3), ActivationOffload())
    assert on_device == [[0], [1], [2], [3], [4]]
    on_device.clear()
    states.sum().backward()
    # Each layer has its own input, to which the graph refers, beside the next one's.
    assert on_device == [[3], [2], [1], [0], []]
    assert max(map(len, on_device)) + 1 == DEVICE_INPUTS
    assert inputs.alive() == 0


@pytest.mark.extended
def test_a_graph_without_a_backward_frees_what_it_saved(inputs, layers):
    offload = ActivationOffload()
    through(layers, torch.randn(2, 3), offload)
    gc.collect()
    assert (len(inputs.saved), inputs.alive()) == (5, 0)
    with torch.no_grad():
        through(layers, torch.randn(2, 3), offload)
    assert len(inputs.saved) == 5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_graphs_that_live_at_a_time_do_not_mix(layers, order):
    rows = torch.randn(2, 4, 3, requires_grad=True)
    expected = torch.autograd.grad(through(layers, rows, None).sum(), rows)[0]
    offload = ActivationOffload()
    graphs = [through(layers, rows[index], offload).sum() for index in range(2)]
    for index in order:
        [gradient] = torch.autograd.grad(graphs[index], rows, retain_graph=True)
        assert torch.equal(gradient[index], expected[index])
        assert torch.equal(torch.autograd.grad(graphs[index], rows)[0], gradient)  # a second backward


def test_an_input_that_is_changed_in_place_is_an_error(layers):
    states = torch.randn(2, 3, requires_grad=True) * 1.0
    offload = ActivationOffload()
    output = offload.checkpoint(layers[0], states)
    states.add_(1.0)
    with pytest.raises(AssertionError, match="changed in place"):
        offload.checkpoint(layers[1], output)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_gradients_are_the_same_and_two_inputs_are_on_the_device():
    torch.manual_seed(0)
    stack = [Doubled(1024, 1024).cuda() for _ in range(12)]
    rows = torch.randn(2**14, 1024, device="cuda", requires_grad=True)
    offload = ActivationOffload()
    peaks: list[int] = []

    def gradients(apply: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        torch.cuda.reset_peak_memory_stats()
        states = rows * 1.0
        for layer in stack:
            states = apply(layer, states)
        found = torch.autograd.grad(states.sum(), [rows, *(part for layer in stack for part in layer.parameters())])
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        return list(found)

    expected = gradients(partial(checkpoint, use_reentrant=False))
    for _ in range(3):  # host memory is used again
        assert all(torch.equal(*pair) for pair in zip(gradients(offload.checkpoint), expected, strict=True))
    assert peaks[0] - max(peaks[1:]) > (12 - DEVICE_INPUTS - 1) * rows.nbytes
