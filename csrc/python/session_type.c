/* session_type.c — lazyllm._core.Session. */
#include "core.h"

#include "../error.h"

PyObject *session_create(ModelObject *model, PyObject *dict)
{
    PyTypeObject *type = (PyTypeObject *)core_state_of(model)->session_type;
    lazy_pruning pruning;
    lazy_error err = { 0 };
    if (pruning_parse(dict, &pruning)) return NULL;
    SessionObject *self = (SessionObject *)PyType_GenericAlloc(type, 0);
    if (self) {
        lazy_pruning own = pruning;
        self->model = (ModelObject *)Py_NewRef((PyObject *)model);
        self->drawn = -1;
        self->policy = Py_XNewRef(pruning.policy.context);
        if (self->policy) own.policy = policy_of(self);
        lazy_session_open(&self->session, model->model, &own, &err);
    }
    pruning_release(&pruning);
    return core_result(model, (PyObject *)self, &err);
}

/* A policy may hold its session. Without tp_clear the cycle is broken at the policy, when no pass needs it any more. */
static int session_traverse(SessionObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->model);
    Py_VISIT(self->policy);
    Py_VISIT(self->memo);
    return 0;
}

static void session_dealloc(SessionObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    lazy_session_close(self->session);
    Py_XDECREF(self->policy);
    Py_XDECREF((PyObject *)self->model);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

lazy_session *session_at_rest(const SessionObject *self)
{
    if (!self->in_use) return self->session;
    PyErr_SetString(PyExc_RuntimeError, "the session is in use: a call on it is under way");
    return NULL;
}

static int vocab_of(const SessionObject *self) { return self->model->model->config.vocab; }

/* ---- a pass ----------------------------------------------------------------------------- */

/* sampler: draws pass.best from pass.logits, or NULL. surprisal: the array for it, made here; NULL: not wanted. */
static int run_pass(SessionObject *self, PyObject *ids, PyObject *watch, lazy_pass pass, lazy_sampler *sampler,
                    PyObject **surprisal)
{
    int32_t *owned, *drawn = pass.best;
    lazy_error err = { 0 };
    watcher w;
    if (watch != Py_None && !PyCallable_Check(watch)) {
        PyErr_Format(PyExc_TypeError, "watch is %R; it must be callable or None", watch);
        return -1;
    }
    if (array_parse_ids(ids, &owned, &pass.n)) return -1;
    if ((surprisal && !(*surprisal = array_new_float(pass.n, &pass.surprisal))) || !session_at_rest(self)) {
        PyMem_Free(owned);
        return -1;
    }
    pass.ids = owned;
    if (sampler) pass.best = NULL;
    pass.watch = &w.watch;
    self->in_use = true;
    self->policy_ns = 0;
    self->watcher = &w;
    watcher_begin(&w, watch == Py_None ? NULL : watch);
    int code = lazy_session_run(self->session, &pass, &err);
    bool ended = !code;
    if (ended && sampler) code = lazy_sampler_next(sampler, pass.logits, vocab_of(self), drawn, &err);
    watcher_hold(&w);
    if (ended) self->drawn = !code && drawn ? *drawn : -1;
    self->watcher = NULL;
    self->in_use = false;
    PyMem_Free(owned);
    if (code) core_raise(core_state_of(self), &err);
    PyObject *memo = self->memo;
    self->memo = NULL;
    Py_XDECREF(memo); /* last, because it may run Python code */
    return code ? -1 : 0;
}

static PyObject *session_forward(SessionObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "ids", "generated", "watch", NULL };
    PyObject *ids, *watch = Py_None;
    int generated = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|pO", names, &ids, &generated, &watch)) return NULL;
    float *data;
    PyObject *logits = array_new_float(vocab_of(self), &data);
    if (logits && run_pass(self, ids, watch, (lazy_pass){ .generated = generated, .logits = data }, NULL, NULL))
        Py_CLEAR(logits);
    return logits;
}

static PyObject *session_advance(SessionObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "ids", "sampler", "generated", "watch", NULL };
    PyObject *ids, *watch = Py_None;
    SamplerObject *given;
    int generated = 0, vocab = vocab_of(self);
    const core_state *state = core_state_of(self);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!|pO", names, &ids, state->sampler_type, &given, &generated,
                                     &watch))
        return NULL;
    int32_t token;
    lazy_pass pass = { .generated = generated, .best = &token };
    lazy_error err = { 0 };
    if (!sampler_at_rest(given)) return NULL;
    /* a greedy one saves the download of the logits */
    lazy_sampler *sampler = lazy_sampler_is_greedy(given->sampler) ? NULL : given->sampler;
    if (sampler && !(pass.logits = PyMem_Malloc((size_t)vocab * sizeof *pass.logits))) return PyErr_NoMemory();
    if (sampler && lazy_sampler_reserve(sampler, vocab, &err)) core_raise(state, &err); /* before the session changes */
    given->in_use = true; /* before the ids are read, which may run Python code */
    int code = err.code ? -1 : run_pass(self, ids, watch, pass, sampler, NULL);
    given->in_use = false;
    PyMem_Free(pass.logits);
    return code ? NULL : PyLong_FromLong(token);
}

