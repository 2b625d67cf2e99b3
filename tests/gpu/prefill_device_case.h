/* prefill_device_case.h - an attention case run once by a prefill kernel of the GPU: its buffers
 * copied there, everything that nobody may see made NaN, and what comes back held to the f64
 * oracle's bounds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_DEVICE_CASE_H
#define KV8_PREFILL_DEVICE_CASE_H

#include "prefill_groups.h"

/* A case on the GPU, an allocation for each buffer: compute-sanitizer sees where it ends. */
typedef struct gpu_case {
    device_inputs inputs;
    kv8_attention_args args;
    void *q, *o, *lse, *workspace;
    size_t o_bytes;
} gpu_case;

/* Q without gaps between its rows: aligned to 16 bytes. */
static void pack_queries(const gpu *g, const attention_inputs *in, gpu_case *c) {
    const int64_t heads = in->num_qo_heads, dim = in->c->head_dim;
    const size_t size = kv8_dtype_size(in->c->q_dtype), row = (size_t)dim * size;
    uint8_t *const packed = malloc((size_t)(in->total_q * heads) * row + 1);
    for (int64_t i = 0; i < in->total_q * heads; i++) {
        const int64_t at = i / heads * in->args.q_stride_row + i % heads * in->args.q_stride_head;
        memcpy(packed + (size_t)i * row, (const uint8_t *)in->args.q + (size_t)at * size, row);
    }
    c->q = gpu_upload(g, packed, (size_t)(in->total_q * heads) * row + 1);
    free(packed);
    c->args.q = c->q;
    c->args.q_stride_head = dim;
    c->args.q_stride_row = heads * dim;
}

/* gap: of elements after every row of O, which must stay untouched; without one, Q has none. */
static void upload(const gpu *g, const attention_inputs *in, const kv8_attention_device_plan *plan,
                   int32_t gap, gpu_case *c) {
    *c = (gpu_case){.inputs = {.g = g, .in = in}};
    device_inputs *const d = &c->inputs;
    for (int i = 0; i < in->num_buffers; i++) {
        const size_t bytes = buffer_bytes(&in->buffers[i]);
        d->copies[i] = bytes > 0 ? gpu_upload(g, in->buffers[i].data, bytes) : gpu_alloc(g, 1);
    }
    kv8_attention_args *const a = &c->args;
    *a = device_case_args(d);
    if (in->c->seed % 2 == 1) d->k.num_pages = d->v.num_pages = in->num_pages;
    if (gap == 0) pack_queries(g, in, c);
    a->o_stride_head = in->v_head_dim + gap;
    a->o_stride_row = in->num_qo_heads * a->o_stride_head;
    c->o_bytes = (size_t)(in->total_q * a->o_stride_row) * kv8_dtype_size(in->spec.o_dtype);
    c->o = a->o = gpu_alloc(g, c->o_bytes + 1);
    a->lse = c->lse = gpu_alloc(g, (size_t)(in->total_q * in->num_qo_heads) * 4 + 4);
    c->workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
}

static void gpu_case_free(const gpu *g, const attention_inputs *in, gpu_case *c) {
    for (int i = 0; i < in->num_buffers; i++) kv8_device_free(g->device, c->inputs.copies[i]);
    kv8_device_free(g->device, c->q);
    kv8_device_free(g->device, c->o);
    kv8_device_free(g->device, c->lse);
    kv8_device_free(g->device, c->workspace);
}

/* Everything that the launch writes starts as NaN, and the workspace too. */
static void poison(const gpu *g, const attention_inputs *in, const kv8_attention_device_plan *plan,
                   const gpu_case *c) {
    assert_ok(kv8_stream_fill(g->stream, c->o, 0xff, c->o_bytes + 1));
    assert_ok(
        kv8_stream_fill(g->stream, c->lse, 0xff, (size_t)(in->total_q * in->num_qo_heads) * 4 + 4));
    assert_ok(
        kv8_stream_fill(g->stream, c->workspace, 0xff, kv8_attention_device_workspace_size(plan)));
    assert_ok(kv8_attention_device_workspace_init(plan, g->stream, c->workspace));
}

/* o_out and lse_out, as case_run gives them. */
static void fetch(const gpu *g, const attention_inputs *in, const gpu_case *c, float *o_out,
                  float *lse_out) {
    uint8_t *const o = malloc(c->o_bytes + 1);
    gpu_download(g, o, c->o, c->o_bytes + 1);
    const int64_t dim = in->v_head_dim, gap = c->args.o_stride_head - dim;
    const size_t size = kv8_dtype_size(in->spec.o_dtype);
    for (int64_t i = 0; i < (int64_t)in->total_q * in->num_qo_heads; i++) {
        const uint8_t *const from = o + (size_t)(i * (dim + gap)) * size;
        assert_ok(kv8_widen(KV8_ISA_SCALAR, in->spec.o_dtype, from, (size_t)dim, o_out + i * dim));
        for (int64_t d = 0; in->args.o_scale != NULL && d < dim; d++)
            o_out[i * dim + d] *= *in->args.o_scale;
        for (size_t j = 0; j < (size_t)gap * size; j++)
            assert_int_equal(from[(size_t)dim * size + j], 0xff);
    }
    free(o);
    gpu_download(g, lse_out, c->lse, (size_t)(in->total_q * in->num_qo_heads) * 4);
}

/* The contract's bounds for 16-bit arithmetic and for FP8. */
static void compare(const attention_inputs *in, const float *o, const float *lse) {
    const bool fp8 = in->spec.q_dtype == KV8_E4M3;
    case_compare_within(in, fp8 ? case_fp8_bounds : case_16_bit_bounds, KV8_ISA_BEST, o, lse);
}

/* o_out and lse_out of one run over made inputs. */
static void run_once(const gpu *g, const attention_inputs *in, int32_t gap, float *o_out,
                     float *lse_out) {
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in->spec, kernels, NULL));
    gpu_case on_gpu;
    upload(g, in, plan, gap, &on_gpu);
    poison(g, in, plan, &on_gpu);
    assert_ok(kv8_attention_device_prepare(plan, g->stream, &on_gpu.args, on_gpu.workspace));
    assert_ok(kv8_attention_device_run(plan, g->stream, &on_gpu.args, on_gpu.workspace));
    fetch(g, in, &on_gpu, o_out, lse_out);
    gpu_case_free(g, in, &on_gpu);
    kv8_attention_device_plan_destroy(plan);
}

/* Made inputs against the oracle. */
static void check_made(const gpu *g, const attention_inputs *in, int32_t gap) {
    assert_ok(kv8_attention_reference(&in->spec, &in->args, in->ref_o, in->ref_lse));
    const size_t rows = (size_t)(in->total_q * in->num_qo_heads);
    float *const o = calloc(rows * (size_t)in->v_head_dim + 1, sizeof *o);
    float *const lse = calloc(rows + 1, sizeof *lse);
    run_once(g, in, gap, o, lse);
    compare(in, o, lse);
    free(o);
    free(lse);
}

static inline void check(const gpu *g, const attention_case *c, int32_t gap) {
    static attention_inputs in;
    case_make(&in, c);
    check_made(g, &in, gap);
    case_free(&in);
}

#endif
