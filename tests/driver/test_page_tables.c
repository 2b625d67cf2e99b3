/* test_page_tables.c - page tables in a GPU's memory: after any calls they are those of the host's
 * call of the same name, and what did not change is not sent again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_impl.h"
#include "cache_testing.h"
#include "page_lists_args.h"
#include "run_page_lists.h"

enum { LAYERS = 2, PAGE_SIZE = 4, MAX_LEN = 48, SEQS = 4, MOST = SEQS * MAX_LEN };
enum { LONG_LEN = 1 << 17, LONG_PAGES = LONG_LEN / PAGE_SIZE }; /* a list of 16 blocks */

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

static void run(const stand_in_launch *launch) {
    assert_true(run_page_lists(launch));
}

static void open_fixture(fixture *f, int32_t max_len) {
    stand_in_reset();
    stand_in_on_launch(run);
    *f = (fixture){0};
    assert_ok(kv8_device_open(&f->device, 0));
    assert_ok(kv8_stream_create(&f->stream, f->device));
    kv8_cache_options options = small_options(layers, LAYERS);
    options.page_size = PAGE_SIZE;
    options.max_seq_len = max_len;
    options.max_seqs = SEQS + 1;
    options.num_pages = SEQS * max_len;
    options.device = f->device;
    options.stream = f->stream;
    assert_ok(kv8_cache_create(&f->cache, &options));
}
static void close_fixture(fixture *f) {
    kv8_cache_destroy(f->cache);
    kv8_stream_destroy(f->stream);
    kv8_device_close(f->device);
}

static kv8_page_table table_of(const fixture *f, int32_t layer) {
    kv8_cache_device_layer own;
    assert_ok(kv8_cache_get_device_layer(f->cache, layer, &own));
    return own.pages;
}

/* Bytes are the host's own on this driver. lists_alone: of last_page_len nothing is said. */
static void compare_table(const fixture *f, int32_t layer, bool lists_alone) {
    static int32_t pages[SEQS * LONG_PAGES];
    int32_t indptr[SEQS + 1], last[SEQS];
    const kv8_page_table table = table_of(f, layer);
    const size_t n = (size_t)f->num_seqs;
    assert_ok(kv8_cache_page_table(f->cache, layer, f->seqs, f->num_seqs, indptr, pages,
                                   SEQS * LONG_PAGES, last));
    assert_memory_equal(table.page_indptr, indptr, (n + 1) * sizeof *indptr);
    if (indptr[n] > 0)
        assert_memory_equal(table.page_indices, pages, (size_t)indptr[n] * sizeof *pages);
    for (size_t b = 0; !lists_alone && b < n; b++)
        assert_int_equal(table.last_page_len[b], last[b]);
    for (size_t b = n; b < SEQS + 1; b++) {
        assert_int_equal(table.page_indptr[b + 1], indptr[n]);
        assert_int_equal(table.last_page_len[b], 0);
    }
}

static void check_tables(const fixture *f, bool lists_alone) {
    assert_ok(kv8_cache_load_tables(f->cache, f->seqs, f->num_seqs, lists_alone));
    assert_ok(kv8_stream_synchronize(f->stream));
    for (int32_t layer = 0; layer < LAYERS; layer++) compare_table(f, layer, lists_alone);
}

/* One layer's alone. */
static void check_table(const fixture *f, int32_t layer) {
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    assert_ok(kv8_cache_page_table_device(f->cache, layer, f->seqs, f->num_seqs, &table));
    assert_ok(kv8_stream_synchronize(f->stream));
    assert_ptr_equal(table.page_indptr, table_of(f, layer).page_indptr);
    compare_table(f, layer, false);
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
    open_fixture(&f, MAX_LEN);
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
        const int32_t check = rng_range(&rng, 0, 5);
        if (check < 2) check_tables(&f, check == 1);
        if (check == 2) check_table(&f, rng_range(&rng, 0, LAYERS - 1));
    }
    close_fixture(&f);
}

/* Of a sequence's lists one copy a page, of its lengths one a call and group. */
static void only_what_changed_is_sent(void **state) {
    (void)state;
    enum { PAGES = 3 };
    static const int32_t ids[PAGE_SIZE] = {1, 2, 3, 4};
    fixture f;
    open_fixture(&f, MAX_LEN);
    f.num_seqs = 1;
    assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[0]));
    for (int lists_alone = 0; lists_alone < 2; lists_alone++) {
        const int64_t before = stand_in_num_calls("cuMemcpyAsync");
        const int32_t launches = stand_in_num_launches();
        for (int i = 0; i < PAGES * PAGE_SIZE; i++) {
            assert_ok(kv8_cache_extend(f.cache, f.seqs[0], 1, ids));
            check_tables(&f, lists_alone);
        }
        const int64_t copies = stand_in_num_calls("cuMemcpyAsync") - before;
        const int64_t changes = stand_in_num_launches() - launches; /* windows move too */
        assert_true(changes >= PAGES && changes <= 2 * PAGES);
        assert_int_equal(copies, lists_alone ? changes : PAGES * PAGE_SIZE);
    }
    close_fixture(&f);
}

