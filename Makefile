# Everything runs from here; no step needs root. `make` alone lists what there is.
#   PYTHON=...       the interpreter to build the environment with (3.11 to 3.13)
#   TORCH_INDEX=...  another source for the CPU builds of torch and torchvision
# Both are read by scripts/setup.sh.

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
PYTEST = bin/python -m pytest
# A file's tests stay together, since they share models and engines; four processes of some GB are enough for a laptop.
PARALLEL = -n auto --maxprocesses 4 --dist loadfile -m "not alone"

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-unit test-oldest bench lint format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.ready ## make .venv with the tested versions (CPU)

quickstart: $(VENV)/.ready ## set up, then train a tiny vision-language model, from nothing to an exported folder
	$(VENV)/bin/trigon quickstart

test: lint ## lint, types and the whole suite: what CI runs
	$(VENV)/$(PYTEST) $(PARALLEL)
	$(VENV)/$(PYTEST) -m alone

test-unit: $(VENV)/.ready ## the unit tests only
	$(VENV)/$(PYTEST) $(PARALLEL) tests/unit

test-oldest: $(VENV_OLDEST)/.ready ## the whole suite with the oldest transformers that the pins admit
	$(VENV_OLDEST)/$(PYTEST) $(PARALLEL)
	$(VENV_OLDEST)/$(PYTEST) -m alone

bench: $(VENV)/.ready ## every benchmark, and one table of what is wanted and what was measured (20 minutes on 2 quiet cores)
	$(VENV)/bin/python benchmarks/bench.py

lint: $(VENV)/.ready ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/.ready ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean: ## remove the environments and the tools' caches; runs and checkpoints stay
	rm -rf $(VENV) $(VENV_OLDEST) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

# The stamp says: complete, and for these pins.
$(VENV)/.ready: constraints/cpu.txt pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV) constraints/cpu.txt
	@touch $@

$(VENV_OLDEST)/.ready: constraints/cpu-oldest.txt pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV_OLDEST) constraints/cpu-oldest.txt
	@touch $@
