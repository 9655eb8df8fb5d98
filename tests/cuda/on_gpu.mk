# Builds the C++ tests of the CUDA core for the GPU of this machine, without the Python package. Included by the Makefile.
#   make build/gpu/test_ops NVCC=/usr/local/cuda/bin/nvcc GPU_ARCH=sm_90a      GPU_ARCH: native, or sm_90a for wgmma in test_harness

NVCC       ?= nvcc
GPU_ARCH   ?= native
GPU_FLAGS  := -std=c++17 -O2
GPU_CORE   := $(CORE_C:csrc/%.c=build/gpu/core/%.o)
GPU_LINKED := $(patsubst %,build/gpu/%.o,$(basename $(notdir $(wildcard cuda/*.cc cuda/*.cu)))) $(GPU_CORE)

build/gpu/core/%.o: csrc/%.c $(CORE)
	@mkdir -p $(@D)
	$(CC) $(filter-out -Werror,$(CFLAGS_TEST)) -O3 -c $< -o $@

build/gpu/%_sm90a.o: %_sm90a.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(GPU_FLAGS) -gencode arch=compute_90a,code=sm_90a -c $< -o $@

build/gpu/%.o: %.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(GPU_FLAGS) -arch=$(GPU_ARCH) -c $< -o $@

build/gpu/%.o: %.cc $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(GPU_FLAGS) -arch=$(GPU_ARCH) -c $< -o $@

build/gpu/reference.o: tests/c/reference.c $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_TEST) -c $< -o $@

build/gpu/test_ops: build/gpu/reference.o

build/gpu/test_harness: build/gpu/test_harness.o
	$(NVCC) -arch=$(GPU_ARCH) $^ -lpthread -o $@

build/gpu/test_%: build/gpu/test_%.o $(GPU_LINKED)
	$(NVCC) -arch=$(GPU_ARCH) $^ -lpthread -ldl -o $@

.PRECIOUS: build/gpu/%.o build/gpu/core/%.o
