# `make help` lists the targets. Every target does its own set-up; a second run finds it done.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
VENV    ?= .venv
OUT     ?= gpu-results
ARGS    ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full first-half second-half check bench gpu-check clean

# NO_VENV=1 runs with $(PYTHON) as it is: nothing is created, installed or downloaded.
ifdef NO_VENV
PY := $(PYTHON)
READY :=
READY_DEV :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready $(VENV)/.ready-operators
READY_DEV := $(READY) $(VENV)/.ready-dev
endif
PIP := $(PY) -m pip install --disable-pip-version-check

# Prints the folder that holds an installed torch of at least 2.11; fails without one. Imports nothing.
FIND_TORCH := -c 'import sys, importlib.metadata as m; d = m.distribution("torch"); \
	sys.exit("too old") if [int(p) for p in d.version.split(".")[:2]] < [2, 11] else print(d.locate_file(""))' 2>/dev/null

help:  ## list the targets and the variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)  TORCH=$(TORCH)  VENV=$(VENV)  OUT=$(OUT)"
	@echo "  ARGS=... goes to pytest, the demo or the benchmarks; NO_VENV=1 uses PYTHON as it is, without installing anything"

demo: $(READY)  ## tokenizer, model, fine-tuning on 2 sharded ranks, export, proof of equal logits; offline, 1 minute
	$(PY) scripts/demo.py $(ARGS)

# Two halves of the tests run side by side, because most tests use one core. With ARGS, which may name files, one run.
# Not by pytest-xdist: tests fork ranks, and its workers have threads, which must not fork.
FIRST_HALF := $(addprefix tests/,training command_line scripts data adapters hub convert engine/test_checkpoint.py engine/test_checkpoint_meshes.py engine/test_training_checkpoint.py engine/test_csrc.py engine/test_cuda_on_cpu.py engine/test_ops_sanitized.py test_docs.py test_package.py test_imports.py test_cli.py)
FAST := not full and not gpu and not network
FULL := full and not gpu and not network
ifeq ($(strip $(ARGS)),)
TEST = $(MAKE) --no-print-directory -j 2 --output-sync=target "MARKS=$(1)" first-half second-half
else
TEST = $(PY) -m pytest -m "$(1)" $(ARGS)
endif

test: $(READY)  ## the fast tests, under 10 minutes on 2 cores
	$(call TEST,$(FAST))

test-full: $(READY)  ## the slow tests that `make test` leaves out, under 30 minutes more
	$(call TEST,$(FULL))

first-half:
	$(PY) -m pytest -q -m "$(MARKS)" $(FIRST_HALF)

second-half:
	$(PY) -m pytest -q -m "$(MARKS)" $(FIRST_HALF:%=--ignore=%)

check: $(READY_DEV)  ## what a change must pass: linter, formatter, types, fast tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(call TEST,$(FAST))

bench: $(READY)  ## the benchmarks against peers from PyPI, about three hours; ARGS="--data DIR --quick --only NAME ..."
	$(PY) -m scripts.bench $(ARGS)

gpu-check: $(READY)  ## GPU tests and GPU benchmarks in 8 minutes, results in OUT; ARGS="--only STEP ... --minutes N"
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu-check: torch finds no GPU on this machine"; exit 1; }
	$(PY) -m scripts.bench.lib.gpu_check --output "$(OUT)" $(ARGS)

clean:  ## remove .venv, caches and the results in their default places
	rm -rf .venv build dist demo-run gpu-results .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that PYTHON already has is borrowed by a .pth file, which works where PYTHON is itself in a virtual environment.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; choose one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if torch=$$($(PYTHON) $(FIND_TORCH)); then \
		echo "using the torch of $(PYTHON) in $$torch"; \
		echo "$$torch" > $$($@ -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-the-base-interpreter.pth; \
	fi

$(VENV)/.ready: pyproject.toml setup.py | $(VENV)/bin/python
	@$(PY) $(FIND_TORCH) >/dev/null || { echo "installing $(TORCH)"; $(PIP) $(TORCH); }
	@echo "installing modelcenter and what its tests need into $(VENV)"
	@$(PIP) --quiet --editable ".[test]"
	@touch $@

$(VENV)/.ready-operators: $(wildcard csrc/*/*) engine/ops/build.py | $(VENV)/.ready
	@if $(PY) -m engine.ops --build; then touch $@; fi  # else tried again: a compiler may come

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(PIP) --quiet --editable ".[dev]"
	@touch $@
