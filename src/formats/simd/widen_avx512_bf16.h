/* simd/widen_avx512_bf16.h - 32 codes to 32 bf16 with AVX512_VBMI, exactly.
 *
 * Seven magnitude bits index a table of 128 bf16 numbers, held as 128 low and 128 high bytes: two
 * vpermi2b look both up, a blend interleaves them, the sign bit joins at the end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WIDEN_AVX512_BF16_H
#define KV8_WIDEN_AVX512_BF16_H

#include <stdbool.h>

/* bf16 of c * 2^k for c = 0..7, where `one` is bf16 of 2^k. */
#define KV8_BF16_COUNT(c, one)                  \
    ((c) == 0   ? 0                             \
     : (c) == 1 ? (one)                         \
     : (c) < 4  ? (one) + 0x80 + ((c)&1) * 0x40 \
                : (one) + 0x100 + ((c)&3) * 0x20)
/* bf16 of a magnitude. Normal: the mantissa moves to bf16's top, the exponent gains 127 - bias
 * (120, 119, 112). Subnormal: multiples of 2^-9, 2^-10, 2^-16 (exponents 118, 117, 111). */
#define KV8_BF16_OF_E4M3(c) \
    ((c) == 0x7f ? 0x7ff0 : (c) < 8 ? KV8_BF16_COUNT(c, 118 << 7) : (120 << 7) + ((c) << 4))
#define KV8_BF16_OF_E4M3FNUZ(c) ((c) < 8 ? KV8_BF16_COUNT(c, 117 << 7) : (119 << 7) + ((c) << 4))
#define KV8_BF16_OF_E5M2(c)                      \
    ((c) > 0x7c    ? 0x7fc0 | ((c)&3) << 5       \
     : (c) == 0x7c ? 0x7f80                      \
     : (c) < 4     ? KV8_BF16_COUNT(c, 111 << 7) \
                   : (112 << 7) + ((c) << 5))

#define KV8_BYTE(of, c, shift) (uint8_t)((unsigned)of(c) >> (shift))
#define KV8_BYTES4(of, c, shift)                                                        \
    KV8_BYTE(of, c, shift), KV8_BYTE(of, (c) + 1, shift), KV8_BYTE(of, (c) + 2, shift), \
        KV8_BYTE(of, (c) + 3, shift)
#define KV8_BYTES16(of, c, shift)                                                             \
    KV8_BYTES4(of, c, shift), KV8_BYTES4(of, (c) + 4, shift), KV8_BYTES4(of, (c) + 8, shift), \
        KV8_BYTES4(of, (c) + 12, shift)
#define KV8_BYTES64(of, c, shift)                                                                  \
    KV8_BYTES16(of, c, shift), KV8_BYTES16(of, (c) + 16, shift), KV8_BYTES16(of, (c) + 32, shift), \
        KV8_BYTES16(of, (c) + 48, shift)

/* [low, high byte][magnitude] */
typedef struct kv8_bf16_table {
    _Alignas(64) uint8_t bytes[2][128];
} kv8_bf16_table;
#define KV8_BF16_TABLE(of)                                     \
    {                                                          \
        {                                                      \
            {KV8_BYTES64(of, 0, 0), KV8_BYTES64(of, 64, 0)}, { \
                KV8_BYTES64(of, 0, 8), KV8_BYTES64(of, 64, 8)  \
            }                                                  \
        }                                                      \
    }
static const kv8_bf16_table kv8_bf16_of_e4m3 = KV8_BF16_TABLE(KV8_BF16_OF_E4M3);
static const kv8_bf16_table kv8_bf16_of_e4m3fnuz = KV8_BF16_TABLE(KV8_BF16_OF_E4M3FNUZ);
static const kv8_bf16_table kv8_bf16_of_e5m2 = KV8_BF16_TABLE(KV8_BF16_OF_E5M2);

static inline __m256i kv8_load32_u8(const void *codes) {
    return _mm256_loadu_si256((const __m256i *)codes);
}
static inline __m256i kv8_load32_u8_n(const void *codes, int n) {
    return _mm256_maskz_loadu_epi8((__mmask32)((1ull << n) - 1u), codes);
}
/* Every code in both bytes of its 16-bit lane. */
static inline __m512i kv8_twice_u8(__m256i codes) {
    const __m512i words = _mm512_cvtepu8_epi16(codes);
    return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
}
static inline __m512i kv8_bf16_lookup(__m512i twice, const kv8_bf16_table *table) {
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[0]), twice,
                                                 _mm512_load_si512(table->bytes[0] + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[1]), twice,
                                                  _mm512_load_si512(table->bytes[1] + 64));
    const __m512i magnitude = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, low, high);
    /* 0xf8: magnitude | (twice & sign) */
    return _mm512_ternarylogic_epi32(magnitude, twice, _mm512_set1_epi16((short)0x8000), 0xf8);
}

