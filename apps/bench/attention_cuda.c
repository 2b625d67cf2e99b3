/* attention_cuda.c - measures rows of kv8 bench attention on the first GPU, beside a plain
 * streaming read of as many bytes measured in the same process; with --check, a few query rows of
 * each against the f64 oracle on the device's own bytes.
 *
 * Cold: every run of a captured graph takes the next of several sets of pages, in random order, and
 * a set returns only after --pool MiB of others. A time is that of a graph's replay over its runs,
 * so launches follow one another as they do in a model's step.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "bench.h"

enum { MAX_SAMPLES = 1024, MAX_CEILINGS = 32 };

/* Streaming reads of the sizes that rows had so far. */
typedef struct ceilings {
    double bytes[MAX_CEILINGS], read_gb_s[MAX_CEILINGS];
    int32_t num;
} ceilings;

typedef struct bench_device {
    const bench_args *args;
    kv8_device *device;
    kv8_stream *stream;
    ceilings ceilings;
} bench_device;

/* Device memory of one row, and the run over set 0. */
typedef struct device_run {
    kv8_device *device;
    void *memory[16];
    int32_t num_memory, num_sets;
    int64_t pages_per_set;
    const int32_t *page_indices; /* of all sets */
    kv8_attention_device_plan *plan;
    void *workspace;
    kv8_paged k, v;
    kv8_page_table pages;
    kv8_attention_args args;
} device_run;

static kv8_status take_memory(device_run *r, size_t bytes, void **out) {
    const kv8_status status = kv8_device_alloc(r->device, bytes, out);
    if (status == KV8_OK) r->memory[r->num_memory++] = *out;
    return status;
}

static kv8_status upload(device_run *r, kv8_stream *stream, const void *from, size_t bytes,
                         const void **out) {
    void *to = NULL;
    kv8_status status = take_memory(r, bytes, &to);
    if (status == KV8_OK) status = kv8_stream_copy(stream, to, from, bytes);
    if (status == KV8_OK) status = kv8_stream_synchronize(stream);
    *out = to;
    return status;
}

static void close_run(device_run *r) {
    kv8_attention_device_plan_destroy(r->plan);
    for (int32_t i = 0; i < r->num_memory; i++) kv8_device_free(r->device, r->memory[i]);
    *r = (device_run){0};
}

/* --- the data --- */

enum { PIECE_BYTES = 1 << 20 }; /* random data of a buffer, before it repeats */

/* `num` codes of normal values; row scales near 1/32, int8 codes anything. */
static kv8_status random_codes(kv8_dtype dtype, size_t num, uint64_t seed, uint8_t *out) {
    uint64_t state = seed;
    if (dtype == KV8_INT8) {
        for (size_t i = 0; i < num; i++) out[i] = (uint8_t)(bench_random(&state) % 255 - 127);
        return KV8_OK;
    }
    float *const values = malloc(num * sizeof *values);
    if (values == NULL) return KV8_ERR_NO_MEMORY;
    for (size_t i = 0; i < num; i++) values[i] = bench_random_value(&state);
    const kv8_status status = kv8_narrow(KV8_ISA_BEST, dtype, values, num, 1, out, NULL);
    free(values);
    return status;
}

/* Device memory filled with a piece of random data again and again. */
static kv8_status fill_pool(device_run *r, kv8_stream *stream, const void *piece,
                            size_t piece_bytes, size_t bytes, const void **out) {
    void *to = NULL;
    kv8_status status = take_memory(r, bytes, &to);
    for (size_t at = 0; status == KV8_OK && at < bytes; at += piece_bytes) {
        const size_t n = bytes - at < piece_bytes ? bytes - at : piece_bytes;
        status = kv8_stream_copy(stream, (uint8_t *)to + at, piece, n);
    }
    if (status == KV8_OK) status = kv8_stream_synchronize(stream);
    *out = to;
    return status;
}

