/* test_cache_sequence.c - sequences and their pages: options, groups, layout, forks and copy on
 * write, windows, truncate, full pools, stale handles, failing allocations, batch tables.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_testing.h"

/* Appends num_tokens rows to the newest positions of every layer; row t holds `tag + t`, small
 * integers that every dtype here keeps exactly. */
static void write_rows(kv8_cache *cache, int32_t num_layers, kv8_seq seq, int32_t num_tokens,
                       float tag) {
    float rows[64 * SMALL_ROW];
    for (int32_t i = 0; i < num_tokens * SMALL_ROW; i++) rows[i] = tag + (float)(i / SMALL_ROW);
    append_small(cache, num_layers, seq, rows, num_tokens);
}
static void extend_write(kv8_cache *cache, int32_t num_layers, kv8_seq seq, int32_t num_tokens,
                         float tag) {
    assert_ok(kv8_cache_extend(cache, seq, num_tokens, NULL));
    write_rows(cache, num_layers, seq, num_tokens, tag);
}
/* Tokens begin.. of a layer read as want[0], want[1], ... */
static void check_rows(const kv8_cache *cache, int32_t layer, kv8_seq seq, int32_t begin, int32_t n,
                       const float *want) {
    float k[64 * SMALL_ROW], v[64 * SMALL_ROW];
    assert_ok(kv8_cache_read(cache, layer, seq, begin, n, k, v));
    for (int32_t i = 0; i < n * SMALL_ROW; i++) {
        assert_true(k[i] == want[i / SMALL_ROW]);
        assert_true(v[i] == want[i / SMALL_ROW]);
    }
}

/* --- create --- */

static void wrong_options_are_refused(void **state) {
    (void)state;
    const float bad_scale[2] = {1.0f, -1.0f}, nan_scale[2] = {NAN, 1.0f};
    kv8_cache_layer layer = {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL};
    const kv8_cache_options good = small_options(&layer, 1);
    kv8_cache *cache = (kv8_cache *)(uintptr_t)1;
    assert_refused(kv8_cache_create(&cache, NULL), KV8_ERR_INVALID, "NULL");
    assert_null(cache);
#define REFUSE(field, value, part)                                                 \
    do {                                                                           \
        kv8_cache_options options = good;                                          \
        options.field = value;                                                     \
        cache = (kv8_cache *)(uintptr_t)1;                                         \
        assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_INVALID, part); \
        assert_null(cache);                                                        \
    } while (0)
    REFUSE(struct_size, 8, "struct_size is 8");
    REFUSE(num_layers, 0, "num_layers is 0");
    REFUSE(num_kv_heads, -1, "num_kv_heads is -1");
    REFUSE(k_head_dim, 577, "k_head_dim is 577");
    REFUSE(v_head_dim, -1, "v_head_dim is -1");
    REFUSE(page_size, 0, "page_size is 0");
    REFUSE(layout, (kv8_layout)2, "layout is 2");
    REFUSE(num_pages, 0, "num_pages is 0");
    REFUSE(num_window_pages, -2, "num_window_pages is -2");
    REFUSE(max_seqs, 0, "max_seqs is 0");
    REFUSE(max_seq_len, 0, "max_seq_len is 0");
    REFUSE(window_slack, -1, "window_slack is -1");
    REFUSE(layers, NULL, "layers is NULL");
    const kv8_cache_layer layers[] = {
        {sizeof(kv8_cache_layer), KV8_DTYPE_NONE, KV8_BF16, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_DTYPE_COUNT, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -2, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, bad_scale, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, nan_scale},
    };
    const char *const parts[] = {"k_dtype", "v_dtype", "window_left of layer 0 is -2",
                                 "k_scale of layer 0, head 1 is -1", "v_scale of layer 0, head 0"};
    for (int i = 0; i < 5; i++) REFUSE(layers, &layers[i], parts[i]);
#undef REFUSE
}

