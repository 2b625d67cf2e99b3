/* kv8/cache.h - the paged KV cache: pages, sequences, quantising append, sharing, snapshots.
 *
 * A cache stores, for every layer, K and V rows of num_kv_heads heads in pages of page_size tokens.
 * Layers with the same window_left form a *group*: they share one pool of page ids and one page
 * table per sequence; each layer of the group stores its own bytes for every page id. A sequence
 * is a list of tokens with a page table per group. Pages are reference counted: fork shares them,
 * a write to a shared tail page copies it first.
 *
 *   stored value = code * scale            (k_scale, v_scale: per layer, head, or sequence+head)
 *   int8 value   = code * row_scale * scale   row_scale: f16 per (token, kv head), in the page
 *
 * One step of a model: kv8_cache_extend (takes pages), kv8_cache_append for each layer (writes the
 * rows), attention over kv8_cache_layer_kv and kv8_cache_page_table, kv8_cache_publish (lets other
 * requests find the full pages). Only create takes memory from the allocator. Not thread safe: one
 * thread at a time per cache (append may use a pool of threads).
 *
 * Pages lie in host memory or in a GPU's; every call is the same for both. Of a cache on a GPU
 * append takes rows in device memory, kv8_cache_layer_kv gives device addresses, and
 * kv8_cache_page_table_device puts tables where attention there can read them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CACHE_H
#define KV8_CACHE_H

#include <kv8/device.h>
#include <kv8/formats.h>
#include <kv8/pages.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_cache kv8_cache;

typedef enum kv8_layout {
    KV8_LAYOUT_NHD = 0, /* [page, slot, kv_head, head_dim] */
    KV8_LAYOUT_HND      /* [page, kv_head, slot, head_dim] */
} kv8_layout;

typedef struct kv8_cache_layer {
    size_t struct_size;
    kv8_dtype k_dtype, v_dtype;
    int32_t window_left;  /* -1 = every key stays; w = a query sees itself and w keys before it */
    const float *k_scale; /* [num_kv_heads], finite and > 0; NULL = 1. Copied. */
    const float *v_scale;
} kv8_cache_layer;
#ifdef __cplusplus
static inline kv8_cache_layer kv8_cache_layer_init() {
    kv8_cache_layer layer = KV8_SIZED(kv8_cache_layer);
    layer.window_left = -1;
    return layer;
}
#define KV8_CACHE_LAYER_INIT kv8_cache_layer_init()
#else
#define KV8_CACHE_LAYER_INIT \
    { .struct_size = sizeof(kv8_cache_layer), .window_left = -1 }
#endif

typedef struct kv8_cache_options {
    size_t struct_size;
    const kv8_allocator *allocator; /* NULL = system heap; must outlive the cache */
    kv8_threads *threads;           /* for append; NULL = the calling thread. Borrowed. */
    kv8_isa isa;
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t k_head_dim; /* 1..576 */
    int32_t v_head_dim; /* 0 = k_head_dim */
    int32_t page_size;  /* tokens per page, >= 1 */
    kv8_layout layout;
    int32_t num_pages;             /* of each group without a window, >= 1 */
    int32_t num_window_pages;      /* of each group with one; 0 = num_pages */
    int32_t max_seqs;              /* sequences alive at once, >= 1 */
    int32_t max_seq_len;           /* tokens of one sequence, >= 1 */
    int32_t window_slack;          /* tokens kept behind the window so that truncate can go back */
    const kv8_cache_layer *layers; /* [num_layers]. Copied. */
    /* Where the pages lie: NULL = host memory. Else the GPU's, and all that the cache does to them
     * is work on `stream`, which must then not be NULL; attention on another stream has to wait for
     * it. No call of the cache may be made while the stream is captured. Both borrowed. */
    kv8_device *device;
    kv8_stream *stream;
    /* Where pages in host memory come from, a block for each layer: a mapped file, the memory of
     * one socket, huge pages. NULL = `allocator`. Must outlive the cache. */
    const kv8_allocator *page_allocator;
} kv8_cache_options;
#define KV8_CACHE_OPTIONS_INIT KV8_SIZED(kv8_cache_options)

