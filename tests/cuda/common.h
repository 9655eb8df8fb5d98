/* common.h — for the C++ tests of the CUDA core: numbers of three types, random data, and memory of the device. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../../cuda/cuda.h"
#include "../c/check.h"

typedef std::vector<unsigned char> bytes;
typedef std::vector<float> floats;
typedef std::vector<int32_t> ints;

/* ---- numbers ---- */

static inline bytes narrowed(lazy_dtype type, const floats &values)
{
    bytes data(values.size() * lazy_float_bytes(type));
    lazy_narrow(data.data(), values.data(), type, (int)values.size());
    return data;
}

static inline floats widened(lazy_dtype type, const bytes &data)
{
    const lazy_format &format = lazy_formats[type];
    floats values(data.size() / (size_t)format.bytes * (size_t)format.values);
    lazy_widen(values.data(), data.data(), type, (int)values.size());
    return values;
}

/* Uniform from -limit to limit, exact in the type. */
static inline floats random_values(lazy_dtype type, size_t n, float limit = 1)
{
    floats values(n);
    for (float &value : values) value = random_float() * limit;
    return type == LAZY_F32 ? values : widened(type, narrowed(type, values));
}

static inline ints random_ints(int n, int low, int high)
{
    ints values((size_t)n);
    for (int32_t &value : values) value = random_int(low, high);
    return values;
}

static inline double error_of(const floats &got, const floats &want, double min_scale = 1e-30)
{
    return error_above(min_scale, got.data(), want.data(), want.size());
}

/* ---- memory of the device ---- */

struct side {
    lazy_backend *backend;
    const lazy_ops *ops;
    lazy_stream *stream;
    mutable lazy_error err;
};

static inline void must(int code, const lazy_error &err)
{
    if (code == LAZY_OK) return;
    printf("%s\n", err.message);
    exit(2);
}

static inline void did(const side &s, const char *op, int code)
{
    if (code == LAZY_OK) return;
    check(false, "%s: code %d, %s", op, code, s.err.message);
    s.err = {};
}

/* Calls an op of a side, which must succeed: DO(gpu, mark, depth, rows, n, value). */
#define DO(side, op, ...) did(side, #op, (side).ops->op((side).stream, __VA_ARGS__, &(side).err))

static inline lazy_backend *open_cuda(lazy_dtype type)
{
    lazy_error err = {};
    lazy_backend *cuda;
    lazy_cuda_options options = {};
    options.type = type;
    must(lazy_cuda_open(&cuda, &options, &err), err);
    return cuda;
}

static inline side stream_of(lazy_backend *backend, const lazy_config *config, int rows, int tokens)
{
    side s = { backend, backend->ops, nullptr, {} };
    must(s.ops->stream_open(backend, config, &s.stream, &s.err), s.err);
    must(s.ops->reserve(s.stream, rows, tokens, &s.err), s.err);
    return s;
}

/* A pointer to any type, in the memory of a device or of the host. */
struct address {
    void *memory;
    template <class T> operator T *() const { return static_cast<T *>(memory); }
};

/* An array in a device's memory, where floats have `type`; and `plain`, the same for the reference, where they are f32.
 * Between guards, the first `skip` values long, if margin is not 0. */
template <class T> class array
{
  public:
    std::vector<T> plain;

    array(const side &of_device, std::vector<T> values, lazy_dtype of_type, size_t margin, size_t skip)
        : plain(std::move(values)), device(of_device), type(of_type),
          width(std::is_same_v<T, float> ? lazy_float_bytes(type) : sizeof(T)), before(margin + skip * width),
          behind(margin)
    {
        bytes all(before + plain.size() * width + behind, GUARD);
        if constexpr (std::is_same_v<T, float>) {
            bytes data = narrowed(type, plain);
            std::copy(data.begin(), data.end(), all.begin() + (long)before);
        } else if (!plain.empty()) {
            memcpy(&all[before], plain.data(), plain.size() * width);
        }
        did(device, "alloc", device.ops->alloc(device.backend, &memory, all.size(), "an array", &device.err));
        DO(device, upload, memory, all.data(), all.size());
    }
    ~array() { device.ops->free(device.backend, memory); }
    array(const array &) = delete;

    /* The address of value `at` on the device. */
    address on_device(size_t at = 0) const { return { static_cast<char *>(memory) + before + at * width }; }
    /* The same for an op of that side. */
    address on(const side &s, size_t at = 0)
    {
        return s.backend == device.backend ? on_device(at) : address{ plain.data() + at };
    }

    /* The contents of the device, once its stream has finished. */
    bytes bits() const
    {
        bytes all(before + plain.size() * width + behind);
        DO(device, download, all.data(), memory, all.size());
        auto begin = all.begin() + (long)before, end = all.end() - (long)behind;
        auto is_guard = [](unsigned char byte) { return byte == GUARD; };
        check(std::all_of(all.begin(), begin, is_guard) && std::all_of(end, all.end(), is_guard),
              "wrote outside its output");
        return bytes(begin, end);
    }
    std::vector<T> read() const
    {
        bytes data = bits();
        if constexpr (std::is_same_v<T, float>) return widened(type, data);
        else {
            std::vector<T> values(plain.size());
            if (!values.empty()) memcpy(values.data(), data.data(), data.size());
            return values;
        }
    }

  private:
    static constexpr unsigned char GUARD = 0xdb;
    side device;
    lazy_dtype type;
    size_t width, before, behind;
    void *memory;
};

/* An op's input, allocated with its exact size so that ASan and compute-sanitizer detect reads beyond it. */
template <class T> struct input : array<T> {
    input(const side &device, std::vector<T> values, lazy_dtype type = LAZY_F32)
        : array<T>(device, std::move(values), type, 0, 0)
    {
    }
};

/* An op's output, which holds these values before. */
template <class T> struct output : array<T> {
#ifdef __SANITIZE_ADDRESS__ /* checks the bounds of allocations itself, for reads too */
    static constexpr size_t MARGIN = 0;
#else
    static constexpr size_t MARGIN = 256; /* keeps the device's alignment */
#endif
    output(const side &device, std::vector<T> values, lazy_dtype type = LAZY_F32, size_t skip = 0)
        : array<T>(device, std::move(values), type, MARGIN, skip)
    {
    }
};

static inline floats unwritten(size_t n) { return floats(n, NAN); }
