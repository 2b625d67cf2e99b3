/* in_turn.c - times attention of several builds of libkv8.so in turn, in one process.
 *
 *   in_turn [options] LIBRARY[:invariant|:tree|:nan-PART|:inf-PART|:low-Q|:big-PART|:sub-PART]...
 *
 * On a machine that others use, two programs one after the other differ by more than two builds do.
 * Here every build gets a few runs, then the next, over the same cold pages, until the time is up;
 * what disturbs one disturbs all. Differences of 1 to 2 % show in the lower quartiles; repeat with
 * the libraries in another order, since where a workspace lies in memory counts too.
 * `:invariant` asks the plan for batch_invariant, `:tree` gives a mask, in which a query sees of
 * the last keys, those of the queries, its own and its ancestors' alone. `:nan-PART` puts a NaN,
 * `:inf-PART` an infinity,
 * `:big-PART` 1e30 into each request's first key (-l: its last) or query, in one head of q, k or v,
 * or in all of Q, K or V; `:low-Q` does as `:inf-Q` over keys that begin with -1, all scores -inf,
 * which stays so for all builds. `:sub-PART` makes every element of all of Q, K or V subnormal (of
 * int8 the scales). The last column is the largest difference of an output from the first build's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <getopt.h>
#include <kv8/kv8.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    MAX_BUILDS = 16,
    MAX_SAMPLES = 1 << 16,
    MAX_BATCH = 256,
    MAX_HEADS = 4096,
    NUM_CODES = 1 << 16
};

static const char usage[] =
    "usage: in_turn [options] "
    "LIBRARY[:invariant|:tree|:nan-PART|:inf-PART|:low-Q|:big-PART|:sub-PART]...\n"
    "  -s Q/KV/D   query heads, KV heads, head_dim (64/8/64)\n"
    "  -k FORMAT   of the cache: e4m3, int8, bf16, ... (e4m3)\n"
    "  -c LIST     keys of a request (8192)\n"
    "  -b N        requests (1)\n"
    "  -q N        query tokens of a request (1)\n"
    "  -w N        keys before itself that a query sees (-1: all)\n"
    "  -t N        threads (2)\n"
    "  -p MIB      pool of pages that runs rotate through (512); 0: always the same pages\n"
    "  -l          nan and inf in each request's last key, not its first\n"
    "  -a          K's pages apart from V's, every page at random; else 64 tokens lie together\n"
    "  -x SECONDS  for each build and context (1)\n";

#define CALL(f) __typeof__(&f) f
typedef struct build {
    const char *name;
    bool invariant, tree;
    float sick; /* NaN, infinity, .. in q, k, v, Q, K or V; part 0 = none */
    bool everywhere, low;
    char part;
    CALL(kv8_attention_plan_create);
    CALL(kv8_attention_plan_destroy);
    CALL(kv8_attention_workspace_size);
    CALL(kv8_attention_prepare);
    CALL(kv8_attention_run);
    CALL(kv8_threads_create);
    CALL(kv8_threads_destroy);
    CALL(kv8_narrow);
    CALL(kv8_status_message);
    CALL(kv8_dtype_from_name);
    CALL(kv8_dtype_size);
    kv8_threads *threads;
    kv8_attention_plan *plan;
    void *workspace;
    double *samples;
    int32_t num;
} build;

typedef struct options {
    int32_t num_qo_heads, num_kv_heads, head_dim, batch, qo_len, window, threads, pool_mib;
    const char *kv, *contexts;
    double seconds;
    bool apart, last;
} options;

static void check(const build *b, kv8_status status) {
    if (status == KV8_OK) return;
    fprintf(stderr, "%s: %s\n", b->name, b->kv8_status_message());
    exit(1);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Zeroed, at a multiple of 2 MB, in huge pages where the system has them. */
static void *take(size_t size) {
    const size_t huge = (size_t)2 << 20;
    char *const p =
        mmap(NULL, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "in_turn: no memory for %zu bytes\n", size);
        exit(1);
    }
    char *const aligned = p + (huge - (uintptr_t)p % huge) % huge;
    madvise(aligned, size, MADV_HUGEPAGE);
    return aligned;
}

