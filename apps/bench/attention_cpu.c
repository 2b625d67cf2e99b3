/* attention_cpu.c - measures rows of kv8 bench attention on the processor: plan and run of the
 * public API on random paged caches, beside the limits of this machine measured in the same
 * process.
 *
 * Cold: consecutive runs use different sequences of a pool several times larger than the caches,
 * pages in random order. The ceiling of dot products is that of the plan's kernel: f32
 * multiply-adds, or pairs of bf16 on its rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "bench.h"

enum { MAX_SAMPLES = 4096 };

typedef struct bench_cpu {
    const bench_args *args;
    kv8_threads *pools[BENCH_MAX_VALUES]; /* of each thread count */
    /* Measured when a row first needs them. */
    kv8_ceilings ceilings[BENCH_MAX_VALUES][KV8_ISA_COUNT];
} bench_cpu;

/* --- one row --- */

/* Buffers of a run; page tables of every set are made before the clock starts. */
typedef struct bench_run {
    kv8_attention_plan *plan;
    void *workspace;
    void *q, *o;
    float *sink;
    int32_t *qo_indptr, *page_indptr, *page_indices, *last_page_len;
    int64_t pages_per_set;
    int32_t num_sets;
    kv8_paged k, v;
    kv8_page_table pages;
    kv8_attention_args args;
} bench_run;

static void close_run(bench_run *r) {
    kv8_attention_plan_destroy(r->plan);
    free(r->workspace);
    free(r->q);
    free(r->o);
    free(r->sink);
    free(r->qo_indptr);
    free(r->page_indptr);
    free(r->page_indices);
    free(r->last_page_len);
}

static kv8_status make_queries(bench_run *r, const bench_args *args, const bench_row *row) {
    const size_t total_q = (size_t)row->batch * (size_t)row->qo_len;
    const size_t num = total_q * (size_t)args->num_qo_heads * (size_t)args->head_dim;
    float *const values = bench_random_values(num);
    r->q = malloc(num * sizeof(float));
    r->o = malloc(num * sizeof(float));
    r->sink = malloc((size_t)args->num_qo_heads * sizeof(float));
    r->qo_indptr = malloc(((size_t)row->batch + 1) * sizeof(int32_t));
    if (values == NULL || r->q == NULL || r->o == NULL || r->sink == NULL || r->qo_indptr == NULL) {
        free(values);
        return KV8_ERR_NO_MEMORY;
    }
    const kv8_status status = kv8_narrow(row->isa, args->q, values, num, 1, r->q, NULL);
    free(values);
    for (int32_t h = 0; h < args->num_qo_heads; h++) r->sink[h] = 0.5f;
    for (int32_t b = 0; b <= row->batch; b++) r->qo_indptr[b] = b * row->qo_len;
    r->args.sink_logit = args->no_sink ? NULL : r->sink;
    r->args.batch = row->batch;
    r->args.qo_indptr = r->qo_indptr;
    static const float q_scale = 1;
    r->args.q = r->q;
    r->args.q_scale = args->q == KV8_E4M3 ? &q_scale : NULL;
    r->args.q_stride_head = args->head_dim;
    r->args.q_stride_row = (int64_t)args->num_qo_heads * args->head_dim;
    r->args.o = r->o;
    r->args.o_stride_head = r->args.q_stride_head;
    r->args.o_stride_row = r->args.q_stride_row;
    return status;
}

static kv8_status make_tables(bench_run *r, const bench_args *args, const bench_row *row,
                              const bench_cache *cache) {
    const int64_t pages = (row->context + args->page_size - 1) / args->page_size;
    r->num_sets = cache->num_seqs / row->batch;
    r->pages_per_set = pages * row->batch;
    const size_t sets = (size_t)r->num_sets;
    r->page_indices = malloc(sets * (size_t)r->pages_per_set * sizeof(int32_t));
    r->page_indptr = malloc(((size_t)row->batch + 1) * sizeof(int32_t));
    r->last_page_len = malloc((size_t)row->batch * sizeof(int32_t));
    if (r->page_indices == NULL || r->page_indptr == NULL || r->last_page_len == NULL)
        return KV8_ERR_NO_MEMORY;
    kv8_status status = KV8_OK;
    for (int32_t set = 0; status == KV8_OK && set < r->num_sets; set++)
        status = kv8_cache_page_table(
            cache->cache, 0, cache->seqs + (int64_t)set * row->batch, row->batch, r->page_indptr,
            r->page_indices + set * r->pages_per_set, r->pages_per_set, r->last_page_len);
    r->pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    r->pages.page_indptr = r->page_indptr;
    r->pages.last_page_len = r->last_page_len;
    r->k = r->v = (kv8_paged)KV8_PAGED_INIT;
    if (status == KV8_OK) status = kv8_cache_layer_kv(cache->cache, 0, &r->k, &r->v);
    r->args.k = &r->k;
    r->args.v = &r->v;
    r->args.pages = &r->pages;
    return status;
}

