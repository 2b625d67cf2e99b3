/* observe.c - counting rows head by head: per head one cell of sums and one of maxima.
 *
 *   sums    [histogram | zeros, NaN, infinities, rows | non-finite by channel]
 *   maxima  [absmax by channel]
 *
 * A task counts all rows of one head, so that no two threads write one cell. It knows no scale and
 * no format of the cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>
#include <string.h>

#include "observer.h"
#include "rope_impl.h"
#include "simd/subnormals.h"

enum {
    /* Rows of one call below this are counted sooner by one thread than others wake. */
    MIN_PARALLEL_ROWS = 32
};
static const uint32_t abs_mask = 0x7fffffff, inf_bits = 0x7f800000;

float kv8_observe_bin_edge(int32_t bin) {
    const uint32_t bits = (uint32_t)(bin + KV8_OBSERVE_FIRST_BIN) << KV8_OBSERVE_BIN_SHIFT;
    float edge;
    memcpy(&edge, &bits, sizeof edge);
    return edge;
}

/* --- cells --- */

static size_t sums_per_head(const kv8_observed *t) {
    return KV8_NUM_FIXED_SUMS + (size_t)t->head_dim;
}

static size_t cell_idx(const kv8_observed *t, int32_t layer, int32_t head) {
    return (size_t)layer * (size_t)t->num_heads + (size_t)head;
}

size_t kv8_observer_sums_at(const kv8_observed *t, int32_t layer, int32_t head) {
    return t->sums_at + cell_idx(t, layer, head) * sums_per_head(t);
}

size_t kv8_observer_maxima_at(const kv8_observed *t, int32_t layer, int32_t head) {
    return t->maxima_at + cell_idx(t, layer, head) * (size_t)t->head_dim;
}

/* --- create --- */

static kv8_status check_options(const kv8_observer_options *options) {
    const struct {
        const char *what;
        int32_t value, low, high;
    } checks[] = {{"num_layers", options->num_layers, 1, 1 << 16},
                  {"num_kv_heads", options->num_kv_heads, 1, 1 << 16},
                  {"num_qo_heads", options->num_qo_heads, 0, 1 << 16},
                  {"k_head_dim", options->k_head_dim, 1, KV8_OBSERVE_MAX_HEAD_DIM},
                  {"v_head_dim", options->v_head_dim, 0, KV8_OBSERVE_MAX_HEAD_DIM},
                  {"num_ranks", options->num_ranks, 0, 1 << 16}};
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].value < checks[i].low || checks[i].value > checks[i].high)
            return kv8_fail(KV8_ERR_INVALID, "observer: %s is %d, must be %d to %d", checks[i].what,
                            checks[i].value, checks[i].low, checks[i].high);
    }
    return KV8_OK;
}

/* Lays the cells of one tensor out behind those before it. */
static kv8_status place(kv8_observer *observer, kv8_observed_tensor tensor, int32_t num_heads,
                        int32_t head_dim) {
    const kv8_observer_options *const options = &observer->options;
    kv8_observed *const t = &observer->tensors[tensor];
    *t = (kv8_observed){.num_heads = num_heads,
                        .head_dim = head_dim,
                        .num = num_heads,
                        .sums_at = observer->num_sums,
                        .maxima_at = observer->num_maxima};
    if (num_heads > 0 && options->num_ranks > 0) {
        kv8_rank_heads own;
        KV8_TRY(kv8_rank_heads_get(num_heads, options->num_ranks, options->rank, &own));
        t->first = own.first;
        t->num = own.owns ? own.num : 0;
    }
    const size_t cells = (size_t)options->num_layers * (size_t)num_heads;
    observer->num_sums += cells * sums_per_head(t);
    observer->num_maxima += cells * (size_t)head_dim;
    return KV8_OK;
}