static kv8_status make_pages(device_run *r, const bench_device *b, const bench_row *row) {
    const bench_args *const a = b->args;
    const int64_t dim = a->head_dim, heads = a->num_kv_heads, slots = a->page_size;
    const size_t num = (size_t)(r->num_sets * r->pages_per_set * slots * heads * dim);
    const size_t num_scales = (size_t)(r->num_sets * r->pages_per_set * slots * heads);
    uint8_t *const piece = malloc(PIECE_BYTES);
    if (piece == NULL) return KV8_ERR_NO_MEMORY;
    kv8_status status = KV8_OK;
    kv8_paged *const both[2] = {&r->k, &r->v};
    const kv8_dtype dtypes[2] = {row->kv.k, row->kv.v};
    r->k = r->v = (kv8_paged)KV8_PAGED_INIT;
    r->args.k = &r->k;
    r->args.v = &r->v;
    for (int i = 0; status == KV8_OK && i < 2; i++) {
        const size_t size = kv8_dtype_size(dtypes[i]);
        status = random_codes(dtypes[i], PIECE_BYTES / size, 2 + (uint64_t)i, piece);
        if (status == KV8_OK)
            status = fill_pool(r, b->stream, piece, PIECE_BYTES, num * size, &both[i]->data);
        if (a->bounded) both[i]->num_pages = r->num_sets * r->pages_per_set;
        both[i]->stride_page = slots * heads * dim;
        both[i]->stride_slot = a->hnd ? dim : heads * dim;
        both[i]->stride_head = a->hnd ? slots * dim : dim;
    }
    if (status == KV8_OK && (row->kv.k == KV8_INT8 || row->kv.v == KV8_INT8)) {
        kv8_f16 *const scales = (kv8_f16 *)(void *)piece;
        uint64_t state = 1;
        for (size_t i = 0; i < PIECE_BYTES / sizeof *scales; i++)
            scales[i] = kv8_f16_from_f32(0.02f + (float)(bench_random(&state) % 1024) * 2e-5f);
        for (int i = 0; status == KV8_OK && i < 2; i++) {
            const void *to = NULL;
            if (dtypes[i] != KV8_INT8) continue;
            for (size_t n = 0; i == 1 && a->sick == SICK_SCALES && n < PIECE_BYTES / 2; n++)
                scales[n] = kv8_f16_from_f32(1000);
            status = fill_pool(r, b->stream, piece, PIECE_BYTES, num_scales * sizeof *scales, &to);
            both[i]->row_scale = to;
            both[i]->row_scale_stride_page = slots * heads;
            both[i]->row_scale_stride_slot = a->hnd ? 1 : heads;
            both[i]->row_scale_stride_head = a->hnd ? slots : 1;
        }
    }
    free(piece);
    return status;
}

/* Page tables of all sets in random order, lengths, queries, sinks. */
static kv8_status make_tables(device_run *r, const bench_device *b, const bench_row *row) {
    const int64_t num = r->num_sets * r->pages_per_set;
    int32_t *const ids = malloc((size_t)num * sizeof *ids);
    int32_t *const lists = malloc(3 * ((size_t)row->batch + 1) * sizeof *lists);
    if (ids == NULL || lists == NULL) {
        free(ids);
        free(lists);
        return KV8_ERR_NO_MEMORY;
    }
    uint64_t state = 7;
    for (int64_t i = 0; i < num; i++) ids[i] = (int32_t)i;
    for (int64_t i = num - 1; i > 0; i--) {
        const int64_t j = (int64_t)(bench_random(&state) % (uint64_t)(i + 1));
        const int32_t swap = ids[i];
        ids[i] = ids[j];
        ids[j] = swap;
    }
    int32_t *const indptr = lists, *const last = indptr + row->batch + 1;
    int32_t *const qo_indptr = last + row->batch + 1;
    indptr[0] = qo_indptr[0] = 0;
    for (int32_t i = 0; i < row->batch; i++) {
        const int32_t keys = bench_request_keys(b->args, row, i), size = b->args->page_size;
        indptr[i + 1] = indptr[i] + (keys + size - 1) / size;
        last[i] = (keys - 1) % size + 1;
        qo_indptr[i + 1] = qo_indptr[i] + bench_request_rows(b->args, row, i);
    }
    const size_t bytes = ((size_t)row->batch + 1) * sizeof(int32_t);
    const void *to[4] = {NULL};
    kv8_status status = upload(r, b->stream, ids, (size_t)num * sizeof *ids, &to[0]);
    if (status == KV8_OK) status = upload(r, b->stream, indptr, bytes, &to[1]);
    if (status == KV8_OK) status = upload(r, b->stream, last, bytes, &to[2]);
    if (status == KV8_OK) status = upload(r, b->stream, qo_indptr, bytes, &to[3]);
    free(ids);
    free(lists);
    r->page_indices = to[0];
    r->pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    r->args.pages = &r->pages;
    r->pages.page_indptr = to[1];
    r->pages.last_page_len = to[2];
    r->args.qo_indptr = to[3];
    return status;
}

