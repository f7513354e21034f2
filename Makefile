# Everything a newcomer types. Needs python3 (3.10+, with venv), a C++20 compiler and make; the rest
# (torch, cmake, ninja, the linters) is installed into .venv by `make setup`, pinned.
#
#   make train [RECIPES=bf16,nvfp4] [DATA=DIR] [STEPS=N] [MODEL=...] [OUT=DIR] [RESUME=1]
#   make test            build for this machine, ctest, pytest;  make test-all: what is slow
#   make help            the others

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

VENV := .venv
PY := $(VENV)/bin/python
CMAKE := $(VENV)/bin/cmake
READY := $(VENV)/.ready
LINTERS := $(VENV)/.ready-lint
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Builds and runs must not depend on a package of the same name in somebody's home.
export PYTHONNOUSERSITE := 1

CXX_FOLDERS := $(wildcard include src torch tests benchmarks examples)
CXX_SOURCES = $(shell find $(CXX_FOLDERS) -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
PY_FOLDERS := $(wildcard python tests benchmarks examples tools docs/*.py research/*/*.py)

.PHONY: help setup build libraries all-architectures train print-cpu test test-all test-torchtitan-0.3 test-asan test-aarch64 test-aarch64-torch aarch64-tools test-exhaustive test-gpu bench lint style lock format tidy docs package-tools wheel sdist test-wheel test-sdist check-tag clean
.DEFAULT_GOAL := help

help:
	@echo "make train            train a small Llama in several recipes, side by side"
	@echo "                      RECIPES=a,b DATA=DIR STEPS=N MODEL=... OUT=DIR RESUME=1"
	@echo "make test             setup, build for this machine, ctest, pytest without what is slow"
	@echo "make test-all         the rest: kernels for sm_90a, 100a and 103a where nvcc is, slow tests"
	@echo "make test-torchtitan-0.3  torchtitan 0.3 with the newer torch that it needs (740 MB);"
	@echo "                      the C++ examples with the package that pip installed"
	@echo "make test-asan        the C++ suites and the op fuzzer under AddressSanitizer and UBSan"
	@echo "make test-aarch64     the C++ suites, cross-compiled for aarch64, under qemu-user"
	@echo "make test-aarch64-torch  there the torch layer, its bytes beside this machine's (550 MB)"
	@echo "make test-exhaustive  every float through every format (long)"
	@echo "make test-gpu         the tests that need a CUDA device"
	@echo "make bench            the benchmark tables; on a GPU machine build/gpu_roofline.png too"
	@echo "make lint | format    check | fix style, types, layers, pages, commits' messages"
	@echo "make style            what lint checks without torch: all but types"
	@echo "make lock             requirements.lock, from the groups of pyproject.toml"
	@echo "make tidy             clang-tidy over the torch-free sources"
	@echo "make docs             the site, build/site, where each warning is an error"
	@echo "make all-architectures  kernels for every GPU since Ampere; CUDA=ON TARGETS=... for some"
	@echo "make wheel | sdist    dist/minifloat-*: the wheel for every GPU and torch, the sources"
	@echo "make test-wheel | test-sdist  install them in empty environments, and try them"
	@echo "make check-tag        whether TAG=v0.1.0 is that of this version and of CHANGELOG.md"
	@echo "make setup | build    what the others need first;  make clean removes build/ and dist/"

# ---- Environment and build -------------------------------------------------------------------
setup: $(READY)

# The groups of pyproject.toml at the versions of requirements.lock.
PIP = $(PY) -m pip install --quiet --disable-pip-version-check -c requirements.lock

$(LINTERS): pyproject.toml requirements.lock
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check 'pip>=25.1'  # knows groups
	$(PIP) --group lint
	@touch $@

$(READY): $(LINTERS) tools/link_tree.py
	@$(PYTHON) tools/check_environment.py
	$(PIP) --group dev
	$(PIP) --no-deps --group torchtitan
	! command -v nvcc >/dev/null || $(PIP) --no-deps --group cuda
	$(PY) tools/link_tree.py
	@touch $@

lock: package-tools  # takes what is newer alone where a group asks for it, or with UPGRADE=-U
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --no-annotate $(UPGRADE) \
	  --custom-compile-command 'make lock' --group dev --group docs --group wheel -o requirements.lock

CONFIGURE = $(CMAKE) --preset default -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE
# The build is for this machine: with kernels for its GPUs where nvcc is, else for the CPU alone.
# CUDA=ON compiles them where there is no GPU, for those of TARGETS (cmake/MinifloatCuda.cmake).
TARGETS ?=
CUDA ?= $(if $(and $(shell command -v nvidia-smi),$(shell command -v nvcc)),ON,OFF)
GPU_OPTIONS = -DMINIFLOAT_CUDA=$(CUDA) '-DCMAKE_CUDA_ARCHITECTURES=$(TARGETS)'

build: $(READY)
	$(CONFIGURE) $(GPU_OPTIONS)
	$(CMAKE) --build --preset default -j $(JOBS)

libraries: $(READY)  # what `import minifloat` needs, without the tests
	$(CONFIGURE) $(GPU_OPTIONS)
	$(CMAKE) --build --preset default -j $(JOBS) --target minifloat_torch

all-architectures:  # code for every GPU since Ampere
	$(MAKE) build CUDA=ON TARGETS=ALL

package-tools: $(READY)
	$(PIP) --group wheel

# -compress-mode=size: of code for all GPUs, the smallest file.
wheel: CUDA = ON
wheel: TARGETS = ALL
wheel: package-tools
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) tools/make_wheel.py \
	  --define MINIFLOAT_CUDA=$(CUDA) --define 'CMAKE_CUDA_ARCHITECTURES=$(TARGETS)' \
	  --define CMAKE_CUDA_FLAGS=-compress-mode=size

