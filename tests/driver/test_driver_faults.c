/* test_driver_faults.c - the device room on the stand-in driver: how the driver is found, what is
 * said when any of its calls fails, that nothing is left behind then, and the lives of captures and
 * graphs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ceiling_args.h"
#include "driver.h"
#include "stand_in.h"
#include "testing.h"

static const char read_kernel[] = "kv8_read_ceiling__sm80";
enum { UNKNOWN = 999, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, NO_DEVICE = 100 };

static int reset(void **state) {
    (void)state;
    stand_in_reset();
    return 0;
}
static int check_nothing_lives(void **state) {
    (void)state;
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
    return 0;
}

/* --- finding the driver: it is asked once a process, hence a process for each --- */

static void in_a_new_process(void (*check)(void)) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        check();
        _exit(strcmp(kv8_status_message(), "") == 0 ? 0 : 7);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}
/* Like assert_refused, for a child: ends it with the line that failed. */
#define REFUSED(call, status, words)                                             \
    do {                                                                         \
        if ((call) != (status) || strstr(kv8_status_message(), words) == NULL) { \
            fprintf(stderr, "%d: %s\n", __LINE__, kv8_status_message());         \
            _exit(1);                                                            \
        }                                                                        \
    } while (0)

static void the_driver_does_not_start(void) {
    int32_t count = 7;
    stand_in_fail("cuInit", 1, NO_DEVICE);
    REFUSED(kv8_device_count(&count), KV8_ERR_NOT_FOUND,
            "the NVIDIA driver does not start: no CUDA-capable device is detected");
    kv8_device *device = NULL; /* the verdict stays */
    REFUSED(kv8_device_open(&device, 0), KV8_ERR_NOT_FOUND, "does not start");
    _exit(count == 0 && stand_in_num_calls("cuInit") == 1 ? 0 : 1);
}
static void the_driver_has_no_words(void) {
    int32_t count = 7;
    stand_in_fail("cuInit", 1, 12345);
    REFUSED(kv8_device_count(&count), KV8_ERR_NOT_FOUND, "does not start: unknown error");
    _exit(0);
}
static void the_driver_shows_no_gpu(void) {
    int32_t count = 7;
    stand_in_set_gpus(NULL, 0);
    REFUSED(kv8_device_count(&count), KV8_ERR_NOT_FOUND, "the NVIDIA driver shows no GPU");
    kv8_device *device = NULL;
    REFUSED(kv8_device_open(&device, 0), KV8_ERR_NOT_FOUND, "the NVIDIA driver shows no GPU");
    _exit(count);
}
static void a_driver_that_fails_is_one_plain_line(void **state) {
    (void)state;
    in_a_new_process(the_driver_does_not_start);
    in_a_new_process(the_driver_has_no_words);
    in_a_new_process(the_driver_shows_no_gpu);
}

/* --- several GPUs --- */

static void each_gpu_says_what_it_is(void **state) {
    (void)state;
    const stand_in_gpu gpus[] = {{80, 108, (size_t)80 << 30}, {120, 170, (size_t)32 << 30}};
    stand_in_set_gpus(gpus, 2);
    int32_t count = 0;
    assert_ok(kv8_device_count(&count));
    assert_int_equal(count, 2);
    kv8_device *devices[2] = {NULL};
    for (int i = 0; i < 2; i++) {
        assert_ok(kv8_device_open(&devices[i], i));
        const kv8_device_info *const info = kv8_device_get_info(devices[i]);
        assert_int_equal(info->device_idx, i);
        assert_int_equal(info->sm_version, gpus[i].sm_version);
        assert_int_equal(info->num_sms, gpus[i].num_sms);
        assert_int_equal(info->memory_bytes, gpus[i].memory_bytes);
        assert_int_equal(info->shared_bytes_per_block, i == 0 ? 163 << 10 : 99 << 10);
    }
    kv8_stream *stream = NULL;
    kv8_kernel kernel;
    assert_ok(kv8_stream_create(&stream, devices[0]));
    assert_ptr_equal(kv8_stream_device(stream), devices[0]);
    assert_ok(kv8_kernel_get(&kernel, devices[1], read_kernel, sizeof(kv8_read_ceiling_args), 0));
    const kv8_read_ceiling_args args = {0};
    const kv8_launch launch = {.block = {32}};
    assert_refused(kv8_kernel_launch(&kernel, stream, &launch, &args), KV8_ERR_INVALID,
                   "the stream is another device's");
    kv8_stream_destroy(stream);
    for (int i = 0; i < 2; i++) kv8_device_close(devices[i]);
}

