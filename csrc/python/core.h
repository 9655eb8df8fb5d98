/* core.h — declarations shared by the files of lazyllm._core. Only this folder includes Python.h, and only the part of
 * its API that is the same in all versions from 3.11 on (Py_LIMITED_API): one wheel serves them all. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../session.h"

#define CORE_OBJECTS(work)                                                                                             \
    work(model_type) work(session_type) work(sampler_type) work(checkpoint_error) work(device_error)
typedef struct core_state {
#define MEMBER(name) PyObject *name;
    CORE_OBJECTS(MEMBER)
#undef MEMBER
} core_state;

typedef struct {
    PyObject_HEAD
    lazy_model *model;
} ModelObject;

typedef struct watcher watcher;

typedef struct {
    PyObject_HEAD
    ModelObject *model; /* kept alive */
    lazy_session *session;
    bool in_use;   /* by a call that may have released the GIL; read and written with the GIL held */
    int32_t drawn; /* the token drawn after the last pass, which no pass has run yet; -1: none */

    PyObject *policy; /* policy(session, view, memo), or NULL; see policy.c */
    /* of the pass under way, else NULL */
    watcher *watcher;
    PyObject *memo;        /* a dict; NULL until the policy is first called */
    const lazy_view *view; /* while the policy runs */
    int64_t policy_ns;     /* spent in the policy by the last pass */
} SessionObject;

typedef struct {
    PyObject_HEAD
    lazy_sampler *sampler;
    bool in_use; /* as of sessions */
} SamplerObject;

/* The state of the module that made the object's type. */
core_state *core_state_of(const void *object);

/* session_type.c: the session, or NULL with an exception while a call on it is under way. */
lazy_session *session_at_rest(const SessionObject *self);

/* sampler_type.c: the same of a sampler. */
lazy_sampler *sampler_at_rest(const SamplerObject *self);

/* Makes a call on a session or a sampler without the GIL; meanwhile others are refused. */
#define WITHOUT_GIL(self, call)                                                                                        \
    do {                                                                                                               \
        (self)->in_use = true;                                                                                         \
        PyThreadState *thread_ = PyEval_SaveThread();                                                                  \
        (call);                                                                                                        \
        PyEval_RestoreThread(thread_);                                                                                 \
        (self)->in_use = false;                                                                                        \
    } while (0)

/* Sets the Python exception for err; returns NULL. For LAZY_CANCELLED the callback has set one already. */
PyObject *core_raise(const core_state *state, const lazy_error *err);
/* The result of a method that has called the core: `result`, which it takes (or NULL), or the exception for err. */
PyObject *core_result(const void *object, PyObject *result, const lazy_error *err);
PyObject *core_none(const void *object, const lazy_error *err); /* the result None */

/* model_type.c, session_type.c, sampler_type.c */
extern PyType_Spec model_spec, session_spec, sampler_spec;
PyObject *session_create(ModelObject *model, PyObject *pruning);

/* pruning_argument.c: fills *pruning from the dict; policy.context is a callable (a new reference) or NULL. 0, and it
 * must be freed with pruning_release; or -1 with an exception. */
int pruning_parse(PyObject *dict, lazy_pruning *pruning);
void pruning_release(lazy_pruning *pruning);

/* arguments.c: typed members of a dict. 0 or -1 with an exception naming `what` and the key. */
typedef struct core_field {
    const char *key;
    char format; /* as of PyArg_Parse: an int, a float, a double or an object (borrowed); 'p': a bool; or an array */
    void *out;
} core_field;
enum { CORE_FLOATS = 'F', CORE_INTS = 'I' };
#define FIELD(format, of, name) { #name, format, &(of)->name }
int fields_parse(PyObject *dict, const char *what, const core_field *fields, size_t n);

/* The strings of a list (NULL: none). They live as long as *owner, a tuple (a new reference, NULL on
 * failure); the array must be freed with PyMem_Free. 0 or -1 with an exception. */
int strings_parse(PyObject *list, PyObject **owner, const char ***out, int *n);

/* watcher.c: releases the GIL from begin to the last hold; meanwhile `watch`, handed to the core, runs signal handlers
 * and calls callback(layers_done, n_layers) (borrowed, or NULL), and stops the work if one of them raises. */
struct watcher {
    lazy_watch watch;
    PyObject *callback;
    PyThreadState *thread;
    bool on_main;      /* on the main thread, where signal handlers run */
    int reported;      /* layers done when callback was last called */
    int64_t polled_ns; /* when signals were last checked */
};

void watcher_begin(watcher *w, PyObject *callback);
/* Takes the GIL again: at the end, or until watcher_release. */
void watcher_hold(watcher *w);
void watcher_release(watcher *w);

/* policy.c: the session's policy, for the core, and session.view(part, first, n) -> array, by which it reads. */
lazy_policy policy_of(SessionObject *self);
PyObject *session_view(SessionObject *self, PyObject *args);

/* state.c: the parts of a session's state. */
PyObject *session_state_length(SessionObject *self, PyObject *args);
PyObject *session_state(SessionObject *self, PyObject *args);
PyObject *session_set_state(SessionObject *self, PyObject *args);
PyObject *session_set_tokens(SessionObject *self, PyObject *args);

/* formats.c */
PyObject *core_widen(PyObject *module, PyObject *args);
PyObject *core_quantize(PyObject *module, PyObject *args);

/* arrays.c: NumPy arrays. */
int arrays_import(void);
typedef enum array_type { ARRAY_FLOAT = LAZY_F32, ARRAY_INT32 = LAZY_BF16 + 1, ARRAY_UINT8 } array_type;
/* A part, by its name, of what a policy sees or of a session's state. type: an array_type or LAZY_F32, LAZY_F16 or
 * LAZY_BF16, which NumPy lacks: it gets its bits as uint16. */
typedef struct array_part {
    const char *name;
    int type, rank;
    Py_ssize_t shape[3];
} array_part;
int array_find_part(const array_part *parts, size_t n, const char *name); /* its index; -1 with an exception */
PyObject *array_new(const array_part *part, void **data);
PyObject *array_new_float(Py_ssize_t n, float **data);
/* A copy of (n,) values, or of (n, columns) unless columns is 0. */
PyObject *array_of(array_type type, const void *from, Py_ssize_t n, int columns);
/* Token ids from a list or an integer array, as int32 in memory of PyMem_Malloc; -1 with an exception. Ids outside
 * int32 become -1, which is never valid. */
int array_parse_ids(PyObject *object, int32_t **ids, int *n);
/* A copy of a vector (n,), alive as its owner (a new reference): no thread can change it. -1 with an exception */
typedef struct core_array {
    PyObject *owner;
    const void *data;
    Py_ssize_t n;
} core_array;
int array_parse(PyObject *object, array_type type, const char *what, core_array *out);
