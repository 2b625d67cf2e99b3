/* test_formats_blocks.c - the block conversions: every rung of this machine against the one-number
 * functions (proven by the decode and encode tests), at every length up to two vectors and at
 * random ones, with an unreadable page behind every buffer; counters; refusals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>

#include "formats_impl.h"
#include "testing.h"

#include <kv8/formats.h>

#define KV8_FORMATS_KERNELS(isa, rung) extern const kv8_formats_kernels kv8_formats_kernels_##rung;
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS

enum { MAX_LENGTH = 2 * 16 + 1 }; /* the widest vector has 16 lanes */

static const kv8_isa isas[] = {
#define KV8_FORMATS_KERNELS(isa, rung) isa,
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS
    KV8_ISA_AVX512_BF16, KV8_ISA_AMX, KV8_ISA_NEON_BF16, /* use the rung below */
    KV8_ISA_BEST};
enum { NUM_ISAS = sizeof isas / sizeof isas[0] };

static bool present(kv8_isa isa) {
    return isa == KV8_ISA_BEST || kv8_machine_has_isa(isa);
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static float f32_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* One code, little endian in the low bytes. */
static float widen_one(kv8_dtype dtype, uint32_t code) {
    switch (dtype) {
        case KV8_BF16: return kv8_bf16_to_f32((kv8_bf16){(uint16_t)code});
        case KV8_F16: return kv8_f16_to_f32((kv8_f16){(uint16_t)code});
        case KV8_E4M3: return kv8_e4m3_to_f32((kv8_e4m3){(uint8_t)code});
        case KV8_E4M3FNUZ: return kv8_e4m3fnuz_to_f32((kv8_e4m3fnuz){(uint8_t)code});
        case KV8_E5M2: return kv8_e5m2_to_f32((kv8_e5m2){(uint8_t)code});
        case KV8_INT8: return (float)(code < 128 ? (int)code : (int)code - 256);
        default: return f32_of(code);
    }
}

/* sat_rne; the 16-bit formats and f32 saturate by the clamp. */
static uint32_t narrow_one(kv8_dtype dtype, float value) {
    const float max = kv8_dtype_max(dtype);
    const float clamped = isnan(value) ? value : fminf(fmaxf(value, -max), max);
    switch (dtype) {
        case KV8_BF16: return kv8_bf16_from_f32(clamped).bits;
        case KV8_F16: return kv8_f16_from_f32(clamped).bits;
        case KV8_E4M3: return kv8_e4m3_from_f32(value).bits;
        case KV8_E4M3FNUZ: return kv8_e4m3fnuz_from_f32(value).bits;
        case KV8_E5M2: return kv8_e5m2_from_f32(value).bits;
        default: return bits_of(clamped);
    }
}

/* Numbers of every kind: mostly in range, some at the edges, some not finite. */
static float any_value(test_rng *rng, float max) {
    switch (rng_range(rng, 0, 7)) {
        case 0: return f32_of((uint32_t)rng_u64(rng)); /* any bits at all */
        case 1: return f32_of(bits_of(max) + (uint32_t)rng_range(rng, -2, 2));
        case 2: {
            const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, FLT_TRUE_MIN, -FLT_MIN};
            return special[rng_range(rng, 0, 6)];
        }
        case 3: return ldexpf(rng_normal(rng), rng_range(rng, -24, 0)); /* subnormals of 8 bits */
        default: return rng_normal(rng);
    }
}

static void widen_length(kv8_isa isa, kv8_dtype dtype, size_t n, test_rng *rng) {
    const size_t size = kv8_dtype_size(dtype);
    const guarded codes = guarded_alloc(n * size), values = guarded_alloc(n * sizeof(float));
    uint8_t *const bytes = codes.data;
    for (size_t i = 0; i < n * size; i++) bytes[i] = (uint8_t)rng_u64(rng);
    assert_ok(kv8_widen(isa, dtype, bytes, n, values.data));
    for (size_t i = 0; i < n; i++) {
        uint32_t code = 0;
        memcpy(&code, bytes + i * size, size);
        const uint32_t got = bits_of(((float *)values.data)[i]);
        const uint32_t wanted = bits_of(widen_one(dtype, code));
        if (got != wanted)
            fail_msg("%s %s: code 0x%x at %zu of %zu widens to 0x%08x, must be 0x%08x",
                     kv8_isa_name(isa), kv8_dtype_name(dtype), code, i, n, got, wanted);
    }
    guarded_free(codes);
    guarded_free(values);
}