/* Says no to more than a gigabyte, as a machine would. */
static void *modest_alloc(void *cookie, size_t size, size_t alignment) {
    return size > (1u << 30) ? NULL : failing_alloc(cookie, size, alignment);
}
static void sizes_that_overflow_are_refused(void **state) {
    (void)state;
    const kv8_cache_layer layer = {sizeof(kv8_cache_layer), KV8_F32, KV8_F32, -1, NULL, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    kv8_cache *cache = NULL;
    failing_heap heap = {.fail_at = -1};
    const kv8_allocator allocator = {modest_alloc, failing_release, &heap};
    options.allocator = &allocator;
    options.page_size = INT32_MAX;
    options.k_head_dim = 576;
    options.num_kv_heads = 1 << 20;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_INVALID, "overflows");
    options.num_kv_heads = 1 << 10;
    options.num_pages = 1 << 20;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_NO_MEMORY, "bytes");
    assert_int_equal(heap.live, 0);
}

/* An absurd max_seq_len costs no more than the pool can hold. */
static void huge_max_seq_len_is_cheap(void **state) {
    (void)state;
    const kv8_cache_layer layer = {sizeof(kv8_cache_layer), KV8_E4M3, KV8_E4M3, -1, NULL, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    failing_heap heap = {.fail_at = -1};
    const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
    options.allocator = &allocator;
    options.max_seq_len = INT32_MAX;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq seq = new_seq(cache);
    assert_ok(kv8_cache_extend(cache, seq, 64, NULL));
    assert_refused(kv8_cache_extend(cache, seq, INT32_MAX - 64, NULL), KV8_ERR_FULL, "pages");
    assert_refused(kv8_cache_extend(cache, seq, INT32_MAX, NULL), KV8_ERR_INVALID, "max_seq_len");
    kv8_cache_destroy(cache);
}

/* Fails every allocation of create once; nothing else allocates at all. */
static void only_create_allocates_and_it_cleans_up(void **state) {
    (void)state;
    const kv8_cache_layer layers[3] = {
        {sizeof(kv8_cache_layer), KV8_INT8, KV8_E4M3, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 5, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_INT8, -1, NULL, NULL}};
    kv8_cache_options options = small_options(layers, 3);
    for (int64_t fail_at = 0;; fail_at++) {
        failing_heap heap = {.fail_at = fail_at};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        options.allocator = &allocator;
        kv8_cache *cache = NULL;
        const kv8_status status = kv8_cache_create(&cache, &options);
        if (status == KV8_OK) {
            assert_true(fail_at > 15);
            const int64_t calls = heap.calls;
            const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
            const kv8_seq seq = new_seq(cache);
            kv8_seq fork = KV8_SEQ_NONE, match = KV8_SEQ_NONE;
            int32_t matched = 0;
            assert_ok(kv8_cache_extend(cache, seq, 9, ids));
            write_rows(cache, 3, seq, 9, 1);
            assert_ok(kv8_cache_publish(cache, seq));
            assert_ok(kv8_cache_seq_fork(cache, seq, &fork));
            extend_write(cache, 3, fork, 1, 7);
            assert_ok(kv8_cache_prefix_match(cache, ids, 9, &match, &matched));
            assert_int_equal(matched, 8);
            assert_ok(kv8_cache_truncate(cache, fork, 9));
            assert_ok(kv8_cache_seq_destroy(cache, seq));
            assert_int_equal(heap.calls, calls);
            kv8_cache_destroy(cache);
            assert_int_equal(heap.live, 0);
            break;
        }
        assert_int_equal(status, KV8_ERR_NO_MEMORY);
        assert_null(cache);
        assert_int_equal(heap.live, 0);
    }
}

/* --- facts --- */

static void stats_groups_and_layout(void **state) {
    (void)state;
    const kv8_cache_layer layers[4] = {
        {sizeof(kv8_cache_layer), KV8_INT8, KV8_E4M3, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_F32, 5, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_F16, KV8_INT8, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_E5M2, KV8_E4M3FNUZ, 9, NULL, NULL}};
    for (int layout = 0; layout < 2; layout++) {
        kv8_cache_options options = small_options(layers, 4);
        options.k_head_dim = 45;
        options.v_head_dim = 3;
        options.page_size = 7;
        options.num_window_pages = 5;
        options.layout = (kv8_layout)layout;
        kv8_cache *cache = NULL;
        assert_ok(kv8_cache_create(&cache, &options));
        kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
        assert_ok(kv8_cache_get_stats(cache, &stats));
        assert_int_equal(stats.num_groups, 3);
        assert_int_equal(stats.pages_total, 16 + 5 + 5);
        assert_int_equal(stats.pages_free, 26);
        const int32_t token[4] = {2 * (45 + 2 + 3), 2 * (90 + 12), 2 * (90 + 3 + 2), 2 * (45 + 3)};
        assert_int_equal(stats.bytes_per_token, token[0] + token[1] + token[2] + token[3]);
        assert_int_equal(stats.bytes_per_token_unwindowed, token[0] + token[2]);
        /* Codes and scales, and at most four planes' padding to a cache line. */
        const uint64_t codes =
            7u * (16u * (uint64_t)(token[0] + token[2]) + 5u * (uint64_t)(token[1] + token[3]));
        assert_true(stats.bytes >= codes && stats.bytes <= codes + (32u + 10u) * 4u * 64u);
        assert_true(kv8_cache_same_group(cache, 0, 2) == 1);
        assert_true(kv8_cache_same_group(cache, 1, 3) == 0);
        assert_true(kv8_cache_same_group(cache, 0, 4) == 0);
        kv8_paged k = KV8_PAGED_INIT, v = KV8_PAGED_INIT;
        assert_ok(kv8_cache_layer_kv(cache, 2, &k, &v));
        assert_int_equal(k.stride_head, layout == 0 ? 45 : 45 * 7);
        assert_int_equal(k.stride_slot, layout == 0 ? 45 * 2 : 45);
        assert_null(k.row_scale);
        assert_int_equal(v.row_scale_stride_head, layout == 0 ? 1 : 7);
        assert_int_equal(v.row_scale_stride_slot, layout == 0 ? 2 : 1);
        assert_int_equal((uintptr_t)k.data % 64, 0);
        assert_int_equal(((uintptr_t)v.data - (uintptr_t)k.data) % 64, 0);
        assert_int_equal(k.stride_page * 2 % 64, 0);
        kv8_cache_destroy(cache);
    }
}

static void batch_tables_in_both_forms(void **state) {
    (void)state;
    const kv8_cache_layer layers[2] = {
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 2, NULL, NULL}};
    kv8_cache_options options = small_options(layers, 2);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq seqs[3] = {new_seq(cache), new_seq(cache), new_seq(cache)};
    assert_ok(kv8_cache_extend(cache, seqs[0], 8, NULL));
    assert_ok(kv8_cache_extend(cache, seqs[0], 1, NULL));
    assert_ok(kv8_cache_extend(cache, seqs[2], 4, NULL));
    int32_t indptr[4], indices[8], last[3], block[3 * 4], lens[3];
    assert_ok(kv8_cache_page_table(cache, 0, seqs, 3, indptr, indices, 4, last));
    const int32_t want_indptr[4] = {0, 3, 3, 4}, want_last[3] = {1, 0, 4};
    assert_memory_equal(indptr, want_indptr, sizeof want_indptr);
    assert_memory_equal(last, want_last, sizeof want_last);
    const int32_t want_indices[4] = {0, 1, 2, 3};
    assert_memory_equal(indices, want_indices, sizeof want_indices);
    /* The window group has given page 0 back when token 8 came. */
    assert_ok(kv8_cache_page_table(cache, 1, seqs, 3, indptr, indices, 8, last));
    assert_int_equal(indices[0], KV8_NO_PAGE);
    assert_true(indices[1] >= 0 && indices[2] >= 0);
    assert_refused(kv8_cache_page_table(cache, 1, seqs, 3, indptr, indices, 3, last), KV8_ERR_FULL,
                   "4 entries");
    assert_ok(kv8_cache_block_table(cache, 1, seqs, 3, block, 4, lens));
    const int32_t want_lens[3] = {9, 0, 4};
    assert_memory_equal(lens, want_lens, sizeof want_lens);
    assert_memory_equal(block, indices, 3 * sizeof *block);
    assert_int_equal(block[3], KV8_NO_PAGE);
    for (int i = 4; i < 8; i++) assert_int_equal(block[i], KV8_NO_PAGE);
    assert_int_equal(block[8], indices[3]);
    assert_refused(kv8_cache_block_table(cache, 1, seqs, 3, block, 2, lens), KV8_ERR_FULL,
                   "rows of 3");
    kv8_cache_destroy(cache);
}

