/* attention_case.h - an attention problem of attention_inputs.h: run, collected, and held against
 * the oracle, every row by itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_CASE_H
#define KV8_ATTENTION_CASE_H

#include "attention_inputs.h"

/* One line that finds the case again. */
static inline const char *case_text(const attention_case *c, kv8_isa isa) {
    static _Thread_local char text[512];
    snprintf(text, sizeof text,
             "%s seed %llu: q %s k %s v %s o %s, group %d x %d heads, dim %d/%d, page %d, window "
             "%d, causal %d, cap %g, sink %d, scale %d, layout %d, mask %d, dense %d, invariant "
             "%d, extremes %d, nan %d, right %d, ranges %d, ragged %d, unused %d, batch %d, first "
             "qo %d kv %d",
             kv8_isa_name(isa), (unsigned long long)c->seed, kv8_dtype_name(c->q_dtype),
             kv8_dtype_name(c->k_dtype), kv8_dtype_name(c->v_dtype), kv8_dtype_name(c->o_dtype),
             c->group_size, c->num_kv_heads, c->head_dim, c->v_head_dim, c->page_size,
             c->window_left, c->causal, (double)c->soft_cap, (int)c->sink, (int)c->scale,
             (int)c->layout, (int)c->mask, c->dense_table, c->batch_invariant, c->extremes,
             c->nan_newest, c->right, c->key_ranges, c->ragged, c->unused_rows, c->batch,
             c->qo_len[0], c->kv_len[0]);
    return text;
}

static inline bool case_bf16_exact(kv8_dtype dtype) {
    return dtype != KV8_F32 && dtype != KV8_F16;
}
/* Bounds of attention.h's contract: f32 math 1e-5 and 1e-5; bf16 math, which only Q, keys and
 * values that bf16 holds may get, 4e-3 and 2e-3. */
static inline bool case_may_be_bf16(const attention_case *c, kv8_isa isa) {
    return (isa == KV8_ISA_AVX512_BF16 || isa == KV8_ISA_AMX || isa == KV8_ISA_NEON_BF16) &&
           (c->q_dtype == KV8_BF16 || c->q_dtype == KV8_E4M3) && case_bf16_exact(c->k_dtype) &&
           case_bf16_exact(c->v_dtype);
}

/* Is the row of the batch's q one of its request's in use? */
static inline bool case_row_in_use(const attention_inputs *in, int64_t row) {
    int32_t b = 0;
    while (in->args.qo_indptr[b + 1] <= row) b++;
    return row < in->args.qo_indptr[b] + case_rows(in->c, b);
}

/* o as f32 without the gaps; the gaps, and rows not in use, must still be what they were. */
static inline void case_collect(const attention_inputs *in, const void *o, int64_t stride_row,
                                int64_t stride_head, float *out) {
    const kv8_dtype dtype = in->spec.o_dtype;
    const size_t size = kv8_dtype_size(dtype);
    for (int64_t row = 0; row < in->total_q; row++) {
        const bool in_use = case_row_in_use(in, row);
        for (int64_t h = 0; h < in->num_qo_heads; h++) {
            const uint8_t *const from =
                (const uint8_t *)o + (row * stride_row + h * stride_head) * (int64_t)size;
            assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, from, (size_t)in->v_head_dim, out));
            for (int32_t d = 0; in->args.o_scale != NULL && d < in->v_head_dim; d++)
                out[d] *= *in->args.o_scale;
            out += in->v_head_dim;
            for (size_t i = 0; !in_use && i < (size_t)in->v_head_dim * size; i++)
                assert_int_equal(from[i], 0xff);
            for (size_t i = 0; i < size; i++)
                assert_int_equal(from[(size_t)in->v_head_dim * size + i], 0xff);
        }
    }
}

