/* model_type.c — lazyllm._core.Model. */
#include "core.h"

#include "../format.h"

enum { N_ARRAYS = 5 };

#define INTS(work)                                                                                                     \
    work(n_layers) work(hidden) work(n_heads) work(n_kv_heads) work(head_dim) work(ffn) work(vocab) work(context)      \
        work(rotary_dim) work(short_context) work(query_step) work(n_experts) work(expert_ffn) work(experts_per_token)
#define FLOATS(work)                                                                                                   \
    work(norm_eps) work(query_growth) work(query_scalar) work(embedding_scale) work(logit_scale) work(attention_cap)   \
        work(logit_cap)
#define BOOLS(work)                                                                                                    \
    work(tied) work(qkv_bias) work(o_bias) work(qk_norm) work(wide_qk_norm) work(late_qk_norm) work(norm_plus_one)     \
        work(pre_norms) work(post_norms) work(gelu) work(paired_rope) work(layer_norm) work(parallel)                  \
            work(normed_experts)

/* arrays: those that the config points to; their owners are NULL where they are not read. */
static int parse_config(PyObject *dict, lazy_config *c, core_array arrays[N_ARRAYS])
{
#define INT(name)   FIELD('i', c, name),
#define FLOAT(name) FIELD('f', c, name),
#define BOOL(name)  FIELD('p', c, name),
    const core_field numbers[] = { INTS(INT) FLOATS(FLOAT) BOOLS(BOOL) };
    const core_field lists[N_ARRAYS] = { { "rope_scale", CORE_FLOATS, &arrays[0] },
                                         { "inv_freq", CORE_FLOATS, &arrays[1] },
                                         { "layer_rope", CORE_INTS, &arrays[2] },
                                         { "windows", CORE_INTS, &arrays[3] },
                                         { "expert_layers", CORE_INTS, &arrays[4] } };
    if (fields_parse(dict, "config", numbers, sizeof numbers / sizeof *numbers)) return -1;
    if (fields_parse(dict, "config", lists, N_ARRAYS)) return -1;
    c->n_ropes = arrays[0].n > LAZY_MAX_ROPES ? LAZY_MAX_ROPES + 1 : (int)arrays[0].n;
    const Py_ssize_t n_frequencies = c->n_ropes * ((Py_ssize_t)c->head_dim / 2),
                     wanted[N_ARRAYS] = { arrays[0].n, n_frequencies, c->n_layers, c->n_layers, c->n_layers };
    for (int i = 0; i < N_ARRAYS; i++) {
        if (arrays[i].n == wanted[i]) continue;
        PyErr_Format(PyExc_ValueError, "config: %s has %zd values; it must have %zd", lists[i].key, arrays[i].n,
                     wanted[i]);
        return -1;
    }
    c->rope_scale = arrays[0].data;
    c->inv_freq = arrays[1].data;
    c->layer_rope = arrays[2].data;
    c->windows = arrays[3].data;
    c->expert_layers = arrays[4].data;
    return 0;
}

enum { MAX_RANK = 8 };

typedef struct table {
    lazy_tensor *tensors;
    int64_t (*shapes)[MAX_RANK];
    Py_ssize_t n;
} table;

static int parse_shape(PyObject *shape, int64_t *out, int *rank)
{
    Py_ssize_t n = PyTuple_Size(shape);
    if (n > MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "tensors: shape %R has more than %d dimensions", shape, MAX_RANK);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    *rank = (int)n;
    return 0;
}

/* The strings are those of the entries, which live as long as the tuple. */
static int parse_tensors(PyObject *entries, table *t)
{
    t->n = PyTuple_Size(entries);
    t->tensors = PyMem_Calloc((size_t)t->n + 1, sizeof *t->tensors);
    t->shapes = PyMem_Calloc((size_t)t->n + 1, sizeof *t->shapes);
    if (!t->tensors || !t->shapes) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < t->n; i++) {
        lazy_tensor *tensor = &t->tensors[i];
        PyObject *shape, *entry = PyTuple_GetItem(entries, i);
        unsigned long long offset, bytes;
        if (!PyTuple_Check(entry)) {
            PyErr_Format(PyExc_TypeError, "tensors: %R; an entry is (name, dtype, shape, shard, offset, bytes)", entry);
            return -1;
        }
        if (!PyArg_ParseTuple(entry, "ssO!iKK;a tensor is (name, dtype, shape, shard, offset, bytes)", &tensor->name,
                              &tensor->dtype, &PyTuple_Type, &shape, &tensor->shard, &offset, &bytes))
            return -1;
        tensor->offset = offset;
        tensor->bytes = bytes;
        tensor->shape = t->shapes[i];
        if (parse_shape(shape, t->shapes[i], &tensor->rank)) return -1;
    }
    return 0;
}

