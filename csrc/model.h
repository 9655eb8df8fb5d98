/* model.h — config and weights, validated when the model is opened, and bound to a backend. */
#ifndef LAZY_MODEL_H
#define LAZY_MODEL_H

#include <stdatomic.h>

#include "backend.h"
#include "mapping.h"
#include "rope.h"

typedef struct lazy_layer {
    float *attention_norm;      /* (d,) or NULL */
    lazy_matrix qkv;            /* ((H + 2G) D, d) */
    float *q_norm, *k_norm;     /* (D,), or (H D,) and (G D,), or NULL */
    lazy_matrix o;              /* (d, H D) */
    float *attention_post_norm; /* (d,) or NULL */
    float *ffn_norm;            /* (d,) or NULL */
    lazy_matrix gate_up;        /* (2 F, d) */
    lazy_matrix down;           /* (d, F) */
    float *ffn_post_norm;       /* (d,) or NULL */
    int window;                 /* INT32_MAX: none */
} lazy_layer;

struct lazy_model {
    lazy_config config; /* its arrays are owned */
    lazy_backend *backend;
    lazy_matrix embedding; /* (vocab, d) */
    lazy_layer *layers;    /* (n_layers,) */
    float *final_norm;     /* (d,) */
    lazy_matrix head;      /* (vocab, d): the embedding where tied */
    lazy_mapping *shards;
    int n_shards;
    void **owned; /* weights that are not used as they lie in the shards */
    int n_owned;
    uint64_t bytes;             /* of the weights in use */
    _Atomic(lazy_rope *) ropes; /* the one made last, or NULL */
};

/* Fails if a shard has changed since it was opened. */
int lazy_model_check(const lazy_model *model, lazy_error *err);

#endif