/* lse as [total_q, num_qo_heads]; rows not in use must still be what they were. */
static inline void case_collect_lse(const attention_inputs *in, const float *lse,
                                    const kv8_attention_args *args, float *out) {
    const int64_t stride_row = in->c->lse_transposed ? args->lse_stride_row : in->num_qo_heads;
    const int64_t stride_head = in->c->lse_transposed ? args->lse_stride_head : 1;
    for (int64_t row = 0; row < in->total_q; row++) {
        for (int64_t h = 0; h < in->num_qo_heads; h++) {
            const float *const from = &lse[row * stride_row + h * stride_head];
            static const uint32_t untouched = 0xffffffff;
            if (!case_row_in_use(in, row)) assert_memory_equal(from, &untouched, sizeof untouched);
            *out++ = *from;
        }
    }
}

/* Runs the plan's kernel; o_out [total_q, num_qo_heads, v_head_dim] as f32, lse_out. */
static inline void case_run(attention_inputs *in, kv8_isa isa, kv8_threads *threads, float *o_out,
                            float *lse_out) {
    kv8_attention_spec spec = in->spec;
    spec.isa = isa;
    kv8_attention_plan *plan = NULL;
    assert_ok(kv8_attention_plan_create(&plan, &spec, threads, NULL));
    const size_t size = kv8_dtype_size(spec.o_dtype);
    kv8_attention_args args = in->args;
    kv8_paged k = *args.k, v = *args.v;
    k.num_pages = v.num_pages = in->num_pages;
    args.k = &k;
    args.v = &v;
    args.o_stride_head = in->v_head_dim + 1; /* the gap must stay untouched */
    args.o_stride_row = in->num_qo_heads * args.o_stride_head;
    const guarded o = guarded_alloc((size_t)(in->total_q * args.o_stride_row) * size);
    const guarded lse = guarded_alloc((size_t)(in->total_q * in->num_qo_heads) * sizeof(float));
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    args.o = o.data;
    args.lse = lse.data;
    if (in->c->lse_transposed) {
        args.lse_stride_row = 1;
        args.lse_stride_head = in->total_q;
    }
    assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
    assert_ok(kv8_attention_run(plan, &args, workspace.data));
    case_collect(in, o.data, args.o_stride_row, args.o_stride_head, o_out);
    case_collect_lse(in, lse.data, &args, lse_out);
    guarded_free(workspace);
    guarded_free(lse);
    guarded_free(o);
    kv8_attention_plan_destroy(plan);
}

/* What a path may be off by: relative, of a request's whole o and of every row; lse absolute. */
typedef struct case_bounds {
    double o, row, lse;
} case_bounds;
static const case_bounds case_f32_bounds = {1e-5, 3e-5, 1e-5};
/* P in f16, f32 everything else: kernels that widen codes to f16. */
static const case_bounds case_f16_bounds = {1e-3, 2e-3, 1e-5};
static const case_bounds case_16_bit_bounds = {4e-3, 8e-3, 2e-3};
/* FP8 arithmetic: sums are of P rounded to e4m3, by 2^-4 of a value at most: lse follows. */
static const case_bounds case_fp8_bounds = {5e-2, 6e-2, 0.065};

/* Every row [dim] of o by itself, so that no norm hides a row that is zero or another's. A row
 * whose values cancel is held to a tenth of the usual row of its request. */
static inline void case_compare_rows(const attention_inputs *in, double bound, kv8_isa isa,
                                     int32_t b, const float *o, const double *ref, size_t rows) {
    enum { FEW_VALUES = 4 };
    const size_t dim = (size_t)in->v_head_dim;
    if (dim < FEW_VALUES) bound *= 4;
    double total = 0;
    for (size_t i = 0; i < rows * dim; i++) total += isfinite(ref[i]) ? ref[i] * ref[i] : 0;
    const double usual = total / (double)rows;
    for (size_t r = 0; r < rows; r++) {
        double difference = 0, norm = 0;
        for (size_t i = r * dim; i < (r + 1) * dim; i++) {
            if (!isfinite(ref[i])) continue; /* relative_error has compared these */
            difference += ((double)o[i] - ref[i]) * ((double)o[i] - ref[i]);
            norm += ref[i] * ref[i];
        }
        if (!(difference <= bound * bound * fmax(norm, usual / 16)))
            fail_msg("request %d: row %zu of o is off by %g, bound %g: %s", b, r,
                     sqrt(difference / fmax(norm, usual / 16)), bound, case_text(in->c, isa));
    }
}

