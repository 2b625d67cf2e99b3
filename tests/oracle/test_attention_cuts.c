/* test_attention_cuts.c - under batch_invariant a row of a prompt has the same bits however the
 * prompt is cut into runs: as one, in chunks of any length, as a token by itself. On every rung,
 * and the whole against the oracle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_case.h"

static kv8_threads *threads;

static int start_threads(void **state) {
    (void)state;
    return kv8_threads_create(&threads, 2) == KV8_OK ? 0 : -1;
}
static int stop_threads(void **state) {
    (void)state;
    kv8_threads_destroy(threads);
    return 0;
}

/* The request of `whole` as it was when rows [first, first + num_rows) came. */
typedef struct chunk {
    attention_case c;
    attention_inputs in;
    int32_t qo_indptr[2], page_indptr[2], last_page_len, seq_len;
} chunk;

static void make_chunk(chunk *out, const attention_inputs *whole, int32_t first, int32_t num_rows) {
    const int32_t kv_len = whole->c->kv_len[0] - whole->c->qo_len[0] + first + num_rows;
    const int32_t page_size = whole->c->page_size, num_pages = (kv_len + page_size - 1) / page_size;
    out->c = *whole->c;
    out->c.qo_len[0] = num_rows;
    out->c.kv_len[0] = kv_len;
    out->in = *whole;
    out->in.c = &out->c;
    out->in.total_q = num_rows;
    out->qo_indptr[0] = out->page_indptr[0] = 0;
    out->qo_indptr[1] = num_rows;
    out->page_indptr[1] = num_pages;
    out->last_page_len = kv_len - (num_pages - 1) * page_size;
    out->seq_len = kv_len;
    kv8_attention_args *const a = &out->in.args;
    a->qo_indptr = out->qo_indptr;
    a->q = (const uint8_t *)whole->args.q +
           (size_t)(first * whole->args.q_stride_row) * kv8_dtype_size(whole->c->q_dtype);
    if (a->q_scale != NULL) a->q_scale += first * a->q_scale_stride_row;
    a->k = &out->in.k;
    a->v = &out->in.v;
    a->pages = &out->in.pages;
    out->in.pages =
        whole->c->dense_table
            ? case_dense_table(whole->pages.block_table, whole->pages.block_table_stride,
                               &out->seq_len)
            : case_csr_table(out->page_indptr, whole->pages.page_indices, &out->last_page_len);
}

static void assert_same(const attention_inputs *in, kv8_isa isa, const char *what, int32_t first,
                        const float *got, const float *want, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (memcmp(&got[i], &want[i], sizeof *got) == 0) continue;
        fail_msg("rows from %d on: %s[%zu] is %.9g, %.9g as part of the whole: %s", first, what, i,
                 (double)got[i], (double)want[i], case_text(in->c, isa));
    }
}

/* Chunks of every length, from the start, from the end and from between. */
static void cut(const attention_case *c) {
    static const int32_t lengths[] = {1, 2, 3, 7, 16, 33, 64, 129, 200};
    static chunk part;
    const size_t step = test_is_short() ? 4 : 1, first_length = test_is_short() ? c->seed % 4 : 0;
    attention_inputs in;
    case_make(&in, c);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t width = (size_t)(in.num_qo_heads * in.v_head_dim);
    const size_t heads = (size_t)in.num_qo_heads, rows = (size_t)in.total_q;
    float *const o = calloc(2 * rows * (width + heads), sizeof *o);
    float *const lse = o + rows * width, *const part_o = lse + rows * heads;
    float *const part_lse = part_o + rows * width;
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        case_run(&in, isa, threads, o, lse);
        case_compare(&in, isa, o, lse);
        for (size_t i = first_length; i < sizeof lengths / sizeof lengths[0]; i += step) {
            const int32_t num = lengths[i], last = in.total_q - num;
            if (last < 0) break;
            const int32_t firsts[] = {0, last, last / 2};
            for (int32_t f = test_is_short() ? 2 : 0; f < 3; f++) {
                const int32_t first = firsts[f];
                make_chunk(&part, &in, first, num);
                case_run(&part.in, isa, threads, part_o, part_lse);
                assert_same(&part.in, isa, "o", first, part_o, o + (size_t)first * width,
                            (size_t)num * width);
                assert_same(&part.in, isa, "lse", first, part_lse, lse + (size_t)first * heads,
                            (size_t)num * heads);
            }
        }
    }
    free(o);
    case_free(&in);
}

