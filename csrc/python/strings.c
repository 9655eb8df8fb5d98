/* strings.c — lists of strings from Python. */
#include "core.h"

int strings_borrow(PyObject *list, const char ***out, int *n)
{
    *n = list ? (int)PyList_GET_SIZE(list) : 0;
    *out = PyMem_Calloc((size_t)*n + 1, sizeof **out);
    if (!*out) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < *n; i++)
        if (!((*out)[i] = PyUnicode_AsUTF8(PyList_GET_ITEM(list, i)))) return -1;
    return 0;
}
