# `make demo` and `make test` are all the set-up a fresh machine needs: Python >= 3.10, make and pip.
# Both make .venv once, install this checkout into it (editable), and run.
#
#   make demo                    the pinned torch of constraints/ci.txt (a CUDA build where the index has one)
#   make demo TORCH=2.6.0        another torch
#   make demo CONSTRAINT=        no pin: the newest torch that pip finds, or the one .venv has
#   make demo ARGS="--steps 50"  options for `luminav demo`
#   make test ARGS="-k rule"     options for pytest
#
# pip reads its own settings as always, so PIP_EXTRA_INDEX_URL and the like choose where torch comes from.

PYTHON     ?= python3
VENV       ?= .venv
VENV_FLAGS ?=
CONSTRAINT ?= constraints/ci.txt
TORCH      ?=
ARGS       ?=
# pytest processes. Each has one torch thread: the tensors are small, and results do not depend on the machine's cores.
WORKERS    ?= auto

BIN := $(VENV)/bin
PIN := $(if $(TORCH),torch==$(TORCH),$(if $(CONSTRAINT),--constraint $(CONSTRAINT)))

.PHONY: demo test lint types unit format build bundle docs clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/luminav demo $(ARGS)

# In this order, one after the other, also under `make -j`; pytest speaks last.
test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 300 $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(VENV)/.installed-dev
	$(BIN)/python -m build

# The whole package, without its command line, in dist/luminav.py.
bundle: $(BIN)/python
	@mkdir -p dist
	$(BIN)/python tools/bundle.py --output dist/luminav.py

# The documents as a site under site/. Any warning is an error. To see it while writing: .venv/bin/mkdocs serve
docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

# Runs under runs/ are the user's and stay.
clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
		f"luminav needs Python 3.10 or newer, $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# Changes only when another torch is asked for, so that the install below runs again then, and only then.
$(VENV)/.pin: FORCE | $(BIN)/python
	@echo '$(PIN)' | cmp -s - $@ || echo '$(PIN)' > $@

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINT) $(VENV)/.pin | $(BIN)/python
	$(BIN)/python -m pip install $(PIN) --editable '.[$*]'
	@touch $@
