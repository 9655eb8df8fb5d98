/* pruning_argument.c — parses a pruning setting from a dict. The core validates its values. */
#include "core.h"

/* An array (PyMem_Free) with an element for each tuple, or NULL with an exception. noun: an element; form: its tuple */
static void *parse_tuples(PyObject *sequence, const char *noun, const char *form, size_t size,
                          int (*parse)(PyObject *, void *), int *n)
{
    PyObject *tuples = PySequence_Tuple(sequence); /* our own: Python code, run for a value, may change the sequence */
    if (!tuples) return NULL;
    *n = (int)PyTuple_Size(tuples);
    char *array = PyMem_Calloc((size_t)*n + 1, size);
    bool good = array != NULL;
    if (!good) PyErr_NoMemory();
    for (int i = 0; i < *n && good; i++) {
        PyObject *tuple = PyTuple_GetItem(tuples, i);
        good = PyTuple_Check(tuple) && !parse(tuple, array + (size_t)i * size);
        if (!PyTuple_Check(tuple)) PyErr_Format(PyExc_TypeError, "pruning: %s %R; it must be %s", noun, tuple, form);
    }
    Py_DECREF(tuples);
    if (good) return array;
    PyMem_Free(array);
    return NULL;
}

static int parse_stage(PyObject *tuple, void *out)
{
    lazy_stage *stage = out;
    PyObject *rule;
    int for_good = 0;
    if (!PyArg_ParseTuple(tuple, "iO|p;a stage is (layer, rule) or (layer, rule, for_good)", &stage->layer, &rule,
                          &for_good))
        return -1;
    stage->for_good = for_good;
    stage->by_mass = PyTuple_Check(rule);
    if (!stage->by_mass) stage->keep = PyFloat_AsDouble(rule);
    else if (!PyArg_ParseTuple(rule, "ddd;a mass rule is (mass, keep_min, keep_max)", &stage->mass, &stage->keep_min,
                               &stage->keep_max))
        return -1;
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_stages(PyObject *object, const lazy_stage **out, int *n)
{
    *out = parse_tuples(object, "stage", "(layer, rule) or (layer, rule, for_good)", sizeof **out, parse_stage, n);
    return *out ? 0 : -1;
}

static int parse_span(PyObject *tuple, void *out)
{
    long long begin, end;
    if (!PyArg_ParseTuple(tuple, "LL;a span is (begin, end)", &begin, &end)) return -1;
    *(lazy_span *)out = (lazy_span){ begin, end };
    return 0;
}

static bool is_text(PyObject *value, const char *text)
{
    return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

static int parse_decode(PyObject *value, lazy_pruning *pruning)
{
    bool frozen = is_text(value, "frozen");
    pruning->decode = !PyUnicode_Check(value) ? LAZY_DECODE_OWN : frozen ? LAZY_DECODE_FROZEN : LAZY_DECODE_SAME;
    if (pruning->decode == LAZY_DECODE_OWN)
        return parse_stages(value, &pruning->decode_stages, &pruning->n_decode_stages);
    if (frozen || is_text(value, "same")) return 0;
    PyErr_Format(PyExc_ValueError, "pruning: decode is %R; it must be \"same\", \"frozen\" or stages", value);
    return -1;
}

static int parse_pooling(PyObject *value, lazy_pooling *pooling)
{
    static const char *const names[] = { "mean", "rms" }; /* by lazy_pooling */
    for (*pooling = LAZY_POOLING_MEAN; *pooling <= LAZY_POOLING_RMS; ++*pooling)
        if (is_text(value, names[*pooling])) return 0;
    PyErr_Format(PyExc_ValueError, "pruning: pooling is %R; it must be \"mean\" or \"rms\"", value);
    return -1;
}

static int parse_head(PyObject *value, lazy_pruning *pruning)
{
    if (value == Py_None) return 0;
    int layer = -1;
    if (PyTuple_Check(value) && !PyArg_ParseTuple(value, "ii;pruning: head is (layer, head)", &layer, &pruning->head))
        return -1;
    pruning->head_layer = layer;
    if (layer >= 0) return 0;
    PyErr_Format(PyExc_TypeError, "pruning: head is %R; it must be (layer, head) or None", value);
    return -1;
}

static int parse_policy(PyObject *value, void **policy)
{
    if (value == Py_None) return 0;
    if (PyCallable_Check(value)) *policy = Py_NewRef(value);
    else PyErr_Format(PyExc_TypeError, "pruning: policy is %R; it must be callable or None", value);
    return *policy ? 0 : -1;
}

int pruning_parse(PyObject *dict, lazy_pruning *pruning)
{
    *pruning = lazy_pruning_dense;
    if (dict == Py_None) return 0;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "pruning is %R; it must be a dict or None", dict);
        return -1;
    }
    struct {
        PyObject *stages, *decode, *protect, *pooling, *head, *policy;
    } objects; /* borrowed */
    const core_field fields[] = {
        FIELD('O', &objects, stages),  FIELD('O', &objects, decode),    FIELD('O', &objects, protect),
        FIELD('O', &objects, pooling), FIELD('O', &objects, policy),    FIELD('i', pruning, sink),
        FIELD('i', pruning, window),   FIELD('i', pruning, queries),    FIELD('i', pruning, layers),
        FIELD('i', pruning, smooth),   FIELD('i', pruning, min_tokens), FIELD('d', pruning, memory),
        FIELD('d', pruning, gain),     FIELD('d', pruning, revival),    FIELD('p', pruning, prune_generated),
        FIELD('p', pruning, average),  FIELD('p', pruning, words),      FIELD('O', &objects, head)
    };
    dict = PyDict_Copy(dict);
    if (!dict) return -1;
    const bool failed = fields_parse(dict, "pruning", fields, sizeof fields / sizeof *fields) ||
                        parse_stages(objects.stages, &pruning->stages, &pruning->n_stages) ||
                        parse_decode(objects.decode, pruning) || parse_pooling(objects.pooling, &pruning->pooling) ||
                        parse_head(objects.head, pruning) || parse_policy(objects.policy, &pruning->policy.context) ||
                        !(pruning->protect = parse_tuples(objects.protect, "span", "(begin, end)",
                                                          sizeof *pruning->protect, parse_span, &pruning->n_protect));
    if (failed) pruning_release(pruning);
    Py_DECREF(dict);
    return failed ? -1 : 0;
}

void pruning_release(lazy_pruning *pruning)
{
    PyMem_Free((void *)pruning->stages);
    PyMem_Free((void *)pruning->decode_stages);
    PyMem_Free((void *)pruning->protect);
    Py_XDECREF((PyObject *)pruning->policy.context);
    *pruning = lazy_pruning_dense;
}
