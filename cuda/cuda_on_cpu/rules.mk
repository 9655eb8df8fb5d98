# Builds the CUDA core for machines without a GPU: the same files compiled as C++, each CUDA thread a fiber. Included by the Makefile.
#   build/on_cpu/liblazyllm_cuda.so   the library, for LAZYLLM_CUDA_LIBRARY
#   build/on_cpu/test_…               the C++ tests
#   build/on_cpu_asan/                the same under ASan and UBSan
#   build/on_cpu_tsan/                the same under TSan

CUDA_INCLUDE ?= $(firstword $(wildcard $(CUDA_HOME)/include /usr/local/cuda/include $(VENV)/lib/python*/site-packages/nvidia/cu13/include))
CUDA_HEADERS := $(wildcard cuda/*.h cuda/cuda_on_cpu/*.h csrc/*.h csrc/cpu/*.h tests/c/*.h tests/cuda/*.h)
ON_CPU_HOST  := $(filter-out cublas,$(basename $(notdir $(wildcard cuda/*.cc cuda/cuda_on_cpu/*.cc)))) # fake_cublas stands for it
ON_CPU_GPU   := $(basename $(notdir $(wildcard cuda/*.cu))) # linked last, so that sanitizers find the line numbers of kernels
ON_CPU_FLAGS := -std=c++17 -g1 -O2 -Wall -Wextra -Wno-unknown-pragmas -Werror -fno-strict-aliasing -fPIC -pthread -DLAZY_CUDA_ON_CPU -isystem $(CUDA_INCLUDE)
vpath %.cu cuda tests/cuda
vpath %.cc cuda cuda/cuda_on_cpu tests/cuda

$(if $(CUDA_INCLUDE),,$(eval ON_CPU_FLAGS = $$(error CUDA's headers are not found; set CUDA_INCLUDE to the directory of cuda_runtime.h)))

# $(1): directory under build/; $(2): suffix of the core's build; $(3): sanitizer flags
define on_cpu_build
build/$(1)/%.o: %.cu $(CUDA_HEADERS)
	@mkdir -p $$(@D)
	$(CXX) $(ON_CPU_FLAGS) $(3) -x c++ -c $$< -o $$@

build/$(1)/%.o: %.cc $(CUDA_HEADERS)
	@mkdir -p $$(@D)
	$(CXX) $(ON_CPU_FLAGS) $(3) -c $$< -o $$@

build/$(1)/liblazyllm_cuda.so: $(ON_CPU_HOST:%=build/$(1)/%.o) build/core$(2)/core.a $(ON_CPU_GPU:%=build/$(1)/%.o)
	$(CXX) -shared -pthread $(3) -Wl,--exclude-libs,ALL $$^ -o $$@

build/$(1)/test_ops: build/core$(2)/reference.o
build/$(1)/test_%: build/$(1)/test_%.o $(ON_CPU_HOST:%=build/$(1)/%.o) build/core$(2)/core.a $(ON_CPU_GPU:%=build/$(1)/%.o)
	$(CXX) -pthread $(3) $$(filter %/reference.o,$$^) $$(filter-out %/reference.o,$$^) -ldl -o $$@ # what needs core.a comes before it
endef

$(eval $(call on_cpu_build,on_cpu,,))
$(eval $(call on_cpu_build,on_cpu_asan,_asan,$(FLAGS_asan)))
$(eval $(call on_cpu_build,on_cpu_tsan,_tsan,$(FLAGS_tsan)))

# $(1): a kind of build; $(2): its sanitizer. The harness by itself, with kernels that can have defects
define planted_build
$(call on_cpu_build,planted_$(1),,-O1 -DPLANTS $(2))
build/planted_$(1)/test_harness: build/planted_$(1)/fake_cudart.o build/planted_$(1)/test_harness.o
	$(CXX) -pthread $(2) $$^ -o $$@
harness/planted: build/planted_$(1)/test_harness
endef

$(eval $(call planted_build,plain,))
$(eval $(call planted_build,asan,-fsanitize=address))
$(eval $(call planted_build,tsan,-fsanitize=thread))

# ---- test runs: one target each, so that `make -j` runs them in parallel ----
#
# Each build finds what the others cannot: TSan missing barriers, ASan accesses out of bounds, the plain build reads of unwritten shared
# memory; and the plain build with threads and blocks in reverse, results that depend on the order, which a sanitizer would not change.

SANITIZED_KINDS := on_cpu_tsan on_cpu_asan
ON_CPU_RUNS     := $(foreach run,ops engine gemm,$(SANITIZED_KINDS:%=$(run)/%)) ops/on_cpu ops-reversed/on_cpu engine-reversed/on_cpu counts/on_cpu harness/planted
.PHONY: $(ON_CPU_RUNS)
runs_of = $(filter $(1)/%,$(ON_CPU_RUNS))
quickly = $(if $(filter on_cpu,$*),,quick) # sanitizers are slow

$(call runs_of,ops): ops/%: build/%/test_ops
	$< $(quickly)

$(call runs_of,ops-reversed): ops-reversed/%: build/%/test_ops
	LAZYLLM_CUDA_REVERSE=1 $< quick

$(call runs_of,engine): engine/%: build/%/test_engine build/%/liblazyllm_cuda.so
	$<

$(call runs_of,engine-reversed): engine-reversed/%: build/%/test_engine build/%/liblazyllm_cuda.so
	LAZYLLM_CUDA_REVERSE=1 $<

$(call runs_of,gemm): gemm/%: build/%/test_gemm
	$<

# on as many multiprocessors as an H100 has, which decide how many blocks share a row's keys
counts/on_cpu: build/on_cpu/liblazyllm_cuda.so $(VENV)/test.stamp
	LAZYLLM_CUDA_FAKE_PROCESSORS=132 LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=$(CURDIR)/build/on_cpu/liblazyllm_cuda.so PYTHONPATH=$(CURDIR) $(BIN)/python tests/count_passes.py

harness/planted:
	tests/cuda/test_harness.sh

.PRECIOUS: build/on_cpu/%.o build/on_cpu_asan/%.o build/on_cpu_tsan/%.o
