/* simd/scalar.h - the vector vocabulary at width 1: what every other rung is compared with.
 *
 * The words (all rungs): V_LANES floats in a v_f32; load/store need no alignment; *_n touch only
 * the first n lanes (0 <= n <= V_LANES), the others read as 0. v_max(a, b) and v_min(a, b) return
 * b when either is NaN. SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_SCALAR_H
#define KV8_SIMD_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define V_LANES 1
typedef float v_f32;

static inline v_f32 v_load(const float *p) {
    return *p;
}
static inline v_f32 v_load_n(const float *p, int n) {
    return n > 0 ? *p : 0.0f;
}
static inline void v_store(float *p, v_f32 a) {
    *p = a;
}
static inline void v_store_n(float *p, v_f32 a, int n) {
    if (n > 0) *p = a;
}
static inline v_f32 v_set1(float a) {
    return a;
}
static inline v_f32 v_add(v_f32 a, v_f32 b) {
    return a + b;
}
static inline v_f32 v_sub(v_f32 a, v_f32 b) {
    return a - b;
}
static inline v_f32 v_mul(v_f32 a, v_f32 b) {
    return a * b;
}
static inline v_f32 v_div(v_f32 a, v_f32 b) {
    return a / b;
}
static inline v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) {
    return a * b + c;
}
static inline v_f32 v_max(v_f32 a, v_f32 b) {
    return a > b ? a : b;
}
static inline v_f32 v_min(v_f32 a, v_f32 b) {
    return a < b ? a : b;
}
/* Nearest integer, ties to even. */
static inline v_f32 v_round(v_f32 a) {
    return nearbyintf(a);
}
/* a * 2^n for whole n in [-126, 127]; NaN for a NaN a, whatever n. */
static inline v_f32 v_scale2(v_f32 a, v_f32 n) {
    const int32_t whole = n >= -126.0f && n <= 127.0f ? (int32_t)n : 0;
    const uint32_t bits = (uint32_t)(whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return a * power;
}
/* a < b ? yes : no, lane by lane. */
static inline v_f32 v_select_lt(v_f32 a, v_f32 b, v_f32 yes, v_f32 no) {
    return a < b ? yes : no;
}
static inline float v_reduce_add(v_f32 a) {
    return a;
}
static inline float v_reduce_max(v_f32 a) {
    return a;
}

/* n lanes from memory, over and over; n = 1, 2, 4 .. V_LANES. */
static inline v_f32 v_load_fold(const float *p, const int n) {
    (void)n;
    return *p;
}
/* Lane l gets lane l ^ step; step = 1, 2, 4 .. V_LANES/2. */
static inline v_f32 v_swap(v_f32 a, const int step) {
    (void)step;
    return a;
}
/* Sums of lanes l and l ^ step: those of a where l & step is 0, those of b elsewhere. */
static inline v_f32 v_fold(v_f32 a, v_f32 b, const int step) {
    (void)b;
    (void)step;
    return a;
}

#include "math_tmpl.h"
#endif
