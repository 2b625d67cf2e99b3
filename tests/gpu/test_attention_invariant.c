/* test_attention_invariant.c - batch_invariant on the GPU: rows in a chunk beside other requests,
 * the same rows in smaller chunks alone and row by row as decode have the same bits.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device_case.h"

/* One long request, split over groups of pieces; short ones; one row. */
static attention_case plain(kv8_dtype k, kv8_dtype v, int32_t head_dim, int32_t num_kv_heads,
                            int32_t group_size) {
    attention_case c = {.group_size = group_size,
                        .num_kv_heads = num_kv_heads,
                        .head_dim = head_dim,
                        .q_dtype = KV8_BF16,
                        .k_dtype = k,
                        .v_dtype = v,
                        .o_dtype = KV8_F32,
                        .page_size = 16,
                        .window_left = -1,
                        .causal = 1,
                        .sink = SINK_FINITE,
                        .scale = SCALE_HEAD,
                        .batch_invariant = true,
                        .nan_newest = true,
                        .batch = 4,
                        .seed = 1};
    static const int32_t rows[] = {21, 70, 30, 1}, keys[] = {9300, 1100, 30, 2500};
    for (int b = 0; b < c.batch; b++) c.qo_len[b] = rows[b], c.kv_len[b] = keys[b];
    return c;
}

typedef struct results {
    float *o, *lse; /* of all rows of the case */
} results;

/* Rows [first, first + count) of request b, alone, as if no row had come after them. */
static void check_rows(const gpu *g, const attention_inputs *in, const gpu_case *whole,
                       const results *expected, int32_t b, int32_t first, int32_t count) {
    const attention_case *const c = in->c;
    const int32_t keys = c->kv_len[b] - (c->qo_len[b] - first - count);
    const int32_t head[3] = {0, count, keys};
    kv8_attention_spec spec = in->spec;
    spec.max_batch = 1;
    spec.max_total_q = count;
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &spec, kernels, NULL));
    int32_t *const lengths = gpu_upload(g, head, sizeof head);
    void *const workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.block_table = whole->inputs.pages.page_indices + in->pages.page_indptr[b];
    table.block_table_stride = 1;
    table.seq_lens = lengths + 2;
    kv8_attention_args args = whole->args;
    args.batch = 1;
    args.pages = &table;
    args.qo_indptr = lengths;
    const int64_t row = in->args.qo_indptr[b] + first;
    args.q = (const uint8_t *)whole->q +
             (size_t)(row * args.q_stride_row) * kv8_dtype_size(in->spec.q_dtype);
    assert_ok(kv8_attention_device_workspace_init(plan, g->stream, workspace));
    assert_ok(kv8_attention_device_run(plan, g->stream, &args, workspace));
    const size_t heads = (size_t)in->num_qo_heads, dim = (size_t)in->v_head_dim;
    const size_t rows = (size_t)count * heads;
    float *const o = calloc(rows * dim, sizeof *o), *const lse = calloc(rows, sizeof *lse);
    gpu_download(g, o, args.o, rows * dim * sizeof *o);
    gpu_download(g, lse, args.lse, rows * sizeof *lse);
    const float *const o_of_all = expected->o + (size_t)row * heads * dim;
    if (memcmp(o, o_of_all, rows * dim * sizeof *o) != 0 ||
        memcmp(lse, expected->lse + (size_t)row * heads, rows * sizeof *lse) != 0) {
        size_t i = 0;
        while (i < rows * dim && memcmp(o + i, o_of_all + i, sizeof *o) == 0) i++;
        fail_msg("rows %d.. of request %d, %d of them, over %d keys: o[%zu] is %a, was %a: %s",
                 first, b, count, keys, i, (double)o[i < rows * dim ? i : 0],
                 (double)o_of_all[i < rows * dim ? i : 0], case_text(c, KV8_ISA_BEST));
    }
    free(o);
    free(lse);
    kv8_device_free(g->device, workspace);
    kv8_device_free(g->device, lengths);
    kv8_attention_device_plan_destroy(plan);
}