static void scales_of_a_batch(void **state) {
    (void)state;
    const float k_scale[2] = {2, 3}, v_scale[2] = {4, 5}, own[2] = {6, 7}, bad[2] = {1, INFINITY};
    const kv8_cache_layer layers[2] = {
        {sizeof(kv8_cache_layer), KV8_E4M3, KV8_E4M3, -1, k_scale, v_scale},
        {sizeof(kv8_cache_layer), KV8_E4M3, KV8_E4M3, -1, NULL, NULL}};
    const kv8_cache_options options = small_options(layers, 2);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    kv8_seq seqs[3] = {new_seq(cache), new_seq(cache), KV8_SEQ_NONE};
    assert_refused(kv8_cache_seq_set_scales(cache, seqs[1], 0, bad, NULL), KV8_ERR_INVALID, "inf");
    assert_ok(kv8_cache_seq_set_scales(cache, seqs[1], 0, NULL, own));
    assert_ok(kv8_cache_seq_fork(cache, seqs[1], &seqs[2]));
    float k[6], v[6];
    assert_ok(kv8_cache_scales(cache, 0, seqs, 3, k, v));
    const float want_k[6] = {2, 3, 2, 3, 2, 3}, want_v[6] = {4, 5, 6, 7, 6, 7};
    assert_memory_equal(k, want_k, sizeof k);
    assert_memory_equal(v, want_v, sizeof v);
    assert_ok(kv8_cache_scales(cache, 1, seqs, 3, k, v));
    for (int i = 0; i < 6; i++) assert_true(k[i] == 1 && v[i] == 1);
    assert_ok(kv8_cache_extend(cache, seqs[1], 1, NULL));
    assert_refused(kv8_cache_seq_set_scales(cache, seqs[1], 0, own, NULL), KV8_ERR_INVALID,
                   "empty");
    /* The slot's next sequence starts with the cache's scales again. */
    assert_ok(kv8_cache_seq_destroy(cache, seqs[1]));
    seqs[1] = new_seq(cache);
    assert_ok(kv8_cache_scales(cache, 0, seqs, 2, k, v));
    assert_memory_equal(v, v_scale, sizeof v_scale);
    assert_memory_equal(v + 2, v_scale, sizeof v_scale);
    kv8_cache_destroy(cache);
}

