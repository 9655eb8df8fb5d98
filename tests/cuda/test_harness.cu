/* test_harness.cu — tests that kernels run on the CPU as on a GPU, and that the fake CUDA runtime behaves like the real
 * one. The kernels use everything in kernel.h.
 *
 * Also runs on a GPU, to verify the expected results (-arch=sm_90a for Hopper's wgmma):
 *   nvcc -std=c++17 -arch=native tests/cuda/test_harness.cu -o test_harness && ./test_harness
 * Compiled with -DPLANTS, a kernel can contain a defect that the CPU harness must report; test_harness.sh lists the
 * expected reports.
 *
 *   test_harness [TEST | -TEXT [DEFECT]]     one test, or those without TEXT in their names */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../cuda/kernel.h"

/* clang-format off */
#define DEFECTS(one)                                                                                                                       \
    one(NONE)                                                                                                                              \
    one(NO_SYNCTHREADS) one(NO_SYNCTHREADS_BEFORE_REUSE) one(NO_SYNCTHREADS_AFTER_ASYNC_WAIT)                                              \
    one(NO_SYNCWARP) one(NO_SYNCWARP_AFTER_LDMATRIX) one(NO_ASYNC_WAIT) one(BLOCKS_RACE)                                     \
    one(STATIC_OVERRUN) one(DYNAMIC_TOO_SMALL) one(DEVICE_OVERRUN) one(UNWRITTEN_STATIC) one(UNWRITTEN_DYNAMIC)                            \
    one(NO_SYNCTHREADS_BEFORE_WGMMA) one(NO_PROXY_FENCE) one(NO_WGMMA_FENCE) one(READ_BEFORE_WGMMA_WAIT) one(NO_WGMMA_WAIT)           \
    one(WRITE_UNDER_WGMMA) one(NO_SWIZZLE)                                                                                                \
    one(DIVERGENT_BARRIER) one(WRONG_MASK) one(MIXED_OPERATIONS) one(MISSING_LANE) one(MISALIGNED) one(HOST_ACCESS) one(NO_BEGIN)
#define NAME(defect) defect,
#define TEXT(defect) #defect,
/* clang-format on */
enum { DEFECTS(NAME) };
#ifdef PLANTS
const char *const defect_names[] = { DEFECTS(TEXT) NULL };
int planted;
#else
constexpr int planted = NONE;
#endif

namespace
{
constexpr unsigned ALL = 0xffffffff;

/* ---- sums ---- */

template <int THREADS>
__global__ void __launch_bounds__(THREADS) block_sums(const float *__restrict__ x, float *sums, int n, int rounds)
{
    begin_kernel();
    __shared__ float part[THREADS / 32];
    for (int round = 0; round < rounds; round++) {
        float sum = 0;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) sum += x[i];
#pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
        const int overrun = planted == STATIC_OVERRUN && threadIdx.x == THREADS - 1;
        if (threadIdx.x % 32 == 0 || overrun)
            if (planted != UNWRITTEN_STATIC || threadIdx.x) part[threadIdx.x / 32 + overrun] = sum;
        if (planted != NO_SYNCTHREADS) __syncthreads();
        if (threadIdx.x == 0) {
            float total = 0;
            for (int w = 0; w < THREADS / 32; w++) total += part[w];
            sums[planted == BLOCKS_RACE ? 0 : blockIdx.x] = total;
        }
        if (planted != NO_SYNCTHREADS_BEFORE_REUSE) __syncthreads();
    }
}

/* ---- matrix products ---- */

/* c = a b, one warp per (16, 8) tile of c; a: (m, k), b: (k, n), row-major; m, n, k are multiples of 16. Two stages of
 * shared memory: the next (16, 16) of a and (16, 8) of b are copied while the current ones are multiplied. A_ROW is
 * padded so that the rows of an ldmatrix lie in different banks. */
