# Two commands on a bare clone with Python 3.11 or newer: `make demo` and `make test`. Both set everything up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-full check bench clean

demo: $(READY)
	$(BIN)/nearlinear demo

test: check
	$(BIN)/python -m pytest -m "not full"

test-full: check
	UNALTERED_TORCH=1 $(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	$(BIN)/python benchmarks/data_parallel

# Frameworks first and pinned: a range that admits newer releases of torch, and TensorFlow's own name, would fetch
# gigabytes of CUDA on machines without a GPU. (TensorFlow has no build by this name but on Linux and Windows.)
TENSORFLOW := $(if $(filter Darwin,$(shell uname)),tensorflow,tensorflow-cpu)==2.21.0
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nearlinear needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0" "$(TENSORFLOW)" numpy
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis
