/* test_formats_rows.c - numbers that share a scale: int8 rows and MXFP4 blocks. The wanted scale is
 * searched for among all scales, the wanted codes follow from it in double.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>

#include "formats_fields.h"
#include "testing.h"

#include <kv8/formats.h>

static const kv8_isa isas[] = {
#define KV8_FORMATS_KERNELS(isa, rung) isa,
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS
    KV8_ISA_BEST};
enum {
    NUM_ISAS = sizeof isas / sizeof isas[0],
    MAX_LENGTH = 2 * 16 + 1, /* the widest vector has 16 lanes */
    BLOCK = KV8_MXFP4_BLOCK,
    BLOCK_BYTES = KV8_MXFP4_BLOCK_BYTES,
};

static bool present(kv8_isa isa) {
    return isa == KV8_ISA_BEST || kv8_machine_has_isa(isa);
}

/* --- int8 rows --- */

static double f16_value(unsigned code) {
    return field_value(code, 5, 10, 15);
}

/* The smallest positive f16 with 127 * scale >= absmax; the largest finite one when there is
 * none. */
static unsigned wanted_row_scale(double absmax) {
    unsigned low = 0, high = 0x7bff; /* 127 * low < absmax or low = 0 */
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        *(127 * f16_value(middle) >= absmax ? &high : &low) = middle;
    }
    return high;
}

static void check_row(kv8_isa isa, const float *row, size_t n) {
    const guarded values = guarded_alloc(n * sizeof(float)), codes = guarded_alloc(n);
    if (n > 0) memcpy(values.data, row, n * sizeof(float));
    kv8_f16 scale = {0xffff};
    kv8_narrow_counts counts = {.clips = 3, .nans = 4}, wanted = counts;
    assert_ok(kv8_narrow_int8(isa, values.data, n, codes.data, &scale, &counts));
    double absmax = 0;
    size_t nans = 0;
    bool all_zero = true;
    for (size_t i = 0; i < n; i++) {
        nans += isnan(row[i]) != 0;
        all_zero = all_zero && row[i] == 0;
        if (isfinite(row[i])) absmax = fmax(absmax, fabs((double)row[i]));
    }
    const int8_t *const got = codes.data;
    if (nans > 0 || all_zero) {
        assert_int_equal(isnan(kv8_f16_to_f32(scale)) != 0, nans > 0);
        if (nans == 0) assert_int_equal(scale.bits, 0);
        for (size_t i = 0; i < n; i++) assert_int_equal(got[i], 0);
        wanted.nans += nans;
    } else {
        assert_int_equal(scale.bits, wanted_row_scale(absmax));
        const float s = (float)f16_value(scale.bits);
        for (size_t i = 0; i < n; i++) {
            const float quotient = row[i] / s;
            const double clamped = fmin(fmax((double)quotient, -127), 127);
            if ((double)got[i] != rint(clamped))
                fail_msg("int8: %.9g / %.9g at %zu of %zu is %d, must be %g", (double)row[i],
                         (double)s, i, n, got[i], rint(clamped));
            wanted.clips += fabsf(quotient) > 127;
            /* Only infinities and what no f16 scale holds may clip. */
            if (fabsf(quotient) > 127) assert_true(isinf(row[i]) || scale.bits == 0x7bff);
        }
    }
    assert_int_equal(counts.clips, wanted.clips);
    assert_int_equal(counts.nans, wanted.nans);
    guarded_free(values);
    guarded_free(codes);
}

static void int8_rows_of_every_length(void **state) {
    (void)state;
    test_rng rng = {3};
    float row[MAX_LENGTH];
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (int exponent = -150; exponent <= 127; exponent += 9) {
            for (size_t n = 0; n <= MAX_LENGTH; n++) {
                for (size_t v = 0; v < n; v++) row[v] = ldexpf(rng_normal(&rng), exponent);
                check_row(isas[i], row, n);
                if (n == 0) continue;
                const size_t at = (size_t)rng_range(&rng, 0, (int32_t)n - 1);
                row[at] = rng_range(&rng, 0, 1) == 0 ? INFINITY : -INFINITY;
                check_row(isas[i], row, n);
                row[(size_t)rng_range(&rng, 0, (int32_t)n - 1)] = NAN;
                check_row(isas[i], row, n);
            }
        }
    }
}