template <class T> __global__ void __launch_bounds__(32) product(const T *a, const T *b, float *c, int n, int k)
{
    begin_kernel();
    constexpr int A_ROW = 24, B_ROW = 8, STAGE = 16 * A_ROW + 16 * B_ROW;
    LAZY_DYNAMIC_SHARED(T, shared);
    const int lane = threadIdx.x, row = blockIdx.y * 16, col = blockIdx.x * 8;

    auto fetch = [&](int step) {
        T *to = shared + step % 2 * STAGE;
        if (step * 16 < k) {
            const int r = lane / 2, half = lane % 2 * 8;
            cp_async_16(to + r * A_ROW + half, a + (int64_t)(row + r) * k + step * 16 + half, true);
            if (lane < 16) cp_async_16(to + 16 * A_ROW + lane * B_ROW, b + (int64_t)(step * 16 + lane) * n + col, true);
        }
        cp_async_commit();
    };

    float d[4] = { 0, 0, 0, 0 };
    fetch(0);
    for (int step = 0; step * 16 < k; step++) {
        fetch(step + 1);
        if (planted != NO_ASYNC_WAIT) cp_async_wait<1>();
        if (planted != NO_SYNCTHREADS_AFTER_ASYNC_WAIT) __syncthreads();
        const T *at = shared + step % 2 * STAGE;
        uint32_t fa[4], fb[4];
        ldmatrix_x4(fa, at + lane % 16 * A_ROW + lane / 16 * 8 + (planted == MISALIGNED ? 1 : 0));
        /* the rows of lanes 16 to 31 are loaded but not used */
        ldmatrix_x4_trans(fb, at + 16 * A_ROW + lane % 16 * B_ROW);
        const uint32_t two[2] = { fb[0], fb[1] };
        mma_m16n8k16(d, fa, two, T());
        if (planted != NO_SYNCWARP_AFTER_LDMATRIX) __syncwarp();
    }
    for (int i = 0; i < 4; i++) c[(int64_t)(row + lane / 4 + i / 2 * 8) * n + col + lane % 4 * 2 + i % 2] = d[i];
}

/* Tests kernel.h's description of wgmma. a: (64, 16) per block; b: (16, 128), and its transpose for the K-major
 * operand. out: (blocks, 3, 64, 128) = a b with b K-major and a in shared memory | 2 a b with b MN-major and a in
 * registers | the left half of that, with products 64 columns wide. K-major operands start 16 (block % 4) values into
 * their rows. */
template <class T> struct wgmma_operands {
    T a[64 * WGMMA_ROW], b_k_major[128 * WGMMA_ROW], b_mn_major[2][16 * WGMMA_ROW];
};
enum { WGMMA_SLACK = 2 * WGMMA_ATOM - 16 };

