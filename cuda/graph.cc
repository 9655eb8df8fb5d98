#include "graph.h"

#include <cstdio>

#include "cuda.h"

extern "C" {
#include "../csrc/memory.h"
}

enum {
    MOST_WAITING = 256,
    LEAST_NODES = 16, /* starting fewer one by one costs no more */
    MOST_GRAPHS = 64, /* kept, of as many sequences seen last */
};

struct graph {
    int n;
    lazy_graph_launch *launches; /* (n,) as they are set now */
    cudaGraphNode_t *nodes;      /* (n,) each behind the one before */
    cudaGraph_t nodes_owner;
    cudaGraphExec_t executable;
};

/* A sequence of kernels that came by: the first time without a graph, as it may never come again. */
struct sequence {
    uint64_t key;
    graph *made;
};

struct lazy_graphs {
    cudaStream_t stream;
    int n;
    lazy_graph_launch waiting[MOST_WAITING]; /* (n,) */
    sequence seen[MOST_GRAPHS];
    int oldest; /* of seen */
};

int lazy_graphs_open(lazy_graphs **out, cudaStream_t stream, lazy_error *err)
{
    int code = lazy_alloc_zeroed((void **)out, 1, sizeof **out, "launches that wait", err);
    if (!code) (*out)->stream = stream;
    return code;
}

static void close_graph(graph *g)
{
    if (!g) return;
    if (g->executable) cudaGraphExecDestroy(g->executable); /* one under way goes on to its end */
    if (g->nodes_owner) cudaGraphDestroy(g->nodes_owner);
    lazy_free(g->nodes);
    lazy_free(g->launches);
    lazy_free(g);
}

void lazy_graphs_close(lazy_graphs *graphs)
{
    if (!graphs) return;
    for (sequence &s : graphs->seen) close_graph(s.made);
    lazy_free(graphs);
}

int lazy_graphs_make_room(lazy_graphs *graphs, lazy_error *err)
{
    return graphs->n + GRAPH_MOST_AT_ONCE > MOST_WAITING ? lazy_graphs_start(graphs, err) : LAZY_OK;
}

lazy_graph_launch *lazy_graphs_add(lazy_graphs *graphs)
{
    if (graphs->n == MOST_WAITING) return nullptr;
    lazy_graph_launch *launch = &graphs->waiting[graphs->n++];
    launch->n_arguments = launch->bytes = 0;
    return launch;
}

/* ---- one graph -------------------------------------------------------------------------- */

struct argument_list {
    void *at[GRAPH_MOST_ARGUMENTS];

    explicit argument_list(lazy_graph_launch *launch)
    {
        for (int i = 0; i < launch->n_arguments; i++) at[i] = launch->arguments + launch->begin[i];
    }
};

static cudaKernelNodeParams node_of(lazy_graph_launch *launch, argument_list *arguments)
{
    cudaKernelNodeParams node = {};
    node.func = const_cast<void *>(launch->kernel);
    node.gridDim = launch->grid;
    node.blockDim = launch->block;
    node.sharedMemBytes = (unsigned)launch->shared_bytes;
    node.kernelParams = arguments->at;
    return node;
}

