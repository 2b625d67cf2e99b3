/* append_device.c - rows into pages on a GPU, the host's part: checks, the choice between the two
 * kernels, and their argument. What they do is in cuda/append_body.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_args.h"
#include "cache_state.h"
#include "device_impl.h"

struct kv8_append_plan {
    kv8_append_spec spec;
    bool rotates;
    kv8_kernel eights, ones;
};

/* --- plan --- */

static kv8_status check_spec(const kv8_append_spec *spec) {
    const kv8_dtype source = spec->src_dtype;
    if (source != KV8_F32 && source != KV8_BF16 && source != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "append: src_dtype is %s, must be f32, bf16 or f16",
                        kv8_dtype_name(source));
    if (kv8_dtype_size(spec->k_dtype) == 0 || kv8_dtype_size(spec->v_dtype) == 0)
        return kv8_fail(KV8_ERR_INVALID, "append: k_dtype is %d, v_dtype %d, must be 1 to %d",
                        (int)spec->k_dtype, (int)spec->v_dtype, (int)KV8_DTYPE_COUNT - 1);
    if (spec->num_kv_heads < 1 || spec->page_size < 1)
        return kv8_fail(KV8_ERR_INVALID, "append: num_kv_heads is %d, page_size %d, must be >= 1",
                        spec->num_kv_heads, spec->page_size);
    if (spec->k_head_dim < 1 || spec->k_head_dim > KV8_MAX_HEAD_DIM || spec->v_head_dim < 0 ||
        spec->v_head_dim > KV8_MAX_HEAD_DIM)
        return kv8_fail(KV8_ERR_INVALID, "append: k_head_dim is %d, v_head_dim %d, must be 1 to %d",
                        spec->k_head_dim, spec->v_head_dim, (int)KV8_MAX_HEAD_DIM);
    return KV8_OK;
}

static kv8_status get_kernel(kv8_kernel *kernel_out, kv8_device *device,
                             const kv8_append_plan *plan, const char *width) {
    char name[64];
    snprintf(name, sizeof name, "kv8_append_%s%s_%s__sm80", plan->rotates ? "rope_" : "",
             kv8_dtype_name(plan->spec.src_dtype), width);
    return kv8_kernel_get(kernel_out, device, name, sizeof(kv8_append_kernel_args), 0);
}

static kv8_status create(kv8_append_plan **out, kv8_device *device, const kv8_append_spec *spec,
                         bool rotates) {
    *out = NULL;
    if (device == NULL) return kv8_fail(KV8_ERR_INVALID, "append: device is NULL");
    KV8_TAKE_STRUCT(kv8_append_spec, spec);
    KV8_TRY(check_spec(spec));
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_append_plan), "append plan", &memory));
    kv8_append_plan *const plan = memory;
    plan->spec = *spec;
    plan->rotates = rotates;
    if (plan->spec.v_head_dim == 0) plan->spec.v_head_dim = spec->k_head_dim;
    kv8_status status;
    KV8_TRY_GOTO(get_kernel(&plan->eights, device, plan, "x8"));
    KV8_TRY_GOTO(get_kernel(&plan->ones, device, plan, "x1"));
    *out = plan;
    return KV8_OK;
fail:
    kv8_append_plan_destroy(plan);
    return status;
}

kv8_status kv8_append_plan_create(kv8_append_plan **out, kv8_device *device,
                                  const kv8_append_spec *spec) {
    return create(out, device, spec, false);
}

kv8_status kv8_append_plan_create_rotating(kv8_append_plan **out, kv8_device *device,
                                           const kv8_append_spec *spec) {
    return create(out, device, spec, true);
}

void kv8_append_plan_destroy(kv8_append_plan *plan) {
    kv8_release(NULL, plan, 1, sizeof *plan);
}

/* --- run --- */

/* The rows have scales apart from them, and the pool has no place for those. */
static bool lacks_scales(const kv8_append_plan *plan, int kv, const kv8_paged *pages) {
    const kv8_row_format format =
        kv8_row_format_of(kv == KV8_K ? plan->spec.k_dtype : plan->spec.v_dtype, 1);
    return format.scale != KV8_SCALE_NONE && pages->row_scale == NULL;
}

