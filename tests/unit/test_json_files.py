"""JSON files are replaced atomically, in the format that the caller chooses."""

import os

import pytest

from trigon.system.files import write_json


def test_a_file_is_indented_and_ends_with_a_newline(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"step": 1, "name": "Grüße"})
    assert path.read_bytes() == b'{\n  "step": 1,\n  "name": "Gr\\u00fc\\u00dfe"\n}\n'
    write_json(path, {"name": "Grüße", "value": float("nan")}, indent=1, ensure_ascii=False)
    assert path.read_bytes() == '{\n "name": "Grüße",\n "value": NaN\n}\n'.encode()


@pytest.mark.parametrize("sync", [False, True])
def test_a_failure_before_the_rename_keeps_the_old_content(tmp_path, monkeypatch, sync):
    path = tmp_path / "a.json"
    write_json(path, {"step": 1}, sync=sync)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": float("inf")}, allow_nan=False, sync=sync)

    def fail(source, target):
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        write_json(path, {"step": 2}, sync=sync)
    assert path.read_bytes() == before
