# Every verb sets up .venv first, once; `make help` lists them.
PYTHON ?= python3
# The set-up that .venv already has, else the CPU one. `make demo EXTRA=gpu` switches.
EXTRA ?= $(if $(wildcard .venv/.ready-gpu),gpu,cpu)
# Passed on to the verb's command, e.g. `make test ARGS="-k budget -x"`.
ARGS ?=

READY := .venv/.ready-$(EXTRA)
BROWSER := .venv/.browser
BIN := .venv/bin
# A folder that a checkout lacks is not an error; one that is there is always run.
TESTS := $(wildcard tests/unit tests/engine tests/quality)

# vLLM's sampler uses torch.compile in eager mode too, and that needs a C++ compiler.
ifeq ($(shell command -v $${CXX:-g++}),)
export TORCHDYNAMO_DISABLE := 1
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long quality lint bench clean

help: ## list the verbs
	@echo "usage: make VERB [EXTRA=cpu|gpu] [PYTHON=python3] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

setup: $(READY) ## create .venv with everything the other verbs need (a few minutes, once)

demo: $(READY) ## run the demonstration
	@echo "==> kvsieve demo"
	@$(BIN)/kvsieve demo $(ARGS)

test: $(READY) $(BROWSER) ## run the unit and engine tests, without the long ones
	@echo "==> tests: $(TESTS) (the long ones are left to make test-long)"
	@$(BIN)/python -m pytest $(TESTS) -m "not long" $(ARGS)

test-long: $(READY) $(BROWSER) ## run every test, the long ones too
	@echo "==> every test"
	@$(BIN)/python -m pytest tests $(ARGS)

quality: $(READY) ## hold answers of the real model to committed bounds
	@$(BIN)/python -m pytest tests/quality $(ARGS)

lint: $(READY) ## check style, formatting, types and the import rule
	@failed=; check() { echo "==> $$*"; "$$@" || failed=yes; }; \
	check $(BIN)/ruff check .; \
	check $(BIN)/ruff format --check .; \
	check $(BIN)/mypy; \
	check $(BIN)/python -m pytest -q tests/unit/test_import_rule.py; \
	test -z "$$failed"

bench: $(READY) ## compare kvsieve with stock vLLM, in pairs
	@echo "==> paired benchmark"
	@$(BIN)/python benchmarks/paired.py $(ARGS)

clean: ## remove .venv and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The script writes the stamp itself, last: an interrupted set-up is taken up again.
$(READY): pyproject.toml scripts/setup.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no $(PYTHON) on this machine; install Python 3.11 or later" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py --extra $(EXTRA)

# Only the tests open the reports in a browser; the other verbs install none.
$(BROWSER): scripts/browser.py | $(READY)
	@$(PYTHON) scripts/browser.py
