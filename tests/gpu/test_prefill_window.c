/* test_prefill_window.c - prefill over short windows by the kernels made for them, against the f64
 * oracle: every group whose windows fit a tile, every edge of a window, sinks, caps, scales, rows
 * beside which there are more or fewer keys than a window has.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device_case.h"

/* Of K and V; Q is bf16. */
static const kv8_dtype formats[][2] = {
    {KV8_E4M3, KV8_E4M3}, {KV8_INT8, KV8_INT8}, {KV8_BF16, KV8_BF16}, {KV8_INT8, KV8_E4M3}};
enum { NUM_PAIRS = 4 };

static int open_windows(void **state) {
    const int failed = open_wgmma(state);
    kernels = "kv8_prefill_*_window__sm90";
    return failed;
}
static attention_case window_case(int pair, int32_t group, int32_t left) {
    attention_case c = prefill_case(E4M3_PAGES, 64);
    c.k_dtype = formats[pair][0];
    c.v_dtype = formats[pair][1];
    c.group_size = group;
    c.num_kv_heads = group > 16 ? 1 : 2;
    c.window_left = left;
    return c;
}

static void every_window(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t groups[] = {8, 16, 12, 71, 64}, pages[] = {16, 1, 7, 64};
    static const int32_t windows[] = {127, 0, 1, 7, 100, 120};
    for (int i = 0; i < 60; i++) {
        attention_case c = window_case(i % NUM_PAIRS, groups[i % 5], windows[i % 6]);
        const int32_t lens[][2] = {{1, 40},  {90, 90}, {50, 300}, {7, 129},
                                   {60, 20}, {0, 5},   {33, 0}};
        c.batch = 7;
        for (int b = 0; b < c.batch; b++) c.qo_len[b] = lens[b][0], c.kv_len[b] = lens[b][1] + i;
        c.page_size = pages[i / 2 % 4];
        if (c.k_dtype != KV8_BF16 && i % 3 == 0) c.q_dtype = KV8_F16;
        if (i % 5 == 1) c.o_dtype = KV8_BF16;
        if (i % 5 == 2) c.o_dtype = KV8_F16;
        if (c.window_left < 100 && i % 2 == 1) c.causal = 0, c.right = 3;
        c.soft_cap = i % 7 == 3 ? 20 : 0;
        c.sm_scale = i % 9 == 4 ? -0.2f : 0;
        c.sink = (sink_kind)(i % SINK_KINDS);
        c.scale = (scale_kind)(i / 3 % SCALE_KINDS);
        c.layout = (layout_kind)(i / 4 % 2);
        c.dense_table = i / 5 % 2;
        c.seed = (uint64_t)(2 * i);
        check(g, &c, i % 3);
    }
}

/* More items than blocks, so that each takes several, one behind the other. */
static void many_items(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < NUM_PAIRS; i++) {
        attention_case c = window_case(i, 8, 127);
        c.num_kv_heads = 8;
        c.batch = 9;
        for (int b = 0; b < c.batch; b++) c.qo_len[b] = 260 + 25 * b, c.kv_len[b] = 260 + 50 * b;
        c.seed = (uint64_t)(2 * i);
        check(g, &c, 0);
    }
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_window),
                                       cmocka_unit_test(many_items)};
    return cmocka_run_group_tests_name("prefill_window", tests, open_windows, gpu_close);
}
