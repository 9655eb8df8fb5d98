#!/usr/bin/env bash
# Checks a clone on a machine with a GPU in under eight minutes: builds the CUDA core, tests its ops, its products and the engine on the
# device, runs the ops under compute-sanitizer, runs two benchmark suites, and prints a summary. Downloads nothing if python3 has the
# package's dependencies. A step that cannot run is skipped with a message.
#
#   benchmarks/gpu_check.sh [FOLDER]     FOLDER for the results, default benchmarks/results/DATE-GPU
#
# LAZYLLM_CHECK_SECONDS (465) limits the whole run. The exit code is 1 if a step failed, 2 if no step could run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

BUDGET=${LAZYLLM_CHECK_SECONDS:-465}
FOR_BENCHMARKS=220 # seconds of it that are reserved for the benchmarks
NEEDED='numpy safetensors tokenizers jinja2 tqdm setuptools'
out=build/gpu_check
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset LAZYLLM_CUDA_LIBRARY

stop() { echo "gpu_check: $*" >&2; exit 2; }

# ---- requirements --------------------------------------------------------------------------------------------------------------

command -v python3 >/dev/null || stop 'there is no python3'
found=$(python3 - <<'END'
import ctypes
import sys

try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as reason:
    sys.exit(f"no driver: {reason}")
count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
major, minor = ctypes.c_int(), ctypes.c_int()
if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
    sys.exit(f"the driver says error {code}")
if count.value == 0:
    sys.exit("the driver knows no device")
driver.cuDeviceGet(ctypes.byref(device), 0)
driver.cuDeviceGetName(name, len(name), device)
driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # compute capability
driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
print(f"{major.value}.{minor.value} {name.value.decode()}")
END
) || stop 'this machine has no GPU that CUDA can use'
gpu=${found#* }
arch=native
[ "${found%% *}" = 9.0 ] && arch=sm_90a # native does not enable wgmma
nvcc=$(python3 -c 'import sys; sys.path.insert(0, "cuda"); import build_cuda; print(build_cuda.find_nvcc() or "")')
[ "$nvcc" ] || stop 'there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda'

slug=$(echo "$gpu" | tr -cs '[:alnum:]' - | tr '[:upper:]' '[:lower:]' | sed 's/-*$//')
results=${1:-benchmarks/results/$(date -u +%F)-$slug}
rm -rf "$out"
mkdir -p "$out/core" "$results" || stop "cannot write to $out and $results"
summary=$results/check.md
n_failed=0
rows=()

# ---- steps ---------------------------------------------------------------------------------------------------------------------

row() { # NAME RESULT SECONDS DETAIL
    rows+=("$(printf '| %-34s | %-10s | %4s | %s |' "$1" "$2" "$3" "$(echo "$4" | tr '|' '/' | cut -c 1-110)")")
}

skip() { row "$1" skipped '' "$2" && echo "---- $1: skipped, $2"; }

# step NAME LOG LIMIT DEADLINE COMMAND…: runs the command for at most LIMIT seconds and not past DEADLINE
step() {
    local what=$1 log=$out/$2.log limit=$3 left=$(($4 - SECONDS)) begun=$SECONDS code last result=ok
    shift 4
    ((left < limit)) && limit=$left
    if ((limit < 5)); then
        skip "$what" 'no time is left'
        return 1
    fi
    echo "---- $what (at most $limit s)"
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$log" 2>&1
    code=$?
    if ((code == 124 || code == 137)); then
        result=unfinished
    elif ((code)); then
        result=FAILED
        n_failed=$((n_failed + 1))
        tail -25 "$log" | sed 's/^/    /'
    fi
    last=$(grep -av '^[[:space:]]*$' "$log" | tail -1)
    row "$what" "$result" $((SECONDS - begun)) "${last:-exit code $code}"
    echo "     $result"
    return $code
}

has() { "$1" -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))' "${@:2}" 2>/dev/null; }

finish() {
    local goals report
    {
        echo "# A check on $gpu, $(date -u '+%Y-%m-%d %H:%M UTC')"
        echo
        echo "| step                               | result     |    s | last line  |"
        echo "| ---------------------------------- | ---------- | ---- | ---------- |"
        printf '%s\n' "${rows[@]}"
        for report in shapes ops; do
            goals=$(sed -n '/^## Goals/,/^## [^G]/p' "$results/$report/bench.md" 2>/dev/null | grep '^|')
            [ "$goals" ] && printf '\n%s\n' "$goals"
        done
        echo
        ((n_failed)) && echo "$n_failed failed, after $SECONDS s" || echo "nothing failed, after $SECONDS s"
    } >"$summary"
    echo
    cat "$summary"
    echo "wrote $results"
    exit $((n_failed > 0))
}

# ---- environment and build ---------------------------------------------------------------------------------------------

