/* cache_testing.h - for tests of the cache: an independent walk from (sequence, position, head) to
 * stored bytes through page tables and kv8_paged strides, and what those bytes must be by the
 * scalar codecs alone.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CACHE_TESTING_H
#define KV8_CACHE_TESTING_H

#include "testing.h"

#include <kv8/cache.h>

/* Two heads of 4 + 4 elements, one full layer: a start for tests that change a few fields. */
static inline kv8_cache_options small_options(const kv8_cache_layer *layers, int32_t num_layers) {
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    options.num_layers = num_layers;
    options.layers = layers;
    options.num_kv_heads = 2;
    options.k_head_dim = 4;
    options.page_size = 4;
    options.num_pages = 16;
    options.max_seqs = 8;
    options.max_seq_len = 1000;
    return options;
}

enum { SMALL_ROW = 8 }; /* values of a token: 2 heads of 4 */
/* Stores rows [n, SMALL_ROW] of f32, K and V alike, at the newest positions of every layer. */
static inline void append_small(kv8_cache *cache, int32_t num_layers, kv8_seq seq,
                                const float *rows, int32_t n) {
    const kv8_append append = {.struct_size = sizeof(kv8_append),
                               .num_seqs = 1,
                               .seqs = &seq,
                               .indptr = (const int32_t[]){0, n},
                               .src_dtype = KV8_F32,
                               .k = rows,
                               .k_stride_row = SMALL_ROW,
                               .k_stride_head = 4,
                               .v = rows,
                               .v_stride_row = SMALL_ROW,
                               .v_stride_head = 4};
    for (int32_t layer = 0; layer < num_layers; layer++)
        assert_ok(kv8_cache_append(cache, layer, &append));
}

static inline kv8_seq new_seq(kv8_cache *cache) {
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    return seq;
}
static inline int32_t seq_length(const kv8_cache *cache, kv8_seq seq) {
    int32_t length = -1;
    assert_ok(kv8_cache_seq_length(cache, seq, &length));
    return length;
}
static inline int32_t pages_free(const kv8_cache *cache) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    assert_ok(kv8_cache_get_stats(cache, &stats));
    return stats.pages_free;
}

/* The layer's page of a position; KV8_NO_PAGE behind the window. */
static inline int32_t page_of(const kv8_cache *cache, int32_t layer, kv8_seq seq, int32_t page_size,
                              int32_t position) {
    enum { CAPACITY = 4096 };
    static int32_t pages[CAPACITY];
    int32_t indptr[2], last_page_len;
    assert_ok(kv8_cache_page_table(cache, layer, &seq, 1, indptr, pages, CAPACITY, &last_page_len));
    assert_true(position / page_size < indptr[1]);
    return pages[position / page_size];
}

/* Where one head of one position is stored. */
typedef struct stored_head {
    uint8_t *codes;
    const kv8_f16 *row_scale; /* NULL unless int8 */
} stored_head;
static inline stored_head find_head(const kv8_cache *cache, int32_t layer, int kv, kv8_dtype dtype,
                                    kv8_seq seq, int32_t page_size, int32_t position,
                                    int32_t head) {
    kv8_paged view[2] = {KV8_PAGED_INIT, KV8_PAGED_INIT};
    assert_ok(kv8_cache_layer_kv(cache, layer, &view[0], &view[1]));
    const kv8_paged *const p = &view[kv];
    const int32_t page = page_of(cache, layer, seq, page_size, position);
    const int32_t slot = position % page_size;
    assert_true(page >= 0);
    stored_head result = {0};
    const int64_t at = page * p->stride_page + slot * p->stride_slot + head * p->stride_head;
    result.codes = (uint8_t *)(uintptr_t)p->data + at * (int64_t)kv8_dtype_size(dtype);
    assert_true((p->row_scale != NULL) == (dtype == KV8_INT8));
    if (p->row_scale != NULL)
        result.row_scale = p->row_scale + page * p->row_scale_stride_page +
                           slot * p->row_scale_stride_slot + head * p->row_scale_stride_head;
    return result;
}

/* The code of value / scale by the scalar codecs; saturating. Little-endian bytes. */
static inline void expected_code(kv8_dtype dtype, float value, float scale, uint8_t *bytes,
                                 kv8_narrow_counts *counts) {
    const float x = value / scale;
    const float max = kv8_dtype_max(dtype);
    if (isnan(x)) counts->nans++;
    if (fabsf(x) > max) counts->clips++;
    const float clamped = x > max ? max : x < -max ? -max : x;
    if (dtype == KV8_F32) memcpy(bytes, &clamped, 4);
    if (dtype == KV8_BF16) {
        const kv8_bf16 code = kv8_bf16_from_f32(clamped);
        memcpy(bytes, &code, 2);
    }
    if (dtype == KV8_F16) {
        const kv8_f16 code = kv8_f16_from_f32(clamped);
        memcpy(bytes, &code, 2);
    }
    if (dtype == KV8_E4M3) bytes[0] = kv8_e4m3_from_f32(x).bits;
    if (dtype == KV8_E4M3FNUZ) bytes[0] = kv8_e4m3fnuz_from_f32(x).bits;
    if (dtype == KV8_E5M2) bytes[0] = kv8_e5m2_from_f32(x).bits;
}

/* int8: the smallest f16 s with 127 s >= absmax, found by walking f16's codes upwards. */
static inline void expected_int8(const float *values, int32_t n, float scale, int8_t *codes,
                                 kv8_f16 *row_scale, kv8_narrow_counts *counts) {
    float absmax = 0;
    uint64_t nans = 0;
    bool zero = true;
    for (int32_t d = 0; d < n; d++) {
        const float x = values[d] / scale;
        nans += isnan(x) != 0;
        zero = zero && x == 0;
        if (isfinite(x) && fabsf(x) > absmax) absmax = fabsf(x);
    }
    counts->nans += nans;
    *row_scale = (kv8_f16){nans > 0 ? 0x7e00 : 0};
    memset(codes, 0, (size_t)n);
    if (nans > 0 || zero) return;
    row_scale->bits = 1;
    while (row_scale->bits < 0x7bff && 127.0 * (double)kv8_f16_to_f32(*row_scale) < (double)absmax)
        row_scale->bits++;
    for (int32_t d = 0; d < n; d++) {
        const float q = values[d] / scale / kv8_f16_to_f32(*row_scale);
        counts->clips += fabsf(q) > 127;
        codes[d] = (int8_t)rint(fmax(-127.0, fmin(127.0, (double)q)));
    }
}

/* The stored bytes of one head are exactly those of `values`. Adds the clips and NaN expected. */
static inline void check_head(stored_head stored, kv8_dtype dtype, const float *values, int32_t n,
                              float scale, kv8_narrow_counts *counts) {
    if (dtype == KV8_INT8) {
        int8_t codes[576];
        kv8_f16 row_scale;
        expected_int8(values, n, scale, codes, &row_scale, counts);
        const float got = kv8_f16_to_f32(*stored.row_scale), want = kv8_f16_to_f32(row_scale);
        if (isnan(want)) {
            assert_true(isnan(got)); /* the codes beside a NaN scale mean nothing */
            return;
        }
        assert_true(got == want);
        assert_memory_equal(stored.codes, codes, (size_t)n);
        return;
    }
    const size_t size = kv8_dtype_size(dtype);
    for (int32_t d = 0; d < n; d++) {
        uint8_t bytes[4] = {0};
        expected_code(dtype, values[d], scale, bytes, counts);
        assert_memory_equal(stored.codes + (size_t)d * size, bytes, size);
    }
}

#endif
