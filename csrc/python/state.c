/* state.c — the parts of a session's state as arrays, to be saved and restored. */
#include "core.h"

#include "../format.h"

static const char *const PARTS[] = {
    [LAZY_STATE_KEYS] = "keys",     [LAZY_STATE_VALUES] = "values",
    [LAZY_STATE_AUX] = "aux",       [LAZY_STATE_REMEMBERED] = "remembered",
    [LAZY_STATE_LOGITS] = "logits",
};
/* The part of that name of a session that is at rest; -1 with an exception. */
static int find_part(const SessionObject *self, const char *name)
{
    int part = string_find_part(PARTS, sizeof PARTS / sizeof *PARTS, name);
    return part < 0 || session_at_rest(self) ? part : -1;
}

PyObject *state_length(SessionObject *self, PyObject *args)
{
    const char *name;
    int layer, part;
    if (!PyArg_ParseTuple(args, "si", &name, &layer) || (part = find_part(self, name)) < 0) return NULL;
    int n = lazy_session_state_length(self->session, (lazy_state_part)part, layer);
    return PyLong_FromLong(n < 0 ? 0 : n);
}

PyObject *state_get(SessionObject *self, PyObject *args)
{
    const char *name;
    int layer, part;
    if (!PyArg_ParseTuple(args, "si", &name, &layer) || (part = find_part(self, name)) < 0) return NULL;
    int n = lazy_session_state_length(self->session, (lazy_state_part)part, layer);
    if (n <= 0) Py_RETURN_NONE;
    void *data;
    lazy_error err = { 0 };
    PyObject *array = array_new_state(self->model->model, (lazy_state_part)part, n, &data);
    if (!array) return NULL;
    WITHOUT_GIL(self, lazy_session_get_state(self->session, (lazy_state_part)part, layer, data, &err));
    if (!err.code) return array;
    Py_DECREF(array);
    return core_raise(core_state_of(self), &err);
}

PyObject *state_set(SessionObject *self, PyObject *args)
{
    const char *name;
    int layer, part;
    Py_buffer rows;
    if (!PyArg_ParseTuple(args, "siy*", &name, &layer, &rows)) return NULL;
    const lazy_config *c = lazy_model_config(self->model->model);
    const lazy_dtype kv = lazy_model_kv(self->model->model), activations = lazy_model_activations(self->model->model);
    lazy_error err = { 0 };
    PyObject *result = NULL;
    if ((part = find_part(self, name)) < 0) goto end;
    size_t bytes = part == LAZY_STATE_KEYS || part == LAZY_STATE_VALUES
                       ? lazy_row_bytes(kv, c->n_kv_heads * c->head_dim)
                   : part == LAZY_STATE_AUX ? lazy_row_bytes(activations, c->hidden)
                                            : sizeof(float);
    Py_ssize_t row = (Py_ssize_t)bytes;
    if (rows.len % row) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of %s; each token has %zd", rows.len, name, row);
        goto end;
    }
    WITHOUT_GIL(self, lazy_session_set_state(self->session, (lazy_state_part)part, layer, (int)(rows.len / row),
                                             rows.buf, &err));
    result = core_none(self, &err);
end:
    PyBuffer_Release(&rows);
    return result;
}

PyObject *state_set_tokens(SessionObject *self, PyObject *args)
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

PyObject *state_check(SessionObject *self, PyObject *none)
{
    (void)none;
    lazy_error err = { 0 };
    if (!session_at_rest(self)) return NULL;
    lazy_session_check_state(self->session, self->drawn >= 0, &err);
    return core_none(self, &err);
}
