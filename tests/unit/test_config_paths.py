"""Local paths or hub ids."""

from pathlib import Path

import pytest

from trigon.config.paths import DATASET_SUFFIXES, local_path, split_dataset


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        *((text, False) for text in ("Qwen/Qwen2.5-VL-3B-Instruct", "gpt2", "rows.parquet", "owner/rows.csv")),
        *((text, True) for text in ("./model", "/data/model", "a/b/c", "..", ".hidden", "owner/existing", "~/model")),
    ],
)
def test_a_name_or_owner_and_name_is_a_hub_id_unless_it_exists(text, is_local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of/user")
    Path("owner/existing").mkdir(parents=True)
    assert local_path(text) == (Path(text.replace("~", "/home/of/user")) if is_local else None)
    for suffix in DATASET_SUFFIXES:
        assert local_path(f"owner/rows{suffix}", suffixes=DATASET_SUFFIXES) == Path(f"owner/rows{suffix}")
    assert local_path("owner/rows", suffixes=DATASET_SUFFIXES) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/rows", ("owner/rows", None)),
        ("owner/rows@test", ("owner/rows", "test")),
        ("rows.jsonl@train[:100]", ("rows.jsonl", "train[:100]")),
        ("odd@name.json", ("odd@name.json", None)),
        ("odd@name.json@test", ("odd@name.json", "test")),
        ("@test", ("@test", None)),
    ],
)
def test_the_split_follows_the_last_at_sign_that_is_not_part_of_a_file_name(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd@name.json").touch()
    assert split_dataset(text) == expected
