/* hopper.cu — decides whether attention uses the wgmma kernel: LAZYLLM_CUDA_HOPPER must be 1, the device must have
 * compute capability 9.0, and the kernel's results on it must agree with the portable kernel's, before the first pass.
 * One H200 has passed; until more devices have, the kernel is not used by default, because the comparison would not
 * survive a kernel that hangs or destroys the context. */
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"

namespace
{
struct shape {
    int n, m, n_heads, n_kv_heads, d; /* as in backend.h */
    int window;                       /* of keys in play */
};

/* A single row; odd numbers of rows x heads and of keys; several tiles and several groups of keys; a causal
 * triangle (n = m); windows. */
const shape shapes[] = {
    { 1, 1, 1, 1, 64, 1 },      { 37, 150, 3, 1, 64, 150 },  { 67, 391, 4, 2, 64, 391 },  { 257, 257, 1, 1, 64, 100 },
    { 1, 129, 2, 1, 128, 129 }, { 37, 150, 3, 1, 128, 150 }, { 67, 391, 4, 2, 128, 300 }, { 257, 257, 1, 1, 128, 257 },
};

/* Result of the comparison for one type on one device. */
struct verdict {
    bool agrees;
    std::string reason; /* why not, if it does not agree */
};

/* A device copy of a vector. `code` is the error of the allocation or the copy. */
class device_array
{
  public:
    template <class T> explicit device_array(const std::vector<T> &values)
    {
        size_t bytes = values.size() * sizeof(T);
        code = cudaMalloc(&memory, bytes);
        if (!code) code = cudaMemcpy(memory, values.data(), bytes, cudaMemcpyHostToDevice);
    }
    ~device_array() { cudaFree(memory); }
    device_array(const device_array &) = delete;

    template <class T> T *as() const { return static_cast<T *>(memory); }
    template <class T> cudaError_t read(std::vector<T> &values) const
    {
        return cudaMemcpy(values.data(), memory, values.size() * sizeof(T), cudaMemcpyDeviceToHost);
    }
    cudaError_t code;

  private:
    void *memory = nullptr;
};

/* Uniform in [-limit, limit); advances seed. */
template <class T> std::vector<T> random_values(size_t n, float limit, uint32_t &seed)
{
    std::vector<T> values(n);
    for (T &value : values) {
        seed = seed * 1664525u + 1013904223u;
        lazy_narrow(&value, ((float)(seed >> 8) / (float)(1 << 23) - 1.0f) * limit);
    }
    return values;
}

/* Largest absolute difference divided by the largest absolute value of `want`; infinity if any value is not finite. */
template <class T> double difference(const std::vector<T> &got, const std::vector<T> &want)
{
    double worst = 0, largest = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double a = lazy_wide(got[i]), b = lazy_wide(want[i]);
        if (!std::isfinite(a) || !std::isfinite(b)) return INFINITY;
        worst = std::fmax(worst, std::fabs(a - b));
        largest = std::fmax(largest, std::fabs(b));
    }
    return worst / largest;
}

/* *error = difference between the two kernels' outputs on random data of this shape. Every other cache slot holds a
 * token that is not in play, filled with NaN. */
