/* append_rows.c - rows into pages in host memory.
 *
 * Work is cut into blocks of rows for one thread, and into (block of rows, head) pieces for a pool
 * of threads. Every piece writes bytes of its own; the counters of a head are sums, so their order
 * changes nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_rows.h"

#include <stdatomic.h>

#include "rope_impl.h"
#include "simd/subnormals.h"

enum {
    ROWS_PER_TASK = 32,
    /* Fewer elements than this (some 6 us at 0.4 ns each on AVX-512) are written sooner by one
     * thread than others wake. */
    MIN_PARALLEL_ELEMENTS = 1 << 14
};

/* A job cut into tasks. */
typedef struct cut_job {
    const kv8_append_job *job;
    const kv8_formats_kernels *kernels;
    kv8_row_format source[2]; /* of K's and V's rows as they come */
    int32_t heads_per_task;
} cut_job;

static bool rotates(const kv8_append_job *job, int kv) {
    return kv == 0 && job->cos_sin != NULL;
}

static uint8_t *entry(const kv8_row_array *array, const kv8_row_place *place, int32_t head) {
    if (array->data == NULL) return NULL;
    return array->data + place->page * array->page_bytes + place->slot * array->slot_bytes +
           head * array->head_bytes;
}

/* One head of one row as f32: in place where it can be, else in scratch. */
static const float *source_values(const cut_job *cut, int kv, int32_t row, int32_t head,
                                  float *scratch) {
    const kv8_append_job *const job = cut->job;
    const kv8_append_target *const target = &job->target[kv];
    const void *const source =
        target->source + row * target->source_row_bytes + head * target->source_head_bytes;
    if (job->src_dtype == KV8_F32 && !rotates(job, kv)) return source;
    kv8_row_widen(cut->kernels, &cut->source[kv], source, NULL, 1.0f, scratch);
    if (rotates(job, kv)) {
        const int32_t num_values = kv8_row_num_values(&target->format);
        kv8_rope_rotate(job->cos_sin + (size_t)row * (size_t)num_values, num_values / 2,
                        job->interleaved, scratch);
    }
    return scratch;
}

/* The caller's numbers are plain; other pieces of this append add to them at the same time. */
static void add(uint64_t *to, uint64_t count) {
    _Static_assert(sizeof(_Atomic uint64_t) == sizeof(uint64_t), "added to in place");
    if (count > 0) atomic_fetch_add_explicit((_Atomic uint64_t *)to, count, memory_order_relaxed);
}