static void a_gpu_that_no_image_is_for_is_named(void **state) {
    (void)state;
    const stand_in_gpu old = {75, 40, (size_t)16 << 30};
    stand_in_set_gpus(&old, 1);
    kv8_device *device = NULL;
    kv8_kernel kernel;
    assert_ok(kv8_device_open(&device, 0));
    assert_false(kv8_kernel_exists(device, read_kernel));
    assert_refused(kv8_kernel_get(&kernel, device, read_kernel, 32, 0), KV8_ERR_UNSUPPORTED,
                   "is not for Stand-in 75 (sm_75)");
    kv8_device_close(device);
}

/* --- one module for all threads --- */

static void *get_kernel(void *device) {
    kv8_kernel kernel;
    return kv8_kernel_get(&kernel, device, read_kernel, sizeof(kv8_read_ceiling_args), 0) == KV8_OK
               ? device
               : NULL;
}
static void threads_load_a_module_once(void **state) {
    (void)state;
    enum { THREADS = 8 };
    kv8_device *device = NULL;
    pthread_t threads[THREADS];
    assert_ok(kv8_device_open(&device, 0));
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, get_kernel, device), 0);
    for (int i = 0; i < THREADS; i++) {
        void *got = NULL;
        pthread_join(threads[i], &got);
        assert_ptr_equal(got, device);
    }
    assert_int_equal(stand_in_num_calls("cuModuleLoadData"), 1);
    assert_int_equal(stand_in_get_live().modules, 1);
    kv8_device_close(device);
}

/* --- everything at once, for faults at every call --- */

typedef struct scene {
    kv8_device *device;
    kv8_stream *stream, *other;
    kv8_event *begin, *end;
    kv8_graph *graph;
    void *memory, *host;
    kv8_kernel kernel;
} scene;

/* Streams first: one may still capture, which forbids to free memory. */
static void clear(scene *s) {
    kv8_stream_destroy(s->other);
    kv8_stream_destroy(s->stream);
    kv8_graph_destroy(s->graph);
    kv8_event_destroy(s->begin);
    kv8_event_destroy(s->end);
    kv8_device_free(s->device, s->memory);
    kv8_device_free_host(s->device, s->host);
    kv8_device_close(s->device);
    *s = (scene){0};
}

static kv8_status open_all(scene *s) {
    KV8_TRY(kv8_device_open(&s->device, 0));
    KV8_TRY(kv8_stream_create(&s->stream, s->device));
    KV8_TRY(kv8_stream_create(&s->other, s->device));
    KV8_TRY(kv8_event_create(&s->begin, s->device));
    KV8_TRY(kv8_event_create(&s->end, s->device));
    KV8_TRY(kv8_device_alloc(s->device, 64, &s->memory));
    KV8_TRY(kv8_device_alloc_host(s->device, 64, &s->host));
    uint64_t available = 0;
    KV8_TRY(kv8_device_available(s->device, &available));
    assert_int_equal(available, kv8_device_get_info(s->device)->memory_bytes - 64);
    return kv8_kernel_get(&s->kernel, s->device, read_kernel, sizeof(kv8_read_ceiling_args), 1024);
}

static kv8_status record(scene *s) {
    const kv8_read_ceiling_args args = {.data = s->memory, .num_words = 4};
    const kv8_launch launch = {.grid = {2}, .block = {64}, .dynamic_bytes = 512};
    KV8_TRY(kv8_stream_fill(s->stream, s->memory, 7, 64));
    return kv8_kernel_launch(&s->kernel, s->stream, &launch, &args);
}
static kv8_status capture(scene *s) {
    KV8_TRY(kv8_stream_capture_begin(s->stream));
    const kv8_status status = record(s);
    const kv8_status ended = kv8_stream_capture_end(s->stream, &s->graph);
    return status != KV8_OK ? status : ended;
}

/* Fills memory by a graph and brings it back on another stream. */
static kv8_status work(scene *s, double *seconds, int32_t *blocks) {
    KV8_TRY(kv8_kernel_max_blocks(&s->kernel, 512, 1024, blocks));
    if (s->graph == NULL) KV8_TRY(capture(s));
    KV8_TRY(kv8_event_record(s->begin, s->stream));
    KV8_TRY(kv8_graph_launch(s->graph, s->stream));
    KV8_TRY(kv8_event_record(s->end, s->stream));
    KV8_TRY(kv8_stream_wait(s->other, s->end));
    KV8_TRY(kv8_event_synchronize(s->end));
    KV8_TRY(kv8_stream_copy(s->other, s->host, s->memory, 64));
    KV8_TRY(kv8_stream_synchronize(s->other));
    return kv8_event_elapsed(s->begin, s->end, seconds);
}

static void check_work(scene *s) {
    double seconds = 0;
    int32_t blocks = 0;
    memset(s->host, 0, 64);
    assert_ok(work(s, &seconds, &blocks));
    assert_int_equal(blocks, 1); /* its launch bounds let it have all registers */
    assert_true(seconds > 0 && seconds < 1);
    for (int i = 0; i < 64; i++) assert_int_equal(((uint8_t *)s->host)[i], 7);
}

