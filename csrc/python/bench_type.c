/* bench_type.c — lazyllm._core.Bench. */
#include "core.h"

#include <ctype.h>

#include "../format.h"

static PyObject *bench_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "op",       "n",      "m",       "rows",   "cols",      "dtype",   "n_heads", "n_kv_heads",
                             "head_dim", "window", "threads", "device", "libraries", "compute", NULL };
    const char *op, *dtype = "bf16";
    lazy_bench_shape shape = { .n = 1, .m = 1, .rows = 1, .cols = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64 };
    lazy_device device = { .name = "cpu" };
    PyObject *libraries = NULL, *owner;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|$iiiisiiiiisO!s", names, &op, &shape.n, &shape.m, &shape.rows, &shape.cols, &dtype,
                                     &shape.n_heads, &shape.n_kv_heads, &shape.head_dim, &shape.window, &device.threads, &device.name,
                                     &PyList_Type, &libraries, &device.compute))
        return NULL;
    char name[8] = { 0 }; /* formats have theirs in capitals */
    for (size_t i = 0; i + 1 < sizeof name && dtype[i]; i++) name[i] = (char)toupper((unsigned char)dtype[i]);
    if (!lazy_format_find(name, &shape.dtype))
        return PyErr_Format(PyExc_ValueError, "dtype is \"%s\"; it must be a format of weights such as bf16, q8_0 or q4_k", dtype);
    const char **places = NULL;
    if (strings_read(libraries, &owner, &places, &device.n_libraries)) {
        PyMem_Free(places);
        return NULL;
    }
    device.libraries = places;
    BenchObject *self = (BenchObject *)PyType_GenericAlloc(type, 0);
    lazy_error err = { 0 };
    if (self && lazy_bench_open(&self->bench, op, shape, &device, &err)) {
        core_raise(PyType_GetModuleState(type), &err);
        Py_CLEAR(self);
    }
    PyMem_Free(places);
    Py_DECREF(owner);
    return (PyObject *)self;
}

static void bench_dealloc(BenchObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    lazy_bench_close(self->bench);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* Holds the GIL, so that no other Python thread disturbs the timing. */
static PyObject *bench_run(BenchObject *self, PyObject *unused)
{
    (void)unused;
    double seconds;
    lazy_error err = { 0 };
    return lazy_bench_run(self->bench, &seconds, &err) ? core_raise(core_state_of(self), &err) : PyFloat_FromDouble(seconds);
}

static PyObject *bench_flops(BenchObject *self, void *unused)
{
    (void)unused;
    return PyFloat_FromDouble(lazy_bench_flops(self->bench));
}

static PyObject *bench_bytes(BenchObject *self, void *unused)
{
    (void)unused;
    return PyFloat_FromDouble(lazy_bench_bytes(self->bench));
}

static PyObject *bench_count(BenchObject *self, PyObject *unused)
{
    (void)unused;
    const int *tasks;
    lazy_error err = { 0 };
    int jobs = lazy_bench_count(self->bench, &tasks, &err);
    if (jobs < 0) return core_raise(core_state_of(self), &err);
    PyObject *list = PyList_New(jobs);
    for (int i = 0; list && i < jobs; i++) {
        PyObject *number = PyLong_FromLong(tasks[i]);
        if (!number) Py_CLEAR(list);
        else PyList_SetItem(list, i, number);
    }
    return list;
}

static PyMethodDef bench_methods[] = {
    { "count", (PyCFunction)bench_count, METH_NOARGS, "count() -> the tasks of each job of one run, on the CPU" },
    { "run", (PyCFunction)bench_run, METH_NOARGS, "run() -> seconds that one run took" },
    { 0 },
};

static PyGetSetDef bench_fields[] = {
    { "flops", (getter)bench_flops, NULL, "of one run, a multiply-add being two; multiply_adds knows after its first", NULL },
    { "bytes", (getter)bench_bytes, NULL, "that one run must read", NULL },
    { 0 },
};

PyType_Spec bench_spec = {
    .name = "lazyllm._core.Bench",
    .basicsize = sizeof(BenchObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots =
        (PyType_Slot[]){
            { Py_tp_doc, "Bench(op, *, n, m, rows, cols, dtype, n_heads, n_kv_heads, head_dim, threads, device, libraries): one op on "
                         "random data, timed" },
            { Py_tp_new, bench_new },
            { Py_tp_dealloc, bench_dealloc },
            { Py_tp_methods, bench_methods },
            { Py_tp_getset, bench_fields },
            { 0 },
        },
};