static const struct formats {
    kv8_dtype q, k, v;
} formats[] = {
    {KV8_BF16, KV8_E4M3, KV8_E4M3}, {KV8_BF16, KV8_INT8, KV8_INT8}, {KV8_BF16, KV8_BF16, KV8_BF16},
    {KV8_F32, KV8_F32, KV8_F32},    {KV8_E4M3, KV8_E5M2, KV8_E4M3}, {KV8_F16, KV8_F16, KV8_INT8},
};
enum { NUM_FORMATS = sizeof formats / sizeof formats[0] };

static attention_case prompt(uint64_t seed, int32_t qo_len, int32_t kv_len) {
    const struct formats *const f = &formats[seed % NUM_FORMATS];
    return (attention_case){.seed = seed,
                            .group_size = 8,
                            .num_kv_heads = 2,
                            .head_dim = 64,
                            .q_dtype = f->q,
                            .k_dtype = f->k,
                            .v_dtype = f->v,
                            .page_size = 16,
                            .window_left = -1,
                            .causal = 1,
                            .sink = SINK_FINITE,
                            .scale = SCALE_HEAD,
                            .batch_invariant = true,
                            .batch = 1,
                            .qo_len = {qo_len},
                            .kv_len = {kv_len}};
}

static void of_every_format(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < NUM_FORMATS; seed++) {
        for (int32_t window = -1; window <= 127; window += 128) {
            if (test_is_short() && (seed % 2 == 0) != (window < 0)) continue;
            attention_case c = prompt(seed, 260, 260);
            c.window_left = window;
            cut(&c);
        }
    }
}

static void of_every_group(void **state) {
    (void)state;
    static const int32_t groups[] = {1, 2, 3, 4, 6, 12, 16, 24, 40};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i += test_is_short() ? 4 : 1) {
        attention_case c = prompt(i, 210, 230);
        c.group_size = groups[i];
        c.num_kv_heads = 1;
        cut(&c);
    }
}

static void of_other_dims_pages_and_windows(void **state) {
    (void)state;
    static const int32_t dims[][2] = {{128, 128}, {40, 64}, {192, 128}, {13, 13}, {256, 32}};
    static const int32_t pages[] = {1, 5, 64, 7, 128}, windows[] = {-1, 0, 30, 64, 200};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        for (size_t j = 0; j < 2; j++) {
            if (test_is_short() && j != i % 2) continue;
            attention_case c = prompt(i + 3 * j, 205, 205 + 50 * (int32_t)j);
            c.head_dim = dims[i][0];
            c.v_head_dim = dims[i][1];
            c.page_size = pages[i];
            c.window_left = windows[(i + 2 * j) % 5];
            c.layout = (layout_kind)((i + j) % LAYOUTS);
            c.dense_table = j == 1;
            c.soft_cap = i % 2 == 1 ? 20.0f : 0;
            c.group_size = j == 0 ? 4 : 8;
            cut(&c);
        }
    }
}

/* Keys of several pieces, the window of a row across their borders too. */
static void of_many_keys(void **state) {
    (void)state;
    static const int32_t windows[] = {-1, 1000, 127};
    for (uint64_t seed = 0; seed < 6; seed += test_is_short() ? 6 : 1) {
        attention_case c = prompt(seed, test_is_short() ? 70 : 205, seed % 2 == 0 ? 2150 : 3117);
        c.num_kv_heads = 1;
        c.group_size = seed < 3 ? 8 : 2;
        c.window_left = windows[seed % 3];
        cut(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_every_format),
        cmocka_unit_test(of_every_group),
        cmocka_unit_test(of_other_dims_pages_and_windows),
        cmocka_unit_test(of_many_keys),
    };
    return cmocka_run_group_tests(tests, start_threads, stop_threads);
}
