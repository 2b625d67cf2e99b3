/* probe_isa.c - prints the rung that kernels take here, the best unless KV8_ISA names one, and
 * exits with 0; with 1 when this machine or build lacks the one named: for scripts that walk rungs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/machine.h>

#include <stdio.h>

int main(void) {
    kv8_isa isa;
    if (kv8_machine_isa(&isa) != KV8_OK) {
        return 1;
    }
    puts(kv8_isa_name(isa));
    return 0;
}
