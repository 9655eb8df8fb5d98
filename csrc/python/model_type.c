/* model_type.c — lazyllm._core.Model. */
#include "core.h"

#include <string.h>

#include "../format.h"

static const char *const WHAT = "config";

/* Copies of the config's arrays; NULL where not read. */
typedef struct config_arrays {
    PyObject *inv_freq, *rope_scale, *layer_rope, *windows, *expert_layers;
} config_arrays;

static int check_length(const char *name, Py_ssize_t n, Py_ssize_t wanted, const char *why, int value)
{
    if (n == wanted) return 0;
    PyErr_Format(PyExc_ValueError, "config: %s has %zd values; %s %d asks for %zd", name, n, why, value, wanted);
    return -1;
}

static int parse_config(PyObject *dict, lazy_config *c, config_arrays *arrays)
{
    config_arrays objects; /* borrowed */
    const core_field fields[] = {
        FIELD(INT, c, n_layers),
        FIELD(INT, c, hidden),
        FIELD(INT, c, n_heads),
        FIELD(INT, c, n_kv_heads),
        FIELD(INT, c, head_dim),
        FIELD(INT, c, ffn),
        FIELD(INT, c, vocab),
        FIELD(INT, c, context),
        FIELD(FLOAT, c, norm_eps),
        FIELD(INT, c, rotary_dim),
        FIELD(INT, c, short_context),
        FIELD(INT, c, query_step),
        FIELD(FLOAT, c, query_growth),
        FIELD(FLOAT, c, query_scalar),
        FIELD(FLOAT, c, embedding_scale),
        FIELD(FLOAT, c, logit_scale),
        FIELD(FLOAT, c, attention_cap),
        FIELD(FLOAT, c, logit_cap),
        FIELD(BOOL, c, tied),
        FIELD(BOOL, c, qkv_bias),
        FIELD(BOOL, c, o_bias),
        FIELD(BOOL, c, qk_norm),
        FIELD(BOOL, c, wide_qk_norm),
        FIELD(BOOL, c, late_qk_norm),
        FIELD(BOOL, c, norm_plus_one),
        FIELD(BOOL, c, pre_norms),
        FIELD(BOOL, c, post_norms),
        FIELD(BOOL, c, gelu),
        FIELD(BOOL, c, paired_rope),
        FIELD(BOOL, c, layer_norm),
        FIELD(BOOL, c, parallel),
        FIELD(INT, c, n_experts),
        FIELD(INT, c, expert_ffn),
        FIELD(INT, c, experts_per_token),
        FIELD(BOOL, c, normed_experts),
    };
    const core_field vectors[] = {
        FIELD(OBJECT, &objects, inv_freq), FIELD(OBJECT, &objects, rope_scale),    FIELD(OBJECT, &objects, layer_rope),
        FIELD(OBJECT, &objects, windows),  FIELD(OBJECT, &objects, expert_layers),
    };
    Py_ssize_t n;
    if (fields_parse(dict, WHAT, fields, sizeof fields / sizeof *fields)) return -1;
    if (fields_parse(dict, WHAT, vectors, sizeof vectors / sizeof *vectors)) return -1;
    if (array_parse_floats(objects.rope_scale, "config: rope_scale", &arrays->rope_scale, &c->rope_scale, &n))
        return -1;
    c->n_ropes = n > LAZY_MAX_ROPES ? LAZY_MAX_ROPES + 1 : (int)n;
    if (array_parse_floats(objects.inv_freq, "config: inv_freq", &arrays->inv_freq, &c->inv_freq, &n)) return -1;
    if (check_length("inv_freq", n, c->n_ropes * ((Py_ssize_t)c->head_dim / 2), "head_dim", c->head_dim)) return -1;
    if (array_parse_ints(objects.layer_rope, "config: layer_rope", &arrays->layer_rope, &c->layer_rope, &n)) return -1;
    if (check_length("layer_rope", n, c->n_layers, "n_layers", c->n_layers)) return -1;
    if (array_parse_ints(objects.windows, "config: windows", &arrays->windows, &c->windows, &n)) return -1;
    if (check_length("windows", n, c->n_layers, "n_layers", c->n_layers)) return -1;
    if (array_parse_ints(objects.expert_layers, "config: expert_layers", &arrays->expert_layers, &c->expert_layers, &n))
        return -1;
    return check_length("expert_layers", n, c->n_layers, "n_layers", c->n_layers);
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
        PyObject *shape, *entry = PyTuple_GetItem(entries, i), *offset, *bytes;
        if (!PyTuple_Check(entry)) {
            PyErr_Format(PyExc_TypeError, "tensors: %R; an entry is (name, dtype, shape, shard, offset, bytes)", entry);
            return -1;
        }
        if (!PyArg_ParseTuple(entry, "ssO!iO!O!;a tensor is (name, dtype, shape, shard, offset, bytes)", &tensor->name,
                              &tensor->dtype, &PyTuple_Type, &shape, &tensor->shard, &PyLong_Type, &offset,
                              &PyLong_Type, &bytes))
            return -1;
        tensor->offset = PyLong_AsUnsignedLongLong(offset);
        if (PyErr_Occurred()) return -1;
        tensor->bytes = PyLong_AsUnsignedLongLong(bytes);
        if (PyErr_Occurred()) return -1;
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
    static const char *const settings[] = {
        [LAZY_WEIGHTS_AS_STORED] = "auto", [LAZY_WEIGHTS_Q8] = "q8", [LAZY_WEIGHTS_Q4] = "q4"
    };
    PyObject *dict, *shards, *tensors, *libraries = NULL, *path_owner = NULL, *place_owner = NULL;
    lazy_device device = { .name = "cpu", .threads = 1 };
    const char *wish = settings[LAZY_WEIGHTS_AS_STORED];
    int weights = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|$siO!sss", names, &PyDict_Type, &dict, &PyList_Type, &shards,
                                     &PyList_Type, &tensors, &device.name, &device.threads, &PyList_Type, &libraries,
                                     &device.compute, &wish, &device.kv))
        return NULL;
    while (strcmp(wish, settings[weights]) != 0)
        if (++weights > LAZY_WEIGHTS_Q4)
            return PyErr_Format(PyExc_ValueError, "weights must be auto, q8 or q4, not \"%s\"", wish);

    lazy_error err = { 0 };
    lazy_config config = { 0 };
    config_arrays arrays = { 0 };
    table t = { 0 };
    watcher w;
    ModelObject *self = NULL;
    const char **paths = NULL, **places = NULL;
    int n_shards;
    dict = PyDict_Copy(dict);
    tensors = PyList_AsTuple(tensors);
    if (!dict || !tensors || strings_parse(shards, &path_owner, &paths, &n_shards) ||
        strings_parse(libraries, &place_owner, &places, &device.n_libraries) || parse_config(dict, &config, &arrays) ||
        parse_tensors(tensors, &t) || !(self = (ModelObject *)PyType_GenericAlloc(type, 0)))
        goto done;
    device.libraries = places;
    watcher_begin(&w, NULL);
    int code = lazy_model_open(&self->model, &config, paths, n_shards, t.tensors, (int)t.n, (lazy_weights)weights,
                               &device, &w.watch, &err);
    watcher_end(&w);
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
    Py_XDECREF(arrays.inv_freq);
    Py_XDECREF(arrays.rope_scale);
    Py_XDECREF(arrays.layer_rope);
    Py_XDECREF(arrays.windows);
    Py_XDECREF(arrays.expert_layers);
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

static PyObject *model_session(ModelObject *self, PyObject *pruning)
{
    return session_create(core_state_of(self)->session_type, self, pruning);
}

#define READ(name, expression)                                                                                         \
    static PyObject *model_##name(ModelObject *self, void *closure)                                                    \
    {                                                                                                                  \
        (void)closure;                                                                                                 \
        return expression;                                                                                             \
    }

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
    { "session", (PyCFunction)model_session, METH_O,
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
