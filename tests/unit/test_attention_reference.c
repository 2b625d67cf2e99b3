/* test_attention_reference.c - the oracle against results that can be worked out by hand.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention.h>

#include "testing.h"

enum { KEYS = 8 };

/* f32 everywhere, one request, pages of one token: key j lies in page j. */
typedef struct tiny {
    kv8_attention_spec spec;
    kv8_attention_args args;
    kv8_paged k_pages, v_pages;
    kv8_page_table table;
    int32_t qo_indptr[2], page_indptr[2], pages[KEYS], last[1];
    float q[16], k[32], v[32], sinks[4];
    double o[16], lse[8];
} tiny;

static void tiny_init(tiny *t, int32_t qo_len, int32_t kv_len, int32_t num_qo_heads,
                      int32_t num_kv_heads, int32_t head_dim) {
    memset(t, 0, sizeof *t);
    t->spec = (kv8_attention_spec)KV8_ATTENTION_SPEC_INIT;
    t->spec.num_qo_heads = num_qo_heads;
    t->spec.num_kv_heads = num_kv_heads;
    t->spec.head_dim = head_dim;
    t->spec.q_dtype = t->spec.k_dtype = t->spec.v_dtype = KV8_F32;
    t->spec.page_size = 1;
    t->spec.window_left = -1;
    t->spec.max_batch = 1;
    t->spec.max_total_q = 16;
    t->spec.max_kv_len = KEYS;
    t->qo_indptr[1] = qo_len;
    t->page_indptr[1] = kv_len;
    t->last[0] = 1;
    for (int32_t j = 0; j < KEYS; j++) t->pages[j] = j;
    t->args = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    t->args.batch = 1;
    t->args.qo_indptr = t->qo_indptr;
    t->args.q = t->q;
    t->args.q_stride_head = head_dim;
    t->args.q_stride_row = num_qo_heads * head_dim;
    t->args.sm_scale = 1;
    t->k_pages = (kv8_paged)KV8_PAGED_INIT;
    t->k_pages.data = t->k;
    t->k_pages.stride_page = t->k_pages.stride_slot = num_kv_heads * head_dim;
    t->k_pages.stride_head = head_dim;
    t->v_pages = t->k_pages;
    t->v_pages.data = t->v;
    t->table = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    t->table.page_indptr = t->page_indptr;
    t->table.page_indices = t->pages;
    t->table.last_page_len = t->last;
    t->args.k = &t->k_pages;
    t->args.v = &t->v_pages;
    t->args.pages = &t->table;
}

#define assert_near(got, wanted) assert_true(fabs((got) - (wanted)) <= 1e-7)

static void two_keys_weigh_one_to_three(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 2, 1, 1, 1);
    t.q[0] = 1;
    t.k[0] = 0;
    t.k[1] = logf(3);
    t.v[0] = 8;
    t.v[1] = -4;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 0.25 * 8 - 0.75 * 4);
    assert_near(t.lse[0], log(4.0));
}

static void default_scale_is_one_over_sqrt_head_dim(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 1, 1, 1, 4);
    t.args.sm_scale = 0;
    for (int d = 0; d < 4; d++) t.q[d] = t.k[d] = 3;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.lse[0], 18); /* 36 / 2 */
}

static void sink_takes_its_share_and_stays_out_of_lse(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 1, 1, 1, 1);
    t.v[0] = 10;
    t.sinks[0] = logf(4);
    t.args.sink_logit = t.sinks;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 2); /* 1 / (1 + 4) */
    assert_near(t.lse[0], 0);
    t.args.sm_scale = 100; /* scales scores, not sinks */
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 2);
    t.sinks[0] = INFINITY;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_true(t.o[0] == 0 && t.lse[0] == 0);
    t.sinks[0] = -INFINITY;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 10);
    t.sinks[0] = 1000; /* exp(1000) is no f64 */
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 0);
}

/* Equal scores make o the mean of the visible values, here of the keys' own numbers. */
static void causal_and_window_show_the_right_keys(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 3, 5, 1, 1, 1); /* rows at positions 2, 3, 4 */
    for (int j = 0; j < KEYS; j++) t.v[j] = (float)j;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    for (int row = 0; row < 3; row++) assert_near(t.o[row], 2.0); /* mean of 0..4 */
    t.spec.causal = 1;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 1.0); /* 0..2 */
    assert_near(t.o[1], 1.5);
    assert_near(t.o[2], 2.0);
    assert_near(t.lse[0], log(3.0));
    t.spec.window_left = 1; /* itself and one before */
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 1.5);
    assert_near(t.o[2], 3.5);
    t.spec.window_left = 0;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[1], 3.0);
    t.spec.causal = 0; /* a window alone bounds only the past */
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 3.0); /* 2..4 */
}