static uint32_t draw(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static void *find(void *library, const char *path, const char *name) {
    void *const found = library == NULL ? NULL : dlsym(library, name);
    if (found != NULL) return found;
    fprintf(stderr, "in_turn: %s: %s\n", path, dlerror());
    exit(1);
}

static build open_build(const char *name, int32_t threads) {
    build b = {.name = name};
    char path[4096];
    const size_t length = strcspn(name, ":");
    b.invariant = strcmp(name + length, ":invariant") == 0;
    b.tree = strcmp(name + length, ":tree") == 0;
    static const struct {
        const char *name;
        float value;
    } kinds[] = {{":nan-", NAN},
                 {":inf-", INFINITY},
                 {":low-", INFINITY},
                 {":big-", 1e30f},
                 {":sub-", 0x1p-130f}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strncmp(name + length, kinds[i].name, 5) != 0 || strlen(name + length) != 6) continue;
        b.sick = kinds[i].value;
        b.everywhere = b.sick < 1;
        b.low = strcmp(kinds[i].name, ":low-") == 0;
        if (strchr(b.low ? "Q" : b.everywhere ? "QKV" : "qkvQKV", name[length + 5]) != NULL)
            b.part = name[length + 5];
    }
    if (name[length] != '\0' && !b.invariant && !b.tree && b.part == 0) {
        fprintf(stderr, "in_turn: %s ends with %s: see the usage\n", name, name + length);
        exit(2);
    }
    snprintf(path, sizeof path, "%.*s", (int)length, name);
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
#define FIND(f) *(void **)&b.f = find(library, path, #f)
    FIND(kv8_attention_plan_create);
    FIND(kv8_attention_plan_destroy);
    FIND(kv8_attention_workspace_size);
    FIND(kv8_attention_prepare);
    FIND(kv8_attention_run);
    FIND(kv8_threads_create);
    FIND(kv8_threads_destroy);
    FIND(kv8_narrow);
    FIND(kv8_status_message);
    FIND(kv8_dtype_from_name);
    FIND(kv8_dtype_size);
#undef FIND
    check(&b, b.kv8_threads_create(&b.threads, threads));
    b.samples = malloc(MAX_SAMPLES * sizeof *b.samples);
    return b;
}

/* Pages of 16 tokens, each token's heads beside each other, filled with codes of normal numbers. A
 * plane, K or V of a page, ends with the row scales of int8, as those of kv8_cache do. */
typedef struct pool {
    uint8_t *memory;
    int64_t code_bytes, plane_bytes, num_pages;
    int32_t *order;
    kv8_dtype dtype;
} pool;
enum { PAGE = 16, TOGETHER = 4 /* pages of 64 tokens */ };

static pool make_pool(const build *b, const options *o) {
    pool p = {0};
    check(b, b->kv8_dtype_from_name(o->kv, &p.dtype));
    const size_t size = b->kv8_dtype_size(p.dtype);
    static float values[NUM_CODES];
    static uint8_t codes[NUM_CODES * 4 + 64];
    for (int i = 0; i < NUM_CODES; i++) {
        float sum = -6;
        for (int j = 0; j < 12; j++) sum += (float)(draw() >> 8) * 0x1p-24f;
        values[i] = sum;
        if (p.dtype == KV8_INT8) codes[i] = (uint8_t)(int8_t)fmaxf(-127, fminf(127, sum * 30));
    }
    if (p.dtype != KV8_INT8)
        check(b, b->kv8_narrow(KV8_ISA_SCALAR, p.dtype, values, NUM_CODES, 1, codes, NULL));
    const int64_t num_scales = p.dtype == KV8_INT8 ? (int64_t)PAGE * o->num_kv_heads : 0;
    p.code_bytes = (int64_t)PAGE * o->num_kv_heads * o->head_dim * (int64_t)size;
    p.plane_bytes = (p.code_bytes + 2 * num_scales + 63) / 64 * 64;
    p.num_pages = (int64_t)(o->pool_mib > 0 ? o->pool_mib : 64) * (1 << 20) / (2 * p.plane_bytes);
    p.memory = take((size_t)(2 * p.num_pages * p.plane_bytes));
    for (int64_t i = 0; i < 2 * p.num_pages * p.plane_bytes; i += 64)
        memcpy(p.memory + i, codes + draw() % (NUM_CODES / 64) * 64, 64);
    for (int64_t plane = 0; plane < 2 * p.num_pages; plane++) {
        kv8_f16 *const scales = (void *)(p.memory + plane * p.plane_bytes + p.code_bytes);
        for (int64_t i = 0; i < num_scales; i++) scales[i].bits = 0x2800; /* 1/32 */
    }
    p.order = malloc((size_t)p.num_pages * sizeof *p.order);
    const int64_t step = o->apart ? 1 : TOGETHER;
    for (int64_t i = 0; i < p.num_pages; i++) p.order[i] = (int32_t)i;
    for (int64_t i = p.num_pages / step - 1; i > 0; i--) {
        const int64_t j = draw() % (i + 1);
        for (int64_t x = 0; x < step; x++) {
            const int32_t page = p.order[i * step + x];
            p.order[i * step + x] = p.order[j * step + x];
            p.order[j * step + x] = page;
        }
    }
    return p;
}