python=.venv/bin/python
# shellcheck disable=SC2086
if [ ! -e .venv ] && ! { echo '---- making .venv'; LAZYLLM_CUDA=0 PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=5 timeout 120 make .venv/test.stamp >$out/venv.log 2>&1; }; then
    rm -rf .venv
    skip '.venv' "it cannot be made: $(tail -1 $out/venv.log)"
fi
# shellcheck disable=SC2086
has $python $NEEDED || python=python3
# shellcheck disable=SC2086
has $python $NEEDED || stop "neither .venv nor $(command -v python3) has all of $NEEDED"
echo "python is $(command -v $python)"

tests_end=$((BUDGET - FOR_BENCHMARKS))
step 'build with nvcc' build 200 "$BUDGET" env LAZYLLM_CUDA=1 $python setup.py --quiet build_ext --inplace || finish
step 'CUDA facts' info 30 "$BUDGET" $python -c '
from lazyllm.machine.device import cuda_facts
facts = cuda_facts()
print(facts)
raise SystemExit(facts.startswith("off"))' || finish
cublas=$($python -c 'from lazyllm.machine.device import libraries; print(*libraries()[:1])')

cat >$out/programs.sh <<'END'
set -e
find csrc -name '*.c' -not -path 'csrc/python/*' | xargs -P "$(nproc)" -I {} \
    sh -c 'gcc -std=gnu11 -O3 -g1 -pthread -c {} -o "$1/core/$(echo {} | tr / _).o"' _ "$out"
objects=$(for source in cuda/*.cu cuda/*.cc; do name=${source##*/}; echo "build/cuda/${name%.*}.o"; done)
{
    echo "-o $out/test_harness tests/cuda/test_harness.cc tests/cuda/harness_kernels.cu"
    for name in test_ops test_gemm; do echo "-o $out/$name tests/cuda/$name.cc $(echo $objects) $out/core/*.o -ldl"; done
} | xargs -P 3 -I {} sh -c '"$nvcc" -std=c++17 -O2 -arch=$arch {} -lpthread'
END
step 'build the tests' programs 90 "$BUDGET" env out=$out nvcc="$nvcc" arch=$arch sh $out/programs.sh

# ---- tests on the device -------------------------------------------------------------------------------------------------------

if [ -x $out/test_ops ] && [ -x $out/test_gemm ] && [ -x $out/test_harness ]; then
    with_cublas=(env ${cublas:+"LAZYLLM_CUBLAS=$cublas"})
    step 'mma fragments' one_hot 20 $tests_end $out/test_harness one_hot
    for type in bf16 f16; do step "wgmma layouts, $type" "wgmma_$type" 20 $tests_end $out/test_harness wgmma_$type; done
    step 'assumptions of the CPU harness' harness 30 $tests_end $out/test_harness
    step 'every op against the reference' test_ops 60 $tests_end "${with_cublas[@]}" $out/test_ops
    # shellcheck disable=SC2086
    step 'matrix products' test_gemm 40 $tests_end $out/test_gemm $cublas
fi

if has $python pytest hypothesis; then
    on_device=(env LAZYLLM_TEST_DEVICE=cuda $python -m pytest -q -p no:cacheprovider)
    step 'the engine' engine 90 $tests_end "${on_device[@]}" tests/test_cuda.py tests/test_facts.py tests/test_damage.py tests/test_method.py
    step 'the benchmarks' bench_tests 40 $tests_end "${on_device[@]}" tests/test_benchmarks.py -k on_cuda
else
    skip 'the engine' "$python has no pytest and hypothesis"
fi

sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$nvcc")/compute-sanitizer" 2>/dev/null)
if [ ! "$sanitizer" ]; then
    skip 'compute-sanitizer' 'it is not installed'
elif [ ! -x $out/test_ops ] || ! timeout 30 "$sanitizer" $out/test_harness one_hot >$out/sanitizer.log 2>&1; then
    skip 'compute-sanitizer' "it does not work here: $(tail -1 $out/sanitizer.log 2>/dev/null)"
else
    for tool in memcheck racecheck; do
        step "compute-sanitizer, $tool" $tool 60 $tests_end "${with_cublas[@]}" "$sanitizer" --tool $tool --error-exitcode 9 $out/test_ops quick
    done
fi

# ---- benchmarks ----------------------------------------------------------------------------------------------------------------

measure() { # SUITE LIMIT; 7 rounds, the default, are what goals need
    step "benchmark: $1" "bench_$1" "$2" "$BUDGET" $python -m benchmarks "$1" --device cuda --out "$results/$1"
    grep -v '^$' "$out/bench_$1.log" 2>/dev/null | grep -a 'left out' | sed 's/^/     /' | sort -u
}
measure shapes 170
measure ops 200
finish
