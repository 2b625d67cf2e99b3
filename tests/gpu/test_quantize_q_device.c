/* test_quantize_q_device.c - e4m3 of Q on the GPU is its definition's: every source format, shapes,
 * values of every kind, requests of one, none and many rows, directly and from a graph.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention_device.h>

#include "gpu_testing.h"
#include "quantize_q_case.h"

/* The arrays of a case on the GPU. */
typedef struct on_gpu {
    void *q, *indptr, *head_scale, *codes, *q_scale, *workspace;
} on_gpu;

static on_gpu upload(const gpu *g, const qq_inputs *in) {
    const on_gpu d = {.q = gpu_upload(g, in->q, in->q_bytes),
                      .indptr = gpu_upload(g, qq_indptr, sizeof qq_indptr),
                      .head_scale = gpu_upload(g, in->head_scale, sizeof in->head_scale),
                      .codes = gpu_alloc(g, in->codes_bytes),
                      .q_scale = gpu_alloc(g, QQ_BATCH * 64 * sizeof(float)),
                      .workspace = gpu_alloc(g, QQ_BATCH * 64 * sizeof(float))};
    assert_ok(kv8_stream_fill(g->stream, d.codes, 0xab, in->codes_bytes));
    return d;
}

static void check_case(const qq_case *c, uint64_t seed, void *cookie) {
    const gpu *const g = cookie;
    qq_inputs in = qq_make(c, seed);
    on_gpu d = upload(g, &in);
    kv8_quantize_q_device_plan *plan = NULL;
    assert_ok(kv8_quantize_q_device_plan_create(&plan, g->device, c->source));
    kv8_quantize_q_args args = qq_args(c, &in);
    args.qo_indptr = d.indptr;
    args.q = d.q;
    args.codes_out = d.codes;
    args.head_scale = c->given ? d.head_scale : NULL;
    args.q_scale_out = c->given ? NULL : d.q_scale;
    args.workspace = d.workspace;
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_quantize_q_device_run(plan, g->stream, &args));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    float q_scale[QQ_BATCH * 64];
    uint8_t *const codes = malloc(in.codes_bytes);
    for (int run = 0; run < 2; run++) { /* the second finds what the first left */
        assert_ok(kv8_graph_launch(graph, g->stream));
        gpu_download(g, codes, d.codes, in.codes_bytes);
        gpu_download(g, q_scale, d.q_scale, sizeof q_scale);
        qq_check(c, &in, codes, q_scale);
    }
    kv8_graph_destroy(graph);
    kv8_quantize_q_device_plan_destroy(plan);
    void *const all[] = {d.q, d.indptr, d.head_scale, d.codes, d.q_scale, d.workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) kv8_device_free(g->device, all[i]);
    free(codes);
    qq_free(&in);
}

static void codes_are_the_definitions(void **state) {
    gpu g = *gpu_get_with_kernels(state);
    printf("%d cases\n", qq_walk(check_case, &g));
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_quantize_q_device_plan *plan = (kv8_quantize_q_device_plan *)1;
    assert_refused(kv8_quantize_q_device_plan_create(&plan, NULL, KV8_F32), KV8_ERR_INVALID,
                   "device is NULL");
    assert_null(plan);
    assert_refused(kv8_quantize_q_device_plan_create(&plan, g->device, KV8_INT8),
                   KV8_ERR_UNSUPPORTED, "src_dtype is int8");
    assert_ok(kv8_quantize_q_device_plan_create(&plan, g->device, KV8_BF16));
    const qq_case c = {.source = KV8_F32, .num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 8};
    qq_inputs in = qq_make(&c, 1);
    kv8_quantize_q_args args = qq_args(&c, &in);
    args.qo_indptr = qq_indptr; /* never read */
    args.q = args.codes_out = in.q;
    args.q_scale_out = in.head_scale;
    assert_refused(kv8_quantize_q_device_run(plan, g->stream, &args), KV8_ERR_INVALID,
                   "src_dtype is f32, the plan's bf16");
    args.src_dtype = KV8_BF16;
    assert_refused(kv8_quantize_q_device_run(plan, g->stream, &args), KV8_ERR_INVALID,
                   "workspace is NULL");
    assert_refused(kv8_quantize_q_device_run(plan, NULL, &args), KV8_ERR_INVALID, "stream is NULL");
    args.batch = 0;
    args.workspace = in.q;
    assert_ok(kv8_quantize_q_device_run(plan, g->stream, &args));
    qq_free(&in);
    kv8_quantize_q_device_plan_destroy(plan);
    kv8_quantize_q_device_plan_destroy(NULL);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_are_the_definitions),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("quantize_q_device", tests, gpu_open, gpu_close);
}
