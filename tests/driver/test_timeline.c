/* test_timeline.c - a stream's timeline on the stand-in driver: all that a stream was given is
 * told, however much of it came between two readings.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "device_impl.h"
#include "stand_in.h"
#include "testing.h"

enum { MANY = 10000 };

static void count_fills(void *cookie, const char *scope, const char *name, double seconds) {
    int32_t *const num = cookie;
    (void)scope;
    assert_true(seconds >= 0);
    *num += name != NULL && strcmp(name, "fill") == 0;
}

static void a_timeline_holds_what_comes(void **state) {
    (void)state;
    kv8_device *device = NULL;
    kv8_stream *stream = NULL;
    kv8_timeline *timeline = NULL;
    void *memory = NULL;
    stand_in_reset();
    assert_ok(kv8_device_open(&device, 0));
    assert_ok(kv8_stream_create(&stream, device));
    assert_ok(kv8_device_alloc(device, 64, &memory));
    assert_ok(kv8_timeline_create(&timeline, device, false));
    kv8_stream_set_timeline(stream, timeline);
    for (int32_t num = 1; num <= MANY; num *= 10) {
        int32_t told = 0;
        for (int32_t i = 0; i < num; i++) assert_ok(kv8_stream_fill(stream, memory, 0, 64));
        assert_ok(kv8_stream_synchronize(stream));
        assert_int_equal(kv8_timeline_has_room(timeline), num <= 100);
        assert_ok(kv8_timeline_read(timeline, count_fills, &told));
        assert_int_equal(told, num);
        assert_true(kv8_timeline_has_room(timeline));
    }
    kv8_stream_set_timeline(stream, NULL);
    kv8_timeline_destroy(timeline);
    kv8_device_free(device, memory);
    kv8_stream_destroy(stream);
    kv8_device_close(device);
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_timeline_holds_what_comes)};
    return cmocka_run_group_tests_name("timeline", tests, NULL, NULL);
}
