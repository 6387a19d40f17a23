import errno
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trigon.checkpoint.store import CheckpointStore, open_checkpoint, unsealed
from trigon.errors import CheckpointError


def writer(value, *, optimizer=True):
    def write(actor: Path):
        for folder in ("weights", "optimizer") if optimizer else ("weights",):
            (actor / folder).mkdir()
            save_file({"layer.weight": torch.full((4, 4), float(value))}, actor / folder / "shard.safetensors")
        (actor / "state.json").write_text(json.dumps({"optimizer_steps": value}))
        (actor / "huggingface").mkdir()
        (actor / "huggingface" / "config.json").write_text('{"model_type": "tiny"}')

    return write


def save(store, step, score=None, **options):
    store.save(step, write=writer(step, **options), progress={"next_prompt": step * 8, "lr": 0.1}, score=score)
    return store.latest(resumable=False)


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
    "name", ["actor/weights/shard.safetensors", "actor/optimizer/shard.safetensors", "progress.json", "manifest.json"]
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
    flip_a_byte(folder / "actor" / "weights" / "shard.safetensors")
    with pytest.raises(CheckpointError, match=r"shard\.safetensors has other contents than were saved"):
        open_checkpoint(folder, resumable=True)


def test_when_all_are_damaged_a_run_does_not_silently_start_anew(store):
    for step in (1, 2):
        truncate(save(store, step).actor / "weights" / "shard.safetensors")
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
        (actor / "state.json").write_bytes(b"half")
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
        (tmp_path / "run" / name / "actor" / "state.json").write_bytes(b"old")
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
    flip_a_byte(folder / "actor" / "optimizer" / "shard.safetensors")
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


# -- in the background --------------------------------------------------------------------------------------------


class HeldWriter:
    """Takes its copies at once, and writes them when it is let; or fails then."""

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
def behind(tmp_path, heard):
    """A store that saves in the background, of which every save is let go at the end."""
    return CheckpointStore(tmp_path / "run", keep=-1, background=True, warn=heard.append)


def hold(store, step, progress=None, **options):
    held = HeldWriter(step, **options)
    store.save(step, write=held, progress={} if progress is None else progress, score=step / 10)
    return held


def test_a_save_in_the_background_is_not_there_until_it_is_whole(behind, tmp_path):
    held = hold(behind, 1)
    behind.check()
    assert steps(tmp_path / "run") == []
    held.go.set()
    behind.wait()
    assert steps(tmp_path / "run") == [1]
    assert held.thread is not threading.main_thread()
    assert json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text())["last_global_step"] == 1


def test_a_save_in_the_foreground_is_done_when_it_returns(store, tmp_path):
    held = HeldWriter(1)
    held.go.set()
    store.save(1, write=held, progress={}, score=None)
    assert steps(tmp_path / "run") == [1]
    assert held.thread is threading.main_thread()


def test_what_a_writer_wrote_at_once_is_published_in_the_background(behind):
    behind.save(1, write=writer(1), progress={}, score=None)
    behind.wait()
    assert open_checkpoint(behind.latest().folder, resumable=True).step == 1


def test_progress_is_taken_at_the_moment_of_the_save(behind):
    progress = {"next_prompt": 8}
    held = hold(behind, 1, progress)
    progress["next_prompt"] = 16
    held.go.set()
    assert behind.latest().progress == {"next_prompt": 8}


def let_go_soon(held):
    threading.Timer(0.2, held.go.set).start()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.latest().step,
        lambda store: store.best().step,
        lambda store: store.rewind(2) or store.latest().step,
        lambda store: hold(store, 3).go.set() or store.latest().step - 1,
    ],
)
def test_whoever_asks_for_checkpoints_waits_for_the_one_in_hand(behind, ask):
    save(behind, 1)
    held = hold(behind, 2)
    let_go_soon(held)
    assert ask(behind) == 2


@pytest.mark.parametrize("surface", ["wait", "latest", "next save"])
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk became full while .*global_step_2"),
        (CheckpointError("rank 1: OSError: [Errno 28] No space left on device"), r"the disk became full"),
        (CheckpointError("rank 1 is gone"), r"^rank 1 is gone$"),
        (ValueError("a bug"), r"the checkpoint of step 2 could not be saved: ValueError\('a bug'\)"),
    ],
)
def test_a_failure_in_the_background_surfaces_once_and_earlier_ones_stay(behind, tmp_path, surface, failure, message):
    save(behind, 1)
    hold(behind, 2, failure=failure).go.set()
    with pytest.raises(CheckpointError, match=message):
        {"wait": behind.wait, "latest": behind.latest, "next save": lambda: save(behind, 3)}[surface]()
    behind.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_tracker.json", "global_step_1"]
    assert save(behind, 3).step == 3


def test_a_failure_that_is_known_is_raised_without_waiting(behind):
    held = hold(behind, 1, failure=CheckpointError("rank 1 is gone"))
    behind.check()  # it has not failed yet
    held.go.set()
    with pytest.raises(CheckpointError, match="rank 1 is gone"):  # noqa: PT012
        for _ in range(600):
            behind.check()
            threading.Event().wait(0.1)
    behind.check()


def test_the_end_of_a_run_waits_for_the_save_in_hand_whatever_ends_it(behind, tmp_path, heard):
    with behind.settled():
        let_go_soon(hold(behind, 1))
    assert steps(tmp_path / "run") == [1]
    let_go_soon(hold(behind, 2))
    with pytest.raises(KeyboardInterrupt), behind.settled():
        raise KeyboardInterrupt
    assert steps(tmp_path / "run") == [1, 2]
    assert heard == []


def test_a_run_ends_by_its_own_error_and_that_of_the_save_is_told(behind, heard):
    hold(behind, 1, failure=CheckpointError("rank 1 is gone")).go.set()
    with pytest.raises(ZeroDivisionError), behind.settled():
        raise ZeroDivisionError
    assert heard == ["rank 1 is gone"]
    with pytest.raises(CheckpointError, match="rank 2 is gone"), behind.settled():
        hold(behind, 1, failure=CheckpointError("rank 2 is gone")).go.set()


FORGETFUL = """
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
    if sys.argv[2] == "error":
        raise SystemExit("the end")
"""


@pytest.mark.parametrize(("ending", "code"), [("normal", 0), ("error", 1)])
def test_a_process_does_not_end_before_its_save_is_published(store, tmp_path, ending, code):
    command = [sys.executable, "-c", textwrap.dedent(FORGETFUL), str(tmp_path / "run"), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (code, "the end" if code else "")
    assert store.latest(resumable=False).step == 1
