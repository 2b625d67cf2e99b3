/* test_base.c - sizes, allocation, files and threads of the base room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "base_impl.h"
#include "testing.h"

static void sizes_overflow_is_caught(void **state) {
    (void)state;
    size_t out = 7;
    assert_false(kv8_mul_size(SIZE_MAX / 2, 3, &out));
    assert_int_equal(out, 7);
    assert_true(kv8_mul_size(6, 7, &out));
    assert_int_equal(out, 42);
    void *ptr = &out;
    assert_int_equal(kv8_alloc(NULL, SIZE_MAX, 2, "test", &ptr), KV8_ERR_NO_MEMORY);
    assert_null(ptr);
}

static void alloc_is_zeroed_and_aligned(void **state) {
    (void)state;
    const size_t sizes[] = {0, 1, 63, 4096, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        void *ptr = NULL;
        assert_int_equal(kv8_alloc(NULL, sizes[i], 1, "test", &ptr), KV8_OK);
        assert_int_equal((uintptr_t)ptr % KV8_ALIGNMENT, 0);
        for (size_t b = 0; b < sizes[i]; b++) assert_int_equal(((uint8_t *)ptr)[b], 0);
        memset(ptr, 0xff, sizes[i]);
        kv8_release(NULL, ptr, sizes[i], 1);
    }
}

typedef struct visits {
    int32_t count[1000];
    int32_t threads;
} visits;

static void visit(void *cookie, size_t index, int32_t thread_idx) {
    visits *const v = cookie;
    assert_in_range(thread_idx, 0, v->threads - 1);
    v->count[index]++;
}

static void threads_visit_every_index_once(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 3; n++) {
        kv8_threads *threads = NULL;
        assert_int_equal(kv8_threads_create(&threads, n), KV8_OK);
        assert_int_equal(kv8_threads_count(threads), n);
        for (size_t count = 0; count < 1000; count += 111) {
            visits v = {.threads = n};
            kv8_threads_run(threads, count, visit, &v);
            for (size_t i = 0; i < 1000; i++) assert_int_equal(v.count[i], i < count);
        }
        kv8_threads_destroy(threads);
    }
    kv8_threads *none = (kv8_threads *)1;
    assert_int_equal(kv8_threads_create(&none, -1), KV8_ERR_INVALID);
    assert_null(none);
}

/* --- where the system refuses a thread --- */

/* The linker puts __wrap_pthread_create in the place of pthread_create (--wrap). */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *cookie);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *cookie);
static int32_t threads_left = INT32_MAX;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *cookie) {
    return threads_left-- > 0 ? __real_pthread_create(thread, attributes, body, cookie) : EAGAIN;
}

static void refused_threads_are_an_error(void **state) {
    (void)state;
    for (int32_t left = 0; left < 4; left++) {
        char part[64];
        snprintf(part, sizeof part, "cannot start thread %d of 5: ", left + 2);
        threads_left = left;
        kv8_threads *threads = (kv8_threads *)1;
        assert_refused(kv8_threads_create(&threads, 5), KV8_ERR_NO_MEMORY, part);
        assert_null(threads);
    }
    threads_left = 4;
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 5));
    visits v = {.threads = 5};
    kv8_threads_run(threads, 1000, visit, &v);
    for (size_t i = 0; i < 1000; i++) assert_int_equal(v.count[i], 1);
    kv8_threads_destroy(threads);
    threads_left = INT32_MAX;
}

/* --- signals --- */

typedef struct masks {
    sigset_t of[2];
    atomic_int num_begun;
} masks;

/* Both indices are under way at once, so each has a thread of its own. */
static void look_at_mask(void *cookie, size_t index, int32_t thread_idx) {
    (void)index;
    masks *const m = cookie;
    pthread_sigmask(SIG_SETMASK, NULL, &m->of[thread_idx]);
    atomic_fetch_add(&m->num_begun, 1);
    while (atomic_load(&m->num_begun) < 2) sched_yield();
}

