/* reference.h — plain loops that the kernels are tested against. */
#pragma once

#include "../../csrc/backend.h"

/* Opens a CPU backend whose compute ops are plain loops on one thread with sums in double; its ops of memory, selection
 * and lists of positions are the core's, which are plain already. */
int reference_open(lazy_backend **out, lazy_dtype kv, lazy_error *err);
