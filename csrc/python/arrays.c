/* arrays.c — conversions from and to NumPy arrays; only this file includes its headers. */
#include "core.h"

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#include <string.h>

int arrays_import(void)
{
    import_array1(-1);
    return 0;
}

static const int TYPES[] = {
    [ARRAY_FLOAT] = NPY_FLOAT32, [LAZY_F16] = NPY_FLOAT16,  [LAZY_BF16] = NPY_UINT16,
    [ARRAY_INT32] = NPY_INT32,   [ARRAY_UINT8] = NPY_UINT8,
};

int array_find_part(const array_part *parts, size_t n, const char *name)
{
    for (size_t part = 0; part < n; part++)
        if (strcmp(name, parts[part].name) == 0) return (int)part;
    PyErr_Format(PyExc_ValueError, "there is no part %s", name);
    return -1;
}

PyObject *array_new(const array_part *part, void **data)
{
    PyObject *array = PyArray_SimpleNew(part->rank, part->shape, TYPES[part->type]);
    if (array) *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

PyObject *array_new_float(Py_ssize_t n, float **data)
{
    return array_new(&(array_part){ NULL, ARRAY_FLOAT, 1, { n } }, (void **)data);
}

PyObject *array_of(array_type type, const void *from, Py_ssize_t n, int columns)
{
    void *data;
    PyObject *array = array_new(&(array_part){ NULL, type, columns ? 2 : 1, { n, columns } }, &data);
    npy_intp bytes = array ? PyArray_NBYTES((PyArrayObject *)array) : 0;
    if (bytes > 0) memcpy(data, from, (size_t)bytes);
    return array;
}

int array_parse_ids(PyObject *object, int32_t **ids, int *n)
{
    *ids = NULL;
    if (PyUnicode_Check(object) || PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "ids must be a list of int or an integer array, not %s; encode text with the tokenizer",
                     PyUnicode_Check(object) ? "str" : "bytes");
        return -1;
    }
    PyObject *any_type = PyArray_FROM_O(object);
    if (!any_type) return -1;
    PyObject *array = NULL;
    if (PyArray_NDIM((PyArrayObject *)any_type) != 1)
        PyErr_Format(PyExc_ValueError, "ids has %d dimensions; it must have 1",
                     PyArray_NDIM((PyArrayObject *)any_type));
    else if (PyArray_SIZE((PyArrayObject *)any_type) && !PyArray_ISINTEGER((PyArrayObject *)any_type))
        PyErr_Format(PyExc_TypeError, "ids are of type %S; they must be integers",
                     PyArray_DESCR((PyArrayObject *)any_type));
    else array = PyArray_FROM_OTF(any_type, NPY_INT64, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_FORCECAST);
    Py_DECREF(any_type);
    if (!array) return -1;
    npy_intp size = PyArray_SIZE((PyArrayObject *)array);
    const npy_int64 *from = PyArray_DATA((PyArrayObject *)array);
    if (size > INT32_MAX || !(*ids = PyMem_Malloc((size_t)size * sizeof **ids))) {
        Py_DECREF(array);
        PyErr_NoMemory();
        return -1;
    }
    for (npy_intp i = 0; i < size; i++) (*ids)[i] = from[i] >= 0 && from[i] <= INT32_MAX ? (int32_t)from[i] : -1;
    *n = (int)size;
    Py_DECREF(array);
    return 0;
}

int array_parse(PyObject *object, array_type type, const char *what, core_array *out)
{
    PyObject *owner = PyArray_FROM_OTF(object, TYPES[type], NPY_ARRAY_IN_ARRAY | NPY_ARRAY_ENSURECOPY);
    if (!owner) return -1;
    PyArrayObject *array = (PyArrayObject *)owner;
    *out = (core_array){ owner, PyArray_DATA(array), PyArray_SIZE(array) };
    if (PyArray_NDIM(array) == 1) return 0;
    PyErr_Format(PyExc_ValueError, "%s has %d dimensions; it must have 1", what, PyArray_NDIM(array));
    Py_CLEAR(out->owner);
    return -1;
}
