/* test_quantize_q.c - e4m3 of Q on the host is its definition's, and with the scales it tells,
 * attention computes what it computes for the Q that came.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "quantize_q_case.h"

static void check_case(const qq_case *c, uint64_t seed, void *cookie) {
    qq_inputs in = qq_make(c, seed);
    uint8_t *const codes = malloc(in.codes_bytes);
    float q_scale[QQ_BATCH * 64];
    memset(codes, 0xab, in.codes_bytes);
    kv8_quantize_q_args args = qq_args(c, &in);
    args.qo_indptr = qq_indptr;
    args.q = in.q;
    args.codes_out = codes;
    args.head_scale = c->given ? in.head_scale : NULL;
    args.q_scale_out = c->given ? NULL : q_scale;
    assert_ok(kv8_quantize_q(&args, cookie));
    qq_check(c, &in, codes, q_scale);
    free(codes);
    qq_free(&in);
}

static void codes_are_the_definitions(void **state) {
    (void)state;
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    qq_walk(check_case, NULL);
    qq_walk(check_case, threads);
    kv8_threads_destroy(threads);
}

/* Two requests of ragged K and V; KV heads differ by 2^6 in the size of their queries, which a
 * scale at the wrong place would show. */
enum { HEADS = 4, KV_HEADS = 2, DIM = 16, ROWS = 5, KEYS = 12 };
typedef struct scene {
    float q[ROWS][HEADS][DIM], k[KEYS][KV_HEADS][DIM], v[KEYS][KV_HEADS][DIM];
    double o[ROWS][HEADS][DIM];
} scene;

static void attend(scene *s, kv8_dtype q_dtype, const void *q, const float *q_scale,
                   const int64_t strides[3]) {
    static const int32_t qo_indptr[] = {0, 3, ROWS}, kv_indptr[] = {0, 7, KEYS};
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = HEADS;
    spec.num_kv_heads = KV_HEADS;
    spec.head_dim = DIM;
    spec.q_dtype = q_dtype;
    spec.k_dtype = spec.v_dtype = spec.o_dtype = KV8_F32;
    spec.causal = 1;
    spec.max_batch = 2;
    spec.max_total_q = ROWS;
    spec.max_kv_len = KEYS;
    kv8_paged k = KV8_PAGED_INIT, v;
    k.data = s->k;
    k.stride_slot = KV_HEADS * DIM;
    k.stride_head = DIM;
    v = k;
    v.data = s->v;
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.kv_indptr = kv_indptr;
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.qo_indptr = qo_indptr;
    args.batch = 2;
    args.q = q;
    args.q_stride_row = HEADS * DIM;
    args.q_stride_head = DIM;
    args.q_scale = q_scale;
    if (strides != NULL) {
        args.q_scale_stride_batch = strides[0];
        args.q_scale_stride_kv_head = strides[1];
        args.q_scale_stride_group = strides[2];
    }
    args.k = &k;
    args.v = &v;
    args.pages = &pages;
    assert_ok(kv8_attention_reference(&spec, &args, &s->o[0][0][0], NULL));
}

static void attention_takes_the_scales(void **state) {
    (void)state;
    static scene exact, coded;
    test_rng rng = {3};
    for (int i = 0; i < ROWS * HEADS * DIM; i++) {
        const int head = i / DIM % HEADS;
        ((float *)exact.q)[i] = rng_normal(&rng) * (head < HEADS / KV_HEADS ? 1 : 1.0f / 64) *
                                (i / DIM / HEADS < 3 ? 1 : 1.0f / 16);
    }
    for (int i = 0; i < KEYS * KV_HEADS * DIM; i++) {
        ((float *)exact.k)[i] = rng_normal(&rng) * (i / DIM % KV_HEADS == 0 ? 1 : 64);
        ((float *)exact.v)[i] = rng_normal(&rng);
    }
    attend(&exact, KV8_F32, exact.q, NULL, NULL);
    static const int32_t qo_indptr[] = {0, 3, ROWS};
    uint8_t codes[ROWS * HEADS * DIM];
    float found[2 * KV_HEADS];
    const float given[HEADS] = {0.01f, 0.0125f, 0.00015f, 0.0002f};
    for (int kind = 0; kind < 2; kind++) {
        coded = exact;
        kv8_quantize_q_args args = KV8_QUANTIZE_Q_ARGS_INIT;
        args.batch = 2;
        args.max_rows = ROWS;
        args.num_qo_heads = HEADS;
        args.num_kv_heads = KV_HEADS;
        args.head_dim = DIM;
        args.src_dtype = KV8_F32;
        args.qo_indptr = qo_indptr;
        args.q = exact.q;
        args.codes_out = codes;
        args.q_stride_row = args.codes_stride_row = HEADS * DIM;
        args.q_stride_head = args.codes_stride_head = DIM;
        args.q_scale_out = kind == 0 ? found : NULL;
        args.head_scale = kind == 0 ? NULL : given;
        assert_ok(kv8_quantize_q(&args, NULL));
        const int64_t strides[2][3] = {{KV_HEADS, 1, 0}, {0, HEADS / KV_HEADS, 1}};
        attend(&coded, KV8_E4M3, codes, kind == 0 ? found : given, strides[kind]);
        for (int i = 0; i < ROWS * HEADS * DIM; i++)
            assert_true(fabs(((double *)coded.o)[i] - ((double *)exact.o)[i]) < 0.2);
    }
}

static void refuses_by_name(void **state) {
    (void)state;
    const qq_case c = {.source = KV8_F32, .num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 8};
    qq_inputs in = qq_make(&c, 1);
    uint8_t *const codes = malloc(in.codes_bytes);
    float q_scale[QQ_BATCH * 2];
    kv8_quantize_q_args good = qq_args(&c, &in), args;
    good.qo_indptr = qq_indptr;
    good.q = in.q;
    good.codes_out = codes;
    good.q_scale_out = q_scale;
#define REFUSED(change, code, words)                                        \
    do {                                                                    \
        args = good;                                                        \
        change;                                                             \
        assert_refused(kv8_quantize_q(&args, NULL), KV8_ERR_##code, words); \
    } while (0)
    REFUSED(args.src_dtype = KV8_E4M3, UNSUPPORTED, "src_dtype is e4m3");
    REFUSED(args.batch = -1, INVALID, "batch is -1");
    REFUSED(args.num_kv_heads = 3, INVALID, "4 query heads over 3 KV heads");
    REFUSED(args.head_dim = 577, INVALID, "head_dim is 577");
    REFUSED(args.q = NULL, INVALID, "q is NULL");
    REFUSED(args.head_scale = in.head_scale, INVALID, "both are given");
    REFUSED(args.q_scale_out = NULL, INVALID, "both are NULL");
    REFUSED(args.max_rows = 140, INVALID, "qo_indptr[5] is 149, must be 33 to 140");
    in.head_scale[3] = 0;
    REFUSED((args.q_scale_out = NULL, args.head_scale = in.head_scale), INVALID,
            "head_scale[3] is 0");
    args = good;
    args.batch = 0;
    assert_ok(kv8_quantize_q(&args, NULL));
    free(codes);
    qq_free(&in);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_are_the_definitions),
        cmocka_unit_test(attention_takes_the_scales),
        cmocka_unit_test(refuses_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