static void signals_of_the_process_are_for_its_own_threads(void **state) {
    (void)state;
    const int sent[] = {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1, SIGRTMIN};
    const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
    kv8_threads *threads = NULL;
    masks m = {.num_begun = 0};
    assert_ok(kv8_threads_create(&threads, 2));
    kv8_threads_run(threads, 2, look_at_mask, &m);
    kv8_threads_destroy(threads);
    for (size_t i = 0; i < sizeof sent / sizeof *sent; i++) {
        assert_int_equal(sigismember(&m.of[0], sent[i]), 0);
        assert_int_equal(sigismember(&m.of[1], sent[i]), 1);
    }
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        assert_int_equal(sigismember(&m.of[1], faults[i]), 0);
}

/* --- several callers of one pool --- */

enum { CALLERS = 4 };
static uint64_t rounds(void) {
    return test_cases(2000);
}

typedef struct caller {
    kv8_threads *threads;
    visits visits;
} caller;

static void *call_often(void *opaque) {
    caller *const self = opaque;
    for (uint64_t i = 0; i < rounds(); i++) kv8_threads_run(self->threads, 7, visit, &self->visits);
    return NULL;
}

static void callers_of_one_pool_take_turns(void **state) {
    (void)state;
    static caller callers[CALLERS];
    pthread_t ids[CALLERS];
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 3));
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (caller){.threads = threads, .visits.threads = 3};
        assert_int_equal(pthread_create(&ids[i], NULL, call_often, &callers[i]), 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(ids[i], NULL);
        for (size_t k = 0; k < 7; k++) assert_int_equal(callers[i].visits.count[k], rounds());
    }
    kv8_threads_destroy(threads);
}

static void writer_commits_whole_or_nothing(void **state) {
    (void)state;
    char path[] = "/tmp/kv8_test_base_XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    kv8_file_writer writer;
    assert_int_equal(kv8_file_writer_open(&writer, path), KV8_OK);
    assert_int_equal(kv8_file_writer_write(&writer, "torn", 4), KV8_OK);
    kv8_file_writer_abort(&writer);
    kv8_file_map map;
    assert_int_equal(kv8_file_map_open(&map, path), KV8_ERR_CORRUPT); /* still empty */
    assert_int_equal(kv8_file_writer_open(&writer, path), KV8_OK);
    assert_int_equal(kv8_file_writer_write(&writer, "whole", 5), KV8_OK);
    assert_int_equal(kv8_file_writer_commit(&writer), KV8_OK);
    assert_int_equal(kv8_file_map_open(&map, path), KV8_OK);
    assert_int_equal(map.size, 5);
    assert_memory_equal(map.data, "whole", 5);
    kv8_file_map_close(&map);
    char *data = NULL;
    size_t size = 0;
    assert_int_equal(kv8_file_read(path, 4, &data, &size), KV8_ERR_INVALID);
    assert_non_null(strstr(kv8_status_message(), "limit is 4"));
    unlink(path);
    assert_int_equal(kv8_file_map_open(&map, path), KV8_ERR_NOT_FOUND);
}

static void a_full_disk_leaves_nothing_behind(void **state) {
    (void)state;
    /* /dev/full accepts the open and refuses the bytes, as a full disk does. */
    kv8_file_writer writer = {.file = fopen("/dev/full", "wb"),
                              .path = strdup("/tmp/never"),
                              .temporary = strdup("/tmp/kv8_never_there")};
    assert_non_null(writer.file);
    (void)!kv8_file_writer_write(&writer, "x", 1);
    assert_int_equal(kv8_file_writer_commit(&writer), KV8_ERR_IO);
    assert_non_null(strstr(kv8_status_message(), "No space left"));
    kv8_file_writer_abort(&writer);
    assert_int_equal(access("/tmp/never", F_OK), -1);
}

static void messages_stay_one_line(void **state) {
    (void)state;
    assert_int_equal(kv8_fail(KV8_ERR_IO, "a\nb\x1b[31m"), KV8_ERR_IO);
    assert_string_equal(kv8_status_message(), "a?b?[31m");
    assert_int_equal(kv8_fail_within(KV8_ERR_IO, "file %d", 3), KV8_ERR_IO);
    assert_string_equal(kv8_status_message(), "file 3: a?b?[31m");
}

