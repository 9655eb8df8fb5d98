/* strings.c — lists of strings from Python. */
#include "core.h"

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
