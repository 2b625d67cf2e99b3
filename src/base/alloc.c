/* alloc.c - zeroed, aligned memory from the caller's allocator or the heap.
 *
 * Large heap blocks ask for huge pages: a decode walks its cache linearly, and 4 KiB pages cost
 * it a fifth of the bandwidth.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* madvise */
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <string.h>
#include <sys/mman.h>

#include "base_impl.h"

enum { HUGE_PAGE = 2 << 20 };

/* Fresh zero pages straight from the system: untouched ones cost nothing. */
static void *map_zeroed(size_t size) {
    const size_t padded = size + HUGE_PAGE;
    uint8_t *const base =
        mmap(NULL, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    uint8_t *const aligned = (uint8_t *)kv8_round_up((uintptr_t)base, HUGE_PAGE);
    const size_t before = (size_t)(aligned - base);
    const size_t length = kv8_round_up(size, 4096);
    if (before > 0) munmap(base, before);
    if (padded - before > length) munmap(aligned + length, padded - before - length);
#ifdef MADV_HUGEPAGE
    madvise(aligned, length, MADV_HUGEPAGE); /* advice: a refusal changes nothing but speed */
#endif
    return aligned;
}

kv8_status kv8_alloc(const kv8_allocator *allocator, size_t count, size_t size, const char *what,
                     void **out) {
    *out = NULL;
    size_t bytes = 0;
    if (!kv8_mul_size(count, size, &bytes) || bytes > SIZE_MAX / 2)
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: %zu x %zu bytes overflow the address space", what,
                        count, size);
    if (bytes == 0) bytes = 1;
    void *ptr = NULL;
    if (allocator != NULL) {
        ptr = allocator->alloc(allocator->cookie, bytes, KV8_ALIGNMENT);
        if (ptr != NULL) memset(ptr, 0, bytes);
    } else if (bytes >= HUGE_PAGE) {
        ptr = map_zeroed(bytes);
    } else {
        ptr = aligned_alloc(KV8_ALIGNMENT, kv8_round_up(bytes, KV8_ALIGNMENT));
        if (ptr != NULL) memset(ptr, 0, bytes);
    }
    if (ptr == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for %zu bytes", what, bytes);
    *out = ptr;
    return KV8_OK;
}

void kv8_release(const kv8_allocator *allocator, void *ptr, size_t count, size_t size) {
    if (ptr == NULL) return;
    size_t bytes = count * size;
    if (bytes == 0) bytes = 1;
    if (allocator != NULL) {
        allocator->release(allocator->cookie, ptr, bytes);
    } else if (bytes >= HUGE_PAGE) {
        munmap(ptr, kv8_round_up(bytes, 4096));
    } else {
        free(ptr);
    }
}

void kv8_free(void *ptr) {
    free(ptr);
}

void kv8_heap_trim(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
