/* model.h — config and weights, checked once and bound to a backend. */
#ifndef LAZY_MODEL_H
#define LAZY_MODEL_H

#include "backend.h"

typedef struct lazy_layer {
    float *attention_norm;  /* (d,) */
    lazy_matrix qkv;        /* ((H + 2G) D, d) */
    float *q_norm, *k_norm; /* (D,) or NULL */
    lazy_matrix o;          /* (d, H D) */
    float *ffn_norm;        /* (d,) */
    lazy_matrix gate_up;    /* (2 F, d) */
    lazy_matrix down;       /* (d, F) */
} lazy_layer;

typedef struct lazy_mapping {
    const unsigned char *data; /* read-only */
    uint64_t bytes;
} lazy_mapping;

struct lazy_model {
    lazy_config config; /* inv_freq is the model's own copy */
    lazy_backend *backend;
    lazy_matrix embedding; /* (vocab, d) */
    lazy_layer *layers;    /* (n_layers,) */
    float *final_norm;     /* (d,) */
    lazy_matrix head;      /* (vocab, d): the embedding where tied */
    lazy_mapping *shards;
    int n_shards;
    uint64_t bytes; /* of the weights in use */
};

/* Projections' widths. */
static inline int lazy_q_width(const lazy_config *c) { return c->n_heads * c->head_dim; }
static inline int lazy_kv_width(const lazy_config *c) { return c->n_kv_heads * c->head_dim; }
static inline int lazy_qkv_width(const lazy_config *c) { return lazy_q_width(c) + 2 * lazy_kv_width(c); }

#endif