static void widen_every_length_on_every_rung(void **state) {
    (void)state;
    test_rng rng = {1};
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++)
            for (size_t n = 0; n <= MAX_LENGTH; n++)
                widen_length(isas[i], (kv8_dtype)dtype, n, &rng);
    }
}

static void widen_every_code_on_every_rung(void **state) {
    (void)state;
    uint16_t codes[65536];
    float values[65536];
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (int dtype = KV8_BF16; dtype < KV8_DTYPE_COUNT; dtype++) {
            const size_t size = kv8_dtype_size((kv8_dtype)dtype), n = (size_t)1 << (8 * size);
            for (uint32_t code = 0; code < n; code++)
                memcpy((uint8_t *)codes + code * size, &code, size);
            assert_ok(kv8_widen(isas[i], (kv8_dtype)dtype, codes, n, values));
            for (uint32_t code = 0; code < n; code++)
                assert_int_equal(bits_of(values[code]), bits_of(widen_one((kv8_dtype)dtype, code)));
        }
    }
}

static void narrow_length(kv8_isa isa, kv8_dtype dtype, size_t n, float scale, test_rng *rng) {
    const size_t size = kv8_dtype_size(dtype);
    const guarded values = guarded_alloc(n * sizeof(float)), codes = guarded_alloc(n * size);
    float *const v = values.data;
    const float max = kv8_dtype_max(dtype);
    for (size_t i = 0; i < n; i++) v[i] = any_value(rng, max);
    kv8_narrow_counts counts = {.clips = 5, .nans = 7}, wanted_counts = counts;
    assert_ok(kv8_narrow(isa, dtype, v, n, scale, codes.data, &counts));
    for (size_t i = 0; i < n; i++) {
        const float quotient = v[i] / scale;
        uint32_t got = 0;
        memcpy(&got, (uint8_t *)codes.data + i * size, size);
        const uint32_t wanted = narrow_one(dtype, quotient);
        if (got != wanted)
            fail_msg("%s %s: %.9g / %.9g at %zu of %zu is 0x%x, must be 0x%x", kv8_isa_name(isa),
                     kv8_dtype_name(dtype), (double)v[i], (double)scale, i, n, got, wanted);
        wanted_counts.clips += fabsf(quotient) > max;
        wanted_counts.nans += isnan(quotient) != 0;
    }
    assert_int_equal(counts.clips, wanted_counts.clips);
    assert_int_equal(counts.nans, wanted_counts.nans);
    guarded_free(values);
    guarded_free(codes);
}

static void narrow_every_length_on_every_rung(void **state) {
    (void)state;
    test_rng rng = {2};
    const float scales[] = {1, 0.0173f, 3.7f, FLT_MIN, 0x1p-140f, 0x1p120f};
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (int dtype = KV8_F32; dtype < KV8_INT8; dtype++)
            for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++)
                for (size_t n = 0; n <= MAX_LENGTH; n++)
                    narrow_length(isas[i], (kv8_dtype)dtype, n, scales[s], &rng);
    }
}