static void int8_scale_is_the_smallest_that_holds(void **state) {
    (void)state;
    for (unsigned code = 1; code <= 0x7bff; code++) {
        const float edge = (float)(127 * f16_value(code)); /* exact: 7 + 11 bits */
        const float around[] = {nextafterf(edge, 0), edge, nextafterf(edge, INFINITY)};
        for (int a = 0; a < 3; a++) {
            kv8_f16 scale;
            int8_t got;
            kv8_narrow_counts counts = {0};
            assert_ok(kv8_narrow_int8(KV8_ISA_BEST, &around[a], 1, &got, &scale, &counts));
            const unsigned wanted = a < 2 ? code : code < 0x7bff ? code + 1 : 0x7bff;
            assert_int_equal(scale.bits, wanted);
            assert_int_equal(counts.clips, a == 2 && code == 0x7bff);
        }
    }
}

static void int8_special_rows(void **state) {
    (void)state;
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        kv8_f16 scale;
        int8_t codes[4];
        kv8_narrow_counts counts = {0};
        const float zeros[2] = {0, -0.0f};
        assert_ok(kv8_narrow_int8(isas[i], zeros, 2, codes, &scale, NULL));
        assert_int_equal(scale.bits, 0);
        const float endless[3] = {INFINITY, -INFINITY, -0.0f};
        assert_ok(kv8_narrow_int8(isas[i], endless, 3, codes, &scale, &counts));
        assert_int_equal(scale.bits, 1); /* not zero, or the sign would be lost */
        assert_int_equal(codes[0], 127);
        assert_int_equal(codes[1], -127);
        assert_int_equal(codes[2], 0);
        assert_int_equal(counts.clips, 2);
        const float ties[4] = {127, 0.5f, 1.5f, -2.5f};
        assert_ok(kv8_narrow_int8(isas[i], ties, 4, codes, &scale, NULL));
        assert_int_equal(scale.bits, 0x3c00);
        assert_int_equal(codes[0], 127);
        assert_int_equal(codes[1], 0);
        assert_int_equal(codes[2], 2);
        assert_int_equal(codes[3], -2);
        const float huge[2] = {FLT_MAX, -65504.0f * 127};
        counts = (kv8_narrow_counts){0};
        assert_ok(kv8_narrow_int8(isas[i], huge, 2, codes, &scale, &counts));
        assert_int_equal(scale.bits, 0x7bff);
        assert_int_equal(codes[0], 127);
        assert_int_equal(codes[1], -127);
        assert_int_equal(counts.clips, 1); /* the second is held exactly */
    }
}

/* --- MXFP4 --- */

static double e2m1_value(unsigned code) {
    return field_value(code, 2, 1, 1);
}

static void mxfp4_widens_every_code_and_scale(void **state) {
    (void)state;
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (unsigned scale = 0; scale < 256; scale++) {
            const guarded blocks = guarded_alloc(8 * BLOCK_BYTES), scales = guarded_alloc(8);
            const guarded values = guarded_alloc(8 * BLOCK * sizeof(float));
            uint8_t *const bytes = blocks.data;
            for (unsigned b = 0; b < 8 * BLOCK_BYTES; b++) bytes[b] = (uint8_t)(b * 2 + scale % 2);
            for (unsigned s = 0; s < 8; s++) ((uint8_t *)scales.data)[s] = (uint8_t)(scale ^ s);
            assert_ok(kv8_mxfp4_widen(isas[i], bytes, scales.data, 8, values.data));
            for (unsigned e = 0; e < 8 * BLOCK; e++) {
                const unsigned code = e % 2 == 0 ? bytes[e / 2] & 15u : bytes[e / 2] >> 4;
                const int exponent = (int)(scale ^ (e / BLOCK)) - 127;
                const float got = ((float *)values.data)[e];
                if (exponent == 128) {
                    assert_true(isnan(got));
                    continue;
                }
                /* 4 and 6 times 2^127, and 2 and 3 too, lie beyond f32: infinity. */
                const float wanted = (float)ldexp(e2m1_value(code), exponent);
                assert_true(got == wanted && !signbit(got) == !signbit(wanted));
            }
            guarded_free(blocks);
            guarded_free(scales);
            guarded_free(values);
        }
        assert_ok(kv8_mxfp4_widen(isas[i], NULL, NULL, 0, NULL));
    }
}

