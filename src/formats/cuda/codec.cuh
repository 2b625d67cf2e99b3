/* codec.cuh - number formats on the GPU: one at a time by scalar_codec.h's own definitions, and
 * eight at a time by the conversion instructions where those give the same bits, which is for every
 * quotient whose magnitude is at most the format's largest: callers look for larger ones and NaN,
 * and take them one at a time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CODEC_CUH
#define KV8_CODEC_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <kv8/formats.h>

#include "../float8.h"
#include "../scalar_codec.h"

namespace kv8 {

/* --- sources --- */

static __device__ __forceinline__ float widen(float value) {
    return value;
}
static __device__ __forceinline__ float widen(kv8_bf16 code) {
    return kv8_bf16_decode(code.bits);
}
static __device__ __forceinline__ float widen(kv8_f16 code) {
    return kv8_f16_decode(code.bits);
}

/* Eight consecutive elements as they lie in memory, aligned to 16 bytes. */
template <typename SOURCE>
struct eight {
    uint4 word[sizeof(SOURCE) / 2];
};
template <typename SOURCE>
static __device__ __forceinline__ eight<SOURCE> load8(const SOURCE *from) {
    eight<SOURCE> raw;
#pragma unroll
    for (unsigned i = 0; i < sizeof(SOURCE) / 2; i++)
        raw.word[i] = __ldg(reinterpret_cast<const uint4 *>(from) + i);
    return raw;
}

/* NaN of f16 may lose sign and payload. */
static __device__ __forceinline__ void widen8(const eight<float> &raw, float out[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[4 * i] = __uint_as_float(raw.word[i].x);
        out[4 * i + 1] = __uint_as_float(raw.word[i].y);
        out[4 * i + 2] = __uint_as_float(raw.word[i].z);
        out[4 * i + 3] = __uint_as_float(raw.word[i].w);
    }
}
static __device__ __forceinline__ void widen2(kv8_bf16, uint32_t word, float *out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
}
static __device__ __forceinline__ void widen2(kv8_f16, uint32_t word, float *out) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word));
    out[0] = pair.x;
    out[1] = pair.y;
}
template <typename SOURCE>
static __device__ __forceinline__ void widen8(const eight<SOURCE> &raw, float out[8]) {
    widen2(SOURCE{}, raw.word[0].x, out);
    widen2(SOURCE{}, raw.word[0].y, out + 2);
    widen2(SOURCE{}, raw.word[0].z, out + 4);
    widen2(SOURCE{}, raw.word[0].w, out + 6);
}

/* --- x / scale, rounded once, for many x and one scale --- */

/* `inverse` is 1 / scale rounded. exact: scale is a power of two whose inverse is one too, so that
 * the product is the quotient. near: the refinement below is safe. */
struct divisor {
    float scale, inverse;
    bool exact, near;
};
static __device__ __forceinline__ divisor make_divisor(float scale) {
    const uint32_t bits = __float_as_uint(scale), exponent = bits >> 23;
    divisor d;
    d.scale = scale;
    d.inverse = __frcp_rn(scale);
    d.exact = (bits & 0x7fffffu) == 0 && exponent >= 1 && exponent <= 253;
    d.near = exponent >= 127 - 30 && exponent <= 127 + 30;
    return d;
}

/* Markstein's two corrections of x * inverse, the first to within an ulp, the second to the rounded
 * quotient, each with an exact remainder as long as the quotient's size is in [KV8_NEAR_MIN, _MAX]:
 * the remainder's last bit counts at least 2^(-60-24 -30-24), far above f32's smallest. A smaller
 * quotient may be off by an ulp, of larger ones (and inf) something larger or NaN comes out. The
 * remainder is taken from the product, which keeps the sign of -0. */
#define KV8_NEAR_MIN 0x1p-60f
#define KV8_NEAR_MAX 0x1p60f
static __device__ __forceinline__ float divide_near(float x, const divisor &d) {
    const float q0 = __fmul_rn(x, d.inverse);
    const float q1 = __fmaf_rn(-__fmaf_rn(q0, d.scale, -x), d.inverse, q0);
    return __fmaf_rn(-__fmaf_rn(q1, d.scale, -x), d.inverse, q1);
}

