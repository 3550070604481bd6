# Everything starts from a clean clone with Python >= 3.11 and make: the first call sets up .venv.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
# Two test workers on two cores: one thread each, or they fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help demo test test-browser check format clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(READY) ## compare routers on a small model and write a page
	@$(BIN)/moiety demo

test: $(READY) ## run the suite (add ARGS="-k name" to choose)
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 $(ARGS)

test-browser: $(READY) ## look at the pages in Chromium, which is installed where we may
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y chromium; } || \
	  { echo "Chromium is not on the PATH and could not be installed here (that takes root and apt-get): install the package chromium and try again."; exit 1; }
	@$(BIN)/python -c 'import playwright' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@MOIETY_BROWSER=required $(BIN)/python -m pytest -q -m browser tests/browser $(ARGS)

check: $(READY) ## lint, formatting, types, direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_imports.py

format: $(READY) ## put every file in the common format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## remove the environment, caches and build outputs
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Brought up to date whenever what the project asks for has changed.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; Moiety needs Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Moiety needs Python 3.11 or newer, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12 $(MAKECMDGOALS)" % v[:2])'
	@echo "Setting up .venv (once; some minutes, most of it PyTorch) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lab]'
	@touch $@
