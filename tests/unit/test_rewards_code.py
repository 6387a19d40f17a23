"""When two reward functions are the same code: files, modules beside them, Python functions."""

import subprocess
import sys
import types

import pytest

from trigon.rewards.code import code_digest, function_digest
from trigon.rewards.load import find_source

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
    return code_digest(find_source(f"{folder / 'reward.py'}:{function}"))


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


CELL = """
import re
from dataclasses import dataclass
from functools import partial

NUMBER = re.compile(r"\\\\d+")
WEIGHTS = {"right": 1.0, "short": 0.5}
ALLOWED = {"a", "b", "c", "d"}
UNUSED = 1

@dataclass
class Scorer:
    weight: float
    def __call__(self, response, ground_truth):
        return helper(response) * self.weight

def helper(text):
    return len(NUMBER.findall(text)) * WEIGHTS["right"] + (text in ALLOWED)

def reward(response, ground_truth, *, scale=2):
    inner = lambda text: helper(text) + 1
    return inner(response) * scale

scorer, fixed = Scorer(0.5), partial(reward, scale=3)
"""


def cell(name, *changes, line=0, file="<cell>"):
    """Return an object of CELL as a notebook makes it, in a new module."""
    text = CELL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    module = types.ModuleType("__main__")
    exec(compile("\n" * line + text, file, "exec"), vars(module))
    return vars(module)[name]


@pytest.mark.parametrize("name", ["reward", "scorer", "fixed"])
def test_a_python_function_is_its_code_and_what_it_uses(name):
    same = function_digest(cell(name))
    assert function_digest(cell(name, line=7, file="<another cell>")) == same
    assert function_digest(cell(name, ("UNUSED = 1", "UNUSED = 2"))) == same
    for change in (
        ('r"\\\\d+"', 'r"\\\\d"'),
        ('"right": 1.0', '"right": 2.0'),
        ('"c", "d"}', '"c", "e"}'),
        ("+ (text in", "- (text in"),
        ("* self.weight" if name == "scorer" else "helper(text) + 1", "* 2" if name == "scorer" else "helper(text)"),
        ("Scorer(0.5)", "Scorer(0.75)") if name == "scorer" else ("scale=2", "scale=4"),
        ("scale=3", "scale=5"),
    ):
        other = function_digest(cell(name, change))
        is_used = not (change[0] == "scale=3" and name != "fixed")
        assert (other != same) == is_used, change


def test_the_digest_of_a_function_is_the_same_in_another_process():
    script = f"""
import sys
from trigon.rewards.callables import reward_source
from trigon.rewards.code import code_digest
exec(compile({CELL!r}, "<in>", "exec"))
print(code_digest(reward_source([(reward, 2.0), (scorer, 1.0), ("math", 0.5)], kwargs={{}})))
"""
    found = {
        subprocess.run(
            [sys.executable, "-"],
            input="\n" * number + script,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(number), "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for number in (1, 2)
    }
    assert len(found) == 1
