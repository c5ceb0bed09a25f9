# make demo: train on two processes    make test: the checks of a change
# make test-long: all tests there are, which takes more than an hour
# make quick: lint, and the tests of what has changed, in some two minutes
# Each makes its environment in $(VENV), installs what it needs and builds.
VENV ?= .venv
PYTHON ?= python3
# What to install where the environment has no torch yet; one that is there stays.
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
# 1: also what takes long. `make test-long` sets it.
LONG ?=
# What `make tidy` reads: the floors below torch.
TIDY ?= $(filter-out csrc/c10d,$(wildcard csrc/*))
# The commit with which `make quick` compares; empty: where this branch left main.
SINCE ?=
# For which GPUs the module is built: auto (this machine's), on (all), off; cmake/Cuda.cmake.
CUDA ?= auto

comma := ,
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALL = $(PY) -m pip install --quiet --no-build-isolation -C cmake.define.DREAMCOMM_WERROR=ON \
    -C cmake.define.DREAMCOMM_BUILD_CUDA=$(CUDA)
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
READY := $(VENV)/.dreamcomm-ready
CMAKE := $(BIN)/cmake
CPP_SOURCES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
# ThreadSanitizer needs the memory layout that address randomization takes away on new kernels.
FIXED_LAYOUT := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
# The environment's own tools (cmake, ninja) for builds without isolation.
export PATH := $(abspath $(BIN)):$(PATH):/usr/local/cuda/bin

.PHONY: demo test test-long quick lint checks tidy docs cpp cpp-plain cpp-thread cpp-address cpp-torch \
    cpp-gpu compile compile-plain compile-thread compile-address compile-torch conformance pytest build clean
ifdef SIDE_BY_SIDE
compile-address: compile-thread
compile-torch: compile-address
cpp-address: cpp-thread
cpp-torch: cpp-address
else
.NOTPARALLEL:
endif

# Without what only the tests and linters need, which takes as long again.
demo: $(READY)
	$(INSTALL) -e '.[cli]'
	$(BIN)/dreamcomm demo

# Documentation is read beside the other checks: each takes one processor.
# The C++ tests are compiled while PyTorch's suite runs, and run beside pytest: what waits runs beside
# what computes. pytest ends last: its closing line ends the output.
test: build
	@$(MAKE) --no-print-directory -j 2 -O --old-file=build SIDE_BY_SIDE=1 lint
	@$(MAKE) --no-print-directory -j 2 -O --old-file=build SIDE_BY_SIDE=1 conformance compile
	@$(MAKE) --no-print-directory -j 2 -O --old-file=build --old-file=compile-thread \
	    --old-file=compile-address --old-file=compile-torch SIDE_BY_SIDE=1 cpp pytest
compile: compile-thread compile-address compile-torch

# CUDA code is compiled for all GPUs, where there is nvcc, and a warning is an error.
test-long:
	$(MAKE) LONG=1 CUDA=$(if $(NVCC),on,auto) lint tidy cpp cpp-gpu conformance pytest

# Without the documentation. tests/lint/quick.py knows which tests belong to which folder.
quick: checks
	@tests=$$($(PY) tests/lint/quick.py --tests $(if $(SINCE),--since $(SINCE))) && \
	if test -n "$$tests"; then \
	    $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $$tests; \
	else echo "No test belongs to what has changed."; fi

lint: docs checks
checks: build
	@$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PY) tests/lint/rooms.py
	$(PY) tests/lint/words.py
	$(PY) tests/lint/compiled.py
	$(PY) tests/lint/quick.py

# clang-tidy; .clang-tidy has its checks. Its tree is configured only, without unity builds: each
# file has its own command. c10d includes torch, and takes half a minute a file: name it in TIDY.
tidy: build
	@$(CMAKE) -S . -B build/tidy -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_UNITY_BUILD=OFF \
	    -DDREAMCOMM_BUILD_CUDA=off -DPython_EXECUTABLE=$(abspath $(PY)) >/dev/null
	$(PY) tests/lint/tidy.py -p build/tidy -j $(JOBS) $(TIDY)

# The site. A warning is an error: a broken link, a page that no list names, a docstring's form.
# All pages are read each time (-E): those that were read before would warn no more.
docs: build
	$(BIN)/sphinx-build -W --keep-going -E -q docs build/docs
	@echo "The documentation is in build/docs/index.html."

# The short form leaves the plain tests to the sanitizers, which run the same ones, and the code as it
# is optimized to pytest: to compile these tests takes four minutes of a processor. Those of c10d are
# run in the module's tree: a sanitizer needs all of c10d once more.
cpp: $(if $(LONG),cpp-plain,cpp-torch) cpp-thread cpp-address

cpp-torch: compile-torch
	$(BIN)/ctest --test-dir $(MODULE_TREE) $(CTEST_FLAGS) -R '^c10d$$'

# With the module's own libraries, in its tree.
cpp-plain: compile-plain
	$(BIN)/ctest --test-dir $(MODULE_TREE) $(CTEST_FLAGS)

cpp-thread: compile-thread
	TSAN_OPTIONS=halt_on_error=1 $(FIXED_LAYOUT) $(call cpp_run,thread)

cpp-address: compile-address
	UBSAN_OPTIONS=print_stacktrace=1 $(call cpp_run,address)

compile-torch: build
	$(CMAKE) --build $(MODULE_TREE) --target dreamcomm_torch_tests
compile-plain: build
	$(CMAKE) --build $(MODULE_TREE) --target dreamcomm_tests dreamcomm_torch_tests
compile-thread compile-address: compile-%: $(READY)
	$(CMAKE) -S . -B build/cpp-$* -G Ninja -DDREAMCOMM_BUILD_TESTS=ON -DDREAMCOMM_WERROR=ON -DDREAMCOMM_SANITIZE=$* \
	    -DDREAMCOMM_SANITIZE_ALL=$(if $(LONG),ON,OFF) \
	    -DDREAMCOMM_TORCH_TESTS=$(if $(and $(LONG),$(filter address,$*)),ON,OFF) -DPython_EXECUTABLE=$(abspath $(PY))
	$(CMAKE) --build build/cpp-$*

# What runs on a GPU only is compiled, where there is nvcc, so that it stays fit to be run there.
cpp-gpu: $(READY)
	@if test -n "$(NVCC)"; then \
	    $(CMAKE) -S . -B build/cpp-gpu -G Ninja -DDREAMCOMM_BUILD_TESTS=ON \
	        -DDREAMCOMM_BUILD_GPU_TESTS=ON -DDREAMCOMM_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES=90-real && \
	    $(CMAKE) --build build/cpp-gpu --target dreamcomm_gpu_tests dreamcomm_gpu_processes \
	        dreamcomm_gpu_rows; \
	else echo "No nvcc here: what is for a GPU is not compiled."; fi

# Where pip has built the module last.
MODULE_TREE = $$(dirname "$$(ls -t build/cp3*/CMakeCache.txt | head -n 1)")
# Parts that mostly wait run side by side, whatever there is of processors.
CTEST_FLAGS = --parallel 5 --output-on-failure --no-tests=error $(if $(LONG),,-LE long)
cpp_run = $(BIN)/ctest --test-dir build/cpp-$(1) $(CTEST_FLAGS)

# PyTorch's own distributed suite, run on this backend: what must pass.
conformance: build
	$(PY) tests/conformance/run.py --quick $(if $(LONG),--worlds 2$(comma)3$(comma)4)

# Four at a time, as most of what tests do is to wait; a file's stay together, and files that take
# long come first. The long form's tests have less patience, and promised times: two at a time.
pytest: build
	$(BIN)/pytest -n $(if $(LONG),2 --soak,4) --dist loadfile --no-loadscope-reorder

# An editable install: Python changes need no rebuild, C++ changes only their own files.
build: $(READY)
	$(INSTALL) -C cmake.define.DREAMCOMM_TEST_DEVICE=ON -e '.[cli,test,lint,docs]'

# Debian 12's and Ubuntu 22.04's own pip is older, and knows no -C.
$(READY): pyproject.toml
	@command -v c++ >/dev/null || { echo "No C++ compiler found: install one (apt install g++)."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import importlib.metadata as m; print("torch", m.version("torch"))' 2>/dev/null \
	    || $(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet 'pip>=23.1' 'scikit-build-core>=0.11' cmake ninja
	touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
