"""From `file.py:function` to a function, and what is said when there is none."""

import sys

import pytest

from trigon.errors import RewardError
from trigon.rewards.load import RewardSource, find, load


@pytest.fixture(autouse=True)
def _search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a file adds its folder


def test_a_file_and_its_function_are_found(tmp_path, monkeypatch):
    (tmp_path / "grade.py").write_text("")
    monkeypatch.chdir(tmp_path)
    expected = RewardSource(file=str(tmp_path / "grade.py"), module="", function="compute_score")
    assert find("./grade.py:compute_score") == expected
    assert find(f"{tmp_path}/grade.py:compute_score") == expected


def test_a_file_alone_means_its_function_main(tmp_path):
    (tmp_path / "grade.py").write_text("")
    assert find(f"{tmp_path}/grade.py").function == "main"


def test_shipped_names_stand_for_the_verifiers():
    assert find("r1v") == RewardSource(file="", module="trigon.rewards.verifiers.r1v", function="compute_score")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("{folder}/gradd.py:main", "did you mean {folder}/grade.py?"),
        ("mth", "did you mean the shipped 'math'?"),
        (
            "nothing/at/all.py:main",
            "give file.py:function, or one of the shipped math, r1v, dapo, counting, geoqa, vqa, android_gui",
        ),
        ("{folder}/grade.py:", "'' names no function"),
        ("{folder}/grade.py:a b", "'a b' names no function"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest_that_is(tmp_path, spec, complaint):
    (tmp_path / "grade.py").write_text("")
    with pytest.raises(RewardError) as refusal:
        find(spec.format(folder=tmp_path))
    assert complaint.format(folder=tmp_path) in str(refusal.value)


def load_text(folder, text, function="main"):
    (folder / "grade.py").write_text(text)
    return load(RewardSource(file=str(folder / "grade.py"), module="", function=function))


def test_function_and_reward_type_are_loaded(tmp_path):
    function, reward_type = load_text(tmp_path, "REWARD_TYPE = 'sequential'\ndef main(a): return a + 1")
    assert function(1) == 2
    assert reward_type == "sequential"


def test_a_file_without_reward_type_has_none(tmp_path):
    assert load_text(tmp_path, "def main(a): ...")[1] is None


def test_a_file_finds_its_neighbours_and_hides_nothing(tmp_path):
    (tmp_path / "neighbour_of_grade.py").write_text("x = 5")
    (tmp_path / "fractions.py").write_text("x = 'not the real one'")
    text = "import neighbour_of_grade, fractions\ndef main(): return neighbour_of_grade.x, fractions.Fraction(1, 2)"
    assert load_text(tmp_path, text)[0]() == (5, 0.5)


def test_dataclasses_work_in_a_reward_file(tmp_path):
    text = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Grade:
    points: int
def main(): return Grade(3).points
"""
    assert load_text(tmp_path, text)[0]() == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def compute_scores(): ...", "did you mean 'compute_scores'?"),
        ("def other(): ...", "it has other"),
        ("x = 1", "it has no function at all"),
        ("compute_score = 3", "is a int, not a function"),
        ("def compute_score(: ...", "SyntaxError"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_what_a_file_lacks_is_said(tmp_path, text, complaint):
    with pytest.raises(RewardError) as refusal:
        load_text(tmp_path, text, function="compute_score")
    assert complaint in str(refusal.value)
    assert str(tmp_path / "grade.py") in str(refusal.value)


def test_a_file_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "grade.txt").write_text("")
    with pytest.raises(RewardError, match=r"is not a Python file; its name must end in \.py"):
        load(RewardSource(file=str(tmp_path / "grade.txt"), module="", function="main"))
