/* attention_device_case.h - an attention_case on the GPU: its buffers copied, its pointers moved,
 * the answer held against the same oracle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_DEVICE_CASE_H
#define KV8_ATTENTION_DEVICE_CASE_H

#include <kv8/attention_device.h>

#include "attention_case.h"
#include "gpu_testing.h"

/* The device's copies of a case's buffers: in one allocation, NaN between them
 * (device_inputs_make), or in one each. */
typedef struct device_inputs {
    const gpu *g;
    const attention_inputs *in;
    uint8_t *memory, *ends; /* of one allocation: o and lse lie at `ends` */
    uint8_t *copies[24];
    kv8_paged k, v; /* on the device */
    kv8_page_table pages;
} device_inputs;

static inline size_t buffer_bytes(const guarded *buffer) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size_t)((uint8_t *)buffer->base + buffer->mapped - page - (uint8_t *)buffer->data);
}
static inline size_t device_round(size_t bytes) {
    return (bytes + 512) / 256 * 256; /* at least one byte of NaN behind each */
}

/* tail_bytes: room for what the run writes. */
static inline device_inputs device_inputs_make(const gpu *g, const attention_inputs *in,
                                               size_t tail_bytes) {
    device_inputs d = {.g = g, .in = in};
    size_t offsets[24], end = 0;
    for (int i = 0; i < in->num_buffers; i++) {
        offsets[i] = end;
        end += device_round(buffer_bytes(&in->buffers[i]));
    }
    uint8_t *const host = malloc(end + tail_bytes + 1);
    memset(host, 0xff, end + tail_bytes);
    for (int i = 0; i < in->num_buffers; i++)
        memcpy(host + offsets[i], in->buffers[i].data, buffer_bytes(&in->buffers[i]));
    d.memory = gpu_upload(g, host, end + tail_bytes);
    d.ends = d.memory + end;
    for (int i = 0; i < in->num_buffers; i++) d.copies[i] = d.memory + offsets[i];
    free(host);
    return d;
}

/* The device's address of a host pointer into one of the buffers. */
static inline void *device_pointer(const device_inputs *d, const void *host) {
    if (host == NULL) return NULL;
    for (int i = 0; i < d->in->num_buffers; i++) {
        const guarded *const b = &d->in->buffers[i];
        const ptrdiff_t at = (const uint8_t *)host - (const uint8_t *)b->data;
        if (at >= 0 && (size_t)at <= buffer_bytes(b)) return d->copies[i] + at;
    }
    fail_msg("a pointer of the case lies in none of its buffers");
    return NULL;
}

/* The args point into d, which must not move. */
static inline kv8_attention_args device_case_args(device_inputs *d) {
    kv8_attention_args a = d->in->args;
    d->k = d->in->k;
    d->v = d->in->v;
    d->pages = d->in->pages;
    a.k = &d->k;
    a.v = &d->v;
    a.pages = &d->pages;
#define MOVE(pointer) pointer = device_pointer(d, pointer)
    MOVE(a.qo_indptr), MOVE(a.q), MOVE(a.q_scale), MOVE(a.k_scale), MOVE(a.v_scale);
    MOVE(a.sink_logit), MOVE(a.mask_bits), MOVE(a.mask_indptr);
    MOVE(d->k.data), MOVE(d->k.row_scale), MOVE(d->v.data), MOVE(d->v.row_scale);
    MOVE(d->pages.page_indptr), MOVE(d->pages.page_indices), MOVE(d->pages.last_page_len);
    MOVE(d->pages.block_table), MOVE(d->pages.seq_lens), MOVE(d->pages.kv_indptr);
    MOVE(a.qo_lens), MOVE(a.key_begin), MOVE(a.key_end), MOVE(a.o_scale);
#undef MOVE
    return a;
}

/* Runs the case by a plan for its spec; o_out [total_q, num_qo_heads, v_head_dim] as f32, lse_out.
 * True when a tensor core kernel did it. */
