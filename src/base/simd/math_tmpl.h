/* simd/math_tmpl.h - functions made of the vocabulary's words; included by each rung's header.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* exp(a): relative error below 2 ulp for a in [-87.3, 88.7]; 0 below, saturating at exp(88.7)
 * above; NaN for NaN. Cody-Waite reduction a = n ln2 + r, |r| <= ln2/2, then the Taylor
 * polynomial of degree 7 (remainder r^8/8! < 6e-9 relative at the end of the range). */
static inline v_f32 v_exp(v_f32 a) {
    const v_f32 lowest = v_set1(-87.33654f); /* ln(2^-126): below, results would be subnormal */
    const v_f32 clamped = v_min(v_set1(88.02969f), v_max(lowest, a)); /* 127 ln2 */
    const v_f32 n = v_round(v_mul(clamped, v_set1(1.44269504f)));
    v_f32 r = v_fma(n, v_set1(-0.693359375f), clamped); /* ln2, high part: 9 bits, n*hi exact */
    r = v_fma(n, v_set1(2.12194440e-4f), r);            /* ln2 - high part, negated */
    v_f32 p = v_set1(1.0f / 5040);
    p = v_fma(p, r, v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_select_lt(a, lowest, v_set1(0.0f), v_scale2(p, n));
}

/* 2^f for 0 <= f <= 1, exactly 1 at 0: polynomials fitted to the least relative error. Degree 3:
 * 9e-5, enough before rounding to bf16; degree 5: 9e-8. */
static inline v_f32 v_exp2_part(v_f32 f, const int degree) {
    v_f32 p;
    if (degree == 3) {
        p = v_fma(v_set1(0.0770670429f), f, v_set1(0.2276449897f));
        p = v_fma(p, f, v_set1(0.6951167871f));
    } else {
        p = v_fma(v_set1(0.00186713009f), f, v_set1(0.00901703028f));
        p = v_fma(p, f, v_set1(0.0557999132f));
        p = v_fma(p, f, v_set1(0.240164450f));
        p = v_fma(p, f, v_set1(0.693151312f));
    }
    return v_fma(p, f, v_set1(1.0f));
}
#ifndef V_OWN_EXP2
/* 2^a for a <= 1; 0 below -126, NaN for NaN. */
static inline v_f32 v_exp2(v_f32 a, const int degree) {
    const v_f32 lowest = v_set1(-126.0f);
    const v_f32 clamped = v_max(lowest, a);
    const v_f32 n = v_max(lowest, v_round(v_sub(clamped, v_set1(0.5f))));
    const v_f32 p = v_exp2_part(v_sub(clamped, n), degree);
    return v_select_lt(a, lowest, v_set1(0.0f), v_scale2(p, n));
}
#endif
