/* rope.h — the RoPE tables of a model, one for all its sessions. */
#ifndef LAZY_ROPE_H
#define LAZY_ROPE_H

#include "backend.h"

/* Tables are made as contexts get longer, and live as long as the model: whoever reads one need not know of others. */
typedef struct lazy_rope {
    float *of_k[LAZY_MAX_ROPES]; /* (length, D) D/2 cosines, then D/2 sines, of each position's angles */
    float *of_q[LAZY_MAX_ROPES]; /* the same times the scale of q at the position; of_k's own where q has none */
    int length;                  /* positions */
    struct lazy_rope *next;      /* made before */
} lazy_rope;

/* A table of `length` positions or more. stream: to upload by. */
int lazy_rope_find(const lazy_rope **out, lazy_model *model, lazy_stream *stream, int length, lazy_error *err);

/* Bytes of the table that lazy_rope_find would make; 0 if there is one. */
uint64_t lazy_rope_bytes(const lazy_model *model, int length);

void lazy_rope_close(lazy_model *model);

#endif
