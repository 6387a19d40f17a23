"""Files of checkpoints and run folders that are damaged, foreign, hostile or links."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from trigon.checkpoint.store import CheckpointStore, find_checkpoints, open_checkpoint, replacing_files
from trigon.errors import CheckpointError, DataError
from trigon.report.rollouts import parse_row
from trigon.report.run import RunRecord, read_metrics
from trigon.report.run_folder import BUDGETS, RunFolder
from trigon.system.files import parse_json, read_json_object
from trigon.training.checkpointing import read_adapter_rank, read_updates
from trigon.training.state import ShardedFiles

pytestmark = pytest.mark.faults

NESTED = "[" * 100_000 + "]" * 100_000
NESTED_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


def write(actor):
    for folder in ("weights", "optimizer"):
        (actor / folder).mkdir()
        save_file({"layer.weight": torch.ones(4, 4)}, actor / folder / "shard.safetensors")
    (actor / "state.json").write_text('{"updates": 3, "strategy": "adamw"}')
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text("{}")


@pytest.fixture
def messages():
    return []


@pytest.fixture
def store(tmp_path, messages):
    """A store with the checkpoints of steps 1 and 2."""
    store = CheckpointStore(tmp_path / "run", keep=-1, warn=messages.append)
    for step in (1, 2):
        store.save(step, write=write, progress={"step": step}, score=None)
    return store


def entry(name="progress.json", size=5, digest="0" * 64):
    return json.dumps({"files": {"progress.json": {"bytes": 1, "sha256": ""}, name: {"bytes": size, "sha256": digest}}})


@pytest.mark.parametrize("file", ["manifest.json", "progress.json"])
@pytest.mark.parametrize(
    "content",
    [
        NESTED,
        '{"files": ' + NESTED_OBJECT + "}",
        "",
        "[]",
        '{"files": {"progress.json": {"bytes": true, "sha256": ""}}}',
        entry(name="/etc/passwd"),
        entry(name="actor/../../../secret"),
        entry(size=None),
        "9" * 5000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        '{"step": "2", "progress": {}, "val_reward_score": null}',
        '{"step": 2, "progress": [], "val_reward_score": null}',
        '{"step": 2, "progress": {}, "val_reward_score": Infinity}',
    ],
    ids=lambda content: content[:40],
)
def test_a_hostile_manifest_or_progress_is_a_damaged_checkpoint_like_any_other(
    store, messages, tmp_path, file, content
):
    folder = tmp_path / "run" / "global_step_2"
    (folder / file).write_text(content)
    if file == "progress.json":  # as if it had been saved so
        with replacing_files(folder, ("progress.json",)):
            pass
        with pytest.raises(CheckpointError, match=r"progress\.json"):
            open_checkpoint(folder, resumable=True)
        assert find_checkpoints(tmp_path / "run") == [tmp_path / "run" / "global_step_1"]
        return
    assert store.latest().step == 1
    [message] = messages
    assert "DAMAGED CHECKPOINT" in message
    assert "manifest.json cannot be read as a manifest" in message
    store.save(3, write=write, progress={}, score=0.5)
    assert store.best().step == 3


def test_json_is_read_within_limits(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        read_json_object(path, max_bytes=4)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="it contains a list instead of an object"):
        read_json_object(path)
    for text in (NESTED, NESTED_OBJECT):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


@pytest.mark.parametrize("text", [NESTED, "{", "[]", "{}", '{"updates": "3", "strategy": "adamw"}'])
def test_an_invalid_file_of_the_train_engine_is_a_sentence(tmp_path, text):
    for name in ("weights", "optimizer"):
        (tmp_path / name).mkdir()
    for name in ("state.json", "adapter_config.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json .*use another checkpoint"):
        read_updates(tmp_path, lora_rank=0, strategy="adamw")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json .*use another checkpoint"):
        read_adapter_rank(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "{}",
        "[]",
        '{"w": 3}',
        *(f'{{"w": {{"saved_offsets": {offsets}}}}}' for offsets in ("[-1, 0]", "[0.5, 0]", '["0", "0"]', "[0]", "0")),
    ],
)
def test_an_invalid_header_of_tensors_is_a_sentence(tmp_path, text):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "shard.safetensors", metadata={"DCP_SHARDING_INFO": text})
    with pytest.raises(CheckpointError, match=r"shard\.safetensors has an invalid header"):
        ShardedFiles(tmp_path)


@pytest.mark.extended
def test_files_of_a_run_folder_that_are_nested_deeply_are_a_sentence(tmp_path):
    for name in ("config.yaml", "local_sources.json", BUDGETS):
        (tmp_path / name).write_text("[" * 1500 + "]" * 1500 if name == "config.yaml" else NESTED)
    (tmp_path / "metrics.jsonl").write_text(NESTED + "\n")
    record = RunRecord(tmp_path)
    with pytest.raises(DataError, match=r"config\.yaml is not the configuration of a run: it is nested too deeply"):
        record.config()
    with pytest.raises(DataError, match=r"local_sources\.json cannot be read: it is nested too deeply"):
        record.local_sources()
    with pytest.raises(CheckpointError, match=r"line without the metrics of a step .it is nested too deeply"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="nested too deeply"):
        parse_row(NESTED.encode(), "line 1")
    with RunFolder(tmp_path) as folder, pytest.raises(CheckpointError, match=r"nested too deeply.*remove it"):
        folder.read_budgets()


# Files that were not saved


COULD_BE_LOADED = ["actor/weights/.foreign.safetensors", "actor/optimizer/foreign.safetensors"]
COULD_BE_LOADED += ["actor/weights/inner/foreign.bin", "actor/adapter/shard.safetensors", "actor/adapter_config.json"]
HARMLESS = ["huggingface_model/model.safetensors", "notes.txt", "actor/huggingface/model.safetensors"]
HARMLESS += ["actor/lora_adapter/adapter_model.safetensors", "actor/weights/.nfs000000000001", "actor/.DS_Store"]


@pytest.mark.parametrize("name", [*COULD_BE_LOADED, *HARMLESS])
def test_a_file_that_was_not_saved_is_damage_if_it_could_be_loaded(store, messages, tmp_path, name):
    """Others are exports, and what file systems leave."""
    file = tmp_path / "run" / "global_step_2" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes((tmp_path / "run" / "global_step_1" / "actor" / "weights" / "shard.safetensors").read_bytes())
    assert store.latest().step == (1 if name in COULD_BE_LOADED else 2)
    assert len(messages) == (name in COULD_BE_LOADED)
    assert name in HARMLESS or f"{name.removeprefix('actor/')} was not saved with the checkpoint" in messages[0]
    file.unlink()
    assert store.latest().step == 2


def test_a_foreign_optimizer_file_does_not_prevent_reading_the_weights(store, tmp_path):
    folder = tmp_path / "run" / "global_step_2"
    (folder / "actor" / "optimizer" / "foreign.safetensors").write_bytes(b"x")
    assert open_checkpoint(folder, resumable=False).step == 2


# Links


def test_links_to_files_and_folders_with_the_saved_contents_are_followed(store, messages, tmp_path):
    actor = tmp_path / "run" / "global_step_2" / "actor"
    os.rename(actor / "weights", tmp_path / "elsewhere")
    (actor / "weights").symlink_to(tmp_path / "elsewhere")
    os.rename(actor / "state.json", tmp_path / "state.json")
    (actor / "state.json").symlink_to(tmp_path / "state.json")
    assert store.latest().step == 2
    assert messages == []
    (tmp_path / "elsewhere" / "foreign.safetensors").write_bytes(b"x")
    assert store.latest().step == 1


@pytest.mark.parametrize("target", ["nowhere", "shard.safetensors", "/dev/zero", "/etc/passwd", "pipe"])
def test_a_file_replaced_by_a_link_to_something_else_or_a_pipe_is_damage(store, tmp_path, target):
    shard = tmp_path / "run" / "global_step_2" / "actor" / "weights" / "shard.safetensors"
    shard.unlink()
    os.mkfifo(shard) if target == "pipe" else shard.symlink_to(target)
    assert store.latest().step == 1


def test_links_that_lead_in_circles_do_not_hang(store, tmp_path):
    weights = tmp_path / "run" / "global_step_2" / "actor" / "weights"
    (weights / "again").symlink_to(weights)
    (weights / "upwards").symlink_to(weights.parent)
    assert store.latest().step == 2


def test_a_checkpoint_that_was_moved_and_linked_is_used_and_its_link_is_removed_in_time(tmp_path, messages):
    store = CheckpointStore(tmp_path / "run", keep=1, warn=messages.append)
    store.save(1, write=write, progress={}, score=None)
    os.rename(tmp_path / "run" / "global_step_1", tmp_path / "large_disk")
    (tmp_path / "run" / "global_step_1").symlink_to(tmp_path / "large_disk")
    assert store.latest().step == 1
    store.save(2, write=write, progress={}, score=None)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint_tracker.json", "global_step_2"]
    assert (tmp_path / "large_disk" / "manifest.json").exists()
    assert messages == []
