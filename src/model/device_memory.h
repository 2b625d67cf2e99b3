/* device_memory.h - the memory that an open model takes of a GPU, in one piece: counted first, by
 * part, then taken, then handed out by the same calls in the same order. Private to the room.
 *
 * What does not fit is known before the first byte of a weight is read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_MEMORY_H
#define KV8_DEVICE_MEMORY_H

#include "base_impl.h"

#include <kv8/device.h>

typedef enum kv8_memory_part {
    KV8_PART_DENSE = 0,   /* embedding, attention, norms, router, head */
    KV8_PART_EXPERTS,     /* as the kernels read them */
    KV8_PART_ACTIVATIONS, /* of a step */
    KV8_PART_LOGITS,
    KV8_PART_WORKSPACES, /* of kernels: counted here, taken by whoever launches them */
    KV8_NUM_PARTS
} kv8_memory_part;

/* All zero but `device`: counts. After kv8_device_memory_allocate: hands out. */
typedef struct kv8_device_memory {
    kv8_device *device;                /* borrowed */
    uint8_t *base;                     /* NULL while counting */
    size_t used, parts[KV8_NUM_PARTS]; /* used: without workspaces */
    size_t passing;                    /* beside it, while weights are loaded */
} kv8_device_memory;

/* The next `bytes`, aligned to 256; NULL while counting. */
void *kv8_device_memory_take(kv8_device_memory *memory, kv8_memory_part part, size_t bytes);
/* Counts bytes of a part that others take for themselves. */
void kv8_device_memory_count(kv8_device_memory *memory, kv8_memory_part part, size_t bytes);
/* Takes what was counted for it; KV8_ERR_NO_MEMORY with the sum by part where the GPU has less than
 * that, what others take, and what passes. */
kv8_status kv8_device_memory_allocate(kv8_device_memory *memory);
void kv8_device_memory_release(kv8_device_memory *memory);

#endif
