/* test_formats_decode.c - every code of every format against the value its fields spell out, in
 * double, as the OCP OFP8 and MX specifications and IEEE 754 define them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>

#include "formats_fields.h"
#include "testing.h"

#include <kv8/formats.h>

/* With IEEE 754's infinities and NaN at the top exponent. */
static double ieee_value(unsigned code, int exponent_bits, int mantissa_bits) {
    const unsigned top = ((1u << exponent_bits) - 1u) << mantissa_bits;
    if ((code & top) == top) {
        if ((code & ((1u << mantissa_bits) - 1u)) != 0) return (double)NAN;
        return (code >> (exponent_bits + mantissa_bits)) & 1u ? -HUGE_VAL : HUGE_VAL;
    }
    return field_value(code, exponent_bits, mantissa_bits, (1 << (exponent_bits - 1)) - 1);
}

static void check(const char *format, unsigned code, float got, double wanted) {
    if (isnan(wanted) ? isnan(got) : (double)got == wanted && !signbit(got) == !signbit(wanted))
        return;
    fail_msg("%s 0x%x is %.9g, must be %.17g", format, code, (double)got, wanted);
}

static void decode_every_fp8_code(void **state) {
    (void)state;
    for (unsigned code = 0; code < 256; code++) {
        const double e4m3 = (code & 0x7f) == 0x7f ? (double)NAN : field_value(code, 4, 3, 7);
        check("e4m3", code, kv8_e4m3_to_f32((kv8_e4m3){(uint8_t)code}), e4m3);
        const double fnuz = code == 0x80 ? (double)NAN : field_value(code, 4, 3, 8);
        check("e4m3fnuz", code, kv8_e4m3fnuz_to_f32((kv8_e4m3fnuz){(uint8_t)code}), fnuz);
        check("e5m2", code, kv8_e5m2_to_f32((kv8_e5m2){(uint8_t)code}), ieee_value(code, 5, 2));
    }
}

static void decode_every_16_bit_code(void **state) {
    (void)state;
    for (unsigned code = 0; code < 65536; code++) {
        check("f16", code, kv8_f16_to_f32((kv8_f16){(uint16_t)code}), ieee_value(code, 5, 10));
        check("bf16", code, kv8_bf16_to_f32((kv8_bf16){(uint16_t)code}), ieee_value(code, 8, 7));
    }
}

static void decode_every_mx_code(void **state) {
    (void)state;
    for (unsigned code = 0; code < 16; code++)
        check("e2m1", code, kv8_e2m1_to_f32((kv8_e2m1){(uint8_t)code}), field_value(code, 2, 1, 1));
    for (unsigned code = 0; code < 256; code++) {
        const double wanted = code == 255 ? (double)NAN : ldexp(1, (int)code - 127);
        check("e8m0", code, kv8_e8m0_to_f32((kv8_e8m0){(uint8_t)code}), wanted);
    }
}

static void dtypes_have_names_sizes_and_ranges(void **state) {
    (void)state;
    const struct {
        kv8_dtype dtype;
        const char *name;
        size_t size;
        float max;
    } wanted[] = {
        {KV8_F32, "f32", 4, FLT_MAX},       {KV8_BF16, "bf16", 2, 0x1.fep127f},
        {KV8_F16, "f16", 2, 65504},         {KV8_E4M3, "e4m3", 1, 448},
        {KV8_E4M3FNUZ, "e4m3fnuz", 1, 240}, {KV8_E5M2, "e5m2", 1, 57344},
        {KV8_INT8, "int8", 1, 127},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        kv8_dtype found = KV8_DTYPE_NONE;
        assert_ok(kv8_dtype_from_name(wanted[i].name, &found));
        assert_int_equal(found, wanted[i].dtype);
        assert_string_equal(kv8_dtype_name(found), wanted[i].name);
        assert_int_equal(kv8_dtype_size(found), wanted[i].size);
        assert_true(kv8_dtype_max(found) == wanted[i].max);
    }
    const kv8_dtype strangers[] = {KV8_DTYPE_NONE, KV8_DTYPE_COUNT, (kv8_dtype)-1};
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(kv8_dtype_name(strangers[i]), "none");
        assert_int_equal(kv8_dtype_size(strangers[i]), 0);
        assert_true(kv8_dtype_max(strangers[i]) == 0);
    }
    kv8_dtype untouched = KV8_F16;
    assert_refused(kv8_dtype_from_name("fp8", &untouched), KV8_ERR_INVALID, "e4m3fnuz");
    assert_refused(kv8_dtype_from_name("none", &untouched), KV8_ERR_INVALID, "none");
    assert_int_equal(untouched, KV8_F16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_every_fp8_code),
        cmocka_unit_test(decode_every_16_bit_code),
        cmocka_unit_test(decode_every_mx_code),
        cmocka_unit_test(dtypes_have_names_sizes_and_ranges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
