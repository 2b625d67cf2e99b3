/* attention_cpu.c - kv8 bench attention: times plan + run of the public API on random paged
 * caches, beside the limits of this machine measured in the same process.
 *
 * Cold: consecutive runs use different sequences of a pool several times larger than the caches,
 * pages in random order. A run's floor is the larger of bytes of KV over the read ceiling and
 * multiply-adds over the dot-product ceiling; `share` is floor / median, `ceiling` says which. The
 * dot products are those of the plan's kernel: f32 multiply-adds, or pairs of bf16 on its rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "bench.h"

enum { MAX_VALUES = 16, MAX_SAMPLES = 4096 };

typedef struct shape {
    const char *name;
    int32_t num_qo_heads, num_kv_heads, head_dim;
} shape;
static const shape shapes[] = {
    {"gpt-oss", 64, 8, 64}, {"llama", 32, 8, 128}, {"mha", 16, 16, 64}, {"tiny", 8, 2, 64}};

typedef struct bench_args {
    const char *shape, *heads, *phase, *kv, *batch, *context, *threads, *isa, *q, *math, *plot,
        *device;
    int32_t qo_len, window, page_size, pool_mib, longest, shared_prefix;
    float seconds;
    bool no_sink, hnd, json, csv, batch_invariant, check;
} bench_args;

/* One line of the result. */
typedef struct bench_row {
    shape shape;
    const char *phase;
    kv8_dtype kv;
    kv8_isa isa;
    kv8_attention_math asked_math;
    int32_t batch, context, shared_prefix, qo_len, threads;
    bench_times us;
    double kv_bytes, macs;
    char kernel[96], math[16]; /* the plan's: its name, what it multiplies in, its rung */
    kv8_isa kernel_isa;
    double read_gb_s, dot_gmac_s; /* the ceilings of that kernel */
} bench_row;

static double floor_us(const bench_row *row, bool *by_read) {
    const double read = row->kv_bytes / row->read_gb_s * 1e-3;
    const double dot = row->macs / row->dot_gmac_s * 1e-3;
    *by_read = read > dot;
    return read > dot ? read : dot;
}

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

static kv8_status make_queries(bench_run *r, const bench_row *row, kv8_dtype q_dtype) {
    const shape *const s = &row->shape;
    const size_t total_q = (size_t)row->batch * (size_t)row->qo_len;
    const size_t num = total_q * (size_t)s->num_qo_heads * (size_t)s->head_dim;
    float *const values = bench_random_values(num);
    r->q = malloc(num * sizeof(float));
    r->o = malloc(num * sizeof(float));
    r->sink = malloc((size_t)s->num_qo_heads * sizeof(float));
    r->qo_indptr = malloc(((size_t)row->batch + 1) * sizeof(int32_t));
    if (values == NULL || r->q == NULL || r->o == NULL || r->sink == NULL || r->qo_indptr == NULL) {
        free(values);
        return KV8_ERR_NO_MEMORY;
    }
    const kv8_status status = kv8_narrow(row->isa, q_dtype, values, num, 1, r->q, NULL);
    free(values);
    for (int32_t h = 0; h < s->num_qo_heads; h++) r->sink[h] = 0.5f;
    for (int32_t b = 0; b <= row->batch; b++) r->qo_indptr[b] = b * row->qo_len;
    r->args = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    r->args.batch = row->batch;
    r->args.qo_indptr = r->qo_indptr;
    r->args.q = r->q;
    r->args.q_stride_head = s->head_dim;
    r->args.q_stride_row = (int64_t)s->num_qo_heads * s->head_dim;
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

static kv8_status make_plan(bench_run *r, const bench_args *args, const bench_row *row,
                            kv8_dtype q_dtype, kv8_threads *threads) {
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = row->shape.num_qo_heads;
    spec.num_kv_heads = row->shape.num_kv_heads;
    spec.head_dim = row->shape.head_dim;
    spec.q_dtype = q_dtype;
    spec.k_dtype = spec.v_dtype = row->kv;
    spec.page_size = args->page_size;
    spec.window_left = args->window;
    spec.causal = 1;
    r->args.sink_logit = args->no_sink ? NULL : r->sink;
    spec.batch_invariant = args->batch_invariant;
    spec.isa = row->isa;
    spec.math = row->asked_math;
    spec.max_batch = row->batch;
    spec.max_total_q = row->batch * row->qo_len;
    spec.max_kv_len = row->context;
    const kv8_status status = kv8_attention_plan_create(&r->plan, &spec, threads, NULL);
    if (status != KV8_OK) return status;
    const size_t bytes = (kv8_attention_workspace_size(r->plan) + 63) / 64 * 64;
    r->workspace = aligned_alloc(64, bytes > 0 ? bytes : 64);
    return r->workspace == NULL ? KV8_ERR_NO_MEMORY : KV8_OK;
}

static bool isa_from_name(const char *name, kv8_isa *isa_out) {
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (strcmp(name, kv8_isa_name((kv8_isa)isa)) != 0) continue;
        *isa_out = (kv8_isa)isa;
        return true;
    }
    return false;
}

