/* device.h — a backend by its name. */
#ifndef LAZY_DEVICE_H
#define LAZY_DEVICE_H

#include "backend.h"

/* Opens the backend of a device. type: the dtype of most weights; a device that has to choose one computes in it. */
int lazy_device_open(lazy_backend **out, const lazy_device *device, lazy_dtype type, lazy_error *err);

#endif