static bool same(const dim3 &a, const dim3 &b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

static bool same(const lazy_graph_launch &a, const lazy_graph_launch &b)
{
    return a.kernel == b.kernel && same(a.grid, b.grid) && same(a.block, b.block) && a.shared_bytes == b.shared_bytes &&
           a.bytes == b.bytes && memcmp(a.arguments, b.arguments, (size_t)a.bytes) == 0;
}

/* What waits as a graph; NULL where there is no memory for it, or the runtime refuses. */
static graph *make_graph(lazy_graphs *graphs)
{
    graph *g;
    if (lazy_alloc_zeroed((void **)&g, 1, sizeof *g, "a graph", nullptr)) return nullptr;
    g->n = graphs->n;
    int code = lazy_alloc((void **)&g->launches, (size_t)g->n, sizeof *g->launches, "a graph", nullptr);
    if (!code) code = lazy_alloc((void **)&g->nodes, (size_t)g->n, sizeof *g->nodes, "a graph", nullptr);
    cudaError_t status = code ? cudaErrorMemoryAllocation : cudaGraphCreate(&g->nodes_owner, 0);
    for (int i = 0; i < g->n && status == cudaSuccess; i++) {
        g->launches[i] = graphs->waiting[i];
        argument_list arguments(&g->launches[i]);
        cudaKernelNodeParams node = node_of(&g->launches[i], &arguments);
        status = cudaGraphAddKernelNode(&g->nodes[i], g->nodes_owner, i ? &g->nodes[i - 1] : nullptr, i ? 1 : 0, &node);
    }
    if (status == cudaSuccess) status = cudaGraphInstantiate(&g->executable, g->nodes_owner, 0);
    if (status == cudaSuccess) status = cudaGraphUpload(g->executable, graphs->stream); /* what memory the first start would take */
    if (status == cudaSuccess) return g;
    cudaGetLastError();
    close_graph(g);
    return nullptr;
}

static bool set_graph(graph *g, lazy_graphs *graphs)
{
    if (g->n != graphs->n) return false;
    for (int i = 0; i < g->n; i++) {
        if (same(g->launches[i], graphs->waiting[i])) continue;
        g->launches[i] = graphs->waiting[i];
        argument_list arguments(&g->launches[i]);
        cudaKernelNodeParams node = node_of(&g->launches[i], &arguments);
        if (cudaGraphExecKernelNodeSetParams(g->executable, g->nodes[i], &node) == cudaSuccess) continue;
        cudaGetLastError();
        return false;
    }
    return true;
}

/* ---- starting --------------------------------------------------------------------------- */

/* Of equal sequences in different layers each has a key of its own. */
static uint64_t key_of(const lazy_graphs *graphs)
{
    uint64_t key = 14695981039346656037u ^ (uint64_t)graphs->waiting[0].layers_done;
    for (int i = 0; i < graphs->n; i++) {
        key = (key ^ (uint64_t)(uintptr_t)graphs->waiting[i].kernel) * 1099511628211u;
        key ^= key >> 29;
    }
    return key;
}

/* The graph that does just what waits; NULL where the launches are to be started one by one, which is always right and says best what
 * is wrong with one. */
static graph *graph_of(lazy_graphs *graphs)
{
    if (graphs->n < LEAST_NODES) return nullptr;
    uint64_t key = key_of(graphs);
    for (sequence &s : graphs->seen) {
        if (s.key != key) continue;
        if (!s.made) s.made = make_graph(graphs);
        else if (!set_graph(s.made, graphs)) {
            close_graph(s.made);
            s.made = nullptr;
        }
        return s.made;
    }
    sequence *first_seen = &graphs->seen[graphs->oldest];
    graphs->oldest = (graphs->oldest + 1) % MOST_GRAPHS;
    close_graph(first_seen->made);
    *first_seen = { key, nullptr };
    return nullptr;
}

static int start_each(lazy_graphs *graphs, lazy_error *err)
{
    for (int i = 0; i < graphs->n; i++) {
        lazy_graph_launch *launch = &graphs->waiting[i];
        argument_list arguments(launch);
        cudaError_t status =
            cudaLaunchKernel(launch->kernel, launch->grid, launch->block, arguments.at, launch->shared_bytes, graphs->stream);
        if (status == cudaSuccess) continue;
        char what[128];
        snprintf(what, sizeof what, "%s, queued after %d layers", launch->what, launch->layers_done);
        return lazy_cuda_check(status, what, err);
    }
    return LAZY_OK;
}

int lazy_graphs_start(lazy_graphs *graphs, lazy_error *err)
{
    if (!graphs->n) return LAZY_OK;
    graph *g = graph_of(graphs);
    int code = g ? lazy_cuda_check(cudaGraphLaunch(g->executable, graphs->stream), "starting a graph", err) : start_each(graphs, err);
    graphs->n = 0;
    return code;
}
