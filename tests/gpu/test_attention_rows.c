/* test_attention_rows.c - several query rows a request, on each kernel that is built for them,
 * against the oracle: rows that fill a part of a tile, one or several, beside requests of one row
 * and of many, with every other option in turn; and decode beside prefill in one plan.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device_case.h"

enum { NUM_ROWS = 10 };
static const int32_t num_rows[NUM_ROWS] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 33};

/* One request of many keys, others of few; every third has one row, every seventh `many`. */
static void set_lengths(attention_case *c, uint64_t n, int32_t rows, int32_t many) {
    static const int32_t before[] = {0, 1, 63, 700, 1800};
    for (int b = 0; b < c->batch; b++) {
        c->qo_len[b] = b % 3 == 2 ? 1 : b % 7 == 5 ? many : rows;
        c->kv_len[b] = c->qo_len[b] + (int32_t)((n * 7 + (uint64_t)b * 13) % 40);
    }
    c->kv_len[0] = rows + before[n % 5];
}

/* n: options are taken from its digits. */
static attention_case rows_case(uint64_t n, int32_t rows) {
    static const int32_t groups[] = {8, 4, 8, 12, 8, 1, 16};
    attention_case c = {.seed = n,
                        .group_size = groups[n % 7],
                        .num_kv_heads = 8,
                        .head_dim = 64,
                        .q_dtype = n % 3 ? KV8_F16 : KV8_BF16,
                        .k_dtype = KV8_E4M3,
                        .v_dtype = KV8_E4M3,
                        .o_dtype = n % 2 ? KV8_F32 : KV8_BF16,
                        .page_size = n % 5 == 4 ? 48 : 16,
                        .window_left = n % 4 == 3 ? 100 : -1,
                        .causal = n % 6 != 5,
                        .sink = (sink_kind)(n % SINK_KINDS),
                        .scale = (scale_kind)(n / 3 % SCALE_KINDS),
                        .layout = LAYOUT_NHD,
                        .dense_table = n / 5 % 2,
                        .extremes = n % 10 == 9,
                        .nan_newest = n % 13 == 12,
                        .batch = 1};
    set_lengths(&c, n, rows, rows);
    return c;
}

/* Packed rows of a request on average, by which a plan chooses. */
static int32_t packed_rows(const attention_case *c) {
    int32_t rows = 0;
    for (int b = 0; b < c->batch; b++) rows += c->qo_len[b];
    return rows * c->group_size / c->batch;
}

static void whole_pages(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kernels = "kv8_decode_*_bulk8_rows16__*";
    for (uint64_t n = 0; n < 3 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        c.batch = 16 + (int32_t)(n % 3);
        c.mask = n % 8 == 3 ? MASK_TREE : n % 8 == 7 ? MASK_RANDOM : MASK_NONE;
        c.soft_cap = n % 11 == 10 ? 20.0f : 0.0f;
        set_lengths(&c, n, num_rows[n % NUM_ROWS], 1);
        c.batch_invariant = true; /* else rows take them */
        if (packed_rows(&c) > 8) check(g, &c, 0);
    }
}

static void rows_of_pages(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16};
    kernels = "kv8_decode_*_d*_rows16__*";
    for (uint64_t n = 0; n < 6 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        c.k_dtype = c.v_dtype = dtypes[n / 2 % 3];
        if (c.k_dtype == KV8_BF16) c.q_dtype = KV8_BF16;
        c.head_dim = n % 2 ? 64 : 128;
        c.num_kv_heads = 1 + (int32_t)(n % 4);
        c.batch = 1 + (int32_t)(n * 5 % 16);
        c.layout = n % 3 ? LAYOUT_NHD : LAYOUT_HND;
        c.mask = n % 8 == 3 ? MASK_TREE : n % 8 == 7 ? MASK_RANDOM : MASK_NONE;
        c.soft_cap = n % 11 == 10 ? 20.0f : 0.0f;
        c.batch_invariant = n % 5 == 1 && (c.k_dtype != KV8_INT8 || c.head_dim == 128);
        c.sick_v = n % 5 == 2 ? (int32_t)(n % 40) + 2 : 0;
        set_lengths(&c, n, num_rows[n % NUM_ROWS], 1);
        if (packed_rows(&c) > 8) check(g, &c, 0);
    }
}