template <class T>
__global__ void __launch_bounds__(128) wgmma_products(const T *a, const T *b, const T *b_transposed, float *out)
{
    begin_kernel();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    const uint32_t into_atom = shared_address(memory) % (2 * WGMMA_ATOM);
    auto *shared = reinterpret_cast<wgmma_operands<T> *>(memory + (into_atom ? 2 * WGMMA_ATOM - into_atom : 0));
    const int self = threadIdx.x, first = blockIdx.x % 4 * 16, row = self / 32 * 16 + self % 32 / 4, col = self % 4 * 2;
    auto place = [](int r, int chunk) {
        return planted == NO_SWIZZLE ? r * WGMMA_ROW + chunk * 8 : wgmma_swizzled(r, chunk);
    };
    a += blockIdx.x * 64 * 16;
    cp_async_16(shared->a + place(self / 2, first / 8 + self % 2), a + self * 8, true);
    for (int i = self; i < 128 * 2; i += 128) {
        cp_async_16(shared->b_k_major + place(i / 2, first / 8 + i % 2), b_transposed + i * 8, true);
        cp_async_16(shared->b_mn_major[i / 8 % 2] + place(i / 16, i % 8), b + i * 8, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (planted != NO_PROXY_FENCE) fence_proxy_async();
    if (planted != NO_SYNCTHREADS_BEFORE_WGMMA) __syncthreads();

    float columns[16][4], rows[16][4], half_rows[8][4];
    for (auto &d : columns) d[0] = d[1] = d[2] = d[3] = 7;
    for (auto &d : rows) d[0] = d[1] = d[2] = d[3] = 0;
    for (auto &d : half_rows) d[0] = d[1] = d[2] = d[3] = 0;
    uint32_t own_a[1][4];
    for (int i = 0; i < 4; i++)
        own_a[0][i] = *reinterpret_cast<const uint32_t *>(a + (row + i % 2 * 8) * 16 + col + i / 2 * 8);
    if (planted != NO_WGMMA_FENCE) wgmma_fence(columns, rows, half_rows, own_a);
    wgmma_k_major(columns, wgmma_descriptor(shared->a, first, 0), wgmma_descriptor(shared->b_k_major, first, 0), false,
                  T());
    wgmma_commit();
    for (int i = 0; i < 2; i++) {
        wgmma_mn_major(rows, own_a[0], wgmma_descriptor(shared->b_mn_major, 0, sizeof shared->b_mn_major[0]), T());
        wgmma_mn_major(half_rows, own_a[0], wgmma_descriptor(shared->b_mn_major, 0, 0), T());
    }
    wgmma_commit();
    if (planted == WRITE_UNDER_WGMMA && self == 0) shared->a[place(0, first / 8)] = T(3.0f);
    float *to = out + (size_t)blockIdx.x * 3 * 64 * 128;
    auto write = [&](const auto &d, int width) {
        for (int i = 0; i < width / 8; i++)
            for (int e = 0; e < 4; e++) to[(row + e / 2 * 8) * 128 + 8 * i + col + e % 2] = d[i][e];
        to += 64 * 128;
    };
    wgmma_wait<1>(columns);
    write(columns, 128);
    if (planted != READ_BEFORE_WGMMA_WAIT && planted != NO_WGMMA_WAIT) wgmma_wait<0>(rows, half_rows, own_a);
    write(rows, 128);
    write(half_rows, 64);
    if (planted == READ_BEFORE_WGMMA_WAIT) wgmma_wait<0>(rows, half_rows, own_a);
#endif
}

/* matrix: (32, 8) 16-bit values, four (8, 8) matrices; plain, trans: (32 lanes, 4), the registers after ldmatrix and
 * ldmatrix.trans */
__global__ void load_matrices(const uint16_t *matrix, uint32_t *plain, uint32_t *trans)
{
    begin_kernel();
    __shared__ __align__(16) uint16_t rows[32][8];
    const int lane = threadIdx.x;
    for (int i = 0; i < 8; i++) rows[(lane + i) % 32][i] = matrix[(lane + i) % 32 * 8 + i];
    if (planted != NO_SYNCWARP) __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, rows[lane]);
    for (int i = 0; i < 4; i++) plain[lane * 4 + i] = r[i];
    ldmatrix_x4_trans(r, rows[lane]);
    for (int i = 0; i < 4; i++) trans[lane * 4 + i] = r[i];
}

/* ---- copies, early returns, dimensions ---- */

/* y = x reversed within each block; inputs at n and beyond count as zeros. Half of the threads beyond n return early.
 * Shared: one float4 per thread. */
__global__ void reverse_quads(const float4 *x, float4 *y, int n)
{
    if (planted != NO_BEGIN) begin_kernel();
    LAZY_DYNAMIC_SHARED(float4, quads);
    const int self = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x,
              size = blockDim.x * blockDim.y * blockDim.z;
    const int i = blockIdx.x * size + self;
    cp_async_16(&quads[self], &x[i < n ? i : 0], i < n);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (i >= n && self % 2) return; /* part of a warp returns; the barrier below must not wait for it */
    if (planted == DIVERGENT_BARRIER && self < 32) __syncthreads();
    else __syncthreads();
    const bool unwritten = planted == UNWRITTEN_DYNAMIC && i == 5;
    if (i < n + (planted == DEVICE_OVERRUN)) y[i] = quads[unwritten ? size : size - 1 - self];
}

/* ---- warp-level operations ---- */

/* out: (3, 32), the results of each operation in one warp whose lane l passes 3 l */
__global__ void lane_operations(int *out)
{
    begin_kernel();
    const int lane = threadIdx.x, value = 3 * lane;
    int answer = 0;
    auto write = [&](int v) { out[answer++ * 32 + lane] = v; };
    write(__shfl_xor_sync(ALL, value, 17));
    write((int)__ballot_sync(ALL, lane % 3 == 0));
    if (planted == WRONG_MASK) __syncwarp(lane == 3 ? 0xfffffff7 : ALL);
    if (planted == MIXED_OPERATIONS && lane < 20) write(__shfl_xor_sync(ALL, value, 1));
    if (planted == MISSING_LANE && lane == 2) __syncthreads();
    write((int)__ballot_sync(ALL, lane == 8));
}

__global__ void add(int *x, int n, int term)
{
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += term;
}

} // namespace

