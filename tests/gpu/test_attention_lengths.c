/* test_attention_lengths.c - attention on a GPU over lengths that the kernel ahead in the stream
 * writes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/append.h>

#define CASE_MAX_BATCH 600
#include "attention_device_case.h"
#include "device_impl.h"

/* Lengths are written by an append of f32, which copies words: what lies there before is looked at
 * while that one runs, and is no more than a hint. */
typedef struct written_lengths {
    int32_t *from, *to; /* on the GPU, WRITTEN each */
    int64_t *slot;
    kv8_append_device_plan *plan;
} written_lengths;
enum { WORDS_OF_HEAD = 64, WRITTEN = 10 * WORDS_OF_HEAD };

static written_lengths written_make(const gpu *g) {
    static const int64_t slot = 0;
    written_lengths w = {gpu_alloc(g, WRITTEN * sizeof *w.from),
                         gpu_alloc(g, 2 * WRITTEN * sizeof *w.to),
                         gpu_upload(g, &slot, sizeof slot), NULL};
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = WRITTEN / WORDS_OF_HEAD, spec.k_head_dim = WORDS_OF_HEAD;
    spec.page_size = 1;
    spec.src_dtype = spec.k_dtype = spec.v_dtype = KV8_F32;
    assert_ok(kv8_append_device_plan_create(&w.plan, g->device, &spec));
    return w;
}
static void written_run(const gpu *g, const written_lengths *w) {
    kv8_paged pages[2] = {KV8_PAGED_INIT, KV8_PAGED_INIT};
    for (int i = 0; i < 2; i++) {
        pages[i].data = w->to + i * WRITTEN; /* V's copy is nobody's */
        pages[i].stride_page = pages[i].stride_slot = WRITTEN;
        pages[i].stride_head = WORDS_OF_HEAD;
    }
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = args.max_rows = 1;
    args.slot_mapping = w->slot;
    args.k = args.v = w->from;
    args.k_stride_row = args.v_stride_row = WRITTEN;
    args.k_stride_head = args.v_stride_head = WORDS_OF_HEAD;
    args.k_pages = &pages[0], args.v_pages = &pages[1];
    assert_ok(kv8_append_device_run(w->plan, g->stream, &args));
}
static void written_free(const gpu *g, written_lengths *w) {
    kv8_append_device_plan_destroy(w->plan);
    kv8_device_free(g->device, w->from);
    kv8_device_free(g->device, w->to);
    kv8_device_free(g->device, w->slot);
}

static void check_written_lengths(const gpu *g, const attention_case *c, const char *kernel) {
    static const int32_t before[] = {0, 1, 16, 700, -5, INT32_MAX, INT32_MIN};
    static attention_inputs in;
    case_make(&in, c);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads), dim = (size_t)in.v_head_dim;
    const size_t o_bytes = rows * dim * sizeof(float), lse_bytes = rows * sizeof(float);
    device_inputs d = device_inputs_make(g, &in, device_round(o_bytes) + device_round(lse_bytes));
    kv8_attention_args args = device_case_args(&d);
    written_lengths w = written_make(g);
    d.pages.seq_lens = w.to;
    args.o = d.ends;
    args.o_stride_head = (int64_t)dim;
    args.o_stride_row = in.num_qo_heads * args.o_stride_head;
    args.lse = (float *)(void *)(d.ends + device_round(o_bytes));
    char text[512];
    assert_ok(kv8_attention_device_describe(plan, &args, text, sizeof text));
    if (kv8_kernel_exists(g->device, kernel)) assert_non_null(strstr(text, kernel));
    void *const workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
    assert_ok(kv8_attention_device_workspace_init(plan, g->stream, workspace));
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    written_run(g, &w);
    assert_ok(kv8_attention_device_run(plan, g->stream, &args, workspace));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    assert_ok(kv8_stream_copy(g->stream, w.from, in.pages.seq_lens, (size_t)c->batch * 4));
    float *const o = malloc(o_bytes), *const lse = malloc(lse_bytes);
    for (size_t i = 0; i < sizeof before / sizeof before[0]; i++) {
        int32_t lens[WRITTEN];
        for (int n = 0; n < WRITTEN; n++) lens[n] = before[i];
        assert_ok(kv8_stream_copy(g->stream, w.to, lens, sizeof lens));
        assert_ok(kv8_stream_fill(g->stream, args.o, 0xff, o_bytes));
        assert_ok(kv8_graph_launch(graph, g->stream));
        gpu_download(g, o, args.o, o_bytes);
        gpu_download(g, lse, args.lse, lse_bytes);
        case_compare_within(&in, case_f16_bounds, KV8_ISA_BEST, o, lse);
    }
    free(o);
    free(lse);
    kv8_graph_destroy(graph);
    written_free(g, &w);
    kv8_device_free(g->device, workspace);
    kv8_device_free(g->device, d.memory);
    kv8_attention_device_plan_destroy(plan);
    case_free(&in);
}
static attention_case case_of(int32_t batch) {
    attention_case c = {.group_size = 8,
                        .num_kv_heads = 8,
                        .head_dim = 64,
                        .q_dtype = KV8_BF16,
                        .k_dtype = KV8_E4M3,
                        .v_dtype = KV8_E4M3,
                        .page_size = 16,
                        .window_left = -1,
                        .causal = 1,
                        .sink = SINK_FINITE,
                        .dense_table = true,
                        .batch = batch,
                        .qo_len = {1},
                        .kv_len = {1500},
                        .seed = 3};
    for (int32_t i = 1; i < batch; i++) c.qo_len[i] = 1, c.kv_len[i] = 90 * i;
    return c;
}
static void of_one_request(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const attention_case c = case_of(1);
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_cluster__sm90");
}
static void of_wide_rows(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = case_of(1);
    c.qo_len[0] = 4;
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_wide64__sm90");
}
static void of_many_requests(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = case_of(3);
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_rows__sm90");
    c = case_of(20);
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    c.window_left = 127;
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_window__sm90");
    c = case_of(40); /* of which some lanes of a warp have two, and some none */
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    c.num_kv_heads = 4;
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_rows__sm90");
}
/* More requests than one warp keeps the lengths of, than a block has threads, and as many as it
 * keeps. */
static void of_very_many_requests(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t batches[] = {129, 300, 600, 128};
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        attention_case c = case_of(batches[i]);
        for (int32_t b = 0; b < c.batch; b++) c.kv_len[b] = b * 37 % 200;
        c.kv_len[c.batch - 3] = 2500;
        check_written_lengths(g, &c,
                              c.batch > 128 ? "kv8_decode_f16_e4m3_d64_bulk8_many__sm90"
                                            : "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    }
    attention_case c = case_of(129);
    for (int32_t b = 0; b < c.batch; b++) c.kv_len[b] = 1100; /* of one length */
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d64_bulk8_many__sm90");
    for (int32_t b = 0; b < c.batch; b++) c.kv_len[b] = b * 37 % 200;
    c.kv_len[0] = 2500; /* or windows' kernels take so few keys */
    c.head_dim = 80;
    check_written_lengths(g, &c, "kv8_decode_f16_e4m3_d80_bulk8_many__sm90");
    c.head_dim = 64;
    c.k_dtype = c.v_dtype = KV8_E5M2;
    check_written_lengths(g, &c, "kv8_decode_f16_e5m2_d64_bulk8_many__sm90");
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_one_request), cmocka_unit_test(of_wide_rows),
        cmocka_unit_test(of_many_requests), cmocka_unit_test(of_very_many_requests)};
    return cmocka_run_group_tests(tests, gpu_open, gpu_close);
}
