/* test_formats_encode.c - encoding one number, against a search over the decoded codes: nearest,
 * ties to the even code, saturation, NaN, signed zero.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>

#include "testing.h"

#include <kv8/formats.h>

static float f32_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float bf16_of(unsigned code) {
    return kv8_bf16_to_f32((kv8_bf16){(uint16_t)code});
}
static float f16_of(unsigned code) {
    return kv8_f16_to_f32((kv8_f16){(uint16_t)code});
}
static float e4m3_of(unsigned code) {
    return kv8_e4m3_to_f32((kv8_e4m3){(uint8_t)code});
}
static float e4m3fnuz_of(unsigned code) {
    return kv8_e4m3fnuz_to_f32((kv8_e4m3fnuz){(uint8_t)code});
}
static float e5m2_of(unsigned code) {
    return kv8_e5m2_to_f32((kv8_e5m2){(uint8_t)code});
}
static float e2m1_of(unsigned code) {
    return kv8_e2m1_to_f32((kv8_e2m1){(uint8_t)code});
}
static unsigned to_bf16(float value) {
    return kv8_bf16_from_f32(value).bits;
}
static unsigned to_f16(float value) {
    return kv8_f16_from_f32(value).bits;
}
static unsigned to_e4m3(float value) {
    return kv8_e4m3_from_f32(value).bits;
}
static unsigned to_e4m3fnuz(float value) {
    return kv8_e4m3fnuz_from_f32(value).bits;
}
static unsigned to_e5m2(float value) {
    return kv8_e5m2_from_f32(value).bits;
}
static unsigned to_e2m1(float value) {
    return kv8_e2m1_from_f32(value).bits;
}

typedef struct format {
    const char *name;
    float (*decode)(unsigned code); /* proven by test_formats_decode */
    unsigned (*encode)(float value);
    unsigned sign;     /* the sign bit */
    unsigned max_code; /* largest finite */
    bool saturates;    /* else the code after the largest is infinity */
    bool one_zero;
    bool sign_of_nan;       /* NaN keeps its sign */
    unsigned nan, nan_mask; /* (code & mask) == nan is a quiet NaN, sign aside */
} format;
static const format formats[] = {
    {"e4m3", e4m3_of, to_e4m3, 0x80, 0x7e, true, false, true, 0x7f, 0x7f},
    {"e4m3fnuz", e4m3fnuz_of, to_e4m3fnuz, 0x80, 0x7f, true, true, false, 0x80, 0xff},
    {"e5m2", e5m2_of, to_e5m2, 0x80, 0x7b, true, false, true, 0x7f, 0x7f},
    {"e2m1", e2m1_of, to_e2m1, 8, 7, true, false, false, 0, 15},
    {"f16", f16_of, to_f16, 0x8000, 0x7bff, false, false, true, 0x7e00, 0x7e00},
    {"bf16", bf16_of, to_bf16, 0x8000, 0x7f7f, false, false, true, 0x7fc0, 0x7fc0},
};
enum { NUM_FORMATS = sizeof formats / sizeof formats[0] };

/* Codes of one sign ascend with their magnitude: halve the span, then compare the distances to
 * both neighbours in double, where midpoints are exact. */
static unsigned nearest_code(const format *f, float value) {
    if (isnan(value)) return f->nan | (f->sign_of_nan && signbit(value) ? f->sign : 0);
    const double magnitude = fabs((double)value);
    unsigned low = 0, high = f->max_code + 1; /* decode(low) <= magnitude < decode(high) */
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        *((double)f->decode(middle) <= magnitude ? &low : &high) = middle;
    }
    unsigned code = low;
    const double below = (double)f->decode(low);
    /* The step above the largest finite is as wide as the one below it. */
    const double above =
        low < f->max_code ? (double)f->decode(high) : 2 * below - (double)f->decode(low - 1);
    const double to_below = magnitude - below, to_above = above - magnitude;
    if (to_above < to_below || (to_above == to_below && (low & 1) != 0)) code = high;
    if (code > f->max_code && f->saturates) code = f->max_code;
    if (f->one_zero && code == 0) return 0;
    return code | (signbit(value) ? f->sign : 0);
}

