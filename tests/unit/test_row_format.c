/* test_row_format.c - rows as data: sizes and offsets against the published layouts, pages of rows,
 * and values through every format against the scalar codecs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include "row_format.h"

static void sizes_of_scalar_rows(void **state) {
    (void)state;
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++) {
        for (int32_t dim = 1; dim <= KV8_MAX_ROW_VALUES; dim += 23) {
            const kv8_row_format row = kv8_row_format_of((kv8_dtype)dtype, dim);
            const size_t codes = (size_t)dim * kv8_dtype_size((kv8_dtype)dtype);
            assert_int_equal(kv8_row_num_values(&row), dim);
            assert_int_equal(kv8_row_bytes(&row), codes);
            assert_int_equal(kv8_row_num_scales(&row), dtype == KV8_INT8);
            assert_int_equal(kv8_row_scale_bytes(&row), dtype == KV8_INT8 ? 2 : 0);
            assert_int_equal(kv8_row_total_bytes(&row), codes + (dtype == KV8_INT8 ? 2 : 0));
        }
    }
}

static void sizes_of_latent_rows(void **state) {
    (void)state;
    const kv8_row_format *const tail = &kv8_row_latent_584, *const within = &kv8_row_latent_656;
    assert_int_equal(kv8_row_num_values(tail), 512);
    assert_int_equal(kv8_row_bytes(tail), 576);
    assert_int_equal(kv8_row_num_scales(tail), 7);
    assert_int_equal(kv8_row_scale_bytes(tail), 8);
    assert_int_equal(kv8_row_total_bytes(tail), 584);
    assert_int_equal(kv8_row_segment_offset(tail, 1), 448);
    assert_int_equal(kv8_row_num_values(within), 576);
    assert_int_equal(kv8_row_bytes(within), 656);
    assert_int_equal(kv8_row_num_scales(within), 4);
    assert_int_equal(kv8_row_scale_bytes(within), 16);
    assert_int_equal(kv8_row_total_bytes(within), 656);
    assert_int_equal(kv8_row_segment_offset(within, 1), 528);
}

/* A page of 584-byte rows is rows, then scales, padded to a multiple of 576. */
static void pages_of_latent_rows(void **state) {
    (void)state;
    static const struct {
        int32_t slots;
        size_t bytes;
    } pages[] = {{2, 1728}, {64, 37440}, {256, 149760}};
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        const kv8_page_shape shape = {.num_slots = pages[i].slots, .num_heads = 1};
        kv8_row_plane rows, scales;
        size_t bytes = 0;
        assert_true(kv8_row_lay_out(&kv8_row_latent_584, &shape, &bytes, &rows, &scales));
        assert_true(kv8_row_lay_out_scales(&kv8_row_latent_584, &shape, &bytes, &scales));
        assert_int_equal(bytes, pages[i].bytes);
        assert_int_equal(rows.offset, 0);
        assert_int_equal(rows.slot_bytes, 576);
        assert_int_equal(scales.offset, 576 * pages[i].slots);
        assert_int_equal(scales.slot_bytes, 8);
        bytes = 0;
        assert_true(kv8_row_lay_out(&kv8_row_latent_656, &shape, &bytes, &rows, &scales));
        assert_true(kv8_row_lay_out_scales(&kv8_row_latent_656, &shape, &bytes, &scales));
        assert_int_equal(bytes, 656 * pages[i].slots);
        assert_int_equal(rows.slot_bytes, 656);
    }
}

static void pages_of_int8_rows(void **state) {
    (void)state;
    const kv8_row_format row = kv8_row_format_of(KV8_INT8, 10);
    for (int head_major = 0; head_major < 2; head_major++) {
        const kv8_page_shape shape = {.num_slots = 7, .num_heads = 3, .head_major = head_major};
        kv8_row_plane rows, scales;
        size_t bytes = 1; /* something stands before */
        assert_true(kv8_row_lay_out(&row, &shape, &bytes, &rows, &scales));
        assert_int_equal(rows.offset, 64);
        assert_int_equal(bytes, 64 + 210);
        assert_int_equal(rows.slot_bytes, head_major ? 10 : 30);
        assert_int_equal(rows.head_bytes, head_major ? 70 : 10);
        assert_true(kv8_row_lay_out_scales(&row, &shape, &bytes, &scales));
        assert_int_equal(scales.offset, 320);
        assert_int_equal(scales.slot_bytes, head_major ? 2 : 6);
        assert_int_equal(scales.head_bytes, head_major ? 14 : 2);
        assert_int_equal(bytes, 320 + 42);
    }
    const kv8_page_shape huge = {.num_slots = INT32_MAX, .num_heads = INT32_MAX};
    kv8_row_plane plane;
    size_t bytes = 0;
    assert_false(kv8_row_lay_out(&row, &huge, &bytes, &plane, &plane));
}