kv8_status kv8_observer_create(kv8_observer **out, const kv8_observer_options *options) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "kv8_observer_create: out is NULL");
    *out = NULL;
    KV8_TAKE_STRUCT(kv8_observer_options, options);
    KV8_TRY(check_options(options));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_observer), "observer", &memory));
    kv8_observer *const observer = memory;
    observer->options = *options;
    kv8_observer_options *const own = &observer->options;
    if (own->v_head_dim == 0) own->v_head_dim = own->k_head_dim;
    kv8_status status;
    KV8_TRY_GOTO(kv8_machine_resolve_isa(own->isa, &own->isa));
    KV8_TRY_GOTO(place(observer, KV8_OBSERVED_K, own->num_kv_heads, own->k_head_dim));
    KV8_TRY_GOTO(place(observer, KV8_OBSERVED_V, own->num_kv_heads, own->v_head_dim));
    KV8_TRY_GOTO(place(observer, KV8_OBSERVED_Q, own->num_qo_heads, own->k_head_dim));
    KV8_TRY_GOTO(kv8_alloc(own->allocator, observer->num_sums, sizeof *observer->sums,
                           "observed sums", &memory));
    observer->sums = memory;
    KV8_TRY_GOTO(kv8_alloc(own->allocator, observer->num_maxima, sizeof *observer->maxima,
                           "observed maxima", &memory));
    observer->maxima = memory;
    *out = observer;
    return KV8_OK;
fail:
    kv8_observer_destroy(observer);
    return status;
}

void kv8_observer_destroy(kv8_observer *observer) {
    if (observer == NULL) return;
    const kv8_allocator *const allocator = observer->options.allocator;
    kv8_release(allocator, observer->sums, observer->num_sums, sizeof *observer->sums);
    kv8_release(allocator, observer->maxima, observer->num_maxima, sizeof *observer->maxima);
    kv8_release(allocator, observer, 1, sizeof *observer);
}

void kv8_observer_start(kv8_observer *observer) {
    observer->on = true;
}

void kv8_observer_stop(kv8_observer *observer) {
    observer->on = false;
}

int kv8_observer_is_on(const kv8_observer *observer) {
    return observer->on;
}

/* --- counting --- */

/* The rare rows that hold NaN or infinities. */
static void count_nonfinite(const float *row, int32_t head_dim, uint64_t *sums) {
    for (int32_t d = 0; d < head_dim; d++) {
        uint32_t bits;
        memcpy(&bits, &row[d], sizeof bits);
        bits &= abs_mask;
        if (bits < inf_bits) continue;
        sums[bits == inf_bits ? KV8_SUM_INFS : KV8_SUM_NANS]++;
        sums[KV8_NUM_FIXED_SUMS + d]++;
    }
}

/* Non-negative f32 order as their bits do. */
static void count_row(const float *row, int32_t head_dim, uint64_t *sums, float *maxima) {
    uint32_t zeros = 0, nonfinite = 0;
    for (int32_t d = 0; d < head_dim; d++) {
        uint32_t bits, most;
        memcpy(&bits, &row[d], sizeof bits);
        memcpy(&most, &maxima[d], sizeof most);
        bits &= abs_mask;
        const bool finite = bits < inf_bits;
        zeros += bits == 0;
        nonfinite += !finite;
        const uint32_t value = finite ? bits : 0;
        most = value > most ? value : most;
        memcpy(&maxima[d], &most, sizeof most);
        int32_t bin = (int32_t)(bits >> KV8_OBSERVE_BIN_SHIFT) - KV8_OBSERVE_FIRST_BIN;
        bin = bin < 0 ? 0 : bin;
        bin = bin < KV8_OBSERVE_BINS ? bin : KV8_OBSERVE_BINS - 1;
        sums[bin]++;
    }
    /* The loop above put these into the outermost bins. */
    sums[0] -= zeros;
    sums[KV8_SUM_ZEROS] += zeros;
    sums[KV8_OBSERVE_BINS - 1] -= nonfinite;
    if (nonfinite > 0) count_nonfinite(row, head_dim, sums);
    sums[KV8_SUM_ROWS]++;
}

