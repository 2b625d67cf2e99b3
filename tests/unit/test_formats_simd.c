/* test_formats_simd.c - formats_simd.h where no block conversion reaches it: the scalar words and
 * the widening to bf16, every code and every length against the one-number functions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include "formats_simd_probe.h"

#include "simd/scalar.h"

#include "formats_simd.h"

#include <kv8/formats.h>

#define kv8_by_code_decode kv8_e4m3_decode
KV8_WORDS_CODE(by_code)

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* One code more than the last is unreadable; the _n form may not read the first at n = 0. */
#define CHECK_SCALAR(name, type, wanted)                                                        \
    do {                                                                                        \
        const guarded codes = guarded_alloc(sizeof(type));                                      \
        for (uint32_t c = 0; c < 1u << (8 * sizeof(type)) % 32; c++) {                          \
            const type code = (type)c;                                                          \
            memcpy(codes.data, &code, sizeof code);                                             \
            assert_int_equal(bits_of(v_widen_##name(codes.data)), bits_of(wanted));             \
            assert_int_equal(bits_of(v_widen_##name##_n(codes.data, 1)), bits_of(wanted));      \
        }                                                                                       \
        assert_int_equal(bits_of(v_widen_##name##_n((char *)codes.data + sizeof(type), 0)), 0); \
        guarded_free(codes);                                                                    \
    } while (0)

static void scalar_words(void **state) {
    (void)state;
    CHECK_SCALAR(bf16, uint16_t, kv8_bf16_to_f32((kv8_bf16){code}));
    CHECK_SCALAR(f16, uint16_t, kv8_f16_to_f32((kv8_f16){code}));
    CHECK_SCALAR(e4m3, uint8_t, kv8_e4m3_to_f32((kv8_e4m3){code}));
    CHECK_SCALAR(by_code, uint8_t, kv8_e4m3_to_f32((kv8_e4m3){code}));
    CHECK_SCALAR(e4m3fnuz, uint8_t, kv8_e4m3fnuz_to_f32((kv8_e4m3fnuz){code}));
    CHECK_SCALAR(e5m2, uint8_t, kv8_e5m2_to_f32((kv8_e5m2){code}));
    CHECK_SCALAR(int8, int8_t, (float)code);
    const char misaligned[5] = {0, 0, 0, -64, 63}; /* 1.5f after one byte */
    assert_true(v_widen_f32(misaligned + 1) == 1.5f);
}

static void widen_to_bf16(void **state) {
    (void)state;
    const int lanes = probe_bf16_lanes();
    if (lanes == 0 || !kv8_machine_has_isa(PROBE_BF16_ISA)) skip();
    const int dtypes[] = {KV8_BF16, KV8_E4M3, KV8_E4M3FNUZ, KV8_E5M2, KV8_INT8, PROBE_CODE};
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        const kv8_dtype dtype = dtypes[d] == PROBE_CODE ? KV8_E4M3 : (kv8_dtype)dtypes[d];
        const size_t size = kv8_dtype_size(dtype);
        for (uint32_t first = 0; first < 1u << (8 * size); first += (uint32_t)lanes) {
            for (int n = first == 0 ? 0 : lanes; n <= lanes; n++) {
                const guarded codes = guarded_alloc((size_t)n * size);
                for (int i = 0; i < n; i++) {
                    const uint32_t code = (first + (uint32_t)i) | (first == 0 ? 0x80u : 0);
                    memcpy((char *)codes.data + (size_t)i * size, &code, size);
                }
                float wanted[32] = {0};
                uint16_t got[32];
                assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, codes.data, (size_t)n, wanted));
                probe_bf16(dtypes[d], codes.data, n, got);
                for (int i = 0; i < lanes; i++) /* exact: nothing lies in the lower half */
                    assert_int_equal((uint32_t)got[i] << 16, bits_of(wanted[i]));
                guarded_free(codes);
            }
        }
    }
}

/* Every code at every place, in either row of a pair. */
static void widen_64_to_bf16(void **state) {
    (void)state;
    probe_64 got;
    const int dtypes[] = {KV8_E4M3, KV8_E4M3FNUZ, KV8_E5M2, KV8_INT8, PROBE_CODE};
    if (!kv8_machine_has_isa(PROBE_BF16_ISA)) skip();
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        const kv8_dtype dtype = dtypes[d] == PROBE_CODE ? KV8_E4M3 : (kv8_dtype)dtypes[d];
        for (int first = 0; first < 256; first++) {
            uint8_t codes[2][64];
            float wanted[2][64];
            for (int i = 0; i < 64; i++) {
                codes[0][i] = (uint8_t)(first + i);
                codes[1][i] = (uint8_t)(first - 3 * i);
            }
            for (int row = 0; row < 2; row++)
                assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, codes[row], 64, wanted[row]));
            if (!probe_bf16_64(dtypes[d], codes[0], codes[1], &got)) skip();
            for (int row = 0; row < 2; row++) {
                for (int i = 0; i < 64; i++) {
                    const uint32_t bits = bits_of(wanted[row][i]);
                    /* Lane quarter L of vector h: codes 16 L + 8 h on; of pairs, of vector x:
                     * 16 L + 4 x on. */
                    const int single = i / 8 % 2 * 32 + i / 16 * 8 + i % 8;
                    const int pair = i / 4 % 4 * 16 + i / 16 * 4 + i % 4;
                    assert_int_equal((uint32_t)got.in_order[row][i] << 16, bits);
                    assert_int_equal((uint32_t)got.quarters[row][single] << 16, bits);
                    assert_int_equal((uint32_t)got.pairs[2 * i + row] << 16, bits);
                    assert_int_equal((uint32_t)got.pair_quarters[2 * pair + row] << 16, bits);
                }
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scalar_words),
        cmocka_unit_test(widen_to_bf16),
        cmocka_unit_test(widen_64_to_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