/* --- handles --- */

static void stale_and_foreign_handles_are_refused(void **state) {
    (void)state;
    const kv8_cache_layer layer = {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    options.max_seqs = 2;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq a = new_seq(cache), b = new_seq(cache);
    kv8_seq c = KV8_SEQ_NONE;
    assert_refused(kv8_cache_seq_create(cache, &c), KV8_ERR_FULL, "2");
    assert_refused(kv8_cache_seq_fork(cache, a, &c), KV8_ERR_FULL, "max_seqs");
    assert_ok(kv8_cache_seq_destroy(cache, a));
    const kv8_seq again = new_seq(cache); /* the same slot, another generation */
    assert_true(again != a);
    const kv8_seq wrong[] = {a, KV8_SEQ_NONE, 0, 1, b + 1, b + 2, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int32_t length, indptr[2], indices[1], last;
        float values[16];
        assert_refused(kv8_cache_seq_length(cache, wrong[i], &length), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_extend(cache, wrong[i], 1, NULL), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_truncate(cache, wrong[i], 0), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_seq_destroy(cache, wrong[i]), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_seq_fork(cache, wrong[i], &c), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_publish(cache, wrong[i]), KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_save(cache, wrong[i], "/nonexistent"), KV8_ERR_NOT_FOUND,
                       "handle");
        assert_refused(kv8_cache_page_table(cache, 0, &wrong[i], 1, indptr, indices, 1, &last),
                       KV8_ERR_NOT_FOUND, "handle");
        assert_refused(kv8_cache_read(cache, 0, wrong[i], 0, 0, values, values), KV8_ERR_NOT_FOUND,
                       "handle");
        assert_refused(kv8_cache_seq_set_scales(cache, wrong[i], 0, NULL, NULL), KV8_ERR_NOT_FOUND,
                       "handle");
    }
    assert_true(c == KV8_SEQ_NONE);
    assert_int_equal(seq_length(cache, again), 0);
    kv8_cache_destroy(cache);
}

/* --- forks --- */

static void forks_share_until_they_write(void **state) {
    (void)state;
    /* Two layers of one group with different bytes per page: both must be copied. */
    const kv8_cache_layer layers[3] = {
        {sizeof(kv8_cache_layer), KV8_F32, KV8_E4M3, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_E4M3, KV8_BF16, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 100, NULL, NULL}};
    kv8_cache_options options = small_options(layers, 3);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq a = new_seq(cache);
    extend_write(cache, 3, a, 6, 1); /* 1..6: a full page and a half */
    kv8_seq b = KV8_SEQ_NONE, c = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_fork(cache, a, &b));
    assert_ok(kv8_cache_seq_fork(cache, a, &c));
    assert_int_equal(pages_free(cache), 32 - 4);
    for (int32_t layer = 0; layer < 3; layer++)
        for (int32_t t = 0; t < 6; t++)
            assert_int_equal(page_of(cache, layer, a, 4, t), page_of(cache, layer, b, 4, t));
    extend_write(cache, 3, a, 1, 10); /* copies the tail */
    assert_int_equal(pages_free(cache), 32 - 6);
    assert_int_equal(page_of(cache, 0, a, 4, 0), page_of(cache, 0, b, 4, 0));
    assert_int_not_equal(page_of(cache, 0, a, 4, 5), page_of(cache, 0, b, 4, 5));
    extend_write(cache, 3, b, 4, 11); /* copies again: c still holds the first tail */
    extend_write(cache, 3, c, 2, 8);  /* the last holder writes in place */
    assert_int_equal(pages_free(cache), 32 - 2 * (1 + 1 + 2 + 1));
    const float want_a[] = {1, 2, 3, 4, 5, 6, 10}, want_c[] = {1, 2, 3, 4, 5, 6, 8, 9};
    const float want_b[] = {1, 2, 3, 4, 5, 6, 11, 12, 13, 14};
    for (int32_t layer = 0; layer < 3; layer++) {
        check_rows(cache, layer, a, 0, 7, want_a);
        check_rows(cache, layer, b, 0, 10, want_b);
        check_rows(cache, layer, c, 0, 8, want_c);
    }
    assert_ok(kv8_cache_seq_destroy(cache, b));
    for (int32_t layer = 0; layer < 3; layer++) check_rows(cache, layer, a, 0, 7, want_a);
    assert_ok(kv8_cache_seq_destroy(cache, a));
    for (int32_t layer = 0; layer < 3; layer++) check_rows(cache, layer, c, 0, 8, want_c);
    assert_ok(kv8_cache_seq_destroy(cache, c));
    assert_int_equal(pages_free(cache), 32);
    kv8_cache_destroy(cache);
}