static PyObject *session_surprisal(SessionObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "ids", "watch", NULL };
    PyObject *ids, *watch = Py_None, *surprisal = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &ids, &watch)) return NULL;
    if (run_pass(self, ids, watch, (lazy_pass){ 0 }, NULL, &surprisal)) Py_CLEAR(surprisal);
    return surprisal;
}

static PyObject *session_read(SessionObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "ids", "watch", NULL };
    PyObject *ids, *watch = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &ids, &watch)) return NULL;
    return run_pass(self, ids, watch, (lazy_pass){ .reads = true }, NULL, NULL) ? NULL : Py_NewRef(Py_None);
}

static PyObject *session_reserve(SessionObject *self, PyObject *args)
{
    lazy_error err = { 0 };
    long long n, n_soon = -1;
    if (!PyArg_ParseTuple(args, "L|L", &n, &n_soon) || !session_at_rest(self)) return NULL;
    WITHOUT_GIL(self, lazy_session_reserve(self->session, n, n_soon < 0 ? n : n_soon, &err));
    return core_none(self, &err);
}

static PyObject *session_reschedule(SessionObject *self, PyObject *dict)
{
    lazy_pruning pruning;
    lazy_error err = { 0 };
    if (!session_at_rest(self) || pruning_parse(dict, &pruning)) return NULL;
    if (pruning.policy.context) lazy_invalid(&err, "a session cannot take another policy");
    else lazy_session_reschedule(self->session, &pruning, &err);
    pruning_release(&pruning);
    return core_none(self, &err);
}

static PyObject *session_truncate(SessionObject *self, PyObject *argument)
{
    lazy_error err = { 0 };
    long long length = PyLong_AsLongLong(argument);
    if ((length == -1 && PyErr_Occurred()) || !session_at_rest(self)) return NULL;
    if (!lazy_session_truncate(self->session, length, &err)) self->drawn = -1;
    return core_none(self, &err);
}

static PyObject *session_fork(SessionObject *self, PyObject *none)
{
    if (!session_at_rest(self)) return NULL;
    SessionObject *fork = (SessionObject *)PyType_GenericAlloc(Py_TYPE((PyObject *)self), 0);
    if (!fork) return NULL;
    lazy_error err = { 0 };
    fork->model = (ModelObject *)Py_NewRef((PyObject *)self->model);
    fork->policy = Py_XNewRef(self->policy);
    fork->drawn = self->drawn;
    WITHOUT_GIL(self, lazy_session_fork(&fork->session, self->session, fork, &err));
    return core_result(self, (PyObject *)fork, &err);
}

static PyObject *session_bytes_for(SessionObject *self, PyObject *argument)
{
    long n = PyLong_AsLong(argument);
    if (n == -1 && PyErr_Occurred()) return NULL;
    int context = self->model->model->config.context;
    if (n < 0 || n > context) return PyErr_Format(PyExc_ValueError, "n_tokens is %ld; it must be 0 to %d", n, context);
    return PyLong_FromUnsignedLongLong(lazy_session_bytes(self->session, (int)n));
}

/* ---- properties ---------------------------------------------------------------------- */

#define READ(name, expression)                                                                                         \
    static PyObject *session_##name(SessionObject *self, void *closure)                                                \
    {                                                                                                                  \
        lazy_session *s = session_at_rest(self);                                                                       \
        return s ? (expression) : NULL;                                                                                \
    }

READ(length, PyLong_FromLong(s->tokens.length))
READ(n_prompt, PyLong_FromLong(s->tokens.n_prompt))
READ(ids, array_of(ARRAY_INT32, s->tokens.ids, s->tokens.length, 0))
READ(drawn, self->drawn >= 0 ? PyLong_FromLong(self->drawn) : Py_NewRef(Py_None))
READ(gone, array_of(ARRAY_UINT8, s->tokens.gone, s->tokens.length, 0))
READ(depths, array_of(ARRAY_INT32, s->tokens.depths, s->tokens.length, 0))
READ(kinds, array_of(ARRAY_UINT8, s->tokens.kinds, s->tokens.length, 0))
READ(last_pass, array_of(ARRAY_INT32, s->last.counts, s->model->config.n_layers, 3))
READ(trace, PyBool_FromLong(s->traces))
READ(fork_bytes, PyLong_FromUnsignedLongLong(lazy_session_fork_bytes(s)))
READ(policy_seconds, PyFloat_FromDouble((double)self->policy_ns * 1e-9))

static PyObject *session_logits(SessionObject *self, void *closure)
{
    if (!session_at_rest(self)) return NULL;
    float *data;
    lazy_error err = { 0 };
    PyObject *logits = array_new_float(vocab_of(self), &data);
    if (logits) lazy_session_logits(self->session, data, &err);
    return core_result(self, logits, &err);
}

static int session_set_drawn(SessionObject *self, PyObject *value, void *closure)
{
    long long token = value ? PyLong_AsLongLong(value) : -1;
    if (PyErr_Occurred()) return -1;
    if (token < 0 || token >= vocab_of(self)) {
        PyErr_Format(PyExc_ValueError, "drawn is %lld; it must be 0 to %d", token, vocab_of(self) - 1);
        return -1;
    }
    if (!session_at_rest(self)) return -1;
    self->drawn = (int32_t)token;
    return 0;
}