/* What the plan computes with stands in the kernel's name, kv8_attention_<math>_...__<rung>, the
 * first word of the plan's description. */
static int name_kernel(const bench_run *r, bench_row *row) {
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
        !isa_from_name(rung + 2, &row->kernel_isa) ||
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

/* Bytes of K and V that a query can see, each counted once however many share it, and multiply-adds
 * of both products. */
static void count_work(bench_row *row, const bench_args *args) {
    const shape *const s = &row->shape;
    double pairs = 0, first = row->context;
    for (int32_t r = 0; r < row->qo_len; r++) {
        const double end = row->context - row->qo_len + r + 1;
        const double begin = args->window < 0 ? 0 : fmax(0, end - 1 - args->window);
        pairs += end - begin;
        first = fmin(first, begin);
    }
    const double element = (double)kv8_dtype_size(row->kv);
    const double slot =
        2.0 * s->num_kv_heads * (s->head_dim * element + (row->kv == KV8_INT8 ? 2 : 0));
    const double shared = bench_shared_tokens(row->shared_prefix, row->context, args->page_size);
    row->kv_bytes =
        (fmax(0, shared - first) + row->batch * (row->context - fmax(first, shared))) * slot;
    row->macs = 2.0 * row->batch * pairs * s->num_qo_heads * s->head_dim;
}

static int measure_row(bench_row *row, const bench_args *args, const bench_cache *cache,
                       kv8_threads *threads, kv8_dtype q_dtype) {
    bench_run run = {0};
    kv8_status status = make_queries(&run, row, q_dtype);
    if (status == KV8_OK) status = make_tables(&run, args, row, cache);
    if (status == KV8_OK) status = make_plan(&run, args, row, q_dtype, threads);
    const int named = status == KV8_OK ? name_kernel(&run, row) : CLI_OK;
    if (status == KV8_OK && named == CLI_OK) status = time_run(&run, args->seconds, &row->us);
    close_run(&run);
    if (named != CLI_OK) return named;
    if (cli_interrupted() != 0) return cli_interrupted();
    if (status == KV8_ERR_NO_MEMORY) return cli_fail("no memory for context %d", row->context);
    count_work(row, args);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* --- the results --- */

static const char header[] =
    "shape,phase,kv,isa,kernel,batch,context,shared_prefix,qo_len,threads,us,us_min,us_max,gb_s,"
    "gflop_s,"
    "read_ceiling_gb_s,dot_ceiling_gflop_s,ceiling,share\n";

typedef struct bench_figures {
    double gb_s, gflop_s, share;
    const char *ceiling;
} bench_figures;

static bench_figures figures(const bench_row *row) {
    bool by_read = false;
    const double floor = floor_us(row, &by_read);
    return (bench_figures){
        .gb_s = row->kv_bytes / row->us.median * 1e-3,
        .gflop_s = 2 * row->macs / row->us.median * 1e-3,
        .share = floor / row->us.median,
        .ceiling = by_read ? "read" : "dot",
    };
}

/* Limits belong to a thread count and a kernel; the first row of each shows them. */
static bool is_first_with_limits(const bench_row *rows, int32_t at) {
    for (int32_t i = 0; i < at; i++) {
        if (rows[i].threads == rows[at].threads && strcmp(rows[i].kernel, rows[at].kernel) == 0)
            return false;
    }
    return true;
}

static void print_table(const bench_row *rows, int32_t num) {
    printf("%-8s %-7s %-8s %-11s %5s %8s %6s %3s %12s %22s %8s %9s %5s %6s\n", "shape", "phase",
           "kv", "isa", "batch", "context", "qo_len", "thr", "us", "min .. max", "GB/s", "GFLOP/s",
           "limit", "share");
    for (int32_t i = 0; i < num; i++) {
        const bench_row *const r = &rows[i];
        const bench_figures f = figures(r);
        printf(
            "%-8s %-7s %-8s %-11s %5d %8d %6d %3d %12.1f %10.1f ..%10.1f %8.2f %9.1f %5s %5.1f%%\n",
            r->shape.name, r->phase, kv8_dtype_name(r->kv), kv8_isa_name(r->isa), r->batch,
            r->context, r->qo_len, r->threads, r->us.median, r->us.least, r->us.most, f.gb_s,
            f.gflop_s, f.ceiling, 100 * f.share);
    }
    for (int32_t i = 0; i < num; i++) {
        if (!is_first_with_limits(rows, i)) continue;
        printf("\n%s, %d threads: limits are read %.1f GB/s, %s dot products %.1f GFLOP/s",
               rows[i].kernel, rows[i].threads, rows[i].read_gb_s, rows[i].math,
               2 * rows[i].dot_gmac_s);
    }
    if (num > 0 && rows[0].shared_prefix > 0)
        printf("\nthe requests of a run share their first %d keys", rows[0].shared_prefix);
    printf("\nGB/s counts every visible byte of K and V once; share is of the nearer limit.\n");
}

static void print_csv(const bench_row *rows, int32_t num) {
    fputs(header, stdout);
    for (int32_t i = 0; i < num; i++) {
        const bench_row *const r = &rows[i];
        const bench_figures f = figures(r);
        printf("%s,%s,%s,%s,%s,%d,%d,%d,%d,%d,%.2f,%.2f,%.2f,%.3f,%.2f,%.2f,%.2f,%s,%.4f\n",
               r->shape.name, r->phase, kv8_dtype_name(r->kv), kv8_isa_name(r->isa), r->kernel,
               r->batch, r->context, r->shared_prefix, r->qo_len, r->threads, r->us.median,
               r->us.least, r->us.most, f.gb_s, f.gflop_s, r->read_gb_s, 2 * r->dot_gmac_s,
               f.ceiling, f.share);
    }
}

static json_t *row_json(const bench_row *r) {
    const bench_figures f = figures(r);
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:i, s:f, s:f, s:f,"
        " s:f, s:s, s:f}",
        "shape", r->shape.name, "phase", r->phase, "kv", kv8_dtype_name(r->kv), "isa",
        kv8_isa_name(r->isa), "kernel", r->kernel, "math", r->math, "batch", r->batch, "context",
        r->context, "shared_prefix", r->shared_prefix, "qo_len", r->qo_len, "threads", r->threads,
        "us", r->us.median, "us_min", r->us.least, "us_max", r->us.most, "samples", r->us.num,
        "gb_s", f.gb_s, "gflop_s", f.gflop_s, "read_ceiling_gb_s", r->read_gb_s,
        "dot_ceiling_gflop_s", 2 * r->dot_gmac_s, "ceiling", f.ceiling, "share", f.share);
}

static int print_json(const bench_row *rows, int32_t num) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < num; i++) json_array_append_new(list, row_json(&rows[i]));
    return cli_write_json(json_pack("{s:s, s:o}", "version", kv8_version(), "rows", list), stdout,
                          "stdout");
}

