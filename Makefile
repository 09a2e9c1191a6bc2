# One command each; `make help` lists them. All of them do the set-up and the build first where that is missing.
PYTHON ?= python3
VENV   := .venv
BUILD  ?= build
JOBS   ?= $(shell nproc)
PY     := $(VENV)/bin/python
NINJA  := $(VENV)/bin/ninja
ARGS   ?=

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup build test conformance demo demo-serve bench soak lint format clean

help:
	@echo "make demo         train a small GPT on two ranks with ZeRO-3, on real text; a plot and a table of memory at ZeRO 0-3"
	@echo "make demo-serve   serve a small chat model over HTTP, ask it a question, stream the answer"
	@echo "make test         every test: C++, Python, several processes, conformance with DeepSpeed where that suite is there"
	@echo "make conformance  scripts with values recorded from DeepSpeed, where that suite is there; ARGS=\"--only 'zero_*'\" for some"
	@echo "make build        .venv in which 'import unshard' and 'import deepspeed' work, and the programs in $(BUILD)/bin"
	@echo "make bench        speed and memory beside PyTorch DDP and FSDP2, and DeepSpeed where UNSHARD_PEERS_PYTHON names a Python that has it"
	@echo "make soak         the random tests in full, a pip install, and the C++ tests under ASan, UBSan and TSan"
	@echo "make lint         clang-format, ruff, and clang-tidy on changed files; make format applies the first two"
	@echo "make clean        remove the build (not .venv)"

setup:
	@tools/setup.sh $(PYTHON) $(VENV)

$(BUILD)/build.ninja: | setup
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(NINJA)) -DPython3_EXECUTABLE=$(abspath $(PY)) $(CMAKE_ARGS)

build: setup $(BUILD)/build.ninja
	@$(NINJA) -C $(BUILD) -j $(JOBS)
	@$(PY) tools/link_venv.py $(BUILD)/python

test: build
	@$(NINJA) -C $(BUILD) -j $(JOBS) unshard_tests
	@$(PY) tests/run_all.py --build $(BUILD) $(ARGS)

conformance: build
	@$(PY) tests/conformance.py $(ARGS)

demo: build
	@$(PY) examples/demo.py $(ARGS)

demo-serve: build
	@$(PY) examples/demo_serve.py $(ARGS)

bench: build
	@$(PY) bench/run.py $(ARGS)

# The random tests run SOAK times as long as in `make test`.
SOAK ?= 10
soak: build
	@$(NINJA) -C $(BUILD) -j $(JOBS) unshard_tests
	@UNSHARD_SOAK=$(SOAK) $(PY) tests/run_all.py --build $(BUILD) --no-conformance
	@$(PY) tests/pip_install.py
	@cmake --preset asan && $(NINJA) -C build-asan -j $(JOBS) unshard_tests && ctest --preset asan
	@cmake --preset tsan && $(NINJA) -C build-tsan -j $(JOBS) unshard_comm_test unshard_zero_test && ctest --preset tsan

# clang-tidy looks at the sources that differ from LINT_BASE.
LINT_BASE ?= HEAD~1
CXX_FILES  = $(shell git ls-files '*.h' '*.cc')
lint: setup $(BUILD)/build.ninja
	@command -v clang-format >/dev/null && command -v clang-tidy >/dev/null || { echo "make lint needs: apt-get install clang-format clang-tidy"; exit 1; }
	clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/ruff check python tests examples bench tools
	@changed=$$(git diff --name-only --diff-filter=d $(LINT_BASE) -- 'src/*.cc' | grep -v '_test\.cc$$' || true); \
	if [ -n "$$changed" ]; then echo "clang-tidy $$changed"; clang-tidy --quiet -p $(BUILD) $$changed; fi

format: setup
	clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff check --fix python tests examples bench

clean:
	rm -rf $(BUILD) build-asan build-tsan build-dev