template <class T> cudaError_t compare(const shape &c, double *error)
{
    uint32_t seed = (uint32_t)(c.n + c.m + c.d);
    int capacity = 2 * c.m, width = (c.n_heads + 2 * c.n_kv_heads) * c.d;
    std::vector<int32_t> in_play((size_t)c.m);
    std::vector<lazy_key_range> ranges((size_t)c.n);
    for (int j = 0; j < c.m; j++) in_play[(size_t)j] = 2 * j + (j % 3 == 0);
    for (int r = 0; r < c.n; r++) {
        int end = (int)((int64_t)(r + 1) * c.m / c.n);
        ranges[(size_t)r] = { std::max(end - c.window, 0), end };
    }
    size_t slots = (size_t)(c.n_kv_heads * capacity), outputs = (size_t)(c.n * c.n_heads * c.d);
    std::vector<T> nothing(outputs), by_mma(outputs), by_wgmma(outputs), kv[2];
    for (std::vector<T> &part : kv) {
        part = random_values<T>(slots * (size_t)c.d, 1, seed);
        for (size_t slot = 0; slot < slots; slot++) {
            if ((int)slot % capacity == in_play[slot % (size_t)capacity / 2]) continue;
            for (size_t i = slot * (size_t)c.d; i < (slot + 1) * (size_t)c.d; i++) lazy_narrow(&part[i], NAN);
        }
    }
    for (T &value : nothing) lazy_narrow(&value, NAN);
    device_array qkv(random_values<T>((size_t)(c.n * width), 4, seed)), k(kv[0]), v(kv[1]), in_play_on_device(in_play),
        ranges_on_device(ranges);
    device_array y(nothing), other_y(nothing);
    for (const device_array *array : { &qkv, &k, &v, &in_play_on_device, &ranges_on_device, &y, &other_y })
        if (array->code) return array->code;

    attention_task<T> t = {};
    t.qkv = qkv.as<T>();
    t.k = k.as<T>();
    t.v = v.as<T>();
    t.in_play = in_play_on_device.as<int32_t>();
    t.ranges = ranges_on_device.as<lazy_key_range>();
    t.n = c.n;
    t.m = c.m;
    t.n_heads = c.n_heads;
    t.group = c.n_heads / c.n_kv_heads;
    t.d = c.d;
    t.width = width;
    t.capacity = capacity;
    t.chunks = 1;
    t.scale = (float)(M_LOG2E / sqrt((double)c.d));
    t.y = y.as<T>();
    cudaError_t code = lazy_cuda_attend_mma(t, nullptr);
    t.y = other_y.as<T>();
    if (!code) code = lazy_cuda_attend_wgmma(t, nullptr);
    if (!code) code = y.read(by_mma);
    if (!code) code = other_y.read(by_wgmma);
    if (!code) *error = difference(by_wgmma, by_mma);
    return code;
}

template <class T> verdict judge(double tolerance, cudaError_t *code)
{
    char text[100];
    for (const shape &c : shapes) {
        double error = 0;
        if ((*code = compare<T>(c, &error))) return { false, cudaGetErrorString(*code) };
        if (error <= tolerance) continue;
        snprintf(text, sizeof text, "it differs by %.2g at n %d, m %d, head_dim %d", error, c.n, c.m, c.d);
        return { false, text };
    }
    return { true, "" };
}

/* Compares once per process for each device and type; later calls return the stored result. */
int compare_once(const lazy_cuda *cuda, verdict *out, lazy_error *err)
{
    static std::mutex one_at_a_time;
    static std::map<std::pair<int, int>, verdict> verdicts; /* by device and type */
    std::lock_guard hold(one_at_a_time);
    auto at = verdicts.find({ cuda->device, cuda->type });
    if (at == verdicts.end()) {
        cudaError_t code = cudaSuccess;
        /* tolerance: both kernels round their softmax weights and their outputs to the type */
        verdict judged = cuda->type == LAZY_F16 ? judge<__half>(2e-3, &code) : judge<__nv_bfloat16>(1.5e-2, &code);
        cudaGetLastError();
        if (code && cudaDeviceSynchronize() != cudaSuccess)
            return lazy_fail(err, LAZY_DEVICE,
                             "the wgmma kernel failed on %s: %s; unset LAZYLLM_CUDA_HOPPER to run without it",
                             cuda->name, cudaGetErrorString(code));
        if (code) { /* a temporary failure, such as too little free memory: not stored, so the next model tries again */
            *out = judged;
            return LAZY_OK;
        }
        at = verdicts.emplace(std::make_pair(cuda->device, (int)cuda->type), judged).first;
    }
    *out = at->second;
    return LAZY_OK;
}
} // namespace

int lazy_cuda_check_wgmma(lazy_cuda *cuda, lazy_error *err)
{
    const char *setting = getenv("LAZYLLM_CUDA_HOPPER");
    if (!setting || strcmp(setting, "1") != 0) return LAZY_OK;
    if (cuda->capability != 90 || cuda->type == LAZY_F32) return LAZY_OK;
    verdict result = {};
    int code = compare_once(cuda, &result, err);
    if (code) return code;
    cuda->wgmma = result.agrees;
    size_t length = strlen(cuda->variant);
    snprintf(cuda->variant + length, sizeof cuda->variant - length, result.agrees ? ", wgmma" : ", no wgmma: %s",
             result.reason.c_str());
    return LAZY_OK;
}
