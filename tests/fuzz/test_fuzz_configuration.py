"""Any configuration is loaded, or refused with a ConfigError that can be read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trigon.config.load import dump_config, inspect_config, load_config, split_arguments
from trigon.config.options import options
from trigon.errors import ConfigError

NAMES = sorted(option.name for option in options().values())
SECONDS = 5.0

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.dates(), st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=10,
)
names = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES).map(lambda name: name.rpartition(".")[0]),
    st.text(max_size=40),
)
near_names = st.builds(
    lambda name, place, letter: name[: place % len(name)] + letter + name[place % len(name) + 1 :],
    st.sampled_from(NAMES),
    st.integers(0, 99),
    st.sampled_from("abcxyz_. "),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "run.yaml"


def is_loaded_or_refused(path: Path | None, overrides: list[str]) -> None:
    """Assert that the configuration is loaded, or refused in a short time with a short message."""
    start = time.process_time()
    try:
        inspected = inspect_config(path, overrides)
        text = dump_config(inspected.config)
        assert yaml.safe_load(text)
        assert all(len(problem) < 20_000 for problem in inspected.problems)
    except ConfigError as error:
        assert 0 < len(str(error)) < 20_000
    assert time.process_time() - start < SECONDS


@pytest.mark.extended
@pytest.mark.faults
@given(st.dictionaries(names | near_names, values, max_size=6))
def test_any_mapping_in_a_file(path: Path, content: dict[str, Any]):
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    is_loaded_or_refused(path, [])


@given(st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_in_a_file(path: Path, content: bytes):
    path.write_bytes(content)
    is_loaded_or_refused(path, [])


@given(st.lists(st.tuples(names | near_names, values.map(str) | st.text(max_size=60)), max_size=4))
def test_any_overrides(overrides: list[tuple[str, str]]):
    is_loaded_or_refused(None, [f"{name}={value}" for name, value in overrides])


@given(
    st.lists(st.text(max_size=40) | st.sampled_from(["config=x.yaml", "x.yaml", "--help", "data.seed=1"]), max_size=4)
)
def test_any_arguments(arguments: list[str]):
    try:
        _, overrides = split_arguments(arguments)
    except ConfigError as error:
        assert str(error)
    else:
        assert all("=" in override for override in overrides)


@pytest.mark.extended
@given(st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=4))
def test_a_configuration_without_problems_is_read_back_as_it_was_written(path: Path, content: dict[str, Any]):
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    try:
        inspected = inspect_config(path, [])
    except ConfigError:
        return
    loaded = inspected.config  # options with problems have their defaults
    path.write_text(dump_config(loaded), encoding="utf-8")
    try:
        again = load_config(path, []).config
    except ConfigError:
        again = inspect_config(path, []).config  # a required option is missing in both
    assert again == loaded