/* A NaN in the first request of every set. */
static kv8_status make_sick(bench_run *r, const bench_args *args, const bench_row *row) {
    if (args->sick == SICK_NONE) return KV8_OK;
    const int64_t key_page = row->context / 2 / args->page_size;
    kv8_status status = KV8_OK;
    for (int32_t set = 0; status == KV8_OK && set < r->num_sets; set++) {
        const int32_t page = r->page_indices[set * r->pages_per_set + key_page];
        bench_nan nan;
        status = bench_sick_value(args, row, &r->args, page, &nan);
        if (status == KV8_OK) memcpy(nan.at, nan.code, nan.size);
    }
    return status;
}

static kv8_status make_plan(bench_run *r, const bench_args *args, const bench_row *row,
                            kv8_threads *threads) {
    const kv8_attention_spec spec = bench_spec(args, row);
    const kv8_status status = kv8_attention_plan_create(&r->plan, &spec, threads, NULL);
    if (status != KV8_OK) return status;
    const size_t bytes = (kv8_attention_workspace_size(r->plan) + 63) / 64 * 64;
    r->workspace = aligned_alloc(64, bytes > 0 ? bytes : 64);
    return r->workspace == NULL ? KV8_ERR_NO_MEMORY : KV8_OK;
}

/* What the plan computes with stands in the kernel's name, kv8_attention_<math>_...__<rung>, the
 * first word of the plan's description. */
static int name_kernel(const bench_run *r, bench_row *row, kv8_isa *rung_out) {
    char text[512];
    kv8_page_table pages = r->pages;
    kv8_attention_args args = r->args;
    pages.page_indices = r->page_indices;
    args.pages = &pages;
    kv8_status status = kv8_attention_prepare(r->plan, &args, r->workspace);
    if (status == KV8_OK)
        status = kv8_attention_describe(r->plan, &args, r->workspace, text, sizeof text);
    if (status != KV8_OK) return cli_fail_status(status);
    snprintf(row->kernel, sizeof row->kernel, "%.*s", (int)strcspn(text, ", "), text);
    const char *const rung = strstr(row->kernel, "__");
    if (sscanf(row->kernel, "kv8_attention_%15[a-z0-9]_", row->math) != 1 || rung == NULL ||
        !bench_isa(rung + 2, rung_out) ||
        (strcmp(row->math, "f32") != 0 && strcmp(row->math, "bf16") != 0))
        return cli_fail("kernel %s: no dot-product ceiling is known for its name", row->kernel);
    return CLI_OK;
}

static kv8_status run_set(bench_run *r, int32_t set) {
    r->pages.page_indices = r->page_indices + set * r->pages_per_set;
    const kv8_status status = kv8_attention_prepare(r->plan, &r->args, r->workspace);
    return status == KV8_OK ? kv8_attention_run(r->plan, &r->args, r->workspace) : status;
}

/* Runs until `seconds` have passed and at least five samples are taken. */
static kv8_status time_run(bench_run *r, float seconds, bench_times *us_out) {
    static double samples[MAX_SAMPLES];
    kv8_status status = run_set(r, 0); /* touches code and workspace */
    const double end = cli_seconds() + (double)seconds;
    int32_t num = 0;
    while (status == KV8_OK && num < MAX_SAMPLES && (num < 5 || cli_seconds() < end)) {
        const double begin = cli_seconds();
        status = run_set(r, (num + 1) % r->num_sets);
        samples[num++] = (cli_seconds() - begin) * 1e6;
        if (cli_interrupted() != 0) break;
    }
    if (status == KV8_OK) *us_out = bench_summary(samples, num);
    return status;
}