/* --- the walk --- */

enum { MAX_ROWS = 512 };

typedef struct walk {
    shape shape;
    kv8_dtype kv[KV8_DTYPE_COUNT], q;
    kv8_isa isa[KV8_ISA_COUNT];
    kv8_attention_math math;
    int32_t batch[MAX_VALUES], context[MAX_VALUES], threads[MAX_VALUES];
    int32_t num_kv, num_isa, num_batch, num_context, num_threads;
    bool decode, prefill;
    kv8_threads *pools[MAX_VALUES];                   /* of each thread count */
    kv8_ceilings ceilings[MAX_VALUES][KV8_ISA_COUNT]; /* measured when a row first needs them */
    bench_row rows[MAX_ROWS];
    int32_t num_rows;
} walk;

static int parse_shape(const bench_args *args, shape *out) {
    if (args->heads != NULL) {
        char end = '\0';
        *out = (shape){.name = "custom"};
        if (sscanf(args->heads, "%d/%d/%d%c", &out->num_qo_heads, &out->num_kv_heads,
                   &out->head_dim, &end) != 3)
            return cli_fail("--heads is \"%s\", must be QUERY/KV/DIM, as 64/8/64", args->heads);
        return CLI_OK;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (strcmp(args->shape, shapes[i].name) != 0) continue;
        *out = shapes[i];
        return CLI_OK;
    }
    return cli_fail("--shape is \"%s\", must be gpt-oss, llama, mha or tiny", args->shape);
}

