/* count_shape.c - one fixed piece of work for scripts/check_instructions, which counts the
 * instructions inside counted_run() with valgrind.
 *
 *   count_shape decode|prefill|matvec|append  computes the shape once
 *   count_shape compiler                      prints the compiler and its major version, as gcc-12
 *
 * Always the avx2 rung, the highest that valgrind knows, and one thread: the count is the same on
 * every machine. Data are random, but the same every time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/kv8.h>
#include <ops_impl.h>
#include <stdlib.h>
#include <string.h>

/* What valgrind looks for by name: never inlined. */
void counted_run(void (*run)(void *cookie), void *cookie);
__attribute__((noinline)) void counted_run(void (*run)(void *cookie), void *cookie) {
    run(cookie);
}

static _Noreturn void fail(void) {
    fprintf(stderr, "count_shape: %s\n", kv8_status_message());
    exit(1);
}
static void must(kv8_status status) {
    if (status != KV8_OK) fail();
}

static void *random_bytes(size_t size) {
    uint8_t *const bytes = malloc(size);
    uint64_t state = size; /* an LCG's upper bits (Knuth, MMIX) */
    for (size_t i = 0; bytes != NULL && i < size; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (uint8_t)(state >> 56);
    }
    return bytes;
}

/* --- attention in gpt-oss' shape: 64 query heads on 8 KV heads of 64, sink, pages of 16 --- */

enum { QO_HEADS = 64, KV_HEADS = 8, DIM = 64, PAGE = 16, MAX_KEYS = 2048, MAX_ROWS = 64 };

typedef struct attention_work {
    kv8_attention_plan *plan;
    kv8_attention_args args;
    void *workspace;
} attention_work;

static void run_attention(void *cookie) {
    attention_work *const work = cookie;
    must(kv8_attention_prepare(work->plan, &work->args, work->workspace));
    must(kv8_attention_run(work->plan, &work->args, work->workspace));
}

static void count_attention(int32_t rows, int32_t keys) {
    static float sink[QO_HEADS];
    static kv8_bf16 q[MAX_ROWS * QO_HEADS * DIM];
    static float o[MAX_ROWS * QO_HEADS * DIM];
    int32_t pages[MAX_KEYS / PAGE];
    uint8_t *const codes = random_bytes((size_t)2 * MAX_KEYS * KV_HEADS * DIM);
    if (codes == NULL) fail();
    for (size_t i = 0; i < (size_t)2 * MAX_KEYS * KV_HEADS * DIM; i++)
        codes[i] &= 0xbf; /* |x| < 2, no NaN */
    for (int32_t i = 0; i < rows * QO_HEADS * DIM; i++)
        q[i] = kv8_bf16_from_f32((float)(i % 251) * 0.01f - 1.25f);
    for (int32_t i = 0; i < keys / PAGE; i++) pages[i] = i * 37 % (keys / PAGE); /* 37: a prime */
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = QO_HEADS;
    spec.num_kv_heads = KV_HEADS;
    spec.head_dim = DIM;
    spec.q_dtype = KV8_BF16;
    spec.o_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    spec.page_size = PAGE;
    spec.window_left = -1;
    spec.causal = 1;
    spec.isa = KV8_ISA_AVX2;
    spec.max_batch = 1;
    spec.max_total_q = rows;
    spec.max_kv_len = keys;
    attention_work work = {.args = KV8_ATTENTION_ARGS_INIT};
    must(kv8_attention_plan_create(&work.plan, &spec, NULL, NULL));
    const size_t size = kv8_attention_workspace_size(work.plan);
    work.workspace = aligned_alloc(64, kv8_round_up(size, 64));
    if (work.workspace == NULL) fail();
    const int32_t qo_indptr[] = {0, rows};
    work.args.batch = 1;
    work.args.qo_indptr = qo_indptr;
    work.args.q = q;
    work.args.o = o;
    work.args.q_stride_head = work.args.o_stride_head = DIM;
    work.args.q_stride_row = work.args.o_stride_row = QO_HEADS * DIM;
    kv8_paged k = KV8_PAGED_INIT;
    k.data = codes;
    k.stride_page = PAGE * KV_HEADS * DIM;
    k.stride_slot = KV_HEADS * DIM;
    k.stride_head = DIM;
    kv8_paged v = k;
    v.data = codes + (size_t)MAX_KEYS * KV_HEADS * DIM;
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.block_table = pages;
    table.block_table_stride = keys / PAGE;
    table.seq_lens = &keys;
    work.args.k = &k;
    work.args.v = &v;
    work.args.pages = &table;
    work.args.sink_logit = sink;
    counted_run(run_attention, &work);
    kv8_attention_plan_destroy(work.plan);
    free(work.workspace);
    free(codes);
}

