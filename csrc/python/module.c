/* module.c — lazyllm._core: its exceptions, types and functions. Multi-phase initialisation, state per module. */
#include "core.h"

#include <string.h>

core_state *core_state_of(const void *object) { return PyType_GetModuleState(Py_TYPE((PyObject *)object)); }

PyObject *core_raise(const core_state *state, const lazy_error *err)
{
    PyObject *const exceptions[] = { [-LAZY_INVALID] = PyExc_ValueError,   [-LAZY_CHECKPOINT] = state->checkpoint_error,
                                     [-LAZY_MEMORY] = PyExc_MemoryError,   [-LAZY_IO] = PyExc_OSError,
                                     [-LAZY_DEVICE] = state->device_error, [-LAZY_UNUSABLE] = PyExc_RuntimeError };
    if (err->code != LAZY_CANCELLED) PyErr_SetString(exceptions[-err->code], err->message);
    return NULL;
}

PyObject *core_result(const void *object, PyObject *result, const lazy_error *err)
{
    if (!err->code) return result;
    Py_XDECREF(result);
    return core_raise(core_state_of(object), err);
}

PyObject *core_none(const void *object, const lazy_error *err) { return core_result(object, Py_NewRef(Py_None), err); }

static PyObject *core_features(PyObject *module, PyObject *unused)
{
    char sets[64] = "";
    for (const char *const *name = lazy_cpu_variants(); *name; name++) {
        if (*sets) strcat(sets, " ");
        strcat(sets, *name);
    }
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s}", "instruction_sets", sets, "used",
                         lazy_cpu_variant_used(LAZY_COMPUTE_F32), "bf16", lazy_cpu_variant_used(LAZY_COMPUTE_BF16),
                         "int8", lazy_cpu_variant_used(LAZY_COMPUTE_INT8), "compiler", __VERSION__);
}

static PyObject *core_cuda(PyObject *module, PyObject *libraries)
{
    if (!PyList_Check(libraries)) return PyErr_Format(PyExc_TypeError, "libraries is %R; it must be a list", libraries);
    const char **places = NULL;
    PyObject *owner;
    int n, code = strings_parse(libraries, &owner, &places, &n);
    char text[4096];
    lazy_error err = { 0 };
    if (!code) code = lazy_cuda_look(text, sizeof text, places, n, &err);
    PyMem_Free(places);
    Py_XDECREF(owner);
    if (code) return err.code ? core_raise(PyModule_GetState(module), &err) : NULL;
    return PyUnicode_FromString(text);
}

static PyMethodDef core_functions[] = {
    { "cuda", core_cuda, METH_O, "cuda(libraries) -> str: what there is for CUDA; DeviceError says why it is off" },
    { "widen", core_widen, METH_VARARGS,
      "widen(data, dtype) -> array: the float32 values of weights in any format, \"Q8_0\" for one" },
    { "quantize", core_quantize, METH_VARARGS,
      "quantize(values, dtype) -> bytes: float32 values rounded to \"Q8_0\" or \"Q4_1\"" },
    { "features", core_features, METH_NOARGS, "features() -> dict: what the CPU core found on this machine" },
    { 0 },
};

static PyObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddType(module, (PyTypeObject *)type)) Py_CLEAR(type);
    return type;
}

static PyObject *add_exception(PyObject *module, const char *name, const char *doc, PyObject *base)
{
    PyObject *exception = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
    if (exception && PyModule_AddObjectRef(module, strrchr(name, '.') + 1, exception)) Py_CLEAR(exception);
    return exception;
}

/* The GIL keeps two threads from one session. A free-threaded Python turns it on here, unless told not to. */
static int require_gil(void)
{
    PyObject *function = PySys_GetObject("_is_gil_enabled"); /* since Python 3.13 */
    PyObject *answer = function ? PyObject_CallNoArgs(function) : Py_NewRef(Py_True);
    int enabled = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (!enabled) PyErr_SetString(PyExc_ImportError, "lazyllm needs the GIL: leave out PYTHON_GIL=0 and -X gil=0");
    return enabled == 1 ? 0 : -1;
}

static int core_exec(PyObject *module)
{
    core_state *state = PyModule_GetState(module);
    if (require_gil() || arrays_import()) return -1;
    state->checkpoint_error =
        add_exception(module, "lazyllm.CheckpointError",
                      "A checkpoint that cannot be used: what, where, and what would be right.", PyExc_ValueError);
    state->device_error =
        add_exception(module, "lazyllm.DeviceError", "A device that is missing or failed.", PyExc_RuntimeError);
    state->model_type = add_type(module, &model_spec);
    state->session_type = add_type(module, &session_spec);
    state->sampler_type = add_type(module, &sampler_spec);
    return PyErr_Occurred() ? -1 : 0;
}

static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    core_state *state = PyModule_GetState(module);
#define VISIT(name) Py_VISIT(state->name);
    CORE_OBJECTS(VISIT)
    return 0;
}

static int core_clear(PyObject *module)
{
    core_state *state = PyModule_GetState(module);
#define CLEAR(name) Py_CLEAR(state->name);
    CORE_OBJECTS(CLEAR)
    return 0;
}

static void core_free(void *module) { core_clear(module); }

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lazyllm._core",
    .m_doc = "The C core of lazyllm.",
    .m_size = sizeof(core_state),
    .m_methods = core_functions,
    .m_slots = (PyModuleDef_Slot[]){ { Py_mod_exec, core_exec }, { 0 } },
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