static kv8_status make_queries(device_run *r, const bench_device *b, const bench_row *row) {
    const bench_args *const a = b->args;
    const size_t size = kv8_dtype_size(a->q);
    const size_t num =
        (size_t)bench_total_rows(a, row) * (size_t)a->num_qo_heads * (size_t)a->head_dim;
    const size_t piece_num = num < PIECE_BYTES / size ? num : PIECE_BYTES / size;
    uint8_t *const piece = malloc(piece_num * size);
    if (piece == NULL) return KV8_ERR_NO_MEMORY;
    static const float one = 1;
    kv8_status status = random_codes(a->q, piece_num, 1, piece);
    if (status == KV8_OK)
        status = fill_pool(r, b->stream, piece, piece_num * size, num * size, &r->args.q);
    free(piece);
    const void *scale = NULL;
    if (status == KV8_OK && a->q == KV8_E4M3)
        status = upload(r, b->stream, &one, sizeof one, &scale);
    if (status == KV8_OK) status = take_memory(r, num * sizeof(float), &r->args.o);
    r->args.q_scale = scale;
    r->args.batch = row->batch;
    r->args.q_stride_head = r->args.o_stride_head = a->head_dim;
    r->args.q_stride_row = r->args.o_stride_row = (int64_t)a->num_qo_heads * a->head_dim;
    return status;
}

static kv8_status make_ranges(device_run *r, const bench_device *b, const bench_row *row) {
    const bench_args *const a = b->args;
    const int32_t num = bench_total_rows(a, row);
    if (!bench_has_ranges(a)) return KV8_OK;
    int32_t *const begin = malloc(2 * (size_t)num * sizeof *begin), *const end = begin + num;
    if (begin == NULL) return KV8_ERR_NO_MEMORY;
    for (int32_t i = 0, at = 0; i < row->batch; i++)
        for (int32_t q = 0; q < bench_request_rows(a, row, i); q++, at++)
            bench_seen_keys(a, row, i, q, &begin[at], &end[at]);
    const void *to = NULL;
    const kv8_status status = upload(r, b->stream, begin, 2 * (size_t)num * sizeof *begin, &to);
    free(begin);
    r->args.key_begin = to;
    r->args.key_end = r->args.key_begin + num;
    return status;
}

static kv8_status make_tree(device_run *r, const bench_device *b, const bench_row *row) {
    if (!b->args->tree) return KV8_OK;
    const size_t indptr_bytes = ((size_t)row->batch + 1) * sizeof(int64_t);
    int64_t *const indptr = malloc(indptr_bytes);
    uint8_t *const bits = indptr == NULL ? NULL : bench_tree_mask(b->args, row, indptr);
    const void *to[2] = {NULL};
    kv8_status status = bits == NULL ? KV8_ERR_NO_MEMORY : KV8_OK;
    if (status == KV8_OK) status = upload(r, b->stream, bits, (size_t)indptr[row->batch], &to[0]);
    if (status == KV8_OK) status = upload(r, b->stream, indptr, indptr_bytes, &to[1]);
    free(bits);
    free(indptr);
    r->args.mask_bits = to[0];
    r->args.mask_indptr = to[1];
    return status;
}

