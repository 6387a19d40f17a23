"""Checkpoints are complete or absent; damaged ones are skipped; saves in the background."""

import errno
import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trigon.checkpoint.store import VALIDATED_BY, CheckpointStore, open_checkpoint, replacing_files
from trigon.errors import CheckpointError
from trigon.system import files as system_files

pytestmark = pytest.mark.faults


def writer(value, *, optimizer=True):
    def write(actor: Path):
        for folder in ("weights", "optimizer") if optimizer else ("weights",):
            (actor / folder).mkdir()
            save_file({"layer.weight": torch.full((4, 4), float(value))}, actor / folder / "shard.safetensors")
        (actor / "state.json").write_text(json.dumps({"optimizer_steps": value}))
        (actor / "huggingface").mkdir()
        (actor / "huggingface" / "config.json").write_text('{"model_type": "tiny"}')

    return write


def save(store, step, score=None, progress=None, **options):
    progress = {"next_prompt": step * 8, "lr": 0.1} if progress is None else progress
    store.save(step, write=writer(step, **options), progress=progress, score=score)
    return store.latest(resumable=False)


def steps(root):
    return sorted(int(folder.name.removeprefix("global_step_")) for folder in root.glob("global_step_*"))


@pytest.fixture
def messages():
    return []


@pytest.fixture
def store(tmp_path, messages):
    return CheckpointStore(tmp_path / "run", keep=-1, warn=messages.append)


def test_a_saved_checkpoint_is_read_back(store, tmp_path):
    saved = save(store, 5, score=0.75)
    assert saved == store.latest()
    assert saved.folder == tmp_path / "run" / "global_step_5"
    assert (saved.step, saved.score, saved.progress) == (5, 0.75, {"next_prompt": 40, "lr": 0.1})
    assert torch.equal(
        load_file(saved.actor / "weights" / "shard.safetensors")["layer.weight"], torch.full((4, 4), 5.0)
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_5"]


def test_every_file_is_in_the_manifest_with_its_size_and_hash(store):
    folder = save(store, 5).folder
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(files) == [
        "actor/huggingface/config.json",
        "actor/optimizer/shard.safetensors",
        "actor/state.json",
        "actor/weights/shard.safetensors",
        "progress.json",
    ]
    digest = "8e9d21a8818ac672ea522cbb09b8a360ffbda0bffac44409136b5a4b11f685a9"
    assert files["actor/huggingface/config.json"] == {"bytes": 22, "sha256": digest}


def test_the_tracker_has_the_last_and_the_best_step_in_easyr1s_format(store, tmp_path):
    assert store.latest() is None
    assert store.best() is None
    save(store, 1)
    assert store.best() is None  # a step that was not validated
    for step, score in ((2, 0.5), (3, 0.5), (4, None), (5, float("nan"))):
        save(store, step, score=score)
    assert json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text()) == {
        "last_global_step": 5,
        "best_global_step": 2,
        "best_val_reward_score": 0.5,
    }
    assert store.best().step == 2
    assert store.latest().step == 5


def test_scores_of_other_validation_data_are_not_compared(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep=2)
    for step, score, by in ((1, 0.9, "a"), (2, 0.1, "b"), (3, None, "b"), (4, 0.05, "b")):
        save(store, step, score=score, progress={VALIDATED_BY: by})
        assert store.best().step == min(step, 2)
    assert steps(tmp_path / "run") == [2, 4]


