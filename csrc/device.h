/* device.h — a backend by its name. */
#pragma once

#include "backend.h"
#include "cuda_library.h"

/* Opens the backend of a device. type: the dtype of most weights; a device that has to choose one computes in it. */
int lazy_device_open(lazy_backend **out, const lazy_device *device, lazy_dtype type, lazy_error *err);

/* Loads liblazyllm_cuda, which stays loaded. */
int lazy_cuda_load(const lazy_cuda_library **out, lazy_error *err);
