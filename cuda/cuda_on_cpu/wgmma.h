/* wgmma.h — matrix products of a warpgroup on operands in shared memory. */
#pragma once

#include <algorithm>

#include "instructions.h"

namespace cuda_on_cpu
{

/* Not a multiple of an atom's size, because a GPU does not guarantee that either. */
constexpr uint32_t FIRST_SHARED_ADDRESS = 16;

/* Address of a value of a matrix, from PTX's matrix descriptor: start address, LBO and SBO of 14 bits each, in units of
 * 16 bytes, and the swizzle mode, of which only 128 bytes is emulated: bits 4 to 6 of an address are XORed with bits 7
 * to 9. `across` is the index along a row of 128 bytes, `down` the row. Every 64 values across add the LBO, every 8
 * rows down the SBO. */
UNSEEN inline const value16 *value_at(uint64_t matrix, int across, int down, place at)
{
    const executor &e = *running;
    uint64_t start = (matrix & 0x3fff) << 4, lbo = (matrix >> 16 & 0x3fff) << 4, sbo = (matrix >> 32 & 0x3fff) << 4;
    if (matrix >> 62 != 1 || (matrix >> 49 & 7))
        fail(at, "wgmma of a matrix that is not swizzled by 128 bytes at a base of 0");
    uint64_t address = start + (uint64_t)across / 64 * lbo + (uint64_t)across % 64 * 2 + (uint64_t)down / 8 * sbo +
                       (uint64_t)down % 8 * 128;
    address ^= (address >> 7 & 7) << 4;
    uint64_t byte = address - FIRST_SHARED_ADDRESS;
    if (byte >= e.shared_bytes) fail(at, "wgmma reads beyond shared memory");
    if (e.unfenced[byte / 16]) fail(at, "wgmma reads what cp.async wrote without fence.proxy.async");
    return (const value16 *)(e.dynamic_shared + byte);
}

/* Reads this thread's part of the operands that are in shared memory, visibly to TSan. */
inline void read_shared(const product &p, std::vector<uint16_t> &a, std::vector<uint16_t> &b)
{
    int row = current->number % 128 / WARP * 16 + current->lane() / 4, column = current->lane() % 4 * 2;
    if (!p.a_registers) a.clear();
    for (int half = 0; half < 2 && !p.a_registers; half++)
        for (int k = 0; k < 16; k++) a.push_back(*value_at(p.operands.a, k, row + 8 * half, p.at));
    for (int k = 0; k < 16; k++)
        for (int n = column; n < p.n_columns; n += n % 2 ? 7 : 1)
            b.push_back(p.b_mn_major ? *value_at(p.operands.b, n, k, p.at) : *value_at(p.operands.b, k, n, p.at));
}

/* Computes a pending product: accumulates in f32 in the order of k and of issue; a GPU's tensor cores use another order
 * and rounding. */
inline void finish(size_t which)
{
    std::vector<product> &all = current->products;
    product &p = all[which];
    std::vector<uint16_t> a = p.a, b;
    read_shared(p, a, b);
    if (a != p.a || b != p.b) fail(p.at, "shared memory was written while wgmma read it");
    if (p.a_registers && memcmp(p.a_registers, p.operands.registers, sizeof p.operands.registers))
        fail(p.at, "registers were written while wgmma read them");
    size_t n = (size_t)p.n_columns / 2, n_columns = n / 2;
    for (size_t i = 0; i < n; i++)
        if (bits_as<uint32_t>(p.d[i / 4][i % 4]) != ~0u) fail(p.at, "registers were written while wgmma had them");
    std::vector<float> sums = std::move(p.initial);
    for (size_t i = 0; i < n; i++) {
        size_t half = i % 4 / 2, column = i / 4 * 2 + i % 2;
        for (size_t k = 0; k < 16; k++) sums[i] += p.wide(p.a[16 * half + k]) * p.wide(p.b[n_columns * k + column]);
    }
    for (size_t later = which + 1; later < all.size(); later++) {
        if (all[later].d != p.d) continue;
        if (all[later].initial.empty()) all[later].initial = std::move(sums);
        return;
    }
    std::copy(sums.begin(), sums.end(), &p.d[0][0]);
}

/* Checks that all lanes pass the same matrices, and gathers the lanes' registers of a. */
UNSEEN inline void gather_operands(product &p)
{
    const exchange &e = exchange_values_aligned(p.operands, "wgmma", p.at);
    int quad = current->lane() / 4 * 4;
    for (int half = 0; half < 2 && p.a_registers; half++)
        for (int k = 0; k < 16; k++)
            p.a.push_back((uint16_t)(value_of_lane<product_operands>(e, quad + k % 8 / 2).registers[half + k / 8 * 2] >>
                                     k % 2 * 16));
    for (int lane = 0; lane < WARP; lane++) {
        product_operands theirs = value_of_lane<product_operands>(e, lane);
        if (theirs.a != p.operands.a || theirs.b != p.operands.b)
            fail(p.at, "lanes of a warp name different matrices to wgmma");
    }
}

template <class T, int N>
void issue_product(float (&d)[N][4], uint64_t a, const uint32_t *a_registers, uint64_t b, bool b_mn_major,
                   bool accumulate, place at)
{
    cuda_thread &self = *current;
    auto wide = [](uint16_t bits) { return half_of<T>(bits, 0); };
    product p = { d, 8 * N, a_registers, { a, b, {} }, b_mn_major, wide, self.open_products, at };
    if (a_registers) memcpy(p.operands.registers, a_registers, sizeof p.operands.registers);
    gather_operands(p);
    if (!self.registers_fenced) fail(at, "wgmma without wgmma_fence since the last wait");
    read_shared(p, p.a, p.b);
    auto same = [&](const product &earlier) { return earlier.d == d; };
    if (!accumulate) p.initial.assign(4 * N, 0.0f);
    else if (std::none_of(self.products.begin(), self.products.end(), same))
        p.initial.assign(&d[0][0], &d[0][0] + 4 * N);
    memset((void *)d, 0xFF, sizeof d);
    self.products.push_back(std::move(p));
}

namespace names
{

inline uint32_t shared_address(const void *shared)
{
    size_t at = (size_t)((const unsigned char *)shared - running->dynamic_shared);
    if (at > running->shared_bytes) fail({}, "%p is not in dynamic shared memory", shared);
    return FIRST_SHARED_ADDRESS + (uint32_t)at;
}

template <class... R> void wgmma_fence(R &...) { current->registers_fenced = true; }
inline void wgmma_commit() { current->open_products++; }

template <int N, class... R> void wgmma_wait(R &...)
{
    std::vector<product> &products = current->products;
    size_t n_done = 0;
    for (; n_done < products.size() && products[n_done].group < current->open_products - N; n_done++) finish(n_done);
    products.erase(products.begin(), products.begin() + (long)n_done);
    current->registers_fenced = false;
}

template <class T> void wgmma_k_major(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate, T, place at = here())
{
    issue_product<T>(d, a, NULL, b, false, accumulate, at);
}

template <class T, int N>
void wgmma_mn_major(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, T, place at = here())
{
    issue_product<T>(d, 0, a, b, true, true, at);
}

} // namespace names
} // namespace cuda_on_cpu
