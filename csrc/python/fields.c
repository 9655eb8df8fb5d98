/* fields.c — typed members of a dict. */
#include "core.h"

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
        PyObject *value = PyDict_GetItemString(dict, field->key);
        if (!value) {
            PyErr_Format(PyExc_ValueError, "%s: %s is missing", what, field->key);
            return -1;
        }
        bool real = field->type == FIELD_FLOAT || field->type == FIELD_DOUBLE, flag = PyBool_Check(value);
        double number = real ? PyFloat_AsDouble(value) : 0;
        bool fits = field->type == FIELD_INT    ? PyLong_Check(value) && !flag
                    : field->type == FIELD_BOOL ? flag
                                                : !real || !PyErr_Occurred();
        if (!fits) {
            PyErr_Format(PyExc_TypeError, "%s: %s is %R; it must be %s", what, field->key, value, kinds[field->type]);
            return -1;
        }
        switch (field->type) {
        case FIELD_INT:
            if (parse_int(value, what, field)) return -1;
            break;
        case FIELD_FLOAT: *(float *)field->out = (float)number; break;
        case FIELD_DOUBLE: *(double *)field->out = number; break;
        case FIELD_BOOL: *(bool *)field->out = value == Py_True; break;
        case FIELD_OBJECT: *(PyObject **)field->out = value; break;
        }
    }
    return 0;
}
