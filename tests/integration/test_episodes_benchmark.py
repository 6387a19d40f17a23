"""benchmarks/episodes.py completes with the tiny model, and both of its sides sample as much."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.long
@pytest.mark.vllm
def test_episodes_are_measured_against_one_turn(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["episodes.py", "--tiny", "--repeats", "1"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runpy.run_path(str(BENCHMARKS / "episodes.py"), run_name="__main__")
    times, tokens, figures = [part for part in capsys.readouterr().out.split("\n\n") if part.startswith("|")]
    assert [row[1] for row in rows_of(times)] == ["a text", "a text", "a text, an image of 64 tokens"]
    assert all(float(cell) > 0 for row in rows_of(times) for cell in row[2:8])
    for _, observation, observed, total, new, computed, ratio, processed in rows_of(tokens):
        assert float(total) > 1
        assert 8 < float(observed) - 64 * ("image" in observation) < 64
        # 8 episodes of 3 further turns: each computes its observation and a token again.
        assert int(new) == pytest.approx(24 * (float(observed) + 1), abs=2)
        assert int(new) <= int(computed) <= int(new) + 24 * 31  # up to a block of 32 tokens
        assert float(ratio) == pytest.approx(int(computed) / int(new), abs=0.01)
        assert processed == "1"
    assert len(rows_of(figures)) == 5


def test_sampled_tokens_are_compared_where_they_were_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from shared import Trained, count_different

    turns = [(2, [7, 8]), (5, [9])]  # after tokens 0 and 1, and after 4
    ids, in_loss = [0, 1, 7, 8, 4, 9], [False, False, True, True, False, True]
    other = Trained([0, 1, 2, 3], [True] * 4)
    assert count_different([turns], [other, Trained(ids, in_loss)]) == 0
    assert count_different([turns], [Trained(ids[:5], in_loss[:5])]) == 1  # the last one is missing
    assert count_different([turns], [Trained([0, 1, 7, 8, 9, 4], in_loss)]) == 1  # at another place
    assert count_different([turns], [Trained(ids, [False, False, True, False, False, True])]) == 1  # not in the loss
    assert count_different([turns, turns], [Trained([0, 1, 5, 5, 4, 9], in_loss)]) == 4