@pytest.mark.parametrize(
    ("keep", "scores", "remaining"),
    [
        (1, [None, None, None], [3]),
        (1, [0.9, 0.1, 0.2], [1, 3]),  # the best and the newest
        (2, [0.9, 0.1, 0.2, 0.3], [1, 4]),
        (2, [0.1, 0.1, 0.1, 0.9], [3, 4]),
        (3, [0.9, 0.1, 0.2, 0.3, 0.4], [1, 4, 5]),
        (0, [None, None], [1, 2]),
        (-1, [None, None, None], [1, 2, 3]),
    ],
)
def test_old_checkpoints_are_removed_but_never_the_newest_or_the_best(tmp_path, keep, scores, remaining):
    for folder, keep_before in ((tmp_path / "one", keep), (tmp_path / "resumed with a lower limit", -1)):
        for step, score in enumerate(scores, start=1):
            save(CheckpointStore(folder, keep=keep if step == len(scores) else keep_before), step, score=score)
        assert steps(folder) == remaining


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, Path.unlink])
@pytest.mark.parametrize(
    "name", ["actor/weights/shard.safetensors", "actor/optimizer/shard.safetensors", "progress.json", "manifest.json"]
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one_with_a_warning(store, messages, damage, name):
    save(store, 1)
    folder = save(store, 2).folder
    damage(folder / name)
    assert store.latest().step == 1
    [message] = messages
    assert all(fact in message for fact in ("DAMAGED CHECKPOINT", "global_step_2", "global_step_1, is used"))
    with pytest.raises(CheckpointError):  # named by the user
        open_checkpoint(folder, resumable=True)
    if "optimizer" in name:
        assert open_checkpoint(folder, resumable=False).step == 2
    damage(store.latest().folder / name)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        store.latest()


@pytest.mark.parametrize("tracker", [None, '{"last_global_step": 1', '{"last_global_step": 99}'])
def test_a_missing_truncated_or_outdated_tracker_has_no_effect(store, tmp_path, tracker):
    save(store, 1, score=0.5)
    save(store, 2, score=0.25)
    path = tmp_path / "run" / "checkpoint_tracker.json"
    path.unlink() if tracker is None else path.write_text(tracker)
    assert store.latest().step == 2
    assert store.best().step == 1
    save(store, 3)
    assert json.loads(path.read_text())["best_global_step"] == 1


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "2 could not be saved: the disk is full"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_save_that_fails_leaves_the_previous_checkpoint_only(store, tmp_path, failure, error, message):
    save(store, 1)

    def write(actor: Path):
        (actor / "state.json").write_bytes(b"half")
        raise failure

    with pytest.raises(error, match=message):
        store.save(2, write=write, progress={}, score=None)
    assert store.latest().step == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_1"]


def test_check_space_names_the_needed_and_the_free_bytes(store):
    with pytest.raises(CheckpointError, match=r"needs about 9(,000){6} bytes, but the disk .* has [\d,]+ free"):
        store.check_space(9 * 10**18)


def test_leftovers_of_interrupted_runs_are_removed_at_the_next_save(store, tmp_path):
    for name in (".saving_global_step_9", ".removing_global_step_1"):
        (tmp_path / "run" / name / "actor").mkdir(parents=True)
        (tmp_path / "run" / name / "actor" / "state.json").write_bytes(b"old")
    assert store.latest() is None
    save(store, 2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_2"]


def test_rewind_moves_later_checkpoints_away(store, tmp_path, messages):
    for step in (1, 2, 3):
        save(store, step, score=step / 10)
    store.rewind(1)
    assert store.latest().step == store.best().step == 1
    assert len(messages) == 2
    save(store, 2)
    store.rewind(1)
    assert steps(tmp_path / "run") == [1]
    assert sorted(path.name for path in (tmp_path / "run" / "set_aside").iterdir()) == [
        "global_step_2",
        "global_step_2.2",
        "global_step_3",
    ]
    assert open_checkpoint(tmp_path / "run" / "set_aside" / "global_step_3", resumable=True).score == 0.3


def test_a_model_only_checkpoint_cannot_be_resumed(store):
    folder = save(store, 1, optimizer=False).folder
    with pytest.raises(CheckpointError, match="save_model_only"):
        store.latest()
    with pytest.raises(CheckpointError, match="save_model_only"):
        open_checkpoint(folder, resumable=True)
    assert store.latest(resumable=False).step == 1


def test_the_actor_folder_of_a_checkpoint_stands_for_the_checkpoint(store, tmp_path):
    folder = save(store, 5).folder
    assert open_checkpoint(folder / "actor", resumable=True) == open_checkpoint(folder, resumable=True)
    (tmp_path / "link").symlink_to(folder / "actor")
    assert open_checkpoint(tmp_path / "link", resumable=True).step == 5
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="actor is not a checkpoint"):
        open_checkpoint(folder / "actor", resumable=True)


def test_a_renamed_checkpoint_is_accepted_unless_the_name_says_another_step(store, tmp_path):
    folder = save(store, 5).folder
    assert open_checkpoint(folder.rename(tmp_path / "the_good_one"), resumable=True).step == 5
    with pytest.raises(CheckpointError, match="holds step 5"):
        open_checkpoint((tmp_path / "the_good_one").rename(tmp_path / "global_step_6"), resumable=True)


def test_pickled_checkpoints_of_easyr1_are_recognized(tmp_path):
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_5" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickled \.pt files"):
        open_checkpoint(tmp_path / "global_step_5", resumable=True)


