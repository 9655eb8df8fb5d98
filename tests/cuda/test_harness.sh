#!/bin/sh
# Tests the harness that runs kernels on the CPU, and that it reports every defect that the kernels of test_harness.cu can contain:
#   make harness/planted
# Also compiles the kernels with nvcc if there is one.
set -eu
cd "$(dirname "$0")/../.."
output=build/planted_plain/output

n_failed=0
report() { # HOLDS WHAT
    if [ "$1" = yes ]; then
        echo "ok      $2"
    else
        echo "FAILED  $2"
        sed 's/^/        /' $output | head -30
        n_failed=$((n_failed + 1))
    fi
}

for kind in plain asan tsan; do
    for reverse in 0 1; do
        holds=yes
        LAZYLLM_CUDA_REVERSE=$reverse timeout 60 build/planted_$kind/test_harness >$output 2>&1 || holds=no
        report $holds "$kind$([ $reverse = 0 ] || echo ', threads and blocks in reverse'): $(tail -1 $output)"
    done
done

# build, defect, test, text that its output must contain
while read -r kind defect test message; do
    holds=no
    timeout 60 build/planted_$kind/test_harness "$test" "$defect" >$output 2>&1 || { grep -qF "$message" $output && holds=yes; }
    report $holds "$kind finds $defect: $message"
done <<'END'
tsan  NO_SYNCTHREADS                  sums          data race
tsan  NO_SYNCTHREADS_BEFORE_REUSE     sums          data race
tsan  NO_SYNCWARP                     load_matrices data race
tsan  NO_SYNCWARP_AFTER_LDMATRIX      product_bf16  data race
plain NO_ASYNC_WAIT                   product_f16   product_f16 FAILED
tsan  NO_SYNCTHREADS_AFTER_ASYNC_WAIT product_f16   data race
tsan  NO_SYNCTHREADS_BEFORE_WGMMA     wgmma_f16     data race
plain NO_PROXY_FENCE                  wgmma_f16     without fence.proxy.async
plain NO_WGMMA_FENCE                  wgmma_bf16    wgmma without wgmma_fence
plain READ_BEFORE_WGMMA_WAIT          wgmma_f16     wgmma_f16 FAILED
plain NO_WGMMA_WAIT                   wgmma_f16     returned without waiting for wgmma
plain WRITE_UNDER_WGMMA               wgmma_f16     shared memory was written while wgmma read it
plain NO_SWIZZLE                      wgmma_bf16    wgmma_bf16 FAILED
asan  STATIC_OVERRUN                  sums          global-buffer-overflow
asan  DYNAMIC_TOO_SMALL               product_bf16  heap-buffer-overflow
asan  DEVICE_OVERRUN                  reverse_quads heap-buffer-overflow
plain UNWRITTEN_STATIC                sums          sums FAILED
plain UNWRITTEN_DYNAMIC               reverse_quads reverse_quads FAILED
plain DIVERGENT_BARRIER               reverse_quads divergent __syncthreads: reached at
plain WRONG_MASK                      lanes         which is not of all lanes
plain MIXED_OPERATIONS                lanes         divergent warp: __ballot_sync
plain MISSING_LANE                    lanes         thread 2 waits in __syncthreads
tsan  BLOCKS_RACE                     sums          data race
plain MISALIGNED                      product_bf16  no multiple of 16
asan  HOST_ACCESS                     host_access   use-after-poison
plain NO_BEGIN                        reverse_quads returned without begin_kernel
END

if command -v nvcc >/dev/null; then
    holds=yes
    nvcc -std=c++17 -Werror all-warnings -Xptxas -warn-spills -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
        -c tests/cuda/test_harness.cu -o build/planted_plain/nvcc.o >$output 2>&1 || holds=no
    report $holds 'nvcc compiles it for sm_80 and sm_90a without a warning'
else
    echo 'SKIPPED nvcc: not found'
fi

[ $n_failed = 0 ] || { echo "$n_failed checks failed"; exit 1; }
