/* arguments.c — what Python hands over: typed members of a dict, lists of strings. */
#include "core.h"

static bool parse(PyObject *value, const core_field *field)
{
    if (field->format == CORE_FLOATS) return !array_parse(value, ARRAY_FLOAT, field->key, field->out);
    if (field->format == CORE_INTS) return !array_parse(value, ARRAY_INT32, field->key, field->out);
    if (field->format != 'p') return PyArg_Parse(value, (char[]){ field->format, '\0' }, field->out);
    *(bool *)field->out = value == Py_True;
    return PyBool_Check(value);
}

int fields_parse(PyObject *dict, const char *what, const core_field *fields, size_t n)
{
    for (const core_field *field = fields; field < fields + n; field++) {
        PyObject *value = PyDict_GetItemString(dict, field->key);
        if (!value) PyErr_Format(PyExc_ValueError, "%s: %s is missing", what, field->key);
        else if (!parse(value, field))
            PyErr_Format(PyExc_TypeError, "%s: %s is %R, which is of another type or too large", what, field->key,
                         value);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

int strings_parse(PyObject *list, PyObject **owner, const char ***out, int *n)
{
    *owner = list ? PyList_AsTuple(list) : PyTuple_New(0);
    if (!*owner) return -1;
    *n = (int)PyTuple_Size(*owner);
    *out = PyMem_Calloc((size_t)*n + 1, sizeof **out);
    if (!*out) PyErr_NoMemory();
    bool good = *out != NULL;
    for (int i = 0; i < *n && good; i++) {
        (*out)[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(*owner, i), NULL);
        good = (*out)[i] != NULL;
    }
    if (!good) Py_CLEAR(*owner);
    return good ? 0 : -1;
}