/* --- one step's rows of a batch, to the pages of a cache in the same shape --- */

enum { SEQS = 32 };

typedef struct append_work {
    kv8_cache *cache;
    kv8_append rows;
} append_work;

static void run_append(void *cookie) {
    const append_work *const work = cookie;
    must(kv8_cache_append(work->cache, 0, &work->rows));
}

static void count_append(void) {
    static kv8_bf16 values[SEQS * KV_HEADS * DIM];
    for (int32_t i = 0; i < SEQS * KV_HEADS * DIM; i++)
        values[i] = kv8_bf16_from_f32((float)(i % 251) * 0.01f - 1.25f);
    kv8_cache_layer layer = KV8_CACHE_LAYER_INIT;
    layer.k_dtype = layer.v_dtype = KV8_E4M3;
    layer.window_left = -1;
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    options.isa = KV8_ISA_AVX2;
    options.num_layers = 1;
    options.num_kv_heads = KV_HEADS;
    options.k_head_dim = DIM;
    options.page_size = PAGE;
    options.num_pages = SEQS * 4;
    options.max_seqs = SEQS;
    options.max_seq_len = 4 * PAGE;
    options.layers = &layer;
    append_work work = {.rows = KV8_APPEND_INIT};
    must(kv8_cache_create(&work.cache, &options));
    kv8_seq seqs[SEQS];
    int32_t indptr[SEQS + 1] = {0};
    for (int32_t i = 0; i < SEQS; i++) {
        must(kv8_cache_seq_create(work.cache, &seqs[i]));
        must(kv8_cache_extend(work.cache, seqs[i], 1 + i, NULL));
        indptr[i + 1] = i + 1;
    }
    work.rows.num_seqs = SEQS;
    work.rows.seqs = seqs;
    work.rows.indptr = indptr;
    work.rows.src_dtype = KV8_BF16;
    work.rows.k = work.rows.v = values;
    work.rows.k_stride_row = work.rows.v_stride_row = KV_HEADS * DIM;
    work.rows.k_stride_head = work.rows.v_stride_head = DIM;
    counted_run(run_append, &work);
    kv8_cache_destroy(work.cache);
}

/* --- a row times an expert's MXFP4 weights --- */

static void run_matmul(void *cookie) {
    kv8_matmul_run(KV8_ISA_AVX2, NULL, cookie, 1);
}

static void count_matvec(void) {
    enum { ROWS = 720, COLS = 2880 };
    static float x[COLS], y[ROWS];
    static uint8_t scales[ROWS * COLS / KV8_MXFP4_BLOCK];
    uint8_t *const blocks = random_bytes((size_t)ROWS * COLS / 2);
    if (blocks == NULL) fail();
    memset(scales, 120, sizeof scales);
    for (int c = 0; c < COLS; c++) x[c] = (float)(c % 17) * 0.125f - 1.0f;
    kv8_matmul_job job = {.w = {KV8_WEIGHT_MXFP4, blocks, scales, ROWS, COLS},
                          .x = x,
                          .x_stride = COLS,
                          .y = y,
                          .y_stride = ROWS,
                          .num_rows = 1};
    counted_run(run_matmul, &job);
    free(blocks);
}

int main(int argc, char **argv) {
    const char *const shape = argc == 2 ? argv[1] : "";
    if (strcmp(shape, "compiler") == 0) {
#if defined(__clang__)
        printf("clang-%d\n", __clang_major__);
#else
        printf("gcc-%d\n", __GNUC__);
#endif
        return 0;
    }
    kv8_isa isa;
    must(kv8_machine_resolve_isa(KV8_ISA_AVX2, &isa));
    if (strcmp(shape, "decode") == 0) {
        count_attention(1, MAX_KEYS);
    } else if (strcmp(shape, "prefill") == 0) {
        count_attention(MAX_ROWS, 512);
    } else if (strcmp(shape, "matvec") == 0) {
        count_matvec();
    } else if (strcmp(shape, "append") == 0) {
        count_append();
    } else {
        fprintf(stderr,
                "count_shape: what is \"%s\", must be decode, prefill, matvec, append or "
                "compiler\n",
                shape);
        return 2;
    }
    return 0;
}