/* Works on copies: reading a value may run Python code, and while the model opens other threads run. */
static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "config",    "shards",  "tensors", "device", "threads",
                             "libraries", "compute", "weights", "kv",     NULL };
    PyObject *dict, *shards, *tensors, *libraries = NULL, *path_owner = NULL, *place_owner = NULL;
    lazy_device device = { .name = "cpu", .threads = 1 };
    const char *weights = "auto";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|$siO!sss", names, &PyDict_Type, &dict, &PyList_Type, &shards,
                                     &PyList_Type, &tensors, &device.name, &device.threads, &PyList_Type, &libraries,
                                     &device.compute, &weights, &device.kv))
        return NULL;
    lazy_error err = { 0 };
    lazy_config config = { 0 };
    core_array arrays[N_ARRAYS] = { 0 };
    table t = { 0 };
    watcher w;
    ModelObject *self = NULL;
    const char **paths = NULL, **places = NULL;
    int n_shards;
    dict = PyDict_Copy(dict);
    tensors = PyList_AsTuple(tensors);
    if (!dict || !tensors || strings_parse(shards, &path_owner, &paths, &n_shards) ||
        strings_parse(libraries, &place_owner, &places, &device.n_libraries) || parse_config(dict, &config, arrays) ||
        parse_tensors(tensors, &t) || !(self = (ModelObject *)PyType_GenericAlloc(type, 0)))
        goto done;
    device.libraries = places;
    watcher_begin(&w, NULL);
    int code =
        lazy_model_open(&self->model, &config, paths, n_shards, t.tensors, (int)t.n, weights, &device, &w.watch, &err);
    watcher_hold(&w);
    if (code) {
        if (!PyErr_Occurred() && !PyErr_CheckSignals())
            core_raise(PyType_GetModuleState(type), &err); /* a signal interrupts open() */
        Py_CLEAR(self);
    }
done:
    PyMem_Free(t.tensors);
    PyMem_Free(t.shapes);
    PyMem_Free(paths);
    PyMem_Free(places);
    for (int i = 0; i < N_ARRAYS; i++) Py_XDECREF(arrays[i].owner);
    Py_XDECREF(path_owner);
    Py_XDECREF(place_owner);
    Py_XDECREF(tensors);
    Py_XDECREF(dict);
    return (PyObject *)self;
}

static void model_dealloc(ModelObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    lazy_model_close(self->model);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

#define READ(name, expression)                                                                                         \
    static PyObject *model_##name(ModelObject *self, void *closure) { return expression; }

READ(threads, PyLong_FromLong(self->model->backend->threads))
READ(isa, PyUnicode_FromString(self->model->backend->variant))
READ(device, PyUnicode_FromString(self->model->device))
READ(bytes, PyLong_FromUnsignedLongLong(self->model->bytes))
READ(activations, PyUnicode_FromString(lazy_formats[self->model->backend->activations].name))
READ(kv, PyUnicode_FromString(lazy_formats[self->model->backend->kv].name))

static PyGetSetDef model_members[] = {
    { "activations", (getter)model_activations, NULL, "the type of hidden states", NULL },
    { "kv", (getter)model_kv, NULL, "the type of keys and values", NULL },
    { "threads", (getter)model_threads, NULL, "threads that compute", NULL },
    { "isa", (getter)model_isa, NULL, "kernels in use: an instruction set, or a device and its type", NULL },
    { "device", (getter)model_device, NULL, "device the weights are on", NULL },
    { "bytes", (getter)model_bytes, NULL, "bytes of weights in use", NULL },
    { 0 },
};

static PyObject *model_know_words(ModelObject *self, PyObject *parts)
{
    lazy_error err = { 0 };
    const char *bytes = PyBytes_AsString(parts);
    if (!bytes) return NULL;
    if (PyBytes_Size(parts) != self->model->config.vocab)
        return PyErr_Format(PyExc_ValueError, "there are %zd parts of words; the vocabulary has %d tokens",
                            PyBytes_Size(parts), self->model->config.vocab);
    lazy_model_know_words(self->model, (const uint8_t *)bytes, &err);
    return core_none(self, &err);
}

static PyMethodDef model_methods[] = {
    { "know_words", (PyCFunction)model_know_words, METH_O,
      "know_words(parts): by token id, 1 if its text begins with a character of a word, and 2 if it ends with one" },
    { "session", (PyCFunction)session_create, METH_O,
      "session(pruning) -> Session: a new context; pruning is a dict or None" },
    { 0 },
};

static PyType_Slot model_slots[] = {
    { Py_tp_doc, "Weights, mapped and checked" },
    { Py_tp_new, model_new },
    { Py_tp_dealloc, model_dealloc },
    { Py_tp_getset, model_members },
    { Py_tp_methods, model_methods },
    { 0 },
};

PyType_Spec model_spec = {
    .name = "lazyllm._core.Model",
    .basicsize = sizeof(ModelObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = model_slots,
};