def test_files_may_be_replaced_and_a_crash_meanwhile_leaves_a_valid_checkpoint(store):
    folder = save(store, 5).folder
    config = folder / "actor" / "huggingface" / "config.json"
    crashed = replacing_files(folder, ("actor/huggingface/config.json",))
    crashed.__enter__()
    config.write_text("{}")
    assert open_checkpoint(folder, resumable=True).step == 5
    with replacing_files(folder, ("actor/huggingface/config.json",)):
        config.write_text('{"model_type": "other"}')
    assert open_checkpoint(folder, resumable=True).step == 5
    config.write_text('{"model_type": "their"}')
    with pytest.raises(CheckpointError, match="other contents"):
        open_checkpoint(folder, resumable=True)


# Saves in the background


class BlockedWriter:
    """Copies at once, but writes, or fails, only after `go` is set."""

    def __init__(self, value, *, failure=None):
        self.value = value
        self.failure = failure
        self.go = threading.Event()
        self.thread = None

    def __call__(self, actor: Path):
        def finish():
            assert self.go.wait(60)
            self.thread = threading.current_thread()
            writer(self.value)(actor)
            if self.failure is not None:
                raise self.failure

        return finish


@pytest.fixture
def background_store(tmp_path, messages):
    """A store that saves in the background."""
    return CheckpointStore(tmp_path / "run", keep=-1, background=True, warn=messages.append)


def start_save(store, step, progress=None, **options):
    blocked = BlockedWriter(step, **options)
    store.save(step, write=blocked, progress={} if progress is None else progress, score=step / 10)
    return blocked


def test_a_background_save_is_invisible_until_it_is_complete(background_store, tmp_path):
    progress = {"next_prompt": 8}
    blocked = start_save(background_store, 1, progress)
    progress["next_prompt"] = 16  # it was copied
    background_store.check()
    assert steps(tmp_path / "run") == []
    blocked.go.set()
    background_store.wait()
    assert steps(tmp_path / "run") == [1]
    assert blocked.thread is not threading.main_thread()
    assert background_store.latest().progress == {"next_prompt": 8}
    background_store.save(2, write=writer(2), progress={}, score=None)  # whose files are written at once
    assert background_store.latest().step == 2


def unblock_soon(blocked):
    threading.Timer(0.2, blocked.go.set).start()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.latest().step,
        lambda store: store.best().step,
        lambda store: store.rewind(2) or store.latest().step,
        lambda store: start_save(store, 3).go.set() or store.latest().step - 1,
    ],
)
def test_reading_checkpoints_waits_for_the_save_in_the_background(background_store, call):
    save(background_store, 1)
    blocked = start_save(background_store, 2)
    unblock_soon(blocked)
    assert call(background_store) == 2


