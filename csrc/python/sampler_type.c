/* sampler_type.c — lazyllm._core.Sampler. */
#include "core.h"

static PyObject *sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "temperature", "top_p", "top_k", "seed", NULL };
    double temperature, top_p;
    int top_k;
    unsigned long long seed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ddiK", names, &temperature, &top_p, &top_k, &seed)) return NULL;
    SamplerObject *self = (SamplerObject *)PyType_GenericAlloc(type, 0);
    lazy_error err = { 0 };
    if (self && lazy_sampler_open(&self->sampler, temperature, top_p, top_k, seed, &err)) {
        core_raise(PyType_GetModuleState(type), &err);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void sampler_dealloc(SamplerObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    lazy_sampler_close(self->sampler);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

lazy_sampler *sampler_at_rest(const SamplerObject *self)
{
    if (!self->in_use) return self->sampler;
    PyErr_SetString(PyExc_RuntimeError, "the sampler is in use: a draw is under way");
    return NULL;
}

static PyObject *sampler_sample(SamplerObject *self, PyObject *object)
{
    core_array logits;
    if (array_parse(object, ARRAY_FLOAT, "logits", &logits)) return NULL;
    int32_t token;
    lazy_error err = { 0 };
    bool at_rest = sampler_at_rest(self);
    if (at_rest)
        WITHOUT_GIL(self, lazy_sampler_next(self->sampler, logits.data, logits.n > INT32_MAX ? 0 : (int)logits.n,
                                            &token, &err));
    Py_DECREF(logits.owner);
    return at_rest ? core_result(self, err.code ? NULL : PyLong_FromLong(token), &err) : NULL;
}

static PyMethodDef sampler_methods[] = {
    { "sample", (PyCFunction)sampler_sample, METH_O, "sample(logits) -> token id" },
    { 0 },
};

static PyType_Slot sampler_slots[] = {
    { Py_tp_doc, "Sampler(temperature, top_p, top_k, seed): draws token ids from logits" },
    { Py_tp_new, sampler_new },
    { Py_tp_dealloc, sampler_dealloc },
    { Py_tp_methods, sampler_methods },
    { 0 },
};

PyType_Spec sampler_spec = {
    .name = "lazyllm._core.Sampler",
    .basicsize = sizeof(SamplerObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = sampler_slots,
};
