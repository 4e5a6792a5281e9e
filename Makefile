# One door for everyone: `make help` lists what there is.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 4000
ADMIN_PORT ?= 4001

.PHONY: help run test check demo bench bench-replay bench-gpu bench-usage dashboards faults simulate crash herd fuzz-admin refusals test-vllm fmt types lock prices clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -e 's/:.*## /\t/' | expand -t 16

# A stamp per lock file: set-up runs again only when the lock changed.
$(VENV)/run.stamp: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked runtime requirements into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/dev.stamp: requirements-dev.lock $(VENV)/run.stamp
	@echo "installing the locked development requirements into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-dev.lock
	@touch $@

run: $(VENV)/run.stamp ## start the gateway on 127.0.0.1:4000 (admin 4001) with the embedded default
	@$(BIN)/tollhouse serve --first-run --host $(HOST) --port $(PORT) --admin-port $(ADMIN_PORT)

demo: $(VENV)/run.stamp ## run a simulated 20-step agent through the gateway and print what it cost
	@$(BIN)/tollhouse demo

# In as many processes as there are cores; each has servers of its own. `pytest` alone runs in one.
TESTS ?=
test: $(VENV)/dev.stamp ## the whole suite or TESTS, against real Postgres and Redis that it finds or installs
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(TESTS)

check: $(VENV)/dev.stamp ## format, lint, strict types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fmt: $(VENV)/dev.stamp ## rewrite the formatting
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

REQUESTS ?= 2000
faults: $(VENV)/dev.stamp ## play REQUESTS requests with faults of three deployments against a reference model
	@$(BIN)/python -m tests.pipeline.fault_schedules --requests $(REQUESTS)

SCHEDULES ?= 10000
SEED ?= 0
simulate: $(VENV)/dev.stamp ## play SCHEDULES schedules of calls and faults from SEED on, on a virtual clock (docs/proof.md)
	@$(BIN)/python -m tests.simulator --schedules $(SCHEDULES) --seed $(SEED)

ROUNDS ?= 48
crash: $(VENV)/dev.stamp ## ROUNDS rounds of load on three gateways that are killed, cut off and restarted (docs/proof.md)
	@$(BIN)/python -m tests.crash --rounds $(ROUNDS) --seed $(SEED)

HERDS ?= 10
herd: $(VENV)/dev.stamp ## HERDS herds of up to 1,000 calls at once against budgets with room for k of them (docs/proof.md)
	@$(BIN)/python -m tests.herd --herds $(HERDS) --seed $(SEED)

CASES ?= 20000
fuzz-admin: $(VENV)/dev.stamp ## CASES requests out of the admin API's own document, against what it promises; Schemathesis too
	@$(BIN)/python -m tests.admin.fuzz --cases $(CASES) --seed $(SEED)
	@$(BIN)/python -m tests.admin.stateful --examples $$(( ($(CASES) + 999) / 1000 )) --seed $(SEED)

refusals: $(VENV)/dev.stamp ## real clients whose budget ends in the middle of a run (needs ../shared/clients, npm, pip)
	@$(BIN)/python -m tests.refusals

VLLM ?=
test-vllm: $(VENV)/dev.stamp ## a gateway in front of two real vLLM replicas on the CPU (installs 2.3 GB; needs ../shared/upstream; docs/proof.md)
	@$(BIN)/python -m tests.vllm $(VLLM)

bench: $(VENV)/dev.stamp ## compare with the yardsticks (needs ../shared/bench, gcc) and write the table
	@$(BIN)/python bench/run.py

bench-replay: $(VENV)/dev.stamp ## replay recorded agents (needs ../shared) against providers' cache rules and write the table
	@$(BIN)/python bench/replay.py

bench-gpu: $(VENV)/dev.stamp ## play ways of picking a replica against simulated ones (traces of ../shared if there) and write the table
	@$(BIN)/python -m bench.gpu_routing $(GPU)

ENTRIES ?= 10000000
bench-usage: $(VENV)/dev.stamp ## reports of a month out of a year of ENTRIES entries in a throw-away Postgres, beside full scans
	@$(BIN)/python -m bench.usage --entries $(ENTRIES)

prices: $(VENV)/dev.stamp ## regenerate config/prices.yaml from two maintained sources
	@$(BIN)/python config/build_prices.py

dashboards: $(VENV)/dev.stamp ## write Grafana's dashboards and the PrometheusRule out of config/dashboards and config/prometheus
	@$(BIN)/python -m config.dashboards.build

# Releases younger than 30 days stay out; see docs/architecture.md, Dependencies.
LOCK_BEFORE ?= $(shell date -u -d '30 days ago' +%Y-%m-%dT00:00:00Z)
lock: ## re-lock all requirements with hashes (needs uv)
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header \
	  --exclude-newer $(LOCK_BEFORE) --upgrade --extra build -o requirements.lock
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header \
	  --exclude-newer $(LOCK_BEFORE) --upgrade --extra build --group dev -o requirements-dev.lock

clean: ## remove the environment and local state
	rm -rf $(VENV) var