typedef struct add_job {
    kv8_observer *observer;
    int32_t layer;
    int64_t num_rows;
    kv8_dtype dtype;
    const float *cos_sin; /* NULL = K comes rotated */
    bool interleaved;
    kv8_observe_source sources[KV8_OBSERVED_COUNT];
} add_job;

static void add_head(const add_job *job, kv8_observed_tensor tensor, int32_t head) {
    kv8_observer *const observer = job->observer;
    const kv8_observed *const t = &observer->tensors[tensor];
    const kv8_observe_source *const from = &job->sources[tensor];
    const int64_t size = (int64_t)kv8_dtype_size(job->dtype);
    const bool rotates = tensor == KV8_OBSERVED_K && job->cos_sin != NULL;
    uint64_t *const sums = observer->sums + kv8_observer_sums_at(t, job->layer, head);
    float *const maxima = observer->maxima + kv8_observer_maxima_at(t, job->layer, head);
    float widened[KV8_OBSERVE_MAX_HEAD_DIM];
    const unsigned before = rotates ? kv8_subnormals_off() : 0;
    for (int64_t row = 0; row < job->num_rows; row++) {
        const void *const at = (const uint8_t *)from->data +
                               (row * from->stride_row + head * from->stride_head) * size;
        const bool as_it_lies = job->dtype == KV8_F32 && !rotates;
        if (!as_it_lies)
            KV8_MUST(
                kv8_widen(observer->options.isa, job->dtype, at, (size_t)t->head_dim, widened));
        if (rotates)
            kv8_rope_rotate(job->cos_sin + row * t->head_dim, t->head_dim / 2, job->interleaved,
                            widened);
        count_row(as_it_lies ? (const float *)at : widened, t->head_dim, sums, maxima);
    }
    if (rotates) kv8_subnormals_restore(before);
}

/* Tasks are the counted heads of K, then V, then Q. */
static void add_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const add_job *const job = cookie;
    for (int tensor = 0; tensor < KV8_OBSERVED_COUNT; tensor++) {
        const kv8_observed *const t = &job->observer->tensors[tensor];
        if (job->sources[tensor].data == NULL) continue;
        if (index < (size_t)t->num) {
            add_head(job, (kv8_observed_tensor)tensor, t->first + (int32_t)index);
            return;
        }
        index -= (size_t)t->num;
    }
}

kv8_status kv8_observer_check_add(const kv8_observer *observer, int32_t layer,
                                  const kv8_observe_args *args,
                                  kv8_observe_source sources_out[KV8_OBSERVED_COUNT]) {
    const kv8_observer_options *const options = &observer->options;
    if (layer < 0 || layer >= options->num_layers)
        return kv8_fail(KV8_ERR_INVALID, "observer: layer %d, must be 0 to %d", layer,
                        options->num_layers - 1);
    if (args->num_rows < 0)
        return kv8_fail(KV8_ERR_INVALID, "observer: num_rows is %lld, must be >= 0",
                        (long long)args->num_rows);
    if (args->src_dtype != KV8_F32 && args->src_dtype != KV8_BF16 && args->src_dtype != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "observer: src_dtype is %s, must be f32, bf16 or f16",
                        kv8_dtype_name(args->src_dtype));
    if (args->q != NULL && options->num_qo_heads == 0)
        return kv8_fail(KV8_ERR_INVALID, "observer: q is given, num_qo_heads is 0");
    if (args->cos_sin != NULL && options->k_head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "observer: cos_sin is given, k_head_dim %d is odd",
                        options->k_head_dim);
    sources_out[KV8_OBSERVED_K] =
        (kv8_observe_source){args->k, args->k_stride_row, args->k_stride_head};
    sources_out[KV8_OBSERVED_V] =
        (kv8_observe_source){args->v, args->v_stride_row, args->v_stride_head};
    sources_out[KV8_OBSERVED_Q] =
        (kv8_observe_source){args->q, args->q_stride_row, args->q_stride_head};
    return KV8_OK;
}

