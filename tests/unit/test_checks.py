"""`trigon check`: each planted fault is named, and nothing else; a good run has no problem."""

import pytest

from support.planted import FAULTS, TOGETHER, good_run
from trigon.checks.catalogue import CHECKS, check_run


@pytest.fixture(autouse=True)
def _own_cache(own_datasets_cache):
    """Do not fill the cache that other tests share."""


@pytest.fixture
def run(tmp_path, tiny_vlm):
    return good_run(tmp_path, tiny_vlm)


def check(run):
    return check_run(None, run.write(), machine=run.machine)


def found(report):
    return {problem.kind for problem in report.problems}


def shown(report):
    return "\n".join(f"{problem.kind}: {problem.message}" for problem in report.problems)


def test_a_good_run_has_no_problem(run):
    report = check(run)
    assert found(report) == set(), shown(report)
    assert not report.would_fail
    skipped = {result.name for result in report.results if result.status == "skipped"}
    assert skipped == {"network"}  # one worker opens no port
    assert [result.name for result in report.results[1:]] == [each.name for each in CHECKS]


@pytest.mark.parametrize("name", FAULTS)
def test_exactly_the_planted_fault_is_named(run, name, monkeypatch):
    kind, plant = FAULTS[name]
    if kind == "versions.package":
        monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    plant(run)
    report = check(run)
    assert found(report) == {kind}, shown(report)


def test_all_faults_of_a_dataset_are_named_at_once(run):
    for name in TOGETHER:
        FAULTS[name][1](run)
    report = check(run)
    assert found(report) == {FAULTS[name][0] for name in TOGETHER}, shown(report)
    assert report.would_fail
