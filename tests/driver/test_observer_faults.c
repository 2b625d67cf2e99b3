/* test_observer_faults.c - an observer on a GPU whose driver fails: create leaves nothing behind,
 * whichever call is refused, and a read that fails has changed no count.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/calibrate_device.h>

#include "observe_args.h"
#include "stand_in.h"
#include "testing.h"

enum { UNKNOWN = 999, DIM = 16, ROWS = 3 };

typedef struct fixture {
    kv8_device *device;
    kv8_stream *stream;
    kv8_observer_options options;
    kv8_observer *into;
} fixture;

static void open_fixture(fixture *f) {
    stand_in_reset();
    *f = (fixture){.options = KV8_OBSERVER_OPTIONS_INIT};
    f->options.num_layers = f->options.num_kv_heads = 1;
    f->options.k_head_dim = DIM;
    assert_ok(kv8_device_open(&f->device, 0));
    assert_ok(kv8_stream_create(&f->stream, f->device));
    assert_ok(kv8_observer_create(&f->into, &f->options));
}
static void close_fixture(fixture *f) {
    stand_in_fail(NULL, 0, 0);
    kv8_observer_destroy(f->into);
    kv8_stream_destroy(f->stream);
    kv8_device_close(f->device);
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
}

/* The next add's launch writes what a kernel would: one row of head 0. */
static void count_one(const stand_in_launch *launch) {
    kv8_observe_kernel_args a;
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    a.plane[KV8_OBSERVED_K].sums[KV8_SUM_ROWS]++;
}

static uint64_t rows_of(const kv8_observer *observer) {
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(observer, KV8_OBSERVED_K, 0, 0, &seen));
    return seen.num_rows;
}

static void create_leaves_nothing_behind(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    const stand_in_live before = stand_in_get_live();
    kv8_device_observer *observer = NULL;
    int64_t nth = 1;
    for (;; nth++) {
        stand_in_fail(NULL, nth, UNKNOWN);
        const kv8_status status = kv8_device_observer_create(&observer, f.stream, &f.options);
        if (stand_in_failed_call() == NULL) break;
        if (status == KV8_OK) { /* a context popped, an argument there is not: nothing was lost */
            stand_in_fail(NULL, 0, 0);
            kv8_device_observer_destroy(observer);
            continue;
        }
        assert_int_equal(status, KV8_ERR_DEVICE);
        assert_null(observer);
        assert_int_equal(stand_in_get_live().memory, before.memory);
    }
    assert_true(nth > 10);
    stand_in_fail(NULL, 0, 0);
    kv8_device_observer_destroy(observer);
    close_fixture(&f);
}

/* A failed call is made again until none fails: one row is counted, once. */
static void a_failed_call_changes_nothing(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    kv8_device_observer *observer = NULL;
    assert_ok(kv8_device_observer_create(&observer, f.stream, &f.options));
    stand_in_on_launch(count_one);
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = ROWS;
    args.src_dtype = KV8_F32;
    args.k = f.device; /* no kernel reads it */
    for (int64_t nth = 1;; nth++) {
        stand_in_fail(NULL, nth, UNKNOWN);
        const kv8_status status = kv8_device_observer_add(observer, f.stream, 0, &args);
        if (status == KV8_OK) break;
        assert_int_equal(status, KV8_ERR_DEVICE);
        stand_in_fail(NULL, 0, 0);
        assert_ok(kv8_device_observer_read(observer, f.stream, f.into));
        assert_int_equal(rows_of(f.into), 0);
    }
    for (int64_t nth = 1;; nth++) {
        stand_in_fail(NULL, nth, UNKNOWN);
        const kv8_status status = kv8_device_observer_read(observer, f.stream, f.into);
        if (status == KV8_OK) break;
        assert_int_equal(rows_of(f.into), 0);
    }
    stand_in_fail(NULL, 0, 0);
    assert_int_equal(rows_of(f.into), 1);
    stand_in_on_launch(NULL);
    kv8_device_observer_destroy(observer);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_leaves_nothing_behind),
        cmocka_unit_test(a_failed_call_changes_nothing),
    };
    return cmocka_run_group_tests_name("observer_faults", tests, NULL, NULL);
}