/* x[i] := x[i] / d.scale, by the same way for all threads of a head. False when a quotient may be
 * wrong and the format sees it: WIDE formats see every ulp; in the others what lies below the range
 * is 0, and what lies above is beyond their largest. */
template <bool WIDE>
static __device__ __forceinline__ bool divide8(float x[8], const divisor &d) {
    if (d.exact) {
        if (d.scale == 1.0f) return true;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = __fmul_rn(x[i], d.inverse);
        return true;
    }
    bool right = d.near;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float q = divide_near(x[i], d);
        if (WIDE)
            right = right && ((fabsf(q) > KV8_NEAR_MIN && fabsf(q) < KV8_NEAR_MAX) || x[i] == 0.0f);
        x[i] = q;
    }
    return right;
}

/* --- destinations --- */

/* NaN when there is one. */
static __device__ __forceinline__ float max_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
static __device__ __forceinline__ float max_magnitude8(const float x[8]) {
    float most = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = max_nan(most, fabsf(x[i]));
    return most;
}

/* One format: its code, its largest finite magnitude, the largest that `store8` takes, one and
 * eight conversions. */
template <kv8_dtype DTYPE>
struct format;

template <>
struct format<KV8_F32> {
    using code = float;
    static constexpr bool wide = true;
    static constexpr float max = 3.4028234663852886e38f;
    static constexpr float fast_max = max;
    static __device__ __forceinline__ code encode(float value) {
        const uint32_t bits = __float_as_uint(value);
        return __uint_as_float((bits & KV8_F32_ABS) == KV8_F32_INF ? bits - 1u : bits);
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        float4 *const at = reinterpret_cast<float4 *>(to);
        at[0] = make_float4(x[0], x[1], x[2], x[3]);
        at[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
};

static __device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) {
    return *reinterpret_cast<const uint32_t *>(&pair);
}
static __device__ __forceinline__ uint32_t bits_of(__half2 pair) {
    return *reinterpret_cast<const uint32_t *>(&pair);
}

template <>
struct format<KV8_BF16> {
    using code = kv8_bf16;
    static constexpr bool wide = true;
    static constexpr float max = 3.3895313892515355e38f;
    static constexpr float fast_max = max;
    static __device__ __forceinline__ code encode(float value) {
        return {kv8_bf16_encode(value, KV8_BF16_MAX)};
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        *reinterpret_cast<uint4 *>(to) = make_uint4(
            bits_of(__floats2bfloat162_rn(x[0], x[1])), bits_of(__floats2bfloat162_rn(x[2], x[3])),
            bits_of(__floats2bfloat162_rn(x[4], x[5])), bits_of(__floats2bfloat162_rn(x[6], x[7])));
    }
};

template <>
struct format<KV8_F16> {
    using code = kv8_f16;
    static constexpr bool wide = false;
    static constexpr float max = 65504.0f;
    static constexpr float fast_max = max;
    static __device__ __forceinline__ code encode(float value) {
        return {kv8_f16_encode(value, 65504.0f)};
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        *reinterpret_cast<uint4 *>(to) = make_uint4(
            bits_of(__floats2half2_rn(x[0], x[1])), bits_of(__floats2half2_rn(x[2], x[3])),
            bits_of(__floats2half2_rn(x[4], x[5])), bits_of(__floats2half2_rn(x[6], x[7])));
    }
};

/* The rest has one byte a code: `four` makes a word of them, lowest first. */
template <typename FORMAT>
static __device__ __forceinline__ void store8_bytes(const float x[8], void *to) {
    *static_cast<uint2 *>(to) = make_uint2(FORMAT::four(x), FORMAT::four(x + 4));
}
template <typename FORMAT>
static __device__ __forceinline__ uint32_t four_by_one(const float x[4]) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(FORMAT::encode(x[i]).bits) << 8 * i;
    return word;
}

template <>
struct format<KV8_E4M3> {
    using code = kv8_e4m3;
    static constexpr bool wide = false;
    static constexpr float max = 448.0f;
    static constexpr float fast_max = max;
    static __device__ __forceinline__ code encode(float value) { return {kv8_e4m3_encode(value)}; }
    static __device__ __forceinline__ uint32_t four(const float x[4]) {
#if __CUDA_ARCH__ >= 890
        uint16_t low, high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
        return static_cast<uint32_t>(high) << 16 | low;
#else
        return four_by_one<format>(x);
#endif
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        store8_bytes<format>(x, to);
    }
};