/* The block's scale by its definition: powers of two upwards until nothing clips. */
static float searched_scale(const float *values, int32_t count) {
    float scale = 0x1p-13f;
    for (int32_t i = 0; i < count; i++) {
        while (isfinite(values[i]) && fabsf(values[i]) > 448 * scale) scale *= 2;
    }
    return scale;
}

static void check_latent(const kv8_row_format *format, float row_scale, uint64_t seed) {
    enum { GUARD = 16 };
    float values[KV8_MAX_ROW_VALUES], scratch[KV8_MAX_ROW_VALUES], back[KV8_MAX_ROW_VALUES];
    uint8_t row[656 + GUARD], scales[8 + GUARD];
    memset(row, 0xa5, sizeof row);
    memset(scales, 0xa5, sizeof scales);
    test_rng rng = {seed};
    const int32_t count = kv8_row_num_values(format), first = format->segment[0].count;
    for (int32_t i = 0; i < count; i++)
        values[i] = rng_normal(&rng) * exp2f((float)rng_range(&rng, -24, 12));
    for (int32_t i = 0; i < format->scale_block; i++) values[i] = 0;
    values[first - 1] = NAN;
    values[first - 2] = INFINITY;
    kv8_narrow_counts counts = {0};
    kv8_isa isa;
    assert_ok(kv8_machine_resolve_isa(KV8_ISA_BEST, &isa));
    const kv8_formats_kernels *const kernels = kv8_formats_kernels_get(isa);
    kv8_row_narrow(kernels, format, values, row_scale, scratch, row, scales, &counts);
    assert_int_equal(counts.nans, 1);
    assert_int_equal(counts.clips, 1); /* the infinity */
    kv8_row_widen(kernels, format, row, scales, row_scale, back);
    for (int32_t i = 0; i < count; i++) {
        const float x = values[i] / row_scale;
        float want = kv8_bf16_to_f32(kv8_bf16_from_f32(x));
        if (i < first) {
            float block[128];
            const int32_t begin = i / format->scale_block * format->scale_block;
            for (int32_t d = 0; d < format->scale_block; d++)
                block[d] = values[begin + d] / row_scale;
            const float scale = searched_scale(block, format->scale_block);
            want = kv8_e4m3_to_f32(kv8_e4m3_from_f32(x / scale)) * scale;
        }
        want *= row_scale;
        if (!(back[i] == want || (isnan(back[i]) && isnan(want))))
            fail_msg("value %d is %a, must be %a", i, (double)back[i], (double)want);
    }
    for (int i = 0; i < GUARD; i++) {
        assert_int_equal(row[kv8_row_bytes(format) + (size_t)i], 0xa5);
        const size_t apart = kv8_row_total_bytes(format) - kv8_row_bytes(format);
        assert_int_equal(scales[apart + (size_t)i], 0xa5);
    }
}

static void latent_rows_there_and_back(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed < 200; seed++) {
        check_latent(&kv8_row_latent_584, seed % 2 ? 1.0f : 0.75f, seed);
        check_latent(&kv8_row_latent_656, seed % 2 ? 1.0f : 0.75f, seed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_of_scalar_rows),       cmocka_unit_test(sizes_of_latent_rows),
        cmocka_unit_test(pages_of_latent_rows),       cmocka_unit_test(pages_of_int8_rows),
        cmocka_unit_test(latent_rows_there_and_back),
    };
    return cmocka_run_group_tests_name("row_format", tests, NULL, NULL);
}