/* Against the oracle, lse of huge scores in f32's precision; planned for so many keys at least. */
static void check_whatever_scores(const gpu *g, const attention_case *c, int flags,
                                  int32_t least_keys) {
    static attention_inputs in;
    case_make(&in, c);
    if (in.spec.max_kv_len < least_keys) in.spec.max_kv_len = least_keys;
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t all = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(all * (size_t)in.v_head_dim + 1, sizeof *o);
    float *const lse = calloc(all + 1, sizeof *lse);
    run_once(g, &in, flags, o, lse);
    accept_huge_lse(&in, lse);
    compare(&in, o, lse);
    free(o);
    free(lse);
    case_free(&in);
}

/* From 17 to 32 packed rows, of so many requests that they fill the GPU, and of few with many keys:
 * as many heads as a block has warpgroups, fewer and more; scores of either sign and huge, masks,
 * NaN that some rows see. */
static void wide_rows_of_pages(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    int num_checked = 0;
    kernels = "kv8_decode_*_rows32*__*";
    for (uint64_t n = 0; n < 10 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        const bool has_few = n % 4 == 1;
        c.head_dim = n / 2 % 3 ? 128 : 64;
        if (n / 3 % 4 % 3 != 0) c.k_dtype = KV8_INT8;
        if (n / 3 % 4 / 2 != 0) c.v_dtype = KV8_INT8;
        c.num_kv_heads = has_few ? 1 + (int32_t)(n / 4 % 8) : 8 + (int32_t)(n / 3 % 5);
        c.batch = has_few ? 1 + (int32_t)(n / 4 % 5) : 34 + (int32_t)(n % 3);
        if (c.window_left >= 0) c.window_left = 600; /* short ones are others' */
        c.layout = n % 3 ? LAYOUT_NHD : LAYOUT_HND;
        if (!has_few)
            c.mask = n % 8 == 3 || n % 8 == 6 ? MASK_TREE : n % 8 == 7 ? MASK_RANDOM : MASK_NONE;
        c.soft_cap = n % 11 == 10 ? 20.0f : 0.0f;
        c.unused_rows = n % 7 == 3;
        c.right = c.causal ? 0 : (int32_t)(n / 6 % 3) * 5;
        c.sm_scale = n % 13 == 5 ? -0.2f : n % 13 == 6 ? 1e9f : n % 13 == 7 ? -1e9f : 0;
        set_lengths(&c, n, num_rows[n % NUM_ROWS], 1);
        c.kv_len[has_few ? 0 : 1] = n % 2 == 0 ? 8192 : 1500 + (int32_t)(n / 4 * 700);
        if (n % 29 == 4) c.kv_len[0] = 0;
        c.sick_v = n % 5 == 2 ? (int32_t)(n % 40) + 2 : 0;
        c.zero_v = n % 7 == 4 ? 1 + (int32_t)n * 17 : 0;
        if (packed_rows(&c) <= 16 || packed_rows(&c) >= 32) continue;
        /* Prefill takes fewer keys. */
        check_whatever_scores(g, &c, n % 2 == 0 ? 0 : 8, has_few ? 1 << 19 : 4096);
        num_checked++;
    }
    assert_true(num_checked > 15);
}

static void a_cluster(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kernels = "kv8_decode_*_cluster_rows16__*";
    for (uint64_t n = 0; n < 4 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        c.num_kv_heads = 1 + (int32_t)(n % 4);
        if (packed_rows(&c) > 8 && packed_rows(&c) <= 64) check(g, &c, 0);
    }
}

/* From 17 packed rows on, with a mask from one on: one tile of 64 and two, over keys that fill no
 * step, one, all blocks' and several of each warpgroup; pages of any size, and none; masks; scores
 * of either sign and huge. */
