"""Damaged checkpoints are noticed, and damaged records are refused with their place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from support.view_runs import make_row, write_run
from trigon.checkpoint.store import MANIFEST, CheckpointStore
from trigon.errors import CheckpointError, DataError, TrigonError
from trigon.report.rollouts import parse_row, row_to_line
from trigon.report.run import open_run, parse_step

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DEEP = {b"DEEP [": b"[" * 100_000, b"DEEP {": b'{"a":' * 100_000, b"DEEP []": b"[" * 100_000 + b"]" * 100_000}
"""Nested content, by what stands for it: a failure shows the inputs."""

deep = st.sampled_from(sorted(DEEP))


def write_actor(actor: Path) -> None:
    for name in ("weights", "optimizer"):
        (actor / name).mkdir()
        save_file({"layer": torch.arange(16.0)}, actor / name / "shard.safetensors")
    (actor / "state.json").write_text(json.dumps({"optimizer_steps": 3}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of two checkpoints."""
    root = tmp_path_factory.mktemp("saved") / "run"
    store = CheckpointStore(root, keep=-1)
    for step in (1, 2):
        store.save(step, write=write_actor, progress={"prompts": {"epoch": 0}, "step": step}, score=None)
    return root


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Path, list[Path]], None]:
    """Return a function that damages one file of a folder, of all its files."""
    kind = draw(st.sampled_from(["flip", "cut", "append", "remove", "replace", "swap", "link", "extra", "deep"]))
    number, place, other = (
        draw(st.integers(0, 99)),
        draw(st.integers(0, 10**6)),
        draw(st.binary(min_size=1, max_size=50)),
    )
    nested = draw(deep)

    def damage(folder: Path, files: list[Path]) -> None:
        file = files[number % len(files)]
        content = file.read_bytes()
        place_in_file = place % max(len(content), 1)
        match kind:
            case "flip":
                flipped = bytes([content[place_in_file] ^ (1 << place % 8)])
                file.write_bytes(content[:place_in_file] + flipped + content[place_in_file + 1 :])
            case "cut":
                file.write_bytes(content[:place_in_file])
            case "append":
                assume(file.name != MANIFEST or other.strip(b" \t\r\n"))  # the same list of files
                file.write_bytes(content + other)
            case "remove":
                file.unlink()
            case "replace":
                assume(other != content)
                file.write_bytes(other)
            case "swap":
                another = files[place % len(files)].read_bytes()
                assume(another != content)
                file.write_bytes(another)
            case "link":
                target = folder.parent / "elsewhere"
                target.write_bytes(other)
                file.unlink()
                file.symlink_to(target)
            case "extra":
                (file.parent / f"extra_{place}.safetensors").write_bytes(other)
            case "deep":
                file.write_bytes(DEEP[nested])

    return damage


@pytest.mark.faults
@given(damages())
def test_any_damage_of_a_checkpoint_is_noticed(saved: Path, tmp_path_factory: pytest.TempPathFactory, damage):
    root = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(saved, root)
    newest = root / "global_step_2"
    damage(newest, sorted(path for path in newest.rglob("*") if path.is_file()))
    warnings: list[str] = []
    found = CheckpointStore(root, keep=-1, warn=warnings.append).latest()
    assert found is not None
    assert found.step == 1
    assert any("global_step_2" in warning for warning in warnings)
    shutil.rmtree(root.parent)


@given(st.lists(damages(), min_size=2, max_size=2))
def test_damage_of_every_checkpoint_is_an_error(saved: Path, tmp_path_factory: pytest.TempPathFactory, damage):
    root = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(saved, root)
    for each, folder in zip(damage, sorted(root.glob("global_step_*")), strict=True):
        each(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
    with pytest.raises(CheckpointError, match="global_step"):
        CheckpointStore(root, keep=-1, warn=lambda text: None).latest()
    shutil.rmtree(root.parent)


ROW = json.loads(row_to_line(make_row("train:0", 1, 0.5)))
row_changes = st.dictionaries(st.sampled_from([*ROW, "unknown"]), values, min_size=1, max_size=4)
lines = st.one_of(
    row_changes.map(lambda changes: json.dumps(ROW | changes).encode()),
    st.sampled_from(sorted(ROW)).map(lambda name: json.dumps({k: v for k, v in ROW.items() if k != name}).encode()),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    deep,
)


@pytest.mark.faults
@given(lines)
def test_any_line_of_rollouts(line: bytes):
    try:
        row = parse_row(DEEP.get(line, line), "train_1.jsonl, line 1")
    except DataError as error:
        assert str(error).startswith("train_1.jsonl, line 1")
        assert len(str(error)) < 2000
    else:
        row_to_line(row)


metrics = st.fixed_dictionaries(
    {}, optional={"step": values, "metrics": values | st.dictionaries(st.text(max_size=8), values)}
)


@pytest.mark.faults
@given(st.one_of(metrics.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60), deep))
def test_any_line_of_metrics(line: bytes):
    try:
        step = parse_step(DEEP.get(line, line), Path("metrics.jsonl"))
    except CheckpointError as error:
        assert "metrics.jsonl" in str(error)
        assert len(str(error)) < 2000
    else:
        assert isinstance(step.step, int)
        assert all(isinstance(value, int | float) for value in step.metrics.values())


@pytest.mark.extended
@given(
    content=st.one_of(st.binary(max_size=80), values.map(lambda value: json.dumps(value).encode()), deep),
    name=st.sampled_from(["config.yaml", "metrics.jsonl", "rollouts/train_1.jsonl", "local_sources.json"]),
)
def test_any_file_of_a_run_folder(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str):
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=1)
    (folder / name).write_bytes(DEEP.get(content, content))
    readers: Mapping[str, Callable[[], Any]] = {
        "config": open_run(folder).config,
        "metrics": open_run(folder).metrics,
        "rollouts": lambda: list(open_run(folder).rollouts()),
        "sources": open_run(folder).local_sources,
    }
    for read in readers.values():
        try:
            read()
        except TrigonError as error:
            assert str(error)
    shutil.rmtree(folder.parent)