# In empty environments: without a compiler, on each of PYTHONS that is on the path.
PYTHONS ?= 3.10 3.11 3.12 3.13
test-wheel: package-tools
	$(PY) tools/test_package.py --pythons '$(PYTHONS)' dist/minifloat-*.whl

sdist: package-tools
	rm -f dist/minifloat-*.tar.gz
	$(VENV)/bin/uv build --quiet --sdist --no-build-isolation --python $(PY) --out-dir dist

test-sdist: sdist
	$(PY) tools/test_package.py dist/minifloat-*.tar.gz

# Idle threads sleep: spinning gains little alone. Beside another job it costs many times a training
# step, and two processes of pytest would take each other's cores.
train test test-all test-torchtitan-0.3: export OMP_WAIT_POLICY ?= passive

# ---- The main job ----------------------------------------------------------------------------
TRAIN_ARGS = $(if $(RECIPES),--recipes '$(RECIPES)') $(if $(DATA),--data $(DATA)) \
  $(if $(STEPS),--steps $(STEPS)) $(if $(MODEL),--model $(MODEL)) $(if $(OUT),--out $(OUT)) \
  $(if $(RESUME),--resume) $(ARGS)

train: libraries
	$(PY) examples/pretrain/pretrain.py $(TRAIN_ARGS)

# ---- Tests -----------------------------------------------------------------------------------
print-cpu:
	@$(PYTHON) tools/print_cpu.py

# pytest's processes. One alone leaves cores idle while tests start processes and read files.
TEST_PROCESSES ?= 2

test: print-cpu build  # its name first: matrix libraries choose the order of sums by it
	$(VENV)/bin/ctest --preset default -j $(JOBS)
	$(PY) -m pytest -n $(TEST_PROCESSES) -m 'not slow' $(PYTEST_ARGS)

# What `make test` leaves out. The build adds kernels to that of `make test`, whose host code stays.
test-all: print-cpu $(READY)
	$(CONFIGURE) -DMINIFLOAT_CUDA=AUTO \
	  '-DCMAKE_CUDA_ARCHITECTURES=90a-real;100a-real;103a-real'
	$(CMAKE) --build --preset default -j $(JOBS)
	$(PY) -m pytest -n $(TEST_PROCESSES) -m slow $(PYTEST_ARGS)

# torchtitan 0.3 needs torch 2.12 or later, against which the library is built anew, for the CPU.
TITAN3 := build/torchtitan-0.3
TITAN3_PIP = $(PY) -m pip --python $(TITAN3)/bin/python install --quiet --no-deps \
  --disable-pip-version-check
