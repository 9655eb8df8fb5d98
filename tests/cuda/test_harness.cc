/* test_harness.cc — tests that kernels run on the CPU as on a GPU, and that the fake CUDA runtime behaves like the real
 * one.
 *
 * Also runs on a GPU, to verify the expected results:
 *   nvcc -std=c++17 -arch=native tests/cuda/test_harness.cc tests/cuda/harness_kernels.cu -o test_harness &&
 * ./test_harness
 * (-arch=sm_90a for Hopper's wgmma)
 *
 *   test_harness [TEST | -TEXT]     one test, or those without TEXT in their names */
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

struct counts {
    int sum, minimum;
    unsigned n;
    unsigned long long long_sum;
    float float_sum;
};

cudaError_t launch_block_sums(const float *x, float *sums, int n, int n_blocks, int rounds, cudaStream_t stream);
template <class T>
cudaError_t launch_product(const T *a, const T *b, float *c, int m, int n, int k, cudaStream_t stream);
cudaError_t launch_one_hot(float *d, bool half, cudaStream_t stream);
template <class T>
cudaError_t launch_wgmma_products(const T *a, const T *b, const T *b_transposed, float *out, int n,
                                  cudaStream_t stream);
cudaError_t launch_load_matrices(const uint16_t *matrix, uint32_t *plain, uint32_t *trans, cudaStream_t stream);
cudaError_t launch_reverse_quads(const float4 *x, float4 *y, int n, dim3 block, int n_blocks, cudaStream_t stream);
cudaError_t launch_fill_shared(int *sum, int n, cudaStream_t stream);
cudaError_t launch_lane_operations(int *out, cudaStream_t stream);
cudaError_t launch_count(counts *c, int n_blocks, int n_threads, cudaStream_t stream);
cudaError_t launch_compute(const float *x, float *out, int n, cudaStream_t stream);
cudaError_t launch_twice_and(int *x, int n, int add, int n_threads, cudaStream_t stream);

#ifdef PLANTS
extern const char *const defect_names[];
extern int planted;
#endif

static int n_failed;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                     \
            n_failed++;                                                                                                \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define CHECK_OK(call) CHECK((call) == cudaSuccess)

/* n values on the device, filled with NaN at first */
template <class T> struct on_device {
    T *at = NULL;
    size_t n;

    explicit on_device(size_t n) : n(n)
    {
        if (cudaMalloc((void **)&at, n * sizeof(T)) || cudaMemsetAsync(at, 0xFF, n * sizeof(T), NULL) ||
            cudaStreamSynchronize(NULL))
            abort();
    }
    explicit on_device(const std::vector<T> &values) : on_device(values.size())
    {
        if (cudaMemcpy(at, values.data(), n * sizeof(T), cudaMemcpyHostToDevice) || cudaStreamSynchronize(NULL))
            abort();
    }
    on_device(const on_device &) = delete;
    ~on_device() { cudaFree(at); }

    std::vector<T> values() const
    {
        std::vector<T> values(n);
        if (cudaMemcpy(values.data(), at, n * sizeof(T), cudaMemcpyDeviceToHost)) abort();
        return values;
    }
};

/* Multiples of 1/8 from -2 to 2: sums of their products are exact in any order. */
static std::vector<float> eighths(size_t n)
{
    std::vector<float> values(n);
    for (float &v : values) v = (float)(rand() % 33 - 16) / 8;
    return values;
}

static void test_sums()
{
    const int n = 1000, n_blocks = 3;
    std::vector<float> x = eighths(n), expected(n_blocks);
    for (int i = 0; i < n; i++) expected[i / 128 % n_blocks] += x[i];
    on_device<float> x_device(x), sums(n_blocks);
    CHECK_OK(launch_block_sums(x_device.at, sums.at, n, n_blocks, 2, NULL));
    CHECK(sums.values() == expected);
}

template <class T> static void test_product()
{
    const int m = 32, n = 24, k = 80;
    std::vector<float> a = eighths(m * k), b = eighths(k * n), expected(m * n);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            for (int kk = 0; kk < k; kk++) expected[i * n + j] += a[i * k + kk] * b[kk * n + j];
    on_device<T> a_device(std::vector<T>(a.begin(), a.end())), b_device(std::vector<T>(b.begin(), b.end()));
    on_device<float> c(m * n);
    CHECK_OK(launch_product(a_device.at, b_device.at, c.at, m, n, k, NULL));
    CHECK(c.values() == expected);
}

