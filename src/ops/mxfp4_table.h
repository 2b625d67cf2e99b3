/* mxfp4_table.h - the sixteen e2m1 values under each of the 256 scales, as f32: 16 KiB, of which a
 * model uses a few rows. A vector lookup in a row gives finished weights. Only the upper two bytes
 * of a value are ever other than 0: rungs that look up bytes have a table of those two.
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
/* Code c: a sign, then 0 .5 1 1.5 2 3 4 6. A scale of 255 is NaN, whatever the code. */
#define MXFP4_SIGN(c) ((c) >= 8 ? 0x80000000u : 0u)
#define MXFP4_SIZE(s, c)      \
    ((s) == 255 ? 0x7fc00000u \
     : (c) == 0 ? 0u          \
                : MXFP4_F32((s) + (c) / 2 - 1, (c) > 1 && (c) % 2 != 0 ? 0x400000u : 0u))
#define MXFP4_BITS(s, c) (MXFP4_SIGN(c) | MXFP4_SIZE(s, (c) % 8))
#define MXFP4_TOP(s, c)  (MXFP4_BITS(s, c) >> 24)
#define MXFP4_NEXT(s, c) (MXFP4_BITS(s, c) >> 16 & 255)

#define MXFP4_CODES(of, s)                                                                        \
    {                                                                                             \
        of(s, 0), of(s, 1), of(s, 2), of(s, 3), of(s, 4), of(s, 5), of(s, 6), of(s, 7), of(s, 8), \
            of(s, 9), of(s, 10), of(s, 11), of(s, 12), of(s, 13), of(s, 14), of(s, 15)            \
    }
#define MXFP4_VALUES(s) MXFP4_CODES(MXFP4_BITS, s)
#define MXFP4_BYTES(s) \
    { MXFP4_CODES(MXFP4_TOP, s), MXFP4_CODES(MXFP4_NEXT, s) }
#define MXFP4_4(row, s) row(s), row((s) + 1), row((s) + 2), row((s) + 3)
#define MXFP4_16(row, s) \
    MXFP4_4(row, s), MXFP4_4(row, (s) + 4), MXFP4_4(row, (s) + 8), MXFP4_4(row, (s) + 12)
#define MXFP4_64(row, s) \
    MXFP4_16(row, s), MXFP4_16(row, (s) + 16), MXFP4_16(row, (s) + 32), MXFP4_16(row, (s) + 48)
#define MXFP4_256(row) MXFP4_64(row, 0), MXFP4_64(row, 64), MXFP4_64(row, 128), MXFP4_64(row, 192)

static const _Alignas(64) uint32_t kv8_mxfp4_bits[256][16] = {MXFP4_256(MXFP4_VALUES)};
/* [scale][0]: the topmost bytes; [scale][1]: those below. */
static const _Alignas(64) uint8_t kv8_mxfp4_bytes[256][2][16] = {MXFP4_256(MXFP4_BYTES)};

#undef MXFP4_F32
#undef MXFP4_SIGN
#undef MXFP4_SIZE
#undef MXFP4_BITS
#undef MXFP4_TOP
#undef MXFP4_NEXT
#undef MXFP4_CODES
#undef MXFP4_VALUES
#undef MXFP4_BYTES
#undef MXFP4_4
#undef MXFP4_16
#undef MXFP4_64
#undef MXFP4_256

#endif
