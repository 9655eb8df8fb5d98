/* test_blocks.cc — how many launches, and blocks in the widest of them, choosing among 32,768 tokens in play takes.
 * Prints a row of docs/cuda.md's table for each op; fails where one takes more launches, or has fewer blocks, than is
 * recorded here. Only with the fakes in cuda/cuda_on_cpu, which count. */
#include <stdio.h>
#include <stdlib.h>

#include <functional>
#include <vector>

#include "../../cuda/cuda.h"
#include "../c/check.h"

extern "C" {
extern unsigned long long cuda_on_cpu_launches, cuda_on_cpu_widest;
}

enum { TOKENS = 32768 };

static lazy_error err;

static void must(int code)
{
    if (code == LAZY_OK) return;
    printf("%s\n", err.message);
    exit(2);
}

int main()
{
    lazy_cuda_options options = {};
    lazy_config config = {};
    lazy_backend *backend;
    lazy_stream *stream;
    config.n_layers = config.n_heads = config.n_kv_heads = 1;
    config.head_dim = config.hidden = config.ffn = 8;
    must(lazy_cuda_open(&backend, &options, &err));
    const lazy_ops *ops = backend->ops;
    must(ops->stream_open(backend, &config, &stream, &err));
    must(ops->reserve(stream, TOKENS, TOKENS, &err));

    std::vector<int32_t> positions(TOKENS), depths(TOKENS);
    std::vector<float> scores(TOKENS);
    std::vector<uint8_t> flags(TOKENS, LAZY_PRUNABLE);
    for (int i = 0; i < TOKENS; i++) {
        positions[(size_t)i] = i;
        depths[(size_t)i] = i % 3;
        scores[(size_t)i] = (float)(i % 1009);
    }
    auto on_device = [&](const void *from, size_t bytes) {
        void *memory;
        must(ops->alloc(backend, &memory, bytes, "an array", &err));
        must(ops->upload(stream, memory, from, bytes, &err));
        return memory;
    };
    int32_t *in_play = (int32_t *)on_device(positions.data(), TOKENS * sizeof(int32_t)),
            *depth = (int32_t *)on_device(depths.data(), TOKENS * sizeof(int32_t)),
            *out = (int32_t *)on_device(depths.data(), TOKENS * sizeof(int32_t));
    float *score = (float *)on_device(scores.data(), TOKENS * sizeof(float)),
          *share = (float *)on_device(scores.data(), TOKENS * sizeof(float));
    uint8_t *flag = (uint8_t *)on_device(flags.data(), TOKENS);

    int n_found = 0;
    const struct {
        const char *name;
        unsigned long long launches, blocks; /* that it takes at most, and has at least */
        std::function<int()> run;
    } rows[] = {
        { "select", 2, 64, [&] { return ops->select(stream, out, in_play, score, TOKENS, flag, TOKENS / 2, &err); } },
        { "share", 2, 64, [&] { return ops->share(stream, share, score, in_play, TOKENS, flag, &err); } },
        { "filter", 2, 64, [&] { return ops->filter(stream, out, &n_found, in_play, TOKENS, depth, 1, 1, &err); } },
    };
    printf("| 32,768 tokens in play | launches | blocks of the widest |\n|---|---|---|\n");
    for (const auto &row : rows) {
        unsigned long long before = cuda_on_cpu_launches;
        cuda_on_cpu_widest = 0;
        must(row.run());
        unsigned long long launches = cuda_on_cpu_launches - before;
        printf("| %s | %llu | %llu |\n", row.name, launches, cuda_on_cpu_widest);
        check(launches <= row.launches && cuda_on_cpu_widest >= row.blocks,
              "%s takes %llu launches, the widest of %llu blocks; %llu and %llu are recorded", row.name, launches,
              cuda_on_cpu_widest, row.launches, row.blocks);
    }
    check(n_found == (TOKENS + 1) / 3, "%d tokens found", n_found);

    for (void *memory : { (void *)in_play, (void *)depth, (void *)out, (void *)score, (void *)share, (void *)flag })
        ops->free(backend, memory);
    ops->stream_close(stream);
    ops->close(backend);
    return checked();
}
