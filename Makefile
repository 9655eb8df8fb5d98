# make demo    a real model answers a question about a long document, dense and pruned
# make test    every test that needs nothing but PyPI
# make help    the rest

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(shell find csrc -name '*.[ch]' 2>/dev/null)
CUDA   := $(shell find cuda -name '*.cu' -o -name '*.cc' -o -name '*.h')
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
# one place for the demonstration model, so that demo, tests and notebooks fetch it once
export LAZYLLM_CACHE ?= $(CURDIR)/.cache

.PHONY: help demo test build bench oracle asan tsan cuda cuda-on-cpu suites/on_cpu suites/on_cpu_asan notebook lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-11s %s\n", $$1, $$2 }'

# ---- environment: each stamp is newer than what it was made from ----

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' 'numpy>=2.0'
	@touch $@

$(VENV)/build.stamp: $(VENV)/python.stamp pyproject.toml setup.py $(CORE)
	@echo 'building the C core'
	@$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/build.stamp
	@echo 'installing what the tests need'
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/oracle.stamp: $(VENV)/test.stamp
	@echo 'installing torch, transformers and the lm-evaluation-harness'
	@$(PIP) 'torch==2.13.0' 'transformers>=5' accelerate protobuf 'lm_eval>=0.4.10'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/python.stamp | $(VENV)/test.stamp # one pip at a time
	@$(PIP) 'ruff>=0.6' 'mypy>=1.10' 'clang-format==18.*' types-tqdm
	@touch $@

# ---- what people ask for ----

build: $(VENV)/build.stamp ## the package, in .venv

demo: $(VENV)/build.stamp ## a long document, one question, dense and pruned
	@$(BIN)/lazyllm demo

test: $(VENV)/test.stamp build/test_ops ## every test that needs nothing but PyPI
	build/test_ops
	$(BIN)/python -m pytest -m 'not oracle'

oracle: $(VENV)/oracle.stamp ## against transformers and in the lm-evaluation-harness, live (installs torch)
	$(BIN)/python -m pytest -m oracle

bench: $(VENV)/build.stamp ## ops, prefill, pruning and decoding, quickly; `lazyllm bench --help` for more
	$(BIN)/lazyllm bench --quick

notebook: $(VENV)/test.stamp ## run the notebooks anew, outputs and all
	$(BIN)/python tests/run_notebooks.py --write

# ---- the C core by itself: every op against its plain reference, whole passes on several threads ----

CFLAGS_TEST := -std=gnu11 -g -O2 -Wall -Wextra -Werror -pthread
CORE_C      := $(filter-out csrc/python/%,$(filter %.c,$(CORE)))
COMMA       := ,

include cuda/cuda_on_cpu/rules.mk

build/test_ops: tests/c/test_ops.c $(CORE)
	@mkdir -p build
	$(CC) $(CFLAGS_TEST) -O3 $(CORE_C) tests/c/test_ops.c -lm -o $@

build/test_ops_tsan: tests/c/test_ops.c $(CORE)
	@mkdir -p build
	$(CC) $(CFLAGS_TEST) -fsanitize=thread $(CORE_C) tests/c/test_ops.c -lm -o $@

tsan: build/test_ops_tsan ## the C tests under ThreadSanitizer
	build/test_ops_tsan

build/test_ops_asan: tests/c/test_ops.c $(CORE)
	@mkdir -p build
	$(CC) $(CFLAGS_TEST) -fsanitize=address,undefined -fno-sanitize-recover=undefined $(CORE_C) tests/c/test_ops.c -lm -o $@

ASAN_BUILD := build/asan
asan: $(VENV)/test.stamp build/test_ops_asan ## the C tests, leaks too, and the whole suite under ASan and UBSan
	build/test_ops_asan
	LAZYLLM_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build --build-base $(ASAN_BUILD) --build-lib $(ASAN_BUILD)/lib
	$(SANITIZED) PYTHONPATH=$(ASAN_BUILD)/lib $(BIN)/pytest -m 'not oracle'

# ---- the CUDA core ----

cuda: $(VENV)/build.stamp ## the CUDA core for real, with nvcc (install with LAZYLLM_CUDA=1 does the same)
	LAZYLLM_CUDA=1 $(BIN)/python setup.py --quiet build_ext --inplace
	! nm --print-file-name --undefined-only build/cuda/*.o | grep -w exit # what nvcc makes of a host's call of a device function

ON_CPU_TESTS := tests/test_cuda.py tests/test_method.py tests/test_facts.py tests/test_damage.py
SANITIZED    := LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 LAZYLLM_SANITIZED=1

cuda-on-cpu: $(ON_CPU_RUNS) suites/on_cpu suites/on_cpu_asan ## its kernels and the engine on them without a GPU, under sanitizers

suites/on_cpu: $(VENV)/test.stamp build/on_cpu/liblazyllm_cuda.so
	LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=build/on_cpu/liblazyllm_cuda.so $(BIN)/pytest $(ON_CPU_TESTS) tests/test_bench.py -k 'not test_bench or on_cuda'

suites/on_cpu_asan: $(VENV)/test.stamp build/on_cpu_asan/liblazyllm_cuda.so
	$(SANITIZED) LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=build/on_cpu_asan/liblazyllm_cuda.so $(BIN)/pytest tests/test_cuda.py

lint: $(VENV)/lint.stamp $(VENV)/test.stamp ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check lazyllm tests setup.py cuda
	$(BIN)/ruff format --check lazyllm tests setup.py cuda
	$(BIN)/mypy --python-executable $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(CORE) $(CUDA) tests/c/*.c tests/cuda/*.c[cu]*

format: $(VENV)/lint.stamp ## put all sources in form
	$(BIN)/ruff check --fix lazyllm tests setup.py cuda
	$(BIN)/ruff format lazyllm tests setup.py cuda
	$(BIN)/clang-format -i $(CORE) $(CUDA) tests/c/*.c tests/cuda/*.c[cu]*

clean: ## remove what was built (not .venv, nor the model in .cache)
	rm -rf build *.egg-info lazyllm/_core*.so demo-output bench-output