/* The compiler's own reading of CPUID is the judge. */
static void rungs_are_what_the_processor_has(void **state) {
    (void)state;
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_SCALAR), 1);
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl");
    const int bf16 = avx512 && __builtin_cpu_supports("avx512vbmi") &&
                     __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512bf16");
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_AVX2), avx2);
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_AVX512), avx512);
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_AVX512_BF16), bf16);
    if (!bf16) assert_int_equal(kv8_machine_has_isa(KV8_ISA_AMX), 0);
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_NEON), 0);
    assert_int_equal(kv8_machine_bf16_dots_pay(), !__builtin_cpu_is("intel"));
#elif defined(__aarch64__)
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_NEON), 1);
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_AVX2), 0);
#endif
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_BEST), 0);
    assert_int_equal(kv8_machine_has_isa(KV8_ISA_COUNT), 0);
}

/* A named pipe would be waited for until somebody writes. */
static void pipes_and_directories_are_no_files(void **state) {
    (void)state;
    char path[] = "/tmp/kv8_test_pipe_XXXXXX";
    assert_non_null(mkdtemp(path));
    char pipe_path[64], *data = NULL;
    size_t size = 0;
    snprintf(pipe_path, sizeof pipe_path, "%s/pipe", path);
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    kv8_file_map map;
    assert_refused(kv8_file_map_open(&map, pipe_path), KV8_ERR_INVALID, "not a regular file");
    assert_refused(kv8_file_read(pipe_path, 10, &data, &size), KV8_ERR_INVALID,
                   "not a regular file");
    assert_refused(kv8_file_map_open(&map, path), KV8_ERR_INVALID, "not a regular file");
    unlink(pipe_path);
    rmdir(path);
}

static void isa_environment_is_honoured_or_refused(void **state) {
    (void)state;
    kv8_isa isa = KV8_ISA_BEST;
    setenv("KV8_ISA", "scalar", 1);
    assert_int_equal(kv8_machine_isa(&isa), KV8_OK);
    assert_int_equal(isa, KV8_ISA_SCALAR);
    setenv("KV8_ISA", "sse9", 1);
    assert_int_equal(kv8_machine_isa(&isa), KV8_ERR_INVALID);
#if defined(__x86_64__)
    setenv("KV8_ISA", "neon", 1);
    assert_int_equal(kv8_machine_isa(&isa), KV8_ERR_UNSUPPORTED);
#endif
    unsetenv("KV8_ISA");
}

static void ceilings_are_measured_per_rung(void **state) {
    (void)state;
    kv8_isa best = KV8_ISA_BEST;
    assert_ok(kv8_machine_isa(&best));
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        kv8_ceilings c = {0};
        if (!kv8_machine_has_isa((kv8_isa)isa)) {
            assert_refused(kv8_machine_measure_ceilings(NULL, (kv8_isa)isa, &c),
                           KV8_ERR_UNSUPPORTED, kv8_isa_name((kv8_isa)isa));
            continue;
        }
        if (test_is_short() && (kv8_isa)isa != best) continue; /* each reads 8 GB */
        assert_ok(kv8_machine_measure_ceilings(NULL, (kv8_isa)isa, &c));
        /* No machine of this century is below, none of this decade above. */
        assert_true(c.read_gb_s > 0.05 && c.read_gb_s < 2000);
        assert_true(c.f32_gmac_s > 0.01 && c.f32_gmac_s < 2000);
        const bool has_dots =
            isa == KV8_ISA_AVX512_BF16 || isa == KV8_ISA_AMX || isa == KV8_ISA_NEON_BF16;
        assert_int_equal(c.bf16_gmac_s > 0, has_dots);
        assert_true(c.bf16_gmac_s < 1e6);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_overflow_is_caught),
        cmocka_unit_test(alloc_is_zeroed_and_aligned),
        cmocka_unit_test(threads_visit_every_index_once),
        cmocka_unit_test(refused_threads_are_an_error),
        cmocka_unit_test(signals_of_the_process_are_for_its_own_threads),
        cmocka_unit_test(callers_of_one_pool_take_turns),
        cmocka_unit_test(pipes_and_directories_are_no_files),
        cmocka_unit_test(rungs_are_what_the_processor_has),
        cmocka_unit_test(writer_commits_whole_or_nothing),
        cmocka_unit_test(a_full_disk_leaves_nothing_behind),
        cmocka_unit_test(messages_stay_one_line),
        cmocka_unit_test(isa_environment_is_honoured_or_refused),
        cmocka_unit_test(ceilings_are_measured_per_rung),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
