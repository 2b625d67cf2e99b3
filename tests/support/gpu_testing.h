/* gpu_testing.h - for tests that need a GPU: opens the first one, or skips with the one line that
 * says why; device copies of host arrays. A program's argument, a pattern with * and ?, leaves out
 * the tests whose names it does not fit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPU_TESTING_H
#define KV8_GPU_TESTING_H

#include "device_impl.h"
#include "testing.h"

typedef struct gpu {
    kv8_device *device; /* NULL: skip */
    kv8_stream *stream;
} gpu;

/* First of main(). */
static inline void gpu_filter(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
}

/* Group setup: never fails for want of a GPU, so that each test reports as skipped. */
static inline int gpu_open(void **state) {
    static gpu g;
    g = (gpu){0}; /* of the group before */
    *state = &g;
    if (kv8_device_open(&g.device, 0) != KV8_OK) {
        printf("SKIPPED: no GPU to test on: %s\n", kv8_status_message());
        return 0;
    }
    assert_ok(kv8_stream_create(&g.stream, g.device));
    return 0;
}
static inline int gpu_close(void **state) {
    gpu *const g = *state;
    kv8_stream_destroy(g->stream);
    kv8_device_close(g->device);
    return 0;
}
/* First line of every test: the GPU, or the test is skipped. */
static inline gpu *gpu_get(void **state) {
    gpu *const g = *state;
    if (g->device == NULL) skip();
    return g;
}
/* The same for tests of kernels: a build without a CUDA compiler has none. */
static inline gpu *gpu_get_with_kernels(void **state) {
    gpu *const g = gpu_get(state);
    if (kv8_device_num_images() == 0) {
        printf("SKIPPED: this build has no CUDA kernels\n");
        skip();
    }
    return g;
}

static inline void *gpu_alloc(const gpu *g, size_t bytes) {
    void *ptr = NULL;
    assert_ok(kv8_device_alloc(g->device, bytes, &ptr));
    return ptr;
}
/* A device copy of `bytes` at `from`, to be freed by the caller. */
static inline void *gpu_upload(const gpu *g, const void *from, size_t bytes) {
    void *const ptr = gpu_alloc(g, bytes);
    assert_ok(kv8_stream_copy(g->stream, ptr, from, bytes));
    assert_ok(kv8_stream_synchronize(g->stream));
    return ptr;
}
static inline void gpu_download(const gpu *g, void *to, const void *from, size_t bytes) {
    assert_ok(kv8_stream_copy(g->stream, to, from, bytes));
    assert_ok(kv8_stream_synchronize(g->stream));
}

#endif
