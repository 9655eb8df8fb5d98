/* policy.c — calls a policy written in Python from within a pass, which runs without the GIL. */
#include "core.h"

#include <string.h>

#include "../numeric.h"

PyObject *session_view(SessionObject *self, PyObject *args)
{
    const char *name;
    const lazy_view *view = self->view;
    int first, n;
    if (!PyArg_ParseTuple(args, "sii", &name, &first, &n)) return NULL;
    if (!view) return PyErr_Format(PyExc_RuntimeError, "%s can be read only while the session's policy runs", name);
    if (n < 0) return PyErr_Format(PyExc_ValueError, "n is %d; it must be 0 or more", n);
    const lazy_model *model = self->model->model;
    const lazy_config *c = &model->config;
    const int kv = model->backend->kv, activations = model->backend->activations;
    const array_part parts[] = {
        [LAZY_VIEW_IN_PLAY] = { "in_play", ARRAY_INT32, 1, { n } },
        [LAZY_VIEW_ROWS] = { "rows", ARRAY_INT32, 1, { n } },
        [LAZY_VIEW_PROTECTED] = { "protected", ARRAY_UINT8, 1, { n } },
        [LAZY_VIEW_PROJECTIONS] = { "projections", activations, 3, { n, c->n_heads + 2 * c->n_kv_heads, c->head_dim } },
        [LAZY_VIEW_KEYS] = { "keys", kv, 3, { c->n_kv_heads, n, c->head_dim } },
        [LAZY_VIEW_VALUES] = { "values", kv, 3, { c->n_kv_heads, n, c->head_dim } },
        [LAZY_VIEW_HIDDEN] = { "hidden", activations, 2, { n, c->hidden } },
    };
    int part = array_find_part(parts, sizeof parts / sizeof *parts, name);
    void *data;
    lazy_error err = { 0 };
    PyObject *array = part < 0 ? NULL : array_new(&parts[part], &data);
    if (array) lazy_view_copy(view, (lazy_view_part)part, first, n, data, &err);
    return core_result(self, array, &err);
}

/* Calls policy(session, view, memo); memo is the same dict in all calls of a pass. */
static PyObject *run_policy(SessionObject *self, const lazy_view *view)
{
    const lazy_config *c = &self->model->model->config;
    if (!self->memo && !(self->memo = PyDict_New())) return NULL;
    return PyObject_CallFunction(self->policy, "O{s:i,s:O,s:O,s:i,s:i,s:i,s:i,s:i,s:d,s:d,s:i}O", self, "layer",
                                 view->layer, "is_prompt", view->is_prompt ? Py_True : Py_False, "observes",
                                 view->observes ? Py_True : Py_False, "n_keep", view->n_keep, "first_asking",
                                 view->first_asking, "n_in_play", view->n_in_play, "n_rows", view->n_rows, "window",
                                 view->window, "query_scalar", c->query_scalar ? (double)c->query_scalar : c->head_dim,
                                 "attention_cap", (double)c->attention_cap, "n_heads", c->n_heads, self->memo);
}

/* Takes (scores, n_free), which the policy returns unless it observes. */
static int take_answer(PyObject *answer, int m, float *scores, int *n_free)
{
    PyObject *object;
    core_array array;
    if (!PyTuple_Check(answer)) {
        PyErr_Format(PyExc_TypeError, "a policy returned %R; it must return (scores, n_free)", answer);
        return -1;
    }
    if (!PyArg_ParseTuple(answer, "Oi;a policy returns (scores, n_free)", &object, n_free)) return -1;
    if (array_parse(object, ARRAY_FLOAT, "scores", &array)) return -1;
    if (array.n == m) memcpy(scores, array.data, (size_t)m * sizeof *scores);
    else PyErr_Format(PyExc_ValueError, "a policy returned %zd scores for %d tokens in play", array.n, m);
    Py_DECREF(array.owner);
    return array.n == m ? 0 : -1;
}

static int call_policy(void *context, const lazy_view *view, float *scores, int *n_free)
{
    SessionObject *self = context;
    lazy_error err = { 0 };
    int32_t last;
    /* waits for the device, without the GIL */
    int code = lazy_view_copy(view, LAZY_VIEW_IN_PLAY, view->n_in_play - 1, 1, &last, &err);
    int64_t started = now_ns();
    watcher_hold(self->watcher);
    if (code) {
        core_raise(core_state_of(self), &err);
    } else {
        self->view = view;
        PyObject *answer = run_policy(self, view);
        self->view = NULL;
        code = !answer ? -1 : view->observes ? 0 : take_answer(answer, view->n_in_play, scores, n_free);
        Py_XDECREF(answer);
    }
    watcher_release(self->watcher);
    self->policy_ns += now_ns() - started;
    return code;
}

lazy_policy policy_of(SessionObject *self) { return (lazy_policy){ call_policy, self }; }
