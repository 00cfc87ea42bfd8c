# Every target sets the environment up first; `make setup` alone does nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CODE := megalite model data launch tools

# One thread a process: many ranks share the cores. No test may reach for the hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help setup lock check format test test-all test-slurm bench quickstart clean

help:
	@echo "make setup       .venv with the exact versions of requirements.lock"
	@echo "make quickstart  train the embedded corpus in three dimensions, sample, write a report"
	@echo "make check       lint, format, types, layers"
	@echo "make test        the test-suite;  make test-all: with the full matrices"
	@echo "make test-slurm  the Slurm script on a real Slurm of two nodes on this machine"
	@echo "make bench       side-by-side benchmarks"
	@echo "make format      apply the formatter;  make lock: renew requirements.lock"
	@echo "make clean       remove .venv, caches and build files (not runs/ and corpora/)"

setup: $(STAMP)

$(STAMP): requirements.lock setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3"; exit 2; }
	@$(PY) -c pass 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "python3 -m venv failed (Debian: apt install python3-venv)"; exit 2; }
	@echo "installing requirements.lock into $(VENV): a minute or two"
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat -e .
	@touch $@

# The CUDA packages that torch brings on a GPU machine follow from torch's own pin.
lock:
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && set -e && \
	$(PYTHON) -m venv $$scratch/venv && \
	$$scratch/venv/bin/python -m pip install --quiet torch==2.13.0 -e .[dev] && \
	{ echo "# Exact versions, made by 'make lock'. torch has no local version and no hash, so that"; \
	  echo "# a machine with a GPU takes the CUDA build."; \
	  $$scratch/venv/bin/python -m pip freeze --all --exclude-editable \
	  | grep -viE '^(pip|nvidia-.*|cuda-.*|triton)==' | sed 's/+cpu$$//'; } > $$scratch/lock && \
	cp $$scratch/lock requirements.lock

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(CODE)
	$(VENV)/bin/lint-imports

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Two files at a time; a test that fails is looked at alone: .venv/bin/python -m pytest FILE
test: setup
	$(TEST_ENV) $(PY) -m pytest -n 2 --dist loadfile -m "not full and not slurm"

test-all: setup
	$(TEST_ENV) $(PY) -m pytest -m "not slurm"

# Two nodes of Slurm on this machine, started and stopped by the tests. Needs root, and apt where
# Slurm is not installed yet; says so and succeeds where it has neither.
test-slurm: setup
	@command -v slurmctld munged > /dev/null || test "$$(id -u)" != 0 || \
	  ! command -v apt-get > /dev/null || { echo "installing slurm-wlm and munge" && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	  --no-install-recommends slurm-wlm munge > /dev/null; }
	$(TEST_ENV) $(PY) -m pytest -m slurm tests/slurm

bench: setup
	$(PY) tools/bench.py all

quickstart: setup
	bash launch/quickstart.sh

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +
