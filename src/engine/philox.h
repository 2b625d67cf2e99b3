/* philox.h - Philox4x32-10, the counter-based random numbers of the sampler (Salmon et al. 2011,
 * "Parallel random numbers: as easy as 1, 2, 3"). Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PHILOX_H
#define KV8_PHILOX_H

#include <stdint.h>

/* Ten rounds over `counter`, in place. */
static inline void kv8_philox4x32(uint32_t counter[4], uint64_t key) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xd2511f53u * counter[0];
        const uint64_t b = (uint64_t)0xcd9e8d57u * counter[2];
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ k0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ k1;
        counter[3] = (uint32_t)a;
        k0 += 0x9e3779b9u; /* the golden ratio */
        k1 += 0xbb67ae85u; /* sqrt(3) - 1 */
    }
}

#endif
