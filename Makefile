# `make help` lists what there is. Everything runs in .venv, made from the hash-pinned locks in requirements/.
.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help demo test test-fast lint format typecheck bench soak docs generate cluster e2e screenshots lock clean

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CONSOLE := api/tandem_api/console/vendor/built.json
ARGS ?=
BENCH ?=
SOAK ?= 1000
E2E ?= $(shell if [ -n "$$KUBECONFIG" ]; then echo kubeconfig; \
	elif command -v kind >/dev/null && docker info >/dev/null 2>&1; then echo kind; else echo bare; fi)

# The newest Python that starts; `make PYTHON=/path/to/python3 ...` chooses another.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)

PIP := $(BIN)/python -m pip --disable-pip-version-check
# Modules are compiled when they are first imported, not all of them at installation: half of them never are. Hundreds
# of processes start here, and none may be kept from leaving what it compiled for the next.
INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(STAMPS)/runtime ## a healthy pair that matches and a corrupting one that is found (about 3 minutes)
	$(BIN)/tandem demo $(ARGS)

test: $(STAMPS)/dev ## every test; ARGS="-k link" passes options to pytest
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(STAMPS)/dev ## the tests that take seconds rather than minutes
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(STAMPS)/dev ## style, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p deploy.dashboards
	$(BIN)/lint-imports

format: $(STAMPS)/dev ## put the code into its format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

typecheck: $(STAMPS)/dev ## types only
	$(BIN)/mypy

cluster: $(STAMPS)/dev ## build what the tests on a real cluster boot (10 minutes once; needs Go, and Debian packages)
	$(BIN)/python -m tests.cluster.bare build

e2e: $(STAMPS)/dev ## the tests on a real cluster: that in KUBECONFIG, kind where Docker is, else two nodes made here (as root)
	$(if $(filter bare,$(E2E)),$(BIN)/python -m tests.cluster.bare build)
	TANDEM_E2E=$(E2E) TANDEM_REQUIRE_PARTS=$(if $(filter bare,$(E2E)),1,0) $(BIN)/python -m pytest tests/cluster/e2e $(ARGS)

bench: $(STAMPS)/dev ## the benchmarks, or one of them: make bench BENCH=name
	$(BIN)/python -m bench $(BENCH)

soak: $(STAMPS)/dev ## the kill and fault tests many times over: make soak SOAK=1000 (hours)
	TANDEM_SOAK=$(SOAK) $(BIN)/python -m pytest tests/soak $(ARGS)

docs: $(STAMPS)/dev ## check that the docs say what the code does
	$(BIN)/python -m pytest -q tests/unit/test_docs.py tests/unit/test_project.py

generate: $(STAMPS)/dev ## write what is generated anew: the chart's CRD and dashboards, docs/pairrun.md's tables, docs/openapi.json
	$(BIN)/python -m tandem.pairrun.generate
	$(BIN)/python -m deploy.dashboards.generate
	$(BIN)/python -m tandem_api.openapi

screenshots: $(STAMPS)/dev ## take the pictures of the README anew (needs Chromium)
	$(BIN)/python docs/images/take.py

lock: ## resolve the locks in requirements/ anew (needs uv)
	requirements/compile.sh --upgrade

clean: ## remove the environment, caches and compiled programs
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist

# -- the environment ---------------------------------------------------------------------------------

$(BIN)/python:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "error: Tandem needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not,none was found): install one or use make PYTHON=/path/to/python3" >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "error: $(PYTHON) lacks venv or pip: install them (on Debian and Ubuntu: apt-get install python3-venv) or use make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)

# What the web console takes out of a package: ignored by Git, held by the wheel.
$(CONSOLE): requirements/console.txt api/tandem_api/console/build.py | $(BIN)/python
	PYTHONPATH=api $(BIN)/python -m tandem_api.console.build

$(STAMPS)/runtime: requirements/runtime.txt requirements/build.txt pyproject.toml | $(BIN)/python $(CONSOLE)
	$(INSTALL) --require-hashes -r requirements/runtime.txt -r requirements/build.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: requirements/dev.txt requirements/accessibility.txt pyproject.toml | $(BIN)/python $(CONSOLE)
	$(INSTALL) --require-hashes -r requirements/dev.txt
	$(INSTALL) --require-hashes --no-deps -r requirements/accessibility.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@mkdir -p $(STAMPS) && touch $(STAMPS)/runtime $@
