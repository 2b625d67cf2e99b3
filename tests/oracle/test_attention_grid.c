/* test_attention_grid.c - the grid no peer runs: every kernel of this machine against the f64
 * oracle on the same cache bytes, within the contract's bounds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_sweeps.h"

/* Three, whatever the machine has. Waiting costs more than these cases where other programs hold
 * the processors, so cases that gain nothing from threads run without. */
static kv8_threads *threads;

static void sweep_check(const attention_case *c, bool many_threads) {
    case_check(c, many_threads ? threads : NULL);
}

static int start_threads(void **state) {
    (void)state;
    return kv8_threads_create(&threads, 3) == KV8_OK ? 0 : -1;
}
static int stop_threads(void **state) {
    (void)state;
    kv8_threads_destroy(threads);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {SWEEPS};
    return cmocka_run_group_tests(tests, start_threads, stop_threads);
}
