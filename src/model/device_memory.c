/* device_memory.c - counts a model's memory on a GPU, takes it, hands it out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_memory.h"

#include <string.h>

enum { ALIGNMENT = 256 };

void *kv8_device_memory_take(kv8_device_memory *memory, kv8_memory_part part, size_t bytes) {
    const size_t at = memory->used, rounded = kv8_round_up(bytes, ALIGNMENT);
    memory->used += rounded;
    memory->parts[part] += rounded;
    return memory->base == NULL ? NULL : memory->base + at;
}

void kv8_device_memory_count(kv8_device_memory *memory, kv8_memory_part part, size_t bytes) {
    memory->parts[part] += bytes;
}

static kv8_status fail_full(const kv8_device_memory *memory, uint64_t available) {
    const double gb = 1e-9;
    const size_t *const p = memory->parts;
    return kv8_fail(KV8_ERR_NO_MEMORY,
                    "the model takes %.2f GB on the GPU (dense weights %.2f, experts %.2f, "
                    "activations of a step %.2f, logits %.2f, workspaces %.2f) and %.2f while it "
                    "is loaded, before any KV cache; %s has %.2f GB free, and experts in host "
                    "memory are not offered",
                    (double)(memory->used + p[KV8_PART_WORKSPACES]) * gb,
                    (double)p[KV8_PART_DENSE] * gb, (double)p[KV8_PART_EXPERTS] * gb,
                    (double)p[KV8_PART_ACTIVATIONS] * gb, (double)p[KV8_PART_LOGITS] * gb,
                    (double)p[KV8_PART_WORKSPACES] * gb, (double)memory->passing * gb,
                    kv8_device_get_info(memory->device)->name, (double)available * gb);
}

kv8_status kv8_device_memory_allocate(kv8_device_memory *memory) {
    uint64_t available = 0;
    void *base = NULL;
    KV8_TRY(kv8_device_available(memory->device, &available));
    if ((uint64_t)memory->used + memory->parts[KV8_PART_WORKSPACES] + memory->passing > available)
        return fail_full(memory, available);
    KV8_TRY(kv8_device_alloc(memory->device, memory->used, &base));
    memory->base = base;
    memory->used = 0;
    memset(memory->parts, 0, sizeof memory->parts);
    return KV8_OK;
}

void kv8_device_memory_release(kv8_device_memory *memory) {
    kv8_device_free(memory->device, memory->base);
    *memory = (kv8_device_memory){.device = memory->device};
}
