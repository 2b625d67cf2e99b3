/* test_cache_append.c - every stored byte against the scalar codecs: page sizes, layouts, dtypes,
 * scales per head and per sequence, sources and strides, counters, threads, refusals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_testing.h"

#include "cache_impl.h"

enum { HEADS = 2, K_DIM = 5, V_DIM = 3, MAX_ROWS = 400 };

static const float k_scales[HEADS] = {1, 0.03f}, v_scales[HEADS] = {2.0f, 0.011f};
static const float own_k_scales[HEADS] = {0.25f, 1.7f}, own_v_scales[HEADS] = {0x1p-130f, 3.0f};

/* Rows with a little of everything: zeros, values that clip, infinities, NaN; every eighth is of
 * subnormals, which by the least scale above are codes beside 0. */
static void random_rows(test_rng *rng, float *values, size_t n) {
    const float size = rng_range(rng, 0, 7) == 0 ? 0x1p-130f : 4;
    for (size_t i = 0; i < n; i++) {
        values[i] = rng_normal(rng) * size;
        const int32_t kind = rng_range(rng, 0, 60);
        if (kind == 0) values[i] = 0;
        if (kind == 1) values[i] *= 1e6f;
        if (kind == 2) values[i] = INFINITY;
        if (kind == 3) values[i] = -INFINITY;
        if (kind == 4) values[i] = NAN;
    }
}

typedef struct fixture {
    kv8_cache *cache;
    kv8_dtype k_dtype, v_dtype;
    int32_t page_size;
    kv8_seq seq[3];
    int32_t length[3];
    float k[3][MAX_ROWS][HEADS][K_DIM], v[3][MAX_ROWS][HEADS][V_DIM];
} fixture;
static fixture f;

/* Appends count[i] tokens to sequence i in one call, from a strided f32 buffer. */
static void append_rows(test_rng *rng, const int32_t count[3]) {
    enum { K_ROW = HEADS * (K_DIM + 2) + 3, V_ROW = HEADS * (V_DIM + 1) + 1 };
    static float k[3 * MAX_ROWS * K_ROW], v[3 * MAX_ROWS * V_ROW];
    int32_t indptr[4] = {0};
    for (int i = 0; i < 3; i++) {
        assert_ok(kv8_cache_extend(f.cache, f.seq[i], count[i], NULL));
        indptr[i + 1] = indptr[i] + count[i];
        for (int32_t r = 0; r < count[i]; r++) {
            float(*const k_row)[K_DIM] = f.k[i][f.length[i] + r];
            float(*const v_row)[V_DIM] = f.v[i][f.length[i] + r];
            random_rows(rng, k_row[0], HEADS * K_DIM);
            random_rows(rng, v_row[0], HEADS * V_DIM);
            for (int h = 0; h < HEADS; h++) {
                memcpy(k + (indptr[i] + r) * K_ROW + h * (K_DIM + 2), k_row[h], sizeof *k_row);
                memcpy(v + (indptr[i] + r) * V_ROW + h * (V_DIM + 1), v_row[h], sizeof *v_row);
            }
        }
        f.length[i] += count[i];
    }
    const kv8_append append = {.struct_size = sizeof(kv8_append),
                               .num_seqs = 3,
                               .seqs = f.seq,
                               .indptr = indptr,
                               .src_dtype = KV8_F32,
                               .k = k,
                               .k_stride_row = K_ROW,
                               .k_stride_head = K_DIM + 2,
                               .v = v,
                               .v_stride_row = V_ROW,
                               .v_stride_head = V_DIM + 1};
    assert_ok(kv8_cache_append(f.cache, 0, &append));
}