static void check_case(const gpu *g, const attention_case *c) {
    static attention_inputs in;
    case_make(&in, c);
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in.spec, kernels, NULL));
    gpu_case whole;
    upload(g, &in, plan, 0, &whole);
    poison(g, &in, plan, &whole);
    assert_ok(kv8_attention_device_run(plan, g->stream, &whole.args, whole.workspace));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    const results expected = {calloc(rows * (size_t)in.v_head_dim, sizeof(float)),
                              calloc(rows, sizeof(float))};
    fetch(g, &in, &whole, expected.o, expected.lse);
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t n = c->qo_len[b];
        check_rows(g, &in, &whole, &expected, b, 0, 1);
        check_rows(g, &in, &whole, &expected, b, n - 1, 1);
        check_rows(g, &in, &whole, &expected, b, n / 2, 1);
        check_rows(g, &in, &whole, &expected, b, n / 3, n - n / 3);
        check_rows(g, &in, &whole, &expected, b, 0, n);
    }
    free(expected.o);
    free(expected.lse);
    gpu_case_free(g, &in, &whole);
    kv8_attention_device_plan_destroy(plan);
    case_free(&in);
}

static void chunks_and_decode_agree(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const struct {
        kv8_dtype k, v;
        int32_t head_dim, num_kv_heads, group_size, page_size, window_left;
        const char *kernels;
    } cases[] = {
        {KV8_E4M3, KV8_E4M3, 64, 8, 8, 16, -1, "*_bulk8*"},
        {KV8_E4M3, KV8_E4M3, 64, 8, 3, 32, -1, "*_bulk8*"},
        {KV8_E4M3, KV8_E4M3, 64, 8, 8, 16, 127, "*_bulk8*"},
        {KV8_E4M3, KV8_E4M3, 64, 8, 12, 16, 3000, "*_bulk8*"},
        {KV8_E5M2, KV8_E5M2, 64, 8, 4, 16, -1, "*_bulk8*"},
        {KV8_E4M3, KV8_E4M3, 80, 8, 4, 16, -1, "*_bulk8*"},
        {KV8_E4M3, KV8_E4M3, 64, 2, 8, 16, -1, "*_rows*"},
        {KV8_E4M3, KV8_E4M3, 128, 4, 4, 16, 2000, "*_rows*"},
        {KV8_INT8, KV8_INT8, 64, 2, 8, 16, -1, "*_pairs*"},
        {KV8_INT8, KV8_INT8, 128, 1, 5, 16, 100, "*_rows*"},
        {KV8_BF16, KV8_BF16, 64, 2, 8, 16, -1, "*_rows*"},
        {KV8_F16, KV8_F16, 128, 1, 4, 16, -1, "*_rows*"},
        {KV8_INT8, KV8_E4M3, 64, 2, 8, 16, -1, "*_pairs*"},
        {KV8_E4M3, KV8_BF16, 128, 1, 8, 16, -1, "*_rows*"},
        {KV8_E4M3, KV8_E4M3, 64, 2, 8, 6, -1, "*_tokens*"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attention_case c = plain(cases[i].k, cases[i].v, cases[i].head_dim, cases[i].num_kv_heads,
                                 cases[i].group_size);
        c.page_size = cases[i].page_size;
        c.window_left = cases[i].window_left;
        c.soft_cap = i % 4 == 1 ? 20 : 0;
        kernels = cases[i].kernels;
        check_case(g, &c);
    }
}

/* More pieces than there are slots: blocks fold groups alone, and whole streams. */
static void blocks_fold_alone(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t rows[] = {400, 2400}, keys[] = {20000, 5000};
    kernels = "*_bulk8*";
    for (int i = 0; i < 2; i++) {
        attention_case c = plain(KV8_E4M3, KV8_E4M3, 64, 8, 8);
        c.batch = 1;
        c.qo_len[0] = rows[i], c.kv_len[0] = keys[i];
        check_case(g, &c);
    }
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_and_decode_agree),
        cmocka_unit_test(blocks_fold_alone),
    };
    return cmocka_run_group_tests_name("attention_invariant", tests, gpu_open, gpu_close);
}
