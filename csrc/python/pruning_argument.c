/* pruning_argument.c — parses a pruning setting from a dict. The core validates its values. */
#include "core.h"

static const char *const WHAT = "pruning";

/* The items of a sequence as a tuple of our own: reading one may run Python code that changes the sequence. */
static PyObject *tuple_of(PyObject *sequence, const char *message)
{
    PyObject *list = PySequence_Fast(sequence, message), *tuple = list ? PySequence_Tuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

static int parse_rule(PyObject *rule, lazy_stage *stage)
{
    if (PyTuple_Check(rule)) {
        stage->by_mass = true;
        return PyArg_ParseTuple(rule, "ddd;a mass rule is (mass, keep_min, keep_max)", &stage->mass, &stage->keep_min, &stage->keep_max)
                   ? 0
                   : -1;
    }
    stage->keep = PyFloat_AsDouble(rule);
    return stage->keep == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int parse_stages(PyObject *object, const lazy_stage **out, int *n)
{
    PyObject *list = tuple_of(object, "pruning: stages must be a list of (layer, rule) or (layer, rule, permanent)");
    if (!list) return -1;
    Py_ssize_t size = PyTuple_Size(list);
    lazy_stage *stages = PyMem_Calloc((size_t)size + 1, sizeof *stages);
    int code = stages ? 0 : -1;
    if (!stages) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < size && !code; i++) {
        PyObject *rule, *stage = PyTuple_GetItem(list, i);
        int permanent = 0;
        if (!PyTuple_Check(stage)) {
            PyErr_Format(PyExc_TypeError, "pruning: stage %R; it must be (layer, rule) or (layer, rule, permanent)", stage);
            code = -1;
        } else {
            bool parsed =
                PyArg_ParseTuple(stage, "iO|p;a stage is (layer, rule) or (layer, rule, permanent)", &stages[i].layer, &rule, &permanent);
            code = parsed ? parse_rule(rule, &stages[i]) : -1;
            stages[i].permanent = permanent;
        }
    }
    Py_DECREF(list);
    *out = stages;
    *n = (int)size;
    return code;
}

static int parse_decode(PyObject *object, lazy_pruning *pruning)
{
    if (!PyUnicode_Check(object)) {
        pruning->decode = LAZY_DECODE_OWN;
        return parse_stages(object, &pruning->decode_stages, &pruning->n_decode_stages);
    }
    if (PyUnicode_CompareWithASCIIString(object, "same") == 0) pruning->decode = LAZY_DECODE_SAME;
    else if (PyUnicode_CompareWithASCIIString(object, "frozen") == 0) pruning->decode = LAZY_DECODE_FROZEN;
    else {
        PyErr_Format(PyExc_ValueError, "pruning: decode is %R; it must be \"same\", \"frozen\" or stages", object);
        return -1;
    }
    return 0;
}

static int parse_protect(PyObject *object, lazy_pruning *pruning)
{
    PyObject *list = tuple_of(object, "pruning: protect must be a list of (begin, end)");
    if (!list) return -1;
    Py_ssize_t size = PyTuple_Size(list);
    lazy_span *spans = PyMem_Calloc((size_t)size + 1, sizeof *spans);
    int code = spans ? 0 : -1;
    if (!spans) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < size && !code; i++) {
        long long begin, end;
        PyObject *pair = PyTuple_GetItem(list, i);
        if (!PyTuple_Check(pair)) {
            PyErr_Format(PyExc_TypeError, "pruning: span %R; it must be (begin, end)", pair);
            code = -1;
        } else if (!PyArg_ParseTuple(pair, "LL;a span is (begin, end)", &begin, &end)) {
            code = -1;
        } else {
            spans[i] = (lazy_span){ begin, end };
        }
    }
    Py_DECREF(list);
    pruning->protect = spans;
    pruning->n_protect = (int)size;
    return code;
}

static int parse_policy(PyObject *dict, PyObject **policy)
{
    PyObject *value = field_object(dict, WHAT, "policy");
    if (!value) return -1;
    if (value != Py_None && !PyCallable_Check(value)) {
        PyErr_Format(PyExc_TypeError, "pruning: policy is %R; it must be callable or None", value);
        return -1;
    }
    if (value != Py_None) *policy = Py_NewRef(value);
    return 0;
}

static int parse_pooling(PyObject *dict, lazy_pooling *pooling)
{
    PyObject *value = field_object(dict, WHAT, "pooling");
    if (!value) return -1;
    if (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, "max") == 0) *pooling = LAZY_POOLING_MAX;
    else if (!PyUnicode_Check(value) || PyUnicode_CompareWithASCIIString(value, "mean") != 0) {
        PyErr_Format(PyExc_ValueError, "pruning: pooling is %R; it must be \"mean\" or \"max\"", value);
        return -1;
    }
    return 0;
}

int pruning_parse(PyObject *dict, lazy_pruning *pruning, PyObject **policy)
{
    *pruning = LAZY_PRUNING_DENSE;
    *policy = NULL;
    if (dict == Py_None) return 0;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "pruning is %R; it must be a dict or None", dict);
        return -1;
    }
    dict = PyDict_Copy(dict);
    if (!dict) return -1;
    PyObject *stages = field_object(dict, WHAT, "stages"), *decode = stages ? field_object(dict, WHAT, "decode") : NULL;
    PyObject *protect = decode ? field_object(dict, WHAT, "protect") : NULL;
    int code = 0;
    if (!protect || parse_stages(stages, &pruning->stages, &pruning->n_stages) || parse_decode(decode, pruning) ||
        parse_protect(protect, pruning) || field_int(dict, WHAT, "sink", &pruning->sink) ||
        field_int(dict, WHAT, "window", &pruning->window) || field_int(dict, WHAT, "queries", &pruning->queries) ||
        parse_pooling(dict, &pruning->pooling) || field_int(dict, WHAT, "layers", &pruning->layers) ||
        field_int(dict, WHAT, "smooth", &pruning->smooth) || field_double(dict, WHAT, "memory", &pruning->memory) ||
        field_int(dict, WHAT, "min_tokens", &pruning->min_tokens) || field_bool(dict, WHAT, "prune_generated", &pruning->prune_generated) ||
        field_bool(dict, WHAT, "average", &pruning->average) || parse_policy(dict, policy)) {
        pruning_release(pruning);
        code = -1;
    }
    Py_DECREF(dict);
    return code;
}

void pruning_release(lazy_pruning *pruning)
{
    PyMem_Free((void *)pruning->stages);
    PyMem_Free((void *)pruning->decode_stages);
    PyMem_Free((void *)pruning->protect);
    *pruning = LAZY_PRUNING_DENSE;
}