static void test_one_hot()
{
    for (bool half : { false, true }) {
        on_device<float> d(256 * 128);
        CHECK_OK(launch_one_hot(d.at, half, NULL));
        std::vector<float> got = d.values();
        for (int hot = 0; hot < 256; hot++)
            for (int i = 0; i < 128; i++)
                CHECK(got[hot * 128 + i] == (i / 8 == hot / 16 ? hot % 16 * 8 + i % 8 + 1 : 0));
    }
}

/* a has one non-zero value per row, 2^(row / 16) at column (row + block) % 16, and all values of b differ, so each
 * result identifies its operands. */
template <class T> static void test_wgmma()
{
    setenv("LAZYLLM_CUDA_FAKE_CAPABILITY", "90", 1);
    cudaDeviceProp device;
    CHECK_OK(cudaGetDeviceProperties(&device, 0));
    unsetenv("LAZYLLM_CUDA_FAKE_CAPABILITY");
    if (device.major != 9 || device.minor != 0) {
        printf("no wgmma on sm_%d%d\n", device.major, device.minor);
        return;
    }
    const int n = 16;
    auto b_at = [](int k, int col) {
        uint16_t bits = (uint16_t)(0x3c00 + 128 * k + col); /* in [1, 4) as f16; small positive numbers as bf16 */
        T value;
        memcpy((void *)&value, &bits, sizeof value);
        return value;
    };
    std::vector<T> a(n * 64 * 16, T(0.0f)), b(16 * 128), b_transposed(128 * 16);
    for (int i = 0; i < n * 64; i++) a[i * 16 + (i % 64 + i / 64) % 16] = T((float)(1 << i % 64 / 16));
    for (int i = 0; i < 16 * 128; i++) b[i] = b_transposed[i % 128 * 16 + i / 128] = b_at(i / 128, i % 128);
    on_device<T> a_device(a), b_device(b), b_transposed_device(b_transposed);
    on_device<float> out(n * 3 * 64 * 128);
    CHECK_OK(launch_wgmma_products(a_device.at, b_device.at, b_transposed_device.at, out.at, n, NULL));
    std::vector<float> got = out.values();
    for (int i = 0; i < (int)got.size(); i++) {
        int col = i % 128, row = i / 128 % 64, way = i / (128 * 64) % 3, block = i / (3 * 128 * 64);
        if (way == 2 && col >= 64) continue;
        float expected = (float)(1 << row / 16) * (float)b_at((row + block) % 16, col) * (way ? 2.0f : 1.0f);
        if (got[i] != expected)
            printf("block %d, way %d, row %d, column %d: %g, not %g\n", block, way, row, col, got[i], expected);
        CHECK(got[i] == expected);
    }
}

static void test_load_matrices()
{
    std::vector<uint16_t> matrix(32 * 8);
    for (int i = 0; i < 32 * 8; i++) matrix[i] = (uint16_t)(i * 257);
    on_device<uint16_t> matrix_device(matrix);
    on_device<uint32_t> plain(128), trans(128);
    CHECK_OK(launch_load_matrices(matrix_device.at, plain.at, trans.at, NULL));
    std::vector<uint32_t> got_plain = plain.values(), got_trans = trans.values();
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const uint16_t *own = &matrix[i * 64];
            int row = lane / 4, col = lane % 4 * 2;
            CHECK(got_plain[lane * 4 + i] == (own[row * 8 + col] | (uint32_t)own[row * 8 + col + 1] << 16));
            CHECK(got_trans[lane * 4 + i] == (own[col * 8 + row] | (uint32_t)own[(col + 1) * 8 + row] << 16));
        }
}

static void test_reverse_quads()
{
    const int n = 150, size = 4 * 3 * 6, n_blocks = 3;
    std::vector<float> x = eighths(n * 4);
    on_device<float> x_device(x), y(n * 4);
    CHECK_OK(launch_reverse_quads((const float4 *)x_device.at, (float4 *)y.at, n, dim3(4, 3, 6), n_blocks, NULL));
    std::vector<float> got = y.values();
    for (int i = 0; i < n; i++) {
        int from = i / size * size + size - 1 - i % size;
        for (int c = 0; c < 4; c++) CHECK(got[i * 4 + c] == (from < n ? x[from * 4 + c] : 0));
    }
}

