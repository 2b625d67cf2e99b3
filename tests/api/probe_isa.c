/* probe_isa.c - exit status 0 when this machine and build have the rung that KV8_ISA names: for
 * scripts that walk the ladder.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/machine.h>

int main(void) {
    kv8_isa isa;
    return kv8_machine_isa(&isa) != KV8_OK;
}
