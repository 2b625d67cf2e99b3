/* prefill_device.c - prefill on a GPU, the host's part: the choice of the kernel, the layout of the
 * workspace, the kernels' argument.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device.h"

#include <math.h>

_Static_assert((int)KV8_PREFILL_F32 == (int)KV8_F32 && (int)KV8_PREFILL_BF16 == (int)KV8_BF16 &&
                   (int)KV8_PREFILL_F16 == (int)KV8_F16 && (int)KV8_PREFILL_E4M3 == (int)KV8_E4M3,
               "kernels know these dtypes by number");

/* --- the kernels --- */

typedef struct kv8_prefill_row {
    const char *name;
    bool fp8; /* multiplies codes: Q is e4m3 */
    kv8_dtype code;
    int32_t head_dim, num_math;
    size_t shared_bytes;
} kv8_prefill_row;

#define KV8_PREFILL(CODE, NAME, HEAD_DIM, NUM_MATH, STAGES, AHEAD, MATH_REGISTERS,      \
                    PRODUCER_REGISTERS)                                                 \
    {"kv8_prefill_" #NAME "_d" #HEAD_DIM "__sm90",                                      \
     false,                                                                             \
     KV8_##CODE,                                                                        \
     HEAD_DIM,                                                                          \
     NUM_MATH,                                                                          \
     KV8_PREFILL_SM90_SHARED((KV8_##CODE == KV8_F16 || KV8_##CODE == KV8_BF16 ? 2 : 1), \
                             KV8_##CODE == KV8_INT8, HEAD_DIM, NUM_MATH, STAGES, AHEAD)},
#define KV8_PREFILL_FP8(CODE, NAME, HEAD_DIM, NUM_MATH, K_STAGES, V_STAGES, MATH_REGISTERS, \
                        PRODUCER_REGISTERS)                                                 \
    {"kv8_prefill_e4m3_" #NAME "_d" #HEAD_DIM "__sm90",                                     \
     true,                                                                                  \
     KV8_##CODE,                                                                            \
     HEAD_DIM,                                                                              \
     NUM_MATH,                                                                              \
     KV8_PREFILL_FP8_SHARED(HEAD_DIM, NUM_MATH, K_STAGES, V_STAGES)},
static const kv8_prefill_row rows[] = {
#include "prefill/sm90/prefill_fp8_kernels.inc"
#include "prefill/sm90/prefill_kernels.inc"
};
#undef KV8_PREFILL
#undef KV8_PREFILL_FP8
enum { NUM_ROWS = sizeof rows / sizeof rows[0] };

static const kv8_prefill_row *find_row(const kv8_attention_spec *spec) {
    for (int i = 0; i < NUM_ROWS; i++) {
        if (rows[i].fp8 == (spec->q_dtype == KV8_E4M3) && rows[i].code == spec->k_dtype &&
            rows[i].head_dim == spec->head_dim)
            return &rows[i];
    }
    return NULL;
}

static kv8_status choose_wgmma(const kv8_attention_spec *spec, kv8_prefill_kernel *kernel_out) {
    const kv8_dtype q = spec->q_dtype;
    const int32_t v_head_dim = kv8_spec_v_head_dim(spec);
    if (q != KV8_BF16 && q != KV8_F16 && q != KV8_E4M3)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "prefill: q_dtype is %s; supported: bf16, f16, e4m3",
                        kv8_dtype_name(q));
    if (spec->has_mask)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "prefill: has_mask is 1; supported: 0");
    if (spec->k_dtype != spec->v_dtype)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: k_dtype is %s, v_dtype %s; supported: both the same",
                        kv8_dtype_name(spec->k_dtype), kv8_dtype_name(spec->v_dtype));
    if (q == KV8_F16 && spec->k_dtype == KV8_BF16)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: q_dtype is f16 over bf16 pages; supported: bf16");
    if (v_head_dim != spec->head_dim)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: head_dim is %d, v_head_dim %d; supported: both the same",
                        spec->head_dim, v_head_dim);
    const kv8_prefill_row *const row = find_row(spec);
    if (row != NULL) {
        *kernel_out = (kv8_prefill_kernel){.name = row->name,
                                           .head_dim = row->head_dim,
                                           .block_rows = 64 * row->num_math,
                                           .num_threads = 128 * (row->num_math + 1),
                                           .shared_bytes = row->shared_bytes};
        return KV8_OK;
    }
    return kv8_fail(KV8_ERR_UNSUPPORTED,
                    "prefill: pages of %s at head_dim %d with q_dtype %s; supported: %s at 64 and "
                    "128",
                    kv8_dtype_name(spec->k_dtype), spec->head_dim, kv8_dtype_name(q),
                    q == KV8_E4M3 ? "e4m3, e5m2" : "e4m3, e5m2, int8, f16, bf16");
}

