# `make run` streams a story from the bundled model; `make test` is the whole check. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# The backend of this machine's wheel: Metal on an Apple GPU, Accelerate on an Intel Mac, else the CPU.
UNAME := $(shell uname -s)-$(shell uname -m)
ifeq ($(UNAME),Darwin-arm64)
BACKEND ?= metal
else ifeq ($(UNAME),Darwin-x86_64)
BACKEND ?= accelerate
else
BACKEND ?= cpu
endif

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format typecheck pytest wheel clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with our llama.cpp wheel and the worker; seconds when nothing changed
	@$(PYTHON) -m builds setup --venv $(VENV) --backend $(BACKEND)

run: setup ## start the worker on the bundled model and print the curl line that streams a story
	@$(VENV)/bin/llorch-$(BACKEND) $(ARGS)

test: setup lint pytest ## everything: style, types, tests

lint: setup ## ruff and mypy, without the tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

pytest: setup ## the tests alone (TESTS="tests/api -k cancel" narrows them)
	$(VENV)/bin/pytest -m "not long" $(TESTS)

wheel: setup ## build dist/$(BACKEND)/*.whl and its SHA256SUMS
	$(PY) -m builds $(BACKEND)

clean: ## remove what was built in the checkout (the wheel cache stays)
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