/* Calls take(name) for every name of a list with commas. */
static int each_name(const char *option, const char *text, walk *w,
                     int (*take)(walk *w, const char *option, const char *name)) {
    char name[32];
    while (*text != '\0') {
        const size_t length = strcspn(text, ",");
        if (length == 0 || length >= sizeof name)
            return cli_fail("--%s is \"%s\", must be names with commas", option, text);
        memcpy(name, text, length);
        name[length] = '\0';
        const int status = take(w, option, name);
        if (status != CLI_OK) return status;
        text += length + (text[length] == ',');
    }
    return CLI_OK;
}

static int take_kv(walk *w, const char *option, const char *name) {
    (void)option;
    if (w->num_kv == KV8_DTYPE_COUNT) return cli_fail("--kv names too many formats");
    const kv8_status status = kv8_dtype_from_name(name, &w->kv[w->num_kv++]);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

static int take_isa(walk *w, const char *option, const char *name) {
    kv8_isa isa, resolved;
    if (!isa_from_name(name, &isa))
        return cli_fail("--%s names \"%s\", no rung; kv8 info lists them", option, name);
    const kv8_status status = kv8_machine_resolve_isa(isa, &resolved);
    if (status != KV8_OK) return cli_fail_status(status);
    if (w->num_isa == KV8_ISA_COUNT) return cli_fail("--isa names too many rungs");
    w->isa[w->num_isa++] = resolved;
    return CLI_OK;
}

static int take_phase(walk *w, const char *option, const char *name) {
    if (strcmp(name, "decode") == 0) {
        w->decode = true;
    } else if (strcmp(name, "prefill") == 0) {
        w->prefill = true;
    } else {
        return cli_fail("--%s is \"%s\", must be decode or prefill", option, name);
    }
    return CLI_OK;
}

static int take_math(walk *w, const char *option, const char *name) {
    static const char *const names[] = {
        [KV8_MATH_AUTO] = "auto", [KV8_MATH_F32] = "f32", [KV8_MATH_BF16] = "bf16"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        w->math = (kv8_attention_math)i;
        return CLI_OK;
    }
    return cli_fail("--%s is \"%s\", must be auto, f32 or bf16", option, name);
}

static int parse_walk(const bench_args *args, walk *w) {
    int status = parse_shape(args, &w->shape);
    if (status == CLI_OK) status = each_name("phase", args->phase, w, take_phase);
    if (status == CLI_OK) status = each_name("kv", args->kv, w, take_kv);
    if (status == CLI_OK) status = take_math(w, "math", args->math);
    if (status == CLI_OK)
        status = bench_list("batch", args->batch, 1, 4096, w->batch, MAX_VALUES, &w->num_batch);
    if (status == CLI_OK)
        status = bench_list("context", args->context, 1, 1 << 24, w->context, MAX_VALUES,
                            &w->num_context);
    if (status == CLI_OK)
        status = bench_list("threads", args->threads, 0, CLI_MAX_THREADS, w->threads, MAX_VALUES,
                            &w->num_threads);
    if (status == CLI_OK) {
        const kv8_status found = kv8_dtype_from_name(args->q, &w->q);
        if (found != KV8_OK) status = cli_fail_status(found);
    }
    for (int32_t c = 0; status == CLI_OK && c < w->num_context; c++) {
        if (args->shared_prefix > w->context[c])
            status = cli_fail("--shared-prefix is %d, --context has only %d keys",
                              args->shared_prefix, w->context[c]);
    }
    if (status != CLI_OK) return status;
    if (args->isa != NULL) return each_name("isa", args->isa, w, take_isa);
    w->num_isa = 1;
    const kv8_status best = kv8_machine_isa(&w->isa[0]);
    return best == KV8_OK ? CLI_OK : cli_fail_status(best);
}

/* The limits of the row's kernel on the w->threads[t] threads. */
static int set_limits(walk *w, int32_t t, bench_row *row) {
    kv8_ceilings *const c = &w->ceilings[t][row->kernel_isa];
    if (c->read_gb_s == 0) {
        const kv8_status status = kv8_machine_measure_ceilings(w->pools[t], row->kernel_isa, c);
        if (status != KV8_OK) return cli_fail_status(status);
    }
    row->read_gb_s = c->read_gb_s;
    row->dot_gmac_s = strcmp(row->math, "bf16") == 0 ? c->bf16_gmac_s : c->f32_gmac_s;
    return CLI_OK;
}

/* Every thread count and rung over one filled cache. */
static int walk_cache(walk *w, const bench_args *args, const bench_cache *cache, bench_row row) {
    for (int32_t t = 0; t < w->num_threads; t++) {
        for (int32_t i = 0; i < w->num_isa; i++) {
            row.isa = w->isa[i];
            row.threads = kv8_threads_count(w->pools[t]);
            if (w->num_rows == MAX_ROWS) return cli_fail("more than %d rows", (int)MAX_ROWS);
            for (int phase = 0; phase < 2; phase++) {
                if (phase == 0 ? !w->decode : !w->prefill) continue;
                row.phase = phase == 0 ? "decode" : "prefill";
                row.qo_len = phase == 0 ? 1 : args->qo_len;
                if (row.qo_len > row.context) row.qo_len = row.context;
                int status = measure_row(&row, args, cache, w->pools[t], w->q);
                if (status == CLI_OK) status = set_limits(w, t, &row);
                if (status != CLI_OK) return status;
                w->rows[w->num_rows++] = row;
            }
        }
    }
    return CLI_OK;
}

static int run_walk(walk *w, const bench_args *args) {
    cli_progress progress;
    cli_progress_begin(&progress);
    int status = CLI_OK;
    uint64_t done = 0;
    const uint64_t total = (uint64_t)w->num_kv * (uint64_t)w->num_batch * (uint64_t)w->num_context;
    for (int32_t k = 0; k < w->num_kv; k++) {
        for (int32_t b = 0; b < w->num_batch; b++) {
            for (int32_t c = 0; status == CLI_OK && c < w->num_context; c++) {
                cli_progress_show(&progress, kv8_dtype_name(w->kv[k]), done++, total);
                const bench_row row = {.shape = w->shape,
                                       .asked_math = w->math,
                                       .kv = w->kv[k],
                                       .batch = w->batch[b],
                                       .context = w->context[c],
                                       .shared_prefix = args->shared_prefix};
                const bench_cache_shape size = {.num_kv_heads = w->shape.num_kv_heads,
                                                .head_dim = w->shape.head_dim,
                                                .page_size = args->page_size,
                                                .batch = row.batch,
                                                .context = row.context,
                                                .shared_prefix = row.shared_prefix,
                                                .pool_mib = args->pool_mib,
                                                .dtype = row.kv,
                                                .hnd = args->hnd};
                bench_cache cache = {0};
                const kv8_status opened =
                    bench_cache_open(&cache, &size, w->pools[w->num_threads - 1]);
                status =
                    opened == KV8_OK ? walk_cache(w, args, &cache, row) : cli_fail_status(opened);
                bench_cache_close(&cache);
            }
        }
    }
    cli_progress_end(&progress);
    return status;
}

/* --- the plot --- */

/* One bar per row: a picture per phase, a group per batch and context, a colour for the rest. */
static bench_bar bar_of(const walk *w, const bench_row *r) {
    bench_bar bar = {.panel = r->phase, .share = figures(r).share, .us = r->us.median};
    if (w->num_batch > 1) {
        snprintf(bar.group, sizeof bar.group, "%d x %d", r->batch, r->context);
    } else {
        snprintf(bar.group, sizeof bar.group, "%d", r->context);
    }
    snprintf(bar.series, sizeof bar.series, "%s", kv8_dtype_name(r->kv));
    size_t at = strlen(bar.series);
    if (w->num_isa > 1) {
        snprintf(bar.series + at, sizeof bar.series - at, " %s", kv8_isa_name(r->isa));
        at = strlen(bar.series);
    }
    if (w->num_threads > 1)
        snprintf(bar.series + at, sizeof bar.series - at, " %d threads", r->threads);
    return bar;
}

static int draw_plot(const walk *w, const bench_args *args, cli_output *plot) {
    bench_bar *const bars = malloc((size_t)w->num_rows * sizeof *bars);
    if (bars == NULL) return cli_fail("no memory for the plot");
    for (int32_t i = 0; i < w->num_rows; i++) bars[i] = bar_of(w, &w->rows[i]);
    char title[256];
    const shape *const s = &w->shape;
    int length = snprintf(title, sizeof title, "attention, %d/%d/%d, %s queries", s->num_qo_heads,
                          s->num_kv_heads, s->head_dim, kv8_dtype_name(w->q));
    if (w->num_isa == 1)
        length += snprintf(title + length, sizeof title - (size_t)length, ", %s",
                           kv8_isa_name(w->isa[0]));
    if (w->num_threads == 1)
        snprintf(title + length, sizeof title - (size_t)length, ", %d threads",
                 kv8_threads_count(w->pools[0]));
    const int status = bench_plot_draw(bars, w->num_rows, title, args->plot, plot->file);
    free(bars);
    return status == CLI_OK ? cli_output_commit(plot) : status;
}

/* What can be refused is, before the long work. */
static int open_plot(const walk *w, const bench_args *args, cli_output *plot) {
    if (args->plot == NULL) return CLI_OK;
    const int32_t num_series = w->num_kv * w->num_isa * w->num_threads;
    int status = bench_plot_check(args->plot, num_series);
    if (status == CLI_OK) status = cli_plot_check();
    return status == CLI_OK ? cli_output_open(plot, args->plot) : status;
}

static int show(const walk *w, const bench_args *args, cli_output *plot) {
    int status = args->plot != NULL ? draw_plot(w, args, plot) : CLI_OK;
    if (status != CLI_OK) return status;
    if (args->json) {
        status = print_json(w->rows, w->num_rows);
    } else if (args->csv) {
        print_csv(w->rows, w->num_rows);
    } else {
        print_table(w->rows, w->num_rows);
    }
    return status == CLI_OK ? cli_finish_stdout() : status;
}

static int parse(bench_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"shape", "NAME", "gpt-oss 64/8/64, llama 32/8/128, mha 16/16/64, tiny 8/2/64", CLI_TEXT,
         &args->shape},
        {"heads", "Q/KV/D", "query heads, KV heads and head_dim instead of a named shape", CLI_TEXT,
         &args->heads},
        {"phase", "LIST", "decode,prefill (both)", CLI_TEXT, &args->phase},
        {"kv", "LIST", "formats of the cache (e4m3,int8,bf16)", CLI_TEXT, &args->kv},
        {"q", "FORMAT", "format of the queries (bf16)", CLI_TEXT, &args->q},
        {"math", "NAME", "auto, f32 or bf16: what to multiply in (auto)", CLI_TEXT, &args->math},
        {"batch", "LIST", "requests of a run (1)", CLI_TEXT, &args->batch},
        {"context", "LIST", "keys of a request (8192)", CLI_TEXT, &args->context},
        {"shared-prefix", "N", "the requests of a run share their first N keys (0)", CLI_INT,
         &args->shared_prefix, 0, 1 << 24},
        {"qo-len", "N", "query tokens of a prefill (512)", CLI_INT, &args->qo_len, 1, 1 << 20},
        {"window", "W", "a query sees itself and W keys before it (-1: all)", CLI_INT,
         &args->window, -1, 1 << 24},
        {"page-size", "N", "tokens of a page (16)", CLI_INT, &args->page_size, 1, 1 << 16},
        {"hnd", NULL, "pages [kv_head, slot, dim] instead of [slot, kv_head, dim]", CLI_FLAG,
         &args->hnd},
        {"no-sink", NULL, "without sink logits", CLI_FLAG, &args->no_sink},
        {"batch-invariant", NULL, "with the batch_invariant option", CLI_FLAG,
         &args->batch_invariant},
        {"threads", "LIST", "thread counts; 0 = all processors (0)", CLI_TEXT, &args->threads},
        {"device", "NAME", "cpu, or cuda: on the first GPU, in captured graphs (cpu)", CLI_TEXT,
         &args->device},
        {"longest", "N", "on cuda: the first request has N keys, the others --context (0: no)",
         CLI_INT, &args->longest, 0, 1 << 24},
        {"check", NULL, "on cuda: the error of six query rows of each run against f64", CLI_FLAG,
         &args->check},
        {"isa", "LIST", "rungs (the best of this machine)", CLI_TEXT, &args->isa},
        {"pool", "MIB", "other caches read before one is read again (512)", CLI_INT,
         &args->pool_mib, 0, 1 << 20},
        {"seconds", "S", "time spent on a row, at least five runs (0.5)", CLI_FLOAT, &args->seconds,
         0, 1000},
        {"plot", "FILE", "draw shares and times as .svg or .png (needs gnuplot)", CLI_TEXT,
         &args->plot},
        {"json", NULL, "print one JSON object", CLI_FLAG, &args->json},
        {"csv", NULL, "print comma-separated values", CLI_FLAG, &args->csv},
    };
    const cli_command command = {
        .usage = "kv8 bench attention [options]",
        .about =
            "Times attention on random paged caches, cold, and beside it what this machine can\n"
            "do at most: reading memory, and multiply-adds of the same kind. LIST is values with\n"
            "commas; every combination is a row.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
        .model_is_optional = true,
    };
    const char *operand = NULL;
    const int status = cli_parse(&command, argc, argv, &operand);
    if (status >= 0) return status;
    return operand == NULL ? -1 : cli_fail("\"%s\" is left over", operand);
}

