# `make demo` and `make test` do everything on a fresh machine; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One thread per test process: two of them share two cores without fighting. Failures end the
# output: warnings of the product are checked by tests, not read here.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --disable-warnings

.PHONY: help demo test test-fast check stress mutants clean

help:
	@echo "make demo       install, fetch MNIST, train 10 private nodes, write report.html"
	@echo "make test       install and run all tests but the full-length trials"
	@echo "make test-fast  the tests that take seconds"
	@echo "make check      format, lint, types, import contracts"
	@echo "make stress     the full-length trials"
	@echo "make mutants    plant faults in the privacy room and count those that no test sees"

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/dpcsgp demo

test: $(INSTALLED)
	$(PYTEST) -m "not stress"

test-fast: $(INSTALLED)
	$(PYTEST) -m "not slow and not stress"

stress: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress -s

mutants: $(INSTALLED)
	$(BIN)/python tests/mutants/run.py --jobs 2

check: $(INSTALLED)
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