static kv8_status check_args(const kv8_append_plan *plan, const kv8_append_args *args) {
    if (args->batch < 0 || args->max_rows < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: batch is %d, max_rows %d, must be >= 0",
                        args->batch, args->max_rows);
    if (args->batch == 0 || args->max_rows == 0) return KV8_OK;
    const kv8_page_table *const pages = &args->pages;
    if ((pages->page_indptr != NULL) == (pages->block_table != NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: page_indptr and block_table are both %s",
                        pages->page_indptr != NULL ? "set" : "NULL");
    const bool csr = pages->page_indptr != NULL;
    const char *const missing = args->indptr == NULL                        ? "indptr"
                                : csr && pages->page_indices == NULL        ? "page_indices"
                                : csr && pages->last_page_len == NULL       ? "last_page_len"
                                : !csr && pages->seq_lens == NULL           ? "seq_lens"
                                : args->k == NULL                           ? "k"
                                : args->v == NULL                           ? "v"
                                : args->k_pages.data == NULL                ? "k_pages.data"
                                : args->v_pages.data == NULL                ? "v_pages.data"
                                : lacks_scales(plan, KV8_K, &args->k_pages) ? "k_pages.row_scale"
                                : lacks_scales(plan, KV8_V, &args->v_pages) ? "v_pages.row_scale"
                                                                            : NULL;
    if (missing != NULL) return kv8_fail(KV8_ERR_INVALID, "append: %s is NULL", missing);
    return KV8_OK;
}

/* The pool is the caller's to write: kv8_paged is const because attention reads through it. */
static void *writable(const void *data) {
    return (void *)(uintptr_t)data;
}

static void fill_plane(const kv8_append_plan *plan, const kv8_append_args *args, int kv,
                       kv8_append_plane *out) {
    const kv8_append_spec *const spec = &plan->spec;
    const kv8_paged *const to = kv == KV8_K ? &args->k_pages : &args->v_pages;
    *out = (kv8_append_plane){
        .source = kv == KV8_K ? args->k : args->v,
        .source_stride_row = kv == KV8_K ? args->k_stride_row : args->v_stride_row,
        .source_stride_head = kv == KV8_K ? args->k_stride_head : args->v_stride_head,
        .codes = writable(to->data),
        .stride_page = to->stride_page,
        .stride_slot = to->stride_slot,
        .stride_head = to->stride_head,
        .row_scale = writable(to->row_scale),
        .row_scale_stride_page = to->row_scale_stride_page,
        .row_scale_stride_slot = to->row_scale_stride_slot,
        .row_scale_stride_head = to->row_scale_stride_head,
        .scale = kv == KV8_K ? args->k_scale : args->v_scale,
        .scale_stride_request = args->scale_stride_request,
        .scale_stride_head = args->scale_stride_head,
        .counters = args->counters == NULL
                        ? NULL
                        : args->counters + (size_t)kv * 2 * (size_t)spec->num_kv_heads,
        .head_dim = kv == KV8_K ? spec->k_head_dim : spec->v_head_dim,
        .dtype = (int32_t)(kv == KV8_K ? spec->k_dtype : spec->v_dtype),
    };
}

/* Threads of an item: as many as have something to do, rounded up to a power of two. */
static int32_t lanes_log2(int32_t head_dim, bool eights) {
    const int64_t wanted = eights ? kv8_ceil_div(head_dim, 2 * KV8_APPEND_VECTOR) : head_dim;
    int32_t log2 = 0;
    while (log2 < 5 && ((int64_t)1 << log2) < wanted) log2++;
    return log2;
}

/* Eight elements at a time: they lie whole and aligned in the source and in the pages, and a row
 * takes no more passes than the kernel has bits to remember. */
static bool fits_eights(const kv8_append_plane *plane, int32_t num_kv_heads) {
    enum { MAX_EIGHTS = 32 * 2 * KV8_APPEND_VECTOR };
    const int64_t vector = KV8_APPEND_VECTOR;
    const size_t code_bytes = kv8_dtype_size((kv8_dtype)plane->dtype);
    const size_t code_alignment = code_bytes == 1 ? 8 : 16;
    const int64_t strides = plane->source_stride_row | plane->source_stride_head |
                            plane->stride_page | plane->stride_slot | plane->stride_head;
    const int64_t row_threads = (int64_t)num_kv_heads << lanes_log2(plane->head_dim, true);
    return row_threads <= 32 * KV8_APPEND_THREADS && plane->head_dim % (2 * vector) == 0 &&
           plane->head_dim <= MAX_EIGHTS && strides % vector == 0 &&
           (uintptr_t)plane->source % 16 == 0 && (uintptr_t)plane->codes % code_alignment == 0;
}

/* How a block's threads go over its rows. */
static void fill_passes(kv8_append_plane *plane, int32_t num_kv_heads, int32_t num_rows,
                        bool eights) {
    plane->lanes_log2 = lanes_log2(plane->head_dim, eights);
    const int64_t items = (int64_t)num_rows * num_kv_heads;
    plane->num_passes = (int32_t)kv8_ceil_div(items << plane->lanes_log2, KV8_APPEND_THREADS);
    const int32_t step = KV8_APPEND_THREADS >> plane->lanes_log2;
    plane->step_rows = step / num_kv_heads;
    plane->step_heads = step % num_kv_heads;
    plane->step_source =
        plane->step_rows * plane->source_stride_row + plane->step_heads * plane->source_stride_head;
    plane->wrap_source = plane->source_stride_row - num_kv_heads * plane->source_stride_head;
}

/* Rows of one block: enough for PASSES passes of its threads, so that finding their places and the
 * first load's wait are paid once; fewer where the machine would else stand half empty. */
static int32_t rows_per_block(const kv8_append_kernel_args *a, const kv8_device *device,
                              bool eights) {
    enum { PASSES = 8, BLOCKS_PER_SM = 4 };
    const int32_t head_dim = a->plane[KV8_K].head_dim > a->plane[KV8_V].head_dim
                                 ? a->plane[KV8_K].head_dim
                                 : a->plane[KV8_V].head_dim;
    const int32_t log2 = lanes_log2(head_dim, eights);
    const int64_t by_passes = PASSES * KV8_APPEND_THREADS / ((int64_t)a->num_kv_heads << log2);
    const int64_t by_machine = kv8_ceil_div(
        2 * (int64_t)a->max_rows, (int64_t)BLOCKS_PER_SM * kv8_device_get_info(device)->num_sms);
    const int64_t rows = kv8_min_i64(by_passes, by_machine);
    return (int32_t)kv8_min_i64(kv8_max_i64(rows, 1), KV8_APPEND_MAX_ROWS);
}

kv8_status kv8_append_plan_run_rotating(const kv8_append_plan *plan, kv8_stream *stream,
                                        const kv8_append_args *args, const float *cos_sin) {
    if (plan == NULL || stream == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: %s is NULL", plan == NULL ? "plan" : "stream");
    if (plan->rotates != (cos_sin != NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: the plan %s, and cos_sin is %s",
                        plan->rotates ? "rotates K" : "does not rotate K",
                        cos_sin == NULL ? "NULL" : "there");
    KV8_TAKE_STRUCT(kv8_append_args, args);
    KV8_TRY(check_args(plan, args));
    if (args->batch == 0 || args->max_rows == 0) return KV8_OK;
    const kv8_append_spec *const spec = &plan->spec;
    kv8_append_kernel_args a = {.indptr = args->indptr,
                                .page_indptr = args->pages.page_indptr,
                                .page_indices = args->pages.page_indices,
                                .last_page_len = args->pages.last_page_len,
                                .block_table = args->pages.block_table,
                                .seq_lens = args->pages.seq_lens,
                                .block_table_stride = args->pages.block_table_stride,
                                .cos_sin = cos_sin,
                                .batch = args->batch,
                                .max_rows = args->max_rows,
                                .num_kv_heads = spec->num_kv_heads,
                                .page_size = spec->page_size};
    bool eights = (uintptr_t)cos_sin % 16 == 0;
    for (int kv = 0; kv < 2; kv++) {
        fill_plane(plan, args, kv, &a.plane[kv]);
        eights = eights && fits_eights(&a.plane[kv], spec->num_kv_heads);
    }
    a.rows_per_block = rows_per_block(&a, plan->eights.device, eights);
    for (int kv = 0; kv < 2; kv++)
        fill_passes(&a.plane[kv], spec->num_kv_heads, a.rows_per_block, eights);
    const int64_t num_blocks = kv8_ceil_div(args->max_rows, a.rows_per_block);
    const kv8_launch launch = {.grid = {(uint32_t)num_blocks, 2}, .block = {KV8_APPEND_THREADS}};
    return kv8_kernel_launch(eights ? &plan->eights : &plan->ones, stream, &launch, &a);
}

kv8_status kv8_append_plan_run(const kv8_append_plan *plan, kv8_stream *stream,
                               const kv8_append_args *args) {
    return kv8_append_plan_run_rotating(plan, stream, args, NULL);
}