static inline __m512i kv8_bf16x32_from_e4m3(__m256i codes) {
    return kv8_bf16_lookup(kv8_twice_u8(codes), &kv8_bf16_of_e4m3);
}
static inline __m512i kv8_bf16x32_from_e5m2(__m256i codes) {
    return kv8_bf16_lookup(kv8_twice_u8(codes), &kv8_bf16_of_e5m2);
}
static inline __m512i kv8_bf16x32_from_e4m3fnuz(__m256i codes) {
    const __m512i bf16 = kv8_bf16_lookup(kv8_twice_u8(codes), &kv8_bf16_of_e4m3fnuz);
    const __mmask32 is_nan = _mm256_cmpeq_epi8_mask(codes, _mm256_set1_epi8((char)0x80));
    return _mm512_mask_mov_epi16(bf16, is_nan, _mm512_set1_epi16((short)0xffc0));
}
/* 16 and 16 f32 to bf16 where their lower halves are zero. */
static inline __m512i kv8_upper_halves(v_f32 first, v_f32 second) {
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(first), 16));
    const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(second), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
static inline __m512i kv8_bf16x32_from_int8(__m256i codes) {
    const v_f32 first = kv8_f32x16_from_int8(_mm256_castsi256_si128(codes));
    const v_f32 second = kv8_f32x16_from_int8(_mm256_extracti128_si256(codes, 1));
    return kv8_upper_halves(first, second);
}

#define KV8_WIDEN32(name)                                                       \
    static inline __m512i v_widen32_bf16_##name(const void *codes) {            \
        return kv8_bf16x32_from_##name(kv8_load32_u8(codes));                   \
    }                                                                           \
    static inline __m512i v_widen32_bf16_##name##_n(const void *codes, int n) { \
        return kv8_bf16x32_from_##name(kv8_load32_u8_n(codes, n));              \
    }
KV8_WIDEN32(e4m3)
KV8_WIDEN32(e4m3fnuz)
KV8_WIDEN32(e5m2)
KV8_WIDEN32(int8)
#undef KV8_WIDEN32

/* --- 64 codes at a time: two lookups for 64, where the 32 above take two for 32 --- */

/* The magnitudes of int8 are 0..127 and, where the code is 0x80, 128. */
#define KV8_BF16_OF_INT8(c)                    \
    ((c) < 8    ? KV8_BF16_COUNT(c, 127 << 7)  \
     : (c) < 16 ? (130 << 7) + ((c)&7) * 0x10  \
     : (c) < 32 ? (131 << 7) + ((c)&15) * 0x08 \
     : (c) < 64 ? (132 << 7) + ((c)&31) * 0x04 \
                : (133 << 7) + ((c)&63) * 0x02)
static const kv8_bf16_table kv8_bf16_of_int8 = KV8_BF16_TABLE(KV8_BF16_OF_INT8);

/* The codes of e4m3 with exponent 0 or 15 by six of their bits, s e0 mmm behind a 0: e0 tells the
 * exponents apart. */
#define KV8_CODE_OF_RARE(c) (((c)&8 ? 0x78 : 0) | ((c)&7))
#define KV8_BF16_OF_RARE(c) ((((c)&16) << 11) | KV8_BF16_OF_E4M3(KV8_CODE_OF_RARE(c)))
static const struct {
    _Alignas(64) uint8_t bytes[2][64];
} kv8_bf16_of_rare_e4m3 = {
    {{KV8_BYTES64(KV8_BF16_OF_RARE, 0, 0)}, {KV8_BYTES64(KV8_BF16_OF_RARE, 0, 8)}}};

/* bf16 of 64 codes. In every 128-bit lane the first eight bytes go to out[0], the others to
 * out[1]; `rare` is what the code 0x80 stands for, 0 = its magnitude is 0 as in the table. */
static inline void kv8_bf16x64_lookup(__m512i codes, const kv8_bf16_table *table,
                                      const unsigned rare, __m512i out[2]) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[0]), codes,
                                           _mm512_load_si512(table->bytes[0] + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[1]), codes,
                                            _mm512_load_si512(table->bytes[1] + 64));
    /* 0xf8: magnitude | (codes & sign) */
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);
    if (rare != 0) {
        const __mmask64 is_rare = _mm512_cmpeq_epi8_mask(codes, sign);
        low = _mm512_mask_mov_epi8(low, is_rare, _mm512_set1_epi8((char)(rare & 0xff)));
        high = _mm512_mask_mov_epi8(high, is_rare, _mm512_set1_epi8((char)(rare >> 8)));
    }
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}
/* e4m3 by GFNI, whose affine maps take port 0 where lookups take port 5 twice. With the
 * bits s eeee mmm, a normal's bf16 is high byte s e3 ~e3 ~e3 ~e3 ~e3 e2 e1 (the exponent's 120 + e
 * without its last bit: a carry turns 01111 into 10000 where e3 is set) and low byte e0 mmm 0000.
 * Exponents 0 (subnormals) and 15 (NaN among them), those whose neighbouring bits are all equal,
 * are looked up: a third map has these three differences above the bits that tell the rest apart.
 */
