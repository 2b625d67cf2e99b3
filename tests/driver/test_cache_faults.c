/* test_cache_faults.c - a cache on a GPU whose driver fails: create leaves nothing behind,
 * whichever call is refused; afterwards every call says so, takes no page and no sequence, and
 * succeeds when it is made again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "cache_impl.h"
#include "cache_testing.h"
#include "stand_in.h"

enum { UNKNOWN = 999, OUT_OF_MEMORY = 2, DIM = 8, TOKENS = 6 };

static const kv8_cache_layer layers[2] = {
    {sizeof(kv8_cache_layer), KV8_INT8, KV8_E4M3, -1, NULL, NULL},
    {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 3, NULL, NULL},
};

typedef struct fixture {
    kv8_device *device;
    kv8_stream *stream;
    kv8_cache_options options;
    kv8_cache *cache;
    kv8_seq parent, seq; /* of TOKENS tokens, loaded, and its fork */
    kv8_seq loaded;
    bool tail_moves;
    char path[64];
} fixture;

static void no_fault(void) {
    stand_in_fail(NULL, 0, 0);
}

/* Rows of its own arithmetic come from a file: the append kernels compute nothing here. */
static void save_from_host(fixture *f) {
    kv8_cache_options options = f->options;
    options.device = NULL;
    options.stream = NULL;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    const kv8_seq seq = new_seq(cache);
    float rows[TOKENS * 2 * DIM];
    for (int i = 0; i < TOKENS * 2 * DIM; i++) rows[i] = (float)(i % 13) - 6;
    assert_ok(kv8_cache_extend(cache, seq, TOKENS, NULL));
    for (int32_t layer = 0; layer < 2; layer++) {
        kv8_append append = KV8_APPEND_INIT;
        append.num_seqs = 1;
        append.seqs = &seq;
        append.indptr = (const int32_t[]){0, TOKENS};
        append.src_dtype = KV8_F32;
        append.k = append.v = rows;
        append.k_stride_row = append.v_stride_row = 2 * DIM;
        append.k_stride_head = append.v_stride_head = DIM;
        assert_ok(kv8_cache_append(cache, layer, &append));
    }
    assert_ok(kv8_cache_save(cache, seq, f->path));
    kv8_cache_destroy(cache);
}

static void open_fixture(fixture *f) {
    stand_in_reset();
    *f = (fixture){.options = small_options(layers, 2)};
    f->options.k_head_dim = DIM;
    f->options.num_pages = 8;
    snprintf(f->path, sizeof f->path, "/tmp/kv8_cache_faults_%d", (int)getpid());
    save_from_host(f);
    assert_ok(kv8_device_open(&f->device, 0));
    assert_ok(kv8_stream_create(&f->stream, f->device));
    f->options.device = f->device;
    f->options.stream = f->stream;
}
static void open_with_cache(fixture *f) {
    open_fixture(f);
    assert_ok(kv8_cache_create(&f->cache, &f->options));
    assert_ok(kv8_cache_load(f->cache, f->path, &f->parent));
    assert_ok(kv8_cache_seq_fork(f->cache, f->parent, &f->seq));
}
static void close_fixture(fixture *f) {
    no_fault();
    kv8_cache_destroy(f->cache);
    kv8_stream_destroy(f->stream);
    kv8_device_close(f->device);
    (void)unlink(f->path);
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
}

static void create_leaves_nothing_behind(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    const stand_in_live before = stand_in_get_live();
    int64_t nth = 1;
    for (;; nth++) {
        stand_in_fail(NULL, nth, OUT_OF_MEMORY);
        const kv8_status status = kv8_cache_create(&f.cache, &f.options);
        if (stand_in_failed_call() == NULL) break;
        if (strncmp(stand_in_failed_call(), "cuCtxPop", 8) == 0) { /* nothing was lost */
            assert_int_equal(status, KV8_OK);
            no_fault();
            kv8_cache_destroy(f.cache);
            continue;
        }
        assert_int_equal(status, KV8_ERR_NO_MEMORY);
        assert_null(f.cache);
        const stand_in_live live = stand_in_get_live();
        assert_int_equal(live.memory, before.memory);
        assert_int_equal(live.host_memory, before.host_memory);
    }
    assert_true(nth > 10);
    close_fixture(&f);
}

