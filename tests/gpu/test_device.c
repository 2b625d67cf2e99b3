/* test_device.c - the device room on a real GPU: what it says of itself, memory and copies, events,
 * graphs and their replay, kernels and the launches that are refused. The first tests need no GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_args.h"
#include "driver.h"
#include "gpu_testing.h"

/* --- without a GPU --- */

static void archs_run_where_the_hardware_says(void **state) {
    (void)state;
    assert_true(kv8_archs_run_on("sm_80", 80));
    assert_true(kv8_archs_run_on("sm_80", 89));
    assert_false(kv8_archs_run_on("sm_80", 90));
    assert_false(kv8_archs_run_on("sm_86", 80));
    assert_true(kv8_archs_run_on("sm_80 sm_90a", 90));
    assert_true(kv8_archs_run_on("sm_120 sm_100", 103));
    assert_false(kv8_archs_run_on("sm_100a", 103));
    assert_false(kv8_archs_run_on("sm_120a", 121));
    assert_true(kv8_archs_run_on("sm_120", 121));
    assert_false(kv8_archs_run_on("sm_80", 120));
    assert_false(kv8_archs_run_on("", 90));
}

static void images_and_their_kernels_are_listed(void **state) {
    (void)state;
    assert_null(kv8_device_get_image(-1));
    assert_null(kv8_device_get_image(kv8_device_num_images()));
    for (int32_t i = 0; i < kv8_device_num_images(); i++) {
        const kv8_device_image_info *const image = kv8_device_get_image(i);
        assert_true(image->bytes > 0);
        assert_memory_equal(image->archs, "sm_", 3);
        assert_memory_equal(image->kernels, "kv8_", 4);
        assert_memory_equal(kv8_images[i].fatbin, "\x50\xed\x55\xba", 4); /* a fatbin's magic */
    }
}

static void no_gpu_is_one_plain_line(void **state) {
    const gpu *const g = *state;
    if (g->device != NULL) skip();
    int32_t count = 7;
    kv8_device *device = (kv8_device *)1;
    assert_int_equal(kv8_device_count(&count), KV8_ERR_NOT_FOUND);
    assert_int_equal(count, 0);
    assert_int_equal(kv8_device_open(&device, 0), KV8_ERR_NOT_FOUND);
    assert_null(device);
    assert_true(strlen(kv8_status_message()) > 10);
    assert_null(strchr(kv8_status_message(), '\n'));
    kv8_device_close(NULL);
    kv8_stream_destroy(NULL);
    kv8_event_destroy(NULL);
    kv8_graph_destroy(NULL);
}

/* --- with one --- */

static void device_says_what_it_is(void **state) {
    const gpu *const g = gpu_get(state);
    const kv8_device_info *const info = kv8_device_get_info(g->device);
    printf("GPU: %s, sm_%d, %d multiprocessors, %.1f GiB, driver of CUDA %d.%d\n", info->name,
           info->sm_version, info->num_sms, (double)info->memory_bytes / 0x1p30,
           info->driver_version / 1000, info->driver_version % 1000 / 10);
    assert_true(info->sm_version >= 50 && info->num_sms > 0 && info->memory_bytes > 1u << 28);
    assert_true(info->shared_bytes_per_block >= 48 * 1024 && info->l2_bytes > 0);
    int32_t count = 0;
    assert_ok(kv8_device_count(&count));
    kv8_device *other = NULL;
    assert_refused(kv8_device_open(&other, count), KV8_ERR_INVALID, "must be 0 to");
    assert_refused(kv8_device_open(&other, -1), KV8_ERR_INVALID, "device -1");
    assert_null(other);
    assert_ok(kv8_device_open(&other, 0)); /* twice is fine: one context */
    kv8_device_close(other);
}

static void memory_is_given_and_refused(void **state) {
    const gpu *const g = gpu_get(state);
    void *ptr = (void *)1;
    assert_refused(kv8_device_alloc(g->device, 0, &ptr), KV8_ERR_INVALID, "0 bytes");
    assert_null(ptr);
    assert_refused(kv8_device_alloc(g->device, (size_t)1 << 50, &ptr), KV8_ERR_NO_MEMORY,
                   "1125899906842624 bytes of device memory: out of memory");
    assert_null(ptr);
    kv8_device_free(g->device, NULL);
    void *host = NULL;
    assert_ok(kv8_device_alloc_host(g->device, 100, &host));
    memset(host, 7, 100);
    uint8_t *const on_device = gpu_upload(g, host, 100);
    memset(host, 0, 100);
    assert_true(kv8_device_bytes_from(g->device, on_device) >= 100);
    assert_true(kv8_device_bytes_from(g->device, on_device + 40) ==
                kv8_device_bytes_from(g->device, on_device) - 40);
    assert_int_equal(kv8_device_bytes_from(g->device, NULL), 0);
    assert_ok(kv8_stream_fill(g->stream, on_device + 50, 9, 25));
    gpu_download(g, host, on_device, 100);
    for (int i = 0; i < 100; i++) assert_int_equal(((uint8_t *)host)[i], i >= 50 && i < 75 ? 9 : 7);
    kv8_device_free(g->device, on_device);
    kv8_device_free_host(g->device, host);
}