/* Of the launch that was last. */
static kv8_page_row last_row(int32_t idx) {
    const kv8_page_lists_args *const args = stand_in_get_launch(stand_in_num_launches() - 1)->args;
    return args->rows[idx];
}

/* Lists of many blocks, more than one launch takes; then of a sequence that grows the last page. */
static void long_lists_go_in_pieces(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, LONG_LEN);
    for (f.num_seqs = 0; f.num_seqs < SEQS; f.num_seqs++) {
        assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[f.num_seqs]));
        assert_ok(
            kv8_cache_extend(f.cache, f.seqs[f.num_seqs], LONG_LEN - 9 * f.num_seqs - 8, NULL));
    }
    int32_t launches = stand_in_num_launches();
    check_tables(&f, false);
    assert_true(stand_in_num_launches() - launches > 1);
    assert_ok(kv8_cache_extend(f.cache, f.seqs[2], 5, NULL));
    launches = stand_in_num_launches();
    check_tables(&f, false);
    assert_int_equal(stand_in_num_launches() - launches, 1);
    for (int32_t b = 0; b < SEQS; b++) {
        const kv8_page_row row = last_row(b);
        assert_int_equal(row.count - row.changed_from, b == 2);
    }
    /* In another order, and one of them twice: nothing else is sent. */
    const kv8_seq first = f.seqs[0];
    f.seqs[0] = f.seqs[3];
    f.seqs[1] = first;
    check_tables(&f, false);
    assert_int_equal(last_row(1).count, last_row(1).changed_from);
    close_fixture(&f);
}

/* A batch that has a sequence twice, of which much is new. */
static void a_sequence_may_be_named_twice(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, LONG_LEN);
    f.num_seqs = 2;
    assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[0]));
    f.seqs[1] = f.seqs[0];
    for (int i = 0; i < 3; i++) {
        assert_ok(kv8_cache_extend(f.cache, f.seqs[0], LONG_LEN / 4, NULL));
        check_tables(&f, false);
    }
    close_fixture(&f);
}

/* A copy or a launch that fails leaves nothing that the next call would not mend. */
static void what_failed_is_sent_again(void **state) {
    (void)state;
    static const char *const calls[] = {"cuMemcpyAsync", "cuLaunchKernelEx"};
    fixture f;
    open_fixture(&f, LONG_LEN);
    f.num_seqs = 3;
    for (int32_t b = 0; b < f.num_seqs; b++) assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[b]));
    for (int i = 0; i < 12; i++) {
        for (int32_t b = 0; b < f.num_seqs; b++)
            assert_ok(kv8_cache_extend(f.cache, f.seqs[b], i == 0 ? LONG_LEN / 2 : 3, NULL));
        const int64_t nth = i == 0 ? 2 : 1;
        stand_in_fail(calls[i % 2], nth, 1);
        assert_int_not_equal(kv8_cache_load_tables(f.cache, f.seqs, f.num_seqs, false), KV8_OK);
        assert_string_equal(stand_in_failed_call(), calls[i % 2]);
        check_tables(&f, i % 3 == 0);
    }
    close_fixture(&f);
}

/* A load that fails once a part of it has run leaves nobody's table, also not that of before. */
static void a_table_half_sent_is_nobodys(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, LONG_LEN);
    kv8_seq seqs[SEQS];
    for (int32_t i = 0; i < SEQS; i++) {
        assert_ok(kv8_cache_seq_create(f.cache, &seqs[i]));
        assert_ok(kv8_cache_extend(f.cache, seqs[i], LONG_LEN, NULL));
    }
    f.num_seqs = 2;
    memcpy(f.seqs, seqs, sizeof seqs);
    check_tables(&f, false);
    const int32_t launches = stand_in_num_launches();
    stand_in_fail("cuLaunchKernelEx", 2, 1);
    assert_int_not_equal(kv8_cache_load_tables(f.cache, &seqs[2], 2, false), KV8_OK);
    check_tables(&f, false);
    assert_true(stand_in_num_launches() - launches >= 2);
    close_fixture(&f);
}

/* Whose table lies there already as much as any other. */
static void a_sequence_that_ended_is_refused(void **state) {
    (void)state;
    fixture f;
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    open_fixture(&f, MAX_LEN);
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
        cmocka_unit_test(long_lists_go_in_pieces),
        cmocka_unit_test(a_sequence_may_be_named_twice),
        cmocka_unit_test(what_failed_is_sent_again),
        cmocka_unit_test(a_table_half_sent_is_nobodys),
        cmocka_unit_test(a_sequence_that_ended_is_refused),
    };
    return cmocka_run_group_tests_name("page_tables", tests, NULL, NULL);
}