/* Validates every option, then allocates everything the cache will ever use for pages. *out is
 * NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_create(kv8_cache **out,
                                                  const kv8_cache_options *options);
KV8_API void kv8_cache_destroy(kv8_cache *cache);

/* --- sequences --- */

/* An empty sequence. KV8_ERR_FULL at max_seqs. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_seq_create(kv8_cache *cache, kv8_seq *seq_out);
/* A second sequence with the same tokens: all pages are shared, none copied until written. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_seq_fork(kv8_cache *cache, kv8_seq parent,
                                                    kv8_seq *seq_out);
/* Gives the pages back. Published pages stay findable until their room is needed. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_seq_destroy(kv8_cache *cache, kv8_seq seq);
KV8_API KV8_NODISCARD kv8_status kv8_cache_seq_length(const kv8_cache *cache, kv8_seq seq,
                                                      int32_t *length_out);
/* Own scales for one sequence and layer, instead of the layer's: arrays of num_kv_heads, NULL =
 * leave. Only while the sequence is empty; forks inherit them. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_seq_set_scales(kv8_cache *cache, kv8_seq seq,
                                                          int32_t layer, const float *k_scale,
                                                          const float *v_scale);

/* Makes room for num_tokens more tokens in every group: frees pages that no later query can see
 * (window groups), copies a shared tail page, takes new pages. token_ids (may be NULL) are kept
 * for the prefix index and snapshots; a sequence extended once without ids is never published.
 * KV8_ERR_FULL (pool) or KV8_ERR_INVALID (max_seq_len): nothing is changed. When a GPU refuses the
 * copy, no token is added. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_extend(kv8_cache *cache, kv8_seq seq, int32_t num_tokens,
                                                  const int32_t *token_ids);
/* Drops tokens from the end. Going back past what a window group still holds (more than
 * window_slack tokens) is KV8_ERR_INVALID. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_truncate(kv8_cache *cache, kv8_seq seq, int32_t length);

/* --- writing --- */

/* Rows for the newest tokens of several sequences: request i owns rows indptr[i]..indptr[i+1]-1
 * (indptr[0] = 0), which go to the last (indptr[i+1]-indptr[i]) positions of seqs[i]; no sequence
 * is there twice. k: [rows, num_kv_heads, k_head_dim] of src_dtype (F32, BF16 or F16), strides in
 * elements, last dimension contiguous; v likewise. K arrives rotated, or is rotated on the way by
 * cos_sin as kv8_rope_apply does it. Quantises: code = sat_rne(x / scale), or int8 as
 * kv8_narrow_int8(x / scale); counts clips and NaN per (layer, head). Positions in pages that a
 * fork shares or that are published are KV8_ERR_INVALID: extend, append, and only then fork or
 * publish. Of a cache on a GPU k, v and cos_sin lie in device memory, and are read when the stream
 * comes to it. */
typedef struct kv8_append {
    size_t struct_size;
    int32_t num_seqs;
    int32_t interleaved; /* cos_sin rotates pairs (2i, 2i + 1), not (i, i + k_head_dim / 2) */
    const kv8_seq *seqs;
    const int32_t *indptr;
    kv8_dtype src_dtype;
    const void *k;
    int64_t k_stride_row, k_stride_head;
    const void *v;
    int64_t v_stride_row, v_stride_head;
    const float *cos_sin; /* [rows, k_head_dim] by kv8_rope_angles; NULL = K comes rotated */
} kv8_append;
#define KV8_APPEND_INIT KV8_SIZED(kv8_append)
KV8_API KV8_NODISCARD kv8_status kv8_cache_append(kv8_cache *cache, int32_t layer,
                                                  const kv8_append *append);