static void the_drivers_words_reach_the_caller(void **state) {
    const gpu *const g = gpu_get(state);
    void *const ptr = gpu_alloc(g, 256);
    uint8_t bytes[64];
    /* Far beyond the allocation: the driver knows the range of a device address. */
    assert_refused(kv8_stream_copy(g->stream, bytes, (uint8_t *)ptr, (size_t)1 << 46),
                   KV8_ERR_DEVICE, "CUDA_ERROR_");
    kv8_device_free(g->device, ptr);
    kv8_graph *graph = (kv8_graph *)1;
    assert_refused(kv8_stream_capture_end(g->stream, &graph), KV8_ERR_DEVICE, "end of capture");
    assert_null(graph);
    assert_ok(kv8_stream_synchronize(g->stream)); /* none of it broke the stream */
}

static void events_order_streams_and_tell_time(void **state) {
    const gpu *const g = gpu_get(state);
    enum { BYTES = 1 << 26 };
    uint8_t *const buffer = gpu_alloc(g, BYTES);
    kv8_stream *other = NULL, *same = NULL;
    kv8_event *begin = NULL, *end = NULL;
    assert_ok(kv8_stream_create(&other, g->device));
    assert_ok(kv8_event_create(&begin, g->device));
    assert_ok(kv8_event_create(&end, g->device));
    assert_ok(kv8_event_record(begin, g->stream));
    for (int i = 0; i < 20; i++) assert_ok(kv8_stream_fill(g->stream, buffer, (uint8_t)i, BYTES));
    assert_ok(kv8_event_record(end, g->stream));
    assert_ok(kv8_stream_wait(other, end));
    uint8_t last = 0;
    assert_ok(kv8_stream_copy(other, &last, buffer + BYTES - 1, 1));
    assert_ok(kv8_stream_synchronize(other));
    assert_int_equal(last, 19);
    double seconds = 0;
    assert_ok(kv8_event_elapsed(begin, end, &seconds));
    assert_true(seconds > 1e-6 && seconds < 10);
    assert_ok(kv8_stream_wrap(&same, g->device, NULL)); /* the default stream */
    assert_ok(kv8_stream_fill(same, buffer, 77, BYTES));
    assert_ok(kv8_stream_copy(same, &last, buffer + BYTES - 1, 1));
    assert_ok(kv8_stream_synchronize(same));
    assert_int_equal(last, 77);
    kv8_stream_destroy(same);
    kv8_stream_destroy(other);
    kv8_event_destroy(begin);
    kv8_event_destroy(end);
    kv8_device_free(g->device, buffer);
}

static kv8_status launch_read(const gpu *g, const kv8_kernel *kernel, const void *data,
                              uint64_t num_words, uint32_t *result, uint32_t unlikely) {
    const kv8_read_ceiling_args args = {
        .data = data, .num_words = num_words, .result_out = result, .unlikely = unlikely};
    const kv8_launch launch = {.grid = {1}, .block = {KV8_READ_CEILING_THREADS}};
    return kv8_kernel_launch(kernel, g->stream, &launch, &args);
}

/* Recorded: the kernel reads what lies in the buffer at replay, not at capture. */
static void graphs_replay_what_was_recorded(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_kernel kernel;
    assert_ok(kv8_kernel_get(&kernel, g->device, "kv8_read_ceiling__sm80",
                             sizeof(kv8_read_ceiling_args), 0));
    /* One word, 511 idle threads: each thread's xor is the word's or 0, and 0 is not `unlikely`. */
    const uint32_t words[2][4] = {{0xa, 0, 0, 0}, {0x10, 0x20, 0x40, 0x80}};
    uint32_t *const data = gpu_alloc(g, 16), *const result = gpu_alloc(g, 8);
    assert_ok(kv8_stream_fill(g->stream, result, 0, 8));
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(launch_read(g, &kernel, data, 1, result, 0xa));
    assert_ok(launch_read(g, &kernel, data, 1, result + 1, 0xf0));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    uint32_t got[2] = {9, 9};
    gpu_download(g, got, result, 8);
    assert_int_equal(got[0], 0); /* recorded is not run */
    for (int i = 0; i < 2; i++) {
        assert_ok(kv8_stream_copy(g->stream, data, words[i], 16));
        assert_ok(kv8_graph_launch(graph, g->stream));
        gpu_download(g, got, result, 8);
        assert_int_equal(got[0], 0xa);
        assert_int_equal(got[1], i == 0 ? 0 : 0xf0);
    }
    kv8_graph_destroy(graph);
    kv8_device_free(g->device, data);
    kv8_device_free(g->device, result);
}

