# Everything a newcomer needs: make demo, make test, make lint, make bench. Each makes .venv first if it must.
#
#   make setup   .venv with exactly what requirements.lock names, hashes checked, and this checkout in it
#   make demo    fetch a small model, serve it, ask it something
#   make test    the suite            (ARGS="tests/gateway -k fleet" narrows it)
#   make fuzz    ten thousand broken requests to a real service   (REQUESTS=500 for fewer)
#   make clients real clients from the registries against a real service   (CLIENT="codex" for one)
#   make lint    format, lint, types, import contracts, spelling
#   make soak    ten minutes of everything at once, workers killed now and then   (ARGS="--seconds 60")
#   make bench   the benchmarks in tests/bench   (BENCH=tests/bench/one.py picks)
#   make lock    resolve requirements.lock anew from pyproject.toml

PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		command -v $$python; break; fi; done)
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS := $(or $(BENCH),$(sort $(wildcard tests/bench/*_bench.py)))

.PHONY: setup demo test fuzz clients soak lint bench lock
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

demo: setup
	$(BIN)/mlxd demo $(ARGS)

test: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

fuzz: setup
	MLXD_FUZZ_REQUESTS=$(or $(REQUESTS),10000) $(BIN)/python -m pytest tests/fuzz -s $(ARGS)

# Not part of `make test`: it installs several hundred packages, into a cache outside of this checkout.
clients: setup
	$(BIN)/python -m tests.clients $(if $(CLIENT),"$(CLIENT)")

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell

soak: setup
	PYTHONPATH=. $(BIN)/python -m tests.soak $(ARGS)

bench: setup
	@test -n "$(BENCHMARKS)" || { echo "there is no tests/bench/*_bench.py" >&2; exit 1; }
	@for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; PYTHONPATH=. $(BIN)/python $$benchmark $(ARGS) || exit 1; done

# Hashes but no addresses: whatever index a machine is set up for serves the same files or none.
# A release younger than a week is not taken: others find out first whether it is sound.
lock: setup
	$(PIP) install --quiet 'uv>=0.8'
	$(BIN)/uv pip compile pyproject.toml --extra demo --group dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate \
		--exclude-newer 7d --upgrade --quiet --output-file requirements.lock
	@! grep -nE '://|@ |^-' requirements.lock || { echo "requirements.lock must name no address" >&2; exit 1; }

$(VENV)/.locked: requirements.lock
	@test -n "$(PYTHON)" || { echo "mlxd needs Python 3.11 or newer: install python3.13 (brew, apt or python.org)," \
		"or name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments:" \
		"install its venv package (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --require-hashes --only-binary :all: --requirement requirements.lock
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
