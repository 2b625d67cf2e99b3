/* device_plan_case.h - a device plan and a run of it on the stand-in: a usual spec, args whose
 * every pointer and stride is told from the others, and the launch that comes of them. No kernel
 * computes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_PLAN_CASE_H
#define KV8_DEVICE_PLAN_CASE_H

#include <kv8/attention_device.h>

#include "common/attention_args.h"
#include "device_impl.h"
#include "stand_in.h"
#include "testing.h"

typedef struct stand {
    kv8_device *device;
    kv8_stream *stream;
    uint8_t *memory; /* of the device, for addresses */
} stand;
enum { STAND_BYTES = 1 << 20, H200_SMS = 132 };
enum { DECODE = 1, PREFILL = 64 }; /* rows of a request */

static inline int reset(void **state) {
    (void)state;
    stand_in_reset();
    return 0;
}
static inline int check_nothing_lives(void **state) {
    (void)state;
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
    return 0;
}

static inline stand stand_open(int32_t sm_version, int32_t num_sms) {
    stand s = {0};
    void *memory = NULL;
    const stand_in_gpu gpu = {sm_version, num_sms, (size_t)64 << 30};
    stand_in_set_gpus(&gpu, 1);
    assert_ok(kv8_device_open(&s.device, 0));
    assert_ok(kv8_stream_create(&s.stream, s.device));
    assert_ok(kv8_device_alloc(s.device, STAND_BYTES, &memory));
    s.memory = memory;
    return s;
}
static inline void stand_close(stand *s) {
    kv8_device_free(s->device, s->memory);
    kv8_stream_destroy(s->stream);
    kv8_device_close(s->device);
    *s = (stand){0};
}

/* gpt-oss' heads over e4m3 pages: a step of decode. */
static inline kv8_attention_spec stand_spec(void) {
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = 64;
    spec.num_kv_heads = 8;
    spec.head_dim = 64;
    spec.q_dtype = KV8_BF16;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    spec.page_size = 16;
    spec.causal = 1;
    spec.max_batch = spec.max_total_q = 64;
    spec.max_kv_len = 8192;
    return spec;
}

/* Args of `batch` requests, in a dense table over pages as a cache lays them out; a place of its
 * own for every pointer. The structs they point to are the case's. */
typedef struct stand_args {
    kv8_attention_args args;
    kv8_paged k, v;
    kv8_page_table pages;
} stand_args;

static inline kv8_paged stand_paged(const kv8_attention_spec *spec, kv8_dtype dtype, int64_t dim,
                                    uint8_t *at) {
    kv8_paged paged = KV8_SIZED(kv8_paged);
    paged.data = at;
    paged.stride_head = dim;
    paged.stride_slot = dim * spec->num_kv_heads;
    paged.stride_page = paged.stride_slot * spec->page_size;
    if (dtype == KV8_INT8) {
        paged.row_scale = (const void *)(at + 0x800);
        paged.row_scale_stride_head = spec->page_size;
        paged.row_scale_stride_slot = 1;
        paged.row_scale_stride_page = (int64_t)spec->page_size * spec->num_kv_heads;
    }
    return paged;
}
static inline void stand_args_make(stand_args *a, const stand *s, const kv8_attention_spec *spec,
                                   int32_t batch) {
    *a = (stand_args){.args = KV8_ATTENTION_ARGS_INIT, .pages = KV8_SIZED(kv8_page_table)};
    uint8_t *at = s->memory;
#define PLACE(type) ((type *)(void *)(at += 0x1000))
    const int64_t v_dim = spec->v_head_dim == 0 ? spec->head_dim : spec->v_head_dim;
    a->args.batch = batch;
    a->args.q = PLACE(uint8_t);
    a->args.q_stride_head = spec->head_dim;
    a->args.q_stride_row = (int64_t)spec->head_dim * spec->num_qo_heads;
    a->args.o = PLACE(uint8_t);
    a->args.o_stride_head = v_dim;
    a->args.o_stride_row = v_dim * spec->num_qo_heads;
    a->args.lse = PLACE(float);
    a->args.qo_indptr = PLACE(const int32_t);
    a->k = stand_paged(spec, spec->k_dtype, spec->head_dim, PLACE(uint8_t));
    a->v = stand_paged(spec, spec->v_dtype, v_dim, PLACE(uint8_t));
    a->pages.block_table = PLACE(const int32_t);
    a->pages.block_table_stride = 512;
    a->pages.seq_lens = PLACE(const int32_t);
    if (spec->q_dtype == KV8_E4M3) a->args.q_scale = PLACE(const float);
    if (spec->has_mask) {
        a->args.mask_bits = PLACE(const uint8_t);
        a->args.mask_indptr = PLACE(const int64_t);
    }
    if (spec->has_key_range) {
        a->args.key_begin = PLACE(const int32_t);
        a->args.key_end = PLACE(const int32_t);
    }
#undef PLACE
    a->args.k = &a->k;
    a->args.v = &a->v;
    a->args.pages = &a->pages;
}

/* A plan with its workspace. */
typedef struct stand_plan {
    kv8_attention_device_plan *plan;
    uint8_t *workspace;
    size_t workspace_size;
} stand_plan;