static void wrong_kernels_and_launches_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const char *const name = "kv8_read_ceiling__sm80";
    kv8_kernel kernel = {.name = "untouched"};
    assert_refused(kv8_kernel_get(&kernel, g->device, "kv8_nothing__sm80", 8, 0),
                   KV8_ERR_UNSUPPORTED, "kernel kv8_nothing__sm80 is not in this build");
    assert_false(kv8_kernel_exists(g->device, "kv8_nothing__sm80"));
    assert_refused(kv8_kernel_get(&kernel, g->device, name, sizeof(kv8_read_ceiling_args), 1 << 20),
                   KV8_ERR_INVALID, "1048576 bytes of shared memory");
    if (kv8_device_get_info(g->device)->driver_version >= 12040)
        assert_refused(kv8_kernel_get(&kernel, g->device, name, 8, 0), KV8_ERR_INVALID,
                       "takes an argument of 32 bytes, not of 8");
    assert_string_equal(kernel.name, "untouched");
    assert_true(kv8_kernel_exists(g->device, name));
    assert_ok(kv8_kernel_get(&kernel, g->device, name, sizeof(kv8_read_ceiling_args), 1000));
    assert_true(kernel.num_registers > 0 && kernel.local_bytes == 0);
    int32_t blocks = 0;
    assert_ok(kv8_kernel_max_blocks(&kernel, KV8_READ_CEILING_THREADS, 0, &blocks));
    assert_true(blocks >= 1);
    const kv8_read_ceiling_args args = {0};
    kv8_launch launch = {.block = {KV8_READ_CEILING_THREADS * 2}};
    assert_refused(kv8_kernel_launch(&kernel, g->stream, &launch, &args), KV8_ERR_INVALID,
                   "1024 threads a block, it can have 512");
    launch = (kv8_launch){.block = {32}, .dynamic_bytes = 1001};
    assert_refused(kv8_kernel_launch(&kernel, g->stream, &launch, &args), KV8_ERR_INVALID,
                   "1001 bytes of shared memory");
    launch = (kv8_launch){.grid = {1, 1 << 20}, .block = {32}};
    assert_refused(kv8_kernel_launch(&kernel, g->stream, &launch, &args), KV8_ERR_DEVICE,
                   "launch of kv8_read_ceiling__sm80, grid 1 x 1048576 x 1");
    launch = (kv8_launch){.grid = {3}, .block = {32}, .cluster = {2}};
    assert_refused(kv8_kernel_launch(&kernel, g->stream, &launch, &args), KV8_ERR_DEVICE, "CUDA_");
    launch = (kv8_launch){.grid = {4}, .block = {32}, .dynamic_bytes = 1000};
    launch.overlaps_previous = kv8_device_get_info(g->device)->sm_version >= 90;
    if (launch.overlaps_previous) launch.cluster[0] = 2;
    uint32_t *const result = gpu_alloc(g, 4);
    const kv8_read_ceiling_args nothing = {.data = result, .result_out = result, .unlikely = 1};
    assert_ok(kv8_kernel_launch(&kernel, g->stream, &launch, &nothing));
    assert_ok(kv8_stream_synchronize(g->stream));
    kv8_device_free(g->device, result);
}

static void ceilings_are_measured(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_device_ceilings ceilings;
    assert_refused(kv8_device_measure_ceilings(g->device, 1, &ceilings), KV8_ERR_INVALID,
                   "1 bytes");
    assert_ok(kv8_device_measure_ceilings(g->device, (size_t)1 << 28, &ceilings));
    const double limit = kv8_device_get_info(g->device)->memory_gb_s;
    printf("read %.0f GB/s, copy %.0f GB/s, by the clock %.0f GB/s\n", ceilings.read_gb_s,
           ceilings.copy_gb_s, limit);
    assert_true(ceilings.read_gb_s > 10 && ceilings.copy_gb_s > 10);
    if (limit > 0) assert_true(ceilings.read_gb_s < 1.05 * limit);
}

/* 4096 operations a clock on each multiprocessor of sm_90, none of whose clocks is above 2 GHz. */
static void products_are_measured(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const kv8_device_info *const info = kv8_device_get_info(g->device);
    double tflop_s = 0;
    if (info->sm_version != 90) {
        assert_refused(kv8_device_measure_products(g->device, &tflop_s), KV8_ERR_UNSUPPORTED,
                       "kv8_product_ceiling__sm90");
        return;
    }
    assert_ok(kv8_device_measure_products(g->device, &tflop_s));
    printf("products %.0f TFLOP/s\n", tflop_s);
    const double limit = 4096 * 2e-3 * info->num_sms;
    assert_true(tflop_s > 0.3 * limit && tflop_s < limit);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(archs_run_where_the_hardware_says),
        cmocka_unit_test(images_and_their_kernels_are_listed),
        cmocka_unit_test(no_gpu_is_one_plain_line),
        cmocka_unit_test(device_says_what_it_is),
        cmocka_unit_test(memory_is_given_and_refused),
        cmocka_unit_test(the_drivers_words_reach_the_caller),
        cmocka_unit_test(events_order_streams_and_tell_time),
        cmocka_unit_test(graphs_replay_what_was_recorded),
        cmocka_unit_test(wrong_kernels_and_launches_are_refused),
        cmocka_unit_test(ceilings_are_measured),
        cmocka_unit_test(products_are_measured),
    };
    return cmocka_run_group_tests_name("device", tests, gpu_open, gpu_close);
}
