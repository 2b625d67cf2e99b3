/* threads.c - the pool of threads, on the pthreadpool library.
 *
 * pthreadpool synchronises by futex and its own atomics, which ThreadSanitizer cannot see in a
 * library built without it; the annotations below tell it of the two edges that the library
 * guarantees: fork before every task, every task before the join.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_getaffinity */
#include <pthreadpool.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base_impl.h"

#if defined(__SANITIZE_THREAD__)
#define KV8_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KV8_TSAN 1
#endif
#endif
#ifdef KV8_TSAN
void __tsan_acquire(void *address);
void __tsan_release(void *address);
#define HAPPENS_BEFORE(address) __tsan_release(address)
#define HAPPENS_AFTER(address)  __tsan_acquire(address)
#else
#define HAPPENS_BEFORE(address) ((void)(address))
#define HAPPENS_AFTER(address)  ((void)(address))
#endif

struct kv8_threads {
    pthreadpool_t pool;
    int32_t count;
};

int32_t kv8_machine_num_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        const int count = CPU_COUNT(&set);
        if (count > 0) return count;
    }
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

kv8_status kv8_threads_create(kv8_threads **out, int32_t num_threads) {
    *out = NULL;
    enum { MAX_THREADS = 1024 };
    if (num_threads < 0 || num_threads > MAX_THREADS)
        return kv8_fail(KV8_ERR_INVALID, "number of threads is %d, must be 0 (all) to %d",
                        num_threads, (int)MAX_THREADS);
    kv8_threads *const threads = calloc(1, sizeof *threads);
    if (threads == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "no memory for a thread pool");
    threads->count = num_threads > 0 ? num_threads : kv8_machine_num_cpus();
    if (threads->count > 1) {
        threads->pool = pthreadpool_create((size_t)threads->count);
        if (threads->pool == NULL) {
            free(threads);
            return kv8_fail(KV8_ERR_NO_MEMORY, "cannot start %d threads", num_threads);
        }
    }
    *out = threads;
    return KV8_OK;
}

void kv8_threads_destroy(kv8_threads *threads) {
    if (threads == NULL) return;
    if (threads->pool != NULL) pthreadpool_destroy(threads->pool);
    free(threads);
}

int32_t kv8_threads_count(const kv8_threads *threads) {
    return threads == NULL ? 1 : threads->count;
}

typedef struct run_context {
    kv8_task task;
    void *cookie;
    size_t count;
    _Atomic size_t next;
} run_context;

/* One slot per thread; slots draw indices until none is left, so a slow thread delays nobody. */
static void run_slot(void *opaque, size_t slot) {
    run_context *const context = opaque;
    HAPPENS_AFTER(context);
    for (;;) {
        const size_t index = atomic_fetch_add_explicit(&context->next, 1, memory_order_relaxed);
        if (index >= context->count) break;
        context->task(context->cookie, index, (int32_t)slot);
    }
    HAPPENS_BEFORE(context);
}

void kv8_threads_run(kv8_threads *threads, size_t count, kv8_task task, void *cookie) {
    if (threads == NULL || threads->pool == NULL || count <= 1) {
        for (size_t i = 0; i < count; i++) task(cookie, i, 0);
        return;
    }
    run_context context = {.task = task, .cookie = cookie, .count = count};
    /* By default idle workers spin for the next call, up to milliseconds: on processors that others
     * want too, that is time taken from whoever has work (at a load of three per processor,
     * decoding fell to a fifth). Asleep they cost a wake-up of microseconds a call. */
    HAPPENS_BEFORE(&context);
    pthreadpool_parallelize_1d(threads->pool, run_slot, &context, (size_t)threads->count,
                               PTHREADPOOL_FLAG_YIELD_WORKERS);
    HAPPENS_AFTER(&context);
}

uint64_t kv8_time_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