static void truncate_then_write_leaves_the_fork_alone(void **state) {
    (void)state;
    const kv8_cache_layer layer = {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL};
    const kv8_cache_options options = small_options(&layer, 1);
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq a = new_seq(cache);
    extend_write(cache, 1, a, 8, 1);
    kv8_seq b = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_fork(cache, a, &b));
    assert_ok(kv8_cache_truncate(cache, a, 6)); /* a full shared page becomes a's partial tail */
    extend_write(cache, 1, a, 1, 20);
    assert_ok(kv8_cache_truncate(cache, b, 3));
    extend_write(cache, 1, b, 3, 30);
    const float want_a[] = {1, 2, 3, 4, 5, 6, 20}, want_b[] = {1, 2, 3, 30, 31, 32};
    check_rows(cache, 0, a, 0, 7, want_a);
    check_rows(cache, 0, b, 0, 6, want_b);
    assert_ok(kv8_cache_truncate(cache, a, 0));
    assert_ok(kv8_cache_seq_destroy(cache, b));
    assert_int_equal(pages_free(cache), 16);
    assert_refused(kv8_cache_truncate(cache, a, 1), KV8_ERR_INVALID, "0 to 0");
    assert_refused(kv8_cache_truncate(cache, a, -1), KV8_ERR_INVALID, "-1");
    kv8_cache_destroy(cache);
}