static kv8_status make_sick(device_run *r, const bench_device *b, const bench_row *row) {
    const bench_args *const a = b->args;
    if (a->sick == SICK_NONE || a->sick == SICK_SCALES) return KV8_OK;
    const int32_t key = bench_request_keys(a, row, 0) / 2;
    int32_t page = 0;
    bench_nan nan;
    kv8_status status =
        kv8_stream_copy(b->stream, &page, r->page_indices + key / a->page_size, sizeof page);
    if (status == KV8_OK) status = kv8_stream_synchronize(b->stream);
    if (status == KV8_OK) status = bench_sick_value(a, row, &r->args, page, &nan);
    if (status == KV8_OK) status = kv8_stream_copy(b->stream, nan.at, nan.code, nan.size);
    return status == KV8_OK ? kv8_stream_synchronize(b->stream) : status;
}

enum { MAX_SINKS = 1024 };
/* Fills sinks [MAX_SINKS]; false where the run has none. */
static bool make_sinks(const bench_args *a, float *sinks) {
    for (int32_t h = 0; h < MAX_SINKS; h++) sinks[h] = 0.5f;
    return !a->no_sink && a->num_qo_heads <= MAX_SINKS;
}

static kv8_status make_plan(device_run *r, const bench_device *b, bench_row *row) {
    float sinks[MAX_SINKS];
    const void *to = NULL;
    const kv8_attention_spec spec = bench_spec(b->args, row);
    kv8_status status = kv8_attention_device_plan_create(&r->plan, r->device, &spec, NULL);
    if (status == KV8_OK && make_sinks(b->args, sinks))
        status = upload(r, b->stream, sinks, sizeof sinks, &to);
    r->args.sink_logit = to;
    if (status == KV8_OK)
        status = take_memory(r, kv8_attention_device_workspace_size(r->plan), &r->workspace);
    if (status == KV8_OK)
        status = kv8_attention_device_workspace_init(r->plan, b->stream, r->workspace);
    char text[512];
    if (status == KV8_OK)
        status = kv8_attention_device_describe(r->plan, &r->args, text, sizeof text);
    if (status == KV8_OK)
        snprintf(row->kernel, sizeof row->kernel, "%.*s", (int)strcspn(text, " "), text);
    return status;
}

/* --- the check --- */

/* Host copies of one request's pages, side by side, each as the pool has it. */
typedef struct host_pages {
    uint8_t *data;
    kv8_f16 *scales;
} host_pages;

static kv8_status download_pages(kv8_stream *stream, const kv8_paged *from, kv8_dtype dtype,
                                 const int32_t *ids, int32_t num_pages, host_pages *out) {
    const size_t bytes = (size_t)from->stride_page * kv8_dtype_size(dtype);
    const size_t num_scales = from->row_scale == NULL ? 0 : (size_t)from->row_scale_stride_page;
    out->data = malloc((size_t)num_pages * bytes);
    out->scales = malloc((size_t)num_pages * num_scales * sizeof(kv8_f16) + 1);
    if (out->data == NULL || out->scales == NULL) return KV8_ERR_NO_MEMORY;
    kv8_status status = KV8_OK;
    for (int32_t i = 0; status == KV8_OK && i < num_pages; i++) {
        status = kv8_stream_copy(stream, out->data + (size_t)i * bytes,
                                 (const uint8_t *)from->data + (size_t)ids[i] * bytes, bytes);
        if (status == KV8_OK && num_scales > 0)
            status = kv8_stream_copy(stream, out->scales + (size_t)i * num_scales,
                                     from->row_scale + (size_t)ids[i] * num_scales,
                                     num_scales * sizeof(kv8_f16));
    }
    return status == KV8_OK ? kv8_stream_synchronize(stream) : status;
}

/* The oracle's problem: the heads of one KV head, one query row and the keys up to its own. */
typedef struct sample {
    kv8_attention_spec spec;
    kv8_attention_args args;
    kv8_paged k, v;
    kv8_page_table pages;
    int32_t qo_indptr[2], kv_len;
    float q_scale;
} sample;

