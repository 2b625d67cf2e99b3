/* bench_attention_device.c - kv8 bench attention --device cuda: the same rows on a GPU, beside a
 * plain streaming read of as many bytes measured in the same process.
 *
 * Cold: every run of a captured graph takes the next of several sets of pages, in random order, and
 * a set returns only after --pool MiB of others. A time is that of a graph's replay over its runs,
 * so launches follow one another as they do in a model's step.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "bench.h"

enum { MAX_SAMPLES = 1024, MAX_ROWS = 512, MAX_CEILINGS = 32 };

typedef struct device_row {
    kv8_dtype kv;
    int32_t batch, context, qo_len;
    char kernel[96];
    bench_times us;
    double kv_bytes, read_gb_s;
} device_row;

/* Streaming reads of the sizes that rows had so far. */
typedef struct ceilings {
    double bytes[MAX_CEILINGS], read_gb_s[MAX_CEILINGS];
    int32_t num;
} ceilings;

typedef struct bench_device {
    const bench_device_args *args;
    kv8_device *device;
    kv8_stream *stream;
    ceilings ceilings;
    device_row rows[MAX_ROWS];
    int32_t num_rows;
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

/* `num` codes of normal values; row scales near 1/32, int8 codes anything. */
static kv8_status random_codes(kv8_dtype dtype, size_t num, uint8_t *out) {
    uint64_t state = num;
    if (dtype == KV8_INT8) {
        for (size_t i = 0; i < num; i++) out[i] = (uint8_t)(bench_random(&state) % 255 - 127);
        return KV8_OK;
    }
    float *const values = malloc(num * sizeof *values);
    if (values == NULL) return KV8_ERR_NO_MEMORY;
    for (size_t i = 0; i < num; i++) {
        const uint64_t bits = bench_random(&state);
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += (float)((bits >> (16 * k)) & 0xffff) / 65536.0f - 0.5f;
        values[i] = sum * 1.7320508f;
    }
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

static kv8_status make_pages(device_run *r, const bench_device *b, const device_row *row) {
    const bench_device_args *const a = b->args;
    const int64_t size = (int64_t)kv8_dtype_size(row->kv), dim = a->head_dim;
    const int64_t heads = a->num_kv_heads, slots = a->page_size;
    const size_t bytes = (size_t)(r->num_sets * r->pages_per_set * slots * heads * dim * size);
    const size_t num_scales = (size_t)(r->num_sets * r->pages_per_set * slots * heads);
    enum { PIECE = 16 << 20 };
    uint8_t *const piece = malloc(PIECE);
    if (piece == NULL) return KV8_ERR_NO_MEMORY;
    kv8_status status = random_codes(row->kv, PIECE / (size_t)size, piece);
    kv8_paged *const both[2] = {&r->args.k, &r->args.v};
    for (int i = 0; status == KV8_OK && i < 2; i++) {
        status = fill_pool(r, b->stream, piece, PIECE, bytes, &both[i]->data);
        both[i]->stride_page = slots * heads * dim;
        both[i]->stride_slot = a->hnd ? dim : heads * dim;
        both[i]->stride_head = a->hnd ? slots * dim : dim;
    }
    if (status == KV8_OK && row->kv == KV8_INT8) {
        kv8_f16 *const scales = (kv8_f16 *)(void *)piece;
        uint64_t state = 1;
        for (size_t i = 0; i < PIECE / sizeof *scales; i++)
            scales[i] = kv8_f16_from_f32(0.02f + (float)(bench_random(&state) % 1024) * 2e-5f);
        for (int i = 0; status == KV8_OK && i < 2; i++) {
            const void *to = NULL;
            status = fill_pool(r, b->stream, piece, PIECE, num_scales * sizeof *scales, &to);
            both[i]->row_scale = to;
            both[i]->row_scale_stride_page = slots * heads;
            both[i]->row_scale_stride_slot = a->hnd ? 1 : heads;
            both[i]->row_scale_stride_head = a->hnd ? slots : 1;
        }
    }
    free(piece);
    return status;
}

static int32_t request_keys(const bench_device *b, const device_row *row, int32_t request) {
    return request == 0 && b->args->longest > 0 ? b->args->longest : row->context;
}

/* Page tables of all sets in random order, lengths, queries, sinks. */
static kv8_status make_tables(device_run *r, const bench_device *b, const device_row *row) {
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
        const int32_t keys = request_keys(b, row, i), size = b->args->page_size;
        indptr[i + 1] = indptr[i] + (keys + size - 1) / size;
        last[i] = (keys - 1) % size + 1;
        qo_indptr[i + 1] = (i + 1) * row->qo_len;
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
    r->args.pages.page_indptr = to[1];
    r->args.pages.last_page_len = to[2];
    r->args.qo_indptr = to[3];
    return status;
}

static kv8_status make_queries(device_run *r, const bench_device *b, const device_row *row) {
    const bench_device_args *const a = b->args;
    const size_t num =
        (size_t)row->batch * (size_t)row->qo_len * (size_t)a->num_qo_heads * (size_t)a->head_dim;
    uint8_t *const q = malloc(num * sizeof(float));
    if (q == NULL) return KV8_ERR_NO_MEMORY;
    kv8_status status = random_codes(a->q, num, q);
    if (status == KV8_OK) status = upload(r, b->stream, q, num * kv8_dtype_size(a->q), &r->args.q);
    free(q);
    if (status == KV8_OK) status = take_memory(r, num * sizeof(float), &r->args.o);
    r->args.batch = row->batch;
    r->args.q_stride_head = r->args.o_stride_head = a->head_dim;
    r->args.q_stride_row = r->args.o_stride_row = (int64_t)a->num_qo_heads * a->head_dim;
    return status;
}

static kv8_status make_plan(device_run *r, const bench_device *b, device_row *row) {
    const bench_device_args *const a = b->args;
    float sinks[1024];
    for (int32_t h = 0; h < 1024; h++) sinks[h] = 0.5f;
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = a->num_qo_heads;
    spec.num_kv_heads = a->num_kv_heads;
    spec.head_dim = a->head_dim;
    spec.q_dtype = a->q;
    spec.k_dtype = spec.v_dtype = row->kv;
    spec.page_size = a->page_size;
    spec.window_left = a->window;
    spec.causal = 1;
    spec.sink_logit = a->no_sink || a->num_qo_heads > 1024 ? NULL : sinks;
    spec.batch_invariant = a->batch_invariant;
    spec.max_batch = row->batch;
    spec.max_total_q = row->batch * row->qo_len;
    spec.max_kv_len = row->context > a->longest ? row->context : a->longest;
    kv8_status status = kv8_attention_device_plan_create(&r->plan, r->device, &spec, NULL);
    if (status == KV8_OK)
        status = take_memory(r, kv8_attention_device_workspace_size(r->plan), &r->workspace);
    if (status == KV8_OK)
        status = kv8_attention_device_workspace_init(r->plan, b->stream, r->workspace);
    char text[512];
    if (status == KV8_OK) status = kv8_attention_device_describe(r->plan, text, sizeof text);
    if (status == KV8_OK)
        snprintf(row->kernel, sizeof row->kernel, "%.*s", (int)strcspn(text, " "), text);
    return status;
}

/* --- the clock --- */

static kv8_status capture(device_run *r, const bench_device *b, int32_t num_runs,
                          kv8_graph **graph_out) {
    kv8_status status = kv8_stream_capture_begin(b->stream);
    if (status != KV8_OK) return status;
    for (int32_t i = 0; status == KV8_OK && i < num_runs; i++) {
        r->args.pages.page_indices = r->page_indices + i % r->num_sets * r->pages_per_set;
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

/* Bytes of K and V that some query sees. */
static double visible_bytes(const bench_device *b, const device_row *row) {
    const bench_device_args *const a = b->args;
    double keys = 0;
    for (int32_t i = 0; i < row->batch; i++) {
        const double all = request_keys(b, row, i);
        keys += a->window < 0 ? all : fmin(all, (double)a->window + row->qo_len);
    }
    const double element = (double)kv8_dtype_size(row->kv);
    return 2.0 * keys * a->num_kv_heads * (a->head_dim * element + (row->kv == KV8_INT8 ? 2 : 0));
}

static int measure_row(bench_device *b, device_row *row) {
    const bench_device_args *const a = b->args;
    device_run run = {.device = b->device};
    for (int32_t i = 0; i < row->batch; i++)
        run.pages_per_set += (request_keys(b, row, i) + a->page_size - 1) / a->page_size;
    row->kv_bytes = visible_bytes(b, row);
    const double set_bytes = 2.0 * (double)run.pages_per_set * a->page_size * a->num_kv_heads *
                             a->head_dim * (double)kv8_dtype_size(row->kv);
    run.num_sets = 2 + (int32_t)(a->pool_mib * 1048576.0 / set_bytes);
    if (run.num_sets > 64) run.num_sets = 64;
    const int32_t num_runs = run.num_sets * (run.num_sets < 32 ? 32 / run.num_sets : 1);
    run.args = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    kv8_graph *graph = NULL;
    kv8_status status = read_ceiling(b, row->kv_bytes, &row->read_gb_s);
    if (status == KV8_OK) status = make_pages(&run, b, row);
    if (status == KV8_OK) status = make_tables(&run, b, row);
    if (status == KV8_OK) status = make_queries(&run, b, row);
    if (status == KV8_OK) status = make_plan(&run, b, row);
    if (status == KV8_OK) status = capture(&run, b, num_runs, &graph);
    if (status == KV8_OK) status = time_graph(b, graph, num_runs, &row->us);
    kv8_graph_destroy(graph);
    close_run(&run);
    if (cli_interrupted() != 0) return cli_interrupted();
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* --- the results --- */

static double row_gb_s(const device_row *r) {
    return r->kv_bytes / r->us.median * 1e-3;
}

static void print_rows(const bench_device *b) {
    printf("%-8s %-8s %5s %8s %6s %10s %20s %8s %8s %6s  %s\n", "shape", "kv", "batch", "context",
           "qo_len", "us", "min .. max", "GB/s", "read", "share", "kernel");
    for (int32_t i = 0; i < b->num_rows; i++) {
        const device_row *const r = &b->rows[i];
        printf("%-8s %-8s %5d %8d %6d %10.2f %9.2f ..%9.2f %8.0f %8.0f %5.1f%%  %s\n",
               b->args->shape, kv8_dtype_name(r->kv), r->batch, r->context, r->qo_len, r->us.median,
               r->us.least, r->us.most, row_gb_s(r), r->read_gb_s, 100 * row_gb_s(r) / r->read_gb_s,
               r->kernel);
    }
    printf(
        "GB/s counts every visible byte of K and V once; read is a plain streaming read of as "
        "many bytes.\n");
}

static void print_csv(const bench_device *b) {
    printf("shape,kv,kernel,batch,context,qo_len,us,us_min,us_max,gb_s,read_ceiling_gb_s,share\n");
    for (int32_t i = 0; i < b->num_rows; i++) {
        const device_row *const r = &b->rows[i];
        printf("%s,%s,%s,%d,%d,%d,%.3f,%.3f,%.3f,%.1f,%.1f,%.4f\n", b->args->shape,
               kv8_dtype_name(r->kv), r->kernel, r->batch, r->context, r->qo_len, r->us.median,
               r->us.least, r->us.most, row_gb_s(r), r->read_gb_s, row_gb_s(r) / r->read_gb_s);
    }
}

static int print_json(const bench_device *b) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < b->num_rows; i++) {
        const device_row *const r = &b->rows[i];
        json_array_append_new(
            list,
            json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:i, s:f, s:f, s:f}", "shape",
                      b->args->shape, "kv", kv8_dtype_name(r->kv), "kernel", r->kernel, "batch",
                      r->batch, "context", r->context, "qo_len", r->qo_len, "us", r->us.median,
                      "us_min", r->us.least, "us_max", r->us.most, "samples", r->us.num, "gb_s",
                      row_gb_s(r), "read_ceiling_gb_s", r->read_gb_s, "share",
                      row_gb_s(r) / r->read_gb_s));
    }
    return cli_write_json(json_pack("{s:s, s:s, s:o}", "version", kv8_version(), "device",
                                    kv8_device_get_info(b->device)->name, "rows", list),
                          stdout, "stdout");
}

static int walk(bench_device *b) {
    const bench_device_args *const a = b->args;
    for (int32_t k = 0; k < a->num_kv; k++) {
        for (int32_t i = 0; i < a->num_batch; i++) {
            for (int32_t c = 0; c < a->num_context; c++) {
                if (b->num_rows == MAX_ROWS) return cli_fail("more than %d rows", (int)MAX_ROWS);
                device_row *const row = &b->rows[b->num_rows];
                *row =
                    (device_row){.kv = a->kv[k],
                                 .batch = a->batch[i],
                                 .context = a->context[c],
                                 .qo_len = a->qo_len < a->context[c] ? a->qo_len : a->context[c]};
                const int status = measure_row(b, row);
                if (status != CLI_OK) return status;
                b->num_rows++;
            }
        }
    }
    return CLI_OK;
}

int bench_attention_device(const bench_device_args *args) {
    static bench_device b; /* large: every row */
    b = (bench_device){.args = args};
    kv8_status opened = kv8_device_open(&b.device, 0);
    if (opened == KV8_OK) opened = kv8_stream_create(&b.stream, b.device);
    int status = opened == KV8_OK ? walk(&b) : cli_fail_status(opened);
    if (status == CLI_OK && args->json) {
        status = print_json(&b);
    } else if (status == CLI_OK) {
        if (args->csv)
            print_csv(&b);
        else
            print_rows(&b);
        status = cli_finish_stdout();
    }
    kv8_stream_destroy(b.stream);
    kv8_device_close(b.device);
    return status;
}
