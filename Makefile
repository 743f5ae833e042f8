# Muster's commands. `make` alone lists them; each does all of its own set-up.
# A second run needs no network: set-up happens again only when a lock file or pyproject.toml changes.

SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
QUICK  ?=
PYTHONS ?= python3.11 python3.12 python3.13
WORKERS ?= 4# for two cores: three left a third of them idle; each worker may start a Spark, a browser and a domain
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINNED := --generate-hashes --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-header --quiet
# Tests start hundreds of processes: with PYTHONDONTWRITEBYTECODE each would compile every module it imports.
COMPILE := $(BIN)/python -m compileall -q src tests
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
# Ends a worker whose test hangs in native code, where no other limit works, and shows where it hangs.
HANGING := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
RUNTIME := requirements.lock requirements-spark.lock requirements-amqp.lock
LOCK   := uv pip compile pyproject.toml $(PINNED)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast test-pythons test-wheels docs check format bench faults sim soak storm fuzz mutants lock picture build audit clean

help: ## list these commands
	@grep -hE '^[a-z][a-zA-Z%-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.base ## install everything into .venv (once)

$(VENV)/.base: requirements.lock requirements-dev.lock pyproject.toml
	@echo "setting up $(VENV) (once; downloads)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Muster needs Python 3.11 or later; name one with PYTHON=python3.11 make ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --require-hashes -r requirements.lock -r requirements-dev.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# The build needs neither the product's dependencies nor those of development.
.venv-build/.made: requirements-build.lock
	@echo "setting up .venv-build (once; downloads)"
	@test -x .venv-build/bin/python || $(PYTHON) -m venv .venv-build
	@.venv-build/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements-build.lock
	@touch $@

$(VENV)/.spark: requirements-spark.lock $(VENV)/.base
	@echo "setting up Spark in $(VENV) (once; a large download)"
	@$(PIP) install --require-hashes -r requirements-spark.lock
	@$(BIN)/python -m muster.pipeline.source.java_runtime
	@touch $@

# Compiled where no wheel fits. Without a compiler everything but the AMQP gateway works.
$(VENV)/.amqp: requirements-amqp.lock $(VENV)/.base
	@echo "setting up the AMQP gateway's engine in $(VENV) (once; compiles)"
	@$(PIP) install --require-hashes -r requirements-amqp.lock \
	    || echo "left out: the AMQP gateway (python-qpid-proton did not build: it needs a C compiler and OpenSSL's headers)"
	@touch $@

# A browser and a peer for tests: Debian's packages, installed by root only; the step says what it does or leaves out.
$(VENV)/.debian: tests/debian.py $(VENV)/.base
	@$(BIN)/python -m tests.debian
	@touch $@

demo: setup $(VENV)/.spark ## a fleet, a worm and the whole loop, live (FLEET=100000 for more)
	@$(BIN)/muster demo worm

test: setup $(VENV)/.spark $(VENV)/.amqp $(VENV)/.debian ## all checks and all tests but the slow ones
	@$(MAKE) --no-print-directory check
	@$(COMPILE)
	@PYTHONDONTWRITEBYTECODE= STABLE=$(STABLE) $(BIN)/python -m tests.repeat -n $(WORKERS) $(HANGING)

test-all: setup $(VENV)/.spark $(VENV)/.amqp $(VENV)/.debian ## the slow tests as well
	@$(MAKE) --no-print-directory check
	@$(COMPILE)
	@$(PYTEST) -n $(WORKERS) -m "slow or not slow"

test-fast: setup ## the fast tier: on every save, under two minutes (tests/tiers.py)
	@$(COMPILE)
	@$(PYTEST) --fast -n $(WORKERS) -q

# The fast tier needs no Spark and no Java. Each version has an environment of its own, beside .venv.
test-pythons: ## the fast tier on each Python: make test-pythons PYTHONS="python3.12 python3.13"
	@for python in $(PYTHONS); do \
	    echo "== $$($$python --version)"; \
	    $(MAKE) --no-print-directory PYTHON=$$python VENV=.venv-$$(basename $$python) test-fast || exit 1; \
	done

test-wheels: setup ## the wheel in bare environments: without extras, and with each one (EXTRAS="none web")
	@$(BIN)/python -m tools.wheels $(EXTRAS)

docs: setup ## the documentation site, in site/ (links are checked); make docs SERVE=1 shows it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict)