static void check(const format *f, float value) {
    const unsigned wanted = nearest_code(f, value), got = f->encode(value);
    if (isnan(value) ? (got & (f->nan_mask | (f->sign_of_nan ? f->sign : 0))) == wanted
                     : got == wanted)
        return;
    fail_msg("%s of %.9g (0x%08x) is 0x%x, must be 0x%x", f->name, (double)value,
             (unsigned)((union {
                 float v;
                 uint32_t b;
             }){value})
                 .b,
             got, wanted);
}
static void check_both_signs(const format *f, float value) {
    check(f, value);
    check(f, -value);
}

static void encode_every_bf16_and_f16(void **state) {
    (void)state;
    for (unsigned i = 0; i < NUM_FORMATS; i++) {
        for (unsigned code = 0; code < 65536; code++) {
            check(&formats[i], bf16_of(code));
            check(&formats[i], f16_of(code));
        }
    }
}

static void encode_midpoints_and_their_neighbours(void **state) {
    (void)state;
    for (unsigned i = 0; i < NUM_FORMATS; i++) {
        const format *const f = &formats[i];
        for (unsigned code = 0; code <= f->max_code; code++) {
            const float value = f->decode(code);
            const double next = code < f->max_code
                                    ? (double)f->decode(code + 1)
                                    : 2 * (double)value - (double)f->decode(code - 1);
            const float middle = (float)(((double)value + next) / 2); /* exact */
            const float points[] = {value, middle};
            for (int p = 0; p < 2; p++) {
                check_both_signs(f, points[p]);
                check_both_signs(f, nextafterf(points[p], INFINITY));
                check_both_signs(f, nextafterf(points[p], 0));
            }
        }
    }
}

static void encode_edges(void **state) {
    (void)state;
    for (unsigned i = 0; i < NUM_FORMATS; i++) {
        const format *const f = &formats[i];
        const float edges[] = {0, FLT_TRUE_MIN, FLT_MIN, FLT_MIN - FLT_TRUE_MIN, FLT_MAX, INFINITY};
        for (size_t e = 0; e < sizeof edges / sizeof edges[0]; e++) check_both_signs(f, edges[e]);
        for (unsigned bit = 0; bit < 23; bit++) { /* each payload bit: signalling and quiet */
            check(f, f32_of(0x7f800000u | 1u << bit));
            check(f, f32_of(0xff800000u | 1u << bit));
            check(f, f32_of(0x7f800000u | ((2u << bit) - 1u)));
            check_both_signs(f, f32_of(1u << bit)); /* f32 subnormals */
        }
        if (f->saturates) assert_int_equal(f->encode(INFINITY), f->max_code);
    }
    assert_int_equal(to_f16(65519.996f), 0x7bff);
    assert_int_equal(to_f16(65520), 0x7c00);
    assert_int_equal(to_bf16(FLT_MAX), 0x7f80);
    assert_int_equal(to_e4m3(449), 0x7e);
    assert_int_equal(to_e4m3fnuz(-0x1p-11f), 0);
}

static void encode_e8m0_rounds_up(void **state) {
    (void)state;
    for (int exponent = -149; exponent <= 127; exponent++) {
        const float power = ldexpf(1, exponent);
        const int exact = exponent < -127 ? 0 : exponent + 127;
        const int above = exponent < -127 ? 0 : exponent < 127 ? exact + 1 : 254;
        assert_int_equal(kv8_e8m0_from_f32_up(power).bits, exact);
        assert_int_equal(kv8_e8m0_from_f32_up(-power).bits, exact);
        assert_int_equal(kv8_e8m0_from_f32_up(nextafterf(power, INFINITY)).bits, above);
    }
    assert_int_equal(kv8_e8m0_from_f32_up(0).bits, 0);
    assert_int_equal(kv8_e8m0_from_f32_up(FLT_MAX).bits, 254);
    assert_int_equal(kv8_e8m0_from_f32_up(INFINITY).bits, 255);
    assert_int_equal(kv8_e8m0_from_f32_up(NAN).bits, 255);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encode_every_bf16_and_f16),
        cmocka_unit_test(encode_midpoints_and_their_neighbours),
        cmocka_unit_test(encode_edges),
        cmocka_unit_test(encode_e8m0_rounds_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
