"""Completions of drawn lengths (benchmarks/drawn_lengths.py)."""

import random
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import drawn_lengths
from simulation import LongTail

from trigon.rollout.vllm import turns

LENGTHS = LongTail.with_longest(10, ratio=8, of=16)


@pytest.fixture
def variables(tmp_path):
    return drawn_lengths.environment(tmp_path / "plugin", LENGTHS)


def test_vllm_finds_the_plugin_on_the_path(variables, tmp_path):
    folder, benchmarks = variables["PYTHONPATH"].split(":")[:2]
    assert folder == str(tmp_path / "plugin")
    assert Path(benchmarks, "drawn_lengths.py").is_file()
    [plugin] = distributions(path=[folder])
    assert isinstance(plugin, Distribution)
    [entry] = plugin.entry_points
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is drawn_lengths.install


def test_a_request_is_limited_to_the_length_that_its_seed_draws(variables, monkeypatch):
    made = []
    monkeypatch.setenv(drawn_lengths.VARIABLE, variables[drawn_lengths.VARIABLE])

    def make(*_, max_tokens, seed, stop):
        made.append((max_tokens, seed))

    monkeypatch.setattr(turns, "vllm_sampling_params", make)
    drawn_lengths.install()
    drawn_lengths.install()  # the second time has no effect
    for seed in range(64):
        turns.vllm_sampling_params("sampling", "processors", max_tokens=50, seed=seed)
    drawn = [LENGTHS.draw(random.Random(seed)) for seed in range(64)]
    assert made == [(min(50, length), seed) for seed, length in enumerate(drawn)]
    assert min(drawn) < 10 < 50 < max(drawn)
