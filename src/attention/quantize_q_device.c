/* quantize_q_device.c - e4m3 of Q on a GPU, the host's part: what the kernels are given. What they
 * do is in cuda/quantize_q/quantize_q.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "quantize_q.h"
#include "quantize_q/quantize_q_args.h"

#include "device_impl.h"

#include <kv8/attention_device.h>

struct kv8_quantize_q_device_plan {
    kv8_dtype src_dtype;
    kv8_kernel absmax[2], quantize[2]; /* one by one, by eights */
};

static kv8_status get_kernel(kv8_kernel *kernel_out, kv8_device *device, const char *op,
                             kv8_dtype source, bool eights) {
    char name[64];
    snprintf(name, sizeof name, "kv8_q_%s_%s_x%d__sm80", op, kv8_dtype_name(source),
             eights ? 8 : 1);
    return kv8_kernel_get(kernel_out, device, name, sizeof(kv8_quantize_q_kernel_args), 0);
}

kv8_status kv8_quantize_q_device_plan_create(kv8_quantize_q_device_plan **out, kv8_device *device,
                                             kv8_dtype src_dtype) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "quantize_q: out is NULL");
    *out = NULL;
    KV8_REQUIRE(device);
    KV8_TRY(kv8_quantize_q_check_source(src_dtype));
    kv8_quantize_q_device_plan made = {.src_dtype = src_dtype};
    for (int eights = 0; eights < 2; eights++) {
        KV8_TRY(get_kernel(&made.absmax[eights], device, "absmax", src_dtype, eights));
        KV8_TRY(get_kernel(&made.quantize[eights], device, "quantize", src_dtype, eights));
    }
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof made, "plan", &memory));
    *out = memory;
    **out = made;
    return KV8_OK;
}

void kv8_quantize_q_device_plan_destroy(kv8_quantize_q_device_plan *plan) {
    kv8_release(NULL, plan, 1, sizeof *plan);
}

/* Eight elements of a head lie whole and aligned wherever they begin. */
static bool fits_eights(const kv8_quantize_q_kernel_args *a) {
    const int64_t elements = a->q_stride_row | a->q_stride_head | a->codes_stride_row |
                             a->codes_stride_head | a->head_dim;
    return elements % KV8_QUANTIZE_Q_VECTOR == 0 && (uintptr_t)a->q % 16 == 0 &&
           (uintptr_t)a->codes % 8 == 0;
}

kv8_status kv8_quantize_q_device_run(const kv8_quantize_q_device_plan *plan, kv8_stream *stream,
                                     const kv8_quantize_q_args *args) {
    KV8_REQUIRE(plan, stream);
    KV8_TAKE_STRUCT(kv8_quantize_q_args, args);
    KV8_TRY(kv8_quantize_q_check(args));
    const bool finds = args->q_scale_out != NULL;
    if (args->src_dtype != plan->src_dtype)
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: src_dtype is %s, the plan's %s",
                        kv8_dtype_name(args->src_dtype), kv8_dtype_name(plan->src_dtype));
    if (finds && args->workspace == NULL)
        return kv8_fail(KV8_ERR_INVALID, "quantize_q: workspace is NULL, q_scale_out needs one");
    if (args->num_kv_heads > UINT16_MAX)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "quantize_q: %d KV heads, a GPU takes %d",
                        args->num_kv_heads, UINT16_MAX);
    if (args->batch == 0) return KV8_OK;
    const kv8_quantize_q_kernel_args a = {.q = args->q,
                                          .q_stride_row = args->q_stride_row,
                                          .q_stride_head = args->q_stride_head,
                                          .codes = args->codes_out,
                                          .codes_stride_row = args->codes_stride_row,
                                          .codes_stride_head = args->codes_stride_head,
                                          .qo_indptr = args->qo_indptr,
                                          .head_scale = args->head_scale,
                                          .amax = args->workspace,
                                          .q_scale = args->q_scale_out,
                                          .batch = args->batch,
                                          .max_rows = args->max_rows,
                                          .num_kv_heads = args->num_kv_heads,
                                          .group_size = args->num_qo_heads / args->num_kv_heads,
                                          .head_dim = args->head_dim};
    const bool eights = fits_eights(&a);
    const int64_t row_blocks = kv8_ceil_div(args->max_rows, KV8_QUANTIZE_Q_ROWS);
    const kv8_launch launch = {.grid = {(uint32_t)row_blocks, (uint32_t)args->num_kv_heads},
                               .block = {KV8_QUANTIZE_Q_THREADS}};
    if (finds) {
        const size_t cells = (size_t)args->batch * (size_t)args->num_kv_heads;
        KV8_TRY(kv8_stream_fill(stream, args->workspace, 0, cells * sizeof(uint32_t)));
        KV8_TRY(kv8_kernel_launch(&plan->absmax[eights], stream, &launch, &a));
    }
    return kv8_kernel_launch(&plan->quantize[eights], stream, &launch, &a);
}
