/* model.h — config and weights, validated when the model is opened, and bound to a backend. */
#pragma once

#include <stdatomic.h>

#include "backend.h"
#include "mapping.h"

/* Longer tables are made as contexts grow. Each lives as long as the model, so a stream may read it without a lock. */
typedef struct lazy_rope {
    float *of_k[LAZY_MAX_ROPES]; /* (length, D) D/2 cosines, then D/2 sines, of each position's angles */
    float *of_q[LAZY_MAX_ROPES]; /* the same times the scale of q at the position; of_k's own where q has none */
    int length;                  /* positions */
    struct lazy_rope *next;      /* made before */
} lazy_rope;

typedef struct lazy_layer {
    float *attention_norm;      /* (d,) or NULL */
    lazy_matrix qkv;            /* ((H + 2G) D, d) */
    float *q_norm, *k_norm;     /* (D,), or (H D,) and (G D,), or NULL */
    lazy_matrix o;              /* (d, H D) */
    float *attention_post_norm; /* (d,) or NULL */
    float *ffn_norm;            /* (d,) or NULL */
    lazy_matrix gate_up;        /* (2 F, d) */
    lazy_matrix down;           /* (d, F) */
    lazy_experts experts;       /* in place of gate_up and down where config->expert_layers says so */
    float *ffn_post_norm;       /* (d,) or NULL */
    int window;                 /* INT32_MAX: none */
} lazy_layer;

/* A device, and the layers that it computes. */
typedef struct lazy_place {
    lazy_backend *backend;
    int first, end;             /* layers first … end-1 */
    uint64_t bytes;             /* of the weights in use */
    _Atomic(lazy_rope *) ropes; /* the one made last, or NULL */
} lazy_place;

struct lazy_model {
    lazy_config config; /* its arrays are owned, in one block that begins with inv_freq */
    /* (n_places,) from the first layer on: the embedding is in the first, the final norm and the LM head in the last */
    lazy_place places[LAZY_MAX_DEVICES];
    int n_places;
    const lazy_backend *backend; /* the first place's; all are of one kind and have the same types */
    char device[64];             /* their names */
    lazy_matrix embedding;       /* (vocab, d) */
    lazy_layer *layers;          /* (n_layers,) */
    float *final_norm;           /* (d,) */
    lazy_matrix head;            /* (vocab, d): the embedding where tied, on a single device */
    lazy_mapping *shards;
    int n_shards;
    void **owned; /* weights that are not used as they lie in the shards */
    int n_owned;
    uint64_t bytes;      /* of the weights in use */
    uint8_t *word_parts; /* (vocab,) of lazy_model_know_words; NULL: no token belongs to a word */
};

/* Opens the devices and divides the layers among them. The config is set; lazy_model_close closes what is open. */
int lazy_model_open_places(lazy_model *model, const lazy_device *device, lazy_dtype type, lazy_error *err);

/* True where the LM head has no memory of its own. */
static inline bool lazy_head_is_embedding(const lazy_model *model)
{
    return model->config.tied && model->n_places == 1;
}

/* The index of the place that computes layer l. */
static inline int lazy_place_of(const lazy_model *model, int l)
{
    int i = model->n_places - 1;
    while (i > 0 && l < model->places[i].first) i--;
    return i;
}

/* Fails if a shard has changed since it was opened. */
int lazy_model_check(const lazy_model *model, lazy_error *err);

/* ---- binder.c ------------------------------------------------------------------------------ */

/* Checks every tensor that the model's config asks for (name, dtype, shape, place within its mapping), then fills
 * the model's weights. model->config, places and shards are set; layers has n_layers zeroed entries. threads: that
 * round weights where the backend cannot. */
int lazy_bind(lazy_model *model, const lazy_tensor *tensors, int n_tensors, const char *weights, int threads,
              const lazy_watch *watch, lazy_error *err);

/* The dtype, F32, F16 or BF16, of most of the tensors' bytes; quantized ones count as BF16. F32 if none is known. */
lazy_dtype lazy_bind_dtype(const lazy_tensor *tensors, int n_tensors);

/* ---- rope.c -------------------------------------------------------------------------------- */

/* A table of `length` positions or more; *out stays as it is on failure. stream: on the place, to upload by. */
int lazy_rope_find(const lazy_rope **out, lazy_place *place, lazy_stream *stream, int length, lazy_error *err);

/* Bytes of the table that lazy_rope_find would make; 0 if there is one. */
uint64_t lazy_rope_bytes(const lazy_place *place, const lazy_config *config, int length);

void lazy_rope_close(lazy_place *place);
