PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# The theme announces the end of its own line on every build; the range in pyproject.toml stays below it.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
RUN_STAMP = $(VENV)/.resstream-run
DEV_STAMP = $(VENV)/.resstream-dev

.DEFAULT_GOAL := help
.PHONY: help demo test docs bench clean

help:
	@echo "make demo    install resstream and write a report on SmolLM2 to demo-report/"
	@echo "make test    install everything and run all checks: ruff, mypy, strict docs, pytest"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   run the benchmarks in tests/benchmarks/"
	@echo "make clean   remove what the others wrote, except the environment"
	@echo "Set PYTHON=python3.11 to choose an interpreter, VENV=folder to choose where the environment lives, WORKERS=4"
	@echo "to run the tests on more cores."

# The pinned torch comes first and alone, so that a small CPU build is taken where one is at hand.
$(RUN_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "resstream needs Python 3.11 or newer, and $(PYTHON) is older; type: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) --editable ".[dev,oracles]"
	@touch $@

demo: $(RUN_STAMP)
	$(BIN)/resstream report --out demo-report
	@echo "The report is at $(CURDIR)/demo-report/index.html"

# pytest comes last, so that its summary is the last line. (mkdocs --quiet would hide warnings from --strict, too.)
# The model is loaded once before, since the first load writes a cache that all workers then read.
test: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MKDOCS) build --strict
	$(BIN)/python -c 'import resstream; resstream.load("smollm2")'
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

docs: $(DEV_STAMP)
	$(MKDOCS) build --strict
	@echo "The documentation is at $(CURDIR)/site/index.html"

bench: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -s

clean:
	rm -rf site demo-report build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find resstream tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