kv8_status kv8_observer_add(kv8_observer *observer, int32_t layer, const kv8_observe_args *args) {
    KV8_REQUIRE(observer, args);
    KV8_TAKE_STRUCT(kv8_observe_args, args);
    add_job job = {.observer = observer,
                   .layer = layer,
                   .num_rows = args->num_rows,
                   .dtype = args->src_dtype,
                   .cos_sin = args->cos_sin,
                   .interleaved = args->interleaved != 0};
    KV8_TRY(kv8_observer_check_add(observer, layer, args, job.sources));
    if (args->rows_in_use != NULL) job.num_rows = kv8_min_i64(job.num_rows, *args->rows_in_use);
    if (!observer->on || job.num_rows <= 0) return KV8_OK;
    size_t num_tasks = 0;
    for (int tensor = 0; tensor < KV8_OBSERVED_COUNT; tensor++) {
        if (job.sources[tensor].data != NULL) num_tasks += (size_t)observer->tensors[tensor].num;
    }
    if (num_tasks == 0) return KV8_OK; /* a rank without a head of its own */
    kv8_threads *const threads =
        job.num_rows < MIN_PARALLEL_ROWS ? NULL : observer->options.threads;
    kv8_threads_run(threads, num_tasks, add_task, &job);
    return KV8_OK;
}

/* --- all of it --- */

kv8_status kv8_observer_check_merge(const kv8_observer *observer, const kv8_observer *from) {
    const kv8_observer_options *const a = &observer->options, *const b = &from->options;
    const struct {
        const char *what;
        int32_t has, other;
    } checks[] = {{"num_layers", a->num_layers, b->num_layers},
                  {"num_kv_heads", a->num_kv_heads, b->num_kv_heads},
                  {"num_qo_heads", a->num_qo_heads, b->num_qo_heads},
                  {"k_head_dim", a->k_head_dim, b->k_head_dim},
                  {"v_head_dim", a->v_head_dim, b->v_head_dim}};
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].has != checks[i].other)
            return kv8_fail(KV8_ERR_INVALID, "merge of observers with %s %d and %d", checks[i].what,
                            checks[i].has, checks[i].other);
    }
    return KV8_OK;
}

kv8_status kv8_observer_merge(kv8_observer *observer, const kv8_observer *from) {
    KV8_REQUIRE(observer, from);
    KV8_TRY(kv8_observer_check_merge(observer, from));
    for (size_t i = 0; i < observer->num_sums; i++) observer->sums[i] += from->sums[i];
    for (size_t i = 0; i < observer->num_maxima; i++) {
        if (from->maxima[i] > observer->maxima[i]) observer->maxima[i] = from->maxima[i];
    }
    return KV8_OK;
}

uint64_t *kv8_observer_sums(kv8_observer *observer, size_t *num_out) {
    *num_out = observer->num_sums;
    return observer->sums;
}

float *kv8_observer_maxima(kv8_observer *observer, size_t *num_out) {
    *num_out = observer->num_maxima;
    return observer->maxima;
}

kv8_status kv8_observer_get_options(const kv8_observer *observer,
                                    kv8_observer_options *options_out) {
    KV8_REQUIRE(observer, options_out);
    KV8_WRITE_STRUCT(kv8_observer_options, options_out, &observer->options);
    return KV8_OK;
}

static kv8_status find_head(const kv8_observer *observer, kv8_observed_tensor tensor, int32_t layer,
                            int32_t head) {
    if (tensor < KV8_OBSERVED_K || tensor >= KV8_OBSERVED_COUNT)
        return kv8_fail(KV8_ERR_INVALID, "observer: tensor %d is none of K, V, Q", (int)tensor);
    const int32_t num_heads = observer->tensors[tensor].num_heads;
    if (layer < 0 || layer >= observer->options.num_layers || head < 0 || head >= num_heads)
        return kv8_fail(KV8_ERR_INVALID, "observer: layer %d, head %d, has %d of %d", layer, head,
                        observer->options.num_layers, num_heads);
    return KV8_OK;
}

