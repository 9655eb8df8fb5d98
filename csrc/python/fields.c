/* fields.c — typed members of a dict. */
#include "core.h"

PyObject *field_object(PyObject *dict, const char *what, const char *key)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (!value) PyErr_Format(PyExc_ValueError, "%s: %s is missing", what, key);
    return value;
}

static int parse_int(PyObject *value, const char *what, const core_field *field)
{
    int overflow;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow || number < INT32_MIN || number > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %s is %R, which does not fit 32 bits", what, field->key, value);
        return -1;
    }
    *(int *)field->out = (int)number;
    return 0;
}

int fields_parse(PyObject *dict, const char *what, const core_field *fields, size_t n)
{
    static const char *const kinds[] = { "an int", "a number", "a number", "True or False" };
    for (const core_field *field = fields; field < fields + n; field++) {
        PyObject *value = field_object(dict, what, field->key);
        if (!value) return -1;
        bool number = field->type == FIELD_FLOAT || field->type == FIELD_DOUBLE, flag = PyBool_Check(value);
        double real = number ? PyFloat_AsDouble(value) : 0;
        bool fits = number ? !PyErr_Occurred() : field->type == FIELD_BOOL ? flag : PyLong_Check(value) && !flag;
        if (!fits) {
            PyErr_Format(PyExc_TypeError, "%s: %s is %R; it must be %s", what, field->key, value, kinds[field->type]);
            return -1;
        }
        if (field->type == FIELD_INT && parse_int(value, what, field)) return -1;
        if (field->type == FIELD_FLOAT) *(float *)field->out = (float)real;
        if (field->type == FIELD_DOUBLE) *(double *)field->out = real;
        if (field->type == FIELD_BOOL) *(bool *)field->out = value == Py_True;
    }
    return 0;
}
