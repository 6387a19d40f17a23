import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trigon.checkpoint.store import CheckpointStore, open_checkpoint, unsealed
from trigon.errors import CheckpointError


def writer(value, *, optimizer=True):
    def write(actor: Path):
        save_file({"layer.weight": torch.full((4, 4), float(value))}, actor / "weights.safetensors")
        if optimizer:
            save_file({"layer.weight.exp_avg": torch.full((4, 4), float(value))}, actor / "optimizer.safetensors")
        (actor / "state.json").write_text(json.dumps({"optimizer_steps": value}))
        (actor / "huggingface").mkdir()
        (actor / "huggingface" / "config.json").write_text('{"model_type": "tiny"}')

    return write


def save(store, step, score=None, **options):
    return store.save(step, write=writer(step, **options), progress={"next_prompt": step * 8, "lr": 0.1}, score=score)


def steps(root):
    return sorted(int(folder.name.removeprefix("global_step_")) for folder in root.glob("global_step_*"))


@pytest.fixture
def heard():
    return []


@pytest.fixture
def store(tmp_path, heard):
    return CheckpointStore(tmp_path / "run", keep=-1, warn=heard.append)


def test_what_was_saved_comes_back(store, tmp_path):
    saved = save(store, 5, score=0.75)
    assert saved == store.latest()
    assert saved.folder == tmp_path / "run" / "global_step_5"
    assert (saved.step, saved.score, saved.progress) == (5, 0.75, {"next_prompt": 40, "lr": 0.1})
    assert torch.equal(load_file(saved.actor / "weights.safetensors")["layer.weight"], torch.full((4, 4), 5.0))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_5"]


def test_every_file_is_in_the_manifest_with_its_size_and_hash(store):
    folder = save(store, 5).folder
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(files) == [
        "actor/huggingface/config.json",
        "actor/optimizer.safetensors",
        "actor/state.json",
        "actor/weights.safetensors",
        "progress.json",
    ]
    digest = "8e9d21a8818ac672ea522cbb09b8a360ffbda0bffac44409136b5a4b11f685a9"
    assert files["actor/huggingface/config.json"] == {"bytes": 22, "sha256": digest}


def test_no_checkpoint_at_all_is_none(store):
    assert store.latest() is None
    assert store.best() is None


def test_the_tracker_names_the_last_and_the_best_as_easyr1_does(store, tmp_path):
    for step, score in ((1, 0.25), (2, 0.5), (3, 0.5), (4, None), (5, float("nan"))):
        save(store, step, score=score)
    assert json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text()) == {
        "last_global_step": 5,
        "best_global_step": 2,
        "best_val_reward_score": 0.5,
    }
    assert store.best().step == 2
    assert store.latest().step == 5


def test_a_step_that_was_not_validated_is_never_the_best(store, tmp_path):
    save(store, 1)
    tracker = json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text())
    assert tracker["best_global_step"] is None
    assert store.best() is None


@pytest.mark.parametrize(
    ("keep", "scores", "left"),
    [
        (1, [None, None, None], [3]),
        (1, [0.9, 0.1, 0.2], [1, 3]),  # the best and the newest
        (1, [0.1, 0.2, 0.3], [3]),
        (2, [0.9, 0.1, 0.2, 0.3], [1, 4]),
        (2, [0.1, 0.1, 0.1, 0.9], [3, 4]),
        (3, [0.9, 0.1, 0.2, 0.3, 0.4], [1, 4, 5]),
        (0, [None, None], [1, 2]),
        (-1, [None, None, None], [1, 2, 3]),
    ],
)
def test_old_ones_are_pruned_but_never_the_newest_or_the_best(tmp_path, keep, scores, left):
    store = CheckpointStore(tmp_path, keep=keep)
    for step, score in enumerate(scores, start=1):
        save(store, step, score=score)
    assert steps(tmp_path) == left


def test_retention_is_enforced_after_a_resume_with_a_lower_limit(tmp_path):
    for step in range(1, 6):
        save(CheckpointStore(tmp_path, keep=-1), step)
    save(CheckpointStore(tmp_path, keep=2), 6)
    assert steps(tmp_path) == [5, 6]


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, Path.unlink])
@pytest.mark.parametrize(
    "name", ["actor/weights.safetensors", "actor/optimizer.safetensors", "progress.json", "manifest.json"]
)
def test_a_damaged_newest_falls_back_to_the_previous_good_one_loudly(store, heard, damage, name):
    save(store, 1)
    damage(save(store, 2).folder / name)
    assert store.latest().step == 1
    assert len(heard) == 1
    assert "DAMAGED CHECKPOINT" in heard[0]
    assert "global_step_2" in heard[0]
    assert "global_step_1, is used" in heard[0]