static inline kv8_status stand_plan_open(stand_plan *p, const stand *s,
                                         const kv8_attention_spec *spec) {
    *p = (stand_plan){0};
    void *memory = NULL;
    KV8_TRY(kv8_attention_device_plan_create(&p->plan, s->device, spec, NULL));
    p->workspace_size = kv8_attention_device_workspace_size(p->plan);
    KV8_TRY(kv8_device_alloc(s->device, p->workspace_size + 1, &memory));
    p->workspace = memory;
    return kv8_attention_device_workspace_init(p->plan, s->stream, p->workspace);
}
static inline void stand_plan_close(stand_plan *p, const stand *s) {
    kv8_device_free(s->device, p->workspace);
    kv8_attention_device_plan_destroy(p->plan);
    *p = (stand_plan){0};
}

/* Runs, waits, and gives the last launch. */
static inline const stand_in_launch *stand_run(const stand *s, const stand_plan *p,
                                               const stand_args *a) {
    const int32_t before = stand_in_num_launches();
    assert_ok(kv8_attention_device_prepare(p->plan, s->stream, &a->args, p->workspace));
    assert_ok(kv8_attention_device_run(p->plan, s->stream, &a->args, p->workspace));
    assert_ok(kv8_stream_synchronize(s->stream));
    assert_true(stand_in_num_launches() > before);
    return stand_in_get_launch(stand_in_num_launches() - 1);
}

/* --- what an argument block must say --- */

static inline int32_t divide(kv8_divisor by, int32_t n) {
    if (by.factor == 0) return n;
    return (int32_t)((uint64_t)n * by.factor >> 32 >> by.shift);
}
static inline void check_divisor(kv8_divisor by, int32_t d) {
    const int32_t ns[] = {0,     1,        d - 1,         d,        d + 1, 7 * d - 1,
                          7 * d, 12345679, INT32_MAX - 1, INT32_MAX};
    for (size_t i = 0; i < sizeof ns / sizeof ns[0]; i++)
        assert_int_equal(divide(by, ns[i]), ns[i] / d);
}

static inline void check_pages(const kv8_kernel_pages *got, const kv8_paged *paged, int64_t size) {
    assert_ptr_equal(got->data, paged->data);
    assert_int_equal(got->stride_page, paged->stride_page * size);
    assert_int_equal(got->stride_slot, paged->stride_slot * size);
    assert_int_equal(got->stride_head, paged->stride_head * size);
    assert_ptr_equal(got->row_scale, paged->row_scale);
    assert_int_equal(got->scale_stride_page, paged->row_scale_stride_page);
    assert_int_equal(got->scale_stride_slot, paged->row_scale_stride_slot);
    assert_int_equal(got->scale_stride_head, paged->row_scale_stride_head);
}

/* All that args say of rows, scales and tables is in the block as it is. */
static inline void check_block(const kv8_kernel_args *got, const kv8_attention_spec *spec,
                               const stand_args *a) {
    const kv8_attention_args *const args = &a->args;
#define SAME_POINTER(field) assert_ptr_equal(got->field, args->field)
#define SAME(field)         assert_int_equal(got->field, args->field)
    SAME_POINTER(q), SAME(q_stride_row), SAME(q_stride_head);
    SAME_POINTER(o), SAME(o_stride_row), SAME(o_stride_head), SAME_POINTER(lse);
    SAME_POINTER(qo_indptr), SAME(batch), SAME_POINTER(sink_logit);
    SAME_POINTER(k_scale), SAME(k_scale_stride_batch), SAME(k_scale_stride_head);
    SAME_POINTER(v_scale), SAME(v_scale_stride_batch), SAME(v_scale_stride_head);
    SAME_POINTER(q_scale), SAME(q_scale_stride_batch), SAME(q_scale_stride_row);
    SAME(q_scale_stride_kv_head), SAME(q_scale_stride_group);
    SAME_POINTER(mask_bits), SAME_POINTER(mask_indptr);
#undef SAME
#undef SAME_POINTER
    check_pages(&got->k, &a->k, (int64_t)kv8_dtype_size(spec->k_dtype));
    check_pages(&got->v, &a->v, (int64_t)kv8_dtype_size(spec->v_dtype));
    const kv8_page_table *const t = &a->pages;
    assert_ptr_equal(got->table, t->page_indptr != NULL ? t->page_indices : t->block_table);
    if (t->block_table != NULL) assert_int_equal(got->table_stride, t->block_table_stride);
    assert_ptr_equal(got->page_indptr, t->page_indptr);
    assert_ptr_equal(got->last_page_len, t->last_page_len);
    assert_ptr_equal(got->seq_lens, t->seq_lens);
    assert_int_equal(got->num_qo_heads, spec->num_qo_heads);
    assert_int_equal(got->num_kv_heads, spec->num_kv_heads);
    assert_int_equal(got->group_size, spec->num_qo_heads / spec->num_kv_heads);
    assert_int_equal(got->head_dim, spec->head_dim);
    assert_int_equal(got->v_head_dim, spec->v_head_dim == 0 ? spec->head_dim : spec->v_head_dim);
    assert_int_equal(got->page_size, spec->page_size);
    assert_int_equal(got->q_dtype, spec->q_dtype);
    assert_int_equal(got->k_dtype, spec->k_dtype);
    assert_int_equal(got->v_dtype, spec->v_dtype);
    assert_int_equal(got->window_left, spec->window_left);
    assert_int_equal(got->window_right, spec->causal ? 0 : spec->window_right);
    check_divisor(got->by_group, got->group_size);
    check_divisor(got->by_page, spec->page_size);
}

#endif