static void test_much_shared_memory()
{
    const int n = 80 * 1024 / 4;
    int expected = 0;
    for (int i = 0; i < n; i++) expected += i % 7;
    on_device<int> sum(std::vector<int>{ 0 });
    CHECK_OK(launch_fill_shared(sum.at, n, NULL));
    CHECK(sum.values()[0] == 2 * expected);
    CHECK(launch_fill_shared(sum.at, 1 << 20, NULL) == cudaErrorInvalidValue);
    CHECK_OK(cudaGetLastError());
}

static void test_lanes()
{
    on_device<int> out(3 * 32);
    CHECK_OK(launch_lane_operations(out.at, NULL));
    std::vector<int> got = out.values();
    int answer = 0;
    auto all_are = [&](auto expected) {
        bool same = true;
        for (int lane = 0; lane < 32; lane++) same &= got[answer * 32 + lane] == expected(lane);
        if (!same) printf("answer %d of lane_operations is wrong\n", answer);
        answer++;
        return same;
    };
    CHECK(all_are([](int l) { return 3 * (l ^ 17); }));
    CHECK(all_are([](int) { return 0x49249249; }));
    CHECK(all_are([](int) { return 1 << 8; }));
}

static void test_atomics()
{
    const int n_blocks = 5, n_threads = 100, n = n_blocks * n_threads;
    on_device<counts> c(std::vector<counts>{ counts{} });
    CHECK_OK(launch_count(c.at, n_blocks, n_threads, NULL));
    counts got = c.values()[0];
    CHECK(got.sum == n * (n - 1) / 2 && got.n == n && got.float_sum == n / 2 &&
          got.long_sum == (unsigned long long)n << 33);
    CHECK(got.minimum == 51 - n);
}

static void test_arithmetic()
{
    const int n = 6;
    std::vector<float> x = eighths(32);
    on_device<float> x_device(x), out(32 * n);
    CHECK_OK(launch_compute(x_device.at, out.at, n, NULL));
    std::vector<float> got = out.values();
    for (int lane = 0; lane < 32; lane++) {
        float v = x[lane];
        double expected[n] = { exp2(v), fmax(fmin(v, 1.5), -1.5), -v, (double)__builtin_popcount(lane), 0, 0 };
        for (int i = 0; i < n; i++) CHECK(fabs(got[lane * n + i] - expected[i]) <= 2e-6 * (1 + fabs(expected[i])));
    }
}

/* A copy to the device may be under way when it returns; a non-blocking stream does not wait for it, but one who waits
 * for the default stream does. The fake runtime delays such copies until then. */