def check_until_it_fails(store):
    for _ in range(600):
        store.check()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("raised_by", "failure", "message"),
    [
        (CheckpointStore.wait, OSError(errno.ENOSPC, "No space left"), r"2 could not be saved: the disk is full"),
        (
            CheckpointStore.latest,
            CheckpointError("rank 1: OSError: [Errno 28] No space left on device"),
            r"disk is full",
        ),
        (lambda store: save(store, 3), CheckpointError("rank 1 is gone"), r"^rank 1 is gone$"),
        (
            check_until_it_fails,
            ValueError("a bug"),
            r"2 could not be saved: ValueError",
        ),
    ],
    ids=["wait", "latest", "next save", "check"],
)
def test_a_failed_background_save_is_raised_once_and_earlier_checkpoints_stay(
    background_store, tmp_path, raised_by, failure, message
):
    save(background_store, 1)
    blocked = start_save(background_store, 2, failure=failure)
    background_store.check()  # it has not failed yet
    blocked.go.set()
    with pytest.raises(CheckpointError, match=message):
        raised_by(background_store)
    background_store.check()
    background_store.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_1"]
    assert save(background_store, 3).step == 3


def test_wait_on_exit_waits_for_the_save_also_after_an_error(background_store, tmp_path, messages):
    with background_store.wait_on_exit():
        unblock_soon(start_save(background_store, 1))
    assert steps(tmp_path / "run") == [1]
    unblock_soon(start_save(background_store, 2))
    with pytest.raises(KeyboardInterrupt), background_store.wait_on_exit():
        raise KeyboardInterrupt
    assert steps(tmp_path / "run") == [1, 2]
    assert messages == []
    start_save(background_store, 3, failure=CheckpointError("rank 1 is gone")).go.set()
    with pytest.raises(ZeroDivisionError), background_store.wait_on_exit():  # the error of the run comes first
        raise ZeroDivisionError
    assert messages == ["rank 1 is gone"]
    with pytest.raises(CheckpointError, match="rank 2 is gone"), background_store.wait_on_exit():
        start_save(background_store, 3, failure=CheckpointError("rank 2 is gone")).go.set()


SAVE_WITHOUT_WAITING = """
    import sys, time
    from pathlib import Path
    from trigon.checkpoint.store import CheckpointStore

    def write(actor):
        def finish():
            time.sleep(0.5)  # the main thread has ended by then
            for k in range(10):
                (actor / f"{k}.json").write_text("{}")
        return finish

    CheckpointStore(Path(sys.argv[1]), keep=-1, background=True).save(1, write=write, progress={}, score=None)
    raise SystemExit("the end")
"""


def test_a_process_does_not_end_before_its_save_is_published(store, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SAVE_WITHOUT_WAITING), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (1, "the end")
    assert store.latest(resumable=False).step == 1


def test_a_save_in_the_background_needs_no_thread_that_is_not_running_yet(tmp_path, monkeypatch):
    """Python 3.12 and later start none once the main thread has ended."""
    may_finish = threading.Event()

    def write(actor):
        (actor / "weights").write_bytes(b"w")
        return may_finish.wait

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = CheckpointStore(tmp_path / "run", keep=-1, background=True)
    store.save(1, write=write, progress={}, score=None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    may_finish.set()
    store.wait()
    monkeypatch.undo()
    assert store.latest(resumable=False).step == 1


@pytest.mark.parametrize("grows", [True, False])
def test_a_slow_write_is_told_of_as_long_as_its_files_grow(tmp_path, monkeypatch, grows):
    monkeypatch.setattr(system_files, "GROWTH_SECONDS", 0.01)
    told, during = [], []

    def write(actor):
        writer(5)(actor)

        def finish():
            time.sleep(0.05)
            told.clear()
            with (actor / "large").open("wb", buffering=0) as file:
                for _ in range(10):
                    time.sleep(0.02)
                    file.write(b"1" * grows)
            during.extend(told)

        return finish

    CheckpointStore(tmp_path, keep=-1, on_progress=lambda: told.append(1)).save(5, write=write, progress={}, score=None)
    assert (len(during) > 2) == grows
