/* state.c — the parts of a session's state as arrays, to be saved and restored. */
#include "core.h"

enum { N_PARTS = LAZY_STATE_LOGITS + 1 };

/* The index of a part of n tokens of a session that is at rest, and its array; -1 with an exception. */
static int find_part(const SessionObject *self, const char *name, Py_ssize_t n, array_part *array)
{
    const lazy_model *model = self->model->model;
    const lazy_config *c = &model->config;
    const lazy_dtype kv = model->backend->kv, activations = model->backend->activations;
    const array_part parts[N_PARTS] = {
        [LAZY_STATE_KEYS] = { "keys", kv, 3, { c->n_kv_heads, n, c->head_dim } },
        [LAZY_STATE_VALUES] = { "values", kv, 3, { c->n_kv_heads, n, c->head_dim } },
        [LAZY_STATE_AUX] = { "aux", activations, 2, { n, c->hidden } },
        [LAZY_STATE_REMEMBERED] = { "remembered", ARRAY_FLOAT, 1, { n } },
        [LAZY_STATE_LOGITS] = { "logits", ARRAY_FLOAT, 1, { n } },
    };
    int part = array_find_part(parts, N_PARTS, name);
    if (part >= 0) *array = parts[part];
    return part < 0 || session_at_rest(self) ? part : -1;
}

/* Finds a part, and the number of tokens that it has. */
static int parse_part(const SessionObject *self, PyObject *args, int *layer, int *n, array_part *array)
{
    const char *name;
    int part;
    if (!PyArg_ParseTuple(args, "si", &name, layer) || (part = find_part(self, name, 0, array)) < 0) return -1;
    *n = lazy_session_state_length(self->session, (lazy_state_part)part, *layer);
    return find_part(self, name, *n, array);
}

PyObject *session_state_length(SessionObject *self, PyObject *args)
{
    int layer, n;
    array_part array;
    return parse_part(self, args, &layer, &n, &array) < 0 ? NULL : PyLong_FromLong(n < 0 ? 0 : n);
}

PyObject *session_state(SessionObject *self, PyObject *args)
{
    int layer, n, part;
    array_part array;
    void *data;
    lazy_error err = { 0 };
    if ((part = parse_part(self, args, &layer, &n, &array)) < 0) return NULL;
    if (n <= 0) Py_RETURN_NONE;
    PyObject *result = array_new(&array, &data);
    if (result) WITHOUT_GIL(self, lazy_session_get_state(self->session, (lazy_state_part)part, layer, data, &err));
    return core_result(self, result, &err);
}

PyObject *session_set_state(SessionObject *self, PyObject *args)
{
    const char *name;
    int layer, part;
    Py_buffer rows;
    array_part array;
    lazy_error err = { 0 };
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "siy*", &name, &layer, &rows)) return NULL;
    if ((part = find_part(self, name, 1, &array)) >= 0) {
        Py_ssize_t row = (Py_ssize_t)lazy_float_bytes((lazy_dtype)array.type);
        for (int i = 0; i < array.rank; i++) row *= array.shape[i];
        if (rows.len % row) PyErr_Format(PyExc_ValueError, "%zd bytes of %s; each token has %zd", rows.len, name, row);
        else {
            WITHOUT_GIL(self, lazy_session_set_state(self->session, (lazy_state_part)part, layer, (int)(rows.len / row),
                                                     rows.buf, &err));
            result = core_none(self, &err);
        }
    }
    PyBuffer_Release(&rows);
    return result;
}

PyObject *session_set_tokens(SessionObject *self, PyObject *args)
{
    Py_buffer ids, kinds, depths, gone;
    if (!PyArg_ParseTuple(args, "y*y*y*y*", &ids, &kinds, &depths, &gone)) return NULL;
    lazy_error err = { 0 };
    PyObject *result = NULL;
    Py_ssize_t n = kinds.len;
    if (ids.len != n * (Py_ssize_t)sizeof(int32_t) || depths.len != ids.len || gone.len != n || n > INT32_MAX)
        PyErr_SetString(PyExc_ValueError,
                        "ids and depths must be int32, kinds and gone uint8, and all of the same length");
    else if (session_at_rest(self)) {
        lazy_session_set_tokens(self->session, ids.buf, kinds.buf, depths.buf, gone.buf, (int)n, &err);
        result = core_none(self, &err);
    }
    PyBuffer_Release(&ids);
    PyBuffer_Release(&kinds);
    PyBuffer_Release(&depths);
    PyBuffer_Release(&gone);
    return result;
}
