/* test_append_rope.c - the fused rotate + quantise + append stores byte for byte what
 * kv8_rope_apply followed by kv8_cache_append stores, counters included, and its refusals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/rope.h>

#include "cache_testing.h"

enum {
    HEADS = 3,
    DIM = 10,
    V_DIM = 6,
    ROWS = 37,
    ROW = HEADS * (DIM + 1) + 2,
    V_ROW = HEADS * V_DIM
};

static kv8_rope *yarn_rope(int32_t head_dim, int32_t interleaved) {
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.interleaved = interleaved;
    options.kind = KV8_ROPE_YARN;
    options.head_dim = head_dim;
    options.theta = 10000;
    options.factor = 4;
    options.beta_fast = 32;
    options.beta_slow = 1;
    options.original_max_position = 64;
    kv8_rope *rope = NULL;
    assert_ok(kv8_rope_create(&rope, &options));
    return rope;
}

static kv8_cache *new_cache(kv8_dtype dtype, kv8_layout layout, kv8_threads *threads) {
    static const float scales[HEADS] = {0.02f, 0.05f, 1.5f};
    const kv8_cache_layer layer = {.struct_size = sizeof layer,
                                   .k_dtype = dtype,
                                   .v_dtype = KV8_E4M3,
                                   .window_left = -1,
                                   .k_scale = scales};
    kv8_cache_options options = small_options(&layer, 1);
    options.num_kv_heads = HEADS;
    options.k_head_dim = DIM;
    options.v_head_dim = V_DIM;
    options.layout = layout;
    options.threads = threads;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    return cache;
}

/* Bit for bit but for subnormals, which quotients of rows that are rotated on the way may not be.
 */
static void assert_same_values(const uint8_t *a, const uint8_t *b, kv8_dtype dtype) {
    const size_t size = kv8_dtype_size(dtype);
    for (size_t i = 0; i < DIM; i++) {
        float x = 0, y = 0;
        if (memcmp(a + i * size, b + i * size, size) == 0) continue;
        assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, a + i * size, 1, &x));
        assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, b + i * size, 1, &y));
        assert_true(size > 1 && fabsf(x) < 0x1p-126f && fabsf(y) < 0x1p-126f);
    }
}

static void assert_same_heads(const kv8_cache *a, kv8_seq seq_a, const kv8_cache *b, kv8_seq seq_b,
                              kv8_dtype dtype, int32_t position) {
    for (int32_t head = 0; head < HEADS; head++) {
        const stored_head ka = find_head(a, 0, 0, dtype, seq_a, 4, position, head);
        const stored_head kb = find_head(b, 0, 0, dtype, seq_b, 4, position, head);
        assert_same_values(ka.codes, kb.codes, dtype);
        if (dtype == KV8_INT8) assert_int_equal(ka.row_scale->bits, kb.row_scale->bits);
        const stored_head va = find_head(a, 0, 1, KV8_E4M3, seq_a, 4, position, head);
        const stored_head vb = find_head(b, 0, 1, KV8_E4M3, seq_b, 4, position, head);
        assert_memory_equal(va.codes, vb.codes, V_DIM);
    }
}

static float k_rows[ROWS * ROW], k_before[ROWS * ROW], v_rows[ROWS * V_ROW];

static void check_dtype(const kv8_rope *rope, int32_t interleaved, kv8_dtype dtype,
                        kv8_layout layout, kv8_threads *threads) {
    kv8_cache *const fused = new_cache(dtype, layout, threads);
    kv8_cache *const apart = new_cache(dtype, layout, NULL);
    const kv8_seq fused_seqs[2] = {new_seq(fused), new_seq(fused)};
    const kv8_seq apart_seqs[2] = {new_seq(apart), new_seq(apart)};
    const int32_t indptr[3] = {0, 20, ROWS};
    int32_t positions[ROWS];
    test_rng rng = {(uint64_t)dtype};
    for (int i = 0; i < ROWS * ROW; i++) { /* rows of subnormals, of some, of what is near them */
        const float sizes[4] = {5.0f, 0x1p-130f, i % 3 == 0 ? 0x1p-130f : 5.0f, 0x1p-120f};
        k_rows[i] = rng_normal(&rng) * sizes[i / ROW % 4];
    }
    for (int i = 0; i < ROWS * V_ROW; i++) v_rows[i] = rng_normal(&rng);
    k_rows[3] = NAN;
    k_rows[5 * ROW + 2] = 1e30f;
    memcpy(k_before, k_rows, sizeof k_rows);
    for (int i = 0; i < 2; i++) {
        const int32_t count = indptr[i + 1] - indptr[i];
        assert_ok(kv8_cache_extend(fused, fused_seqs[i], count, NULL));
        assert_ok(kv8_cache_extend(apart, apart_seqs[i], count, NULL));
        for (int32_t t = 0; t < count; t++) positions[indptr[i] + t] = 1000 * i + t;
    }
    float cos_sin[ROWS * DIM];
    kv8_rope_angles(rope, positions, ROWS, cos_sin);
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = 2,
                         .seqs = fused_seqs,
                         .indptr = indptr,
                         .src_dtype = KV8_F32,
                         .k = k_rows,
                         .k_stride_row = ROW,
                         .k_stride_head = DIM + 1,
                         .v = v_rows,
                         .v_stride_row = V_ROW,
                         .v_stride_head = V_DIM};
    append.cos_sin = cos_sin;
    append.interleaved = interleaved;
    assert_ok(kv8_cache_append(fused, 0, &append));
    assert_memory_equal(k_rows, k_before, sizeof k_rows); /* the source is the caller's */
    kv8_rope_apply(rope, cos_sin, ROWS, k_rows, HEADS, ROW, DIM + 1);
    append.seqs = apart_seqs;
    append.cos_sin = NULL;
    assert_ok(kv8_cache_append(apart, 0, &append));
    for (int i = 0; i < 2; i++) {
        for (int32_t t = 0; t < indptr[i + 1] - indptr[i]; t++)
            assert_same_heads(fused, fused_seqs[i], apart, apart_seqs[i], dtype, t);
    }
    for (int32_t head = 0; head < HEADS; head++) {
        kv8_cache_counters a, b;
        assert_ok(kv8_cache_get_counters(fused, 0, head, &a));
        assert_ok(kv8_cache_get_counters(apart, 0, head, &b));
        assert_memory_equal(&a, &b, sizeof a);
        if (head == 0) assert_true(a.k_nans > 0);
    }
    kv8_cache_destroy(fused);
    kv8_cache_destroy(apart);
}