/* Squares of what row `query` of request 0 is off by, and of what it should be. */
static kv8_status check_row(const device_run *r, const bench_device *b, sample *s, int32_t query,
                            int32_t kv_head, double sums[2]) {
    const int64_t dim = s->spec.head_dim, num = dim * s->spec.num_qo_heads;
    const int64_t at = query * r->args.q_stride_row + kv_head * num;
    const kv8_dtype o_dtype = s->spec.o_dtype;
    const size_t q_size = kv8_dtype_size(s->spec.q_dtype), o_size = kv8_dtype_size(o_dtype);
    void *const q = malloc((size_t)num * q_size), *const codes = malloc((size_t)num * o_size);
    float *const o = malloc((size_t)num * sizeof *o);
    double *const want = malloc((size_t)num * sizeof *want);
    kv8_status status = KV8_ERR_NO_MEMORY;
    if (q == NULL || codes == NULL || o == NULL || want == NULL) goto done;
    status = kv8_stream_copy(b->stream, q, (const uint8_t *)r->args.q + (size_t)at * q_size,
                             (size_t)num * q_size);
    if (status == KV8_OK)
        status = kv8_stream_copy(b->stream, codes, (uint8_t *)r->args.o + (size_t)at * o_size,
                                 (size_t)num * o_size);
    if (status == KV8_OK) status = kv8_stream_synchronize(b->stream);
    if (status == KV8_OK) status = kv8_widen(KV8_ISA_BEST, o_dtype, codes, (size_t)num, o);
    s->args.q = q;
    if (status == KV8_OK) status = kv8_attention_reference(&s->spec, &s->args, want, NULL);
    for (int64_t i = 0; status == KV8_OK && i < num; i++) {
        const double off = (double)o[i] - want[i];
        sums[0] += off * off;
        sums[1] += want[i] * want[i];
    }
done:
    free(q);
    free(codes);
    free(o);
    free(want);
    return status;
}

/* Runs set 0 and holds rows of request 0, first to last, each of another KV head, against f64. */
static kv8_status check(device_run *r, const bench_device *b, bench_row *row) {
    enum { SAMPLES = 6 };
    const bench_args *const a = b->args;
    const int32_t keys = bench_request_keys(b->args, row, 0);
    const int32_t qo_len = bench_request_rows(b->args, row, 0);
    const int32_t num_pages = (keys + a->page_size - 1) / a->page_size;
    float sinks[MAX_SINKS];
    sample s = {
        .spec = bench_spec(b->args, row), .args = r->args, .k = r->k, .v = r->v, .q_scale = 1};
    s.args.sink_logit = make_sinks(a, sinks) ? sinks : NULL;
    s.args.k = &s.k;
    s.args.v = &s.v;
    s.args.pages = &s.pages;
    if (a->o == KV8_DTYPE_NONE) s.spec.o_dtype = a->q == KV8_E4M3 ? KV8_F32 : a->q;
    int32_t range[2];
    s.args.key_begin = bench_has_ranges(a) ? &range[0] : NULL;
    s.args.key_end = bench_has_ranges(a) ? &range[1] : NULL;
    s.spec.num_qo_heads /= a->num_kv_heads;
    s.spec.num_kv_heads = 1;
    s.spec.max_batch = s.spec.max_total_q = s.args.batch = s.qo_indptr[1] = 1;
    int32_t *const ids = malloc((size_t)num_pages * sizeof *ids);
    host_pages k = {0}, v = {0};
    double sums[2] = {0, 0};
    r->pages.page_indices = r->page_indices;
    kv8_status status = ids == NULL ? KV8_ERR_NO_MEMORY : KV8_OK;
    if (status == KV8_OK)
        status = kv8_attention_device_prepare(r->plan, b->stream, &r->args, r->workspace);
    if (status == KV8_OK)
        status = kv8_attention_device_run(r->plan, b->stream, &r->args, r->workspace);
    if (status == KV8_OK)
        status = kv8_stream_copy(b->stream, ids, r->page_indices, (size_t)num_pages * sizeof *ids);
    if (status == KV8_OK) status = kv8_stream_synchronize(b->stream);
    if (status == KV8_OK) status = download_pages(b->stream, &r->k, row->kv.k, ids, num_pages, &k);
    if (status == KV8_OK) status = download_pages(b->stream, &r->v, row->kv.v, ids, num_pages, &v);
    for (int32_t i = 0; status == KV8_OK && i < num_pages; i++) ids[i] = i;
    for (int32_t i = 0; status == KV8_OK && i < SAMPLES && i < qo_len; i++) {
        const int32_t query = (int32_t)((int64_t)(qo_len - 1) * i / (SAMPLES - 1));
        const int32_t kv_head = i % a->num_kv_heads;
        s.kv_len = keys - qo_len + query + 1;
        bench_seen_keys(a, row, 0, query, &range[0], &range[1]);
        s.args.qo_indptr = s.qo_indptr;
        s.args.q_scale = a->q == KV8_E4M3 ? &s.q_scale : NULL;
        s.pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
        s.pages.block_table = ids;
        s.pages.block_table_stride = num_pages;
        s.pages.seq_lens = &s.kv_len;
        const int64_t at = kv_head * s.k.stride_head;
        s.k.data = k.data + at * (int64_t)kv8_dtype_size(row->kv.k);
        s.v.data = v.data + at * (int64_t)kv8_dtype_size(row->kv.v);
        if (row->kv.k == KV8_INT8) s.k.row_scale = k.scales + kv_head * s.k.row_scale_stride_head;
        if (row->kv.v == KV8_INT8) s.v.row_scale = v.scales + kv_head * s.v.row_scale_stride_head;
        status = check_row(r, b, &s, query, kv_head, sums);
    }
    row->error = sqrt(sums[0] / sums[1]);
    free(ids);
    free(k.data);
    free(k.scales);
    free(v.data);
    free(v.scales);
    return status;
}