static inline void kv8_bf16x64_e4m3(__m512i codes, __m512i out[2]) {
    /* Byte 7 - i: which bits of the code add up to bit i. */
    const __m512i high_bits = _mm512_set1_epi64(0x1020404040404080);
    const __m512i low_bits = _mm512_set1_epi64(0x0000000001020408);
    const __m512i index_bits = _mm512_set1_epi64(0x0102040880183060);
    const __m512i differences = _mm512_set1_epi8((char)0xe0);
    __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, high_bits, 0x3c);
    __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, low_bits, 0);
    const __m512i index = _mm512_gf2p8affine_epi64_epi8(codes, index_bits, 0);
    const __mmask64 rare = _mm512_testn_epi8_mask(index, differences);
    low = _mm512_mask_permutexvar_epi8(low, rare, index,
                                       _mm512_load_si512(kv8_bf16_of_rare_e4m3.bytes[0]));
    high = _mm512_mask_permutexvar_epi8(high, rare, index,
                                        _mm512_load_si512(kv8_bf16_of_rare_e4m3.bytes[1]));
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}
/* Eight bytes of each half of the codes to a lane, so that out[0] of the lookup is the first 32 of
 * 64 codes in order. */
static inline __m512i kv8_halves_to_lanes(__m512i codes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
}
/* The first eight bytes of every lane, then the others: kv8_halves_to_lanes back. */
static inline __m512i kv8_halves_of_lanes(__m512i codes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes);
}
/* Pairs (even_i, odd_i) of codes first..first+31, placed so that out[0] and out[1] of the lookup
 * are 16 pairs each, in order. */
static inline __m512i kv8_zip_codes(__m512i even, __m512i odd, const int first) {
    /* Lane q: pairs 4q..4q+3, then 16+4q..16+4q+3. */
    const __m512i from = _mm512_setr_epi64(
        0x4303420241014000, 0x5313521251115010, 0x4707460645054404, 0x5717561655155414,
        0x4b0b4a0a49094808, 0x5b1b5a1a59195818, 0x4f0f4e0e4d0d4c0c, 0x5f1f5e1e5d1d5c1c);
    return _mm512_permutex2var_epi8(even, _mm512_add_epi8(from, _mm512_set1_epi8((char)first)),
                                    odd);
}

/* Codes placed so that the low halves of out[0] of the lookup are codes 0..15 and the high halves
 * 16..31, of out[1] 32..47 and 48..63: a shift and a mask make f32 of them, in order. */
static inline __m512i kv8_sixteens_to_halves(__m512i codes) {
    const __m512i from = _mm512_setr_epi64(
        0x1303120211011000, 0x3323322231213020, 0x1707160615051404, 0x3727362635253424,
        0x1b0b1a0a19091808, 0x3b2b3a2a39293828, 0x1f0f1e0e1d0d1c0c, 0x3f2f3e2e3d2d3c2c);
    return _mm512_permutexvar_epi8(from, codes);
}
/* v_widen64_f32_D: 64 codes to f32 in order, by the same lookup: a third of the instructions of
 * four v_widen_D. */
#define KV8_WIDEN64_F32(name, rare)                                                                \
    static inline void v_widen64_f32_##name(const void *codes, v_f32 out[4]) {                     \
        __m512i both[2];                                                                           \
        kv8_bf16x64_lookup(kv8_sixteens_to_halves(_mm512_loadu_si512(codes)), &kv8_bf16_of_##name, \
                           rare, both);                                                            \
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);                                   \
        for (int i = 0; i < 2; i++) {                                                              \
            out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(both[i], 16));                      \
            out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(both[i], high));                 \
        }                                                                                          \
    }
KV8_WIDEN64_F32(e4m3, 0)
KV8_WIDEN64_F32(e4m3fnuz, 0xffc0)
#undef KV8_WIDEN64_F32

/* v_widen64_bf16_D: 64 codes in order. v_widen64_pairs_bf16_D: two rows of 64 codes as
 * pairs of even and odd. ..._quarters_D: the same as unpacking leaves it, without a permutation
 * of the codes: of 64 codes, quarter L of out[h] is codes 16 L + 8 h on; of pairs, quarter L of
 * out[x] is pairs 16 L + 4 x on. */