static attention_case many_rows_case(uint64_t n, int32_t rows) {
    attention_case c = rows_case(n, rows);
    if (rows == 1) c.group_size = n % 20 == 0 ? 71 : 40;
    c.num_kv_heads = 8 + (int32_t)(n % 3);
    c.layout = n % 3 ? LAYOUT_NHD : LAYOUT_HND;
    c.mask = n / 2 % 4 == 1 ? MASK_TREE : n / 2 % 8 == 3 ? MASK_RANDOM : MASK_NONE;
    c.seed = 2 * n; /* without num_pages, which these take no run with */
    c.ragged = n % 11 == 3;
    c.page_size = c.ragged ? 1 : n % 4 == 1 ? 7 : c.page_size;
    c.unused_rows = n % 7 == 3;
    c.right = c.causal ? 0 : (int32_t)(n / 6 % 3) * 5;
    c.sm_scale = n % 13 == 5 ? -0.2f : n % 13 == 6 ? 1e9f : n % 13 == 7 ? -1e9f : 0;
    return c;
}
static void many_rows_of_one_request(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t before[] = {0, 1, 63, 700, 1800, 4000, 8000};
    int num_checked = 0;
    for (uint64_t n = 0; n < 12 * NUM_ROWS; n++) {
        const int32_t rows = num_rows[n % NUM_ROWS];
        attention_case c = many_rows_case(n, rows);
        const int32_t packed = packed_rows(&c);
        if (packed > 128 || (packed <= 16 && c.mask == MASK_NONE)) continue;
        if (packed > 64 || (packed <= 32 && c.mask == MASK_NONE))
            c.window_left = -1; /* other kernels take these */
        kernels = packed > 64 ? "kv8_decode_*_wide128*__*" : "kv8_decode_*_wide64*__*";
        c.kv_len[0] = rows + before[n / 3 % (packed > 64 ? 6 : 7)];
        if (packed <= 8 && c.kv_len[0] > 4096) c.kv_len[0] = 4096;
        if (packed > 64 && c.kv_len[0] > 2047) c.kv_len[0] = 2047;
        if (n % 29 == 4) c.kv_len[0] = 0;
        c.sick_v = n % 5 == 2 ? (c.kv_len[0] < 1000 ? 2 : 1000) + (int32_t)(n % 40) : 0;
        check_whatever_scores(g, &c, n % 2 == 0 ? 0 : 8, 1000);
        num_checked++;
    }
    assert_true(num_checked > 50);
}

/* A warpgroup's rows of an item, two blocks on a multiprocessor. */
static void one_warpgroup(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype formats[7][2] = {
        {KV8_E4M3, KV8_E4M3}, {KV8_INT8, KV8_INT8}, {KV8_BF16, KV8_BF16}, {KV8_E5M2, KV8_E5M2},
        {KV8_F16, KV8_F16},   {KV8_INT8, KV8_E4M3}, {KV8_E4M3, KV8_INT8}};
    kernels = "kv8_prefill_*rows64*__sm90";
    for (uint64_t n = 0; n < 7 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        c.k_dtype = formats[n / NUM_ROWS][0];
        c.v_dtype = formats[n / NUM_ROWS][1];
        if (c.k_dtype == KV8_BF16) c.q_dtype = KV8_BF16;
        c.sick_v = n % 5 == 2 ? (int32_t)(n % 40) + 2 : 0;
        c.num_kv_heads = 1 + (int32_t)(n % 4);
        c.batch = 1 + (int32_t)(n * 5 % 16);
        set_lengths(&c, n, num_rows[n % NUM_ROWS], 9 + (int32_t)(n * 11 % 60));
        /* Several warpgroups take few heads of fewer keys. */
        if (packed_rows(&c) < 64) check_whatever_scores(g, &c, 0, 1 << 18);
    }
}

/* Rows for one, two and all warpgroups of a block beside one another. */
static void warpgroups(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2};
    kernels = "kv8_prefill_*__sm90";
    for (uint64_t n = 0; n < 4 * NUM_ROWS; n++) {
        attention_case c = rows_case(n, num_rows[n % NUM_ROWS]);
        c.k_dtype = c.v_dtype = dtypes[n / NUM_ROWS];
        if (c.k_dtype == KV8_BF16) c.q_dtype = KV8_BF16;
        c.num_kv_heads = 1 + (int32_t)(n % 4);
        c.head_dim = n % 3 ? 64 : 128;
        c.batch = 1 + (int32_t)(n * 5 % 16);
        set_lengths(&c, n, num_rows[n % NUM_ROWS], 9 + (int32_t)(n * 11 % 60));
        check(g, &c, 0);
    }
}

/* So few rows over so many keys that a multiprocessor has one split of them at most, and splits
 * share what joins them: three to sixteen, and more of a few heads; all warpgroups and one, NaN
 * that some rows see, masks, ranges, huge scores. */
