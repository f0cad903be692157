# Everything a newcomer or CI needs. `make setup` builds .venv from constraints.txt and does nothing when it is up to date.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.matrix-installed

SGLANG_VENV := .venv-sglang

.PHONY: setup setup-browser setup-launchers quickstart test test-fast test-sglang lint type bench

setup: $(STAMP)

# torch goes first and alone: asked for by name and version it is the CPU build where one is at hand, and no later
# requirement can pull another build in.
$(STAMP): constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(STAMP)

# For the tests that look at dashboards; without a browser they are skipped. Needs root.
setup-browser:
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

# For the tests that launch on several nodes of one machine (network namespaces, Slurm, Ray); without they are skipped.
# Needs root for Debian's packages.
setup-launchers: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[dev,ray]"
	{ command -v ip && command -v slurmd && command -v munged; } || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			iproute2 slurm-wlm munge; }

quickstart: setup
	$(BIN)/megarl train --fresh configs/quickstart.yaml

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

# With real SGLang and its router, which live in an environment of their own: two gigabytes, once.
test-sglang: setup
	$(BIN)/python tools/sglang/provision.py --into $(SGLANG_VENV)
	MEGARL_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/conformance tests/sglang

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python tools/bench/quickstart_speed.py
	$(BIN)/python tools/bench/generation_speed.py
	$(BIN)/python tools/bench/push_speed.py
	$(BIN)/python tools/bench/staleness_speed.py
	$(BIN)/python tools/bench/offload_memory.py
	$(BIN)/python tools/bench/planner.py
	$(BIN)/python tools/bench/logprob_memory.py
	$(BIN)/python tools/bench/report_scale.py
	$(BIN)/python tools/bench/metrics_merge.py
	$(BIN)/python tools/bench/metrics_overhead.py --trackers
