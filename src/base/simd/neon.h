/* simd/neon.h - the vector vocabulary on arm64 Advanced SIMD; words as in simd/scalar.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_NEON_H
#define KV8_SIMD_NEON_H
#if !defined(__aarch64__)
#error "arm64 only"
#endif

#include <arm_neon.h>
#include <stdint.h>

#define V_LANES 4
typedef float32x4_t v_f32;

static inline v_f32 v_load(const float *p) {
    return vld1q_f32(p);
}
static inline v_f32 v_load_n(const float *p, int n) {
    float lanes[4] = {0};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return vld1q_f32(lanes);
}
static inline void v_store(float *p, v_f32 a) {
    vst1q_f32(p, a);
}
static inline void v_store_n(float *p, v_f32 a, int n) {
    float lanes[4];
    vst1q_f32(lanes, a);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}
static inline v_f32 v_set1(float a) {
    return vdupq_n_f32(a);
}
static inline v_f32 v_add(v_f32 a, v_f32 b) {
    return vaddq_f32(a, b);
}
static inline v_f32 v_sub(v_f32 a, v_f32 b) {
    return vsubq_f32(a, b);
}
static inline v_f32 v_mul(v_f32 a, v_f32 b) {
    return vmulq_f32(a, b);
}
static inline v_f32 v_div(v_f32 a, v_f32 b) {
    return vdivq_f32(a, b);
}
static inline v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) {
    return vfmaq_f32(c, a, b);
}
/* vmaxq would return NaN for either; the vocabulary wants b. */
static inline v_f32 v_max(v_f32 a, v_f32 b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline v_f32 v_min(v_f32 a, v_f32 b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
static inline v_f32 v_round(v_f32 a) {
    return vrndnq_f32(a);
}
static inline v_f32 v_scale2(v_f32 a, v_f32 n) {
    const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}
static inline v_f32 v_select_lt(v_f32 a, v_f32 b, v_f32 yes, v_f32 no) {
    return vbslq_f32(vcltq_f32(a, b), yes, no);
}
static inline float v_reduce_add(v_f32 a) {
    return vaddvq_f32(a);
}
static inline float v_reduce_max(v_f32 a) {
    return vmaxvq_f32(a);
}

/* v_fold, v_swap, v_load_fold: as in simd/scalar.h. */
static inline v_f32 v_swap(v_f32 a, const int step) {
    return step == 1 ? vrev64q_f32(a) : vextq_f32(a, a, 2);
}
static inline v_f32 v_fold(v_f32 a, v_f32 b, const int step) {
    if (step == 1) return v_add(vtrn1q_f32(a, b), vtrn2q_f32(a, b));
    const float64x2_t c = vreinterpretq_f64_f32(a), d = vreinterpretq_f64_f32(b);
    return v_add(vreinterpretq_f32_f64(vzip1q_f64(c, d)), vreinterpretq_f32_f64(vzip2q_f64(c, d)));
}
static inline v_f32 v_load_fold(const float *p, const int n) {
    switch (n) {
        case 1: return vld1q_dup_f32(p);
        case 2: {
            const float32x2_t pair = vld1_f32(p);
            return vcombine_f32(pair, pair);
        }
        default: return vld1q_f32(p);
    }
}

#include "math_tmpl.h"
#endif
