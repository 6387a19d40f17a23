"""What a worker finds on its node is told before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trigon.distributed.preflight import SAME_EVERYWHERE, NodeReport, check_node_reports, inspect_node
from trigon.errors import ConfigError, EngineError

FINE = NodeReport("one", {"python": "3.12", **dict.fromkeys(SAME_EVERYWHERE, "1.0")}, "")


@dataclass
class Two:
    """Two ranks between which the network works, or does not."""

    found: int = 2
    size: int = 2
    rank: int = 1

    def count_ranks(self) -> int:
        return self.found


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").touch()
    return {"model": tmp_path / "model", "run": tmp_path / "run"}


def look(places: dict[str, Path], ranks: Two | None = None) -> NodeReport:
    return inspect_node(ranks or Two(), model_path=str(places["model"]), run_folder=places["run"], marker="run.lock")


def test_a_node_where_all_is_well(places):
    found = look(places)
    assert found.problem == ""
    assert found.versions["torch"]
    check_node_reports([found, found])


def test_a_hub_id_is_not_looked_up(places):
    assert look({**places, "model": Path("Qwen/Qwen2.5-VL-3B-Instruct")}).problem == ""


def test_a_node_that_does_not_see_model_and_run(places, tmp_path):
    found = look({"model": tmp_path / "elsewhere", "run": tmp_path / "nowhere"})
    with pytest.raises(ConfigError) as caught:
        check_node_reports([FINE, found])
    said = str(caught.value)
    assert said.startswith(f"rank 1 on {found.host}: there is no model in {tmp_path / 'elsewhere'}")
    assert "it must be on a disk that all nodes share (trainer.save_checkpoint_path)" in said


def test_a_disk_on_which_not_even_the_weights_fit(places):
    with (places["model"] / "model.safetensors").open("wb") as file:
        file.truncate(2**43)  # a hole
    assert "bytes free, and the model alone has 8,796,093,022,208; make room" in look(places).problem


def test_ranks_that_do_not_add_up(places):
    with pytest.raises(EngineError, match="2 workers add up to 1"):
        look(places, Two(found=1))


def test_other_versions_are_named_with_both_nodes():
    other = replace(FINE, host="two", versions={**FINE.versions, "torch": "2.0", "vllm": ""})
    with pytest.raises(ConfigError) as caught:
        check_node_reports([FINE, FINE, other])
    assert str(caught.value) == (
        "rank 2 on two has other versions: torch 2.0 (rank 0 on one: 1.0), vllm missing (rank 0 on one: 1.0); install "
        "the same everywhere"
    )
