/* device.h — a backend by its name. */
#ifndef LAZY_DEVICE_H
#define LAZY_DEVICE_H

#include "backend.h"

/* device: as in lazyllm.h. type: of most of the weights, which a device that must choose computes in. */
int lazy_device_open(lazy_backend **out, const lazy_device *device, lazy_dtype type, lazy_error *err);

#endif