static inline bool device_case_run_plan(const gpu *g, attention_inputs *in,
                                        kv8_attention_device_plan *plan, float *o_out,
                                        float *lse_out) {
    const int64_t stride_head = in->v_head_dim + 1; /* the gap must stay untouched */
    const int64_t stride_row = in->num_qo_heads * stride_head;
    const size_t o_bytes = (size_t)(in->total_q * stride_row) * kv8_dtype_size(in->spec.o_dtype);
    const size_t lse_bytes = (size_t)(in->total_q * in->num_qo_heads) * sizeof(float);
    device_inputs d = device_inputs_make(g, in, device_round(o_bytes) + device_round(lse_bytes));
    kv8_attention_args args = device_case_args(&d);
    args.o = d.ends;
    args.o_stride_row = stride_row;
    args.o_stride_head = stride_head;
    args.lse = (float *)(void *)(d.ends + device_round(o_bytes));
    if (in->c->lse_transposed) args.lse_stride_row = 1, args.lse_stride_head = in->total_q;
    if (in->c->seed % 2 == 0) d.k.num_pages = d.v.num_pages = in->num_pages;
    void *const workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
    assert_ok(kv8_attention_device_workspace_init(plan, g->stream, workspace));
    assert_ok(kv8_attention_device_prepare(plan, g->stream, &args, workspace));
    assert_ok(kv8_attention_device_run(plan, g->stream, &args, workspace));
    uint8_t *const o = malloc(o_bytes + 1);
    gpu_download(g, o, args.o, o_bytes);
    float *const lse = malloc(lse_bytes + 1);
    gpu_download(g, lse, args.lse, lse_bytes);
    case_collect_lse(in, lse, &args, lse_out);
    free(lse);
    case_collect(in, o, stride_row, stride_head, o_out);
    char text[256];
    assert_ok(kv8_attention_device_describe(plan, &args, text, sizeof text));
    free(o);
    kv8_device_free(g->device, workspace);
    kv8_device_free(g->device, d.memory);
    return strstr(text, "_generic__") == NULL;
}
static inline bool device_case_run(const gpu *g, attention_inputs *in, float *o_out,
                                   float *lse_out) {
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in->spec, NULL));
    const bool tensor_cores = device_case_run_plan(g, in, plan, o_out, lse_out);
    kv8_attention_device_plan_destroy(plan);
    return tensor_cores;
}

/* An lse that is huge is right to f32's precision of the scores that it comes from. */
static inline void accept_huge_lse(const attention_inputs *in, float *lse) {
    for (int32_t i = 0; i < in->total_q * in->num_qo_heads; i++) {
        const double ref = in->ref_lse[i];
        if (isfinite(ref) && fabs(ref) > 1e5 && fabs((double)lse[i] - ref) <= 1e-5 * fabs(ref))
            lse[i] = (float)ref;
    }
}

/* Twice where all keys are few: also as if requests might have more, which other kernels are for.
 * Bounds: of exact arithmetic with P in f16 on tensor cores 1e-3 (prefill over bf16 pages has it in
 * bf16: 4e-3), the general kernel f32's. e4m3 Q asks for products of codes: P is rounded to e4m3,
 * by 2^-4 at most, and so are the sums that lse is of. */
static inline bool device_case_check(const gpu *g, const attention_case *c) {
    enum { LONG_CASE = 2000 };
    static attention_inputs in;
    case_make(&in, c);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(rows * (size_t)in.v_head_dim + 1, sizeof *o);
    float *const lse = calloc(rows + 1, sizeof *lse);
    bool tensor_cores = false;
    for (int32_t longest = in.spec.max_kv_len;; longest = LONG_CASE) {
        in.spec.max_kv_len = longest;
        tensor_cores = device_case_run(g, &in, o, lse);
        const bool bf16 = c->k_dtype == KV8_BF16 || c->v_dtype == KV8_BF16;
        const bool fp8 = tensor_cores && c->q_dtype == KV8_E4M3;
        case_bounds bounds = !tensor_cores ? case_f32_bounds
                             : fp8         ? case_fp8_bounds
                             : bf16        ? case_16_bit_bounds
                                           : case_f16_bounds;
        if (!fp8) bounds.lse = 1e-5;
        case_compare_within(&in, bounds, KV8_ISA_BEST, o, lse);
        if (longest >= LONG_CASE) break;
    }
    free(o);
    free(lse);
    case_free(&in);
    return tensor_cores;
}

#endif
