/* formats.c — lazyllm._core.widen and quantize: values of weights in each format of format.h. */
#include "core.h"

#include "../format.h"

static int format_of(const char *name, lazy_dtype *dtype)
{
    if (lazy_format_find(name, dtype)) return 0;
    PyErr_Format(PyExc_ValueError, "dtype is \"%s\"; it must be a format of weights such as F16 or Q8_0", name);
    return -1;
}

PyObject *core_widen(PyObject *module, PyObject *args)
{
    Py_buffer data;
    const char *name;
    lazy_dtype dtype;
    if (!PyArg_ParseTuple(args, "y*s:widen", &data, &name)) return NULL;
    PyObject *array = NULL;
    if (!format_of(name, &dtype)) {
        const lazy_format *format = &lazy_formats[dtype];
        float *values;
        Py_ssize_t blocks = data.len / format->bytes;
        if (data.len % format->bytes || blocks > INT32_MAX / format->values)
            PyErr_Format(PyExc_ValueError, "%zd bytes; they must be whole blocks of %d, for less than 2^31 values",
                         data.len, format->bytes);
        else if ((array = array_new_float(blocks * format->values, &values)))
            lazy_widen(values, data.buf, dtype, (int)blocks * format->values);
    }
    PyBuffer_Release(&data);
    return array;
}

PyObject *core_quantize(PyObject *module, PyObject *args)
{
    PyObject *values, *blocks = NULL;
    const char *name;
    core_array from;
    lazy_dtype dtype;
    if (!PyArg_ParseTuple(args, "Os:quantize", &values, &name) || format_of(name, &dtype)) return NULL;
    if (dtype != LAZY_Q8_0 && dtype != LAZY_Q4_1)
        return PyErr_Format(PyExc_ValueError, "dtype is \"%s\"; values can be rounded to Q8_0 and Q4_1", name);
    if (array_parse(values, ARRAY_FLOAT, "values", &from)) return NULL;
    const Py_ssize_t n = from.n;
    if (n % lazy_formats[dtype].values || n > INT32_MAX)
        PyErr_Format(PyExc_ValueError, "%zd values; they must be whole blocks of %d, and less than 2^31", n,
                     lazy_formats[dtype].values);
    else if ((blocks = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)lazy_row_bytes(dtype, (int)n))))
        lazy_quantize(PyBytes_AsString(blocks), from.data, dtype, (int)n);
    Py_DECREF(from.owner);
    return blocks;
}
