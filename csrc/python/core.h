/* core.h — declarations shared by the files of lazyllm._core. Only this folder includes Python.h, and only the part of
 * its API that is the same in all versions from 3.11 on (setup.py defines Py_LIMITED_API), so that one wheel serves
 * them all. */
#ifndef LAZY_CORE_H
#define LAZY_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../lazyllm.h"

typedef struct core_state {
    PyTypeObject *model_type, *session_type, *sampler_type;
    PyObject *checkpoint_error, *device_error;
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
} SamplerObject;

/* The state of the module that made the object's type. */
core_state *core_state_of(const void *object);

/* session_type.c: the session, or NULL with an exception while a call on it is under way. */
lazy_session *session_at_rest(const SessionObject *self);

/* Makes a call on the session without the GIL; meanwhile others are refused. */
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
/* The result of a method that has called the core: None, or NULL with that exception. */
PyObject *core_none(const void *object, const lazy_error *err);

/* model_type.c, session_type.c, sampler_type.c */
extern PyType_Spec model_spec, session_spec, sampler_spec;
PyObject *session_create(PyTypeObject *type, ModelObject *model, PyObject *pruning);

/* pruning_argument.c: fills *pruning from the dict; its arrays must be freed with pruning_release. *policy: a callable
 * (a new reference) or NULL. 0 or -1 with an exception. */
int pruning_parse(PyObject *dict, lazy_pruning *pruning, PyObject **policy);
void pruning_release(lazy_pruning *pruning);

/* fields.c: typed members of a dict. 0 or -1 with an exception naming `what` and the key. */
typedef struct core_field {
    const char *key;
    enum { FIELD_INT, FIELD_FLOAT, FIELD_DOUBLE, FIELD_BOOL, FIELD_OBJECT } type;
    void *out; /* an int, a float, a double, a bool or the object (borrowed) */
} core_field;
#define FIELD(type, of, name) { #name, FIELD_##type, &(of)->name }
int fields_parse(PyObject *dict, const char *what, const core_field *fields, size_t n);

/* strings.c: the strings of a list (NULL: none). They live as long as *owner, a tuple (a new reference, NULL on
 * failure); the array must be freed with PyMem_Free. 0 or -1 with an exception. */
int strings_parse(PyObject *list, PyObject **owner, const char ***out, int *n);
/* The index of the name among n parts; -1 with an exception. */
int string_find_part(const char *const *parts, size_t n, const char *name);

/* watcher.c: releases the GIL between begin and end; meanwhile `watch`, handed to the core, runs signal handlers and
 * calls callback(layers_done, n_layers) (borrowed, or NULL), and stops the work if one of them raises. */
struct watcher {
    lazy_watch watch;
    PyObject *callback;
    PyThreadState *thread;
    bool on_main;      /* on the main thread, where signal handlers run */
    int reported;      /* layers done when callback was last called */
    int64_t polled_ns; /* when signals were last checked */
};

void watcher_begin(watcher *w, PyObject *callback);
void watcher_end(watcher *w);
/* Between these the GIL is held again. */
void watcher_hold(watcher *w);
void watcher_release(watcher *w);

/* policy.c: the session's policy, for the core; and what it may read while it runs: session.view(part, first, n) ->
 * array. */
lazy_policy policy_of(SessionObject *self);
PyObject *policy_view(SessionObject *self, PyObject *args);

/* state.c: the parts of a session's state. */
PyObject *state_length(SessionObject *self, PyObject *args);
PyObject *state_get(SessionObject *self, PyObject *args);
PyObject *state_set(SessionObject *self, PyObject *args);
PyObject *state_set_tokens(SessionObject *self, PyObject *args);
PyObject *state_check(SessionObject *self, PyObject *none);

/* formats.c */
PyObject *core_widen(PyObject *module, PyObject *args);
PyObject *core_quantize(PyObject *module, PyObject *args);

/* arrays.c: NumPy arrays. */
int arrays_import(void);
PyObject *array_of_int32(const int32_t *from, Py_ssize_t n);
PyObject *array_of_uint8(const uint8_t *from, Py_ssize_t n);
PyObject *array_of_float(const float *from, Py_ssize_t n);
PyObject *array_of_counts(const lazy_layer_count *from, Py_ssize_t n); /* (n, 3) int32 */
PyObject *array_new_float(Py_ssize_t n, float **data);
/* An array for a part of n entries of a session's state; bfloat16 as below. */
PyObject *array_new_state(const lazy_model *model, lazy_state_part part, int n, void **data);
/* An array for n entries of a part; bfloat16, which NumPy lacks, as uint16. */
PyObject *array_new_part(const lazy_view *view, lazy_view_part part, int n, void **data);
/* Token ids from a list or an integer array, as int32 in memory of PyMem_Malloc; -1 with an exception. Ids outside
 * int32 become -1, which is never valid. */
int array_parse_ids(PyObject *object, int32_t **ids, int *n);
/* A float32 copy of a vector, which lives as long as *owner (a new reference): no other thread can change it without
 * the GIL. */
int array_parse_floats(PyObject *object, const char *what, PyObject **owner, const float **data, Py_ssize_t *n);
int array_parse_ints(PyObject *object, const char *what, PyObject **owner, const int32_t **data, Py_ssize_t *n);

#endif
