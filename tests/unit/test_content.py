"""Digests of files: small ones entirely, large ones by blocks."""

import os

import pytest

from trigon.system.files import FULL_BYTES, file_digest, text_digest


def test_a_small_file_is_compared_entirely(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"x" * 100_000)
    before = file_digest(file)
    os.utime(file, (0, 0))
    assert file_digest(file) == before
    file.write_bytes(b"x" * 70_000 + b"y" + b"x" * 29_999)
    assert file_digest(file) != before
    (tmp_path / "empty").touch()
    assert file_digest(tmp_path / "empty") != before
    assert text_digest("a") != text_digest("b")
    assert len(text_digest("\udc80")) == 32


@pytest.mark.parametrize("place", [0, FULL_BYTES, FULL_BYTES // 2])
def test_a_large_file_is_compared_by_size_and_blocks(tmp_path, place):
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(FULL_BYTES + 1000)  # takes no space
    before = file_digest(file)
    with file.open("r+b") as stream:  # another content, not a byte: blocks are 64 KiB apart
        stream.seek(min(place, FULL_BYTES + 1000 - 70_000))
        stream.write(b"y" * 70_000)
    assert file_digest(file) != before
    with file.open("wb") as stream:
        stream.truncate(FULL_BYTES + 1001)
    assert file_digest(file) != before