check: setup $(VENV)/.spark ## lint, types and architecture
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers 2 || $(BIN)/mypy # its workers do not always start on a busy machine
	@PYTHONPATH=src $(BIN)/lint-imports --no-cache

format: setup ## put the code into one form
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: setup $(VENV)/.spark ## every benchmark (QUICK=1: under a minute each)
	@QUICK=$(QUICK) $(BIN)/python -m benchmarks.harness

bench-pipeline bench-pipeline_alone bench-pipeline_plain bench-pipeline_realistic bench-history: $(VENV)/.spark

bench-%: setup ## one benchmark: make bench-bus
	@QUICK=$(QUICK) $(BIN)/python -m benchmarks.harness $*

faults: setup ## real processes under faults: make faults WORKLOAD=contexts NEMESIS=kill-broker,delay SECONDS=15 SEED=1
	@PYTHONPATH=src:. $(BIN)/python -m tests.faults $(if $(WORKLOAD),--workload $(WORKLOAD)) \
	    $(if $(NEMESIS),--nemesis $(NEMESIS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(SAVE),--save)

sim: setup ## the simulated domain: make sim SEED=17 replays a seed, make sim N=1000 searches
	@PYTHONPATH=src:. PYTHONHASHSEED=0 $(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--count $(or $(N),100)) \
	    $(if $(FIRST),--first $(FIRST)) $(if $(PARTS),--parts $(PARTS)) $(if $(TROUBLE),--trouble-s $(TROUBLE)) $(if $(ALL),--all)

soak: setup $(VENV)/.spark $(VENV)/.amqp ## an hour of load with a fault every minute: make soak MINUTES=20 FLEET=500 SEED=1
	@PYTHONPATH=src:. $(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --fleet $(or $(FLEET),500) --seed $(or $(SEED),1) \
	    $(if $(WRITE),--write)

storm: setup ## a whole fleet reconnects after a broker restart: make storm AGENTS=10000 SENSORS=100000
	@PYTHONPATH=src:. $(BIN)/python -m tests.storm --agents $(or $(AGENTS),10000) --sensors $(or $(SENSORS),100000) \
	    $(if $(WRITE),--write)

$(VENV)/.fuzz: requirements-fuzz.lock $(VENV)/.spark
	@echo "setting up the fuzzer in $(VENV) (once)"
	@$(PIP) install --require-hashes -r requirements-fuzz.lock
	@touch $@

fuzz: setup $(VENV)/.fuzz $(VENV)/.amqp ## a million inputs for every parser, 10,000 for every endpoint: make fuzz TARGET=predicate,topic N=10000
	@PYTHONPATH=src:. $(BIN)/python -m tests.fuzz.run "$(TARGET)" $(N) $(if $(SAVE),--save)

mutants: setup ## mutation tests of a package's deciding cores: make mutants PACKAGE=manage
	@$(BIN)/python -m tools.mutants $(PACKAGE)

lock: ## pin dependencies anew (needs uv)
	@$(LOCK) --extra websocket --extra monitor --extra fast --extra web -o requirements.lock
	@uv pip compile $(PINNED) --group dev -c requirements.lock -o requirements-dev.lock
	@$(LOCK) --extra spark -c requirements.lock -o requirements-spark.lock
	@$(LOCK) --extra amqp -c requirements.lock -o requirements-amqp.lock
	@uv pip compile $(PINNED) --group build -c requirements.lock -o requirements-build.lock
	@uv pip compile $(PINNED) --group fuzz -o requirements-fuzz.lock

picture: setup $(VENV)/.spark ## the pictures of the dashboard in docs/pictures, anew (needs Chromium)
	@$(BIN)/python -m tests.web.picture docs/pictures

build: .venv-build/.made ## the wheel and a list of its parts (SBOM), in dist/
	@.venv-build/bin/python -m build --no-isolation --wheel
	@cat $(RUNTIME) | PYTHONWARNINGS=ignore::UserWarning .venv-build/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application \
	    --output-reproducible -o dist/sbom.cdx.json -

audit: .venv-build/.made ## compare pinned versions with known vulnerabilities (asks OSV; needs a network)
	@.venv-build/bin/pip-audit --require-hashes --disable-pip --vulnerability-service osv \
	    $(addprefix -r ,$(RUNTIME) requirements-dev.lock requirements-build.lock)

clean: ## remove what set-up and tests made
	@rm -rf $(VENV) .venv-python* .venv-build site dist .pytest_cache .mypy_cache .ruff_cache
