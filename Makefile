# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what is compiled at its first import is kept, whatever the caller's environment says
export PYTHONDONTWRITEBYTECODE :=
READY := $(VENV)/.ready

.PHONY: help setup quickstart test check docs docs-tables bench learn clean

help:  ## list the targets; `make -C benchmarks help` lists benchmarks, proofs and longer checks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv and install the versions of constraints.txt (once); LATEST=1: the newest that pyproject.toml allows

$(READY): pyproject.toml constraints.txt
	@echo "==> Setting up $(VENV): about 7 GB, 3 minutes and more on a slow line; only done once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# compiled at their first import: half of what pip compiles is never imported
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(if $(LATEST),--upgrade --upgrade-strategy eager,-c constraints.txt) -e '.[test]'
	@# weights that tell speakers apart; what the package itself depends on has to be compiled, and is not used
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps resemblyzer==0.1.4
	@# librosa compiles at its first import; two processes that do so at once crash later (numba issue 10128)
	@$(BIN)/python -c 'from librosa import pyin; from librosa.onset import onset_detect'
	@touch $(READY)
	@echo "==> Installed"

quickstart: $(READY)  ## from raw audio to a spoken, scored sample: runs/quickstart/report.html
	@echo "==> Running recipes/quickstart.yaml (stages that are done are skipped)"
	@$(BIN)/audiollm run recipes/quickstart.yaml
	@echo "==> Open runs/quickstart/report.html; the figures are in runs/quickstart/summary.json"

test: $(READY)  ## pass the tests
	@echo "==> Running the tests"
	@# one process per core: waiting threads sleep
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=60

check: $(READY)  ## ruff, mypy and the import contract
	@echo "==> ruff, mypy, import contract"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(READY)  ## the documentation as a site: build/site/index.html (installs MkDocs into .venv)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@$(BIN)/python docs/build_site.py

docs-tables: $(READY)  ## write the tables of objectives, rewards, steps and stages into the documents
	@$(BIN)/python docs/tables.py

bench:  ## every benchmark
	@$(MAKE) --no-print-directory -C benchmarks bench

learn:  ## every proof that a model learns
	@$(MAKE) --no-print-directory -C benchmarks learn

clean:  ## remove the environment and caches (never runs/)
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# targets of earlier versions: those of benchmarks/Makefile
.DEFAULT:
	@$(MAKE) --no-print-directory -C benchmarks $@