static kv8_status choose(const kv8_device *device, const kv8_attention_spec *spec,
                         kv8_prefill_path path, kv8_prefill_kernel *kernel_out) {
    if (path == KV8_PREFILL_WGMMA) return choose_wgmma(spec, kernel_out);
    if (path == KV8_PREFILL_BEST && choose_wgmma(spec, kernel_out) == KV8_OK &&
        kv8_kernel_exists(device, kernel_out->name))
        return KV8_OK;
    return kv8_prefill_mma_choose(spec, kernel_out);
}

bool kv8_prefill_takes(const kv8_device *device, const kv8_attention_spec *spec,
                       kv8_prefill_path path) {
    kv8_prefill_kernel kernel;
    return choose(device, spec, path, &kernel) == KV8_OK && kv8_kernel_exists(device, kernel.name);
}

/* --- plan --- */

static size_t place(size_t *end, int64_t count, size_t size) {
    enum { ALIGNMENT = 256 };
    const size_t at = *end;
    *end = (at + (size_t)count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

static void lay_out(kv8_prefill_plan *plan, const kv8_attention_spec *spec, int32_t head_dim) {
    const kv8_prefill_args *const a = &plan->args;
    const int64_t warpgroups = a->block_rows / 64, slots = a->max_slots;
    const int64_t packed = (int64_t)spec->max_total_q * a->group_size;
    plan->max_blocks = packed / a->block_rows + kv8_min_i64(spec->max_batch, spec->max_total_q);
    plan->max_items = plan->max_blocks * a->num_kv_heads + slots;
    size_t end = 0;
    place(&end, 1, sizeof(kv8_prefill_queue));
    plan->items_at = place(&end, plan->max_items, sizeof(kv8_prefill_item));
    plan->blocks_at = place(&end, plan->max_blocks, sizeof(kv8_prefill_block));
    plan->indptr_at = place(&end, (int64_t)spec->max_batch + 1, sizeof(int32_t));
    plan->arrivals_at = place(&end, slots * warpgroups, sizeof(uint32_t));
    plan->sums_at = place(&end, slots * warpgroups * 512, sizeof(float));
    plan->partials_at = place(&end, slots * a->block_rows * head_dim, sizeof(float));
    plan->workspace_size = end;
}

kv8_status kv8_prefill_plan_make(kv8_prefill_plan *plan_out, kv8_device *device,
                                 const kv8_attention_spec *spec, kv8_prefill_path path) {
    /* Pieces of split rows that may be under way: a few for every block. */
    enum { SLOTS_PER_BLOCK = 4, SCHEDULE_THREADS = 1024 };
    KV8_TAKE_STRUCT(kv8_attention_spec, spec);
    KV8_TRY(kv8_attention_check_spec(spec));
    KV8_TRY(kv8_attention_check_extras(spec));
    kv8_prefill_kernel chosen;
    KV8_TRY(choose(device, spec, path, &chosen));
    kv8_prefill_plan plan = {.max_batch = spec->max_batch, .has_mask = spec->has_mask != 0};
    KV8_TRY(kv8_kernel_get(&plan.schedule, device, "kv8_prefill_schedule__sm80",
                           sizeof(kv8_prefill_args), 0));
    KV8_TRY(kv8_kernel_get(&plan.main, device, chosen.name, sizeof(kv8_prefill_args),
                           chosen.shared_bytes));
    int32_t per_sm = 0;
    KV8_TRY(kv8_kernel_max_blocks(&plan.main, (uint32_t)chosen.num_threads, chosen.shared_bytes,
                                  &per_sm));
    if (per_sm < 1)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s does not fit a multiprocessor of %s", chosen.name,
                        kv8_device_get_info(device)->name);
    const int32_t num_blocks = per_sm * kv8_device_get_info(device)->num_sms;
    plan.schedule_launch = (kv8_launch){.grid = {1}, .block = {SCHEDULE_THREADS}};
    plan.main_launch = (kv8_launch){.grid = {(uint32_t)num_blocks},
                                    .block = {(uint32_t)chosen.num_threads},
                                    .dynamic_bytes = chosen.shared_bytes};
    plan.args = (kv8_prefill_args){
        .num_qo_heads = spec->num_qo_heads,
        .num_kv_heads = spec->num_kv_heads,
        .group_size = spec->num_qo_heads / spec->num_kv_heads,
        .page_size = spec->page_size,
        .q_dtype = (int32_t)spec->q_dtype,
        .o_dtype = (int32_t)kv8_spec_o_dtype(spec),
        .causal = spec->causal,
        .window_left = spec->window_left,
        .head_dim = spec->head_dim,
        .v_head_dim = kv8_spec_v_head_dim(spec),
        .k_dtype = (int32_t)spec->k_dtype,
        .v_dtype = (int32_t)spec->v_dtype,
        .block_rows = chosen.block_rows,
        .num_blocks = num_blocks,
        .max_tiles = (int32_t)kv8_ceil_div(spec->max_kv_len, KV8_PREFILL_TILE_KEYS),
        .max_slots = spec->batch_invariant ? 0 : SLOTS_PER_BLOCK * num_blocks,
    };
    kv8_prefill_magic((uint32_t)plan.args.group_size, &plan.args.group_magic,
                      &plan.args.group_shift);
    kv8_prefill_magic((uint32_t)plan.args.page_size, &plan.args.page_magic, &plan.args.page_shift);
    lay_out(&plan, spec, chosen.head_dim);
    if (plan.max_items > INT32_MAX)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: max_total_q %d makes %lld items; supported: up to %d",
                        spec->max_total_q, (long long)plan.max_items, INT32_MAX);
    *plan_out = plan;
    return KV8_OK;
}

