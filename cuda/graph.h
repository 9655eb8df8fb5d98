/* graph.h — where the launches of a pass over few rows wait, to be started together.
 *
 * What bounds such a pass is not the work but its hundreds of launches. So they are only written down; what waits is started before
 * anything else goes to the stream. Where an earlier pass came by with the same sequence of kernels, that is the start of one
 * CUDA graph, in which just those kernels whose arguments have changed are set anew. */
#ifndef LAZY_CUDA_GRAPH_H
#define LAZY_CUDA_GRAPH_H

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_runtime_api.h>

extern "C" {
#include "../csrc/error.h"
}

enum {
    LAZY_FEW_ROWS = 4,      /* up to here no product is cuBLASLt's, so that a pass is kernels of this library and nothing else */
    GRAPH_MOST_AT_ONCE = 4, /* launches of one op */
    GRAPH_MOST_ARGUMENTS = 12,
    GRAPH_ARGUMENT_BYTES = 192,
};

struct lazy_graph_launch {
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    const char *what; /* op, for messages */
    int layers_done;
    int n_arguments, bytes;
    int begin[GRAPH_MOST_ARGUMENTS]; /* of each argument */
    alignas(16) unsigned char arguments[GRAPH_ARGUMENT_BYTES];

    template <class P> void add(const P &argument)
    {
        static_assert(std::is_trivially_copyable_v<P> && alignof(P) <= 16, "arguments are copied byte by byte");
        begin[n_arguments++] = bytes;
        memcpy(arguments + bytes, &argument, sizeof argument);
        bytes += ((int)sizeof argument + 15) / 16 * 16;
    }
};

struct lazy_graphs;

int lazy_graphs_open(lazy_graphs **out, cudaStream_t stream, lazy_error *err);
void lazy_graphs_close(lazy_graphs *); /* what waits is forgotten; NULL is fine */

/* Makes room for the launches of an op. */
int lazy_graphs_make_room(lazy_graphs *, lazy_error *err);
/* The next launch, to which its arguments are to be added; NULL past an op's room. */
lazy_graph_launch *lazy_graphs_add(lazy_graphs *);
/* Starts what waits. Of a launch that is refused the error says what it was; what waited behind it is forgotten. */
int lazy_graphs_start(lazy_graphs *, lazy_error *err);

/* Where an op's launches go. */
struct lazy_queue {
    cudaStream_t stream;
    lazy_graphs *graphs; /* NULL: they start at once */
    const char *what;    /* op */
    int layers_done;
};

#endif
