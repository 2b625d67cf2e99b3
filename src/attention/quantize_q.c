/* quantize_q.c - e4m3 of Q on the host: a task for each request and KV head finds its absmax, then
 * writes its codes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "quantize_q.h"

#include <float.h>
#include <math.h>

#include "formats_impl.h"

enum { MAX_HEAD_DIM = 576, MAX_HEADS = 1 << 16 };

/* --- checks --- */

kv8_status kv8_quantize_q_check_source(kv8_dtype src_dtype) {
    if (src_dtype == KV8_F32 || src_dtype == KV8_BF16 || src_dtype == KV8_F16) return KV8_OK;
    return kv8_fail(KV8_ERR_UNSUPPORTED, "quantize_q: src_dtype is %s, must be f32, bf16 or f16",
                    kv8_dtype_name(src_dtype));
}

kv8_status kv8_quantize_q_check(const kv8_quantize_q_args *args) {
    KV8_TRY(kv8_quantize_q_check_source(args->src_dtype));
    if (args->batch < 0 || args->max_rows < 0)
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: batch is %d, max_rows %d, must be >= 0",
                        args->batch, args->max_rows);
    if (args->num_kv_heads < 1 || args->num_qo_heads < 1 || args->num_qo_heads > MAX_HEADS ||
        args->num_qo_heads % args->num_kv_heads != 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "quantize_q: %d query heads over %d KV heads, must be a multiple up to %d",
                        args->num_qo_heads, args->num_kv_heads, MAX_HEADS);
    if (args->head_dim < 1 || args->head_dim > MAX_HEAD_DIM)
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: head_dim is %d, must be 1 to %d",
                        args->head_dim, MAX_HEAD_DIM);
    KV8_REQUIRE(args->qo_indptr, args->q, args->codes_out);
    if ((args->q_scale_out == NULL) == (args->head_scale == NULL))
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: one of q_scale_out and head_scale, %s",
                        args->head_scale == NULL ? "both are NULL" : "both are given");
    return KV8_OK;
}

/* What the arrays hold. */
static kv8_status check_arrays(const kv8_quantize_q_args *args) {
    const int32_t *const indptr = args->qo_indptr;
    if (indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: qo_indptr[0] is %d, must be 0", indptr[0]);
    for (int32_t b = 0; b < args->batch; b++) {
        if (indptr[b + 1] < indptr[b] || indptr[b + 1] > args->max_rows)
            return kv8_fail(KV8_ERR_INVALID, "quantize_q: qo_indptr[%d] is %d, must be %d to %d",
                            b + 1, indptr[b + 1], indptr[b], args->max_rows);
    }
    for (int32_t i = 0; args->head_scale != NULL && i < args->num_qo_heads; i++) {
        if (!(args->head_scale[i] > 0 && args->head_scale[i] <= FLT_MAX))
            return kv8_fail(KV8_ERR_INVALID,
                            "quantize_q: head_scale[%d] is %g, must be finite and > 0", i,
                            (double)args->head_scale[i]);
    }
    return KV8_OK;
}

/* --- one request and KV head --- */

static void widen_row(const kv8_quantize_q_args *args, int32_t row, int32_t head,
                      float values[MAX_HEAD_DIM]) {
    const int64_t at = row * args->q_stride_row + head * args->q_stride_head;
    const uint8_t *const from =
        (const uint8_t *)args->q + at * (int64_t)kv8_dtype_size(args->src_dtype);
    KV8_MUST(kv8_widen(KV8_ISA_BEST, args->src_dtype, from, (size_t)args->head_dim, values));
}

static float find_scale(const kv8_quantize_q_args *args, int32_t request, int32_t kv_head) {
    const int32_t group = args->num_qo_heads / args->num_kv_heads;
    float values[MAX_HEAD_DIM], absmax = 0;
    for (int32_t row = args->qo_indptr[request]; row < args->qo_indptr[request + 1]; row++) {
        for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            widen_row(args, row, head, values);
            for (int32_t d = 0; d < args->head_dim; d++) {
                const float x = fabsf(values[d]);
                if (x <= FLT_MAX && x > absmax) absmax = x;
            }
        }
    }
    const float scale = absmax / kv8_dtype_max(KV8_E4M3);
    return scale >= FLT_MIN ? scale : 1;
}

static void quantize_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const kv8_quantize_q_args *const args = cookie;
    const int32_t request = (int32_t)(index / (size_t)args->num_kv_heads);
    const int32_t kv_head = (int32_t)(index % (size_t)args->num_kv_heads);
    const int32_t group = args->num_qo_heads / args->num_kv_heads;
    const float found = args->q_scale_out == NULL ? 1 : find_scale(args, request, kv_head);
    if (args->q_scale_out != NULL) args->q_scale_out[index] = found;
    for (int32_t row = args->qo_indptr[request]; row < args->qo_indptr[request + 1]; row++) {
        for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            float values[MAX_HEAD_DIM];
            widen_row(args, row, head, values);
            uint8_t *const to = (uint8_t *)args->codes_out + row * args->codes_stride_row +
                                head * args->codes_stride_head;
            KV8_MUST(kv8_narrow(KV8_ISA_BEST, KV8_E4M3, values, (size_t)args->head_dim,
                                args->head_scale != NULL ? args->head_scale[head] : found, to,
                                NULL));
        }
    }
}

kv8_status kv8_quantize_q(const kv8_quantize_q_args *args, kv8_threads *threads) {
    KV8_TAKE_STRUCT(kv8_quantize_q_args, args);
    KV8_TRY(kv8_quantize_q_check(args));
    KV8_TRY(check_arrays(args));
    kv8_quantize_q_args own = *args;
    kv8_threads_run(threads, (size_t)own.batch * (size_t)own.num_kv_heads, quantize_task, &own);
    return KV8_OK;
}
