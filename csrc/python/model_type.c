/* model_type.c — lazyllm._core.Model. */
#include "core.h"

static const char *const WHAT = "config";

static int parse_config(PyObject *dict, lazy_config *c, PyObject **owner)
{
    double norm_eps, rope_scale;
    Py_ssize_t n;
    PyObject *inv_freq;
    if (field_int(dict, WHAT, "n_layers", &c->n_layers) || field_int(dict, WHAT, "hidden", &c->hidden) ||
        field_int(dict, WHAT, "n_heads", &c->n_heads) || field_int(dict, WHAT, "n_kv_heads", &c->n_kv_heads) ||
        field_int(dict, WHAT, "head_dim", &c->head_dim) || field_int(dict, WHAT, "ffn", &c->ffn) ||
        field_int(dict, WHAT, "vocab", &c->vocab) || field_int(dict, WHAT, "context", &c->context) ||
        field_double(dict, WHAT, "norm_eps", &norm_eps) || field_double(dict, WHAT, "rope_scale", &rope_scale) ||
        field_bool(dict, WHAT, "tied", &c->tied) || field_bool(dict, WHAT, "qkv_bias", &c->qkv_bias) ||
        field_bool(dict, WHAT, "o_bias", &c->o_bias) || field_bool(dict, WHAT, "qk_norm", &c->qk_norm) ||
        !(inv_freq = field_object(dict, WHAT, "inv_freq")) || array_read_floats(inv_freq, "config: inv_freq", owner, &c->inv_freq, &n))
        return -1;
    c->norm_eps = (float)norm_eps;
    c->rope_scale = (float)rope_scale;
    if (n == c->head_dim / 2) return 0;
    PyErr_Format(PyExc_ValueError, "config: inv_freq has %zd values; head_dim %d asks for %d", n, c->head_dim, c->head_dim / 2);
    return -1;
}

enum { MOST_RANK = 8 };

typedef struct table {
    lazy_tensor *tensors;
    int64_t (*shapes)[MOST_RANK];
    Py_ssize_t n;
} table;

static int parse_shape(PyObject *shape, int64_t *out, int *rank)
{
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    if (n > MOST_RANK) {
        PyErr_Format(PyExc_ValueError, "tensors: shape %R has more than %d dimensions", shape, MOST_RANK);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    *rank = (int)n;
    return 0;
}

/* The strings stay owned by the list. */
static int parse_tensors(PyObject *list, table *t)
{
    t->n = PyList_GET_SIZE(list);
    t->tensors = PyMem_Calloc((size_t)t->n + 1, sizeof *t->tensors);
    t->shapes = PyMem_Calloc((size_t)t->n + 1, sizeof *t->shapes);
    if (!t->tensors || !t->shapes) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < t->n; i++) {
        lazy_tensor *tensor = &t->tensors[i];
        PyObject *shape, *entry = PyList_GET_ITEM(list, i), *offset, *bytes;
        if (!PyTuple_Check(entry)) {
            PyErr_Format(PyExc_TypeError, "tensors: %R; an entry is (name, dtype, shape, shard, offset, bytes)", entry);
            return -1;
        }
        if (!PyArg_ParseTuple(entry, "ssO!iO!O!;a tensor is (name, dtype, shape, shard, offset, bytes)", &tensor->name, &tensor->dtype,
                              &PyTuple_Type, &shape, &tensor->shard, &PyLong_Type, &offset, &PyLong_Type, &bytes))
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

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "config", "shards", "tensors", "device", "threads", "libraries", NULL };
    PyObject *dict, *shards, *tensors, *libraries = NULL, *inv_freq = NULL;
    lazy_device device = { .name = "cpu" };
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|$siO!", names, &PyDict_Type, &dict, &PyList_Type, &shards, &PyList_Type,
                                     &tensors, &device.name, &device.threads, &PyList_Type, &libraries))
        return NULL;

    core_state *state = core_state_of(type);
    lazy_error err = { 0 };
    lazy_config config = { 0 };
    table t = { 0 };
    ModelObject *self = NULL;
    const char **paths = NULL, **places = NULL;
    int n_shards, n_places;
    if (strings_borrow(shards, &paths, &n_shards) || strings_borrow(libraries, &places, &n_places)) goto done;
    device.libraries = places;
    device.n_libraries = n_places;
    if (parse_config(dict, &config, &inv_freq) || parse_tensors(tensors, &t)) goto done;
    self = (ModelObject *)type->tp_alloc(type, 0);
    if (!self) goto done;
    if (lazy_model_open(&self->model, &config, paths, n_shards, t.tensors, (int)t.n, &device, &err)) {
        core_raise(state, &err);
        Py_CLEAR(self);
    }
done:
    Py_XDECREF(inv_freq);
    PyMem_Free(t.tensors);
    PyMem_Free(t.shapes);
    PyMem_Free(paths);
    PyMem_Free(places);
    return (PyObject *)self;
}

static void model_dealloc(ModelObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    lazy_model_close(self->model);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *model_session(ModelObject *self, PyObject *pruning)
{
    return session_create(core_state_of(Py_TYPE(self))->session_type, self, pruning);
}

static PyObject *model_threads(ModelObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(lazy_model_threads(self->model));
}
static PyObject *model_isa(ModelObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(lazy_model_isa(self->model));
}
static PyObject *model_device(ModelObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(lazy_model_device(self->model));
}
static PyObject *model_bytes(ModelObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(lazy_model_bytes(self->model));
}

static PyGetSetDef model_members[] = {
    { "threads", (getter)model_threads, NULL, "threads that compute", NULL },
    { "isa", (getter)model_isa, NULL, "kernels in use: an instruction set, or a device and its type", NULL },
    { "device", (getter)model_device, NULL, "device the weights are on", NULL },
    { "bytes", (getter)model_bytes, NULL, "bytes of weights in use", NULL },
    { 0 },
};

static PyMethodDef model_methods[] = {
    { "session", (PyCFunction)model_session, METH_O, "session(pruning) -> Session: a new timeline; pruning is a dict or None" },
    { 0 },
};

PyType_Spec model_spec = {
    .name = "lazyllm._core.Model",
    .basicsize = sizeof(ModelObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots =
        (PyType_Slot[]){
            { Py_tp_doc, "Model(config, shards, tensors, *, device='cpu', threads=0, libraries=[]): weights, mapped and checked" },
            { Py_tp_new, model_new },
            { Py_tp_dealloc, model_dealloc },
            { Py_tp_getset, model_members },
            { Py_tp_methods, model_methods },
            { 0 },
        },
};
