/* run_observe.c - what the observe kernels compute, for the GPU's own tests of observers on the
 * stand-in: each plane of the argument block is counted by an observer of the host, so that these
 * tests tell what the host half hands to the GPU. How a kernel counts is left to GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "observe_args.h"
#include "stand_in.h"
#include "testing.h"

static void run_plane(const kv8_observe_kernel_args *a, const kv8_observe_plane *plane,
                      kv8_dtype source, const float *cos_sin) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    options.num_layers = 1;
    options.num_kv_heads = plane->num_heads;
    options.k_head_dim = plane->head_dim;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    kv8_observer_start(observer);
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = a->max_rows;
    args.src_dtype = source;
    args.k = (const uint8_t *)plane->source +
             plane->first * plane->stride_head * (int64_t)kv8_dtype_size(source);
    args.k_stride_row = plane->stride_row;
    args.k_stride_head = plane->stride_head;
    args.cos_sin = cos_sin;
    args.interleaved = a->interleaved;
    args.rows_in_use = a->rows_in_use;
    assert_ok(kv8_observer_add(observer, 0, &args));
    size_t num = 0;
    const uint64_t *const sums = kv8_observer_sums(observer, &num);
    const size_t num_sums =
        (size_t)plane->num_heads * (size_t)(KV8_NUM_FIXED_SUMS + plane->head_dim);
    uint64_t *const to = plane->sums + plane->first * (KV8_NUM_FIXED_SUMS + plane->head_dim);
    for (size_t i = 0; i < num_sums; i++) to[i] += sums[i];
    const float *const maxima = kv8_observer_maxima(observer, &num);
    uint32_t *const most = plane->maxima + plane->first * plane->head_dim;
    for (size_t i = 0; i < (size_t)plane->num_heads * (size_t)plane->head_dim; i++) {
        uint32_t bits;
        memcpy(&bits, &maxima[i], sizeof bits);
        if (bits > most[i]) most[i] = bits;
    }
    kv8_observer_destroy(observer);
}

static void run(const stand_in_launch *launch) {
    kv8_observe_kernel_args a;
    assert_true(strncmp(launch->name, "kv8_observe_", 12) == 0);
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    kv8_dtype source = KV8_F32;
    char text[8];
    assert_int_equal(sscanf(launch->name + 12, "%7[a-z0-9]", text), 1);
    assert_ok(kv8_dtype_from_name(text, &source));
    assert_true((int64_t)launch->grid[0] * a.rows_per_block >= a.max_rows);
    int32_t num_heads = 0;
    for (int i = 0; i < KV8_OBSERVED_COUNT; i++) num_heads += a.plane[i].num_heads;
    assert_int_equal(launch->grid[1], num_heads);
    for (int i = 0; *a.is_on != 0 && i < KV8_OBSERVED_COUNT; i++) {
        if (a.plane[i].num_heads > 0)
            run_plane(&a, &a.plane[i], source, i == KV8_OBSERVED_K ? a.cos_sin : NULL);
    }
}

__attribute__((constructor)) static void begin(void) {
    stand_in_on_launch(run);
}
