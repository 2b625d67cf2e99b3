/* test_page_tables.c - page tables in a GPU's memory: after any calls they are those of the host's
 * call of the same name, and what did not change is not sent again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_impl.h"
#include "cache_testing.h"
#include "stand_in.h"

enum { LAYERS = 2, PAGE_SIZE = 4, MAX_LEN = 48, SEQS = 4, MOST = SEQS * MAX_LEN };

static const kv8_cache_layer layers[LAYERS] = {
    {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL},
    {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 7, NULL, NULL},
};

typedef struct fixture {
    kv8_device *device;
    kv8_stream *stream;
    kv8_cache *cache;
    kv8_seq seqs[SEQS];
    int32_t num_seqs;
} fixture;

static void open_fixture(fixture *f) {
    stand_in_reset();
    *f = (fixture){0};
    assert_ok(kv8_device_open(&f->device, 0));
    assert_ok(kv8_stream_create(&f->stream, f->device));
    kv8_cache_options options = small_options(layers, LAYERS);
    options.page_size = PAGE_SIZE;
    options.max_seq_len = MAX_LEN;
    options.max_seqs = SEQS + 1;
    options.num_pages = MOST;
    options.device = f->device;
    options.stream = f->stream;
    assert_ok(kv8_cache_create(&f->cache, &options));
}
static void close_fixture(fixture *f) {
    kv8_cache_destroy(f->cache);
    kv8_stream_destroy(f->stream);
    kv8_device_close(f->device);
}

/* Bytes are the host's own on this driver. lists_alone: of last_page_len nothing is said. */
static void check_tables(fixture *f, bool lists_alone) {
    int32_t indptr[SEQS + 1], pages[MOST], last[SEQS];
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        kv8_page_table table = KV8_PAGE_TABLE_INIT;
        assert_ok(kv8_cache_load_pages(f->cache, layer, f->seqs, f->num_seqs, lists_alone, &table));
        assert_ok(kv8_stream_synchronize(f->stream));
        assert_ok(
            kv8_cache_page_table(f->cache, layer, f->seqs, f->num_seqs, indptr, pages, MOST, last));
        const size_t n = (size_t)f->num_seqs;
        assert_memory_equal(table.page_indptr, indptr, (n + 1) * sizeof *indptr);
        for (int32_t i = 0; i < indptr[n]; i++) assert_int_equal(table.page_indices[i], pages[i]);
        for (size_t b = 0; !lists_alone && b < n; b++)
            assert_int_equal(table.last_page_len[b], last[b]);
    }
}

/* --- what may change a list --- */

static void add(fixture *f, test_rng *rng) {
    kv8_seq *const seq = &f->seqs[f->num_seqs];
    int32_t matched = 0;
    const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    if (f->num_seqs == SEQS) return;
    if (f->num_seqs > 0 && rng_range(rng, 0, 1) == 0)
        assert_ok(kv8_cache_seq_fork(f->cache, f->seqs[rng_range(rng, 0, f->num_seqs - 1)], seq));
    else
        assert_ok(kv8_cache_prefix_match(f->cache, ids, 9, seq, &matched));
    f->num_seqs++;
}
static void drop(fixture *f, int32_t idx) {
    assert_ok(kv8_cache_seq_destroy(f->cache, f->seqs[idx]));
    f->seqs[idx] = f->seqs[--f->num_seqs];
}
static void resize(fixture *f, test_rng *rng, kv8_seq seq) {
    static const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const int32_t length = seq_length(f->cache, seq), num = rng_range(rng, 1, 9);
    if (rng_range(rng, 0, 3) == 0) {
        const kv8_status status = kv8_cache_truncate(f->cache, seq, length > 5 ? length - 5 : 0);
        assert_true(status == KV8_OK || status == KV8_ERR_INVALID); /* or out of reach */
    } else if (length + num <= MAX_LEN)
        assert_ok(kv8_cache_extend(f->cache, seq, num, ids));
}

static void tables_follow_every_call(void **state) {
    (void)state;
    fixture f;
    test_rng rng = {11};
    open_fixture(&f);
    for (int i = 0; i < 3000; i++) {
        const int32_t what = rng_range(&rng, 0, 9);
        if (what == 0 || f.num_seqs == 0)
            add(&f, &rng);
        else if (what == 1)
            drop(&f, rng_range(&rng, 0, f.num_seqs - 1));
        else if (what == 2)
            assert_ok(kv8_cache_publish(f.cache, f.seqs[rng_range(&rng, 0, f.num_seqs - 1)]));
        else if (what == 3)
            assert_ok(kv8_pages_move_windows(kv8_cache_pages(f.cache),
                                             f.seqs[rng_range(&rng, 0, f.num_seqs - 1)]));
        else
            resize(&f, &rng, f.seqs[rng_range(&rng, 0, f.num_seqs - 1)]);
        if (rng_range(&rng, 0, 1) == 0) check_tables(&f, rng_range(&rng, 0, 1) == 0);
    }
    close_fixture(&f);
}

/* Of a sequence's lists one copy a group and page, of its lengths one a call. */
static void only_what_changed_is_sent(void **state) {
    (void)state;
    enum { PAGES = 3 };
    static const int32_t ids[PAGE_SIZE] = {1, 2, 3, 4};
    fixture f;
    open_fixture(&f);
    f.num_seqs = 1;
    assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[0]));
    for (int lists_alone = 0; lists_alone < 2; lists_alone++) {
        const int64_t before = stand_in_num_calls("cuMemcpyAsync");
        for (int i = 0; i < PAGES * PAGE_SIZE; i++) {
            assert_ok(kv8_cache_extend(f.cache, f.seqs[0], 1, ids));
            check_tables(&f, lists_alone);
        }
        const int64_t copies = stand_in_num_calls("cuMemcpyAsync") - before;
        if (lists_alone)
            assert_true(copies >= PAGES * LAYERS && copies <= 2 * PAGES * LAYERS);
        else
            assert_int_equal(copies, PAGES * PAGE_SIZE * LAYERS);
    }
    close_fixture(&f);
}

/* Whose table lies there already as much as any other. */
static void a_sequence_that_ended_is_refused(void **state) {
    (void)state;
    fixture f;
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    open_fixture(&f);
    f.num_seqs = 1;
    assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[0]));
    check_tables(&f, false);
    assert_ok(kv8_cache_seq_destroy(f.cache, f.seqs[0]));
    assert_int_equal(kv8_cache_page_table_device(f.cache, 0, f.seqs, 1, &table), KV8_ERR_NOT_FOUND);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_follow_every_call),
        cmocka_unit_test(only_what_changed_is_sent),
        cmocka_unit_test(a_sequence_that_ended_is_refused),
    };
    return cmocka_run_group_tests_name("page_tables", tests, NULL, NULL);
}