kv8_status kv8_observer_get(const kv8_observer *observer, kv8_observed_tensor tensor, int32_t layer,
                            int32_t head, kv8_observed_head *head_out) {
    KV8_REQUIRE(observer, head_out);
    KV8_TRY(find_head(observer, tensor, layer, head));
    const kv8_observed *const t = &observer->tensors[tensor];
    const uint64_t *const sums = observer->sums + kv8_observer_sums_at(t, layer, head);
    const float *const maxima = observer->maxima + kv8_observer_maxima_at(t, layer, head);
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    seen.num_rows = sums[KV8_SUM_ROWS];
    seen.num_values = sums[KV8_SUM_ROWS] * (uint64_t)t->head_dim;
    seen.zeros = sums[KV8_SUM_ZEROS];
    seen.nans = sums[KV8_SUM_NANS];
    seen.infs = sums[KV8_SUM_INFS];
    seen.head_dim = t->head_dim;
    seen.channel_absmax = maxima;
    seen.channel_nonfinite = sums + KV8_NUM_FIXED_SUMS;
    seen.histogram = sums;
    for (int32_t d = 0; d < t->head_dim; d++) {
        if (maxima[d] > seen.absmax) seen.absmax = maxima[d];
    }
    KV8_WRITE_STRUCT(kv8_observed_head, head_out, &seen);
    return KV8_OK;
}

/* Every value is in one place: a bin, zero, NaN or infinite. */
static kv8_status check_seen(const kv8_observed *t, const kv8_observed_head *seen) {
    uint64_t num = seen->zeros + seen->nans + seen->infs;
    for (int32_t i = 0; i < KV8_OBSERVE_BINS; i++) num += seen->histogram[i];
    if (num != seen->num_rows * (uint64_t)t->head_dim)
        return kv8_fail(KV8_ERR_INVALID,
                        "counts of %llu values, %llu rows of head_dim %d have %llu",
                        (unsigned long long)num, (unsigned long long)seen->num_rows, t->head_dim,
                        (unsigned long long)(seen->num_rows * (uint64_t)t->head_dim));
    if (!(seen->absmax >= 0 && seen->absmax <= FLT_MAX))
        return kv8_fail(KV8_ERR_INVALID, "an absmax of %g, must be finite and not below 0",
                        (double)seen->absmax);
    return KV8_OK;
}

kv8_status kv8_observer_add_head(kv8_observer *observer, kv8_observed_tensor tensor, int32_t layer,
                                 int32_t head, const kv8_observed_head *seen) {
    KV8_REQUIRE(observer, seen);
    KV8_TAKE_STRUCT(kv8_observed_head, seen);
    KV8_REQUIRE(seen->histogram);
    KV8_TRY(find_head(observer, tensor, layer, head));
    const kv8_observed *const t = &observer->tensors[tensor];
    KV8_TRY(check_seen(t, seen));
    uint64_t *const sums = observer->sums + kv8_observer_sums_at(t, layer, head);
    float *const maxima = observer->maxima + kv8_observer_maxima_at(t, layer, head);
    for (int32_t i = 0; i < KV8_OBSERVE_BINS; i++) sums[i] += seen->histogram[i];
    sums[KV8_SUM_ZEROS] += seen->zeros;
    sums[KV8_SUM_NANS] += seen->nans;
    sums[KV8_SUM_INFS] += seen->infs;
    sums[KV8_SUM_ROWS] += seen->num_rows;
    for (int32_t d = 0; d < t->head_dim; d++) {
        const float most = seen->channel_absmax == NULL ? seen->absmax : seen->channel_absmax[d];
        if (most > maxima[d]) maxima[d] = most;
        if (seen->channel_nonfinite != NULL)
            sums[KV8_NUM_FIXED_SUMS + d] += seen->channel_nonfinite[d];
    }
    return KV8_OK;
}