def test_a_damaged_one_named_by_the_user_is_an_error(store):
    save(store, 1)
    folder = save(store, 2).folder
    flip_a_byte(folder / "actor" / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors has other contents than were saved"):
        open_checkpoint(folder, resumable=True)


def test_when_all_are_damaged_a_run_does_not_silently_start_anew(store):
    for step in (1, 2):
        truncate(save(store, step).actor / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        store.latest()


@pytest.mark.parametrize("tracker", [None, '{"last_global_step": 1', '{"last_global_step": 99}'])
def test_a_missing_torn_or_late_tracker_costs_nothing(store, tmp_path, tracker):
    save(store, 1, score=0.5)
    save(store, 2, score=0.25)
    path = tmp_path / "run" / "checkpoint_tracker.json"
    path.unlink() if tracker is None else path.write_text(tracker)
    assert store.latest().step == 2
    assert store.best().step == 1
    save(store, 3)
    assert json.loads(path.read_text())["best_global_step"] == 1


def test_a_disk_that_fills_while_writing_leaves_the_previous_one_and_no_trace(store, tmp_path):
    save(store, 1)

    def write(actor: Path):
        (actor / "weights.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"the disk became full while .*global_step_2"):
        store.save(2, write=write, progress={}, score=None)
    assert store.latest().step == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_1"]


def test_any_other_failure_of_the_writer_is_passed_on_and_leaves_no_trace(store, tmp_path):
    def write(actor: Path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(1, write=write, progress={}, score=None)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_without_room_is_refused_before_writing_and_both_numbers_are_named(store):
    with pytest.raises(CheckpointError, match=r"needs about 9(,000){6} bytes, but the disk .* has [\d,]+ free"):
        store.check_space(9 * 10**18)


def test_leftovers_of_dead_runs_are_removed_at_the_next_save(store, tmp_path):
    for name in (".saving_global_step_9", ".removing_global_step_1"):
        (tmp_path / "run" / name / "actor").mkdir(parents=True)
        (tmp_path / "run" / name / "actor" / "weights.safetensors").write_bytes(b"old")
    assert store.latest() is None
    save(store, 2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_2"]


def test_saving_a_step_twice_is_refused_and_harms_nothing(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        save(store, 1)
    assert store.latest().step == 1


def test_going_back_sets_later_checkpoints_aside(store, tmp_path, heard):
    for step in (1, 2, 3):
        save(store, step, score=step / 10)
    store.rewind(1)
    assert store.latest().step == store.best().step == 1
    assert len(heard) == 2
    save(store, 2)
    store.rewind(1)
    assert steps(tmp_path / "run") == [1]
    assert sorted(path.name for path in (tmp_path / "run" / "set_aside").iterdir()) == [
        "global_step_2",
        "global_step_2.2",
        "global_step_3",
    ]
    assert open_checkpoint(tmp_path / "run" / "set_aside" / "global_step_3", resumable=True).score == 0.3


def test_a_model_only_checkpoint_says_that_it_cannot_be_resumed(store):
    folder = save(store, 1, optimizer=False).folder
    with pytest.raises(CheckpointError, match="save_model_only"):
        store.latest()
    with pytest.raises(CheckpointError, match="save_model_only"):
        open_checkpoint(folder, resumable=True)
    assert store.latest(resumable=False).step == 1


def test_reading_weights_alone_does_not_mind_a_damaged_optimizer(store):
    folder = save(store, 1).folder
    flip_a_byte(folder / "actor" / "optimizer.safetensors")
    assert open_checkpoint(folder, resumable=False).step == 1


def test_a_path_that_is_no_checkpoint_is_named_with_what_it_holds(store, tmp_path):
    save(store, 1)
    with pytest.raises(CheckpointError, match="it holds global_step_1: name one of them"):
        open_checkpoint(tmp_path / "run", resumable=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        open_checkpoint(tmp_path / "nowhere", resumable=True)


def test_a_copy_under_another_name_is_accepted_but_another_number_is_not(store, tmp_path):
    folder = save(store, 5).folder
    assert open_checkpoint(folder.rename(tmp_path / "the_good_one"), resumable=True).step == 5
    with pytest.raises(CheckpointError, match="holds step 5"):
        open_checkpoint((tmp_path / "the_good_one").rename(tmp_path / "global_step_6"), resumable=True)


def test_a_folder_of_pickles_is_recognized(tmp_path):
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_5" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickled \.pt files"):
        open_checkpoint(tmp_path / "global_step_5", resumable=True)


def test_an_unsealed_file_may_change_and_a_crash_meanwhile_leaves_the_checkpoint_sound(store):
    folder = save(store, 5).folder
    config = folder / "actor" / "huggingface" / "config.json"
    crashed = unsealed(folder, ("actor/huggingface/config.json",))
    crashed.__enter__()
    config.write_text("{}")
    assert open_checkpoint(folder, resumable=True).step == 5
    with unsealed(folder, ("actor/huggingface/config.json",)):
        config.write_text('{"model_type": "other"}')
    assert open_checkpoint(folder, resumable=True).step == 5
    config.write_text('{"model_type": "their"}')
    with pytest.raises(CheckpointError, match="other contents"):
        open_checkpoint(folder, resumable=True)
