"""JSON files are replaced atomically, in the format that the caller chooses."""

import os

import pytest

from trigon.system.files import read_json_object, write_json


def test_a_file_is_indented_and_ends_with_a_newline(tmp_path):
    path = tmp_path / "config.json"
    content = {"name": "Grüße", "text": "half a pair \ud83d"}
    write_json(path, content)
    assert path.read_bytes() == '{\n  "name": "Grüße",\n  "text": "half a pair \\ud83d"\n}\n'.encode()
    assert read_json_object(path) == content
    write_json(path, {"value": float("nan")}, indent=1)
    assert path.read_bytes() == b'{\n "value": NaN\n}\n'


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