test-torchtitan-0.3: $(READY)
	test -x $(TITAN3)/bin/python || $(PY) -m venv --without-pip $(TITAN3)
	$(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
	  >"$$($(TITAN3)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zz.pth"
	$(TITAN3_PIP) --group torchtitan-0-3
	CMAKE_ARGS=-DMINIFLOAT_CUDA=OFF CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(TITAN3_PIP) --no-build-isolation --force-reinstall .
	$(TITAN3)/bin/python -m pytest tests/torchtitan/override_0_3.py tests/tools/pip_installed.py

test-asan: $(READY)
	$(CMAKE) --preset asan -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE
	$(CMAKE) --build --preset asan -j $(JOBS)
	$(VENV)/bin/ctest --preset asan -j $(JOBS)
	$(CMAKE) --preset asan-torch -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE
	$(CMAKE) --build --preset asan-torch -j $(JOBS)
	$(PY) tools/fuzz_asan.py $(FUZZ_ARGS)

# The library on the other processor of GPU hosts, under an emulator: without torch, and with it.
test-aarch64 test-aarch64-torch: aarch64-tools $(READY)

aarch64-tools:
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool >/dev/null || \
	  command -v $$tool-static >/dev/null || { echo "test-aarch64: expected $$tool on the path" \
	  "(Debian: apt install g++-aarch64-linux-gnu qemu-user)" >&2; exit 1; }; done

test-aarch64:
	$(CMAKE) --preset aarch64 -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE
	$(CMAKE) --build --preset aarch64 -j $(JOBS)
	$(VENV)/bin/ctest --preset aarch64 -j $(JOBS)

test-aarch64-torch: libraries
	$(PY) tools/fetch_aarch64.py build/aarch64-system
	$(CMAKE) --preset aarch64-torch -DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE
	$(CMAKE) --build --preset aarch64-torch -j $(JOBS)
	$(PY) tools/run_aarch64.py $(FUZZ_ARGS)

test-exhaustive: build
	$(CMAKE) --build --preset exhaustive -j $(JOBS)

GPU_PYTEST = $(PY) -m pytest -n $(or $(GPU_TEST_PROCESSES),8) --dist worksteal -m gpu
test-gpu: export OMP_NUM_THREADS := 1
test-gpu: build  # where the device or the backend is missing, it says so and fails
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or \
	  sys.exit("test-gpu: expected a CUDA device, torch sees none")'
	@$(PY) -c 'import torch; from minifloat.tensor import amax; amax(torch.ones(1, 1, device="cuda"), "nvfp4")'
	tools/with_mps.sh $(GPU_PYTEST) tests/gpu --ignore tests/gpu/test_worlds.py $(PYTEST_ARGS)
	$(GPU_PYTEST) tests/gpu/test_worlds.py $(PYTEST_ARGS)  # which kills processes

# ---- Benchmarks ------------------------------------------------------------------------------
bench: build  # build/*.json; with a CUDA device also build/gpu_roofline.png
	tools/run_benchmarks.sh $(JOBS)

# ---- Style -----------------------------------------------------------------------------------
lint: style $(READY)
	$(VENV)/bin/mypy

style: $(LINTERS)  # of lint what needs no torch: 50 MB
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(VENV)/bin/ruff check $(PY_FOLDERS)
	$(VENV)/bin/ruff format --check $(PY_FOLDERS)
	$(PY) tools/check_layers.py --self-test
	$(PY) tools/check_layers.py
	$(PY) tools/check_docs.py --self-test
	$(PY) tools/check_docs.py
	$(PY) tools/check_commits.py --self-test
	$(PY) tools/check_commits.py

format: $(LINTERS)
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)
	$(VENV)/bin/ruff check --fix-only --quiet $(PY_FOLDERS)
	$(VENV)/bin/ruff format $(PY_FOLDERS)

tidy: build
	@command -v clang-tidy >/dev/null || \
	  { echo "tidy: expected clang-tidy on the path (pip install clang-tidy)" >&2; exit 1; }
	clang-tidy -p build/default --quiet $(wildcard src/*.cpp src/cpu/*.cpp)

check-tag:
	@$(PYTHON) tools/check_tag.py "$$TAG"

# ---- The site --------------------------------------------------------------------------------
SITE_READY := $(VENV)/.ready-docs

$(SITE_READY): $(READY)
	$(PIP) --group docs
	@touch $@

docs: $(SITE_READY)  # all pages each time: one that is not read again does not repeat its warning
	$(PY) tools/check_docs.py
	rm -rf build/site
	$(PY) -m sphinx -E -W --keep-going -q -d build/site-doctrees docs build/site
	@echo "docs: build/site/index.html; to read it: python -m http.server -d build/site"

clean:
	rm -rf build dist python/minifloat/lib
