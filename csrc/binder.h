/* binder.h — finds and validates the tensors of a checkpoint. */
#ifndef LAZY_BINDER_H
#define LAZY_BINDER_H

#include "model.h"

/* Checks every tensor that the model's config asks for (name, dtype, shape, place within its mapping), then fills
 * the model's weights. model->config, backend and shards are set; layers has n_layers zeroed entries. */
int lazy_bind(lazy_model *model, const lazy_tensor *tensors, int n_tensors, lazy_weights weights,
              const lazy_watch *watch, lazy_error *err);

/* The dtype that holds most of the tensors' bytes; f32 if none is known. */
lazy_dtype lazy_bind_dtype(const lazy_tensor *tensors, int n_tensors);

#endif
