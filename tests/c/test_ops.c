/* test_ops.c — every op of the CPU backend against its plain reference, on each instruction set this machine runs, in
 * f32 and, where it has kernels for it, in bf16 and int8. The plain reference gets x and weights as they are after the
 * kernels' rounding. Only the powers of attention in bf16, and x in 16 bits of fixed point, are rounded on one side
 * alone.
 *
 * Fresh random data, outputs poisoned with NaN, guard words before and after each of them, odd shapes. Prints what
 * failed, then "N passed, N failed". For slow sanitizers, as argument:
 *   sample    every seventh of like cases, which runs all code
 *   bf16      of the sample, bf16 alone
 *   fastest   of the sample, one shape of layers on the fastest instruction set, which has all its code run on several
 *             threads */
#include "ops.h"

int main(int argc, char **argv)
{
    bool fastest = argc == 2 && strcmp(argv[1], "fastest") == 0, bf16 = argc == 2 && strcmp(argv[1], "bf16") == 0;
    if (argc > 2 || (argc == 2 && !fastest && !bf16 && strcmp(argv[1], "sample") != 0)) {
        fprintf(stderr, "usage: %s [sample|bf16|fastest]\n", argv[0]);
        return 2;
    }
    if (argc == 2) each = 7; /* has no divisor in common with the periods in which cases alternate */
    const lazy_config shapes[] = {
        { .hidden = 24, .n_heads = 4, .n_kv_heads = 2, .head_dim = 8, .ffn = 40 },
        { .hidden = 70, .n_heads = 3, .n_kv_heads = 1, .head_dim = 64, .ffn = 33, .gelu = true, .wide_qk_norm = true },
        { .hidden = 33, .n_heads = 2, .n_kv_heads = 2, .head_dim = 80, .ffn = 100 },
        { .hidden = 64,
          .n_heads = 8,
          .n_kv_heads = 2,
          .head_dim = 128,
          .ffn = 64,
          .query_scalar = 100,
          .gelu = true,
          .late_qk_norm = true },
    };
    size_t n_shapes = fastest ? 1 : sizeof shapes / sizeof *shapes;
    for (const char *const *variant = lazy_cpu_variants(); *variant; variant++) {
        for (computing = LAZY_COMPUTE_F32; computing <= LAZY_COMPUTE_INT8; computing++) {
            bool tiles = strcmp(*variant, "amx") == 0,       /* the rest of this variant is that of avx512, */
                integers = strcmp(*variant, "avxvnni") == 0; /* and of this that of avx2 */
            if (!lazy_arithmetic_find(*variant, computing) || ((bf16 || tiles) && computing != LAZY_COMPUTE_BF16))
                continue;
            test_products(*variant, shapes, n_shapes);
            if (computing == LAZY_COMPUTE_INT8 || integers) continue; /* its other ops are those of bf16 or f32 */
            test_rows(*variant, shapes, n_shapes);
            test_attention(*variant, shapes, n_shapes);
        }
        if (fastest) break;
    }
    if (!lazy_arithmetic_find(NULL, LAZY_COMPUTE_BF16)) printf("SKIPPED bf16: this processor has no AVX512-BF16\n");
    if (!lazy_arithmetic_find(NULL, LAZY_COMPUTE_INT8))
        printf("SKIPPED int8: this processor has AVX-512 without VNNI, or no AVX2\n");
    if (!lazy_arithmetic_find("avxvnni", LAZY_COMPUTE_INT8))
        printf("SKIPPED avxvnni: this processor has no AVX-VNNI\n");
    computing = LAZY_COMPUTE_F32;
    if (fastest || bf16) return checked(); /* the rest runs on one thread */
    test_selection();
    test_kept_rows("reference");
    test_narrowing(LAZY_F16);
    test_narrowing(LAZY_BF16);
    return checked();
}
