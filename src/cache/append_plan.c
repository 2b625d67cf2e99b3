/* append_plan.c - append plans on the host: every array of the args is read and checked, then the
 * rows are append_rows.c's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "append_check.h"
#include "append_rows.h"
#include "cache_state.h"

struct kv8_append_plan {
    const kv8_allocator *allocator;
    kv8_threads *threads;
    kv8_append_spec spec;
    kv8_isa isa;
};

/* --- plan --- */

kv8_status kv8_append_plan_create(kv8_append_plan **out, const kv8_append_spec *spec,
                                  kv8_threads *threads, const kv8_allocator *allocator) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "append: out is NULL");
    *out = NULL;
    kv8_append_plan made = {.allocator = allocator, .threads = threads};
    KV8_TRY(kv8_append_read_spec(&made.spec, spec));
    KV8_TRY(kv8_machine_resolve_isa(made.spec.isa, &made.isa));
    void *memory;
    KV8_TRY(kv8_alloc(allocator, 1, sizeof made, "append plan", &memory));
    *out = memory;
    **out = made;
    return KV8_OK;
}

void kv8_append_plan_destroy(kv8_append_plan *plan) {
    if (plan != NULL) kv8_release(plan->allocator, plan, 1, sizeof *plan);
}

/* --- where rows go --- */

typedef struct row_finder {
    const kv8_append_inputs *in;
    int32_t page_size;
} row_finder;

static int32_t kv_len_of(const row_finder *f, int32_t b) {
    const kv8_page_table *const pages = &f->in->pages;
    if (pages->page_indptr == NULL) return pages->seq_lens[b];
    const int32_t num_pages = pages->page_indptr[b + 1] - pages->page_indptr[b];
    return num_pages == 0 ? 0 : (num_pages - 1) * f->page_size + pages->last_page_len[b];
}

static kv8_row_place place_in_table(const void *cookie, int32_t row, int32_t request) {
    const row_finder *const f = cookie;
    const kv8_page_table *const pages = &f->in->pages;
    const int32_t position = kv_len_of(f, request) - (f->in->args.indptr[request + 1] - row);
    kv8_row_place place = {.page = -1, .scale_idx = request};
    if (position < 0) return place; /* a table without room for its rows stores nothing */
    const int32_t page_idx = position / f->page_size;
    place.slot = position % f->page_size;
    place.page = pages->page_indptr != NULL
                     ? pages->page_indices[pages->page_indptr[request] + page_idx]
                     : pages->block_table[request * pages->block_table_stride + page_idx];
    return place;
}

static kv8_row_place place_by_mapping(const void *cookie, int32_t row, int32_t request) {
    const row_finder *const f = cookie;
    const int64_t mapped = f->in->args.slot_mapping[row];
    if (mapped < 0) return (kv8_row_place){.page = -1};
    return (kv8_row_place){.page = mapped / f->page_size,
                           .slot = (int32_t)(mapped % f->page_size),
                           .scale_idx = request};
}

/* --- checks of what the arrays hold --- */

static kv8_status check_indptr(const kv8_append_args *args) {
    if (args->indptr == NULL) return KV8_OK;
    if (args->indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "append: indptr[0] is %d, must be 0", args->indptr[0]);
    for (int32_t b = 0; b < args->batch; b++) {
        if (args->indptr[b + 1] < args->indptr[b])
            return kv8_fail(KV8_ERR_INVALID, "append: indptr[%d] is %d, less than %d before it",
                            b + 1, args->indptr[b + 1], args->indptr[b]);
    }
    return KV8_OK;
}

/* The lengths do not reach past the lists of pages. */
static kv8_status check_lists(const row_finder *f) {
    const kv8_page_table *const pages = &f->in->pages;
    for (int32_t b = 0; f->in->args.pages != NULL && b < f->in->args.batch; b++) {
        if (pages->page_indptr == NULL) {
            const int64_t reach = pages->block_table_stride * f->page_size;
            if (pages->seq_lens[b] > reach)
                return kv8_fail(KV8_ERR_INVALID,
                                "append: seq_lens[%d] is %d, its block table reaches %lld", b,
                                pages->seq_lens[b], (long long)reach);
        } else if (pages->page_indptr[b + 1] < pages->page_indptr[b] ||
                   (pages->page_indptr[b + 1] > pages->page_indptr[b] &&
                    (pages->last_page_len[b] < 1 || pages->last_page_len[b] > f->page_size))) {
            return kv8_fail(KV8_ERR_INVALID,
                            "append: request %d has pages %d to %d, last_page_len %d of %d", b,
                            pages->page_indptr[b], pages->page_indptr[b + 1],
                            pages->last_page_len[b], f->page_size);
        }
    }
    return KV8_OK;
}