/* --- run --- */

static bool aligned(const void *pointer, size_t bytes) {
    return (uintptr_t)pointer % bytes == 0;
}

/* A page's rows in steps of 16 bytes. */
static kv8_status fill_pages(kv8_prefill_pages *out, const char *name, const kv8_paged *from,
                             kv8_dtype code) {
    enum { STEP = 16 };
    const int64_t size = (int64_t)kv8_dtype_size(code);
    const int64_t strides[3] = {from->stride_page, from->stride_slot, from->stride_head};
    uint32_t steps[3];
    if (from->data == NULL) return kv8_fail(KV8_ERR_INVALID, "prefill: %s.data is NULL", name);
    if (code == KV8_INT8 && from->row_scale == NULL)
        return kv8_fail(KV8_ERR_INVALID, "prefill: %s.row_scale is NULL", name);
    if (!aligned(from->data, STEP))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "prefill: %s.data is %p; supported: multiples of %d",
                        name, from->data, (int)STEP);
    for (int i = 0; i < 3; i++) {
        const int64_t bytes = strides[i] * size;
        if (bytes < 0 || bytes % STEP != 0 || bytes / STEP > UINT32_MAX)
            return kv8_fail(KV8_ERR_UNSUPPORTED,
                            "prefill: %s strides are %lld, %lld, %lld elements; supported: "
                            "multiples of %d bytes",
                            name, (long long)strides[0], (long long)strides[1],
                            (long long)strides[2], (int)STEP);
        steps[i] = (uint32_t)(bytes / STEP);
    }
    *out = (kv8_prefill_pages){
        .data = from->data,
        .stride_page = steps[0],
        .stride_slot = steps[1],
        .stride_head = steps[2],
        .row_scale = (const uint16_t *)(const void *)from->row_scale,
        .scale_stride_page = from->row_scale_stride_page,
        .scale_stride_slot = from->row_scale_stride_slot,
        .scale_stride_head = from->row_scale_stride_head,
    };
    return KV8_OK;
}

static kv8_status check_pointers(const kv8_prefill_plan *plan, const kv8_attention_args *args,
                                 const void *workspace) {
    const kv8_page_table *const pages = args->pages;
    if (pages == NULL || args->k == NULL || args->v == NULL)
        return kv8_fail(KV8_ERR_INVALID, "prefill: %s is NULL",
                        pages == NULL     ? "pages"
                        : args->k == NULL ? "k"
                                          : "v");
    if (args->batch < 0 || args->batch > plan->max_batch)
        return kv8_fail(KV8_ERR_INVALID, "prefill: batch is %d, must be 0 to %d", args->batch,
                        plan->max_batch);
    if ((pages->page_indptr != NULL) == (pages->block_table != NULL))
        return kv8_fail(KV8_ERR_INVALID, "prefill: page_indptr and block_table are both %s",
                        pages->page_indptr != NULL ? "set" : "NULL");
    const bool csr = pages->page_indptr != NULL;
    const bool fp8 = plan->args.q_dtype == KV8_PREFILL_E4M3;
    const char *const missing =
        args->qo_indptr == NULL                                                    ? "qo_indptr"
        : csr && pages->page_indices == NULL                                       ? "page_indices"
        : csr && pages->last_page_len == NULL                                      ? "last_page_len"
        : !csr && pages->seq_lens == NULL                                          ? "seq_lens"
        : args->q == NULL                                                          ? "q"
        : fp8 && args->q_scale == NULL                                             ? "q_scale"
        : args->o == NULL                                                          ? "o"
        : workspace == NULL                                                        ? "workspace"
        : plan->has_mask && (args->mask_bits == NULL || args->mask_indptr == NULL) ? "mask"
                                                                                   : NULL;
    if (missing != NULL) return kv8_fail(KV8_ERR_INVALID, "prefill: %s is NULL", missing);
    if (!fp8 && args->q_scale != NULL)
        return kv8_fail(KV8_ERR_INVALID, "prefill: q_scale is set; e4m3 Q alone has one");
    if (!aligned(workspace, 256))
        return kv8_fail(KV8_ERR_INVALID, "prefill: workspace is %p, must be a multiple of 256",
                        workspace);
    return KV8_OK;
}

