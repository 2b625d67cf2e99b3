/* append_device.c - append plans on a GPU, the host's part: the choice among the kernels, and their
 * argument. What they do is in cuda/append_body.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_device.h"

#include "append_args.h"
#include "cache_state.h"

enum { UNROTATED, HALVES_ROTATED, PAIRS_ROTATED };

struct kv8_append_device_plan {
    kv8_append_spec spec;
    kv8_append_kernels kernels;
};

/* --- kernels and plan --- */

static kv8_status get_kernel(kv8_kernel *kernel_out, kv8_device *device, kv8_dtype source,
                             int rotation, const char *width) {
    static const char *const rotations[KV8_NUM_ROTATIONS] = {"", "rope_", "rope_pairs_"};
    char name[64];
    snprintf(name, sizeof name, "kv8_append_%s%s_%s__sm80", rotations[rotation],
             kv8_dtype_name(source), width);
    return kv8_kernel_get(kernel_out, device, name, sizeof(kv8_append_kernel_args), 0);
}

kv8_status kv8_append_kernels_get(kv8_append_kernels *kernels, kv8_device *device,
                                  kv8_dtype src_dtype) {
    for (int i = 0; i < KV8_NUM_ROTATIONS; i++) {
        KV8_TRY(get_kernel(&kernels->ones[i], device, src_dtype, i, "x1"));
        KV8_TRY(get_kernel(&kernels->eights[i], device, src_dtype, i, "x8"));
    }
    return KV8_OK;
}

kv8_status kv8_append_device_plan_create(kv8_append_device_plan **out, kv8_device *device,
                                         const kv8_append_spec *spec) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "append: out is NULL");
    *out = NULL;
    if (device == NULL) return kv8_fail(KV8_ERR_INVALID, "append: device is NULL");
    kv8_append_device_plan made;
    KV8_TRY(kv8_append_read_spec(&made.spec, spec));
    if (made.spec.isa != KV8_ISA_BEST)
        return kv8_fail(KV8_ERR_INVALID, "append: isa is %d, which is a processor's alone",
                        (int)made.spec.isa);
    KV8_TRY(kv8_append_kernels_get(&made.kernels, device, made.spec.src_dtype));
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof made, "append plan", &memory));
    *out = memory;
    **out = made;
    return KV8_OK;
}

void kv8_append_device_plan_destroy(kv8_append_device_plan *plan) {
    kv8_release(NULL, plan, 1, sizeof *plan);
}

/* --- run --- */

static void fill_plane(const kv8_append_spec *spec, const kv8_append_inputs *in, int kv,
                       kv8_append_plane *out) {
    const kv8_append_args *const args = &in->args;
    const kv8_paged *const to = &in->pool[kv];
    *out = (kv8_append_plane){
        .source = kv == KV8_K ? args->k : args->v,
        .source_stride_row = kv == KV8_K ? args->k_stride_row : args->v_stride_row,
        .source_stride_head = kv == KV8_K ? args->k_stride_head : args->v_stride_head,
        .codes = kv8_writable(to->data),
        .stride_page = to->stride_page,
        .stride_slot = to->stride_slot,
        .stride_head = to->stride_head,
        .row_scale = kv8_writable(to->row_scale),
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

/* Pages that both pools have. */
static int64_t common_pages(const kv8_append_inputs *in) {
    int64_t num_pages = INT64_MAX;
    for (int kv = 0; kv < 2; kv++) {
        if (in->pool[kv].num_pages > 0) num_pages = kv8_min_i64(num_pages, in->pool[kv].num_pages);
    }
    return num_pages;
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

kv8_status kv8_append_kernels_launch(const kv8_append_kernels *kernels, kv8_stream *stream,
                                     const kv8_append_spec *spec, const kv8_append_inputs *in) {
    const kv8_append_args *const args = &in->args;
    kv8_append_kernel_args a = {.indptr = args->indptr,
                                .slot_mapping = args->slot_mapping,
                                .page_indptr = in->pages.page_indptr,
                                .page_indices = in->pages.page_indices,
                                .last_page_len = in->pages.last_page_len,
                                .block_table = in->pages.block_table,
                                .seq_lens = in->pages.seq_lens,
                                .block_table_stride = in->pages.block_table_stride,
                                .num_pages = common_pages(in),
                                .bad_pages = args->bad_pages,
                                .cos_sin = args->cos_sin,
                                .batch = args->batch,
                                .max_rows = args->max_rows,
                                .num_kv_heads = spec->num_kv_heads,
                                .page_size = spec->page_size};
    bool eights = (uintptr_t)args->cos_sin % 16 == 0;
    for (int kv = 0; kv < 2; kv++) {
        fill_plane(spec, in, kv, &a.plane[kv]);
        eights = eights && fits_eights(&a.plane[kv], spec->num_kv_heads);
    }
    const int rotation = args->cos_sin == NULL ? UNROTATED
                         : args->interleaved   ? PAIRS_ROTATED
                                               : HALVES_ROTATED;
    const kv8_kernel *const kernel = eights ? &kernels->eights[rotation] : &kernels->ones[rotation];
    a.rows_per_block = rows_per_block(&a, kernel->device, eights);
    for (int kv = 0; kv < 2; kv++)
        fill_passes(&a.plane[kv], spec->num_kv_heads, a.rows_per_block, eights);
    const int64_t num_blocks = kv8_ceil_div(args->max_rows, a.rows_per_block);
    const kv8_launch launch = {.grid = {(uint32_t)num_blocks, 2},
                               .block = {KV8_APPEND_THREADS},
                               .overlaps_previous = kv8_stream_overlaps(stream, args->max_rows)};
    return kv8_kernel_launch(kernel, stream, &launch, &a);
}

kv8_status kv8_append_device_run(const kv8_append_device_plan *plan, kv8_stream *stream,
                                 const kv8_append_args *args) {
    if (plan == NULL || stream == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: %s is NULL", plan == NULL ? "plan" : "stream");
    kv8_append_inputs in;
    KV8_TRY(kv8_append_read_args(&in, &plan->spec, args));
    if (in.args.max_rows == 0) return KV8_OK;
    return kv8_append_kernels_launch(&plan->kernels, stream, &plan->spec, &in);
}
