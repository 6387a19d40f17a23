"""Fixtures that several unit test files share. Imports nothing heavy, as tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from support.fake_runs import SharedParts
    from trigon.config.schema import Config
    from trigon.models.load import Processors


@pytest.fixture(scope="module")
def parts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedParts]:
    """Return what the runs of a test file on fake engines share."""
    from support.fake_runs import open_shared_parts

    with open_shared_parts(tiny_model("qwen2"), tmp_path_factory.mktemp("parts")) as parts:
        yield parts


@pytest.fixture(scope="module")
def processors(tiny_vlm: Path) -> Processors:
    """Return the tokenizer and the image processor of the tiny Qwen2.5-VL."""
    from support.models import processors_of

    return processors_of(tiny_vlm)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the tiny Qwen2."""
    from support.models import processors_of

    return processors_of(tiny_model("qwen2")).tokenizer


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that loads the configuration of a run whose files are in tmp_path.

    Its arguments are overrides, and path, a YAML file. No reward function and no validation is set.
    """
    from trigon.config.load import load_config

    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def make(*overrides: str, path: Path | None = None) -> Config:
        needed = [
            f"worker.actor.model.model_path={tmp_path / 'model'}",
            f"data.train_files={tmp_path / 'a.jsonl'}",
            "trainer.val_before_train=false",
            "worker.rollout.n=2",
        ]
        return load_config(path, [*needed, *overrides]).config

    return make


@pytest.fixture
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a cache of `datasets` of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