/* ---- tests ---- */

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
    CHECK_OK(lazy_launch(block_sums<128>, n_blocks, 128, 0, NULL, x_device.at, sums.at, n, 2));
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
    const size_t shared = 2 * (16 * 24 + 16 * 8) * sizeof(T) - (planted == DYNAMIC_TOO_SMALL ? 16 : 0);
    CHECK_OK(lazy_launch(product<T>, dim3(n / 8, m / 16), 32, shared, NULL, a_device.at, b_device.at, c.at, n, k));
    CHECK(c.values() == expected);
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
    CHECK_OK(lazy_launch(wgmma_products<T>, n, 128, sizeof(wgmma_operands<T>) + WGMMA_SLACK, NULL, a_device.at,
                         b_device.at, b_transposed_device.at, out.at));
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
    CHECK_OK(lazy_launch(load_matrices, 1, 32, 0, NULL, matrix_device.at, plain.at, trans.at));
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
    const size_t shared = (size + (planted == UNWRITTEN_DYNAMIC)) * sizeof(float4);
    CHECK_OK(lazy_launch(reverse_quads, n_blocks, dim3(4, 3, 6), shared, NULL, (const float4 *)x_device.at,
                         (float4 *)y.at, n));
    std::vector<float> got = y.values();
    for (int i = 0; i < n; i++) {
        int from = i / size * size + size - 1 - i % size;
        for (int c = 0; c < 4; c++) CHECK(got[i * 4 + c] == (from < n ? x[from * 4 + c] : 0));
    }
}

static void test_lanes()
{
    on_device<int> out(3 * 32);
    CHECK_OK(lazy_launch(lane_operations, 1, 32, 0, NULL, out.at));
    std::vector<int> got = out.values();
    for (int lane = 0; lane < 32; lane++) {
        CHECK(got[lane] == 3 * (lane ^ 17));
        CHECK(got[32 + lane] == 0x49249249);
        CHECK(got[64 + lane] == 1 << 8);
    }
}

static void test_runtime()
{
    on_device<int> x(std::vector<int>(10, 0));
    CHECK(lazy_launch(add, 1, 2000, 0, NULL, x.at, 10, 0) == cudaErrorInvalidValue);
    CHECK_OK(cudaGetLastError());
    CHECK(lazy_launch(add, 1, 96, 4 << 20, NULL, x.at, 10, 0) == cudaErrorInvalidValue);
    CHECK_OK(cudaGetLastError());
    CHECK_OK(lazy_launch(add, 1, 32, 0, NULL, x.at, 10, 4));
    CHECK(x.values() == std::vector<int>(10, 4));
}

/* Host access to device memory: a defect for test_harness.sh. */
static void plant_host_access()
{
    on_device<int> x(std::vector<int>{ 1, 2 });
    CHECK(x.at[1] == 2);
}

/* The fake runtime's refusals, and the moments at which it reads host memory; a real one need not do either. */
static void test_stand_in()
{
    cudaDeviceProp prop;
    CHECK_OK(cudaGetDeviceProperties(&prop, 0));
    if (strcmp(prop.name, "CUDA on the CPU")) return;
    const size_t n = 10;
    on_device<char> memory(std::vector<char>(n, 1));
    char own[n] = {};
    CHECK(cudaMemcpy(memory.at + 1, own, n, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(memory.at, own, n, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(own, 0, n, NULL) == cudaErrorInvalidValue);
    CHECK(cudaFree(memory.at + 1) == cudaErrorInvalidValue);
    CHECK_OK(cudaMemcpyAsync(memory.at, own, n, cudaMemcpyHostToDevice, NULL));
    own[5] = 7;
    CHECK(memory.values()[5] == 7);
}

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
        { "wgmma_bf16", test_wgmma<__nv_bfloat16> },
        { "wgmma_f16", test_wgmma<__half> },
        { "load_matrices", test_load_matrices },
        { "reverse_quads", test_reverse_quads },
        { "lanes", test_lanes },
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