/* Every code's value and the midpoint to the next, each with its two neighbours, both signs. */
static void narrow_midpoints_on_every_rung(void **state) {
    (void)state;
    enum { CODES = 256, POINTS = 12 * CODES };
    float values[POINTS];
    uint16_t codes[POINTS];
    for (int dtype = KV8_BF16; dtype < KV8_INT8; dtype++) {
        const size_t size = kv8_dtype_size((kv8_dtype)dtype);
        const uint32_t num_codes = 1u << (8 * size - 1); /* without sign */
        for (uint32_t first = 0; first < num_codes; first += CODES) {
            size_t n = 0;
            for (uint32_t code = first; code < first + CODES && code + 1 < num_codes; code++) {
                const float value = widen_one((kv8_dtype)dtype, code);
                const float next = widen_one((kv8_dtype)dtype, code + 1);
                const float points[2] = {value, value / 2 + next / 2};
                for (int p = 0; p < 2; p++) {
                    const float near[3] = {nextafterf(points[p], 0), points[p],
                                           nextafterf(points[p], INFINITY)};
                    for (int i = 0; i < 3; i++) {
                        values[n++] = near[i];
                        values[n++] = -near[i];
                    }
                }
            }
            for (int i = 0; i < NUM_ISAS; i++) {
                if (!present(isas[i])) continue;
                assert_ok(kv8_narrow(isas[i], (kv8_dtype)dtype, values, n, 1, codes, NULL));
                for (size_t v = 0; v < n; v++) {
                    uint32_t got = 0;
                    memcpy(&got, (uint8_t *)codes + v * size, size);
                    const uint32_t wanted = narrow_one((kv8_dtype)dtype, values[v]);
                    if (got != wanted)
                        fail_msg("%s %s: %.9g is 0x%x, must be 0x%x", kv8_isa_name(isas[i]),
                                 kv8_dtype_name((kv8_dtype)dtype), (double)values[v], got, wanted);
                }
            }
        }
    }
}

static void narrow_without_counts(void **state) {
    (void)state;
    const float values[2] = {NAN, 1e9f};
    uint8_t codes[2];
    assert_ok(kv8_narrow(KV8_ISA_BEST, KV8_E4M3, values, 2, 1, codes, NULL));
    assert_int_equal(codes[0] & 0x7f, 0x7f);
    assert_int_equal(codes[1], 0x7e);
}

static void narrow_saturates_every_format(void **state) {
    (void)state;
    const float values[4] = {INFINITY, -INFINITY, FLT_MAX, -FLT_MAX};
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        for (int dtype = KV8_F32; dtype < KV8_INT8; dtype++) {
            float codes[4], back[4];
            kv8_narrow_counts counts = {0};
            const float scale = 0.5f; /* lifts FLT_MAX over f32's range too */
            assert_ok(kv8_narrow(isas[i], (kv8_dtype)dtype, values, 4, scale, codes, &counts));
            assert_ok(kv8_widen(isas[i], (kv8_dtype)dtype, codes, 4, back));
            for (int v = 0; v < 4; v++)
                assert_true(back[v] == copysignf(kv8_dtype_max((kv8_dtype)dtype), values[v]));
            assert_int_equal(counts.clips, 4);
            assert_int_equal(counts.nans, 0);
        }
    }
}

/* At a scale of 1 f32 keeps its bits but for a NaN that signals, which a quotient would not. */
static void f32_stays_at_a_scale_of_1(void **state) {
    (void)state;
    enum { N = 19 }; /* whole vectors and a rest */
    static const uint32_t some[] = {0x7f800001u, 0xffa00000u, 0x7fc12345u, 1u,
                                    0x807fffffu, 0x00400000u, 0x80000000u, 0x3f9d70a4u};
    uint32_t values[N], codes[N];
    for (int i = 0; i < N; i++) values[i] = some[i % 8];
    for (int i = 0; i < NUM_ISAS; i++) {
        if (!present(isas[i])) continue;
        kv8_narrow_counts counts = {0};
        assert_ok(kv8_narrow(isas[i], KV8_F32, (const float *)values, N, 1, codes, &counts));
        for (int v = 0; v < N; v++) {
            const bool is_nan = (values[v] & 0x7fffffffu) > 0x7f800000u;
            assert_int_equal(codes[v], is_nan ? values[v] | 0x00400000u : values[v]);
        }
        assert_int_equal(counts.nans, 9);
        assert_int_equal(counts.clips, 0);
    }
}

