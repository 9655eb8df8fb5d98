/* model_type.c — lazyllm._core.Model. */
#include "core.h"

#include "../format.h"

enum { N_ARRAYS = 5 };

/* owners: of copies of the config's arrays; NULL where not read */
static int parse_config(PyObject *dict, lazy_config *c, PyObject *owners[N_ARRAYS])
{
    struct {
        PyObject *rope_scale, *inv_freq, *layer_rope, *windows, *expert_layers;
    } objects; /* borrowed */
#define INT(name)    FIELD('i', c, name)
#define FLOAT(name)  FIELD('f', c, name)
#define BOOL(name)   FIELD('p', c, name)
#define OBJECT(name) FIELD('O', &objects, name)
    const core_field fields[] = {
        INT(n_layers),        INT(hidden),
        INT(n_heads),         INT(n_kv_heads),
        INT(head_dim),        INT(ffn),
        INT(vocab),           INT(context),
        INT(rotary_dim),      INT(short_context),
        INT(query_step),      INT(n_experts),
        INT(expert_ffn),      INT(experts_per_token),
        FLOAT(norm_eps),      FLOAT(query_growth),
        FLOAT(query_scalar),  FLOAT(embedding_scale),
        FLOAT(logit_scale),   FLOAT(attention_cap),
        FLOAT(logit_cap),     BOOL(tied),
        BOOL(qkv_bias),       BOOL(o_bias),
        BOOL(qk_norm),        BOOL(wide_qk_norm),
        BOOL(late_qk_norm),   BOOL(norm_plus_one),
        BOOL(pre_norms),      BOOL(post_norms),
        BOOL(gelu),           BOOL(paired_rope),
        BOOL(layer_norm),     BOOL(parallel),
        BOOL(normed_experts), OBJECT(rope_scale),
        OBJECT(inv_freq),     OBJECT(layer_rope),
        OBJECT(windows),      OBJECT(expert_layers),
    };
    if (fields_parse(dict, "config", fields, sizeof fields / sizeof *fields)) return -1;
    const struct {
        const char *name;
        PyObject *object;
        array_type type;
        const void *out;
    } arrays[N_ARRAYS] = {
        { "rope_scale", objects.rope_scale, ARRAY_FLOAT, &c->rope_scale },
        { "inv_freq", objects.inv_freq, ARRAY_FLOAT, &c->inv_freq },
        { "layer_rope", objects.layer_rope, ARRAY_INT32, &c->layer_rope },
        { "windows", objects.windows, ARRAY_INT32, &c->windows },
        { "expert_layers", objects.expert_layers, ARRAY_INT32, &c->expert_layers },
    };
    for (int i = 0; i < N_ARRAYS; i++) {
        Py_ssize_t n;
        if (array_parse(arrays[i].object, arrays[i].type, arrays[i].name, &owners[i], (const void **)arrays[i].out, &n))
            return -1;
        if (i == 0) c->n_ropes = n > LAZY_MAX_ROPES ? LAZY_MAX_ROPES + 1 : (int)n;
        Py_ssize_t wanted = i == 0 ? n : i == 1 ? c->n_ropes * ((Py_ssize_t)c->head_dim / 2) : c->n_layers;
        if (n == wanted) continue;
        PyErr_Format(PyExc_ValueError, "config: %s has %zd values; it must have %zd", arrays[i].name, n, wanted);
        return -1;
    }
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

/* Works on copies of all that it is given: reading a value may run Python code, and while the model opens other threads
 * run. */
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
    PyObject *arrays[N_ARRAYS] = { NULL };
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
    for (int i = 0; i < N_ARRAYS; i++) Py_XDECREF(arrays[i]);
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

READ(threads, PyLong_FromLong(lazy_model_threads(self->model)))
READ(isa, PyUnicode_FromString(lazy_model_isa(self->model)))
READ(device, PyUnicode_FromString(lazy_model_device(self->model)))
READ(bytes, PyLong_FromUnsignedLongLong(lazy_model_bytes(self->model)))
READ(activations, PyUnicode_FromString(lazy_formats[lazy_model_activations(self->model)].name))
READ(kv, PyUnicode_FromString(lazy_formats[lazy_model_kv(self->model)].name))

static PyGetSetDef model_members[] = {
    { "activations", (getter)model_activations, NULL, "the type of hidden states", NULL },
    { "kv", (getter)model_kv, NULL, "the type of keys and values", NULL },
    { "threads", (getter)model_threads, NULL, "threads that compute", NULL },
    { "isa", (getter)model_isa, NULL, "kernels in use: an instruction set, or a device and its type", NULL },
    { "device", (getter)model_device, NULL, "device the weights are on", NULL },
    { "bytes", (getter)model_bytes, NULL, "bytes of weights in use", NULL },
    { 0 },
};

static PyMethodDef model_methods[] = {
    { "session", (PyCFunction)session_create, METH_O,
      "session(pruning) -> Session: a new context; pruning is a dict or None" },
    { 0 },
};

PyType_Spec model_spec = {
    .name = "lazyllm._core.Model",
    .basicsize = sizeof(ModelObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots =
        (PyType_Slot[]){
            { Py_tp_doc, "Model(config, shards, tensors, *, device='cpu', threads=1, libraries=[], weights='auto', "
                         "kv='f32'): weights, mapped "
                         "and checked" },
            { Py_tp_new, model_new },
            { Py_tp_dealloc, model_dealloc },
            { Py_tp_getset, model_members },
            { Py_tp_methods, model_methods },
            { 0 },
        },
};
