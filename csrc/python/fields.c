/* fields.c — typed members of a dict. */
#include "core.h"

PyObject *field_object(PyObject *dict, const char *what, const char *key)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (!value) PyErr_Format(PyExc_ValueError, "%s: %s is missing", what, key);
    return value;
}

int field_int(PyObject *dict, const char *what, const char *key, int *out)
{
    PyObject *value = field_object(dict, what, key);
    if (!value) return -1;
    if (!PyLong_Check(value) || PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: %s is %R; it must be an int", what, key, value);
        return -1;
    }
    int overflow;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow || number < INT32_MIN || number > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %s is %R, which does not fit 32 bits", what, key, value);
        return -1;
    }
    *out = (int)number;
    return 0;
}

int field_double(PyObject *dict, const char *what, const char *key, double *out)
{
    PyObject *value = field_object(dict, what, key);
    if (!value) return -1;
    *out = PyFloat_AsDouble(value);
    if (*out != -1.0 || !PyErr_Occurred()) return 0;
    PyErr_Format(PyExc_TypeError, "%s: %s is %R; it must be a number", what, key, value);
    return -1;
}

int field_bool(PyObject *dict, const char *what, const char *key, bool *out)
{
    PyObject *value = field_object(dict, what, key);
    if (!value) return -1;
    if (!PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: %s is %R; it must be True or False", what, key, value);
        return -1;
    }
    *out = value == Py_True;
    return 0;
}
