"""Tensors that any number of processes save, and any other number loads."""

import io
import shutil
import threading
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trigon.errors import CheckpointError, PeerError
from trigon.training import state
from trigon.training.state import ShardedFiles, StoredTensor, copy_to_host, load_tensors, save_tensors

SHARDED = {
    "layer.weight": torch.arange(28.0).view(7, 4).sqrt(),
    "layer.bias": torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16),
    "one_row": torch.tensor([[1.0, float("inf"), -0.0]]).half(),  # the shards of the other ranks are empty
    "no_row": torch.zeros(0, 4),
    "transposed": torch.arange(15.0).view(3, 5).t(),
}
PLAIN = {"layer.weight/step": torch.tensor(5.0), "table": torch.arange(6).view(2, 3)}
TENSORS = SHARDED | PLAIN


def sharded(tensors=SHARDED, *, copies=1):
    """Return this rank's tensors, sharded by rows. copies: of each tensor over all ranks."""
    if copies == 1:
        mesh, placements = init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copy", "shard"))
        placements = [Replicate(), Shard(0)]
    return {name: distribute_tensor(tensor.clone(), mesh, placements) for name, tensor in tensors.items()}


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in SHARDED.items()}


def copies_of(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(tensors, expected=TENSORS):
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    assert full.keys() == expected.keys()
    return all(torch.equal(full[name], expected[name]) for name in expected)


def save_on_rank(folder, copies=1):
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("error")
        save_tensors(sharded(copies=copies) | PLAIN, folder, group=dist.group.WORLD)
    return output.getvalue()


def load_on_rank(folder):
    output = io.StringIO()
    tensors = sharded(zeros()) | {name: torch.zeros_like(tensor) for name, tensor in PLAIN.items()}
    with redirect_stdout(output), redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tensors(tensors, folder, group=dist.group.WORLD)
    assert same(tensors)
    return output.getvalue()


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """Return a function that returns the folder of a save.

    ranks: that wrote it; 0: a process without a process group.
    """
    folders = {}

    def saved_by(ranks, copies=1):
        if (ranks, copies) not in folders:
            folder = folders[ranks, copies] = tmp_path_factory.mktemp("saved") / "weights"
            if ranks == 0:
                save_tensors(TENSORS, folder, group=None)
            else:
                assert processes.run(save_on_rank, folder, copies, ranks=ranks) == [""] * ranks
        return folders[ranks, copies]

    return saved_by


@pytest.mark.extended(but=["2-1"])
@pytest.mark.parametrize(("writers", "copies"), [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2)])
def test_any_number_of_ranks_loads_what_any_number_saved(processes, saved, writers, copies):
    folder = saved(writers, copies)
    files = ShardedFiles(folder)
    assert files.tensors == {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(TENSORS.items())
    }
    assert same({name: files.read(name) for name in files.tensors})
    loaded = copies_of({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})
    load_tensors(loaded, folder, group=None)
    assert same(loaded)
    for readers in (1, 2, 3):
        assert processes.run(load_on_rank, folder, ranks=readers) == [""] * readers


