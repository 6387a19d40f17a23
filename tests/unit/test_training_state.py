"""Tensors that go to disk from any number of processes, and come back in any other."""

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

from support.ranks import RankProcesses
from trigon.errors import CheckpointError
from trigon.training import state
from trigon.training.state import ShardedFiles, StoredTensor, load_tensors, save_tensors, copy_to_host

SHARDED = {
    "layer.weight": torch.arange(28.0).view(7, 4).sqrt(),
    "layer.bias": torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16),
    "one_row": torch.tensor([[1.0, float("inf"), -0.0]]).half(),  # the others' shards of it are empty
    "no_row": torch.zeros(0, 4),
    "turned": torch.arange(15.0).view(3, 5).t(),
}
PLAIN = {"layer.weight/step": torch.tensor(5.0), "table": torch.arange(6).view(2, 3)}
TENSORS = SHARDED | PLAIN


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with RankProcesses(3, tmp_path_factory.mktemp("meetings")) as processes:
        yield processes


def sharded(tensors=SHARDED, *, copies=1):
    """The tensors as this rank holds them: sharded by rows over the ranks, in so many copies."""
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
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    assert whole.keys() == expected.keys()
    return all(torch.equal(whole[name], expected[name]) for name in expected)


def save_on_rank(folder, copies=1):
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("error")
        save_tensors(sharded(copies=copies) | PLAIN, folder, group=dist.group.WORLD)
    return said.getvalue()


def load_on_rank(folder):
    said = io.StringIO()
    tensors = sharded(zeros()) | {name: torch.zeros_like(tensor) for name, tensor in PLAIN.items()}
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tensors(tensors, folder, group=dist.group.WORLD)
    assert same(tensors)
    return said.getvalue()


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """Return a function that gives the folder written by so many ranks: 0 is one process by itself."""
    folders = {}

    def by(ranks, copies=1):
        if (ranks, copies) not in folders:
            folder = folders[ranks, copies] = tmp_path_factory.mktemp("saved") / "weights"
            if ranks == 0:
                save_tensors(TENSORS, folder, group=None)
            else:
                assert processes.run(save_on_rank, folder, copies, ranks=ranks) == [""] * ranks
        return folders[ranks, copies]

    return by


@pytest.mark.parametrize(("writers", "copies"), [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2)])
def test_what_any_number_of_ranks_wrote_any_other_number_reads(processes, saved, writers, copies):
    folder = saved(writers, copies)
    alone = copies_of({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})
    load_tensors(alone, folder, group=None)
    assert same(alone)
    for readers in (1, 2, 3):
        assert processes.run(load_on_rank, folder, ranks=readers) == [""] * readers


@pytest.mark.parametrize(("writers", "copies"), [(0, 1), (2, 1), (3, 1), (2, 2)])
def test_the_files_are_seen_as_whole_tensors_without_any_process_group(saved, writers, copies):
    files = ShardedFiles(saved(writers, copies))
    assert list(files.tensors) == sorted(TENSORS)
    assert files.tensors["layer.weight"] == StoredTensor((7, 4), torch.float32)
    assert files.tensors["layer.bias"] == StoredTensor((3,), torch.bfloat16)
    assert files.tensors["layer.weight/step"] == StoredTensor((), torch.float32)
    assert same({name: files.read(name) for name in files.tensors})


def test_every_rank_writes_its_part_and_no_copy_is_written_twice(saved):
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


