# make demo: train on two processes    make test: check everything
# Each makes its environment in $(VENV), installs what it needs and builds.
VENV ?= .venv
PYTHON ?= python3
# What to install where the environment has no torch yet; one that is there stays.
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
# For which GPUs the module is built: auto (this machine's), on (all), off; cmake/Cuda.cmake.
CUDA ?= auto

BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.dreamcomm-ready
CMAKE := $(BIN)/cmake
CPP_SOURCES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
# ThreadSanitizer needs the memory layout that address randomization takes away on new kernels.
FIXED_LAYOUT := $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
# The environment's own tools (cmake, ninja) for builds without isolation.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test lint docs cpp cpp-plain cpp-thread cpp-address cpp-gpu conformance pytest build clean
.NOTPARALLEL:

demo: build
	$(BIN)/dreamcomm demo

# pytest comes last: its closing line ends the output.
test: lint cpp conformance pytest

lint: build docs
	@$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PY) tests/lint/words.py

# The site. A warning is an error: a broken link, a page that no list names, a docstring's form.
# All pages are read each time (-E): those that were read before would warn no more.
docs: build
	$(BIN)/sphinx-build -W --keep-going -E -q docs build/docs
	@echo "The documentation is in build/docs/index.html."

cpp: cpp-plain cpp-thread cpp-address

cpp-plain: $(READY)
	$(call cpp_build,plain,-DDREAMCOMM_SANITIZE=)
	$(call cpp_run,plain)

cpp-thread: $(READY)
	$(call cpp_build,thread,-DDREAMCOMM_SANITIZE=thread)
	TSAN_OPTIONS=halt_on_error=1 $(FIXED_LAYOUT) $(call cpp_run,thread)

cpp-address: $(READY)
	$(call cpp_build,address,-DDREAMCOMM_SANITIZE=address)
	UBSAN_OPTIONS=print_stacktrace=1 $(call cpp_run,address)

# What runs on a GPU only is compiled, where there is nvcc, so that it stays fit to be run there.
cpp-gpu: $(READY)
	@if command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc; then \
	    PATH=$$PATH:/usr/local/cuda/bin $(CMAKE) -S . -B build/cpp-gpu -G Ninja -DDREAMCOMM_BUILD_TESTS=ON \
	        -DDREAMCOMM_BUILD_GPU_TESTS=ON -DDREAMCOMM_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES=90-real && \
	    $(CMAKE) --build build/cpp-gpu --target dreamcomm_gpu_tests dreamcomm_gpu_processes \
	        dreamcomm_gpu_rows; \
	else echo "No nvcc here: what is for a GPU is not compiled."; fi

define cpp_build
$(CMAKE) -S . -B build/cpp-$(1) -G Ninja -DDREAMCOMM_BUILD_TESTS=ON -DDREAMCOMM_WERROR=ON $(2)
$(CMAKE) --build build/cpp-$(1)
endef

cpp_run = $(BIN)/ctest --test-dir build/cpp-$(1) --parallel $(JOBS) --output-on-failure --no-tests=error

# PyTorch's own distributed suite, run on this backend: what must pass.
conformance: build
	$(PY) tests/conformance/run.py --quick

# Two at a time, as most of what tests do is to wait; a file's stay together.
pytest: build
	$(BIN)/pytest -n 2 --dist loadfile

# An editable install: Python changes need no rebuild, C++ changes only their own files.
build: $(READY)
	$(PY) -m pip install --quiet --no-build-isolation \
	    -C cmake.define.DREAMCOMM_WERROR=ON -C cmake.define.DREAMCOMM_TEST_DEVICE=ON \
	    -C cmake.define.DREAMCOMM_BUILD_CUDA=$(CUDA) -e '.[cli,test,lint,docs]'

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