/* --device cuda: the rows on the GPU. What only the CPU's walk honours is refused. */
static int bench_on_device(const walk *w, const bench_args *args) {
    if (args->isa != NULL || strcmp(args->threads, "0") != 0 || args->plot != NULL ||
        args->shared_prefix > 0 || w->math != KV8_MATH_AUTO)
        return cli_fail(
            "--isa, --math, --threads, --plot and --shared-prefix go with --device cpu");
    const bench_device_args device = {
        .shape = w->shape.name,
        .num_qo_heads = w->shape.num_qo_heads,
        .num_kv_heads = w->shape.num_kv_heads,
        .head_dim = w->shape.head_dim,
        .window = args->window,
        .page_size = args->page_size,
        .pool_mib = args->pool_mib,
        .qo_len = args->qo_len,
        .decode = w->decode,
        .prefill = w->prefill,
        .check = args->check,
        .longest = args->longest,
        .q = w->q,
        .kv = w->kv,
        .batch = w->batch,
        .context = w->context,
        .num_kv = w->num_kv,
        .num_batch = w->num_batch,
        .num_context = w->num_context,
        .seconds = args->seconds,
        .no_sink = args->no_sink,
        .hnd = args->hnd,
        .batch_invariant = args->batch_invariant,
        .json = args->json,
        .csv = args->csv,
    };
    return bench_attention_device(&device);
}

