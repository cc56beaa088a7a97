# Each target does its own set-up: a fresh machine needs Python 3.11 or newer and make, nothing else.
# Everything is installed into .venv/ here; models go to the store (EDGESPEC_HOME, or the user's data folder).

VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
PYTHON ?= python3
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help chat test test-heavy lint format model clean

help:
	@echo "make chat        talk to a small local model (reads prompts from stdin)"
	@echo "make test        all checks and the fast test suite"
	@echo "make test-heavy  the long tests too; downloads about 2 GB of models"
	@echo "make lint        ruff, pyright and the import rules"
	@echo "make format      let ruff rewrite the code"
	@echo "make clean       delete .venv and caches; models stay"

# Only the answer goes to stdout.
chat: $(VENV)/.runtime
	@$(BIN)/edgespec pull $(MODEL) </dev/null >&2
	@$(BIN)/edgespec chat --model $(MODEL)

test: lint model
	@$(BIN)/python -m pytest

test-heavy: lint model
	@$(BIN)/edgespec pull qwen2.5-coder-1.5b </dev/null >&2
	@$(BIN)/edgespec pull qwen2.5-coder-0.5b </dev/null >&2
	@$(BIN)/python -m pytest -m "heavy or not heavy"

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# What the tests of real models run on.
model: $(VENV)/.dev
	@$(BIN)/edgespec pull $(MODEL) </dev/null >&2

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

# Stamps: made when an installation is complete, out of date when pyproject.toml changes.

$(VENV)/.python:
	@chosen=; \
	for candidate in "$(PYTHON)" python3.14 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "edgespec needs Python 3.11 or newer; '$(PYTHON)' is not. Install one, or run: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$($$chosen -V)" >&2; \
	rm -rf $(VENV); \
	"$$chosen" -m venv $(VENV) >&2 || { \
	  echo "Could not make a virtual environment; on Debian or Ubuntu first run: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.runtime: pyproject.toml | $(VENV)/.python
	@echo "Installing edgespec (a few minutes the first time)" >&2
	@$(PIP_INSTALL) --editable . >&2
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.python
	@echo "Installing edgespec and its development tools (a few minutes the first time)" >&2
	@$(PIP_INSTALL) --editable ".[dev,mlx]" >&2
	@touch $@ $(VENV)/.runtime