typedef struct kv8_cache_counters {
    uint64_t k_clips, k_nans, v_clips, v_nans; /* elements since create or reset */
} kv8_cache_counters;
KV8_API KV8_NODISCARD kv8_status kv8_cache_get_counters(const kv8_cache *cache, int32_t layer,
                                                        int32_t kv_head,
                                                        kv8_cache_counters *counters_out);
KV8_API KV8_NODISCARD kv8_status kv8_cache_reset_counters(kv8_cache *cache);

/* --- reading --- */

/* One tensor (K or V of a layer) of a paged pool. Element (page, slot, kv_head, d) is at
 * data[page*stride_page + slot*stride_slot + kv_head*stride_head + d] elements. row_scale is NULL
 * unless the dtype is INT8; its strides count f16 elements. Attention reads through it; an append
 * writes through `data` and `row_scale`, so what they point to must then be writable. */
typedef struct kv8_paged {
    size_t struct_size;
    const void *data;
    int64_t stride_page, stride_slot, stride_head;
    const kv8_f16 *row_scale;
    int64_t row_scale_stride_page, row_scale_stride_slot, row_scale_stride_head;
    int64_t num_pages; /* page ids are below it; 0 = not known, and nothing is checked */
} kv8_paged;
#define KV8_PAGED_INIT KV8_SIZED(kv8_paged)

/* Where the keys of a batch lie, host memory. CSR: request b owns page_indices[page_indptr[b]
 * ..page_indptr[b+1]-1] and kv_len = (pages-1)*page_size + last_page_len[b] (0 when it has no
 * pages). Dense: block_table[b*block_table_stride + i] and seq_lens[b]. Ragged, without pages: key
 * j of request b is slot kv_indptr[b] + j, and kv_len is seq_lens[b], or without seq_lens
 * kv_indptr[b+1] - kv_indptr[b]. Exactly one of page_indptr, block_table and kv_indptr is set. */
typedef struct kv8_page_table {
    size_t struct_size;
    const int32_t *page_indptr, *page_indices, *last_page_len;
    const int32_t *block_table;
    int64_t block_table_stride;
    const int32_t *seq_lens;
    const int32_t *kv_indptr; /* [batch+1] */
} kv8_page_table;
#define KV8_PAGE_TABLE_INIT KV8_SIZED(kv8_page_table)

/* Borrowed views, valid until destroy. *k_out and *v_out begin as KV8_PAGED_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_layer_kv(const kv8_cache *cache, int32_t layer,
                                                    kv8_paged *k_out, kv8_paged *v_out);

/* Writes the layer's page tables of num_seqs sequences: indptr_out[num_seqs+1],
 * last_page_len_out[num_seqs], indices_out[capacity]. Layers of one group give the same tables.
 * Entries behind the window are KV8_NO_PAGE. KV8_ERR_FULL names the capacity that is needed. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_page_table(const kv8_cache *cache, int32_t layer,
                                                      const kv8_seq *seqs, int32_t num_seqs,
                                                      int32_t *indptr_out, int32_t *indices_out,
                                                      int64_t capacity, int32_t *last_page_len_out);
/* The same in dense form: block_table_out[num_seqs, stride] (unused entries KV8_NO_PAGE) and
 * seq_lens_out[num_seqs]. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_block_table(const kv8_cache *cache, int32_t layer,
                                                       const kv8_seq *seqs, int32_t num_seqs,
                                                       int32_t *block_table_out, int64_t stride,
                                                       int32_t *seq_lens_out);
/* Scales of each sequence: k_scale_out, v_scale_out [num_seqs, num_kv_heads]. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_scales(const kv8_cache *cache, int32_t layer,
                                                  const kv8_seq *seqs, int32_t num_seqs,
                                                  float *k_scale_out, float *v_scale_out);
/* Layers a and b share page tables. */
KV8_API int kv8_cache_same_group(const kv8_cache *cache, int32_t layer_a, int32_t layer_b);

/* Reads stored values back (code * scale) for tokens [begin, begin+num_tokens): k_out
 * [num_tokens, num_kv_heads, k_head_dim], v_out likewise; either may be NULL. Tokens behind the
 * window are KV8_ERR_NOT_FOUND. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_read(const kv8_cache *cache, int32_t layer, kv8_seq seq,
                                                int32_t begin, int32_t num_tokens, float *k_out,
                                                float *v_out);

/* --- reading on a GPU --- */

