"""Media files that a worker keeps: the driver knows which, and messages omit them."""

import hashlib
import random

import pytest

from trigon.distributed.recent_files import RecentFiles
from trigon.distributed.serialization import decode_prompts, encode_prompts
from trigon.types import EncodedMedia, Prompt


def with_files(*files):
    hashes = tuple(hashlib.sha256(file).hexdigest() for file in files)
    return Prompt("train:0", (1, 2, 3), EncodedMedia(files, hashes), "", None, {}, ())


def file_of(number):
    return bytes([number]) * (1_000 + number)


def hash_of(file):
    return hashlib.sha256(file).hexdigest()


def test_a_file_that_two_prompts_share_is_sent_once():
    one, two = encode_prompts([with_files(file_of(1))]), encode_prompts([with_files(file_of(1))] * 2)
    assert len(two) - len(one) < 200


def test_a_file_that_is_held_is_not_sent_and_arrives_all_the_same():
    driver, worker = RecentFiles(keeps_content=False), RecentFiles(keeps_content=True)
    for _ in range(2):
        message = encode_prompts([with_files(file_of(1), file_of(2)), with_files(b"")], driver)
        driver.add([with_files(file_of(1), file_of(2)), with_files(b"")])
        received = decode_prompts(message, worker)
        worker.add(received)
        assert [prompt.vision.encoded for prompt in received] == [(file_of(1), file_of(2)), (b"",)]
    assert len(message) < 1_000


def test_a_file_that_was_neither_sent_nor_held_is_a_bug():
    driver = RecentFiles(keeps_content=False)
    driver.add([with_files(file_of(1))])
    message = encode_prompts([with_files(file_of(1))], driver)
    for worker in (None, RecentFiles(keeps_content=True)):
        with pytest.raises(AssertionError, match="neither sent nor held"):
            decode_prompts(message, worker)


def test_the_least_recently_used_files_are_dropped():
    files = RecentFiles(keeps_content=True, max_bytes=2_500)
    for number in (1, 2, 1, 3):
        files.add([with_files(file_of(number))])
    assert [hash_of(file_of(number)) in files for number in (1, 2, 3)] == [True, False, True]
    assert files[hash_of(file_of(3))] == file_of(3)


def test_driver_and_worker_hold_the_same_files_after_any_messages():
    """Some messages alone have more files than are kept."""
    driver = RecentFiles(keeps_content=False, max_bytes=9_000)
    worker = RecentFiles(keeps_content=True, max_bytes=9_000)
    numbers = random.Random(0)
    num_omitted = 0
    for _ in range(300):
        prompts = [
            with_files(*(file_of(numbers.randrange(16)) for _ in range(numbers.randrange(1, 4))))
            for _ in range(numbers.randrange(1, 6))
        ]
        message = encode_prompts(prompts, driver)
        num_omitted += len(encode_prompts(prompts)) > len(message)
        driver.add(prompts)
        received = decode_prompts(message, worker)
        worker.add(received)
        assert [prompt.vision.encoded for prompt in received] == [prompt.vision.encoded for prompt in prompts]
        for number in range(16):
            assert (hash_of(file_of(number)) in driver) == (hash_of(file_of(number)) in worker)
    assert num_omitted > 100
