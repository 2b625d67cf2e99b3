/* testing.h - what every test needs: cmocka, a seeded random source, guard-page buffers, relative
 * error that no NaN passes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TESTING_H
#define KV8_TESTING_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include <kv8/status.h>

/* Fails with the library's own message. */
#define assert_ok(expr)                                                                    \
    do {                                                                                   \
        const kv8_status status_ = (expr);                                                 \
        if (status_ != KV8_OK)                                                             \
            fail_msg("%s: %s: %s", #expr, kv8_status_name(status_), kv8_status_message()); \
    } while (0)
/* The call must fail with this status and a message that contains `part`. */
#define assert_refused(expr, wanted, part)                                                    \
    do {                                                                                      \
        const kv8_status status_ = (expr);                                                    \
        if (status_ != (wanted))                                                              \
            fail_msg("%s: got %s, wanted %s", #expr, kv8_status_name(status_),                \
                     kv8_status_name(wanted));                                                \
        if (strstr(kv8_status_message(), (part)) == NULL)                                     \
            fail_msg("%s: \"%s\" does not name \"%s\"", #expr, kv8_status_message(), (part)); \
    } while (0)

/* KV8_TEST_SHORT in the environment: under an emulator or a sanitizer, which look at code rather
 * than at values, a part of the cases that differ in values alone will do. */
static inline bool test_is_short(void) {
    return getenv("KV8_TEST_SHORT") != NULL;
}
/* How many of `total` drawn cases to walk. */
static inline uint64_t test_cases(uint64_t total) {
    return test_is_short() ? total / 4 : total;
}

/* splitmix64: the same numbers on every machine. */
typedef struct test_rng {
    uint64_t state;
} test_rng;
static inline uint64_t rng_u64(test_rng *rng) {
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
/* Uniform in [0, 1). */
static inline double rng_unit(test_rng *rng) {
    return (double)(rng_u64(rng) >> 11) * 0x1p-53;
}
/* Uniform in [low, high]. */
static inline int32_t rng_range(test_rng *rng, int32_t low, int32_t high) {
    return low + (int32_t)(rng_u64(rng) % (uint64_t)(high - low + 1));
}
/* Standard normal (Box-Muller). */
static inline float rng_normal(test_rng *rng) {
    const double u = 1.0 - rng_unit(rng), v = rng_unit(rng);
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

/* A buffer whose last byte is followed by an unreadable page: one element too far crashes. The
 * bytes start as 0xff (NaN in every float format). */
typedef struct guarded {
    void *data;
    void *base;
    size_t mapped;
} guarded;
static inline guarded guarded_alloc(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t room = (bytes + page - 1) / page * page;
    uint8_t *const base =
        mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) abort();
    memset(base, 0xff, room);
    if (mprotect(base + room, page, PROT_NONE) != 0) abort();
    return (guarded){.data = base + room - bytes, .base = base, .mapped = room + page};
}
static inline void guarded_free(guarded buffer) {
    munmap(buffer.base, buffer.mapped);
}

/* ||out - ref|| / ||ref||. Infinities and NaN must sit in the same places (else the result is
 * NaN, which no bound `error <= x` accepts) and then count nothing; a zero reference wants zero. */
static inline double relative_error(const float *out, const double *ref, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        const double o = (double)out[i];
        if (isnan(ref[i]) || isnan(o)) {
            if (isnan(ref[i]) && isnan(o)) continue;
            return (double)NAN;
        }
        if (isinf(ref[i]) || isinf(o)) {
            if (ref[i] == o) continue;
            return (double)NAN;
        }
        difference += (o - ref[i]) * (o - ref[i]);
        norm += ref[i] * ref[i];
    }
    if (norm == 0) return difference == 0 ? 0 : (double)INFINITY;
    return sqrt(difference / norm);
}

/* An allocator that fails at the nth call (counting from 0) and counts what is still held. */
typedef struct failing_heap {
    int64_t fail_at; /* -1 = never */
    int64_t calls;
    int64_t live;
} failing_heap;
static inline void *failing_alloc(void *cookie, size_t size, size_t alignment) {
    failing_heap *const heap = cookie;
    if (heap->calls++ == heap->fail_at) return NULL;
    void *const ptr = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (ptr != NULL) heap->live++;
    return ptr;
}
static inline void failing_release(void *cookie, void *ptr, size_t size) {
    (void)size;
    ((failing_heap *)cookie)->live--;
    free(ptr);
}

#endif