/* The tables of kv8_cache_page_table in device memory, for a cache on a GPU: CSR, at addresses that
 * are the same for every call of one group, so that a recorded graph finds the latest; at most
 * max_seqs sequences, and from there to max_seqs requests without a page, so that a graph may be of
 * more. Filled on the cache's stream. *pages_out begins as KV8_PAGE_TABLE_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_page_table_device(kv8_cache *cache, int32_t layer,
                                                             const kv8_seq *seqs, int32_t num_seqs,
                                                             kv8_page_table *pages_out);
/* The same of kv8_cache_scales, at addresses of the layer's own. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_scales_device(kv8_cache *cache, int32_t layer,
                                                         const kv8_seq *seqs, int32_t num_seqs,
                                                         const float **k_scale_out,
                                                         const float **v_scale_out);

/* --- sharing prefixes --- */

/* Makes the full pages of a sequence findable by their token ids. Call after every layer has been
 * appended. Does nothing for a sequence without ids or with scales of its own. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_publish(kv8_cache *cache, kv8_seq seq);
/* Creates a sequence holding the longest published prefix of token_ids (whole pages, or all tokens
 * but the last: something is left to compute); *matched_out may be 0. Every token of a match is
 * compared, not only its hash. A window group holds only what the next query sees, so truncate
 * cannot go back behind the match. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_prefix_match(kv8_cache *cache, const int32_t *token_ids,
                                                        int32_t num_tokens, kv8_seq *seq_out,
                                                        int32_t *matched_out);

/* Shows published prefixes: those that no other continues, and those that several do; what was used
 * longest ago comes first. `visit` leaves the cache alone. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_list_prefixes(const kv8_cache *cache,
                                                         kv8_prefix_visitor visit, void *cookie);
/* As kv8_cache_prefix_match of exactly these tokens, with all that window groups still have of them
 * before the end, so that a snapshot serves shorter prefixes too. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_prefix_hold(kv8_cache *cache, const int32_t *token_ids,
                                                       int32_t num_tokens, kv8_seq *seq_out,
                                                       int32_t *held_out);

/* --- accounting --- */

typedef struct kv8_cache_stats {
    size_t struct_size;
    int32_t num_groups;
    int32_t pages_total,
        pages_free; /* over all groups; published but unreferenced pages are free */
    int32_t num_seqs;
    uint64_t bytes;                      /* of page storage */
    uint64_t bytes_per_token;            /* K, V and row scales of one token, all layers */
    uint64_t bytes_per_token_unwindowed; /* of the layers that keep every token */
    int32_t page_size;                   /* tokens */
} kv8_cache_stats;
#define KV8_CACHE_STATS_INIT KV8_SIZED(kv8_cache_stats)
/* *stats_out begins as KV8_CACHE_STATS_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_get_stats(const kv8_cache *cache,
                                                     kv8_cache_stats *stats_out);

/* --- snapshots --- */

/* Writes one sequence (shapes, dtypes, scales, token ids, rows it holds, checksum) to `path`: into
 * a temporary file beside it, synced, then renamed; on failure nothing is left behind. Rows are
 * stored token by token: the cache that loads may have another page size and layout. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_save(const kv8_cache *cache, kv8_seq seq,
                                                const char *path);
/* Restores into a new sequence. Torn, foreign and altered files are KV8_ERR_CORRUPT with the
 * reason; heads, dims, dtypes or windows other than the cache's, or a length beyond max_seq_len,
 * KV8_ERR_INVALID; too few pages or sequences KV8_ERR_FULL. Nothing is then taken. */
KV8_API KV8_NODISCARD kv8_status kv8_cache_load(kv8_cache *cache, const char *path,
                                                kv8_seq *seq_out);

#ifdef __cplusplus
}
#endif
#endif