static void fill_rows(kv8_prefill_args *a, const kv8_attention_args *args) {
    const int64_t o_size = (int64_t)kv8_dtype_size((kv8_dtype)a->o_dtype);
    const bool fp8 = a->q_dtype == KV8_PREFILL_E4M3;
    const int64_t of_q = fp8 ? 16 : 8, of_o = fp8 ? 4 : 2; /* elements at a time */
    a->q = args->q;
    a->q_stride_row = args->q_stride_row;
    a->q_stride_head = args->q_stride_head;
    a->q_aligned =
        aligned(args->q, 16) && args->q_stride_row % of_q == 0 && args->q_stride_head % of_q == 0;
    a->o = args->o;
    a->o_stride_row = args->o_stride_row;
    a->o_stride_head = args->o_stride_head;
    a->o_aligned = aligned(args->o, (size_t)(of_o * o_size)) && args->o_stride_row % of_o == 0 &&
                   args->o_stride_head % of_o == 0;
    const double log2_e = 1.4426950408889634;
    const double sm_scale =
        args->sm_scale != 0 ? (double)args->sm_scale : 1 / sqrt((double)a->head_dim);
    a->score_scale = (float)(sm_scale * log2_e);
    a->soft_cap = (float)((double)args->logits_soft_cap * log2_e);
    a->sink_logit = args->sink_logit;
    a->q_scale = args->q_scale;
    a->q_scale_stride_batch = args->q_scale_stride_batch;
    a->q_scale_stride_row = args->q_scale_stride_row;
    a->q_scale_stride_kv_head = args->q_scale_stride_kv_head;
    a->q_scale_stride_group = args->q_scale_stride_group;
    a->lse = args->lse;
    a->qo_indptr = args->qo_indptr;
    a->page_indptr = args->pages->page_indptr;
    a->page_indices = args->pages->page_indices;
    a->last_page_len = args->pages->last_page_len;
    a->block_table = args->pages->block_table;
    a->block_table_stride = args->pages->block_table_stride;
    a->seq_lens = args->pages->seq_lens;
    a->k_scale = args->k_scale;
    a->k_scale_stride_batch = args->k_scale_stride_batch;
    a->k_scale_stride_head = args->k_scale_stride_head;
    a->v_scale = args->v_scale;
    a->v_scale_stride_batch = args->v_scale_stride_batch;
    a->v_scale_stride_head = args->v_scale_stride_head;
    a->mask_bits = args->mask_bits;
    a->mask_indptr = args->mask_indptr;
    a->batch = args->batch;
}

kv8_status kv8_prefill_run(const kv8_prefill_plan *plan, kv8_stream *stream,
                           const kv8_attention_args *given, void *workspace) {
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    if (args->batch == 0) return KV8_OK;
    KV8_TRY(check_pointers(plan, args, workspace));
    kv8_prefill_args a = plan->args;
    KV8_TRY(fill_pages(&a.k, "k", args->k, (kv8_dtype)a.k_dtype));
    KV8_TRY(fill_pages(&a.v, "v", args->v, (kv8_dtype)a.v_dtype));
    fill_rows(&a, args);
    uint8_t *const base = workspace;
    a.queue = (void *)base;
    a.items = (void *)(base + plan->items_at);
    a.blocks = (void *)(base + plan->blocks_at);
    a.block_indptr = (void *)(base + plan->indptr_at);
    a.arrivals = (void *)(base + plan->arrivals_at);
    a.partial_sums = (void *)(base + plan->sums_at);
    a.partials = (void *)(base + plan->partials_at);
    KV8_TRY(kv8_kernel_launch(&plan->schedule, stream, &plan->schedule_launch, &a));
    return kv8_kernel_launch(&plan->main, stream, &plan->main_launch, &a);
}