/* --- windows --- */

/* One token at a time, every slack: exactly the pages that a query or truncate within the slack
 * can need are held. */
static void pages_behind_the_window_are_freed(void **state) {
    (void)state;
    const int32_t page_sizes[] = {1, 2, 7, 16};
    for (int p = 0; p < 4; p++) {
        for (int32_t window_left = 0; window_left <= 9; window_left += 3) {
            for (int32_t slack = 0; slack <= 5; slack += 5) {
                const int32_t page_size = page_sizes[p];
                const kv8_cache_layer layer = {
                    sizeof(kv8_cache_layer), KV8_BF16, KV8_E4M3, window_left, NULL, NULL};
                kv8_cache_options options = small_options(&layer, 1);
                options.page_size = page_size;
                options.window_slack = slack;
                /* Window, slack, the token itself, and a partial page at both ends. */
                options.num_window_pages = (window_left + slack + 1) / page_size + 2;
                kv8_cache *cache = NULL;
                assert_ok(kv8_cache_create(&cache, &options));
                const kv8_seq seq = new_seq(cache);
                for (int32_t t = 0; t < 60; t++) {
                    extend_write(cache, 1, seq, 1, (float)(t % 100));
                    const int32_t first = t - window_left - slack;
                    const int32_t held = first < 0 ? 0 : first / page_size;
                    for (int32_t i = 0; i <= t / page_size; i++)
                        assert_int_equal(page_of(cache, 0, seq, page_size, i * page_size) >= 0,
                                         i >= held);
                    float k[SMALL_ROW], v[SMALL_ROW];
                    for (int32_t j = held * page_size; j <= t; j++) {
                        const float want = (float)(j % 100);
                        assert_ok(kv8_cache_read(cache, 0, seq, j, 1, k, NULL));
                        assert_true(k[0] == want && k[SMALL_ROW - 1] == want);
                    }
                    if (held > 0)
                        assert_refused(kv8_cache_read(cache, 0, seq, held * page_size - 1, 1, k, v),
                                       KV8_ERR_NOT_FOUND, "behind the window");
                }
                /* Back by the slack, and what a query there sees is still stored. */
                const int32_t length = 60 - slack;
                assert_ok(kv8_cache_truncate(cache, seq, length));
                for (int32_t j = length - window_left; j < length; j++) {
                    float k[SMALL_ROW];
                    assert_ok(kv8_cache_read(cache, 0, seq, j, 1, k, NULL));
                    assert_true(k[0] == (float)j);
                }
                const int32_t first = (59 - window_left - slack) / page_size * page_size;
                assert_refused(kv8_cache_truncate(cache, seq, first + window_left - 1),
                               KV8_ERR_INVALID, "window_slack");
                assert_ok(kv8_cache_truncate(cache, seq, first + window_left));
                extend_write(cache, 1, seq, 3, 50);
                assert_ok(kv8_cache_truncate(cache, seq, 0)); /* always possible */
                assert_int_equal(pages_free(cache), options.num_window_pages);
                extend_write(cache, 1, seq, 3, 50);
                kv8_cache_destroy(cache);
            }
        }
    }
}

/* A failed step takes its tokens back whatever the slack: extend only frees what the oldest new
 * query cannot see. */
static void one_extend_can_always_be_undone(void **state) {
    (void)state;
    for (int32_t window_left = 0; window_left < 8; window_left++) {
        const kv8_cache_layer layer = {
            sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, window_left, NULL, NULL};
        kv8_cache_options options = small_options(&layer, 1);
        options.page_size = 2;
        options.num_pages = 40;
        kv8_cache *cache = NULL;
        assert_ok(kv8_cache_create(&cache, &options));
        const kv8_seq seq = new_seq(cache);
        int32_t length = 0;
        for (int32_t step = 1; step < 12; step++) {
            assert_ok(kv8_cache_extend(cache, seq, step, NULL));
            assert_ok(kv8_cache_truncate(cache, seq, length));
            extend_write(cache, 1, seq, step, 1);
            length += step;
        }
        kv8_cache_destroy(cache);
    }
}