/* isa: for the text. */
static inline void case_compare_within(const attention_inputs *in, case_bounds bounds, kv8_isa isa,
                                       const float *o, const float *lse) {
    /* Storing o rounds it once more, by at most half a unit of 3, 4, 8 or 11 bits. */
    const kv8_dtype o_dtype = in->spec.o_dtype;
    const double stored = o_dtype == KV8_F32    ? 0
                          : o_dtype == KV8_BF16 ? 0x1p-8
                          : o_dtype == KV8_F16  ? 0x1p-11
                          : o_dtype == KV8_E5M2 ? 0x1p-3
                                                : 0x1p-4;
    for (int32_t b = 0; b < in->c->batch; b++) { /* requests apart: a small one is not drowned */
        const size_t first = (size_t)(in->args.qo_indptr[b] * in->num_qo_heads);
        const size_t rows = (size_t)(case_rows(in->c, b) * in->num_qo_heads);
        const size_t dim = (size_t)in->v_head_dim;
        const double error = relative_error(o + first * dim, in->ref_o + first * dim, rows * dim);
        const double bound = (rows > 1 ? bounds.o : bounds.row) + stored; /* one row is a row */
        if (!(error <= bound))
            fail_msg("request %d: o is off by %g, bound %g: %s", b, error, bound,
                     case_text(in->c, isa));
        case_compare_rows(in, bounds.row + stored, isa, b, o + first * dim, in->ref_o + first * dim,
                          rows);
        for (size_t i = first; i < first + rows; i++) {
            const double ref = in->ref_lse[i], got = (double)lse[i];
            if (isnan(ref) ? isnan(got) : isinf(ref) ? got == ref : false) continue;
            /* and two roundings of an f32 of its size */
            const double off = bounds.lse + 1.2e-7 * fabs(ref);
            if (!(fabs(got - ref) <= off))
                fail_msg("request %d: lse[%zu] is %g, not %g: %s", b, i, got, ref,
                         case_text(in->c, isa));
        }
    }
}

static inline void case_compare(const attention_inputs *in, kv8_isa isa, const float *o,
                                const float *lse) {
    const bool bf16 = in->spec.math == KV8_MATH_BF16 ||
                      (in->spec.math == KV8_MATH_AUTO && case_may_be_bf16(in->c, isa));
    case_compare_within(in, bf16 ? case_16_bit_bounds : case_f32_bounds, isa, o, lse);
}

static inline bool case_next_isa(kv8_isa *isa) {
    for (int i = (int)*isa + 1; i < KV8_ISA_COUNT; i++) {
        if (!kv8_machine_has_isa((kv8_isa)i)) continue;
        *isa = (kv8_isa)i;
        return true;
    }
    return false;
}

/* The case on every rung of this machine, in all the arithmetic that it has. */
static inline void case_check(const attention_case *c, kv8_threads *threads) {
    static attention_inputs in;
    case_make(&in, c);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(rows * (size_t)in.v_head_dim + 1, sizeof *o);
    float *const lse = calloc(rows + 1, sizeof *lse);
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        for (int math = KV8_MATH_F32; math <= KV8_MATH_BF16; math++) {
            if (math == KV8_MATH_BF16 && !case_may_be_bf16(c, isa)) continue;
            in.spec.math = (kv8_attention_math)math;
            case_run(&in, isa, threads, o, lse);
            case_compare(&in, isa, o, lse);
        }
    }
    free(o);
    free(lse);
    case_free(&in);
}

#endif
