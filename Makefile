# Every target sets up what it needs in .venv and is quick when nothing changed.
#
#   make demo        train nine small models, evaluate them to 32x their training length, write a page
#   make test        the tests
#   make test-quick  the tests of the files that differ from main; without any, a two-minute selection
#   make test-full   the tests, with the slow ones
#   make test-slow   the slow ones alone; TESTS="tests/stories" for a part
#   make test-slurm  a real Slurm on this machine, on one host and on several (root only), torn down afterwards
#   make test-ptx    execute every compiled Triton kernel in the emulator; MUTATE=1: broken ones
#   make fuzz        spoil N=10000 files of every kind: only our own errors may come of it
#   make mutate      break N=300 places of the code: does a test see it? MINUTES=60 for a part
#   make soak        KILLS=100 random kills over layouts, each resumed to the same bits
#   make lint        ruff and mypy
#   make bench       attention, data, evaluation and step benchmarks
#   make gpu-check   for whoever has a GPU: ten minutes, one JSON file, PASS or FAIL
#   make docs-check  generated pages are up to date, links and commands of the pages are valid
#   make docs-outputs  run the commands whose outputs the pages show, where they are stale
#   make site        the documentation as a site, in site/; warnings are errors
#   make dist        the wheel and the source archive, in dist/
#   make install     the runtime only

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --quiet --disable-pip-version-check
REQUIREMENTS := $(wildcard requirements/*.txt)
export TOKENIZERS_PARALLELISM = false

.PHONY: help install install-dev demo test test-quick test-full test-slow test-slurm slurm-packages test-ptx fuzz mutate soak lint format bench gpu-check docs docs-check docs-outputs site dist clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $$($(PYTHON) --version 2>&1) is too old: KERPLE-NeoX needs Python 3.10 or newer."; \
	  echo "       Install one and run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.runtime: $(VENV)/.created requirements/requirements.txt setup.py pyproject.toml
	@echo "Installing the runtime into $(VENV) (the first time takes some minutes) ..."
	@$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements/requirements.txt \
	  && $(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e . || { \
	  echo "error: pip failed (see above). Check the network and the free disk space, then run make again:"; \
	  echo "       it continues where it stopped. To start afresh: make clean."; exit 1; }
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime $(REQUIREMENTS)
	@echo "Installing test and lint tools into $(VENV) ..."
	@$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements/requirements-dev.txt || { \
	  echo "error: pip failed (see above). Check the network and the free disk space, then run make again."; exit 1; }
	@touch $@

install: $(VENV)/.runtime
	@echo "Ready: source $(BIN)/activate, then python deepy.py --help (or kerple --help)"

install-dev: $(VENV)/.dev

demo: $(VENV)/.runtime
	@$(BIN)/python tools/reproduce.py run --suite demo -j 2

# worksteal: an idle worker takes tests from the end of the other's list, so that neither waits.
PARALLEL := -n 2 --dist worksteal -q

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow and not slurm" $(PARALLEL)

test-quick: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow and not slurm" $(PARALLEL) $$($(BIN)/python -m tests.quick)

test-full: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slurm" $(PARALLEL)

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "slow and not slurm" -q $(TESTS)

test-slurm: $(VENV)/.dev slurm-packages
	@$(BIN)/python -m pytest -m slurm -q -n 3 --dist loadfile tests/stories

slurm-packages:
	@command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null || { \
	  [ "$$(id -u)" = 0 ] || { echo "error: make test-slurm needs root, to install and start Slurm."; exit 1; }; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; }

TRITON ?= 3.7.1 3.9.0
test-ptx: $(VENV)/.dev
	@$(BIN)/python -m tests.ptx.harness $(if $(MUTATE),mutate,every $(TRITON:%=--triton %)) \
	  --page docs/triton.md $(ARGS)

N ?= 10000
SEED ?= 0
fuzz: $(VENV)/.dev
	@$(BIN)/python -m tests.fuzz.harness $(N) --seed $(SEED)

MINUTES ?= 600
mutate: N := $(if $(filter file,$(origin N)),300,$(N))
mutate: $(VENV)/.dev
	@$(BIN)/python -m tests.mutation.harness $(N) --seed $(SEED) --minutes $(MINUTES) --only '$(ONLY)'

KILLS ?= 100
soak: $(VENV)/.dev
	@$(BIN)/python -m tests.training.soak $(KILLS) --seed $(SEED)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev
	@code=0; for part in attention step data evaluate; do \
	  $(BIN)/python tools/benchmark.py $$part || code=1; done; exit $$code

gpu-check: $(VENV)/.dev
	@$(BIN)/python tools/gpu_check.py $(ARGS)

docs: $(VENV)/.dev
	@$(BIN)/python tools/generate_config_docs.py

docs-check: $(VENV)/.dev
	@$(BIN)/python tools/generate_config_docs.py --check
	@$(BIN)/python tools/document_outputs.py --check
	@$(BIN)/python -m pytest -q tests/test_house.py tests/stories/test_stated_claims.py \
	  tests/stories/test_readme.py tests/tools/test_site_hooks.py -k "not all_commands and not python_example"

docs-outputs: $(VENV)/.dev
	@$(BIN)/python tools/reproduce.py run --suite demo -j 2
	@$(BIN)/python tools/document_outputs.py

$(VENV)/.site: $(VENV)/.created requirements/requirements-site.txt
	@$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements/requirements-site.txt
	@touch $@

site: export NO_MKDOCS_2_WARNING = 1
site: $(VENV)/.site
	@$(BIN)/mkdocs build --strict

dist: $(VENV)/.created
	@$(BIN)/python -m pip install $(PIP_FLAGS) build
	@$(BIN)/python -m build --outdir dist

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist site *.egg-info
