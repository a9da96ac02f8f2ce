# On a fresh machine `make demo` and `make test` do everything; both make their own virtual environment.
# `make check` is the short version of `make test`: lint, types, laws, tables, every verb once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo check quick test fuzz kills audit sbom lint benchmark docs dist clean

demo: $(READY)
	$(BIN)/symmerge demo

# types and tests beside one another: pyright uses one core
check: $(READY)
	$(MAKE) --no-print-directory -j2 --output-sync lint quick

quick: $(READY)
	$(BIN)/python -m pytest -n 1 -m quick

# in the order of their names: by default files with few tests come last, and three of those take
# a minute each, of which one of two workers would see the last one alone
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# damaged inputs of every format; `make fuzz REPLAY=fuzz-unclean/X.json` does one again
SEED  ?= 1
CASES ?= 2000
fuzz: $(READY)
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m fuzz --seed $(SEED) --cases $(CASES) \
		$(if $(REPLAY),--replay $(REPLAY))

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks experiments tools
	$(BIN)/ruff format --check src tests benchmarks experiments tools
	$(BIN)/pyright

# kill -9 fifty times in every verb that writes: about half an hour; `make test` kills twice
kills: $(READY)
	$(BIN)/python tests/helpers/killed_verbs.py build/kills --table

# known vulnerabilities in what is installed; says that it skips where advisories are out of reach
audit: $(READY)
	$(BIN)/python tools/audit.py build/audit

# the bill of materials of a release
sbom: $(READY)
	$(BIN)/python tools/sbom.py dist/symmerge.cdx.json

# the site, in build/site; no network is needed to read it. Not --quiet: warnings would not count
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[docs]'
	$(BIN)/python tools/architectures.py
	$(BIN)/python tools/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "wrote build/site: open build/site/index.html"

# wheel and sdist; both are checked, and the wheel merges two models in a clean environment
dist:
	$(PYTHON) tools/dist.py dist

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
