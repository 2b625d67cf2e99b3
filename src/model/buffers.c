/* buffers.c - memory that a model takes once and gives back at once.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

kv8_status kv8_buffers_take(kv8_buffers *buffers, int64_t count, size_t size, const char *what,
                            void **out) {
    if (buffers->num_held == KV8_MAX_BUFFERS)
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: more than %d buffers", what, (int)KV8_MAX_BUFFERS);
    void *ptr = NULL;
    KV8_TRY(kv8_alloc(buffers->allocator, (size_t)count, size, what, &ptr));
    const int32_t i = buffers->num_held++;
    buffers->held[i].ptr = ptr;
    buffers->held[i].count = (size_t)count;
    buffers->held[i].size = size;
    *out = ptr;
    return KV8_OK;
}

kv8_status kv8_buffers_take_floats(kv8_buffers *buffers, int64_t rows, int64_t width, float **out) {
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(buffers, rows * width, sizeof(float), "step activations", &memory));
    *out = memory;
    return KV8_OK;
}

kv8_status kv8_buffers_take_ints(kv8_buffers *buffers, int64_t count, int32_t **out) {
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(buffers, count, sizeof(int32_t), "step indices", &memory));
    *out = memory;
    return KV8_OK;
}

void kv8_buffers_release(kv8_buffers *buffers) {
    for (int32_t i = 0; i < buffers->num_held; i++)
        kv8_release(buffers->allocator, buffers->held[i].ptr, buffers->held[i].count,
                    buffers->held[i].size);
    *buffers = (kv8_buffers){.allocator = buffers->allocator};
}