template <>
struct format<KV8_E5M2> {
    using code = kv8_e5m2;
    static constexpr bool wide = false;
    static constexpr float max = 57344.0f;
    static constexpr float fast_max = max;
    static __device__ __forceinline__ code encode(float value) { return {kv8_e5m2_encode(value)}; }
    static __device__ __forceinline__ uint32_t four(const float x[4]) {
#if __CUDA_ARCH__ >= 890
        uint16_t low, high;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
        return static_cast<uint32_t>(high) << 16 | low;
#else
        return four_by_one<format>(x);
#endif
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        store8_bytes<format>(x, to);
    }
};

template <>
struct format<KV8_E4M3FNUZ> {
    using code = kv8_e4m3fnuz;
    static constexpr bool wide = false;
    static constexpr float max = 240.0f;
    static constexpr float fast_max = 232.0f;
    static __device__ __forceinline__ code encode(float value) {
        return {kv8_e4m3fnuz_encode(value)};
    }
    /* Its codes are e4m3's of twice the value, but for the last, 240, which is e4m3's NaN: from its
     * midpoint on, one by one. Zero has no sign. */
    static __device__ __forceinline__ uint32_t four(const float x[4]) {
#if __CUDA_ARCH__ >= 890
        const float twice[4] = {2 * x[0], 2 * x[1], 2 * x[2], 2 * x[3]};
        const uint32_t word = format<KV8_E4M3>::four(twice);
        return word & ~__vcmpeq4(word, 0x80808080u);
#else
        return four_by_one<format>(x);
#endif
    }
    static __device__ __forceinline__ void store8(const float x[8], code *to) {
        store8_bytes<format>(x, to);
    }
};

/* --- int8 rows: a scale in f16 for each --- */

/* The smallest f16 s with 127 s >= absmax, its largest finite one when there is none; as
 * kv8_narrow_int8. absmax > 0, or infinities alone: 1, f16's smallest. The nearest f16 to the
 * quotient is it, or the one before it. */
static __device__ __forceinline__ uint16_t int8_row_scale(float absmax) {
    const float quotient = divide_near(absmax, {127.0f, 1.0f / 127.0f, false, true});
    uint16_t code = __half_as_ushort(__float2half_rn(fminf(quotient, 65504.0f)));
    if (code < 0x7bffu && __fmul_rn(127.0f, __half2float(__ushort_as_half(code))) < absmax) code++;
    return code == 0 ? 1 : code;
}

/* x[i] := a number that rounds to the same whole one as the rounded quotient x / scale, for a scale
 * of f16's 11 bits: such a quotient is at least 2^-12 of an ulp from where the rounding to f32
 * turns, and one correction of an approximate inverse leaves 2^-21 of it. scale 0: 0, for x all 0.
 */
static __device__ __forceinline__ void divide8_by_row(float x[8], float scale) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    if (scale == 0.0f) inverse = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float q0 = __fmul_rn(x[i], inverse);
        x[i] = __fmaf_rn(-__fmaf_rn(q0, scale, -x[i]), inverse, q0);
    }
}
static __device__ __forceinline__ int8_t int8_encode(float quotient) {
    return static_cast<int8_t>(__float2int_rn(fminf(fmaxf(quotient, -127.0f), 127.0f)));
}
/* Eight quotients of at most 127. Adding 1.5 * 2^23 rounds to a whole number, ties to even, and
 * leaves it in two's complement in the sum's low byte. */
static __device__ __forceinline__ void int8_store8(const float x[8], void *to) {
    uint32_t word[2], sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __float_as_uint(__fadd_rn(x[i], 12582912.0f));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t *const four = sum + 4 * i;
        word[i] = __byte_perm(__byte_perm(four[0], four[1], 0x0040),
                              __byte_perm(four[2], four[3], 0x0040), 0x5410);
    }
    *static_cast<uint2 *>(to) = make_uint2(word[0], word[1]);
}

}  // namespace kv8

#endif