/* Args and what they point to. */
typedef struct inputs {
    kv8_attention_args args;
    kv8_paged k, v;
    kv8_page_table pages;
    float sink[MAX_HEADS];
    uint8_t *tree; /* bits of a mask, those of a request from tree_indptr on */
    int64_t tree_indptr[MAX_BATCH + 1];
} inputs;

/* A query's node has the nodes 2n + 1 and 2n + 2 below it. */
static void make_tree(inputs *in, const options *o, int32_t context) {
    const int64_t bytes = ((int64_t)o->qo_len * context + 7) / 8;
    in->tree = malloc((size_t)(bytes * o->batch));
    memset(in->tree, 0xff, (size_t)(bytes * o->batch));
    for (int32_t i = 0; i <= o->batch; i++) in->tree_indptr[i] = i * bytes;
    for (int64_t at = 0; at < (int64_t)o->batch * o->qo_len; at++) {
        const int32_t query = (int32_t)(at % o->qo_len);
        uint8_t *const bits = in->tree + at / o->qo_len * bytes;
        for (int32_t node = query, ancestor = query; node >= 0; node--) {
            const int64_t bit = (int64_t)query * context + context - o->qo_len + node;
            if (node == ancestor)
                ancestor = (ancestor - 1) / 2;
            else
                bits[bit / 8] &= (uint8_t) ~(1u << (bit % 8));
        }
    }
}

static void make_inputs(inputs *in, const options *o, const pool *p, int32_t context) {
    static int32_t qo_indptr[MAX_BATCH + 1], page_indptr[MAX_BATCH + 1], last_page_len[MAX_BATCH];
    const int32_t pages = (context + PAGE - 1) / PAGE;
    for (int32_t i = 0; i <= o->batch; i++) {
        qo_indptr[i] = i * o->qo_len;
        page_indptr[i] = i * pages;
        if (i < o->batch) last_page_len[i] = (context - 1) % PAGE + 1;
    }
    const size_t num =
        (size_t)o->batch * (size_t)o->qo_len * (size_t)o->num_qo_heads * (size_t)o->head_dim;
    kv8_bf16 *const q = malloc(num * sizeof *q);
    for (size_t i = 0; i < num; i++)
        q[i].bits = (uint16_t)(draw() % 2 << 15 | (0x3f00 + draw() % 256));
    kv8_attention_args *const a = &in->args;
    *a = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    a->batch = o->batch;
    a->qo_indptr = qo_indptr;
    a->q = q;
    a->q_stride_head = a->o_stride_head = o->head_dim;
    a->q_stride_row = a->o_stride_row = (int64_t)o->num_qo_heads * o->head_dim;
    a->o = malloc(num * sizeof(kv8_bf16));
    for (int32_t h = 0; h < o->num_qo_heads; h++) in->sink[h] = 0.5f;
    a->sink_logit = in->sink;
    a->k = &in->k;
    a->v = &in->v;
    a->pages = &in->pages;
    const int64_t row = (int64_t)o->num_kv_heads * o->head_dim;
    const int64_t size = p->code_bytes / (PAGE * row), step = p->plane_bytes * (o->apart ? 1 : 2);
    const int64_t v_at = p->plane_bytes * (o->apart ? p->num_pages : 1);
    in->k = (kv8_paged)KV8_PAGED_INIT;
    in->k.data = p->memory;
    in->k.stride_page = step / size;
    in->k.stride_slot = row;
    in->k.stride_head = o->head_dim;
    if (p->dtype == KV8_INT8) {
        in->k.row_scale = (const void *)(p->memory + p->code_bytes);
        in->k.row_scale_stride_page = step / (int64_t)sizeof(kv8_f16);
        in->k.row_scale_stride_slot = o->num_kv_heads;
        in->k.row_scale_stride_head = 1;
    }
    in->v = in->k;
    in->v.data = p->memory + v_at;
    if (p->dtype == KV8_INT8) in->v.row_scale = in->k.row_scale + v_at / (int64_t)sizeof(kv8_f16);
    in->pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    in->pages.page_indptr = page_indptr;
    in->pages.last_page_len = last_page_len;
    make_tree(in, o, context);
}

