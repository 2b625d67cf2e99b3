/* consumer_kv8.c - the smallest program that uses an installed kv8: prints the version and whether
 * this machine has a rung (it always has scalar).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/kv8.h>
#include <stdio.h>

int main(void) {
    return printf("%s %d\n", kv8_version(), kv8_machine_has_isa(KV8_ISA_SCALAR)) < 0;
}
