"""Tensors that vLLM loses while it sleeps, other than parameters and buffers."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh

from trigon.rollout.vllm.sleep import find_state


class Model(nn.Module):
    """A model with tensors in every place where vLLM's models and runners keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.0))
        self.register_buffer("table", torch.full((4,), 2.0), persistent=False)
        self.embeds = [torch.full((2, 3), 3.0), torch.full((2, 3), 4.0)]
        self.cache = {"positions": torch.arange(5), "view": self.embeds[0][1:]}
        self.alias = self.weight.data[:2]


def sleep(*tensors: torch.Tensor) -> None:
    """Overwrite the memory, as the next user of the pages does."""
    for tensor in tensors:
        tensor.untyped_storage().fill_(0xFF)


def num_bytes(storages):
    return sum(storage.nbytes() for storage in storages if storage is not None)


def dropped(*tensors: torch.Tensor):
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return lambda storage: storage.data_ptr() in addresses


def test_tensors_other_than_parameters_and_buffers_survive_a_sleep():
    model, runner = Model(), {"inputs": (torch.full((6,), 5.0),)}
    everything = (model.weight, model.table, *model.embeds, model.cache["positions"], *runner["inputs"])
    state = find_state(model, dropped(*everything))
    # Two lists of 2 x 3 and a tuple of 6 in float32, and 5 positions in int64; the views share
    # their memory.
    assert num_bytes(state.storages) == num_bytes(state.saved) == 4 * (6 + 6 + 6) + 8 * 5
    sleep(*everything)
    assert model.embeds[1].isnan().all()
    state.restore()
    assert model.embeds[0].tolist() == [[3.0] * 3] * 2
    assert model.embeds[1].tolist() == [[4.0] * 3] * 2
    assert model.cache["positions"].tolist() == [0, 1, 2, 3, 4]
    assert model.cache["view"].tolist() == [[3.0] * 3]
    assert runner["inputs"][0].tolist() == [5.0] * 6
    # A weight sync loads these, and vLLM restores the buffers.
    assert model.weight.isnan().all()
    assert model.table.isnan().all()


@pytest.mark.extended
def test_every_waking_restores_the_values_of_the_start():
    model = Model()
    model.embeds[1].zero_()
    state = find_state(model, dropped(*model.embeds))
    assert (num_bytes(state.storages), num_bytes(state.saved)) == (2 * 24, 24)  # zeros need no copy
    for _ in range(2):
        model.embeds[0].fill_(9.0)  # a batch between two sleeps
        sleep(*model.embeds)
        state.restore()
        assert model.embeds[0].eq(3.0).all()
        assert model.embeds[1].eq(0.0).all()


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.extended
def test_tensors_of_the_trainer_without_memory_of_their_own_are_passed_over(process_group):
    mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(torch.zeros(3), mesh)
    on_meta, sparse = torch.zeros(3, device="meta"), torch.zeros(3, 3).to_sparse()
    gc.collect()
    state = find_state(Model(), dropped(sharded.to_local()))
    assert num_bytes(state.storages) == 3 * 4  # of the local tensor, which is a plain one
    assert (on_meta.is_meta, sparse.is_sparse) == (True, True)
