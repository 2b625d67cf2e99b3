/* native_extra.h - what the extension holds beside libkv8: tensors handed to other libraries by
 * DLPack, tensors seen through DLPack's C calls, and a run that repeats in one call. Part of the
 * source that build_native.py writes, after Python.h and the headers of kv8.
 *
 * A capsule owns a DLManagedTensor, and that one a reference to the Python object whose memory it
 * shows; a consumer that renames the capsule takes the tensor over and calls its deleter. Both may
 * happen on any thread, with or without the GIL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

typedef struct {
    int32_t device_type, device_id;
} kv8_py_dl_device;
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} kv8_py_dl_type;
typedef struct {
    void *data;
    kv8_py_dl_device device;
    int32_t ndim;
    kv8_py_dl_type dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} kv8_py_dl_tensor;
typedef struct kv8_py_dl_managed {
    kv8_py_dl_tensor tensor;
    void *owner;
    void (*deleter)(struct kv8_py_dl_managed *);
} kv8_py_dl_managed;

static void kv8_py_dl_delete(kv8_py_dl_managed *managed) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)managed->owner);
    PyGILState_Release(state);
    free(managed);
}

static void kv8_py_capsule_delete(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* a consumer has it */
    kv8_py_dl_managed *const managed =
        (kv8_py_dl_managed *)PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

/* A new reference to a capsule, as a number for the caller to turn into an object; 0 without
 * memory. Shape and strides are copied; `owner` is the address of a Python object. */
static uintptr_t kv8_py_dlpack(const kv8_py_dl_tensor *tensor, uintptr_t owner) {
    const size_t bytes = (size_t)tensor->ndim * sizeof(int64_t);
    kv8_py_dl_managed *const managed = (kv8_py_dl_managed *)malloc(sizeof *managed + 2 * bytes);
    if (!managed) return 0;
    managed->tensor = *tensor;
    managed->tensor.shape = (int64_t *)(managed + 1);
    managed->tensor.strides = managed->tensor.shape + tensor->ndim;
    memcpy(managed->tensor.shape, tensor->shape, bytes);
    memcpy(managed->tensor.strides, tensor->strides, bytes);
    managed->owner = (void *)owner;
    managed->deleter = kv8_py_dl_delete;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_INCREF((PyObject *)managed->owner);
    PyObject *const capsule = PyCapsule_New(managed, "dltensor", kv8_py_capsule_delete);
    if (!capsule) kv8_py_dl_delete(managed);
    PyGILState_Release(state);
    return (uintptr_t)capsule;
}

/* A run with q, o and lse elsewhere than its args say, prepared first where that is asked for. */
static kv8_status kv8_py_attend_again(const kv8_attention_device_plan *plan, kv8_stream *stream,
                                      kv8_attention_args *args, void *workspace, uintptr_t q,
                                      uintptr_t o, uintptr_t lse, int prepare) {
    args->q = (const void *)q;
    args->o = (void *)o;
    args->lse = (float *)lse;
    if (prepare) {
        const kv8_status status = kv8_attention_device_prepare(plan, stream, args, workspace);
        if (status != KV8_OK) return status;
    }
    return kv8_attention_device_run(plan, stream, args, workspace);
}

/* DLPack's C calls of a tensor library, as version 1.3 of dlpack.h lays them out: the one that shows
 * a tensor where it lies. */
typedef struct kv8_py_dl_calls {
    uint32_t major, minor;
    void *older;
    void *allocate, *export_tensor, *import_tensor;
    int (*show)(void *object, kv8_py_dl_tensor *out);
    void *current_stream;
} kv8_py_dl_calls;

/* The calls behind the capsule at this address; NULL where they are of another version. */
static const kv8_py_dl_calls *kv8_py_dl_calls_of(uintptr_t capsule) {
    const PyGILState_STATE state = PyGILState_Ensure();
    const kv8_py_dl_calls *const calls =
        (const kv8_py_dl_calls *)PyCapsule_GetPointer((PyObject *)capsule, "dlpack_exchange_api");
    if (!calls) PyErr_Clear();
    PyGILState_Release(state);
    return calls && calls->major == 1 ? calls : NULL;
}

/* Where a signature is written: words, how many there are and may be. */
typedef struct kv8_py_signature {
    const kv8_py_dl_calls *calls;
    PyTypeObject *type;
    int64_t *words;
    int32_t num, room;
} kv8_py_signature;

static int kv8_py_sign_tensor(kv8_py_signature *s, PyObject *x, int with_address) {
    kv8_py_dl_tensor t;
    if (s->calls->show(x, &t) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (t.device.device_type != 2 /* CUDA */ || s->num + 2 + 2 * t.ndim > s->room) return 0;
    int64_t *const out = s->words + s->num;
    out[0] = t.ndim | (int64_t)t.dtype.code << 8 | (int64_t)t.dtype.bits << 16 |
             (int64_t)t.dtype.lanes << 24 | (int64_t)t.device.device_id << 40;
    out[1] = with_address ? (int64_t)((uintptr_t)t.data + t.byte_offset) : 0;
    for (int32_t i = 0; i < t.ndim; i++) {
        out[2 + i] = t.shape[i];
        out[2 + t.ndim + i] = t.strides[i];
    }
    s->num += 2 + 2 * t.ndim;
    return 1;
}

/* Items of a tuple, the first `num_rewritten` without their address; 0 where one is of another kind. */
static int kv8_py_sign_items(kv8_py_signature *s, PyObject *items, Py_ssize_t num_rewritten) {
    const Py_ssize_t size = PyTuple_Size(items);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *const x = PyTuple_GetItem(items, i);
        if (s->num + 2 > s->room) return 0;
        if (x == Py_None) {
            s->words[s->num++] = -1;
        } else if (PyType_IsSubtype(Py_TYPE(x), s->type)) {
            if (!kv8_py_sign_tensor(s, x, i >= num_rewritten)) return 0;
        } else if (PyFloat_CheckExact(x)) {
            const double value = PyFloat_AsDouble(x);
            s->words[s->num++] = -2;
            memcpy(&s->words[s->num++], &value, sizeof value);
        } else if (PyTuple_CheckExact(x)) {
            s->words[s->num++] = -3 - PyTuple_Size(x);
            if (!kv8_py_sign_items(s, x, 0)) return 0;
        } else {
            return 0;
        }
    }
    return 1;
}

/* What two calls have in common whose arguments are the same: of each tensor dtype, device, shape and
 * strides, and from argument `num_rewritten` on the address; numbers as they are. `arguments` is the
 * address of a tuple of tensors of `type` on GPUs, floats, None, and tuples of these. Returns the
 * number of words, or 0 where there is anything else in it, or no room. */
static int32_t kv8_py_sign(const kv8_py_dl_calls *calls, uintptr_t type, uintptr_t arguments,
                           int32_t num_rewritten, int64_t *out, int32_t room) {
    kv8_py_signature s = {calls, (PyTypeObject *)type, out, 0, room};
    const PyGILState_STATE state = PyGILState_Ensure();
    const int known = kv8_py_sign_items(&s, (PyObject *)arguments, num_rewritten);
    PyGILState_Release(state);
    return known ? s.num : 0;
}