int32_t kv8_append_request_of(const int32_t *indptr, int32_t num_requests, int32_t row) {
    int32_t low = 0, high = num_requests; /* indptr[low] <= row < indptr[high] */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (indptr[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where rows [begin, end) go. */
static void find_places(const kv8_append_job *job, int32_t begin, int32_t end,
                        kv8_row_place *places_out) {
    int32_t request =
        job->indptr == NULL ? 0 : kv8_append_request_of(job->indptr, job->num_requests, begin);
    for (int32_t row = begin; row < end; row++) {
        while (job->indptr != NULL && row >= job->indptr[request + 1]) request++;
        places_out[row - begin] = job->place(job->cookie, row, request);
    }
}

static float scale_of(const kv8_append_target *target, const kv8_row_place *place, int32_t head) {
    if (target->scale == NULL) return 1.0f;
    return target
        ->scale[place->scale_idx * target->scale_stride_idx + head * target->scale_stride_head];
}

/* K or V of some rows and heads. */
typedef struct piece {
    int kv;
    int32_t begin_row, end_row, begin_head, end_head;
    const kv8_row_place *places; /* of each row */
} piece;

/* Whether subnormals count as 0: of what rotates; and where 8 bits hold none, 2^-126 by the scale
 * being below half of their least, or int8's own scale leaving it. A scale that is not far above
 * them would count as 0 itself. */
static bool takes_subnormals_as_0(const kv8_append_job *job, const piece *p) {
    const kv8_append_target *const target = &job->target[p->kv];
    const kv8_row_format *const format = &target->format;
    const bool rotated = rotates(job, p->kv), by_row = format->scale == KV8_SCALE_F16;
    if (format->segment[1].count > 0 || (!by_row && format->scale != KV8_SCALE_NONE)) return false;
    if (!rotated && !by_row && !kv8_is_float8(format->segment[0].dtype)) return false;
    for (int32_t i = 0; i < p->end_row - p->begin_row; i++) {
        if (p->places[i].page < 0) continue;
        for (int32_t head = p->begin_head; head < p->end_head; head++) {
            const float scale = scale_of(target, &p->places[i], head);
            if (by_row && !rotated ? scale != 1.0f : scale < 0x1p-80f) return false;
        }
    }
    return true;
}

static void append_head(const cut_job *cut, const piece *p, int32_t head) {
    _Alignas(KV8_ALIGNMENT) float scratch[KV8_MAX_ROW_VALUES];
    const kv8_append_target *const target = &cut->job->target[p->kv];
    kv8_narrow_counts counts = {0};
    for (int32_t row = p->begin_row; row < p->end_row; row++) {
        const kv8_row_place *const place = &p->places[row - p->begin_row];
        if (place->page < 0) continue;
        kv8_row_narrow(cut->kernels, &target->format, source_values(cut, p->kv, row, head, scratch),
                       scale_of(target, place, head), scratch, entry(&target->rows, place, head),
                       entry(&target->scales, place, head), &counts);
    }
    if (target->counters == NULL) return;
    add(target->counters + 2 * head, counts.clips);
    add(target->counters + 2 * head + 1, counts.nans);
}

static void append_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const cut_job *const cut = cookie;
    const kv8_append_job *const job = cut->job;
    const size_t tasks_per_block = (size_t)(job->num_kv_heads / cut->heads_per_task);
    kv8_row_place places[ROWS_PER_TASK];
    piece p = {.places = places};
    p.begin_row = (int32_t)(index / tasks_per_block) * ROWS_PER_TASK;
    p.end_row = (int32_t)kv8_min_i64((int64_t)p.begin_row + ROWS_PER_TASK, job->num_rows);
    p.begin_head = (int32_t)(index % tasks_per_block) * cut->heads_per_task;
    p.end_head = p.begin_head + cut->heads_per_task;
    find_places(job, p.begin_row, p.end_row, places);
    for (p.kv = 0; p.kv < 2; p.kv++) {
        const bool as_0 = takes_subnormals_as_0(job, &p);
        const unsigned before = as_0 ? kv8_subnormals_off() : 0;
        for (int32_t head = p.begin_head; head < p.end_head; head++) append_head(cut, &p, head);
        if (as_0) kv8_subnormals_restore(before);
    }
}

void kv8_append_rows(const kv8_append_job *job, kv8_threads *threads) {
    const int32_t k_values = kv8_row_num_values(&job->target[0].format);
    const int32_t v_values = kv8_row_num_values(&job->target[1].format);
    const int64_t elements = (int64_t)job->num_rows * job->num_kv_heads * (k_values + v_values);
    const bool alone = threads == NULL || elements < MIN_PARALLEL_ELEMENTS;
    cut_job cut = {.job = job,
                   .kernels = kv8_formats_kernels_get(job->isa),
                   .source = {kv8_row_format_of(job->src_dtype, k_values),
                              kv8_row_format_of(job->src_dtype, v_values)},
                   .heads_per_task = alone ? job->num_kv_heads : 1};
    const int64_t num_blocks = kv8_ceil_div(job->num_rows, ROWS_PER_TASK);
    kv8_threads_run(alone ? NULL : threads,
                    (size_t)(num_blocks * (job->num_kv_heads / cut.heads_per_task)), append_task,
                    &cut);
}
