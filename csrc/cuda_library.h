/* cuda_library.h — the interface of liblazyllm_cuda, a separate library that is loaded only for a CUDA device. */
#pragma once

#include "backend.h"

enum { LAZY_CUDA_VERSION = 13 }; /* increases with every change of this file or of backend.h */

typedef struct lazy_cuda_options {
    int device;
    lazy_dtype type;              /* of weights and activations; matrices of another are converted when bound */
    const char *const *libraries; /* where cuBLASLt may lie, best first */
    int n_libraries;
} lazy_cuda_options;

enum { LAZY_CUDA_TEXT = 1024 };

typedef struct lazy_cuda_facts {
    int n_devices;
    char devices[LAZY_CUDA_TEXT];  /* their names and memory */
    char versions[LAZY_CUDA_TEXT]; /* of driver and runtime */
    char cublas[LAZY_CUDA_TEXT];   /* which file, which version, or why there is none */
} lazy_cuda_facts;

typedef struct lazy_cuda_library {
    int version;
    size_t ops_bytes;          /* sizeof(lazy_ops): another check that library and core are of one build */
    const char *architectures; /* compute capabilities that it has kernels for */
    int (*open)(lazy_backend **out, const lazy_cuda_options *, lazy_error *);
    /* Initialises no device. */
    int (*look)(lazy_cuda_facts *, const char *const *libraries, int n_libraries, lazy_error *);
    /* For benchmarks: reads device memory once, at the highest rate. Waits. */
    int (*read)(lazy_stream *, const void *memory, size_t bytes, lazy_error *);
} lazy_cuda_library;

/* The only exported symbol. */
#define LAZY_CUDA_SYMBOL "lazy_cuda_library_get"
typedef const lazy_cuda_library *lazy_cuda_library_getter(void);

/* Loads liblazyllm_cuda, which stays loaded. */
int lazy_cuda_load(const lazy_cuda_library **out, lazy_error *err);