/* Bytes, read-back values and counters of everything appended. Sequence 1 has its own scales. */
static void check_all(void) {
    kv8_narrow_counts k_counts[HEADS] = {{0}}, v_counts[HEADS] = {{0}};
    for (int i = 0; i < 3; i++) {
        static float k_read[MAX_ROWS][HEADS][K_DIM], v_read[MAX_ROWS][HEADS][V_DIM];
        assert_ok(kv8_cache_read(f.cache, 0, f.seq[i], 0, f.length[i], k_read[0][0], v_read[0][0]));
        for (int32_t t = 0; t < f.length[i]; t++) {
            for (int32_t h = 0; h < HEADS; h++) {
                const float ks = i == 1 ? own_k_scales[h] : k_scales[h];
                const float vs = i == 1 ? own_v_scales[h] : v_scales[h];
                const stored_head k =
                    find_head(f.cache, 0, 0, f.k_dtype, f.seq[i], f.page_size, t, h);
                const stored_head v =
                    find_head(f.cache, 0, 1, f.v_dtype, f.seq[i], f.page_size, t, h);
                check_head(k, f.k_dtype, f.k[i][t][h], K_DIM, ks, &k_counts[h]);
                check_head(v, f.v_dtype, f.v[i][t][h], V_DIM, vs, &v_counts[h]);
                /* Read-back is code * (row scale) * scale, by the codec that was just checked. */
                float wide[K_DIM];
                assert_ok(kv8_widen(KV8_ISA_SCALAR, f.k_dtype, k.codes, K_DIM, wide));
                const float row = k.row_scale == NULL ? 1.0f : kv8_f16_to_f32(*k.row_scale);
                for (int32_t d = 0; d < K_DIM; d++) {
                    const float want = wide[d] * row * ks, got = k_read[t][h][d];
                    assert_true(isnan(want) ? isnan(got) : got == want);
                }
                /* A finite value that did not clip comes back within the format's half step
                 * (e5m2: 1/8 relative; below the normal range an absolute step). */
                for (int32_t d = 0; d < V_DIM; d++) {
                    const float x = f.v[i][t][h][d];
                    if (f.v_dtype == KV8_INT8 || !(fabsf(x / vs) <= 240.0f) ||
                        fabsf(x / vs) < 0.02f)
                        continue;
                    assert_true(fabsf(v_read[t][h][d] - x) <= fabsf(x) * 0.126f);
                }
            }
        }
    }
    kv8_cache_counters all;
    assert_ok(kv8_cache_sum_counters(f.cache, &all));
    for (int32_t h = 0; h < HEADS; h++) {
        kv8_cache_counters counters;
        assert_ok(kv8_cache_get_counters(f.cache, 0, h, &counters));
        all.k_clips -= counters.k_clips;
        all.k_nans -= counters.k_nans;
        all.v_clips -= counters.v_clips;
        all.v_nans -= counters.v_nans;
        assert_int_equal(counters.k_clips, k_counts[h].clips);
        assert_int_equal(counters.k_nans, k_counts[h].nans);
        assert_int_equal(counters.v_clips, v_counts[h].clips);
        assert_int_equal(counters.v_nans, v_counts[h].nans);
        assert_true(counters.k_nans > 0 && counters.v_clips > 0);
    }
    assert_true(all.k_clips == 0 && all.k_nans == 0 && all.v_clips == 0 && all.v_nans == 0);
    assert_ok(kv8_cache_reset_counters(f.cache));
    kv8_cache_counters counters;
    assert_ok(kv8_cache_get_counters(f.cache, 0, 0, &counters));
    assert_true(counters.k_clips == 0 && counters.k_nans == 0 && counters.v_clips == 0);
}

static void open_fixture(kv8_dtype k_dtype, kv8_dtype v_dtype, int32_t page_size, kv8_layout layout,
                         kv8_threads *threads) {
    const kv8_cache_layer layer = {
        sizeof(kv8_cache_layer), k_dtype, v_dtype, -1, k_scales, v_scales};
    kv8_cache_options options = small_options(&layer, 1);
    options.num_kv_heads = HEADS;
    options.k_head_dim = K_DIM;
    options.v_head_dim = V_DIM;
    options.page_size = page_size;
    options.layout = layout;
    options.num_pages = 3 * MAX_ROWS / page_size + 6;
    options.threads = threads;
    f.k_dtype = k_dtype;
    f.v_dtype = v_dtype;
    f.page_size = page_size;
    assert_ok(kv8_cache_create(&f.cache, &options));
    for (int i = 0; i < 3; i++) {
        f.seq[i] = new_seq(f.cache);
        f.length[i] = 0;
    }
    assert_ok(kv8_cache_seq_set_scales(f.cache, f.seq[1], 0, own_k_scales, own_v_scales));
}

static void stored_bytes_match_the_scalar_codecs(void **state) {
    (void)state;
    const int32_t page_sizes[] = {1, 2, 7, 16, 64};
    test_rng rng = {1};
    for (size_t p = 0; p < sizeof page_sizes / sizeof *page_sizes; p++) {
        for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++) {
            for (int layout = 0; layout < 2; layout++) {
                /* K and V choose apart: V gets the next dtype round the list. */
                const kv8_dtype v_dtype = dtype + 1 == KV8_DTYPE_COUNT ? KV8_F32 : dtype + 1;
                open_fixture((kv8_dtype)dtype, v_dtype, page_sizes[p], (kv8_layout)layout, NULL);
                append_rows(&rng, (const int32_t[]){1, 0, 6});
                append_rows(&rng, (const int32_t[]){30, 17, 1});
                append_rows(&rng, (const int32_t[]){2, 41, 70});
                check_all();
                kv8_cache_destroy(f.cache);
            }
        }
    }
}

static void threads_change_nothing(void **state) {
    (void)state;
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 4));
    test_rng rng = {2};
    open_fixture(KV8_E4M3, KV8_INT8, 16, KV8_LAYOUT_HND, threads);
    /* 1100 rows x 2 heads x 8 elements: more than the limit for one thread. */
    append_rows(&rng, (const int32_t[]){400, 300, 399});
    check_all();
    kv8_cache_destroy(f.cache);
    kv8_threads_destroy(threads);
}

