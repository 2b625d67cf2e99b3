/* e8m0_table.h - the 256 scales of MXFP4 as f32, so that a kernel's scale is one load: 2^(i-127),
 * 0 as the subnormal 2^-127, 255 as NaN.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_E8M0_TABLE_H
#define KV8_E8M0_TABLE_H

#include <stdint.h>
#include <string.h>

#define E8M0_1(i)  ((i) == 0 ? 0x00400000u : (i) == 255 ? 0x7fc00000u : (uint32_t)(i) << 23)
#define E8M0_4(i)  E8M0_1(i), E8M0_1((i) + 1), E8M0_1((i) + 2), E8M0_1((i) + 3)
#define E8M0_16(i) E8M0_4(i), E8M0_4((i) + 4), E8M0_4((i) + 8), E8M0_4((i) + 12)
#define E8M0_64(i) E8M0_16(i), E8M0_16((i) + 16), E8M0_16((i) + 32), E8M0_16((i) + 48)
static const uint32_t kv8_e8m0_bits[256] = {E8M0_64(0), E8M0_64(64), E8M0_64(128), E8M0_64(192)};
#undef E8M0_1
#undef E8M0_4
#undef E8M0_16
#undef E8M0_64

static inline float kv8_e8m0_load(uint8_t code) {
    float value;
    memcpy(&value, &kv8_e8m0_bits[code], sizeof value);
    return value;
}

#endif
