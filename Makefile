# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint benchmark clean

demo: $(READY)
	$(BIN)/symmerge demo

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks experiments
	$(BIN)/ruff format --check src tests benchmarks experiments
	$(BIN)/pyright

benchmark: $(READY)
	set -e; for file in benchmarks/*.py; do echo $$file; $(BIN)/python $$file; done

# torch first and pinned: a bare requirement would bring gigabytes of CUDA where a CPU build serves
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
