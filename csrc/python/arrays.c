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

static PyObject *copy_of(int type, int rank, npy_intp *shape, const void *from)
{
    PyObject *array = PyArray_SimpleNew(rank, shape, type);
    npy_intp bytes = array ? PyArray_NBYTES((PyArrayObject *)array) : 0;
    if (bytes > 0) memcpy(PyArray_DATA((PyArrayObject *)array), from, (size_t)bytes);
    return array;
}

PyObject *array_of_int32(const int32_t *from, Py_ssize_t n) { return copy_of(NPY_INT32, 1, (npy_intp[]){ n }, from); }
PyObject *array_of_uint8(const uint8_t *from, Py_ssize_t n) { return copy_of(NPY_UINT8, 1, (npy_intp[]){ n }, from); }
PyObject *array_of_float(const float *from, Py_ssize_t n) { return copy_of(NPY_FLOAT32, 1, (npy_intp[]){ n }, from); }

PyObject *array_of_counts(const lazy_layer_count *from, Py_ssize_t n)
{
    enum { FIELDS = sizeof *from / sizeof(int32_t) };
    return copy_of(NPY_INT32, 2, (npy_intp[]){ n, FIELDS }, from);
}

static PyObject *new_array(int type, int rank, const npy_intp *shape, void **data)
{
    PyObject *array = PyArray_SimpleNew(rank, shape, type);
    if (array) *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

PyObject *array_new_float(Py_ssize_t n, float **data)
{
    void *floats;
    PyObject *array = new_array(NPY_FLOAT32, 1, (npy_intp[]){ n }, &floats);
    if (array) *data = floats;
    return array;
}

static const int TYPES[] = { [LAZY_F32] = NPY_FLOAT32, [LAZY_F16] = NPY_FLOAT16, [LAZY_BF16] = NPY_UINT16 };

PyObject *array_new_part(const lazy_view *view, lazy_view_part part, int n, void **data)
{
    const lazy_config *c = view->config;
    const npy_intp list[] = { n }, hidden[] = { n, c->hidden }, heads[] = { c->n_kv_heads, n, c->head_dim },
                   projections[] = { n, c->n_heads + 2 * c->n_kv_heads, c->head_dim };
    switch (part) {
    case LAZY_VIEW_IN_PLAY:
    case LAZY_VIEW_ROWS: return new_array(NPY_INT32, 1, list, data);
    case LAZY_VIEW_PROTECTED: return new_array(NPY_UINT8, 1, list, data);
    case LAZY_VIEW_KEYS:
    case LAZY_VIEW_VALUES: return new_array(TYPES[view->kv], 3, heads, data);
    case LAZY_VIEW_HIDDEN: return new_array(TYPES[view->activations], 2, hidden, data);
    case LAZY_VIEW_PROJECTIONS: break;
    }
    return new_array(TYPES[view->activations], 3, projections, data);
}

PyObject *array_new_state(const lazy_model *model, lazy_state_part part, int n, void **data)
{
    const lazy_config *c = lazy_model_config(model);
    const npy_intp heads[] = { c->n_kv_heads, n, c->head_dim }, rows[] = { n, c->hidden };
    if (part == LAZY_STATE_KEYS || part == LAZY_STATE_VALUES)
        return new_array(TYPES[lazy_model_kv(model)], 3, heads, data);
    if (part == LAZY_STATE_AUX) return new_array(TYPES[lazy_model_activations(model)], 2, rows, data);
    return new_array(NPY_FLOAT32, 1, rows, data);
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
    Py_ssize_t length = PySequence_Check(object) ? PySequence_Size(object) : -1;
    if (length == 0) {
        PyErr_SetString(PyExc_ValueError, "no tokens were given; a pass needs at least one");
        return -1;
    }
    PyErr_Clear(); /* an object without a length gets NumPy's message below */
    PyObject *any_type = PyArray_FROM_O(object);
    if (!any_type) return -1;
    PyObject *array = NULL;
    if (PyArray_NDIM((PyArrayObject *)any_type) != 1)
        PyErr_Format(PyExc_ValueError, "ids has %d dimensions; it must have 1",
                     PyArray_NDIM((PyArrayObject *)any_type));
    else if (!PyArray_ISINTEGER((PyArrayObject *)any_type))
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

static int read_vector(PyObject *object, int type, const char *what, PyObject **owner, const void **data, Py_ssize_t *n)
{
    *owner = PyArray_FROM_OTF(object, type, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_ENSURECOPY);
    if (!*owner) return -1;
    if (PyArray_NDIM((PyArrayObject *)*owner) != 1) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions; it must have 1", what,
                     PyArray_NDIM((PyArrayObject *)*owner));
        Py_CLEAR(*owner);
        return -1;
    }
    *data = PyArray_DATA((PyArrayObject *)*owner);
    *n = PyArray_SIZE((PyArrayObject *)*owner);
    return 0;
}

int array_parse_floats(PyObject *object, const char *what, PyObject **owner, const float **data, Py_ssize_t *n)
{
    return read_vector(object, NPY_FLOAT32, what, owner, (const void **)data, n);
}

int array_parse_ints(PyObject *object, const char *what, PyObject **owner, const int32_t **data, Py_ssize_t *n)
{
    return read_vector(object, NPY_INT32, what, owner, (const void **)data, n);
}