static void what_does_not_fit_is_told_at_once(void **state) {
    (void)state;
    fixture f;
    const stand_in_gpu small = {90, 132, 20000000};
    open_fixture(&f);
    kv8_stream_destroy(f.stream);
    kv8_device_close(f.device);
    stand_in_set_gpus(&small, 1);
    assert_ok(kv8_device_open(&f.device, 0));
    assert_ok(kv8_stream_create(&f.stream, f.device));
    f.options.device = f.device;
    f.options.stream = f.stream;
    f.options.num_pages = f.options.num_window_pages = 1 << 16;
    assert_refused(kv8_cache_create(&f.cache, &f.options), KV8_ERR_NO_MEMORY, "0.02 GB free");
    assert_non_null(strstr(kv8_status_message(), "cache: its pages take 0.0"));
    assert_int_equal(stand_in_get_live().memory, 0);
    close_fixture(&f);
}

/* --- calls on a cache --- */

typedef struct picture {
    kv8_cache_stats stats;
    int32_t length, num_pages[2], pages[2][8];
    float k[TOKENS * 2 * DIM];
} picture;

static picture take_picture(const fixture *f) {
    picture p;
    memset(&p, 0, sizeof p);
    p.stats.struct_size = sizeof p.stats;
    assert_ok(kv8_cache_get_stats(f->cache, &p.stats));
    p.length = seq_length(f->cache, f->seq);
    for (int32_t layer = 0; layer < 2; layer++) {
        int32_t indptr[2], last;
        assert_ok(
            kv8_cache_page_table(f->cache, layer, &f->seq, 1, indptr, p.pages[layer], 8, &last));
        p.num_pages[layer] = indptr[1];
    }
    assert_ok(kv8_cache_read(f->cache, 0, f->seq, 0, TOKENS, p.k, NULL));
    return p;
}

static int64_t fail_uses(fixture *f, const char *driver_call, kv8_status (*call)(fixture *f)) {
    const picture before = take_picture(f);
    for (int64_t nth = 1;; nth++) {
        stand_in_fail(driver_call, nth, UNKNOWN);
        const kv8_status status = call(f);
        const bool failed = stand_in_failed_call() != NULL;
        no_fault();
        if (!failed) {
            assert_int_equal(status, KV8_OK);
            return nth - 1;
        }
        assert_int_equal(status, KV8_ERR_DEVICE);
        picture after = take_picture(f);
        if (f->tail_moves) { /* into a page of its own, which is no harm */
            after.stats = before.stats;
            memcpy(after.pages, before.pages, sizeof after.pages);
        }
        assert_memory_equal(&after, &before, sizeof after);
    }
}

/* `call` fails with each use of the driver in turn, until it has no more: the cache is as it was
 * after every failure, and `undo` makes it so after a success. Returns how many uses there were. */
static int64_t fail_each(fixture *f, kv8_status (*call)(fixture *f), void (*undo)(fixture *f)) {
    static const char *const driver_calls[] = {"cuCtxPushCurrent_v2", "cuMemcpyAsync",
                                               "cuMemsetD8Async", "cuStreamSynchronize",
                                               "cuLaunchKernelEx"};
    int64_t uses = 0;
    for (size_t i = 0; i < sizeof driver_calls / sizeof driver_calls[0]; i++) {
        uses += fail_uses(f, driver_calls[i], call);
        if (undo != NULL) undo(f);
    }
    return uses;
}

