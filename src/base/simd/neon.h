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

static inline void v_transpose(v_f32 *rows) {
    const float32x4_t a = vtrn1q_f32(rows[0], rows[1]), b = vtrn2q_f32(rows[0], rows[1]);
    const float32x4_t c = vtrn1q_f32(rows[2], rows[3]), d = vtrn2q_f32(rows[2], rows[3]);
    rows[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    rows[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    rows[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    rows[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

#include "math_tmpl.h"
#endif
