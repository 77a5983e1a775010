# Needs Python >= 3.11 and make.  Every verb does its own set-up in .venv.
#
#   make demo     train on real text, first with the baseline, then with Libra
#   make test     lint, format, types, documentation, tests
#   make bench    attention benchmark: baselines and Libra, in under ten minutes
#   make docs     the documentation as a site in ./site; a broken link is an error
#
# PYTHON=python3.12        choose the interpreter
# VENV=path                use another virtual environment than .venv
# PIP_ARGS="..."           more arguments for pip, for instance an index with CPU builds
# ARGS="..."               arguments for `libra demo`, pytest or the benchmark

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
VENV     ?= .venv
BIN      := $(VENV)/bin
RANKS    ?= 2
PIP_ARGS ?=
ARGS     ?=

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types check bench docs clean

help:
	@sed -n '3,10s/^# \{0,1\}//p' Makefile

setup: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/libra demo $(ARGS)

test: lint types docs
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/attention.py --ranks $(RANKS) $(ARGS)

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- set-up: one stamp file, so that a second run is instant --------------------------------------

# torch alone and pinned first: a range may bring a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e ".[dev,docs]"
	@touch $@

$(BIN)/python:
	@set -e; found=; \
	for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        found=$$python; break; \
	    fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "Libra needs Python 3.11 or newer, and '$(PYTHON)' is older or missing." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$found --version); the first install takes a few minutes."; \
	if ! $$found -m venv $(VENV); then \
	    rm -rf $(VENV); \
	    echo "'$$found -m venv' failed: this Python lacks venv or ensurepip" >&2; \
	    echo "(on Debian and Ubuntu they are in the package python3-venv)." >&2; \
	    exit 1; \
	fi