static kv8_status extend(fixture *f) {
    return kv8_cache_extend(f->cache, f->seq, 1, NULL);
}
static void fork_again(fixture *f) {
    assert_ok(kv8_cache_seq_destroy(f->cache, f->seq));
    assert_ok(kv8_cache_seq_fork(f->cache, f->parent, &f->seq));
}
static kv8_status append(fixture *f) {
    static const float rows[2 * DIM];
    kv8_append append = KV8_APPEND_INIT;
    append.num_seqs = 1;
    append.seqs = &f->seq;
    append.indptr = (const int32_t[]){0, 1};
    append.src_dtype = KV8_F32;
    append.k = append.v = rows; /* read by no kernel here */
    return kv8_cache_append(f->cache, 1, &append);
}
static kv8_status read_values(fixture *f) {
    float k[2 * DIM];
    return kv8_cache_read(f->cache, 1, f->seq, TOKENS - 1, 1, k, NULL);
}
static kv8_status save(fixture *f) {
    return kv8_cache_save(f->cache, f->seq, "/tmp/kv8_cache_faults_saved");
}
static kv8_status load(fixture *f) {
    return kv8_cache_load(f->cache, f->path, &f->loaded);
}
static void unload(fixture *f) {
    assert_ok(kv8_cache_seq_destroy(f->cache, f->loaded));
}
static kv8_status count(fixture *f) {
    kv8_cache_counters counters;
    return kv8_cache_get_counters(f->cache, 1, 1, &counters);
}
static kv8_status reset(fixture *f) {
    return kv8_cache_reset_counters(f->cache);
}
static kv8_status put_tables(fixture *f) {
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    return kv8_cache_page_table_device(f->cache, 1, &f->seq, 1, &pages);
}
static kv8_status put_scales(fixture *f) {
    const float *k, *v;
    return kv8_cache_scales_device(f->cache, 1, &f->seq, 1, &k, &v);
}

/* A shared tail is copied in every layer; a copy that fails leaves it shared and adds no token. */
static void extend_adds_no_token(void **state) {
    (void)state;
    fixture f;
    open_with_cache(&f);
    f.tail_moves = true;
    assert_true(fail_each(&f, extend, fork_again) >= 2 * 2);
    assert_ok(extend(&f));
    assert_int_equal(seq_length(f.cache, f.seq), TOKENS + 1);
    assert_int_equal(seq_length(f.cache, f.parent), TOKENS);
    float k[2][TOKENS * 2 * DIM];
    assert_ok(kv8_cache_read(f.cache, 0, f.seq, 0, TOKENS, k[0], NULL));
    assert_ok(kv8_cache_read(f.cache, 0, f.parent, 0, TOKENS, k[1], NULL));
    assert_memory_equal(k[0], k[1], sizeof k[0]);
    close_fixture(&f);
}

static void calls_fail_and_succeed_again(void **state) {
    (void)state;
    fixture f;
    open_with_cache(&f);
    assert_true(fail_each(&f, read_values, NULL) >= 2);
    assert_true(fail_each(&f, save, NULL) >= 2);
    assert_true(fail_each(&f, count, NULL) >= 2);
    assert_true(fail_each(&f, reset, NULL) >= 2);
    assert_true(fail_each(&f, put_tables, NULL) >= 2);
    assert_true(fail_each(&f, put_scales, NULL) >= 2);
    assert_true(fail_each(&f, load, unload) >= 2);
    assert_ok(extend(&f)); /* a tail of its own to append to */
    assert_true(fail_each(&f, append, NULL) >= 4);
    (void)unlink("/tmp/kv8_cache_faults_saved");
    close_fixture(&f);
}

/* Counters of all layers and heads come to the host in one copy, which waits once. */
static void counters_come_at_once(void **state) {
    (void)state;
    fixture f;
    open_with_cache(&f);
    kv8_cache_counters sums;
    const int64_t copies = stand_in_num_calls("cuMemcpyAsync");
    const int64_t waits = stand_in_num_calls("cuStreamSynchronize");
    assert_ok(kv8_cache_sum_counters(f.cache, &sums));
    assert_int_equal(stand_in_num_calls("cuMemcpyAsync"), copies + 1);
    assert_int_equal(stand_in_num_calls("cuStreamSynchronize"), waits + 1);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_leaves_nothing_behind),
        cmocka_unit_test(what_does_not_fit_is_told_at_once),
        cmocka_unit_test(extend_adds_no_token),
        cmocka_unit_test(calls_fail_and_succeed_again),
        cmocka_unit_test(counters_come_at_once),
    };
    return cmocka_run_group_tests_name("cache_faults", tests, NULL, NULL);
}