static void splits_together(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2};
    static const int32_t keys[] = {800, 1500, 2500, 4100, 6000, 9000};
    kernels = "kv8_prefill_*__sm90";
    for (uint64_t n = 0; n < 48; n++) {
        const int32_t rows = num_rows[n % NUM_ROWS];
        attention_case c = rows_case(n, rows);
        c.k_dtype = c.v_dtype = dtypes[n % 4];
        if (c.k_dtype == KV8_BF16) c.q_dtype = KV8_BF16;
        c.num_kv_heads = 1 + (int32_t)(n / 2 % 8);
        c.head_dim = n % 5 == 1 ? 128 : 64;
        c.window_left = n % 9 == 2 ? 2000 : -1;
        c.mask = n % 7 == 3 ? MASK_TREE : n % 11 == 5 ? MASK_RANDOM : MASK_NONE;
        c.batch = n % 6 == 4 ? 2 : 1;
        for (int b = 0; b < c.batch; b++)
            c.qo_len[b] = rows, c.kv_len[b] = rows + keys[n / 3 % 6] + 100 * b;
        c.sick_v = n % 5 == 2 ? 100 + (int32_t)n : 0;
        c.sm_scale = n % 13 == 6 ? 1e9f : 0;
        check_whatever_scores(g, &c, n % 2 == 0 ? 0 : 8, 0);
    }
}

/* Requests of few rows go to a decode kernel beside prefill's, in a plan whose bounds speak of
 * many: chunks among them, none, nothing else. */
static void decode_beside_prefill(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype formats[][2] = {{KV8_E4M3, KV8_E4M3}, {KV8_INT8, KV8_E4M3},
                                           {KV8_BF16, KV8_BF16}, {KV8_E4M3, KV8_BF16},
                                           {KV8_INT8, KV8_INT8}, {KV8_BF16, KV8_INT8}};
    kernels = "*";
    for (uint64_t n = 0; n < 36; n++) {
        attention_case c = rows_case(n, 2);
        c.k_dtype = formats[n % 6][0], c.v_dtype = formats[n % 6][1];
        if (c.k_dtype == KV8_BF16 || c.v_dtype == KV8_BF16) c.q_dtype = KV8_BF16;
        c.extremes = c.extremes && c.q_dtype != KV8_BF16; /* whose sums leave f32 */
        c.num_kv_heads = n % 2 ? 8 : 2;
        c.head_dim = n / 6 % 2 ? 128 : 64;
        c.soft_cap = n % 11 == 10 ? 20.0f : 0.0f;
        c.batch = 16 + (int32_t)(n % 4);
        for (int b = 0; b < c.batch; b++) {
            const bool is_chunk = n % 3 == 1 ? b % 7 == 3 : n % 3 == 2;
            c.qo_len[b] = is_chunk ? 20 + b : b % 5 == 4 ? 0 : 1 + b % 4;
            c.kv_len[b] = c.qo_len[b] + (int32_t)((n * 7 + (uint64_t)b * 131) % 400);
        }
        static attention_inputs in;
        case_make(&in, &c);
        in.spec.max_total_q = 100 * c.batch;
        char text[512];
        kv8_attention_device_plan *plan = NULL;
        assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL));
        assert_ok(kv8_attention_device_describe(plan, NULL, text, sizeof text));
        assert_non_null(strstr(text, "kv8_prefill_"));
        if (kv8_device_get_info(g->device)->sm_version == 90 && c.page_size % 16 == 0)
            assert_non_null(strstr(text, ", kv8_decode_"));
        kv8_attention_device_plan_destroy(plan);
        check_made(g, &in, 0);
        case_free(&in);
    }
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_pages),
        cmocka_unit_test(rows_of_pages),
        cmocka_unit_test(wide_rows_of_pages),
        cmocka_unit_test(a_cluster),
        cmocka_unit_test(many_rows_of_one_request),
        cmocka_unit_test(one_warpgroup),
        cmocka_unit_test(warpgroups),
        cmocka_unit_test(splits_together),
        cmocka_unit_test(decode_beside_prefill),
    };
    return cmocka_run_group_tests_name("attention_rows", tests, gpu_open, gpu_close);
}
