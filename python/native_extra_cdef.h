/* native_extra_cdef.h - what Python sees of native_extra.h, and the callbacks that are Python's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
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
uintptr_t kv8_py_dlpack(const kv8_py_dl_tensor *tensor, uintptr_t owner);

kv8_status kv8_py_attend_again(const kv8_attention_device_plan *plan, kv8_stream *stream,
                               kv8_attention_args *args, void *workspace, uintptr_t q, uintptr_t o,
                               uintptr_t lse, int prepare);

typedef struct kv8_py_dl_calls kv8_py_dl_calls;
const kv8_py_dl_calls *kv8_py_dl_calls_of(uintptr_t capsule);
int32_t kv8_py_sign(const kv8_py_dl_calls *calls, uintptr_t type, uintptr_t arguments,
                    int32_t num_rewritten, int64_t *out, int32_t room);

extern "Python" int kv8_py_progress(void *cookie, const char *what, uint64_t done, uint64_t total);
extern "Python" void kv8_py_logits(void *cookie, int32_t first, int32_t num_rows,
                                   const float *logits);
