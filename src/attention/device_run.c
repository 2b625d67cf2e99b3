/* device_run.c - a run of attention on a GPU: its args checked, made the kernels' argument, and
 * launched. Reads no device memory: all that it looks at are addresses, strides and the spec.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_plan.h"
#include "prefill_args.h"
#include "prefill_schedule_args.h"

/* --- checks --- */

static kv8_status check_workspace(const void *workspace) {
    if ((uintptr_t)workspace % KV8_DEVICE_ALIGNMENT == 0) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "workspace is %p, must be aligned to %d", workspace,
                    (int)KV8_DEVICE_ALIGNMENT);
}

/* A pair of pointers that the plan's `field` asks for, and no other plan. */
static kv8_status check_pair(const char *field, bool is_planned, const char *first_name,
                             const void *first, const char *second_name, const void *second) {
    if (is_planned && (first == NULL || second == NULL))
        return kv8_fail(KV8_ERR_INVALID, "the plan's %s is 1 and %s is NULL", field,
                        first == NULL ? first_name : second_name);
    if (!is_planned && (first != NULL || second != NULL))
        return kv8_fail(KV8_ERR_INVALID, "%s is given and the plan's %s is 0",
                        first != NULL ? first_name : second_name, field);
    return KV8_OK;
}

static kv8_status check_pointers(const kv8_attention_spec *spec, const kv8_attention_args *args) {
    const bool has_codes = kv8_dtype_size(spec->o_dtype) == 1;
    if (args->qo_indptr == NULL || args->o == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s is NULL", args->o == NULL ? "o" : "qo_indptr");
    KV8_TRY(kv8_attention_check_form(spec, args->pages));
    if (args->pages->page_indptr != NULL && args->pages->page_indices == NULL)
        return kv8_fail(KV8_ERR_INVALID, "page_indptr is set and page_indices is NULL");
    if (args->o_scale != NULL && !has_codes)
        return kv8_fail(KV8_ERR_INVALID, "o_scale is set and o_dtype %s; o of 8 bits alone has one",
                        kv8_dtype_name(spec->o_dtype));
    KV8_TRY(check_pair("has_mask", spec->has_mask, "mask_bits", args->mask_bits, "mask_indptr",
                       args->mask_indptr));
    KV8_TRY(check_pair("has_key_range", spec->has_key_range, "key_begin", args->key_begin,
                       "key_end", args->key_end));
    return kv8_attention_check_data(spec, args);
}

static kv8_status check_run(const kv8_attention_spec *spec, const kv8_attention_args *args,
                            const void *workspace) {
    KV8_TRY(kv8_attention_check_scalars(args));
    if (args->batch < 0 || args->batch > spec->max_batch)
        return kv8_fail(KV8_ERR_INVALID, "batch is %d, must be 0 to %d", args->batch,
                        spec->max_batch);
    KV8_TRY(check_workspace(workspace));
    return args->batch == 0 ? KV8_OK : check_pointers(spec, args);
}

/* --- the kernels' argument --- */

kv8_kernel_pages kv8_device_pages(const kv8_attention_spec *spec, const kv8_paged *paged,
                                  kv8_dtype dtype) {
    const int64_t size = (int64_t)kv8_dtype_size(dtype);
    const bool is_ragged = spec->page_size == 0; /* then a request is a page from any slot on */
    return (kv8_kernel_pages){
        .data = paged->data,
        .stride_page = (is_ragged ? paged->stride_slot : paged->stride_page) * size,
        .stride_slot = paged->stride_slot * size,
        .stride_head = paged->stride_head * size,
        .row_scale = (const uint16_t *)paged->row_scale,
        .scale_stride_page =
            is_ragged ? paged->row_scale_stride_slot : paged->row_scale_stride_page,
        .scale_stride_slot = paged->row_scale_stride_slot,
        .scale_stride_head = paged->row_scale_stride_head,
    };
}

static void fill_tables(kv8_kernel_args *a, const kv8_attention_spec *spec,
                        const kv8_attention_args *args) {
    const kv8_page_table *const table = args->pages;
    const int64_t k_pages = args->k->num_pages, v_pages = args->v->num_pages;
    int64_t num_pages = KV8_ANY_PAGES;
    if (k_pages > 0) num_pages = kv8_min_i64(num_pages, k_pages);
    if (v_pages > 0) num_pages = kv8_min_i64(num_pages, v_pages);
    a->k = kv8_device_pages(spec, args->k, spec->k_dtype);
    a->v = kv8_device_pages(spec, args->v, spec->v_dtype);
    a->table = table->page_indptr != NULL   ? table->page_indices
               : table->block_table != NULL ? table->block_table
                                            : table->kv_indptr;
    a->table_stride = table->block_table != NULL ? table->block_table_stride : 1;
    a->page_indptr = table->page_indptr;
    a->last_page_len = table->last_page_len;
    a->seq_lens = table->seq_lens;
    a->kv_indptr = table->kv_indptr;
    a->page_size = spec->page_size == 0 ? KV8_RAGGED_PAGE : spec->page_size;
    a->num_pages = spec->page_size == 0 ? KV8_ANY_PAGES : (uint32_t)num_pages;
    a->bad_pages = args->bad_pages;
    a->by_page = kv8_make_divisor(a->page_size);
}

/* causal is 0; what leaves every key of the bounds visible is -1. */
static int32_t window_right(const kv8_attention_spec *spec) {
    if (spec->causal) return 0;
    const int64_t all = (int64_t)spec->max_kv_len + spec->max_total_q;
    return spec->window_right >= all ? -1 : spec->window_right;
}

static void fill_outputs(kv8_kernel_args *a, const kv8_attention_spec *spec,
                         const kv8_attention_args *args) {
    static const float ln_2 = 0.6931471805599453f;
    const bool is_plain = args->lse_stride_row == 0 && args->lse_stride_head == 0;
    a->o = args->o;
    a->o_stride_row = args->o_stride_row;
    a->o_stride_head = args->o_stride_head;
    a->o_scale = args->o_scale;
    a->lse = args->lse;
    a->lse_stride_row = is_plain ? spec->num_qo_heads : args->lse_stride_row;
    a->lse_stride_head = is_plain ? 1 : args->lse_stride_head;
    a->lse_scale = args->lse_base2 ? 1 : ln_2;
}

/* All but a kernel's own tail. */
static kv8_kernel_args kernel_args(const kv8_attention_spec *spec, const kv8_attention_args *args) {
    static const float log2_e = 1.4426950408889634f;
    kv8_kernel_args a = {
        .q = args->q,
        .q_stride_row = args->q_stride_row,
        .q_stride_head = args->q_stride_head,
        .qo_indptr = args->qo_indptr,
        .qo_lens = args->qo_lens,
        .q_scale = args->q_scale,
        .q_scale_stride_batch = args->q_scale_stride_batch,
        .q_scale_stride_row = args->q_scale_stride_row,
        .q_scale_stride_kv_head = args->q_scale_stride_kv_head,
        .q_scale_stride_group = args->q_scale_stride_group,
        .k_scale = args->k_scale,
        .v_scale = args->v_scale,
        .k_scale_stride_batch = args->k_scale_stride_batch,
        .k_scale_stride_head = args->k_scale_stride_head,
        .v_scale_stride_batch = args->v_scale_stride_batch,
        .v_scale_stride_head = args->v_scale_stride_head,
        .sink_logit = args->sink_logit,
        .mask_bits = args->mask_bits,
        .mask_indptr = args->mask_indptr,
        .key_begin = args->key_begin,
        .key_end = args->key_end,
        .by_group = kv8_make_divisor(spec->num_qo_heads / spec->num_kv_heads),
        .batch = args->batch,
        .num_qo_heads = spec->num_qo_heads,
        .num_kv_heads = spec->num_kv_heads,
        .group_size = spec->num_qo_heads / spec->num_kv_heads,
        .head_dim = spec->head_dim,
        .v_head_dim = spec->v_head_dim,
        .q_dtype = (int32_t)spec->q_dtype,
        .k_dtype = (int32_t)spec->k_dtype,
        .v_dtype = (int32_t)spec->v_dtype,
        .o_dtype = (int32_t)spec->o_dtype,
        .window_left = spec->window_left,
        .window_right = window_right(spec),
        .score_scale = (float)kv8_args_sm_scale(spec, args) * log2_e,
        .soft_cap = args->logits_soft_cap * log2_e,
    };
    fill_tables(&a, spec, args);
    fill_outputs(&a, spec, args);
    return a;
}

static bool aligned(const void *pointer, size_t bytes) {
    return (uintptr_t)pointer % bytes == 0;
}

/* The args of decode; returns the launch. */
static kv8_launch fill_decode(kv8_kernel_args *a, const kv8_attention_device_plan *plan,
                              const kv8_device_choice *choice, uint8_t *workspace) {
    const kv8_partials_layout *const l = &plan->layout.decode;
    const kv8_device_choice of_run = kv8_device_choice_of_run(plan, choice, a->batch);
    a->decode = of_run.decode;
    a->decode.partials = (float *)(void *)(workspace + l->partials_at);
    a->decode.partial_sums = (float *)(void *)(workspace + l->sums_at);
    a->decode.arrivals = (uint32_t *)(void *)(workspace + l->arrivals_at);
    if (choice->variant->way != KV8_WAY_ROWS) /* which alone reads no page before all lengths */
        a->table_entries =
            (int64_t)(kv8_device_bytes_from(plan->device, a->table) / sizeof *a->table);
    return of_run.launch;
}

static void fill_prefill(kv8_kernel_args *a, const kv8_attention_device_plan *plan,
                         const kv8_device_choice *choice, uint8_t *workspace) {
    const kv8_device_layout *const l = &plan->layout;
    const bool fp8 = a->q_dtype == (int32_t)KV8_E4M3;
    const int64_t of_q = fp8 ? 16 : 8, of_o = fp8 ? 4 : 2; /* elements at a time */
    const size_t o_bytes = (size_t)of_o * kv8_dtype_size((kv8_dtype)a->o_dtype);
    a->prefill = choice->prefill;
    a->prefill.queue = (void *)(workspace + l->queue_at);
    a->prefill.items = (void *)(workspace + l->items_at);
    a->prefill.blocks = (void *)(workspace + l->blocks_at);
    a->prefill.block_indptr = (void *)(workspace + l->indptr_at);
    a->prefill.broken = (void *)(workspace + l->broken_at);
    a->prefill.arrivals = (void *)(workspace + l->prefill.arrivals_at);
    a->prefill.partial_sums = (void *)(workspace + l->prefill.sums_at);
    a->prefill.partials = (void *)(workspace + l->prefill.partials_at);
    a->prefill.q_aligned =
        aligned(a->q, 16) && a->q_stride_row % of_q == 0 && a->q_stride_head % of_q == 0;
    a->prefill.o_aligned =
        aligned(a->o, o_bytes) && a->o_stride_row % of_o == 0 && a->o_stride_head % of_o == 0;
}

/* --- launches --- */

kv8_status kv8_attention_device_workspace_init(const kv8_attention_device_plan *plan,
                                               kv8_stream *stream, void *workspace) {
    KV8_REQUIRE(plan, stream, workspace);
    KV8_TRY(check_workspace(workspace));
    if (plan->layout.zeroed_bytes == 0) return KV8_OK;
    return kv8_stream_fill(stream, workspace, 0, plan->layout.zeroed_bytes);
}

/* A run: its kernel, NULL for an empty batch, and that of decode beside a prefill kernel, or NULL.
 * decode_lens: of the latter. */
typedef struct run_kernels {
    kv8_kernel_args args;
    const kv8_device_choice *choice, *beside;
    kv8_launch launch; /* of choice */
    int32_t *decode_lens;
} run_kernels;

/* What prepare and run begin with, of checked args. */
static kv8_status begin(const kv8_attention_device_plan *plan, const kv8_attention_args *given,
                        void *workspace, run_kernels *r) {
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    kv8_kernel_args *const a = &r->args;
    *r = (run_kernels){0};
    KV8_TRY(check_run(&plan->spec, args, workspace));
    if (args->batch == 0) return KV8_OK;
    *a = kernel_args(&plan->spec, args);
    const uint32_t needs = kv8_needs_of_args(args);
    r->choice = kv8_device_choose(plan, needs, args->batch, &a->k, &a->v);
    if (r->choice == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "no kernel of the plan takes these args");
    if (r->choice->variant->way != KV8_WAY_PREFILL) {
        r->launch = fill_decode(a, plan, r->choice, workspace);
        return KV8_OK;
    }
    fill_prefill(a, plan, r->choice, workspace);
    r->launch = r->choice->launch;
    r->beside = kv8_device_choose_beside(plan, needs, args->batch, &a->k, &a->v);
    if (r->beside != NULL)
        r->decode_lens = (void *)((uint8_t *)workspace + plan->layout.decode_lens_at);
    return KV8_OK;
}

/* A row a warp, as far as the GPU has room for warps at once. */
static kv8_status launch_masks(const kv8_attention_device_plan *plan, kv8_stream *stream,
                               const kv8_prefill_schedule_args *args) {
    enum { ROWS = KV8_PREFILL_MASK_THREADS / 32, BLOCKS_PER_SM = 8 };
    const int64_t most = (int64_t)BLOCKS_PER_SM * kv8_device_get_info(plan->device)->num_sms;
    const int64_t blocks = kv8_min_i64(kv8_ceil_div(plan->spec.max_total_q, ROWS), most);
    const kv8_launch launch = {
        .grid = {(uint32_t)blocks}, .block = {KV8_PREFILL_MASK_THREADS}, .overlaps_previous = true};
    return kv8_kernel_launch(&plan->masks, stream, &launch, args);
}

/* Prefill's work list comes into the workspace, from the lengths on the device; a run leaves it as
 * it was. */
kv8_status kv8_attention_device_prepare(const kv8_attention_device_plan *plan, kv8_stream *stream,
                                        const kv8_attention_args *args, void *workspace) {
    KV8_REQUIRE(plan, stream, args, workspace);
    run_kernels r;
    KV8_TRY(begin(plan, args, workspace, &r));
    if (r.choice == NULL || r.choice->variant->way != KV8_WAY_PREFILL) return KV8_OK;
    const kv8_launch launch = {
        .grid = {1}, .block = {KV8_PREFILL_SCHEDULE_THREADS}, .overlaps_previous = true};
    kv8_prefill_schedule_args schedule = {
        .args = r.args,
        .decode_lens = r.decode_lens,
        .unmasked_to = (void *)((uint8_t *)workspace + plan->layout.unmasked_at),
        .decode_rows = plan->decode_rows,
        .shares_joins = kv8_variant_is_on_wgmma(r.choice->variant),
    };
    if (r.args.mask_bits != NULL) KV8_TRY(launch_masks(plan, stream, &schedule));
    return kv8_kernel_launch(&plan->schedule, stream, &launch, &schedule);
}

/* Decode, whose blocks prefill's follow as they end. It waits for all that is ahead of it before it
 * starts, so that what starts behind it may read what that wrote. */
static kv8_status launch_beside(const kv8_attention_device_plan *plan, kv8_stream *stream,
                                const run_kernels *r, void *workspace) {
    kv8_kernel_args args = r->args;
    kv8_launch launch = fill_decode(&args, plan, r->beside, workspace);
    args.qo_lens = r->decode_lens;
    launch.overlaps_previous = false;
    return kv8_kernel_launch(&r->beside->kernel, stream, &launch, &args);
}

kv8_status kv8_attention_device_run(const kv8_attention_device_plan *plan, kv8_stream *stream,
                                    const kv8_attention_args *args, void *workspace) {
    KV8_REQUIRE(plan, stream, args, workspace);
    run_kernels r;
    KV8_TRY(begin(plan, args, workspace, &r));
    if (r.choice == NULL) return KV8_OK;
    if (r.beside != NULL) {
        KV8_TRY(launch_beside(plan, stream, &r, workspace));
        r.args.is_beside = 1;
    }
    if (r.choice->variant->way == KV8_WAY_PREFILL)
        r.launch.overlaps_previous = kv8_variant_is_on_wgmma(r.choice->variant);
    return kv8_kernel_launch(&r.choice->kernel, stream, &r.launch, &r.args);
}