/* --- the clock --- */

static kv8_status capture(device_run *r, const bench_device *b, int32_t num_runs,
                          kv8_graph **graph_out) {
    r->pages.page_indices = r->page_indices;
    kv8_status status = kv8_attention_device_prepare(r->plan, b->stream, &r->args, r->workspace);
    if (status == KV8_OK) status = kv8_stream_capture_begin(b->stream);
    if (status != KV8_OK) return status;
    for (int32_t i = 0; status == KV8_OK && i < num_runs; i++) {
        r->pages.page_indices = r->page_indices + i % r->num_sets * r->pages_per_set;
        if (b->args->prepare)
            status = kv8_attention_device_prepare(r->plan, b->stream, &r->args, r->workspace);
        if (status == KV8_OK)
            status = kv8_attention_device_run(r->plan, b->stream, &r->args, r->workspace);
    }
    const kv8_status ended = kv8_stream_capture_end(b->stream, graph_out);
    return status == KV8_OK ? ended : status;
}

static kv8_status time_graph(const bench_device *b, kv8_graph *graph, int32_t num_runs,
                             bench_times *us_out) {
    static double samples[MAX_SAMPLES];
    kv8_event *begin = NULL, *end = NULL;
    kv8_status status = kv8_event_create(&begin, b->device);
    if (status == KV8_OK) status = kv8_event_create(&end, b->device);
    if (status == KV8_OK) status = kv8_graph_launch(graph, b->stream); /* warm */
    const double until = cli_seconds() + (double)b->args->seconds;
    int32_t num = 0;
    while (status == KV8_OK && num < MAX_SAMPLES && (num < 7 || cli_seconds() < until)) {
        double seconds = 0;
        status = kv8_event_record(begin, b->stream);
        if (status == KV8_OK) status = kv8_graph_launch(graph, b->stream);
        if (status == KV8_OK) status = kv8_event_record(end, b->stream);
        if (status == KV8_OK) status = kv8_event_elapsed(begin, end, &seconds);
        samples[num++] = seconds * 1e6 / num_runs;
        if (cli_interrupted() != 0) break;
    }
    kv8_event_destroy(begin);
    kv8_event_destroy(end);
    if (status == KV8_OK) *us_out = bench_summary(samples, num);
    return status;
}