static kv8_status check_scales(const kv8_append_inputs *in, int32_t num_kv_heads, int kv) {
    const kv8_append_args *const args = &in->args;
    const float *const scales = kv == KV8_K ? args->k_scale : args->v_scale;
    const int32_t num_requests = args->indptr == NULL ? 1 : args->batch;
    for (int32_t b = 0; scales != NULL && b < num_requests; b++) {
        for (int32_t head = 0; head < num_kv_heads; head++) {
            const float scale =
                scales[b * args->scale_stride_request + head * args->scale_stride_head];
            if (!(isfinite(scale) && scale > 0))
                return kv8_fail(KV8_ERR_INVALID,
                                "append: %s of request %d, head %d is %g, must be finite and > 0",
                                kv == KV8_K ? "k_scale" : "v_scale", b, head, (double)scale);
        }
    }
    return KV8_OK;
}

static kv8_status check_places(const kv8_append_job *job, const kv8_append_inputs *in) {
    int32_t request = 0;
    for (int32_t row = 0; row < job->num_rows; row++) {
        while (job->indptr != NULL && row >= job->indptr[request + 1]) request++;
        const kv8_row_place place = job->place(job->cookie, row, request);
        for (int kv = 0; kv < 2; kv++) {
            const int64_t num_pages = in->pool[kv].num_pages;
            if (num_pages > 0 && place.page >= num_pages)
                return kv8_fail(KV8_ERR_INVALID, "append: row %d goes to page %lld, %s has %lld",
                                row, (long long)place.page, kv == KV8_K ? "k_pages" : "v_pages",
                                (long long)num_pages);
        }
    }
    return KV8_OK;
}

/* --- run --- */

static kv8_append_target target_of(const kv8_append_plan *plan, const kv8_append_inputs *in,
                                   int kv) {
    const kv8_append_spec *const spec = &plan->spec;
    const kv8_append_args *const args = &in->args;
    const kv8_paged *const pool = &in->pool[kv];
    const kv8_dtype dtype = kv == KV8_K ? spec->k_dtype : spec->v_dtype;
    const int64_t from = (int64_t)kv8_dtype_size(spec->src_dtype);
    const int64_t to = (int64_t)kv8_dtype_size(dtype), scale = sizeof(kv8_f16);
    return (kv8_append_target){
        .format = kv8_row_format_of(dtype, kv == KV8_K ? spec->k_head_dim : spec->v_head_dim),
        .source = kv == KV8_K ? args->k : args->v,
        .source_row_bytes = from * (kv == KV8_K ? args->k_stride_row : args->v_stride_row),
        .source_head_bytes = from * (kv == KV8_K ? args->k_stride_head : args->v_stride_head),
        .rows = {kv8_writable(pool->data), to * pool->stride_page, to * pool->stride_slot,
                 to * pool->stride_head},
        .scales = {kv8_writable(pool->row_scale), scale * pool->row_scale_stride_page,
                   scale * pool->row_scale_stride_slot, scale * pool->row_scale_stride_head},
        .scale = kv == KV8_K ? args->k_scale : args->v_scale,
        .scale_stride_idx = args->scale_stride_request,
        .scale_stride_head = args->scale_stride_head,
        .counters =
            args->counters == NULL ? NULL : args->counters + kv * 2 * (int64_t)spec->num_kv_heads,
    };
}

kv8_status kv8_append_run(const kv8_append_plan *plan, const kv8_append_args *given) {
    if (plan == NULL) return kv8_fail(KV8_ERR_INVALID, "append: plan is NULL");
    const kv8_append_spec *const spec = &plan->spec;
    kv8_append_inputs in;
    KV8_TRY(kv8_append_read_args(&in, spec, given));
    const kv8_append_args *const args = &in.args;
    if (args->max_rows == 0) return KV8_OK;
    const row_finder finder = {.in = &in, .page_size = spec->page_size};
    KV8_TRY(check_indptr(args));
    KV8_TRY(check_lists(&finder));
    const int32_t num_rows = args->indptr == NULL
                                 ? args->max_rows
                                 : (int32_t)kv8_min_i64(args->max_rows, args->indptr[args->batch]);
    const kv8_append_job job = {
        .isa = plan->isa,
        .src_dtype = spec->src_dtype,
        .num_rows = num_rows,
        .num_kv_heads = spec->num_kv_heads,
        .target = {target_of(plan, &in, KV8_K), target_of(plan, &in, KV8_V)},
        .cos_sin = args->cos_sin,
        .interleaved = args->interleaved != 0,
        .indptr = args->indptr,
        .num_requests = args->batch,
        .place = args->pages != NULL ? place_in_table : place_by_mapping,
        .cookie = &finder,
    };
    for (int kv = 0; kv < 2; kv++) KV8_TRY(check_scales(&in, spec->num_kv_heads, kv));
    KV8_TRY(check_places(&job, &in));
    kv8_append_rows(&job, plan->threads);
    return KV8_OK;
}