static void test_default_stream()
{
    const int n = 100;
    cudaStream_t stream;
    int *x;
    std::vector<int> ones(n, 1), got(n);
    CHECK_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(cudaMalloc((void **)&x, n * sizeof(int)));
    for (int round = 0; round < 2; round++) {
        CHECK_OK(cudaMemsetAsync(x, 0, n * sizeof(int), NULL));
        CHECK_OK(cudaStreamSynchronize(NULL));
        CHECK_OK(cudaMemcpy(x, ones.data(), n * sizeof(int), cudaMemcpyHostToDevice));
        if (round) CHECK_OK(cudaStreamSynchronize(NULL));
        CHECK_OK(cudaMemcpyAsync(got.data(), x, n * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK_OK(cudaStreamSynchronize(stream));
        CHECK(got == ones || (!round && got == std::vector<int>(n, 0)));
    }
    CHECK_OK(cudaFree(x));
    CHECK_OK(cudaStreamDestroy(stream));
}

static void test_host_threads()
{
    const int n = 64, n_threads = 4;
    std::vector<std::thread> threads;
    std::vector<int> right(n_threads);
    for (int t = 0; t < n_threads; t++)
        threads.emplace_back([&right, t] {
            cudaStream_t stream;
            on_device<int> x(std::vector<int>(n, t));
            bool ok = !cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
            for (int i = 0; i < 5; i++) ok &= !launch_twice_and(x.at, n, 0, 64, stream);
            ok &= !cudaStreamSynchronize(stream) && !cudaStreamDestroy(stream);
            right[t] = ok && x.values() == std::vector<int>(n, 32 * t);
        });
    for (std::thread &thread : threads) thread.join();
    for (int t = 0; t < n_threads; t++) CHECK(right[t]);
}

static void test_runtime()
{
    int n_devices;
    CHECK_OK(cudaGetDeviceCount(&n_devices));
    CHECK(cudaSetDevice(n_devices) == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
    CHECK_OK(cudaGetLastError());
    CHECK(!strcmp(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice"));
    CHECK(!strcmp(cudaGetErrorString(cudaErrorInvalidDevice), "invalid device ordinal"));

    on_device<int> x(std::vector<int>(10, 0));
    CHECK(launch_twice_and(x.at, 10, 0, 2000, NULL) == cudaErrorInvalidValue);
    CHECK_OK(cudaGetLastError());

    int *pinned;
    CHECK_OK(cudaMallocHost((void **)&pinned, 10 * sizeof(int)));
    CHECK_OK(launch_twice_and(x.at, 10, 4, 32, NULL));
    CHECK_OK(cudaMemcpyAsync(pinned, x.at, 10 * sizeof(int), cudaMemcpyDeviceToHost, NULL));
    CHECK_OK(cudaStreamSynchronize(NULL));
    CHECK(pinned[9] == 4);
    CHECK_OK(cudaFreeHost(pinned));
}

/* Host access to device memory: a defect for test_harness.sh. */
static void plant_host_access()
{
    on_device<int> x(std::vector<int>{ 1, 2 });
    CHECK(x.at[1] == 2);
}

/* Settings of the fake runtime that a real one does not have. */
static void test_stand_in()
{
    cudaDeviceProp prop;
    CHECK_OK(cudaGetDeviceProperties(&prop, 0));
    if (strcmp(prop.name, "CUDA on the CPU")) return;

    size_t free_before, free_bytes, total;
    char *memory;
    CHECK_OK(cudaMemGetInfo(&free_before, &total));
    setenv("LAZYLLM_CUDA_FAKE_MEMORY", "1000000", 1);
    CHECK_OK(cudaMalloc((void **)&memory, 600000));
    CHECK_OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(free_bytes == 400000 && total == 1000000);
    void *more = memory;
    CHECK(cudaMalloc(&more, 400001) == cudaErrorMemoryAllocation);

    char own[16] = { 0 };
    CHECK(cudaMemcpy(memory + 599990, own, 16, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(memory, own, 16, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(own, 0, 16, NULL) == cudaErrorInvalidValue);
    CHECK(cudaFree(memory + 16) == cudaErrorInvalidValue);
    CHECK_OK(cudaFree(memory));
    unsetenv("LAZYLLM_CUDA_FAKE_MEMORY");
    CHECK_OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(free_bytes == free_before);

    setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2", 1);
    int device;
    CHECK_OK(cudaSetDevice(1));
    CHECK_OK(cudaSetDevice(0));
    setenv("LAZYLLM_CUDA_FAKE_DEVICES", "0", 1);
    CHECK(cudaGetDeviceCount(&device) == cudaErrorNoDevice && device == 0);
    unsetenv("LAZYLLM_CUDA_FAKE_DEVICES");
    cudaGetLastError();
}

/* test_harness [test [defect]] */
int main(int argc, char **argv)
{
#ifdef PLANTS
    while (argc > 2 && strcmp(defect_names[planted], argv[2]))
        if (!defect_names[++planted]) return printf("there is no defect %s\n", argv[2]), 2;
#endif
    const struct {
        const char *name;
        void (*run)();
    } tests[] = {
        { "sums", test_sums },
        { "product_bf16", test_product<__nv_bfloat16> },
        { "product_f16", test_product<__half> },
        { "one_hot", test_one_hot },
        { "wgmma_bf16", test_wgmma<__nv_bfloat16> },
        { "wgmma_f16", test_wgmma<__half> },
        { "load_matrices", test_load_matrices },
        { "reverse_quads", test_reverse_quads },
        { "much_shared_memory", test_much_shared_memory },
        { "lanes", test_lanes },
        { "atomics", test_atomics },
        { "arithmetic", test_arithmetic },
        { "default_stream", test_default_stream },
        { "host_threads", test_host_threads },
        { "runtime", test_runtime },
        { "stand_in", test_stand_in },
        { "host_access", plant_host_access },
    };
    int n_run = 0;
    for (auto &test : tests) {
        const char *wish = argc > 1 ? argv[1] : "-host_access";
        if (*wish == '-' ? test.run == plant_host_access || strstr(test.name, wish + 1) != NULL
                         : strcmp(wish, test.name))
            continue;
        int before = n_failed;
        test.run();
        if (n_failed > before) printf("%s FAILED\n", test.name);
        n_run++;
    }
    printf("%d of %d tests hold\n", n_run - n_failed, n_run);
    return n_failed || !n_run;
}