/* Not saturating, unlike the block conversions. */
static void a_row_to_bf16_as_one_by_one(void **state) {
    (void)state;
    test_rng rng = {5};
    for (int round = 0; round < 2000; round++) {
        float values[3 * 16];
        kv8_bf16 codes[3 * 16 + 1];
        const int n = rng_range(&rng, 0, 3 * 16);
        for (int i = 0; i < n; i++) values[i] = any_value(&rng, kv8_dtype_max(KV8_BF16));
        codes[n].bits = 0x1234;
        kv8_bf16_from_f32_row(values, (size_t)n, codes);
        for (int i = 0; i < n; i++)
            assert_int_equal(codes[i].bits, kv8_bf16_from_f32(values[i]).bits);
        assert_int_equal(codes[n].bits, 0x1234);
    }
}

static void arguments_are_checked(void **state) {
    (void)state;
    const float value = 1;
    float out = 0;
    int8_t code = 0;
    kv8_f16 row_scale;
    assert_refused(kv8_widen(KV8_ISA_BEST, KV8_DTYPE_NONE, &value, 1, &out), KV8_ERR_INVALID,
                   "dtype is 0");
    assert_refused(kv8_widen(KV8_ISA_BEST, KV8_DTYPE_COUNT, &value, 1, &out), KV8_ERR_INVALID,
                   "dtype is 8");
    assert_refused(kv8_narrow(KV8_ISA_BEST, (kv8_dtype)-1, &value, 1, 1, &out, NULL),
                   KV8_ERR_INVALID, "dtype is -1");
    assert_refused(kv8_narrow(KV8_ISA_BEST, KV8_INT8, &value, 1, 1, &out, NULL), KV8_ERR_INVALID,
                   "kv8_narrow_int8");
    const float bad_scales[] = {0, -1, INFINITY, NAN};
    for (int i = 0; i < 4; i++)
        assert_refused(kv8_narrow(KV8_ISA_BEST, KV8_E4M3, &value, 1, bad_scales[i], &out, NULL),
                       KV8_ERR_INVALID, "scale is");
    assert_refused(kv8_narrow(KV8_ISA_COUNT, KV8_E4M3, &value, 1, 1, &out, NULL), KV8_ERR_INVALID,
                   "isa is");
    assert_refused(kv8_widen((kv8_isa)-1, KV8_E4M3, &value, 1, &out), KV8_ERR_INVALID, "isa is");
    assert_refused(kv8_narrow_int8(KV8_ISA_COUNT, &value, 1, &code, &row_scale, NULL),
                   KV8_ERR_INVALID, "isa is");
    assert_refused(kv8_mxfp4_widen(KV8_ISA_COUNT, NULL, NULL, 0, NULL), KV8_ERR_INVALID, "isa is");
#if defined(__x86_64__)
    const kv8_isa foreign = KV8_ISA_NEON;
#else
    const kv8_isa foreign = KV8_ISA_AVX2;
#endif
    assert_refused(kv8_widen(foreign, KV8_E4M3, &value, 1, &out), KV8_ERR_UNSUPPORTED,
                   kv8_isa_name(foreign));
    assert_true(out == 0);
}

static void a_rung_without_kernels_uses_the_one_below(void **state) {
    (void)state;
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_SCALAR), &kv8_formats_kernels_scalar);
#if defined(__x86_64__)
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_AVX2), &kv8_formats_kernels_avx2);
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_AVX512), &kv8_formats_kernels_avx512);
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_AVX512_BF16), &kv8_formats_kernels_avx512);
#elif defined(__aarch64__)
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_NEON), &kv8_formats_kernels_neon);
    assert_ptr_equal(kv8_formats_kernels_get(KV8_ISA_NEON_BF16), &kv8_formats_kernels_neon);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widen_every_length_on_every_rung),
        cmocka_unit_test(widen_every_code_on_every_rung),
        cmocka_unit_test(narrow_every_length_on_every_rung),
        cmocka_unit_test(narrow_midpoints_on_every_rung),
        cmocka_unit_test(narrow_without_counts),
        cmocka_unit_test(narrow_saturates_every_format),
        cmocka_unit_test(f32_stays_at_a_scale_of_1),
        cmocka_unit_test(a_row_to_bf16_as_one_by_one),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(a_rung_without_kernels_uses_the_one_below),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