/* Calls whose failure has nobody to be told to: they end something, or ask whether a kernel has a
 * second argument, where a failure is the answer. */
static bool is_told_to_nobody(const char *call) {
    return strstr(call, "Free") != NULL || strstr(call, "Destroy") != NULL ||
           strstr(call, "Release") != NULL || strstr(call, "Unload") != NULL ||
           strstr(call, "Pop") != NULL;
}

static void check_told(kv8_status status, int result) {
    const char *const call = stand_in_failed_call();
    if (call == NULL) fail_msg("no call failed");
    if (is_told_to_nobody(call)) return;
    if (status == KV8_OK && strcmp(call, "cuFuncGetParamInfo") == 0) return;
    if (status == KV8_OK) fail_msg("%s failed, nobody was told", call);
    assert_int_equal(status, result == OUT_OF_MEMORY ? KV8_ERR_NO_MEMORY : KV8_ERR_DEVICE);
    const char *const words = result == OUT_OF_MEMORY ? ": out of memory (CUDA_ERROR_OUT_OF_MEMORY)"
                                                      : ": unknown error (CUDA_ERROR_UNKNOWN)";
    if (strstr(kv8_status_message(), words) == NULL)
        fail_msg("%s failed: %s", call, kv8_status_message());
    assert_null(strchr(kv8_status_message(), '\n'));
}

/* The nth call of opening and working fails; what was opened is closed. */
static void a_failure_at_any_call_is_told_and_leaves_nothing(void **state) {
    const int results[] = {UNKNOWN, OUT_OF_MEMORY};
    double seconds;
    int32_t blocks;
    for (int r = 0; r < 2; r++) {
        for (int64_t nth = 1;; nth++) {
            scene s = {0};
            stand_in_fail(NULL, nth, results[r]);
            kv8_status status = open_all(&s);
            if (status == KV8_OK) status = work(&s, &seconds, &blocks);
            const bool all_done = stand_in_failed_call() == NULL;
            if (!all_done) check_told(status, results[r]);
            stand_in_fail(NULL, 0, 0);
            clear(&s);
            check_nothing_lives(state);
            if (all_done) {
                assert_ok(status);
                assert_true(nth > 80); /* every call of open_all and work has failed once */
                break;
            }
        }
    }
}

/* The nth call of working fails; the same objects then work. */
static void objects_work_again_after_any_failure(void **state) {
    (void)state;
    scene s = {0};
    assert_ok(open_all(&s));
    double seconds;
    int32_t blocks;
    for (int64_t nth = 1;; nth++) {
        kv8_graph_destroy(s.graph);
        s.graph = NULL;
        stand_in_fail(NULL, nth, UNKNOWN);
        const kv8_status status = work(&s, &seconds, &blocks);
        const bool all_done = stand_in_failed_call() == NULL;
        if (!all_done) check_told(status, UNKNOWN);
        stand_in_fail(NULL, 0, 0);
        assert_int_equal(stand_in_get_live().pushed, 0);
        kv8_graph *rest = NULL; /* of a capture that could not be ended: it can be now */
        if (kv8_stream_capture_end(s.stream, &rest) == KV8_OK) kv8_graph_destroy(rest);
        check_work(&s);
        if (all_done) break;
    }
    clear(&s);
}

/* What gives something back says that something failed before it, as the driver does after a kernel
 * has: nobody is told, and the rest is given back too. */
static void destroying_goes_on_after_a_failure(void **state) {
    const char *const calls[] = {
        "cuStreamDestroy_v2", "cuGraphExecDestroy", "cuGraphDestroy",
        "cuEventDestroy_v2",  "cuMemFree_v2",       "cuMemFreeHost",
        "cuModuleUnload",     "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        scene s = {0};
        assert_ok(open_all(&s));
        check_work(&s);
        stand_in_fail(calls[i], 1, ILLEGAL_ADDRESS);
        clear(&s);
        assert_string_equal(stand_in_failed_call(), calls[i]);
        check_nothing_lives(state);
    }
}

/* --- words of single calls --- */