def test_files_of_others_hold_whole_tensors(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(3, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    files = ShardedFiles(tmp_path)
    assert list(files.tensors) == ["a", "b", "c"]
    assert torch.equal(files.read("b"), torch.zeros(3, 3))


def test_tensors_that_share_memory_or_skip_through_it_are_saved_one_by_one(tmp_path):
    memory = torch.arange(12.0).view(3, 4)
    tensors = {"all": memory, "again": memory, "turned": memory.t(), "column": memory[:, 1], "row": memory[1]}
    save_tensors(tensors, tmp_path / "weights", group=None)
    files = ShardedFiles(tmp_path / "weights")
    assert same({name: files.read(name) for name in files.tensors}, tensors)


def save_small_files_on_rank(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "FILE_BYTES", 40)
        save_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)


def test_a_rank_writes_several_files_when_it_has_much(processes, tmp_path):
    processes.run(save_small_files_on_rank, tmp_path, ranks=2)
    assert {path.name.partition("-model-")[2] for path in tmp_path.iterdir()} == {
        f"0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)
    }
    files = ShardedFiles(tmp_path)
    assert same({name: files.read(name) for name in files.tensors})


def no_tensors_on_rank(folder):
    save_tensors({}, folder, group=dist.group.WORLD)
    load_tensors({}, folder, group=dist.group.WORLD)


def test_no_tensors_at_all_are_something_to_save_too(processes, tmp_path):
    save_tensors({}, tmp_path / "alone", group=None)
    load_tensors({}, tmp_path / "alone", group=None)
    processes.run(no_tensors_on_rank, tmp_path / "together", ranks=2)
    assert ShardedFiles(tmp_path / "together").tensors == {}


# -- what does not fit --------------------------------------------------------------------------------------------


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


def misfit_on_rank(folder, tensors, complaint):
    held = sharded(tensors) | PLAIN
    before = {name: tensor.full_tensor().clone() for name, tensor in held.items() if isinstance(tensor, DTensor)}
    with pytest.raises(CheckpointError, match=complaint):
        load_tensors(held, folder, group=dist.group.WORLD)
    assert same({name: held[name] for name in before}, before)


@pytest.mark.parametrize(("tensors", "complaint"), MISFITS)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_touched(processes, saved, tensors, complaint):
    tensors = {name: torch.full_like(tensor, 3) for name, tensor in tensors.items()}
    held = copies_of(tensors)
    with pytest.raises(CheckpointError, match=complaint):
        load_tensors(held | PLAIN, saved(2), group=None)
    assert same(held, tensors)
    processes.run(misfit_on_rank, saved(2), tensors, complaint, ranks=2)


def cut_short(files):
    files[1].write_bytes(files[1].read_bytes()[:-3])


def of_another_save(files):
    """A first piece that three ranks would have written, beside a second one of two."""
    with safe_open(files[0], framework="pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(files[0]) | {"layer.weight": torch.zeros(3, 4)}, files[0], metadata=metadata)


def twice(files):
    shutil.copy(files[0], files[0].with_name("shard-00003-model-00001-of-00001.safetensors"))


def refused_on_rank(folder, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        load_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut_short, r"shard-00002-model-00001-of-00001\.safetensors cannot be read"),
        (of_another_save, r"the pieces of layer\.weight in .* do not form a tensor"),
        (twice, r"the pieces of .* \(.*shard-00003.*\) do not form a tensor"),
        (lambda files: files[0].unlink(), r"the pieces of layer\.\w+ in .* do not form a tensor: a file is missing"),
        (lambda files: files[1].unlink(), r"layer\.weight torch\.float32 \[4, 4\] instead of torch\.float32 \[7, 4\]"),
        (lambda files: [file.unlink() for file in files], "holds no safetensors files"),
    ],
)
def test_a_damaged_folder_is_refused_before_anything_is_touched(processes, saved, tmp_path, damage, complaint):
    shutil.copytree(saved(2), tmp_path / "weights")
    damage(sorted((tmp_path / "weights").iterdir()))
    held = copies_of(TENSORS)
    with pytest.raises(CheckpointError, match=complaint):
        load_tensors(held, tmp_path / "weights", group=None)
    assert same(held)
    processes.run(refused_on_rank, tmp_path / "weights", complaint, ranks=2)


def fail_on_one_rank(folder):
    with pytest.raises(CheckpointError, match=r"rank 1: IsADirectoryError: .*shard-00002"):
        save_tensors(sharded() | PLAIN, folder, group=dist.group.WORLD)


def test_what_fails_on_one_rank_is_an_error_on_all(processes, tmp_path):
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").mkdir()
    processes.run(fail_on_one_rank, tmp_path, ranks=2)


def save_into_folders_of_their_own(folder):
    with pytest.raises(CheckpointError, match=r"the tensors in .*/0 are not those of this run"):
        save_tensors(sharded(), folder / str(dist.get_rank()), group=dist.group.WORLD)


def test_a_folder_that_the_ranks_do_not_share_is_noticed_when_it_is_written(processes, tmp_path):
    processes.run(save_into_folders_of_their_own, tmp_path, ranks=2)


# -- staging ------------------------------------------------------------------------------------------------------


def save_behind_training_on_rank(folder):
    """Save from a thread, while tensors change and the default group is busy with other messages."""
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
        going_on = torch.tensor([float(thread.is_alive())])
        dist.all_reduce(total)
        dist.all_reduce(going_on)
        assert total.tolist() == [1.0] * 1000
        rounds += 1
        if not going_on:
            break
    thread.join()
    assert not failures
    assert same(staged)
    return {name: tensor.device.type for name, tensor in staged.items()}


def test_staged_tensors_are_written_from_a_thread_while_training_goes_on(processes, tmp_path):
    [first, _] = processes.run(save_behind_training_on_rank, tmp_path, ranks=2)
    assert first == dict.fromkeys(TENSORS, "cpu")
    for k in range(5):
        files = ShardedFiles(tmp_path / str(k))
        assert same({name: files.read(name) for name in files.tensors})