static void fused_bytes_equal_two_steps(void **state) {
    (void)state;
    kv8_threads *threads;
    assert_ok(kv8_threads_create(&threads, 2));
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        kv8_rope *const rope = yarn_rope(DIM, interleaved);
        for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++) {
            check_dtype(rope, interleaved, (kv8_dtype)dtype, KV8_LAYOUT_NHD, NULL);
            check_dtype(rope, interleaved, (kv8_dtype)dtype, KV8_LAYOUT_HND, threads);
        }
        kv8_rope_destroy(rope);
    }
    kv8_threads_destroy(threads);
}

#if defined(__x86_64__)
/* By kv8_rope_apply and on the way into a cache; the caller's arithmetic stays what it was. */
static void rotated_subnormals_count_as_0(void **state) {
    (void)state;
    kv8_rope *const rope = yarn_rope(DIM, false);
    const int32_t position = 3, indptr[] = {0, 1};
    float cos_sin[DIM], k[HEADS * DIM], v[V_ROW] = {0};
    kv8_rope_angles(rope, &position, 1, cos_sin);
    for (int i = 0; i < HEADS * DIM; i++) k[i] = i % 3 == 0 ? -0x1p-127f : 0x1p-130f;
    kv8_cache *const cache = new_cache(KV8_BF16, KV8_LAYOUT_NHD, NULL);
    const kv8_seq seq = new_seq(cache);
    assert_ok(kv8_cache_extend(cache, seq, 1, NULL));
    assert_ok(kv8_cache_append(cache, 0,
                               &(kv8_append){.struct_size = sizeof(kv8_append),
                                             .num_seqs = 1,
                                             .seqs = &seq,
                                             .indptr = indptr,
                                             .src_dtype = KV8_F32,
                                             .k = k,
                                             .k_stride_head = DIM,
                                             .v = v,
                                             .v_stride_head = V_DIM,
                                             .cos_sin = cos_sin}));
    volatile float least = 0x1p-130f;
    assert_true(least * 0.5f > 0);
    kv8_rope_apply(rope, cos_sin, 1, k, HEADS, HEADS * DIM, DIM);
    assert_true(least * 0.5f > 0);
    for (int32_t head = 0; head < HEADS; head++) {
        const uint8_t *const codes = find_head(cache, 0, 0, KV8_BF16, seq, 4, 0, head).codes;
        float stored[DIM];
        assert_ok(kv8_widen(KV8_ISA_SCALAR, KV8_BF16, codes, DIM, stored));
        for (int i = 0; i < DIM; i++) assert_true(k[head * DIM + i] == 0 && stored[i] == 0);
    }
    kv8_cache_destroy(cache);
    kv8_rope_destroy(rope);
}
#endif

static void wrong_inputs_are_refused(void **state) {
    (void)state;
    kv8_cache *const cache = new_cache(KV8_E4M3, KV8_LAYOUT_NHD, NULL);
    const kv8_seq seq = new_seq(cache);
    assert_ok(kv8_cache_extend(cache, seq, 1, NULL));
    float k[HEADS * DIM] = {0}, v[V_ROW] = {0}, cos_sin[DIM] = {0};
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = 1,
                         .seqs = &seq,
                         .indptr = (const int32_t[]){0, 1},
                         .src_dtype = KV8_F32,
                         .k = k,
                         .k_stride_head = DIM,
                         .v = v,
                         .v_stride_head = V_DIM,
                         .cos_sin = cos_sin};
    assert_ok(kv8_cache_append(cache, 0, &append));
    append.interleaved = 2;
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "interleaved is 2");
    kv8_cache_destroy(cache);
    const kv8_cache_layer layer = {sizeof layer, KV8_BF16, KV8_BF16, -1, NULL, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    options.k_head_dim = 5;
    kv8_cache *odd = NULL;
    assert_ok(kv8_cache_create(&odd, &options));
    const kv8_seq other = new_seq(odd);
    assert_ok(kv8_cache_extend(odd, other, 1, NULL));
    append.interleaved = 0;
    append.seqs = &other;
    assert_refused(kv8_cache_append(odd, 0, &append), KV8_ERR_INVALID, "k_head_dim is 5");
    kv8_cache_destroy(odd);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fused_bytes_equal_two_steps),
#if defined(__x86_64__)
        cmocka_unit_test(rotated_subnormals_count_as_0),
#endif
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("append_rope", tests, NULL, NULL);
}