/* A code of a cache, or of Q: the largest where the format has no infinity. */
static void put(const build *b, void *at, kv8_dtype dtype, float value) {
    if (dtype == KV8_BF16 && isinf(value)) /* which kv8_narrow saturates */
        *(kv8_bf16 *)at = (kv8_bf16){0x7f80};
    else
        check(b, b->kv8_narrow(KV8_ISA_SCALAR, dtype, &value, 1, 1, at, NULL));
}

/* n elements at `at`. */
static void fill(const build *b, void *at, kv8_dtype dtype, int64_t n, float value) {
    const size_t size = b->kv8_dtype_size(dtype);
    put(b, at, dtype, value);
    for (int64_t i = 1; i < n; i++) memcpy((uint8_t *)at + i * (int64_t)size, at, size);
}

/* What `:sub-PART` says. */
static void spoil_all(const build *b, const options *o, const inputs *in, const pool *p,
                      bool well) {
    const kv8_attention_args *const a = &in->args;
    const float tiny = p->dtype == KV8_E4M3 ? 0x1p-9f : b->sick, value = well ? 0.5f : tiny;
    if (b->part == 'Q') {
        const int64_t rows = (int64_t)o->batch * o->qo_len;
        fill(b, (void *)(uintptr_t)a->q, KV8_BF16, rows * a->q_stride_row, well ? 0.5f : b->sick);
        return;
    }
    const kv8_paged *const part = b->part == 'K' ? &in->k : &in->v;
    const int64_t size = (int64_t)b->kv8_dtype_size(p->dtype);
    for (int64_t page = 0; page < p->num_pages; page++) {
        uint8_t *const data = (uint8_t *)(uintptr_t)part->data;
        if (p->dtype != KV8_INT8) {
            fill(b, data + page * part->stride_page * size, p->dtype, p->code_bytes / size, value);
            continue;
        }
        kv8_f16 *const scale = (kv8_f16 *)(uintptr_t)part->row_scale;
        for (int64_t i = 0; i < (int64_t)PAGE * o->num_kv_heads; i++)
            scale[page * part->row_scale_stride_page + i].bits = well ? 0x2800 : 1;
    }
}

/* Every key of the pool begins with -1. */
static void lower(const build *b, const inputs *in, const pool *p) {
    const int64_t size = (int64_t)b->kv8_dtype_size(p->dtype),
                  page_bytes = in->k.stride_page * size;
    for (int64_t page = 0; page < p->num_pages; page++) {
        uint8_t *const data = (uint8_t *)(uintptr_t)in->k.data + page * page_bytes;
        for (int64_t at = 0; at < p->code_bytes; at += in->k.stride_head * size) {
            if (p->dtype == KV8_INT8)
                data[at] = (uint8_t)-1;
            else
                put(b, data + at, p->dtype, -1.0f);
        }
    }
}

/* What `:nan-PART` or its like says, for all requests of the runs whose tables begin at every
 * `pages` of the pool's order; well: numbers there. */