static int session_set_trace(SessionObject *self, PyObject *value, void *closure)
{
    if (!value || !PyBool_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "trace must be True or False");
        return -1;
    }
    if (!session_at_rest(self)) return -1;
    self->session->traces = value == Py_True;
    return 0;
}

/* "N" takes the arrays, and gives NULL if one of them is. */
static PyObject *run_as_dict(const lazy_trace_run *run)
{
    return Py_BuildValue("{s:i,s:i,s:N,s:N,s:N}", "first_layer", run->first_layer, "last_layer", run->last_layer,
                         "in_play", array_of(ARRAY_INT32, run->in_play, run->n_in_play, 0), "computed",
                         array_of(ARRAY_INT32, run->computed, run->n_computed, 0), "scores",
                         run->scores ? array_of(ARRAY_FLOAT, run->scores, run->n_in_play, 0) : Py_NewRef(Py_None));
}

static PyObject *session_last_trace(SessionObject *self, void *closure)
{
    const lazy_session *s = session_at_rest(self);
    if (!s) return NULL;
    PyObject *list = PyList_New(s->last.n_runs);
    for (int i = 0; i < s->last.n_runs && list; i++) {
        PyObject *dict = run_as_dict(&s->last.runs[i]);
        if (dict) PyList_SetItem(list, i, dict);
        else Py_CLEAR(list);
    }
    return list;
}

#define MEMBER(name, setter_, doc) { #name, (getter)session_##name, (setter)setter_, doc, NULL }
static PyGetSetDef session_members[] = {
    MEMBER(length, NULL, "tokens in the context"),
    MEMBER(n_prompt, NULL, "prompt tokens in the context"),
    MEMBER(logits, NULL, "of the last pass"),
    MEMBER(ids, NULL, "the token at each position"),
    MEMBER(drawn, session_set_drawn, "the token drawn after the last pass and not run yet, or None"),
    MEMBER(depths, NULL, "layers that computed K,V of each token"),
    MEMBER(gone, NULL, "1 for tokens that are never in play again"),
    MEMBER(kinds, NULL, "0 prompt, 1 generated, 2 prompt read, with no pass since"),
    MEMBER(last_pass, NULL, "(layers, 3): in play, computed, revived"),
    MEMBER(fork_bytes, NULL, "bytes that a fork takes beyond what it shares"),
    MEMBER(policy_seconds, NULL, "spent in the policy by the last pass"),
    MEMBER(trace, session_set_trace, "whether to keep the sets of each pass"),
    MEMBER(last_trace, NULL, "the sets of the last pass, a dict for each run of layers"),
    { 0 },
};

#define METHOD(name, flags, doc) { #name, (PyCFunction)(void (*)(void))session_##name, flags, doc }
enum { METH_CALL = METH_VARARGS | METH_KEYWORDS };
static PyMethodDef session_methods[] = {
    METHOD(forward, METH_CALL, "forward(ids, generated=False, watch=None) -> logits of the last token"),
    METHOD(advance, METH_CALL, "advance(ids, sampler, generated=False, watch=None) -> the next token id"),
    METHOD(surprisal, METH_CALL, "surprisal(ids, watch=None) -> -ln p of each new token"),
    METHOD(read, METH_CALL, "read(ids, watch=None): runs the beginning of a prompt up to the first stage"),
    METHOD(reschedule, METH_O, "reschedule(pruning): another setting, with stages after the same layers"),
    METHOD(truncate, METH_O, "truncate(length): back to the first tokens"),
    METHOD(fork, METH_NOARGS, "fork() -> a second session in the same state"),
    METHOD(state_length, METH_VARARGS, "state_length(part, layer) -> n; 0 where the part has no token"),
    METHOD(state, METH_VARARGS, "state(part, layer) -> a part of the state as an array, or None"),
    METHOD(set_state, METH_VARARGS, "set_state(part, layer, array), after set_tokens"),
    METHOD(set_tokens, METH_VARARGS, "set_tokens(ids, kinds, depths, gone) of an empty session"),
    METHOD(bytes_for, METH_O, "bytes_for(n_tokens) -> bytes of all buffers with room for n_tokens"),
    METHOD(view, METH_VARARGS, "view(part, first, n) -> entries of a part of what the policy under way may see"),
    METHOD(reserve, METH_VARARGS, "reserve(n_tokens, n_soon=n_tokens): room for that many tokens in all"),
    { 0 },
};

static PyType_Slot session_slots[] = {
    { Py_tp_doc, "One context of a model; made by Model.session" },
    { Py_tp_dealloc, session_dealloc },
    { Py_tp_traverse, session_traverse },
    { Py_tp_getset, session_members },
    { Py_tp_methods, session_methods },
    { 0 },
};

PyType_Spec session_spec = {
    .name = "lazyllm._core.Session",
    .basicsize = sizeof(SessionObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC,
    .slots = session_slots,
};
