/* test_old_driver.c - a driver that lacks a symbol: refused by the symbol's name, at every call.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/device.h>

#include "testing.h"

int cuInit(unsigned flags); /* so that the program is linked with the driver's library */

static void an_old_driver_is_refused_by_what_it_lacks(void **state) {
    (void)state;
    assert_int_equal(cuInit(0), 0);
    for (int i = 0; i < 2; i++) {
        int32_t count = 7;
        kv8_device *device = (kv8_device *)1;
        assert_refused(kv8_device_count(&count), KV8_ERR_NOT_FOUND,
                       "the NVIDIA driver is too old: libcuda.so.1 has no cuGetErrorString");
        assert_int_equal(count, 0);
        assert_refused(kv8_device_open(&device, 0), KV8_ERR_NOT_FOUND, "CUDA 11.8 or later");
        assert_null(device);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_old_driver_is_refused_by_what_it_lacks)};
    return cmocka_run_group_tests_name("old_driver", tests, NULL, NULL);
}