static void the_message_says_what_was_tried(void **state) {
    (void)state;
    scene s = {0};
    void *ptr = (void *)1;
    assert_ok(open_all(&s));
    stand_in_fail("cuMemAlloc_v2", 1, OUT_OF_MEMORY);
    assert_refused(kv8_device_alloc(s.device, 4096, &ptr), KV8_ERR_NO_MEMORY,
                   "4096 bytes of device memory: out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
    assert_null(ptr);
    stand_in_fail("cuStreamSynchronize", 1, ILLEGAL_ADDRESS);
    assert_refused(kv8_stream_synchronize(s.stream), KV8_ERR_DEVICE,
                   "work on the GPU: an illegal memory access was encountered");
    stand_in_fail("cuEventCreate", 1, 12345);
    kv8_event *event = (kv8_event *)1;
    assert_refused(kv8_event_create(&event, s.device), KV8_ERR_DEVICE, "event: error 12345");
    assert_null(event);
    clear(&s);
}

/* --- captures and graphs --- */

static void what_a_capture_forbids_ends_it_and_the_stream_lives(void **state) {
    (void)state;
    scene s = {0};
    void *ptr = NULL;
    assert_ok(open_all(&s));
    assert_ok(kv8_stream_capture_begin(s.stream));
    assert_ok(record(&s));
    assert_refused(kv8_device_alloc(s.device, 64, &ptr), KV8_ERR_DEVICE, "is capturing");
    assert_refused(kv8_stream_capture_end(s.stream, &s.graph), KV8_ERR_DEVICE,
                   "end of capture: operation failed due to a previous error during capture");
    assert_null(s.graph);
    assert_int_equal(stand_in_get_live().graphs, 0);
    check_work(&s);
    clear(&s);
}

static void a_graph_outlives_what_it_was_recorded_from(void **state) {
    (void)state;
    scene s = {0};
    assert_ok(open_all(&s));
    assert_ok(capture(&s));
    assert_int_equal(stand_in_num_launches(), 0); /* recorded is not run */
    kv8_stream_destroy(s.stream);
    s.stream = NULL;
    for (int i = 1; i <= 3; i++) {
        assert_ok(kv8_graph_launch(s.graph, s.other));
        assert_ok(kv8_stream_synchronize(s.other));
        assert_int_equal(stand_in_num_launches(), i);
    }
    const stand_in_launch *const launch = stand_in_get_launch(2);
    const kv8_read_ceiling_args *const args = launch->args;
    assert_string_equal(launch->name, read_kernel);
    assert_int_equal(launch->grid[0], 2);
    assert_int_equal(launch->grid[2], 1);
    assert_int_equal(launch->block[0], 64);
    assert_int_equal(launch->dynamic_bytes, 512);
    assert_int_equal(launch->args_bytes, sizeof *args);
    assert_ptr_equal(args->data, s.memory); /* of the caller's block, which is gone */
    assert_int_equal(args->num_words, 4);
    kv8_graph_destroy(s.graph);
    s.graph = NULL;
    assert_int_equal(stand_in_get_live().graphs, 0);
    assert_int_equal(stand_in_get_live().execs, 0);
    clear(&s);
}

static kv8_status measure_bytes(kv8_device *device, double *most_out) {
    kv8_device_ceilings ceilings = {0};
    const kv8_status status = kv8_device_measure_ceilings(device, 1 << 16, &ceilings);
    *most_out = fmin(ceilings.read_gb_s, ceilings.copy_gb_s);
    return status;
}
/* All ceilings, of few bytes: what is measured is the stand-in's clock. */
static void ceilings_give_back_what_they_took(void **state) {
    (void)state;
    scene s = {0};
    assert_ok(open_all(&s));
    kv8_status (*const measure[])(kv8_device *, double *) = {measure_bytes,
                                                             kv8_device_measure_products};
    for (size_t i = 0; i < sizeof measure / sizeof measure[0]; i++) {
        double found = 0;
        assert_ok(measure[i](s.device, &found)); /* a module is loaded once, to stay */
        const stand_in_live before = stand_in_get_live();
        assert_ok(measure[i](s.device, &found));
        assert_true(found > 0);
        for (int64_t nth = 1; nth < 60; nth += i == 0 ? 7 : 3) {
            stand_in_fail(NULL, nth, UNKNOWN);
            check_told(measure[i](s.device, &found), UNKNOWN);
            stand_in_fail(NULL, 0, 0);
            const stand_in_live after = stand_in_get_live();
            assert_memory_equal(&after, &before, sizeof after);
        }
    }
    clear(&s);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, reset, check_nothing_lives)
    const struct CMUnitTest tests[] = {
        TEST(a_driver_that_fails_is_one_plain_line), /* first: no driver is loaded yet */
        TEST(each_gpu_says_what_it_is),
        TEST(a_gpu_that_no_image_is_for_is_named),
        TEST(threads_load_a_module_once),
        TEST(a_failure_at_any_call_is_told_and_leaves_nothing),
        TEST(objects_work_again_after_any_failure),
        TEST(destroying_goes_on_after_a_failure),
        TEST(the_message_says_what_was_tried),
        TEST(what_a_capture_forbids_ends_it_and_the_stream_lives),
        TEST(a_graph_outlives_what_it_was_recorded_from),
        TEST(ceilings_give_back_what_they_took),
    };
    return cmocka_run_group_tests_name("driver_faults", tests, NULL, NULL);
}