static void spoil(const build *b, const options *o, const inputs *in, const pool *p,
                  int32_t context, bool well) {
    const kv8_attention_args *const a = &in->args;
    const bool all = b->part == 'Q' || b->part == 'K' || b->part == 'V';
    const float value = well ? 0.5f : b->sick;
    if (b->everywhere) {
        spoil_all(b, o, in, p, well);
        return;
    }
    if (b->part == 'q' || b->part == 'Q') {
        for (int32_t i = 0; i < o->batch; i++) {
            kv8_bf16 *const row = (kv8_bf16 *)(uintptr_t)a->q + i * o->qo_len * a->q_stride_row;
            for (int32_t head = 0; head < (all ? o->num_qo_heads : 1); head++)
                put(b, row + head * a->q_stride_head, KV8_BF16, value);
        }
        return;
    }
    const kv8_paged *const part = b->part == 'k' || b->part == 'K' ? &in->k : &in->v;
    const int64_t pages = (context + PAGE - 1) / PAGE, key = o->last ? context - 1 : 0;
    for (int64_t i = 0; b->part != 0 && i + pages <= p->num_pages; i += pages) {
        const int64_t page = p->order[i + key / PAGE], slot = key % PAGE;
        for (int32_t head = 0; head < (all ? o->num_kv_heads : 1); head++) {
            uint8_t *const data = (uint8_t *)(uintptr_t)part->data;
            const int64_t at =
                page * part->stride_page + slot * part->stride_slot + head * part->stride_head;
            if (p->dtype != KV8_INT8) {
                put(b, data + at * (int64_t)b->kv8_dtype_size(p->dtype), p->dtype, value);
                continue;
            }
            kv8_f16 *const scale = (kv8_f16 *)(uintptr_t)part->row_scale;
            scale[page * part->row_scale_stride_page + slot * part->row_scale_stride_slot + head]
                .bits = well           ? 0x2800
                        : isnan(value) ? 0x7e00
                        : isinf(value) ? 0x7c00
                                       : 0x7bff;
        }
    }
}

