/* random_cache.c - a one-layer cache filled with random rows, for timing attention over it: sets of
 * sequences whose pages lie scattered over the pool, several times larger than the caches.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

void bench_cache_close(bench_cache *b) {
    kv8_cache_destroy(b->cache);
    free(b->seqs);
    *b = (bench_cache){0};
}

/* Sequences first, first + step, ... grow from `begin` to `end` tokens, in turn, so that the pages
 * of each lie scattered over the pool. */
static kv8_status grow(bench_cache *b, const bench_args *args, int32_t step, int32_t begin,
                       int32_t end) {
    enum { TOKENS = 64 };
    const size_t row = (size_t)args->num_kv_heads * (size_t)args->head_dim;
    float *const values = bench_random_values(2 * TOKENS * row);
    if (values == NULL) return KV8_ERR_NO_MEMORY;
    kv8_status status = KV8_OK;
    for (int32_t done = begin; status == KV8_OK && done < end; done += TOKENS) {
        const int32_t n = end - done < TOKENS ? end - done : TOKENS;
        const int32_t indptr[2] = {0, n};
        for (int32_t i = 0; status == KV8_OK && i < b->num_seqs && cli_interrupted() == 0;
             i += step) {
            const kv8_append append = {
                .struct_size = sizeof append,
                .num_seqs = 1,
                .seqs = &b->seqs[i],
                .indptr = indptr,
                .src_dtype = KV8_F32,
                .k = values,
                .k_stride_row = (int64_t)row,
                .k_stride_head = args->head_dim,
                .v = values + (size_t)TOKENS * row,
                .v_stride_row = (int64_t)row,
                .v_stride_head = args->head_dim,
            };
            status = kv8_cache_extend(b->cache, b->seqs[i], n, NULL);
            if (status == KV8_OK) status = kv8_cache_append(b->cache, 0, &append);
        }
    }
    free(values);
    return status;
}

/* The first sequence of every set, its forks, then everybody's own tokens. */
static kv8_status fill(bench_cache *b, const bench_args *args, const bench_row *row) {
    kv8_status status = KV8_OK;
    for (int32_t i = 0; status == KV8_OK && i < b->num_seqs; i += row->batch)
        status = kv8_cache_seq_create(b->cache, &b->seqs[i]);
    if (status == KV8_OK) status = grow(b, args, row->batch, 0, row->shared_prefix);
    for (int32_t i = 0; status == KV8_OK && i < b->num_seqs; i++) {
        if (i % row->batch == 0) continue;
        status = kv8_cache_seq_fork(b->cache, b->seqs[i / row->batch * row->batch], &b->seqs[i]);
    }
    return status == KV8_OK ? grow(b, args, 1, row->shared_prefix, row->context) : status;
}

/* Enough sets that one returns only after --pool MiB of others. */
kv8_status bench_cache_open(bench_cache *b, const bench_args *args, const bench_row *row,
                            kv8_threads *threads) {
    const int32_t shared = bench_shared_tokens(row->shared_prefix, row->context, args->page_size);
    const double set_tokens = shared + (double)row->batch * (row->context - shared);
    const double set_bytes = bench_slot_bytes(args, &row->kv) * set_tokens;
    const int32_t num_sets = 1 + (int32_t)(args->pool_mib * 1048576.0 / set_bytes);
    const int32_t own_pages = (row->context - shared + args->page_size - 1) / args->page_size;
    const int32_t stem_pages = (row->shared_prefix + args->page_size - 1) / args->page_size;
    const kv8_cache_layer layer = {
        .struct_size = sizeof layer, .k_dtype = row->kv.k, .v_dtype = row->kv.v, .window_left = -1};
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    options.threads = threads;
    options.num_layers = 1;
    options.num_kv_heads = args->num_kv_heads;
    options.k_head_dim = args->head_dim;
    options.page_size = args->page_size;
    options.layout = args->hnd ? KV8_LAYOUT_HND : KV8_LAYOUT_NHD;
    options.max_seqs = num_sets * row->batch;
    options.max_seq_len = row->context;
    options.num_pages = num_sets * (stem_pages + row->batch * own_pages);
    options.layers = &layer;
    *b = (bench_cache){.num_seqs = options.max_seqs};
    kv8_status status = kv8_cache_create(&b->cache, &options);
    if (status != KV8_OK) return status;
    b->seqs = malloc((size_t)b->num_seqs * sizeof *b->seqs);
    return b->seqs == NULL ? KV8_ERR_NO_MEMORY : fill(b, args, row);
}
