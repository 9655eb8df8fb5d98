/* watcher.c — lets signal handlers and a progress callback run while the core works without the GIL. */
#define _GNU_SOURCE
#include "core.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "../numeric.h"

static int poll_python(void *context, int layers_done, int n_layers)
{
    enum { EVERY_NS = 20 * 1000 * 1000 }; /* taking the GIL may cost milliseconds when other threads hold it */
    watcher *w = context;
    bool reports = w->callback && layers_done != w->reported, ends = reports && layers_done == n_layers;
    if (!reports && !w->on_main) return 0;
    if (now_ns() - w->polled_ns < EVERY_NS && !ends) return 0;

    watcher_hold(w);
    int stop = PyErr_CheckSignals();
    if (!stop && reports) {
        PyObject *result = PyObject_CallFunction(w->callback, "ii", layers_done, n_layers);
        stop = result ? 0 : -1;
        Py_XDECREF(result);
        w->reported = layers_done;
    }
    watcher_release(w);
    w->polled_ns = now_ns();
    return stop;
}

/* Signal handlers run on Python's main thread alone: the first one of the process, unless another program has started
 * Python elsewhere, and in a forked child too. */
static bool on_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

void watcher_begin(watcher *w, PyObject *callback)
{
    *w = (watcher){
        .watch = { poll_python, w }, .callback = callback, .on_main = on_main_thread(), .polled_ns = now_ns()
    };
    watcher_release(w);
}

void watcher_hold(watcher *w) { PyEval_RestoreThread(w->thread); }
void watcher_release(watcher *w) { w->thread = PyEval_SaveThread(); }
