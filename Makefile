# Two commands do everything, set-up included:   make demo   make test
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all soak gpu lint types wheel clean
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Two test files at a time: many tests wait for processes, and more would not fit on 2 cores.
PAIR := -n 2 --dist loadfile

help:      ## these targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## ?/\t/' | expand -t 12

setup:     ## the virtual environment and the system packages; takes seconds the second time
	@bash .ci/setup

demo: setup ## the whole job on this machine, in a sandbox
	@$(BIN)/micsctl demo

test: setup ## tests, within 10 minutes on 2 cores
	$(PYTEST) $(PAIR) -m "not slow"

test-all: test ## the same and the slow suites
	$(PYTEST) -m slow --durations 15

soak: setup ## train for 20 minutes while ranks are killed; the loss curve must not show it
	$(BIN)/python tests/mics/soak.py --minutes 20 --kill-every 120

gpu: setup ## tests on this machine's GPUs; leaves gpu-report.md
	$(PYTEST) tests/gpu

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

wheel: setup ## dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:     ## what set-up, tests and demo made, but nothing else
	rm -rf .venv dist demo gpu-report.md .pytest_cache .mypy_cache .ruff_cache .hypothesis
