/* native_extra.h - what the extension holds beside libkv8: tensors handed to other libraries by
 * DLPack, and a run that repeats in one call. Part of the source that build_native.py writes, after Python.h and the headers of kv8.
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
