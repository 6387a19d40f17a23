"""When two reward functions are the same code: files, modules beside them, Python functions."""

from functools import partial

import pytest

from trigon.rewards.callables import code_digest, function_digest, reward_terms
from trigon.rewards.load import find_reward

REWARD = """
import math
from helpers import scale  # beside this file
import parts.inner


def compute_score(response, ground_truth):
    return scale(parts.inner.VALUE)
"""


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "reward.py", REWARD)
    write(tmp_path / "helpers.py", "from more import FACTOR\n\ndef scale(value):\n    return FACTOR * value\n")
    write(tmp_path / "more.py", "FACTOR = 2\n")
    write(tmp_path / "parts" / "__init__.py", "from . import other\n")
    write(tmp_path / "parts" / "inner.py", "VALUE = 1\n")
    write(tmp_path / "parts" / "other.py", "UNUSED = 1\n")
    write(tmp_path / "math.py", "nothing = 1\n")
    write(tmp_path / "unrelated.py", "nothing = 1\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def digest(folder, function="compute_score"):
    return code_digest(find_reward(f"{folder / 'reward.py'}:{function}", {}))


@pytest.mark.parametrize(
    ("file", "old", "new", "is_same"),
    [
        ("reward.py", "scale(parts", "2 * scale(parts", False),
        ("reward.py", "  # beside this file", "", True),
        ("reward.py", "\n\n\ndef", "\n\ndef", True),
        ("helpers.py", "FACTOR * value", "FACTOR + value", False),
        ("more.py", "2", "3", False),
        ("parts/inner.py", "1", "2", False),
        ("parts/other.py", "1", "2", False),
        ("math.py", "1", "2", True),  # not imported: the standard library's is
        ("unrelated.py", "1", "2", True),
    ],
)
def test_a_file_is_its_code_with_the_modules_beside_it(folder, tmp_path_factory, file, old, new, is_same):
    before = digest(folder)
    folder = folder.rename(tmp_path_factory.mktemp("moved") / "copy")
    assert digest(folder) == before != digest(folder, "other")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    assert (digest(folder) == before) == is_same


def reward(response, ground_truth, *, scale=1.0):
    return scale * float(response == ground_truth)


class Scorer:
    def __call__(self, response, ground_truth):
        return reward(response, ground_truth)


@pytest.mark.extended
def test_a_python_function_is_its_source_and_what_has_none_cannot_be_compared():
    assert function_digest(reward) == function_digest(partial(reward, scale=3.0))
    assert function_digest(Scorer()) == function_digest(Scorer)
    assert function_digest(Scorer()) != function_digest(reward)
    names: dict = {}
    exec("def reward(response, ground_truth): return 0.0", names)
    assert function_digest(names["reward"]) == ""
    assert code_digest(reward_terms([names["reward"], "math"], kwargs={})) == ""
