# `make serve` and `make test` work in a fresh clone: they make .venv, install into it, and do nothing twice.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# one thread for each test process: several of them share the cores
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help serve install install-dev test test-long test-compose test-sanitized lint docs format bench bench-engine bench-sampling bench-kernels clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

serve: install  ## a real model behind the OpenAI API on port 8000 (more flags: ARGS="--decode 2")
	@$(BIN)/tandem serve $(ARGS)

install: $(VENV)/.stamp-install

install-dev: $(VENV)/.stamp-dev

test: install-dev  ## the fast suite, under ten minutes (one area: ARGS=tests/scheduling)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "not slow and not gpu" $(ARGS)

test-long: install-dev  ## the long grids and soaks, some twenty minutes
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "slow and not gpu" --timeout 1800 $(ARGS)

test-compose: install-dev  ## compose.yaml for real: images, scaling, killed nodes; some minutes
	PYTHON=$(BIN)/python deploy/test-compose.sh $(ARGS)

test-sanitized: install-dev  ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, some minutes
	PYTHON=$(BIN)/python tests/kernels/sanitized.sh $(ARGS)

lint: install-dev  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install-dev  ## writes the pages that are made of the code
	PYTHONPATH=. $(BIN)/python docs/generate.py

format: install-dev  ## mends what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev  ## the split service beside a loop over transformers
	$(BIN)/python -m benchmarks.serve $(ARGS)

bench-engine: install-dev  ## KV memory and scheduling beside the plain ways, some minutes (ARGS="--only memory")
	$(BIN)/python -m benchmarks.engine $(ARGS)

bench-sampling: install-dev  ## what drawing tokens costs of a step, by parameter
	$(BIN)/python -m benchmarks.sampling $(ARGS)

bench-kernels: install-dev  ## each CPU kernel against what a core can do at best
	$(BIN)/python -m benchmarks.kernels $(ARGS)

clean:  ## removes the virtual environment and all caches of the tools (not the models)
	rm -rf kernels/cpu/_native*.so $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# --- the virtual environment ---------------------------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Asked for by its exact version first, pip takes a CPU build of torch where one lies at hand (a find-links folder);
# a range would take the newest release from the index, with gigabytes of CUDA.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	@echo "== installing torch (the largest part)"
	@$(PIP) install torch==2.13.0 || echo "== torch 2.13.0 is not to be had for this Python; taking another one below"
	@touch $@

$(VENV)/.stamp-install: pyproject.toml setup.py $(wildcard kernels/cpu/src/*) $(VENV)/.stamp-torch
	@echo "== installing Tandem"
	@$(PIP) install -qq --editable '.[all]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-install
	@echo "== installing what tests and checks need"
	@$(PIP) install -qq --editable '.[dev]'
	@touch $@