static void half_sources_equal_their_f32_values(void **state) {
    (void)state;
    const kv8_cache_layer layer = {
        sizeof(kv8_cache_layer), KV8_E4M3, KV8_F32, -1, k_scales, v_scales};
    kv8_cache_options options = small_options(&layer, 1);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq seqs[3] = {new_seq(cache), new_seq(cache), new_seq(cache)};
    float values[3 * 8];
    kv8_bf16 bf16[3 * 8];
    kv8_f16 f16[3 * 8];
    test_rng rng = {3};
    for (int i = 0; i < 24; i++) {
        bf16[i] = kv8_bf16_from_f32(rng_normal(&rng));
        values[i] = kv8_bf16_to_f32(bf16[i]);
        f16[i] = kv8_f16_from_f32(values[i]); /* exact: 8 bits of mantissa, modest range */
    }
    const void *const sources[3] = {values, bf16, f16};
    const kv8_dtype dtypes[3] = {KV8_F32, KV8_BF16, KV8_F16};
    float k[3][24], v[3][24];
    for (int i = 0; i < 3; i++) {
        assert_ok(kv8_cache_extend(cache, seqs[i], 3, NULL));
        const kv8_append append = {.struct_size = sizeof(kv8_append),
                                   .num_seqs = 1,
                                   .seqs = &seqs[i],
                                   .indptr = (const int32_t[]){0, 3},
                                   .src_dtype = dtypes[i],
                                   .k = sources[i],
                                   .k_stride_row = 8,
                                   .k_stride_head = 4,
                                   .v = sources[i],
                                   .v_stride_row = 8,
                                   .v_stride_head = 4};
        assert_ok(kv8_cache_append(cache, 0, &append));
        assert_ok(kv8_cache_read(cache, 0, seqs[i], 0, 3, k[i], v[i]));
    }
    assert_memory_equal(k[0], k[1], sizeof k[0]);
    assert_memory_equal(k[0], k[2], sizeof k[0]);
    assert_memory_equal(v[0], v[1], sizeof v[0]);
    assert_memory_equal(v[0], v[2], sizeof v[0]);
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = 1,
                         .seqs = &seqs[0],
                         .indptr = (const int32_t[]){0, 1},
                         .src_dtype = KV8_E4M3,
                         .k = values,
                         .v = values};
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_UNSUPPORTED, "e4m3");
    kv8_cache_destroy(cache);
}

static void wrong_appends_are_refused(void **state) {
    (void)state;
    const kv8_cache_layer layers[2] = {
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 3, NULL, NULL}};
    kv8_cache_options options = small_options(layers, 2);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    float rows[64 * 8] = {0};
    const int32_t ids[64] = {0};
    const kv8_seq a = new_seq(cache);
    assert_ok(kv8_cache_extend(cache, a, 20, ids));
    assert_ok(kv8_cache_extend(cache, a, 4, ids));
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = 1,
                         .seqs = &a,
                         .indptr = (const int32_t[]){0, 24},
                         .src_dtype = KV8_F32,
                         .k = rows,
                         .k_stride_row = 8,
                         .k_stride_head = 4,
                         .v = rows,
                         .v_stride_row = 8,
                         .v_stride_head = 4};
    assert_ok(kv8_cache_append(cache, 0, &append));
    assert_refused(kv8_cache_append(cache, 1, &append), KV8_ERR_INVALID, "behind the window");
    assert_refused(kv8_cache_append(cache, 2, &append), KV8_ERR_INVALID, "layer is 2");
    append.indptr = (const int32_t[]){0, 25};
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "25 rows");
    append.indptr = (const int32_t[]){1, 2};
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "indptr[0]");
    append.indptr = (const int32_t[]){0, -1};
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "indptr[1]");
    append.indptr = (const int32_t[]){0, 4};
    append.v = NULL;
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "NULL");
    append.v = rows;
    const kv8_seq twice[2] = {a, a};
    append.seqs = twice;
    append.num_seqs = 2;
    append.indptr = (const int32_t[]){0, 2, 4};
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "twice");
    append.seqs = &a;
    append.num_seqs = 1;
    append.indptr = (const int32_t[]){0, 4};
    assert_ok(kv8_cache_append(cache, 1, &append));
    /* Nobody may write under a fork, nor what others can find. */
    kv8_seq fork = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_fork(cache, a, &fork));
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "shared");
    assert_ok(kv8_cache_seq_destroy(cache, fork));
    assert_ok(kv8_cache_append(cache, 0, &append));
    assert_ok(kv8_cache_publish(cache, a));
    assert_refused(kv8_cache_append(cache, 0, &append), KV8_ERR_INVALID, "published");
    append.num_seqs = 0;
    assert_ok(kv8_cache_append(cache, 0, &append));
    kv8_cache_destroy(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_bytes_match_the_scalar_codecs),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(half_sources_equal_their_f32_values),
        cmocka_unit_test(wrong_appends_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
