/* test_blocks.cc — how many launches, and blocks in the widest of them, choosing among 32,768 tokens in play takes.
 * Prints a row of docs/cuda.md's table for each op; fails where one takes more launches, or has fewer blocks, than is
 * recorded here. Only with the fakes in cuda/cuda_on_cpu, which count. */
#include <functional>

#include "common.h"

extern "C" {
extern unsigned long long cuda_on_cpu_launches, cuda_on_cpu_widest;
}

enum { TOKENS = 32768 };

int main()
{
    lazy_config config = {};
    config.n_layers = config.n_heads = config.n_kv_heads = 1;
    config.head_dim = config.hidden = config.ffn = 8;
    side s = stream_of(open_cuda(LAZY_F32), &config, TOKENS, TOKENS);
    ints positions, depths;
    floats values;
    for (int i = 0; i < TOKENS; i++) {
        positions.push_back(i);
        depths.push_back(i % 3);
        values.push_back((float)(i % 1009));
    }
    {
        given in_play(s, positions), depth(s, depths);
        given scores(s, values);
        given flags(s, bytes(TOKENS, LAZY_PRUNABLE));
        result kept(s, positions);
        result share(s, values);
        const address out = kept.on_device(), play = in_play.on_device(), score = scores.on_device(),
                      flag = flags.on_device();
        int n_found = 0;
        const struct {
            const char *name;
            unsigned long long launches, blocks; /* that it takes at most, and has at least */
            std::function<void()> run;
        } rows[] = {
            { "select", 2, 64, [&] { DO(s, select, out, play, score, TOKENS, flag, TOKENS / 2); } },
            { "share", 2, 64, [&] { DO(s, share, share.on_device(), score, play, TOKENS, flag); } },
            { "filter", 2, 64, [&] { DO(s, filter, out, &n_found, play, TOKENS, depth.on_device(), 1, 1); } },
        };
        printf("| 32,768 tokens in play | launches | blocks of the widest |\n|---|---|---|\n");
        for (const auto &row : rows) {
            unsigned long long before = cuda_on_cpu_launches;
            cuda_on_cpu_widest = 0;
            row.run();
            unsigned long long launches = cuda_on_cpu_launches - before;
            printf("| %s | %llu | %llu |\n", row.name, launches, cuda_on_cpu_widest);
            check(launches <= row.launches && cuda_on_cpu_widest >= row.blocks,
                  "%s takes %llu launches, the widest of %llu blocks; %llu and %llu are recorded", row.name, launches,
                  cuda_on_cpu_widest, row.launches, row.blocks);
        }
        check(n_found == (TOKENS + 1) / 3, "%d tokens found", n_found);
    }
    s.ops->stream_close(s.stream);
    s.ops->close(s.backend);
    return checked();
}
