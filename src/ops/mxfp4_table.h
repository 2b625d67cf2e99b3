/* mxfp4_table.h - the sixteen e2m1 values under each of the 256 scales, as f32: 16 KiB, of which a
 * model uses a few rows. A vector lookup in a row gives finished weights.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MXFP4_TABLE_H
#define KV8_MXFP4_TABLE_H

#include <stdint.h>

/* Bits of 2^(e-127) (m = 0) or 1.5 times that (m = 0x400000): subnormal from e = 0 down, infinite
 * from 255 on. The inner choices keep shifts in range where the outer one takes another branch. */
#define MXFP4_F32(e, m)                                     \
    ((e) >= 255 ? 0x7f800000u                               \
     : (e) >= 1 ? (uint32_t)((e) < 1 ? 1 : (e)) << 23 | (m) \
                : (0x800000u | (m)) >> ((e) < 1 ? 1 - (e) : 0))
/* A scale of 255 is NaN, whatever the code. */
#define MXFP4_VALUE(s, e, m) ((s) == 255 ? 0x7fc00000u : MXFP4_F32(e, m))
/* 0 .5 1 1.5 2 3 4 6 */
#define MXFP4_HALF(s, sign)                                                              \
    (sign) | ((s) == 255 ? 0x7fc00000u : 0u), (sign) | MXFP4_VALUE(s, (s)-1, 0),         \
        (sign) | MXFP4_VALUE(s, s, 0), (sign) | MXFP4_VALUE(s, s, 0x400000),             \
        (sign) | MXFP4_VALUE(s, (s) + 1, 0), (sign) | MXFP4_VALUE(s, (s) + 1, 0x400000), \
        (sign) | MXFP4_VALUE(s, (s) + 2, 0), (sign) | MXFP4_VALUE(s, (s) + 2, 0x400000)
#define MXFP4_1(s) \
    { MXFP4_HALF(s, 0u), MXFP4_HALF(s, 0x80000000u) }
#define MXFP4_4(s)  MXFP4_1(s), MXFP4_1((s) + 1), MXFP4_1((s) + 2), MXFP4_1((s) + 3)
#define MXFP4_16(s) MXFP4_4(s), MXFP4_4((s) + 4), MXFP4_4((s) + 8), MXFP4_4((s) + 12)
#define MXFP4_64(s) MXFP4_16(s), MXFP4_16((s) + 16), MXFP4_16((s) + 32), MXFP4_16((s) + 48)
static const _Alignas(64) uint32_t kv8_mxfp4_bits[256][16] = {MXFP4_64(0), MXFP4_64(64),
                                                              MXFP4_64(128), MXFP4_64(192)};
#undef MXFP4_F32
#undef MXFP4_VALUE
#undef MXFP4_HALF
#undef MXFP4_1
#undef MXFP4_4
#undef MXFP4_16
#undef MXFP4_64

#endif
