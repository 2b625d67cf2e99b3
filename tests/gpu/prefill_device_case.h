/* prefill_device_case.h - an attention case run once by a prefill kernel of the GPU: its buffers
 * copied there, everything that nobody may see made NaN, and what comes back held to the f64
 * oracle's bounds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_DEVICE_CASE_H
#define KV8_PREFILL_DEVICE_CASE_H

#include <kv8/attention_device.h>

#include "attention_case.h"
#include "device_plan.h"
#include "gpu_testing.h"

/* The kernels of the group of tests that runs. */
static const char *kernels;

/* A case on the GPU: the device's copy of every buffer, and the arguments that point there. */
typedef struct gpu_case {
    void *copies[24];
    kv8_attention_args args;
    void *q, *o, *lse, *workspace;
    kv8_paged k, v; /* on the device */
    kv8_page_table pages;
    size_t o_bytes;
} gpu_case;

static size_t buffer_bytes(const guarded *buffer) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size_t)((uint8_t *)buffer->base + buffer->mapped - page - (uint8_t *)buffer->data);
}

/* Where `host`, somewhere in a buffer of the case, lies on the device. */
static void *on_device(const attention_inputs *in, const gpu_case *c, const void *host) {
    for (int i = 0; host != NULL && i < in->num_buffers; i++) {
        const uint8_t *const data = in->buffers[i].data;
        const size_t offset = (size_t)((const uint8_t *)host - data);
        if (host == data ||
            ((const uint8_t *)host > data && offset < buffer_bytes(&in->buffers[i])))
            return (uint8_t *)c->copies[i] + offset;
    }
    return NULL;
}

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
    memset(c, 0, sizeof *c);
    for (int i = 0; i < in->num_buffers; i++) {
        const size_t bytes = buffer_bytes(&in->buffers[i]);
        c->copies[i] = bytes > 0 ? gpu_upload(g, in->buffers[i].data, bytes) : gpu_alloc(g, 1);
    }
    kv8_attention_args *const a = &c->args;
    *a = in->args;
    c->k = in->k;
    c->v = in->v;
    c->pages = in->pages;
    a->k = &c->k;
    a->v = &c->v;
    a->pages = &c->pages;
    a->sink_logit = on_device(in, c, a->sink_logit);
    a->qo_indptr = on_device(in, c, a->qo_indptr);
    a->key_begin = on_device(in, c, a->key_begin);
    a->key_end = on_device(in, c, a->key_end);
    a->o_scale = on_device(in, c, a->o_scale);
    a->q = on_device(in, c, a->q);
    a->q_scale = on_device(in, c, a->q_scale);
    c->k.data = on_device(in, c, c->k.data);
    c->v.data = on_device(in, c, c->v.data);
    c->k.row_scale = on_device(in, c, c->k.row_scale);
    c->v.row_scale = on_device(in, c, c->v.row_scale);
    if (in->c->seed % 2 == 1) c->k.num_pages = c->v.num_pages = in->num_pages;
    kv8_page_table *const pages = &c->pages;
    pages->page_indptr = on_device(in, c, pages->page_indptr);
    pages->page_indices = on_device(in, c, pages->page_indices);
    pages->last_page_len = on_device(in, c, pages->last_page_len);
    pages->block_table = on_device(in, c, pages->block_table);
    pages->seq_lens = on_device(in, c, pages->seq_lens);
    a->k_scale = on_device(in, c, a->k_scale);
    a->v_scale = on_device(in, c, a->v_scale);
    a->mask_bits = on_device(in, c, a->mask_bits);
    a->mask_indptr = on_device(in, c, a->mask_indptr);
    if (gap == 0) pack_queries(g, in, c);
    a->o_stride_head = in->v_head_dim + gap;
    a->o_stride_row = in->num_qo_heads * a->o_stride_head;
    c->o_bytes = (size_t)(in->total_q * a->o_stride_row) * kv8_dtype_size(in->spec.o_dtype);
    c->o = a->o = gpu_alloc(g, c->o_bytes + 1);
    a->lse = c->lse = gpu_alloc(g, (size_t)(in->total_q * in->num_qo_heads) * 4 + 4);
    c->workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
}

static void gpu_case_free(const gpu *g, const attention_inputs *in, gpu_case *c) {
    for (int i = 0; i < in->num_buffers; i++) kv8_device_free(g->device, c->copies[i]);
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