static void open_plan(build *b, const options *o, const pool *p, int32_t context) {
    kv8_attention_spec s = KV8_ATTENTION_SPEC_INIT;
    s.num_qo_heads = o->num_qo_heads;
    s.num_kv_heads = o->num_kv_heads;
    s.head_dim = o->head_dim;
    s.q_dtype = KV8_BF16;
    s.k_dtype = s.v_dtype = p->dtype;
    s.page_size = PAGE;
    s.window_left = o->window;
    s.causal = 1;
    s.batch_invariant = b->invariant;
    s.has_mask = b->tree;
    s.max_batch = o->batch;
    s.max_total_q = o->batch * o->qo_len;
    s.max_kv_len = context;
    check(b, b->kv8_attention_plan_create(&b->plan, &s, b->threads, NULL));
    b->workspace = take(b->kv8_attention_workspace_size(b->plan));
    b->num = 0;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static float widened(kv8_bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The largest difference of the output from the first build's. */
static float difference(const kv8_attention_args *a, size_t num, bool first) {
    static kv8_bf16 *kept;
    const kv8_bf16 *const o = a->o;
    if (first) {
        kept = realloc(kept, num * sizeof *kept);
        memcpy(kept, o, num * sizeof *kept);
    }
    float most = 0;
    for (size_t i = 0; i < num; i++) {
        const float d = fabsf(widened(o[i]) - widened(kept[i]));
        if (!(d <= most)) most = d;
    }
    return most;
}

static void run_once(const build *b, inputs *in) {
    kv8_attention_args *const a = &in->args;
    a->mask_bits = b->tree ? in->tree : NULL;
    a->mask_indptr = b->tree ? in->tree_indptr : NULL;
    check(b, b->kv8_attention_prepare(b->plan, a, b->workspace));
    check(b, b->kv8_attention_run(b->plan, a, b->workspace));
}

static void time_context(build *builds, int num_builds, const options *o, const pool *p,
                         int32_t context) {
    const int64_t pages = (int64_t)(context + PAGE - 1) / PAGE * o->batch;
    const int64_t sets = o->pool_mib > 0 ? p->num_pages / pages : 1;
    if (context < o->qo_len || pages > p->num_pages) {
        fprintf(stderr, "in_turn: context %d x %d requests is no fit for the queries or the pool\n",
                context, o->batch);
        exit(1);
    }
    static inputs in;
    make_inputs(&in, o, p, context);
    kv8_attention_args *const a = &in.args;
    for (int i = 0; i < num_builds; i++) {
        open_plan(&builds[i], o, p, context);
        if (builds[i].low) lower(&builds[i], &in, p);
    }
    /* The first run of a turn wakes the build's threads and is not counted. */
    const int turn = (int64_t)context * o->batch * o->qo_len < 32768 ? 12 : 4;
    const double end = now_us() + o->seconds * 1e6 * num_builds;
    int64_t at = 0;
    for (int round = 0; now_us() < end && builds[0].num + turn < MAX_SAMPLES; round++) {
        for (int n = 0; n < num_builds; n++) {
            build *const b = &builds[(n + round) % num_builds];
            spoil(b, o, &in, p, context, false);
            for (int k = 0; k < turn; k++) {
                in.pages.page_indices = p->order + at++ % sets * pages;
                const double begin = now_us();
                run_once(b, &in);
                if (k > 0) b->samples[b->num++] = now_us() - begin;
            }
            spoil(b, o, &in, p, context, true);
        }
    }
    in.pages.page_indices = p->order;
    for (int i = 0; i < num_builds; i++) {
        build *const b = &builds[i];
        spoil(b, o, &in, p, context, false);
        run_once(b, &in);
        spoil(b, o, &in, p, context, true);
        const size_t num = (size_t)(a->qo_indptr[o->batch] * a->o_stride_row);
        const float d = difference(a, num, i == 0);
        qsort(b->samples, (size_t)b->num, sizeof *b->samples, ascending);
        printf("%-10d %8d %10.1f %10.1f %10.1f %9.1e  %s\n", context, b->num, b->samples[0],
               b->samples[b->num / 4], b->samples[b->num / 2], (double)d, b->name);
        b->kv8_attention_plan_destroy(b->plan);
    }
    fflush(stdout);
    free((void *)(uintptr_t)a->q);
    free(a->o);
    free(in.tree);
}

int main(int argc, char **argv) {
    options o = {.num_qo_heads = 64,
                 .num_kv_heads = 8,
                 .head_dim = 64,
                 .batch = 1,
                 .qo_len = 1,
                 .window = -1,
                 .threads = 2,
                 .pool_mib = 512,
                 .kv = "e4m3",
                 .contexts = "8192",
                 .seconds = 1};
    for (int option; (option = getopt(argc, argv, "s:k:c:b:q:w:t:p:alx:")) != -1;) {
        switch (option) {
            case 's':
                if (sscanf(optarg, "%d/%d/%d", &o.num_qo_heads, &o.num_kv_heads, &o.head_dim) == 3)
                    break;
                fputs(usage, stderr);
                return 2;
            case 'k': o.kv = optarg; break;
            case 'c': o.contexts = optarg; break;
            case 'b': o.batch = atoi(optarg); break;
            case 'q': o.qo_len = atoi(optarg); break;
            case 'w': o.window = atoi(optarg); break;
            case 't': o.threads = atoi(optarg); break;
            case 'p': o.pool_mib = atoi(optarg); break;
            case 'a': o.apart = true; break;
            case 'l': o.last = true; break;
            case 'x': o.seconds = atof(optarg); break;
            default: fputs(usage, stderr); return 2;
        }
    }
    const int num_builds = argc - optind;
    if (num_builds < 1 || num_builds > MAX_BUILDS || o.batch < 1 || o.batch > MAX_BATCH ||
        o.qo_len < 1 || o.num_qo_heads < 1 || o.num_qo_heads > MAX_HEADS || o.num_kv_heads < 1 ||
        o.head_dim < 1 || o.pool_mib < 0) {
        fputs(usage, stderr);
        return 2;
    }
    static build builds[MAX_BUILDS];
    for (int i = 0; i < num_builds; i++) builds[i] = open_build(argv[optind + i], o.threads);
    const pool p = make_pool(&builds[0], &o);
    printf("%-10s %8s %10s %10s %10s %9s  build (us)\n", "context", "runs", "least", "quartile",
           "median", "differs");
    for (const char *c = o.contexts; *c != '\0'; c += strcspn(c, ","), c += *c == ',')
        time_context(builds, num_builds, &o, &p, atoi(c));
    for (int i = 0; i < num_builds; i++) builds[i].kv8_threads_destroy(builds[i].threads);
    return 0;
}