def test_every_rank_writes_its_shards_and_copies_are_written_once(saved):
    assert sorted(path.name for path in saved(2).iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    first, second = (load_file(path) for path in sorted(saved(2).iterdir()))
    assert first["layer.weight"].shape == (4, 4)
    assert second["layer.weight"].shape == (3, 4)
    assert not first.keys() & second.keys() & PLAIN.keys()
    copied = [load_file(path) for path in sorted(saved(2, copies=2).iterdir())]
    assert sorted(name for file in copied for name in file) == sorted(TENSORS)


def test_files_without_offsets_have_full_tensors(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(3, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    files = ShardedFiles(tmp_path)
    assert list(files.tensors) == ["a", "b", "c"]
    assert torch.equal(files.read("b"), torch.zeros(3, 3))


def test_tensors_with_strided_memory_are_saved(tmp_path):
    tensors = {"transposed": torch.arange(12.0).view(3, 4).t(), "column": torch.arange(12.0).view(3, 4)[:, 1]}
    save_tensors(tensors, tmp_path / "weights", group=None)
    files = ShardedFiles(tmp_path / "weights")
    assert same({name: files.read(name) for name in files.tensors}, tensors)


def save_small_files_on_rank(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "FILE_BYTES", 40)
        save_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)


def test_a_rank_with_many_tensors_writes_several_files(processes, tmp_path):
    processes.run(save_small_files_on_rank, tmp_path, ranks=2)
    assert {path.name.partition("-model-")[2] for path in tmp_path.iterdir()} == {
        f"0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)
    }
    files = ShardedFiles(tmp_path)
    assert same({name: files.read(name) for name in files.tensors})


def no_tensors_on_rank(folder):
    save_tensors({}, folder, group=dist.group.WORLD)
    load_tensors({}, folder, group=dist.group.WORLD)


def test_an_empty_set_of_tensors_can_be_saved_and_loaded(processes, tmp_path):
    save_tensors({}, tmp_path / "single", group=None)
    load_tensors({}, tmp_path / "single", group=None)
    processes.run(no_tensors_on_rank, tmp_path / "together", ranks=2)
    assert ShardedFiles(tmp_path / "together").tensors == {}


# -- errors ----------------------------------------------------------------------------------------


def without(name):
    return {key: tensor for key, tensor in SHARDED.items() if key != name}


MISFITS = [
    (SHARDED | {"new": torch.zeros(2)}, r"missing \['new'\], unknown \[\].*\(1, 0 and 0 in total\)"),
    (without("one_row"), r"missing \[\], unknown \['one_row'\]"),
    (
        SHARDED | {"layer.weight": torch.zeros(7, 3)},
        r"layer\.weight torch\.float32 \[7, 4\] instead of torch\.float32 \[7, 3\]",
    ),
    (SHARDED | {"layer.bias": torch.zeros(3)}, r"layer\.bias torch\.bfloat16 \[3\] instead of torch\.float32 \[3\]"),
]


def misfit_on_rank(folder, tensors, message):
    held = sharded(tensors) | PLAIN
    before = {name: tensor.full_tensor().clone() for name, tensor in held.items() if isinstance(tensor, DTensor)}
    with pytest.raises(CheckpointError, match=message):
        load_tensors(held, folder, group=dist.group.WORLD)
    assert same({name: held[name] for name in before}, before)


@pytest.mark.parametrize(("tensors", "message"), MISFITS)
def test_tensors_that_do_not_match_are_listed_and_nothing_is_loaded(processes, saved, tensors, message):
    tensors = {name: torch.full_like(tensor, 3) for name, tensor in tensors.items()}
    held = copies_of(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(held | PLAIN, saved(2), group=None)
    assert same(held, tensors)
    processes.run(misfit_on_rank, saved(2), tensors, message, ranks=2)


def truncate(files):
    files[1].write_bytes(files[1].read_bytes()[:-3])


def mix_saves(files):
    """Combine the first piece of a save on three ranks with the second piece of a save on two."""
    with safe_open(files[0], framework="pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(files[0]) | {"layer.weight": torch.zeros(3, 4)}, files[0], metadata=metadata)


def duplicate(files):
    shutil.copy(files[0], files[0].with_name("shard-00003-model-00001-of-00001.safetensors"))


def fail_to_load_on_rank(folder, message):
    with pytest.raises(CheckpointError, match=message):
        load_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"shard-00002-model-00001-of-00001\.safetensors cannot be read"),
        (mix_saves, r"the pieces of layer\.weight in .* do not form a tensor"),
        (duplicate, r"the pieces of .* \(.*shard-00003.*\) do not form a tensor"),
        (lambda files: files[0].unlink(), r"the pieces of layer\.\w+ in .* do not form a tensor: a file is missing"),
        (lambda files: files[1].unlink(), r"layer\.weight torch\.float32 \[4, 4\] instead of torch\.float32 \[7, 4\]"),
        (lambda files: [file.unlink() for file in files], "holds no safetensors files"),
    ],
)
def test_a_damaged_folder_raises_an_error_and_nothing_is_loaded(processes, saved, tmp_path, damage, message):
    shutil.copytree(saved(2), tmp_path / "weights")
    damage(sorted((tmp_path / "weights").iterdir()))
    held = copies_of(TENSORS)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(held, tmp_path / "weights", group=None)
    assert same(held)
    processes.run(fail_to_load_on_rank, tmp_path / "weights", message, ranks=2)


def fail_on_one_rank(folder):
    kind, rank = (PeerError, "rank 1: ") if dist.get_rank() == 0 else (CheckpointError, "")
    with pytest.raises(CheckpointError, match=rf"{folder}: {rank}IsADirectoryError: .*shard-00002") as caught:
        save_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)
    assert caught.type is kind


def test_an_error_on_one_rank_is_raised_on_all_and_says_whose_it_is(processes, tmp_path):
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").mkdir()
    processes.run(fail_on_one_rank, tmp_path, ranks=2)


def save_to_separate_folders(folder):
    with pytest.raises(CheckpointError, match=r"the tensors in .*/0 are not the tensors of this run"):
        save_tensors(sharded(), folder / str(dist.get_rank()), group=dist.group.WORLD)


def test_saving_to_a_folder_that_the_ranks_do_not_share_raises_an_error(processes, tmp_path):
    processes.run(save_to_separate_folders, tmp_path, ranks=2)


# -- saving in the background ----------------------------------------------------------------------


def save_in_the_background_on_rank(folder):
    """Save from a thread while the tensors change and the default group runs other collectives."""
    group = dist.new_group(backend="gloo")
    tensors = sharded() | copies_of(PLAIN)
    staged = copy_to_host(tensors)
    failures = []

    def write():
        try:
            for k in range(5):
                save_tensors(staged, folder / str(k), group=group)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=write)
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds < 100:
        for tensor in tensors.values():
            tensor.add_(1)
        total = torch.ones(1000) * dist.get_rank()
        is_alive = torch.tensor([float(thread.is_alive())])
        dist.all_reduce(total)
        dist.all_reduce(is_alive)
        assert total.tolist() == [1.0] * 1000
        rounds += 1
        if not is_alive:
            break
    thread.join()
    assert not failures
    assert same(staged)
    return {name: tensor.device.type for name, tensor in staged.items()}


def test_copies_in_host_memory_are_written_from_a_thread_while_training_continues(processes, tmp_path):
    [first, _] = processes.run(save_in_the_background_on_rank, tmp_path, ranks=2)
    assert first == dict.fromkeys(TENSORS, "cpu")
    for k in range(5):
        files = ShardedFiles(tmp_path / str(k))
        assert same({name: files.read(name) for name in files.tensors})
