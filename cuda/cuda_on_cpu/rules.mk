# The CUDA core for machines without a GPU: the same files compiled as C++, each CUDA thread a fiber. Included by the Makefile.
#   build/on_cpu/liblazyllm_cuda.so   what LAZYLLM_CUDA_LIBRARY may name
#   build/on_cpu/test_…               the C++ tests
#   build/on_cpu_asan/                the same under ASan and UBSan
#   build/on_cpu_tsan/                the same under TSan

CUDA_INCLUDE ?= $(firstword $(wildcard $(CUDA_HOME)/include /usr/local/cuda/include $(VENV)/lib/python*/site-packages/nvidia/cu13/include))
CUDA_HEADERS := $(wildcard cuda/*.h cuda/cuda_on_cpu/*.h csrc/*.h csrc/cpu/*.h)
ON_CPU_HOST  := $(basename $(notdir $(wildcard cuda/*.cc cuda/cuda_on_cpu/*.cc)))
ON_CPU_GPU   := $(basename $(notdir $(wildcard cuda/*.cu))) # linked last: sanitizers find the lines of what comes last
ON_CPU_FLAGS := -std=c++17 -g -O2 -Wall -Wextra -Wno-unknown-pragmas -Werror -fno-strict-aliasing -fPIC -pthread -DLAZY_CUDA_ON_CPU -isystem $(CUDA_INCLUDE)
vpath %.cu cuda tests/cuda
vpath %.cc cuda cuda/cuda_on_cpu tests/cuda

$(if $(CUDA_INCLUDE),,$(eval ON_CPU_FLAGS = $$(error CUDA's headers are not found; set CUDA_INCLUDE to where cuda_runtime.h is)))

# $(1) the folder under build, $(2) the sanitizers' flags
define on_cpu_build
build/$(1)/%.o: %.cu $(CUDA_HEADERS)
	@mkdir -p $$(@D)
	$(CXX) $(ON_CPU_FLAGS) $(2) -x c++ -c $$< -o $$@

build/$(1)/%.o: %.cc $(CUDA_HEADERS)
	@mkdir -p $$(@D)
	$(CXX) $(ON_CPU_FLAGS) $(2) -c $$< -o $$@

build/$(1)/core.a: $(CORE_C) $(CUDA_HEADERS)
	@mkdir -p build/$(1)/core
	rm -f build/$(1)/core/*.o && cd build/$(1)/core && $(CC) $(CFLAGS_TEST) -O3 -fPIC $(2) -c $(addprefix $(CURDIR)/,$(CORE_C))
	rm -f $$@ && $(AR) rcs $$@ build/$(1)/core/*.o

build/$(1)/liblazyllm_cuda.so: $(ON_CPU_HOST:%=build/$(1)/%.o) build/$(1)/core.a $(ON_CPU_GPU:%=build/$(1)/%.o)
	$(CXX) -shared -pthread $(2) -Wl,--exclude-libs,ALL $$^ -o $$@

build/$(1)/test_%: build/$(1)/test_%.o $(ON_CPU_HOST:%=build/$(1)/%.o) build/$(1)/core.a $(ON_CPU_GPU:%=build/$(1)/%.o)
	$(CXX) -pthread $(2) $$^ -ldl -o $$@
endef

$(eval $(call on_cpu_build,on_cpu,))
$(eval $(call on_cpu_build,on_cpu_asan,-fsanitize=address$(COMMA)undefined -fno-sanitize-recover=undefined))
$(eval $(call on_cpu_build,on_cpu_tsan,-fsanitize=thread))

# ---- runs of them, each by itself: `make -j` has as many at a time ----

ON_CPU_KINDS := on_cpu_tsan on_cpu_asan on_cpu
ON_CPU_RUNS  := $(foreach run,ops engine engine-reversed gemm,$(ON_CPU_KINDS:%=$(run)/%)) ops-reversed/on_cpu_tsan ops-reversed/on_cpu harness/planted
.PHONY: $(ON_CPU_RUNS)
runs_of = $(filter $(1)/%,$(ON_CPU_RUNS))
quickly = $(if $(filter on_cpu,$*),,quick) # sanitizers are slow

$(call runs_of,ops): ops/%: build/%/test_ops
	$< $(quickly)

$(call runs_of,ops-reversed): ops-reversed/%: build/%/test_ops
	LAZYLLM_CUDA_REVERSE=1 $< $(quickly)

$(call runs_of,engine): engine/%: build/%/test_engine build/%/liblazyllm_cuda.so
	$<

$(call runs_of,engine-reversed): engine-reversed/%: build/%/test_engine build/%/liblazyllm_cuda.so
	LAZYLLM_CUDA_REVERSE=1 $<

$(call runs_of,gemm): gemm/%: build/%/test_gemm
	$<

harness/planted:
	tests/cuda/test_harness.sh

.PRECIOUS: build/on_cpu/%.o build/on_cpu_asan/%.o build/on_cpu_tsan/%.o
