/* strings.c — strings from Python: lists of them, and names of parts. */
#include "core.h"

#include <string.h>

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

int string_find_part(const char *const *parts, size_t n, const char *name)
{
    for (size_t part = 0; part < n; part++)
        if (strcmp(name, parts[part]) == 0) return (int)part;
    PyErr_Format(PyExc_ValueError, "there is no part %s", name);
    return -1;
}