/* Refuses what no plan takes, before a cache is filled for it. */
static int check_row(const bench_row *row, const bench_args *args, kv8_threads *threads) {
    enum { MAX_VALUES = 1 << 30 };
    const double num = (double)row->batch * row->qo_len * args->num_qo_heads * args->head_dim;
    if (num > MAX_VALUES)
        return cli_fail("queries of %d x %d rows have %.0f values, the limit is %d", row->batch,
                        row->qo_len, num, (int)MAX_VALUES);
    bench_run run = {.args = KV8_ATTENTION_ARGS_INIT};
    const kv8_status status = make_plan(&run, args, row, threads);
    close_run(&run);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* The limits of a kernel of the rung `isa` on the threads of pool t. */
static int set_limits(bench_cpu *b, int32_t t, kv8_isa isa, bench_row *row) {
    kv8_ceilings *const c = &b->ceilings[t][isa];
    if (c->read_gb_s == 0) {
        const kv8_status status = kv8_machine_measure_ceilings(b->pools[t], isa, c);
        if (status != KV8_OK) return cli_fail_status(status);
    }
    row->read_gb_s = c->read_gb_s;
    row->dot_gmac_s = strcmp(row->math, "bf16") == 0 ? c->bf16_gmac_s : c->f32_gmac_s;
    return CLI_OK;
}

static int measure_row(bench_cpu *b, bench_row *row, const bench_cache *cache, int32_t t) {
    const bench_args *const args = b->args;
    bench_run run = {.args = KV8_ATTENTION_ARGS_INIT};
    kv8_isa rung = KV8_ISA_SCALAR;
    kv8_status status = make_plan(&run, args, row, b->pools[t]);
    if (status == KV8_OK) status = make_queries(&run, args, row);
    if (status == KV8_OK) status = make_tables(&run, args, row, cache);
    if (status == KV8_OK) status = make_sick(&run, args, row);
    const int named = status == KV8_OK ? name_kernel(&run, row, &rung) : CLI_OK;
    if (status == KV8_OK && named == CLI_OK) status = time_run(&run, args->seconds, &row->us);
    close_run(&run);
    if (named != CLI_OK) return named;
    if (cli_interrupted() != 0) return cli_interrupted();
    if (status == KV8_ERR_NO_MEMORY) return cli_fail("no memory for context %d", row->context);
    return status == KV8_OK ? set_limits(b, t, rung, row) : cli_fail_status(status);
}

/* --- the machine --- */

/* Every thread count, rung and phase over one filled cache; without one the rows are only checked.
 */
static int each_row(bench_cpu *b, const bench_row *of, bench_rows *rows, const bench_cache *cache) {
    const int32_t num_isa = b->args->num_isa;
    for (int32_t i = 0; i < b->args->num_threads * num_isa * 2; i++) {
        const int32_t t = i / 2 / num_isa;
        bench_row like = *of, *row = NULL;
        like.isa = b->args->isa[i / 2 % num_isa];
        like.threads = kv8_threads_count(b->pools[t]);
        int status = bench_rows_add(rows, b->args, &like, i % 2, &row);
        if (status == CLI_OK && row != NULL)
            status = cache == NULL ? check_row(row, b->args, b->pools[t])
                                   : measure_row(b, row, cache, t);
        if (status != CLI_OK) return status;
        rows->num += row != NULL && cache != NULL;
    }
    return CLI_OK;
}

static int measure(void *self, const bench_row *of, bench_rows *rows) {
    bench_cpu *const b = self;
    int status = each_row(b, of, rows, NULL);
    if (status != CLI_OK) return status;
    bench_cache cache = {0};
    const kv8_status opened =
        bench_cache_open(&cache, b->args, of, b->pools[b->args->num_threads - 1]);
    if (opened != KV8_OK) status = cli_fail_status(opened);
    if (status == CLI_OK) status = cli_interrupted();
    if (status == CLI_OK) status = each_row(b, of, rows, &cache);
    bench_cache_close(&cache);
    return status;
}

static void close_pools(void *self) {
    bench_cpu *const b = self;
    for (int32_t t = 0; t < b->args->num_threads; t++) kv8_threads_destroy(b->pools[t]);
}

int bench_cpu_open(bench_machine *out, const bench_args *args) {
    static bench_cpu b;
    b = (bench_cpu){.args = args};
    *out = (bench_machine){.name = "cpu", .measure = measure, .close = close_pools, .self = &b};
    for (int32_t t = 0; t < args->num_threads; t++) {
        const kv8_status status = kv8_threads_create(&b.pools[t], args->threads[t]);
        if (status != KV8_OK) return cli_fail_status(status);
    }
    return CLI_OK;
}