static kv8_status read_ceiling(bench_device *b, double bytes, double *gb_s_out) {
    ceilings *const c = &b->ceilings;
    for (int32_t i = 0; i < c->num; i++) {
        if (fabs(c->bytes[i] - bytes) > 0.02 * bytes) continue;
        *gb_s_out = c->read_gb_s[i];
        return KV8_OK;
    }
    kv8_device_ceilings measured;
    const kv8_status status =
        kv8_device_measure_ceilings(b->device, (size_t)bytes / 4096 * 4096 + 4096, &measured);
    if (status != KV8_OK) return status;
    *gb_s_out = measured.read_gb_s;
    if (c->num < MAX_CEILINGS) {
        c->bytes[c->num] = bytes;
        c->read_gb_s[c->num++] = measured.read_gb_s;
    }
    return KV8_OK;
}

/* Sets of pages that runs take in turn, and runs of a graph: so many that a set is cold when it
 * returns; of prefill, which reads each key many times, a few. */
static int32_t choose_runs(const bench_device *b, const bench_row *row, device_run *run) {
    const bench_args *const a = b->args;
    enum { MOST_SETS = 64, MOST_PREFILLS = 4, LEAST_DECODES = 32, FEW_ROWS = 64 };
    const double set_bytes =
        (double)run->pages_per_set * a->page_size * bench_slot_bytes(a, &row->kv);
    const double sets = 2 + floor(a->pool_mib * 1048576.0 / set_bytes);
    const bool decodes = row->qo_len <= FEW_ROWS;
    run->num_sets = (int32_t)fmin(sets, decodes ? MOST_SETS : MOST_PREFILLS);
    if (!decodes || run->num_sets >= LEAST_DECODES) return run->num_sets;
    return run->num_sets * (LEAST_DECODES / run->num_sets);
}

static int measure_row(bench_device *b, bench_row *row) {
    const bench_args *const a = b->args;
    device_run run = {.device = b->device};
    for (int32_t i = 0; i < row->batch; i++)
        run.pages_per_set +=
            (bench_request_keys(b->args, row, i) + a->page_size - 1) / a->page_size;
    const int32_t num_runs = choose_runs(b, row, &run);
    run.args = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    kv8_graph *graph = NULL;
    kv8_status status = read_ceiling(b, row->kv_bytes, &row->read_gb_s);
    if (status == KV8_OK) status = make_pages(&run, b, row);
    if (status == KV8_OK) status = make_tables(&run, b, row);
    if (status == KV8_OK) status = make_queries(&run, b, row);
    if (status == KV8_OK) status = make_ranges(&run, b, row);
    if (status == KV8_OK) status = make_tree(&run, b, row);
    if (status == KV8_OK) status = make_sick(&run, b, row);
    if (status == KV8_OK) status = make_plan(&run, b, row);
    if (status == KV8_OK && a->check) status = check(&run, b, row);
    if (status == KV8_OK) status = capture(&run, b, num_runs, &graph);
    if (status == KV8_OK) status = time_graph(b, graph, num_runs, &row->us);
    kv8_graph_destroy(graph);
    close_run(&run);
    if (cli_interrupted() != 0) return cli_interrupted();
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* --- the machine --- */

static int measure(void *self, const bench_row *of, bench_rows *rows) {
    bench_device *const b = self;
    for (int phase = 0; phase < 2; phase++) {
        bench_row *row = NULL;
        int status = bench_rows_add(rows, b->args, of, phase, &row);
        if (status == CLI_OK && row != NULL) status = measure_row(b, row);
        if (status != CLI_OK) return status;
        rows->num += row != NULL;
    }
    return CLI_OK;
}

static void close_device(void *self) {
    bench_device *const b = self;
    kv8_stream_destroy(b->stream);
    kv8_device_close(b->device);
}

int bench_cuda_open(bench_machine *out, const bench_args *args) {
    static bench_device b;
    b = (bench_device){.args = args};
    *out = (bench_machine){.measure = measure, .close = close_device, .self = &b};
    kv8_status status = kv8_device_open(&b.device, 0);
    if (status == KV8_OK) status = kv8_stream_create(&b.stream, b.device);
    if (status != KV8_OK) return cli_fail_status(status);
    out->name = kv8_device_get_info(b.device)->name;
    return CLI_OK;
}
