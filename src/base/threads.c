/* threads.c - the pool of threads: workers asleep on a futex until a run, the caller one of them.
 *
 * A run is a round: the caller writes down the task, moves `round` on and wakes everybody; all draw
 * indices until none is left, so a slow thread delays nobody; the last worker to find none wakes
 * the caller. Idle workers never spin: on processors that others want too, that is time taken from
 * whoever has work (at a load of three per processor, decoding fell to a fifth). The caller spins
 * for a moment, because workers end within microseconds of each other.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_getaffinity, syscall, sigfillset */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base_impl.h"

typedef struct worker {
    kv8_threads *pool;
    int32_t thread_idx;
    pthread_t thread;
} worker;

struct kv8_threads {
    int32_t count;           /* with the caller */
    int32_t num_started;     /* workers that exist */
    worker *workers;         /* [count - 1] */
    pthread_mutex_t one_run; /* runs of several callers come one after the other */
    kv8_task task;           /* of this round; NULL = leave */
    void *cookie;
    size_t num_indices;
    _Alignas(KV8_ALIGNMENT) _Atomic uint32_t round;
    _Alignas(KV8_ALIGNMENT) _Atomic uint32_t busy; /* workers still in this round */
    _Alignas(KV8_ALIGNMENT) _Atomic size_t next_index;
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

/* --- starting --- */

int kv8_thread_start(pthread_t *thread, void *(*body)(void *), void *cookie) {
    static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t sent, before;
    sigfillset(&sent);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&sent, faults[i]);
    pthread_sigmask(SIG_SETMASK, &sent, &before); /* a thread begins with its maker's mask */
    const int error = pthread_create(thread, NULL, body, cookie);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* --- sleeping --- */

/* Returns when the word is no longer `value`, or earlier. */
static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int32_t num_threads) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, num_threads, NULL, NULL, 0);
}

static void spin_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The caller's wait for the workers. */
static void wait_until_idle(kv8_threads *pool) {
    enum { SPINS = 4096 }; /* some 100 us: a pause takes 40 to 140 cycles */
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->busy, memory_order_acquire) == 0) return;
        spin_once();
    }
    for (uint32_t busy; (busy = atomic_load(&pool->busy)) != 0;) futex_wait(&pool->busy, busy);
}

/* --- rounds --- */

static void begin_round(kv8_threads *pool, kv8_task task, void *cookie, size_t num_indices) {
    pool->task = task;
    pool->cookie = cookie;
    pool->num_indices = num_indices;
    atomic_store_explicit(&pool->next_index, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->busy, (uint32_t)pool->num_started, memory_order_relaxed);
    atomic_fetch_add(&pool->round, 1);
    futex_wake(&pool->round, pool->num_started);
}

static void run_indices(kv8_threads *pool, int32_t thread_idx) {
    for (;;) {
        const size_t index = atomic_fetch_add_explicit(&pool->next_index, 1, memory_order_relaxed);
        if (index >= pool->num_indices) return;
        pool->task(pool->cookie, index, thread_idx);
    }
}

static void *work(void *opaque) {
    const worker *const self = opaque;
    kv8_threads *const pool = self->pool;
    for (uint32_t last = 0;; last++) { /* no round begins before all have ended the one before */
        while (atomic_load(&pool->round) == last) futex_wait(&pool->round, last);
        if (pool->task == NULL) return NULL;
        run_indices(pool, self->thread_idx);
        if (atomic_fetch_sub(&pool->busy, 1) == 1) futex_wake(&pool->busy, 1);
    }
}

/* --- life --- */

/* How many workers exist stands in num_started, on failure too. */
static kv8_status start_workers(kv8_threads *pool) {
    for (int32_t i = 0; i < pool->count - 1; i++) {
        pool->workers[i] = (worker){.pool = pool, .thread_idx = i + 1};
        const int error = kv8_thread_start(&pool->workers[i].thread, work, &pool->workers[i]);
        if (error != 0)
            return kv8_fail(KV8_ERR_NO_MEMORY, "cannot start thread %d of %d: %s", i + 2,
                            pool->count, strerror(error));
        pool->num_started++;
    }
    return KV8_OK;
}

kv8_status kv8_threads_create(kv8_threads **out, int32_t num_threads) {
    KV8_REQUIRE(out);
    *out = NULL;
    enum { MAX_THREADS = 1024 };
    if (num_threads < 0 || num_threads > MAX_THREADS)
        return kv8_fail(KV8_ERR_INVALID, "number of threads is %d, must be 0 (all) to %d",
                        num_threads, (int)MAX_THREADS);
    const int32_t count = num_threads > 0 ? num_threads : kv8_machine_num_cpus();
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_threads), "a thread pool", &memory));
    kv8_threads *const pool = memory;
    pool->count = count;
    pthread_mutex_init(&pool->one_run, NULL);
    kv8_status status =
        kv8_alloc(NULL, (size_t)count - 1, sizeof *pool->workers, "a thread pool", &memory);
    pool->workers = memory;
    if (status == KV8_OK) status = start_workers(pool);
    if (status != KV8_OK) {
        kv8_threads_destroy(pool);
        return status;
    }
    *out = pool;
    return KV8_OK;
}

void kv8_threads_destroy(kv8_threads *threads) {
    if (threads == NULL) return;
    begin_round(threads, NULL, NULL, 0);
    for (int32_t i = 0; i < threads->num_started; i++)
        pthread_join(threads->workers[i].thread, NULL);
    kv8_release(NULL, threads->workers, (size_t)threads->count - 1, sizeof *threads->workers);
    pthread_mutex_destroy(&threads->one_run);
    kv8_release(NULL, threads, 1, sizeof *threads);
}

int32_t kv8_threads_count(const kv8_threads *threads) {
    return threads == NULL ? 1 : threads->count;
}

void kv8_threads_run(kv8_threads *threads, size_t count, kv8_task task, void *cookie) {
    if (threads == NULL || threads->count == 1 || count <= 1) {
        for (size_t i = 0; i < count; i++) task(cookie, i, 0);
        return;
    }
    pthread_mutex_lock(&threads->one_run);
    begin_round(threads, task, cookie, count);
    run_indices(threads, 0);
    wait_until_idle(threads);
    pthread_mutex_unlock(&threads->one_run);
}

uint64_t kv8_time_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