static void rows_before_the_first_key_are_empty(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 4, 2, 1, 1, 1);
    t.spec.causal = 1;
    t.v[0] = 5;
    t.v[1] = 7;
    t.sinks[0] = 3;
    t.args.sink_logit = t.sinks;
    t.o[0] = t.o[1] = 99;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    for (int row = 0; row < 2; row++) assert_true(t.o[row] == 0 && t.lse[row] == (double)-INFINITY);
    assert_near(t.o[2], 5 / (1 + exp(3.0)));
}

static void mask_bits_start_at_the_lowest(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 2, 5, 1, 1, 1);
    const int64_t mask_indptr[] = {1, 3};
    /* row 0 sees keys 0 and 3, row 1 (bits 5..9) keys 2 and 4 */
    const uint8_t bits[] = {0xff, 0x89, 0x02};
    t.spec.has_mask = 1;
    t.args.mask_bits = bits;
    t.args.mask_indptr = mask_indptr;
    for (int j = 0; j < KEYS; j++) t.v[j] = (float)j;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], 1.5);
    assert_near(t.o[1], 3.0);
}

static void heads_of_a_group_share_their_keys(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 1, 4, 2, 1);
    t.v[0] = 1;
    t.v[1] = 2;
    t.k[0] = 10;
    t.k[1] = 20;
    for (int h = 0; h < 4; h++) t.q[h] = (float)(h + 1);
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    const double o[] = {1, 1, 2, 2}, lse[] = {10, 20, 60, 80};
    for (int h = 0; h < 4; h++) {
        assert_near(t.o[h], o[h]);
        assert_near(t.lse[h], lse[h]);
    }
}

static void cap_bends_scores(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 1, 1, 1, 1);
    t.q[0] = 3;
    t.k[0] = 4;
    t.args.logits_soft_cap = 5;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.lse[0], 5 * tanh(12.0 / 5));
}

static void codes_and_scales_mean_what_they_say(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 1, 1, 1, 2);
    const kv8_e4m3 k[] = {{0x38}, {0xb0}}; /* 1, -0.5 */
    const int8_t v[] = {100, -7};
    const kv8_f16 row_scale[] = {{0x3800}}; /* 0.5 */
    const float k_scale = 3, v_scale = 2;
    t.spec.k_dtype = KV8_E4M3;
    t.spec.v_dtype = KV8_INT8;
    t.k_pages.data = k;
    t.v_pages.data = v;
    t.v_pages.row_scale = row_scale;
    t.args.k_scale = &k_scale;
    t.args.v_scale = &v_scale;
    t.q[0] = 2;
    t.q[1] = 8;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.lse[0], -6); /* (2 * 1 - 8 * 0.5) * 3 */
    assert_near(t.o[0], 100);
    assert_near(t.o[1], -7);
}

static void e4m3_queries_take_their_scale(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 2, 1, 2, 1, 1);
    const kv8_e4m3 q[] = {{0x38}, {0x38}, {0x38}, {0x40}}; /* 1 1 1 2 */
    const float scale[] = {1, 2, 3, 4};                    /* [row, head in group] */
    t.spec.q_dtype = KV8_E4M3;
    t.args.q = q;
    t.args.q_scale = scale;
    t.args.q_scale_stride_row = 2;
    t.args.q_scale_stride_group = 1;
    t.k[0] = 10;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    const double lse[] = {10, 20, 30, 80};
    for (int i = 0; i < 4; i++) assert_near(t.lse[i], lse[i]);
}

static void pages_are_followed_in_table_order(void **state) {
    (void)state;
    tiny t;
    tiny_init(&t, 1, 2, 1, 1, 1); /* two pages of three tokens, the second holds two */
    t.spec.page_size = 3;
    t.k_pages.stride_page = t.v_pages.stride_page = 3;
    t.last[0] = 2;
    t.pages[0] = 2;
    t.pages[1] = 0;
    for (int j = 0; j < 9; j++) t.v[j] = (float)(1 << j);
    t.v[2] = NAN; /* the tail of the second page */
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], (64 + 128 + 256 + 1 + 2) / 5.0);
    const int32_t lens[] = {5};
    t.table = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    t.table.block_table = t.pages;
    t.table.block_table_stride = 2;
    t.table.seq_lens = lens;
    assert_ok(kv8_attention_reference(&t.spec, &t.args, t.o, t.lse));
    assert_near(t.o[0], (64 + 128 + 256 + 1 + 2) / 5.0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_keys_weigh_one_to_three),
        cmocka_unit_test(default_scale_is_one_over_sqrt_head_dim),
        cmocka_unit_test(sink_takes_its_share_and_stays_out_of_lse),
        cmocka_unit_test(causal_and_window_show_the_right_keys),
        cmocka_unit_test(rows_before_the_first_key_are_empty),
        cmocka_unit_test(mask_bits_start_at_the_lowest),
        cmocka_unit_test(heads_of_a_group_share_their_keys),
        cmocka_unit_test(cap_bends_scores),
        cmocka_unit_test(codes_and_scales_mean_what_they_say),
        cmocka_unit_test(e4m3_queries_take_their_scale),
        cmocka_unit_test(pages_are_followed_in_table_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