/* --- full pools --- */

typedef struct picture {
    kv8_cache_stats stats;
    int32_t indptr[2][4], indices[2][64], last[2][3];
} picture;
static picture take_picture(const kv8_cache *cache, const kv8_seq *seqs) {
    picture result;
    memset(&result, 0, sizeof result);
    result.stats.struct_size = sizeof result.stats;
    assert_ok(kv8_cache_get_stats(cache, &result.stats));
    for (int32_t layer = 0; layer < 2; layer++)
        assert_ok(kv8_cache_page_table(cache, layer, seqs, 3, result.indptr[layer],
                                       result.indices[layer], 64, result.last[layer]));
    return result;
}

static void a_full_pool_changes_nothing(void **state) {
    (void)state;
    const kv8_cache_layer layers[2] = {
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 3, NULL, NULL}};
    kv8_cache_options options = small_options(layers, 2);
    options.num_pages = 8;
    options.num_window_pages = 6;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    kv8_seq seqs[3] = {new_seq(cache), new_seq(cache), KV8_SEQ_NONE};
    extend_write(cache, 2, seqs[0], 10, 1);
    extend_write(cache, 2, seqs[1], 7, 50);
    assert_ok(kv8_cache_seq_fork(cache, seqs[1], &seqs[2]));
    /* Full group: 5 of 8 taken; window group: 5 of 6, and the next extend of 0 frees one. */
    const picture before = take_picture(cache, seqs);
    assert_int_equal(before.stats.pages_free, 3 + 1);
    assert_refused(kv8_cache_extend(cache, seqs[0], 15, NULL), KV8_ERR_FULL, "layer 0");
    /* Window group: pages for tokens 12..21 are 3, one free and one behind the window. */
    assert_refused(kv8_cache_extend(cache, seqs[0], 12, NULL), KV8_ERR_FULL, "window_left 3");
    /* The copy of the shared tail counts. */
    assert_refused(kv8_cache_extend(cache, seqs[1], 5, NULL), KV8_ERR_FULL, "need 2 pages");
    assert_refused(kv8_cache_extend(cache, seqs[0], 991, NULL), KV8_ERR_INVALID, "1000");
    assert_refused(kv8_cache_extend(cache, seqs[0], -1, NULL), KV8_ERR_INVALID, "-1");
    const picture after = take_picture(cache, seqs);
    assert_memory_equal(&before, &after, sizeof before);
    float want[10];
    for (int i = 0; i < 10; i++) want[i] = (float)(1 + i);
    check_rows(cache, 0, seqs[0], 0, 10, want);
    check_rows(cache, 1, seqs[0], 0, 10, want);
    /* What fits exactly, goes: two pages, one of them freed behind the window. */
    extend_write(cache, 2, seqs[0], 10, 11);
    assert_int_equal(pages_free(cache), 1 + 0);
    for (int i = 0; i < 3; i++) assert_ok(kv8_cache_seq_destroy(cache, seqs[i]));
    assert_int_equal(pages_free(cache), 14);
    kv8_cache_destroy(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(huge_max_seq_len_is_cheap),
        cmocka_unit_test(only_create_allocates_and_it_cleans_up),
        cmocka_unit_test(stats_groups_and_layout),
        cmocka_unit_test(batch_tables_in_both_forms),
        cmocka_unit_test(scales_of_a_batch),
        cmocka_unit_test(stale_and_foreign_handles_are_refused),
        cmocka_unit_test(forks_share_until_they_write),
        cmocka_unit_test(truncate_then_write_leaves_the_fork_alone),
        cmocka_unit_test(pages_behind_the_window_are_freed),
        cmocka_unit_test(one_extend_can_always_be_undone),
        cmocka_unit_test(a_full_pool_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