#define KV8_WIDEN64(name)                                                                      \
    static inline void v_widen64_bf16_##name(const void *codes, __m512i out[2]) {              \
        kv8_bf16x64_##name(kv8_halves_to_lanes(_mm512_loadu_si512(codes)), out);               \
    }                                                                                          \
    static inline void v_widen64_pairs_bf16_##name(const void *even, const void *odd,          \
                                                   __m512i out[4]) {                           \
        const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);               \
        kv8_bf16x64_##name(kv8_zip_codes(a, b, 0), out);                                       \
        kv8_bf16x64_##name(kv8_zip_codes(a, b, 32), out + 2);                                  \
    }                                                                                          \
    static inline void v_widen64_bf16_quarters_##name(const void *codes, __m512i out[2]) {     \
        kv8_bf16x64_##name(_mm512_loadu_si512(codes), out);                                    \
    }                                                                                          \
    static inline void v_widen64_pairs_bf16_quarters_##name(const void *even, const void *odd, \
                                                            __m512i out[4]) {                  \
        const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);               \
        kv8_bf16x64_##name(_mm512_unpacklo_epi8(a, b), out);                                   \
        kv8_bf16x64_##name(_mm512_unpackhi_epi8(a, b), out + 2);                               \
    }
static inline void kv8_bf16x64_e4m3fnuz(__m512i codes, __m512i out[2]) {
    kv8_bf16x64_lookup(codes, &kv8_bf16_of_e4m3fnuz, 0xffc0, out);
}
static inline void kv8_bf16x64_e5m2(__m512i codes, __m512i out[2]) {
    kv8_bf16x64_lookup(codes, &kv8_bf16_of_e5m2, 0, out);
}
/* The table knows the magnitudes up to 127; 128, in which only bit 7 is set, has 0 there and needs
 * 0x43 in its high byte. Both bits are moved by affine maps, which leave port 5 to the lookups. */
static inline void kv8_bf16x64_int8(__m512i codes, __m512i out[2]) {
    const kv8_bf16_table *const table = &kv8_bf16_of_int8;
    /* Byte 7 - i: which bits add up to bit i. */
    const __m512i sign_bit = _mm512_set1_epi64(0x0000000000000080);
    const __m512i high_of_128 = _mm512_set1_epi64((long long)0x8080000000008000);
    const __m512i magnitude = _mm512_abs_epi8(codes);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[0]), magnitude,
                                                 _mm512_load_si512(table->bytes[0] + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table->bytes[1]), magnitude,
                                            _mm512_load_si512(table->bytes[1] + 64));
    const __m512i sign = _mm512_gf2p8affine_epi64_epi8(codes, sign_bit, 0);
    const __m512i rest = _mm512_gf2p8affine_epi64_epi8(magnitude, high_of_128, 0);
    high = _mm512_ternarylogic_epi32(high, sign, rest, 0xfe); /* any of the three */
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* The words of a format without its own. */
#define KV8_BF16_WORDS_CODE(name)                                                   \
    static inline __m512i v_widen32_bf16_##name(const void *codes) {                \
        return kv8_upper_halves(v_widen_##name(codes),                              \
                                v_widen_##name((const uint8_t *)codes + V_LANES));  \
    }                                                                               \
    static inline __m512i v_widen32_bf16_##name##_n(const void *codes, int n) {     \
        uint8_t lanes[32];                                                          \
        _mm256_storeu_si256((__m256i *)lanes, kv8_load32_u8_n(codes, n));           \
        return v_widen32_bf16_##name(lanes);                                        \
    }                                                                               \
    static inline void kv8_bf16x64_##name(__m512i codes, __m512i out[2]) {          \
        uint8_t lanes[64];                                                          \
        _mm512_storeu_si512(lanes, kv8_halves_of_lanes(codes));                     \
        for (int i = 0; i < 2; i++) out[i] = v_widen32_bf16_##name(lanes + 32 * i); \
    }
#define KV8_BF16_WORDS_VECTOR(name)
#define KV8_BF16_WORDS_LOOKUP(name)
#define KV8_FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    KV8_BF16_WORDS_##words(name) KV8_WIDEN64(name)
KV8_FLOAT8_FORMATS(KV8_FLOAT8)
#undef KV8_FLOAT8
KV8_WIDEN64(int8)

static inline __m512i v_widen32_bf16_bf16(const void *codes) {
    return _mm512_loadu_si512(codes);
}
static inline __m512i v_widen32_bf16_bf16_n(const void *codes, int n) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1u), codes);
}

#endif
