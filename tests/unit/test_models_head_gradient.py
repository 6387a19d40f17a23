"""The head's gradient on a GPU: added up in float32, without temporaries of its size.

The GPU is the device of support.device, with and without the product of torch for CUDA that adds
to a float32 matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from support.device import HostWaits, OnDevice
from trigon.models import logprobs
from trigon.models.logprobs import token_logprobs

VOCABULARY, WIDTH, TOKENS = 600, 32, 40
TARGETS = torch.arange(TOKENS) * 7
aten = torch.ops.aten


class AddsInFloat32(TorchDispatchMode):
    """Has addmm with an output dtype, as CUDA does."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is aten.addmm.dtype_out:
            total, left, right, dtype = args
            assert dtype == total.dtype == torch.float32
            assert kwargs["out"] is total
            self.calls += 1
            return total.addmm_(left.float(), right.float())
        return func(*args, **(kwargs or {}))


class LargestTemporary(TorchDispatchMode):
    """Records the bytes of the largest new tensor."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_iter(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in known:
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return result


@pytest.fixture(autouse=True)
def _tried_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logprobs, "_SLICE_ROWS", 64)
    logprobs._adds_in_float32.cache_clear()
    yield
    logprobs._adds_in_float32.cache_clear()


@pytest.mark.parametrize("adds", [True, False], ids=["adds in float32", "in slices"])
def test_a_product_is_added_without_a_temporary_of_its_size(adds: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(TOKENS, n, generator=generator).bfloat16() for n in (VOCABULARY, WIDTH))
    total = torch.randn(VOCABULARY, WIDTH, generator=generator)
    expected = total.double() + left.double().T @ right.double()
    on_device = OnDevice(total)
    with ExitStack() as modes:
        product = modes.enter_context(AddsInFloat32()) if adds else None
        temporary = modes.enter_context(LargestTemporary())
        modes.enter_context(HostWaits())
        logprobs._add_product(on_device, OnDevice(left), OnDevice(right))
    assert product is None or product.calls == 2  # the first is the trial
    # 16 x 16 float32 of the trial, or one slice.
    assert temporary.num_bytes == (16 * 16 * 4 if adds else 64 * WIDTH * 2)
    error = (on_device.host.double() - expected).norm() / expected.norm()
    assert error < (1e-6 if adds else 3e-3)


@pytest.mark.parametrize("adds", [True, False], ids=["adds in float32", "in slices"])
def test_the_gradient_of_the_head_is_that_of_float64(adds: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, WIDTH, generator=generator).bfloat16() for n in (TOKENS, VOCABULARY))

    def gradient(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        head = head.detach().requires_grad_()
        scored = token_logprobs(
            states,
            head,
            targets,
            temperature=0.7,
            banned_token_ids=(3,),
            entropy_gradient=False,
            chunk_tokens=16,
        )
        scored.logprobs.sum().backward()
        assert head.grad is not None
        return head.grad

    expected = gradient(states.double(), head.double(), TARGETS)
    with ExitStack() as modes:
        if adds:
            modes.enter_context(AddsInFloat32())
        modes.enter_context(HostWaits())
        found = gradient(OnDevice(states), OnDevice(head), OnDevice(TARGETS))
    assert isinstance(found, OnDevice)
    assert found.dtype == torch.bfloat16
    assert (found.host.double() - expected).norm() < 2e-2 * expected.norm()  # logits are rounded to bfloat16


def test_a_backward_on_the_meta_device_computes_shapes() -> None:
    """Where memory is computed there are no values to try a product with."""
    meta = torch.device("meta")
    states, head = (torch.empty(n, WIDTH, dtype=torch.bfloat16, device=meta) for n in (TOKENS, VOCABULARY))
    head.requires_grad_()
    targets = torch.empty(TOKENS, dtype=torch.int64, device=meta)
    scored = token_logprobs(
        states, head, targets, temperature=0.7, banned_token_ids=(3,), entropy_gradient=True, chunk_tokens=16
    )
    scored.logprobs.sum().backward()
    assert head.grad is not None
    assert head.grad.shape == head.shape