/* Nearest e2m1 by search; ties to the even code; the sign of zero is kept. */
static unsigned nearest_e2m1(double value) {
    unsigned code = 0;
    while (code < 7) { /* up while the next is nearer, or as near and even */
        const double middle = (e2m1_value(code) + e2m1_value(code + 1)) / 2;
        if (fabs(value) < middle || (fabs(value) == middle && code % 2 == 0)) break;
        code++;
    }
    return code | (signbit(value) ? 8u : 0);
}

static void check_blocks(const float *values, size_t num_blocks) {
    const guarded in = guarded_alloc(num_blocks * BLOCK * sizeof(float));
    const guarded blocks = guarded_alloc(num_blocks * BLOCK_BYTES),
                  scales = guarded_alloc(num_blocks);
    memcpy(in.data, values, num_blocks * BLOCK * sizeof(float));
    assert_ok(kv8_mxfp4_narrow(in.data, num_blocks, blocks.data, scales.data));
    for (size_t b = 0; b < num_blocks; b++) {
        const float *const v = values + b * BLOCK;
        double absmax = 0;
        for (size_t i = 0; i < BLOCK; i++)
            if (fabs((double)v[i]) > absmax) absmax = fabs((double)v[i]);
        int scale = 0;
        while (ldexp(6, scale - 127) < absmax) scale++;
        assert_int_equal(((uint8_t *)scales.data)[b], scale);
        for (size_t i = 0; i < BLOCK; i++) {
            const uint8_t byte = ((uint8_t *)blocks.data)[b * BLOCK_BYTES + i / 2];
            const unsigned got = i % 2 == 0 ? byte & 15u : byte >> 4;
            assert_int_equal(got, nearest_e2m1(ldexp((double)v[i], 127 - scale)));
        }
    }
    guarded_free(in);
    guarded_free(blocks);
    guarded_free(scales);
}

static void mxfp4_narrows_with_the_smallest_scale(void **state) {
    (void)state;
    test_rng rng = {4};
    float values[3 * BLOCK];
    for (int exponent = -152; exponent <= 125; exponent++) {
        for (size_t i = 0; i < 3 * BLOCK; i++)
            values[i] = ldexpf((float)rng_range(&rng, -24, 24) / 4, exponent); /* many ties */
        values[0] = ldexpf(6, exponent); /* exactly the largest of its scale, */
        values[1 * BLOCK] = nextafterf(ldexpf(6, exponent), INFINITY); /* and just beyond */
        check_blocks(values, 3);
        for (size_t i = 0; i < 3 * BLOCK; i++) values[i] = ldexpf(rng_normal(&rng), exponent);
        check_blocks(values, 3);
    }
    for (size_t i = 0; i < 3 * BLOCK; i++) values[i] = i % 3 == 0 ? -0.0f : 0;
    check_blocks(values, 3);
    values[40] = FLT_MAX;
    values[70] = -FLT_TRUE_MIN;
    check_blocks(values, 3);
}

static void mxfp4_lays_the_first_element_low(void **state) {
    (void)state;
    float values[BLOCK] = {6, -0.5f};
    uint8_t block[BLOCK_BYTES];
    kv8_e8m0 scale;
    assert_ok(kv8_mxfp4_narrow(values, 1, block, &scale));
    assert_int_equal(scale.bits, 127);
    assert_int_equal(block[0], 0x97);
    assert_int_equal(block[1], 0);
}

static void mxfp4_refuses_what_is_not_finite(void **state) {
    (void)state;
    float values[2 * BLOCK] = {0};
    uint8_t blocks[2 * BLOCK_BYTES];
    kv8_e8m0 scales[2];
    values[BLOCK + 5] = NAN;
    assert_refused(kv8_mxfp4_narrow(values, 2, blocks, scales), KV8_ERR_INVALID, "of block 1");
    values[3] = -INFINITY;
    assert_refused(kv8_mxfp4_narrow(values, 2, blocks, scales), KV8_ERR_INVALID,
                   "element 3 of block 0 is -inf");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(int8_rows_of_every_length),
        cmocka_unit_test(int8_scale_is_the_smallest_that_holds),
        cmocka_unit_test(int8_special_rows),
        cmocka_unit_test(mxfp4_widens_every_code_and_scale),
        cmocka_unit_test(mxfp4_narrows_with_the_smallest_scale),
        cmocka_unit_test(mxfp4_lays_the_first_element_low),
        cmocka_unit_test(mxfp4_refuses_what_is_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