int bench_attention(int argc, char **argv) {
    bench_args args = {.shape = "gpt-oss",
                       .phase = "decode,prefill",
                       .kv = "e4m3,int8,bf16",
                       .q = "bf16",
                       .math = "auto",
                       .batch = "1",
                       .context = "8192",
                       .threads = "0",
                       .device = "cpu",
                       .qo_len = 512,
                       .window = -1,
                       .page_size = 16,
                       .pool_mib = 512,
                       .seconds = 0.5f};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    static walk w; /* large: every row */
    status = parse_walk(&args, &w);
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    if (strcmp(args.device, "cuda") == 0) return bench_on_device(&w, &args);
    if (strcmp(args.device, "cpu") != 0)
        return cli_fail("--device is \"%s\", must be cpu or cuda", args.device);
    if (args.longest > 0 || args.check)
        return cli_fail("--%s goes with --device cuda", args.check ? "check" : "longest");
    cli_output plot = {0};
    status = open_plot(&w, &args, &plot);
    for (int32_t t = 0; status == CLI_OK && t < w.num_threads; t++) {
        const kv8_status created = kv8_threads_create(&w.pools[t], w.threads[t]);
        if (created != KV8_OK) status = cli_fail_status(created);
    }
    if (status == CLI_OK) status = run_walk(&w, &args);
    if (status == CLI_OK) status = show(&w, &args, &plot);
    for (int32_t t = 0; t < w.num_threads; t++) kv8_threads_destroy(w.pools[t]);
    cli_output_abort(&plot);
    return status;
}
